"""Parameters of modules as param sites of a Pyro program whose values no store holds.

Pyro's optimizers take settings by name: the name of a parameter is registered with Pyro's store, its value is not.

Cost: O(1) per parameter.
"""

import re
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, cast

import pyro
import torch
from pyro.nn import PyroModule
from pyro.nn.module import _make_name
from pyro.params.param_store import param_with_module_name
from pyro.poutine import runtime
from pyro.poutine.runtime import effectful
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor, nn
from torch.distributions import constraints, transform_to

from pyro_nngp._checks import fail


def parameter(module: nn.Module, attribute: str) -> Any:
    """The value of a parameter within its constraint; its `unconstrained` refers to the tensor behind it."""
    constrained = module.__dict__.get("_pyro_params", {})
    free: Any = module._parameters[f"{attribute}_unconstrained" if attribute in constrained else attribute]
    if free is None:
        return free
    value: Any = transform_to(constrained[attribute][0])(free) if attribute in constrained else free
    value.unconstrained = weakref.ref(free)
    return value


def parameter_site(module: Any, attribute: str, name: str | None = None) -> Any:
    """The value of a parameter as a param site of the present program, if there is one.

    Args:
        module: the module that holds it.
        attribute: its attribute.
        name: full name of the site; None is that by which the module reads its attributes.
    """
    value: Any = parameter(module, attribute)
    if value is None:
        return value
    name = _make_name(module._pyro_name, attribute) if name is None else name
    constraint, event_dim = module.__dict__.get("_pyro_params", {}).get(attribute, (constraints.real, None))
    _register(module, value.unconstrained(), name)
    if not runtime.am_i_wrapped():
        return value
    if torch._C._get_tracing_state() is not None:
        _fail_jit(module)
    _check_recorded(module, value.unconstrained(), name)
    return effectful(type="param")(lambda *_, **__: value)(name, constraint=constraint, event_dim=event_dim, name=name)


def parameter_sites(owner: PyroModule, part: str) -> None:
    """All parameters of a part that is a module of plain torch, as param sites."""
    name, module = _make_name(owner._pyro_name, part), cast(Any, owner._modules[part])
    for path, inner in module.named_modules():
        for attribute in inner._parameters:
            parameter_site(inner, attribute, param_with_module_name(name, _make_name(path, attribute)))


def sampled_value(module: PyroModule, attribute: str, read: Callable[[str], Any]) -> Any:
    """The value of an attribute with a prior, as `read` of a PyroModule returns it."""
    try:
        return read(attribute)
    except RuntimeError as error:
        repeated = re.match(r"Multiple sample sites named '(.*?)'", str(error))
        if repeated is None:
            raise
        _fail_twice(module, [repeated[1]], error)


def _register(module: nn.Module, free: Tensor, name: str) -> None:
    """Let Pyro's optimizers know a parameter's name for as long as the module exists."""
    names = pyro.get_param_store()._param_to_name
    if names.get(free) != name:
        _refuse_jit(module)
        names[free] = name
        weakref.finalize(module, _invalidate, free).atexit = False


def _invalidate(free: Tensor) -> None:
    pyro.get_param_store()._param_to_name.pop(free, None)


def _refuse_jit(module: nn.Module) -> None:
    """Raise within Pyro's compiled functions, which look for all parameters in Pyro's store."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "pyro.ops.jit":
            _fail_jit(module)
        frame = frame.f_back


def _fail_jit(module: nn.Module) -> NoReturn:
    cure, where = "Take Trace_ELBO in place of JitTrace_ELBO, or jit_compile=False.", type(module).__name__
    fail(where, "a program", "that is not traced by torch.jit", "one that is", cure, RuntimeError)


def _check_recorded(module: nn.Module, free: Tensor, name: str) -> None:
    """Raise if the program has recorded another parameter of this name, of a module that still exists."""
    known = pyro.get_param_store()._param_to_name
    for handler in runtime._PYRO_STACK:
        site = handler.trace.nodes.get(name) if isinstance(handler, TraceMessenger) else None
        if site is None or site["type"] != "param":
            continue
        value = site["value"]
        other = value.unconstrained() if hasattr(value, "unconstrained") else value
        if other is not free and other is not None and other in known:
            _fail_twice(module, [name])


def _fail_twice(module: nn.Module, names: list[str], cause: Exception | None = None) -> NoReturn:
    """Raise: two modules of one program use the same name, or one module has read its priors twice."""
    where, arg, expectation = type(module).__name__, "sites and parameters", "with names that the program has not used"
    cure = "Name one of the two: module.named('trend'). Bind a shared kernel once: cov = kernel.bind()."
    fail(where, arg, expectation, f"{names} twice", cure, RuntimeError, cause)


__all__ = ["parameter", "parameter_site", "parameter_sites", "sampled_value"]
