"""Kernels for GPUs in Triton: used for CUDA tensors where Triton is installed, as torch for Linux brings it.

The environment variable ``PYRO_NNGP_TRITON=0`` switches them off, for torch operations; it is read at every call.
"""

import functools
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

__all__ = ["enabled", "installed"]

_OLDEST = 3, 6  # with it the kernels are tested and compiled


def enabled() -> bool:
    """Whether Triton is installed and not switched off."""
    return os.environ.get("PYRO_NNGP_TRITON", "1") != "0" and installed()


@functools.cache
def installed() -> bool:
    """Whether there is a Triton to import, at least 3.6."""
    if find_spec("triton") is None:
        return False
    try:
        return tuple(map(int, version("triton").split(".")[:2])) >= _OLDEST
    except PackageNotFoundError:
        return False
