"""Memory in large pages, and freed memory that is kept."""

import mmap
import platform
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from pyro_nngp import _memory as memory


class Refusing(mmap.mmap):
    def madvise(self, *_):
        raise OSError("not built with large pages")


@pytest.mark.parametrize("block", [mmap.mmap, Refusing])
@pytest.mark.parametrize("shape", [(3, 5), (2**20 + 3, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_empty_is_memory_of_its_own_to_write_on(dtype, shape, block, monkeypatch):
    monkeypatch.setattr(mmap, "mmap", block)
    first, second = memory.empty(shape, dtype), memory.empty(shape, dtype)
    first.fill_(1)
    second.fill_(2)
    assert (first.shape, first.dtype, first.is_contiguous()) == (shape, dtype, True)
    assert (first == 1).all()
    assert first.requires_grad_().square().sum().backward() is None
    torch.testing.assert_close(first.grad, torch.full(shape, 2, dtype=dtype))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without large pages")
def test_large_pages_are_asked_for_only_where_they_pay(monkeypatch):
    asked = []

    class Watched(mmap.mmap):
        def madvise(self, option):
            asked.append(option)

    monkeypatch.setattr(mmap, "mmap", Watched)
    memory.empty((2**20,), torch.float32)
    memory.empty((2**21,), torch.float32, "meta")
    assert asked == []
    memory.empty((2**21,), torch.float32)
    assert asked == [mmap.MADV_HUGEPAGE]


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without large pages")
def test_memory_is_reused_once_no_tensor_has_it():
    others = [memory.reused(2**23) for _ in range(2**28 // 2**23 + 1)]  # what other tests have left
    first = memory.reused(2**23 + 5)
    at, part = first.data_ptr(), first[5:]
    del first
    second = memory.reused(2**23 + 5)
    part.fill_(1)
    second.fill_(2)
    assert (part == 1).all()
    del part
    assert memory.reused(2**23).data_ptr() == at  # a block of about the size
    assert len({other.data_ptr() for other in others}) == len(others)
    large = memory.reused(2**24 + 2)
    assert large.data_ptr() != at
    del large, second
    most, more = memory.reused(2**28), memory.reused(2**28 + 1)  # beyond 256 MB nothing is kept
    assert (most.data_ptr(), len(more)) != (at, 2**28)
    most_at = most.data_ptr()
    del most, more
    assert memory.reused(2**28).data_ptr() == most_at
    assert not memory.reused(2**23).any()  # what was kept has made way: fresh memory is zero


FAULTS = """
import resource, torch
from pyro_nngp import _memory as memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        parts = [torch.ones(2**18) for _ in range(16)]
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
memory.keep_freed()
faults()
print(before, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_freed_memory_is_used_again():
    before, after = map(
        int, subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True).stdout.split()
    )
    assert before > 2_000
    assert after < before / 10


HUGE = 2**50


@pytest.mark.parametrize(
    ("fails", "size"),
    [
        (lambda: torch.empty(HUGE), "4.19e+06 GiB in one piece"),
        (lambda: np.empty(HUGE), "8.00 PiB in one piece"),
        (lambda: mmap.mmap(-1, 2**55), "an allocation that failed"),
        (lambda: bytearray(2**60), "an allocation that failed"),
    ],
)
def test_every_allocator_that_fails_gives_one_sentence_with_size_and_cure(fails, size):
    rest = f"expected the computation to fit into the memory that is left, got {re.escape(size)}. Ask for less."
    with pytest.raises(MemoryError, match=f"^outer: {rest}$"), memory.memory_errors("outer", "Ask for less."):
        fails()
    with (
        pytest.raises(MemoryError, match=f"^inner: {rest}$"),
        memory.memory_errors("outer", "No."),
        memory.memory_errors("inner", "Ask for less."),
    ):
        fails()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(2, "no file"), ValueError("other")])
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as found, memory.memory_errors("here", "Ask for less."):
        raise error
    assert found.value is error
