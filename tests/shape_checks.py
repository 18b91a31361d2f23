"""Run-time check of the package's shape annotations while the tests run; nothing else knows of it.

`install` is called before the package is first imported, so this file imports nothing of it. From then on each function
of the package whose annotations contain shapes is checked after a call has returned: a test fails whose arguments or
result do not honor them. Calls with the same shapes and types are checked once, so that the tests stay quick.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from threading import local
from types import FunctionType
from typing import Any, get_args

import jaxtyping
import numpy as np
import torch
from beartype import BeartypeConf, beartype

PASSED: defaultdict[tuple[str, str], set[Any]] = defaultdict(set)  # calls of each function that passed their check
jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Check the annotations of the package from here on."""
    jaxtyping.jaxtyped = jaxtyped_where_shapes_are
    jaxtyping.install_import_hook("pyro_nngp", f"{__name__}.checked_after_return")


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


def visible(value: Any) -> Any:
    """The part of a value that annotations check: shape and dtype of an array, parts of a container, else the type."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter or kind is np.ndarray:
        return kind, value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return kind, *map(visible, value)
    if isinstance(value, dict):
        return kind, *((key, visible(each)) for key, each in value.items())
    if isinstance(value, torch.Tensor):
        return kind, value.shape, value.dtype
    return value if kind is str else kind


def checked_once(kind: type, check: Callable) -> type:
    """Check the fields of a dataclass where arguments of these shapes and types have not made one yet."""
    init = kind.__init__
    kind = check(kind)
    if (checked := kind.__init__) is init:
        return kind
    passed = PASSED[kind.__module__, kind.__qualname__]

    @wraps(init)
    def limited(self: Any, *args: Any, **kwargs: Any) -> None:
        if (call := visible((args, kwargs))) in passed:
            init(self, *args, **kwargs)
        else:
            checked(self, *args, **kwargs)
            passed.add(call)

    kind.__init__ = limited
    return kind


def key_of(function: FunctionType, shaped: set[str]) -> Callable[[tuple, dict, Any], Any]:
    """Function that returns what the annotations with shapes check of a call, and of nothing else."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if not shaped <= {"return", *names}:  # *args or **kwargs
        return lambda args, kwargs, out: visible((args, kwargs, out))
    returns = "return" in shaped
    at = [number for number, name in enumerate(names[: code.co_argcount]) if name in shaped]

    def key(args: tuple, kwargs: dict, out: Any) -> tuple:
        seen = [visible(args[number]) for number in at if number < len(args)]
        seen += [(name, visible(value)) for name, value in kwargs.items() if name in shaped]
        return (*seen, visible(out)) if returns else tuple(seen)

    return key


def jaxtyped_where_shapes_are(*, typechecker: Any) -> Callable:
    """Replacement for `jaxtyping.jaxtyped`: check only functions with shapes, and what is alike only once.

    Others are 96 % of the calls, and mypy checks their types. Calls that pass the same shapes and types where the
    annotations contain shapes are alike.
    """

    def decorate(decorated: Any) -> Any:
        if isinstance(decorated, type):
            return checked_once(decorated, jaxtyped(typechecker=typechecker))
        if not isinstance(decorated, FunctionType):
            return jaxtyped(typechecker=typechecker)(decorated)
        shaped = {name for name, annotation in decorated.__annotations__.items() if has_shapes(annotation)}
        if not shaped:
            return decorated
        passed = PASSED[decorated.__code__.co_filename, str(decorated.__code__.co_firstlineno)]
        key = key_of(decorated, shaped)
        here = local()
        checked: list[Callable] = []  # made at the first call, since most test files need few of them

        def result(*_: Any, **__: Any) -> Any:
            return vars(here).pop("result")

        @wraps(decorated)
        def limited(*args: Any, **kwargs: Any) -> Any:
            out = decorated(*args, **kwargs)
            if (call := key(args, kwargs, out)) not in passed:
                if not checked:  # where the names of the annotations are known
                    known = FunctionType(result.__code__, decorated.__globals__, closure=result.__closure__)
                    checked.append(jaxtyped(typechecker=typechecker)(wraps(decorated)(known)))
                here.result = out
                checked[0](*args, **kwargs)
                passed.add(call)
            return out

        return limited

    return decorate
