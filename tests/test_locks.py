"""Shared methods run side by side, exclusive ones alone, whatever calls what."""

import copy
import os
import pickle
import threading

import pytest

from pyro_nngp import _locks
from pyro_nngp._locks import exclusive, shared


class Owner:
    def __init__(self):
        self.inside, self.log = 0, []

    @shared
    def read(self, meet=None):
        self.inside += 1
        if meet is not None:
            meet.wait(5)
        self.read_again()
        self.inside -= 1

    @shared
    def read_again(self):
        self.log.append("read")

    @exclusive
    def write(self, error=None):
        assert self.inside == 0
        self.read()
        self.write_again()
        if error is not None:
            raise error

    @exclusive
    def write_again(self):
        self.log.append("write")


def run(*calls):
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def ended(threads):
    for thread in threads:
        thread.join(5)
    return not any(thread.is_alive() for thread in threads)


def test_readers_meet_and_a_writer_waits_for_them():
    owner, meet = Owner(), threading.Barrier(3)
    readers = run(lambda: owner.read(meet), lambda: owner.read(meet))
    while owner.inside < 2:
        pass
    writer = run(owner.write)
    writer[0].join(0.05)
    assert owner.log == []  # it waits for both
    later = run(owner.read)
    later[0].join(0.05)
    assert owner.log == []  # and a new reader for it
    meet.wait(5)
    assert ended([*readers, *writer, *later])
    assert owner.log == ["read", "read", "read", "write", "read"]


def test_an_error_lets_others_in():
    owner = Owner()
    with pytest.raises(ValueError, match="mine"):
        owner.write(ValueError("mine"))
    assert ended(run(owner.read, owner.write))


def test_copies_and_forks_begin_anew():
    owner, meet = Owner(), threading.Barrier(2)
    reader = run(lambda: owner.read(meet))
    while not owner.inside:
        pass
    other = pickle.loads(pickle.dumps(copy.copy(owner)))
    other.inside = 0
    assert ended(run(other.write))
    child = os.fork()
    if child == 0:
        owner.inside = 0
        owner.write()
        os._exit(7)
    meet.wait(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert ended(reader)


def test_a_new_reader_that_a_present_one_waits_for_is_let_in(monkeypatch):
    monkeypatch.setattr(_locks, "PATIENCE", 0.1)
    owner, meet = Owner(), threading.Barrier(2)
    reader = run(lambda: owner.read(meet))
    while not owner.inside:
        pass
    writer = run(owner.write)
    writer[0].join(0.05)
    assert ended([*run(lambda: owner.read(meet)), *reader, *writer])
    assert owner.log == ["read", "read", "read", "write"]
