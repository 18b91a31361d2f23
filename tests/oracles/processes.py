"""Several Gloo processes on this machine, started by forking the test's process, and limits of this one."""

import contextlib
import multiprocessing
import os
import resource
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

_SECONDS = 60


def on_processes(count, folder, work, *args):
    """What ``work(*args)`` returns on each of `count` processes of one group; `folder` is empty.

    Raises an error with the tracebacks of the processes that fail.
    """
    context = multiprocessing.get_context("fork")
    parts = [context.Process(target=_run, args=(rank, count, folder, work, args)) for rank in range(count)]
    for part in parts:
        part.start()
    for part in parts:
        part.join(_SECONDS)
    for part in parts:
        part.kill()
    failed = [file.read_text() for file in sorted(folder.glob("error*"))]
    assert not failed, "\n".join(failed)
    return [torch.load(folder / f"result{rank}", weights_only=True) for rank in range(count)]


def check_same(found, expected, tolerance):
    """Whether the values that two runs return have the same names, and agree to a tolerance."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@contextlib.contextmanager
def files_of_at_most(size):
    """Writes beyond this number of bytes in a file fail within this block, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _run(rank, count, folder, work, args):
    try:
        torch.set_num_threads(1)
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=count, timeout=timedelta(0, 30))
        torch.save(work(*args), folder / f"result{rank}")
        dist.barrier()
    except BaseException:
        (folder / f"error{rank}").write_text(f"process {rank}: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)
