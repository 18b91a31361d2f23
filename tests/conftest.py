"""Fixtures of every test, and the run-time check of the package's shape annotations.

The import hook has to be installed before the package is first imported, so this file imports nothing of it.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, get_args

# Tests are small and run side by side: threads would wait for each other. Read when NumPy, torch and FAISS are loaded.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import jaxtyping
import pyro
import pytest
import torch
from beartype import BeartypeConf, beartype


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


def has_shapes(annotation: Any) -> bool:
    """Whether an annotation contains an array type of jaxtyping."""
    array = isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
    return array or any(has_shapes(part) for part in get_args(annotation))


def jaxtyped_where_shapes_are(*, typechecker: Any) -> Callable:
    """Stand in for `jaxtyping.jaxtyped` and leave functions without shapes as they are.

    They are 96 % of the calls, mypy checks their types, and the wrapper made the suite three times as slow.
    """
    check = jaxtyped(typechecker=typechecker)

    def decorate(decorated: Any) -> Any:
        annotations = getattr(decorated, "__annotations__", {}).values()
        plain = isinstance(decorated, FunctionType) and not any(has_shapes(each) for each in annotations)
        return decorated if plain else check(decorated)

    return decorate


jaxtyped, jaxtyping.jaxtyped = jaxtyping.jaxtyped, jaxtyped_where_shapes_are
jaxtyping.install_import_hook("pyro_nngp", f"sys.modules[{__name__!r}].checked_after_return")


torch.set_warn_always(True)  # else a warning fails only the first test of a process that meets it


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
