"""The base of every model as a Pyro module: a private parameter store, and copies with fixed hyperparameters."""

import copy
import functools
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, cast

import pyro
import torch
from pyro.nn import PyroModule, pyro_method
from pyro.poutine import runtime
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp.hyperparameters.description import describe
from pyro_nngp.hyperparameters.positive import Unset
from pyro_nngp.hyperparameters.scaled import Scaled
from pyro_nngp.hyperparameters.threads import ThreadContext


class GPModule(PyroModule):
    """A PyroModule with a private param store.

    Pyro keeps parameters by name in one global store, where two models of one class would share theirs. Methods marked
    with :func:`pyro_entry` run inside a private store instead. The parameters are those of the module, so
    ``parameters()``, ``state_dict()``, ``SVI`` and ``torch.optim`` all see the same tensors. What a user's function
    creates by ``pyro.param`` is not part of the module, and only ``SVI`` sees it. Inside a larger PyroModule the
    parent's store and names apply.
    """

    def __init__(self) -> None:
        super().__init__()
        self._store: dict[str, dict] = {"_params": {}, "_constraints": {}, "_param_to_name": {}}
        self._pyro_context = ThreadContext()
        self._unset: dict[str, Tensor] = {}  # placeholder values of hyperparameters that were left unset

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._pyro_context.active:
            return super().__call__(*args, **kwargs)
        with own_param_store(self):
            return super().__call__(*args, **kwargs)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a submodule, even one that has run on its own before."""
        if module is not None:
            release(module)
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a number or a tensor becomes the new value of the parameter of that name.

        Raises:
            ValueError: if the value is not within the constraint of the parameter, or a number is given for a prior.
        """
        if isinstance(value, int | float | Tensor) and not isinstance(value, nn.Parameter):
            where = type(self).__name__
            if name in self.__dict__.get("_pyro_samples", ()) and not isinstance(value, Tensor):
                cure = "Assign a PyroParam or a PyroSample, or condition the model on a value."
                fail(where, name, "to keep its prior", f"the value {value!r:.40}", cure)
            if name in self.__dict__.get("_pyro_params", ()):
                value = _as_value(where, name, value, self._parameters[f"{name}_unconstrained"], self._pyro_params)
        super().__setattr__(name, value)
        if isinstance(value, Unset):
            self._unset[name] = cast(Tensor, value.init_value)
        else:
            self.__dict__.get("_unset", {}).pop(name, None)

    def extra_repr(self) -> str:
        """Hyperparameters with their values and priors, as ``print`` shows them."""
        return describe(self, {name for part, name in unset_hyperparameters(self) if part is self})

    def named(self, name: str) -> "GPModule":
        """Put `name` and a dot before the names of the sites and parameters; returns the module itself.

        Two kernels, or two methods, in one Pyro program, outside any model, need names, or their sites collide, which
        is an error. Inside a model or a larger PyroModule the attribute's name serves.
        """
        release(self)  # only the module's private store knows the old names, and it is emptied after each use
        self._pyro_set_supermodule(name, self._pyro_context)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, (constraint, _) in self._pyro_params.items():
            if isinstance(constraint, Scaled):  # the parameter is in multiples of it
                destination[f"{prefix}{name}_unit"] = constraint.unit.clone()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *settings: Any) -> None:
        units = {}
        for name, (constraint, event_dim) in self._pyro_params.items():
            if isinstance(constraint, Scaled) and f"{prefix}{name}_unit" in state_dict:
                units[f"{prefix}{name}_unit"] = name, (Scaled(state_dict[f"{prefix}{name}_unit"]), event_dim)
        self._pyro_params.update(units.values())
        super()._load_from_state_dict(state_dict, prefix, *settings)
        unexpected = settings[3]
        unexpected[:] = [key for key in unexpected if key not in units]

    def __copy__(self) -> "GPModule":
        new = type(self).__new__(type(self))  # not by __getstate__: a running program still needs the references
        new.__dict__.update(self.__dict__)
        return new

    def __getstate__(self) -> dict[str, Any]:
        # Pyro attaches a weak reference to each parameter it has seen, and weak references cannot be pickled.
        for param in self.parameters():
            param.__dict__.pop("unconstrained", None)
        return self.__dict__.copy()


def unset_hyperparameters(module: nn.Module) -> list[tuple[GPModule, str]]:
    """Hyperparameters of a module and its parts that were left unset, and have kept their placeholder value since."""
    found = []
    for part in module.modules():
        if not isinstance(part, GPModule):
            continue
        for name, stand_in in part._unset.items():
            if name in part._pyro_params:
                value = getattr(part, name).detach()
                if value.shape == stand_in.shape and torch.equal(value.double().cpu(), stand_in.double().cpu()):
                    found.append((part, name))
    return found


def freeze(module: Any) -> Any:
    """A copy whose hyperparameters are plain tensors: their values in the present Pyro context.

    Evaluating it has no Pyro effects and records no gradients for the original's parameters. Callables that are not
    modules are returned unchanged.
    """
    if not isinstance(module, nn.Module):
        return module
    parts = list(module.modules())
    values = [
        {name: getattr(part, name).detach().clone() for name in (*part._pyro_params, *part._pyro_samples)}
        if isinstance(part, PyroModule)
        else {}
        for part in parts
    ]
    new, context = copy.deepcopy(module), ThreadContext()
    for part, own in zip(new.modules(), values, strict=True):
        if isinstance(part, PyroModule):
            part.__dict__["_pyro_context"] = context  # the original's context may be active
            part.__dict__.update(own)  # precede the parameters and priors that the copy still holds
    return new.requires_grad_(False)


def release(module: nn.Module) -> None:
    """Reset Pyro's 'used' flag so that a module can be renamed or re-parented; no effect while it runs."""
    for part in module.modules():
        if isinstance(part, PyroModule):
            part._pyro_context.used = part._pyro_context.active > 0


def pyro_entry(method: Callable) -> Callable:
    """Mark a method of a :class:`GPModule` that reads parameters or sites: an entry point of the model."""
    inside = pyro_method(method)

    @functools.wraps(method)
    def enter(self: GPModule, *args: Any, **kwargs: Any) -> Any:
        if self._pyro_context.active:
            return method(self, *args, **kwargs)
        with own_param_store(self):
            return inside(self, *args, **kwargs)

    return enter


@contextmanager
def own_param_store(module: GPModule) -> Iterator[None]:
    """Replace Pyro's global param store by the module's private one, in O(parameters).

    Modules hold their parameters, which enter the store as they are read. Between calls the store keeps only what the
    user's ``pyro.param`` statements created, for instance in a mean function. ``ParamStoreDict.scope`` is not
    used: it strips the marks by which ``SVI`` recognizes a parameter, from the global ones too. Names stay known
    outside, for optimizers with settings per parameter.

    Raises:
        RuntimeError: if a program has recorded a site or a parameter of that name already, of another module; or is
            traced by ``torch.jit``.
    """
    if torch._C._get_tracing_state() is not None and runtime.am_i_wrapped():
        cure = "Take Trace_ELBO in place of JitTrace_ELBO, or jit_compile=False."
        fail(type(module).__name__, "a program", "that is not traced by torch.jit", "one that is", cure, RuntimeError)
    store, recorded = pyro.get_param_store(), _recorded_parameters()
    known, own = store.shared_names, {key: dict(values) for key, values in module._store.items()}
    params, names = own["_params"], own["_param_to_name"]
    try:
        with store.private(own):
            yield
        for before, after in zip(recorded, _recorded_parameters(), strict=True):
            changed = [name for name in params.keys() & before.keys() if after[name] is not before[name]]
            twice = [name for name in changed if before[name] in known]  # of a module that still exists
            if twice:
                _fail_twice(module, sorted(twice))
    except RuntimeError as error:
        repeated = re.match(r"Multiple sample sites named '(.*?)'", str(error))
        if repeated is None:
            raise
        _fail_twice(module, [repeated[1]], error)
    finally:
        new = {param: name for param, name in names.items() if known.get(param) != name}
        if new:  # registered for as long as the module exists: a model may build kernels anew at every call
            known.update(new)
            weakref.finalize(module, _forget_names, list(new)).atexit = False
        for name in [name for name, param in params.items() if isinstance(param, nn.Parameter)]:
            del params[name], own["_constraints"][name]
        if params:
            own["_param_to_name"] = {param: name for name, param in params.items()}
            module.__dict__["_store"] = own


def _as_value(where: str, name: str, value: Tensor | float, param: Any, constrained: dict) -> Tensor:
    """Convert a value to the dtype, device and, for a number, the shape of a parameter."""
    constraint = constrained[name][0]
    new = value.detach().clone() if isinstance(value, Tensor) else torch.full(param.shape, float(value))
    new = new.to(param)
    if not (bool(new.isfinite().all()) and bool(constraint.check(new).all())):
        cure = "Use del first to replace the parameter by something else."
        fail(where, name, f"to be finite and within {constraint}", new.tolist(), cure)
    return new


def _recorded_parameters() -> list[dict[str, Tensor]]:
    """Unconstrained parameters by name, for each trace that is being recorded."""

    def leaf(value: Any) -> Tensor:
        return value.unconstrained() if hasattr(value, "unconstrained") else value

    traces = [handler.trace for handler in runtime._PYRO_STACK if isinstance(handler, TraceMessenger)]
    return [{n: leaf(s["value"]) for n, s in t.nodes.items() if s["type"] == "param"} for t in traces]


def _fail_twice(module: GPModule, names: list[str], cause: Exception | None = None) -> NoReturn:
    """Raise: two modules of one program use the same names, or one module has read its priors twice."""
    where, arg, expectation = type(module).__name__, "sites and parameters", "with names that the program has not used"
    cure = "Name one of the two: module.named('trend'). Bind a shared kernel once: cov = kernel.bind()."
    fail(where, arg, expectation, f"{names} twice", cure, RuntimeError, cause)


def _forget_names(params: list[Tensor]) -> None:
    names = pyro.get_param_store().shared_names
    for param in params:
        names.pop(param, None)


Module = TypeVar("Module", bound=GPModule)


def bound_copy(module: Module) -> Module:
    """A shallow copy that holds the present values of all hyperparameters, so that using it has no Pyro effects.

    Parameters, priors and parts are read once, firing their Pyro statements; the values are set as attributes of the
    copy, where they are found before the parameters and priors behind them.
    """
    parameters = (name.removesuffix("_unconstrained") for name in module._parameters)
    values = {name: getattr(module, name) for name in (*parameters, *module._pyro_samples, *module._modules)}
    bound = copy.copy(module)
    bound.__dict__.update(values)
    return bound
