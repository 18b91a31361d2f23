"""Set-up of a test session, for speed and equal conditions; a test needs to know nothing of it.

Importing this module sets the number of threads, so that it comes before NumPy, torch and FAISS. The two hooks are
pytest's, which `conftest.py` passes on.
"""

import gc
import os
import warnings

# Tests are small and run side by side: threads would wait for each other.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import shape_checks
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which torch does not do here

shape_checks.install()
torch.set_warn_always(True)  # else a warning fails only the first test of a process that meets it

gc.disable()  # imports and collection make many objects and leave little behind: an eighth of the time of a run


def pytest_collection_finish() -> None:
    """Collect garbage from here on, and only that of the tests."""
    gc.freeze()
    gc.enable()


def pytest_collection() -> None:
    """Load the compiled library first, since a warning that there is none would fail whichever test comes first."""
    from pyro_nngp import native

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native.library()
