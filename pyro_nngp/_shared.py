"""Results that a guide and the model of one method share within one evaluation of an ELBO.

q(f | u) is p(f | u) in all methods here, so both need the same conditionals.
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
    """``compute()``, or its earlier result for this key within the present :func:`shared_results` block."""
    results = _RESULTS.get()
    if results is None:
        return compute()
    if key not in results:
        results[key] = compute()
    return results[key]
