"""Fixtures of every test, and the run-time check of the package's shape annotations.

The import hook has to be installed before the package is first imported, so this file imports nothing of it.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

# Tests are small and run side by side: threads would wait for each other. Read when NumPy, torch and FAISS are loaded.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import pyro
import pytest
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook


def checked_after_return(signature: Callable) -> Callable:
    """Check arguments and result together once a call has returned; let a call that raises raise its own error.

    jaxtyping passes two stand-ins for each function: one for the arguments alone, whose result is `Any`, run before
    the call, and one for arguments and result, run after it. Leaving the first unchecked keeps the package's own
    messages for wrong input testable, while input that the annotations forbid and no message catches still fails.
    """
    if signature.__annotations__.get("return") is Any:
        return signature
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Pyro's distributions derive from typing.Callable
        return beartype(conf=BeartypeConf(is_pep484_tower=True))(signature)  # an int passes for a float, as for mypy


install_import_hook("pyro_nngp", f"sys.modules[{__name__!r}].checked_after_return")


def pytest_collection() -> None:
    """Load the compiled library first, since a warning that there is none would fail whichever test comes first."""
    from pyro_nngp import native

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native.library()


@pytest.fixture(autouse=True)
def fresh_pyro() -> Iterator[None]:
    """Give each test an empty parameter store and the same random state."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    pyro.clear_param_store()
