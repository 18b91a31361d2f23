"""Kernels for GPUs in Triton: used for CUDA tensors where Triton is installed, as torch for Linux brings it."""

import functools
import os
from importlib.util import find_spec


def wanted() -> bool:
    """Whether Triton is installed and not switched off by ``PYRO_NNGP_TRITON=0``, which is read at every call."""
    return os.environ.get("PYRO_NNGP_TRITON", "1") != "0" and installed()


@functools.cache
def installed() -> bool:
    """Whether there is a Triton to import."""
    return find_spec("triton") is not None
