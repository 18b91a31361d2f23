"""Results that a guide leaves for the model of the same method, while an ELBO evaluates one after the other.

q(f | u) is p(f | u) in all methods here: what both need is computed once per evaluation.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
_RESULTS: ContextVar[dict[Hashable, Any] | None] = ContextVar("results", default=None)


@contextmanager
def shared_results() -> Iterator[None]:
    """Keep the results of :func:`shared` within this block, in this thread; parameters must not change there."""
    token = _RESULTS.set({})
    try:
        yield
    finally:
        _RESULTS.reset(token)


def shared(key: Hashable, compute: Callable[[], T]) -> T:
    """``compute()``, or what it has returned for this key in the block of :func:`shared_results` at hand."""
    results = _RESULTS.get()
    if results is None:
        return compute()
    if key not in results:
        results[key] = compute()
    return results[key]
