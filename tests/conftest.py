"""Fixtures of every test, and the run-time check of the package's shape annotations.

The import hook has to be installed before the package is first imported, so this file imports nothing of it.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from types import FunctionType
from typing import Any, get_args

# Tests are small and run side by side: threads would wait for each other. Read when NumPy, torch and FAISS are loaded.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import jaxtyping
import pyro
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which torch does not do here
from beartype import BeartypeConf, beartype


def checked_after_return(signature: Callable) -> Callable:
    """Check arguments and result together once a call has returned; let a call that raises raise its own error.

    jaxtyping passes two substitutes for each function: one for the arguments alone, whose result is `Any`, run before
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
    """Replacement for `jaxtyping.jaxtyped`: check only functions with shapes, and each at its first calls in a test.

    Others are 96 % of the calls, and mypy checks their types. A loop of training makes the same calls at each step.
    """
    check = jaxtyped(typechecker=typechecker)

    def decorate(decorated: Any) -> Any:
        if not isinstance(decorated, FunctionType):
            return check(decorated)
        if not any(has_shapes(each) for each in decorated.__annotations__.values()):
            return decorated
        checked: list[Callable] = []  # made at the first call, since most test files need few of them

        @wraps(decorated)
        def limited(*args: Any, **kwargs: Any) -> Any:
            if CHECKS[decorated] == MAX_CHECKS:
                return decorated(*args, **kwargs)
            CHECKS[decorated] += 1
            if not checked:
                checked.append(check(decorated))
            return checked[0](*args, **kwargs)

        return limited

    return decorate


CHECKS: Counter[Callable] = Counter()  # number of checked calls of each function in the present test
MAX_CHECKS = 5
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
    """Give each test an empty parameter store, the same random state, and all checks of shapes."""
    CHECKS.clear()
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    pyro.clear_param_store()
