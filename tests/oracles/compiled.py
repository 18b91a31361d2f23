"""The compiled library in tests: whether this installation has it, and the instruction sets that it can use here."""

import pytest

from pyro_nngp import native

needs_library = pytest.mark.skipif(native.library() is None, reason="this installation has no compiled code")
LEVELS = range(native.library().nn_levels() if native.library() else 0)
