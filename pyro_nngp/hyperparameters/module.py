"""The base of every model as a Pyro module: it holds its parameters, in no store."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from pyro.nn import PyroModule, PyroParam
from pyro.nn.module import _Context
from torch import Tensor, nn

from pyro_nngp._checks import check_device, fail
from pyro_nngp.hyperparameters.description import describe
from pyro_nngp.hyperparameters.positive import Unset
from pyro_nngp.hyperparameters.reading import parameter, parameter_site, parameter_sites, sampled_value
from pyro_nngp.hyperparameters.scaled import Scaled


class GPModule(PyroModule):
    """A PyroModule that holds its parameters itself.

    Pyro keeps parameters by name in one global store, where two models of one class would share theirs. Here a
    parameter that is read within a Pyro program becomes a param site with the module's value: ``parameters()``,
    ``state_dict()``, ``SVI`` and ``torch.optim`` all see the same tensors, and no store holds them. What a user's
    function creates by ``pyro.param`` is in Pyro's store and not part of the module.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pyro_context = _Context()
        self._unset: dict[str, Tensor] = {}  # placeholder values of hyperparameters that were left unset

    def __getattr__(self, name: str) -> Any:
        """Parameters, priors and parts; within a Pyro program the first two are sites.

        Raises:
            RuntimeError: if the program has a site or a parameter of that name already, of another module; or is traced
                by ``torch.jit``.
        """
        own = self.__dict__
        parameters, parts = own.get("_parameters", {}), own.get("_modules", {})
        if name in own.get("_pyro_params", ()) or (name in parameters and not name.endswith("_unconstrained")):
            return parameter_site(self, name) if self._pyro_context.active else parameter(self, name)
        if name in own.get("_pyro_samples", ()):
            return sampled_value(self, name, super().__getattr__)
        if isinstance(parts.get(name), nn.Module) and not isinstance(parts[name], PyroModule):
            if self._pyro_context.active:
                parameter_sites(self, name)
            return parts[name]
        return super().__getattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a submodule, even one that has run alone before."""
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
        context: Any = self.__dict__.get("_pyro_context")
        active = 0 if context is None else context.active
        if active and isinstance(value, PyroParam | nn.Parameter):
            context.active = 0  # else Pyro would put it into its store
        try:
            super().__setattr__(name, value)
        finally:
            if active:
                context.active = active
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
        release(self)
        self._pyro_set_supermodule(name, self._pyro_context)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, (constraint, _) in self._pyro_params.items():
            if isinstance(constraint, Scaled):  # the parameter is in multiples of the scale
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

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or convert all parameters and buffers, in place, as torch's method.

        Raises:
            ValueError: for a device that torch cannot use here.
        """
        places = (kwargs.get("device"), *args[:1])
        device = next((place for place in places if isinstance(place, str | int | torch.device)), None)
        if device is not None:
            check_device(f"{type(self).__name__}.to", device)
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Any:
        """Move all parameters and buffers to a GPU, in place, as torch's method.

        Raises:
            ValueError: if torch sees no GPU here.
        """
        place = "cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device
        check_device(f"{type(self).__name__}.cuda", place)
        return super().cuda(device)

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
    names = []
    for part in module.modules():
        if not isinstance(part, GPModule):
            continue
        for name, stand_in in part._unset.items():
            if name in part._pyro_params:
                value, first = getattr(part, name).detach().double().cpu(), stand_in.double().cpu()
                if value.shape == first.shape and torch.allclose(value, first, rtol=1e-6, atol=0.0):  # of the transform
                    names.append((part, name))
    return names


def freeze(module: Any, at: Mapping[tuple[PyroModule, str], Tensor] | None = None) -> Any:
    """A deep copy whose hyperparameters are plain tensors, detached: their present values, and values of priors `at`.

    Evaluating it has no Pyro effects. Callables that are not modules are returned unchanged.
    """
    if not isinstance(module, nn.Module):
        return module
    parts = list(module.modules())
    values = [
        {
            name: (at[part, name] if at and (part, name) in at else getattr(part, name)).detach().clone()
            for name in (*part._pyro_params, *part._pyro_samples)
        }
        if isinstance(part, PyroModule)
        else {}
        for part in parts
    ]
    known = {  # values with gradients, of a plain copy, cannot be copied deeply
        id(value): value.detach().clone()
        for part in parts
        for value in part.__dict__.values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    new, context = copy.deepcopy(module, known), _Context()
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


def _as_value(where: str, name: str, value: Tensor | float, param: Any, constrained: dict) -> Tensor:
    """Convert a value to the dtype, device and, for a number, the shape of a parameter."""
    constraint = constrained[name][0]
    new = value.detach().clone() if isinstance(value, Tensor) else torch.full(param.shape, float(value))
    new = new.to(param)
    if not (bool(new.isfinite().all()) and bool(constraint.check(new).all())):
        cure = "Use del first to replace the parameter by something else."
        fail(where, name, f"to be finite and within {constraint}", new.tolist(), cure)
    return new


Module = TypeVar("Module", bound=GPModule)


def bound_copy(module: Module) -> Module:
    """A shallow copy that holds the present values of all hyperparameters, so that using it has no Pyro effects.

    Parameters, priors and parts are read once, firing their Pyro statements; the values are set as attributes of the
    copy, where lookup meets them before the parameters and priors behind them.
    """
    parameters = (name.removesuffix("_unconstrained") for name in module._parameters)
    values = {name: getattr(module, name) for name in (*parameters, *module._pyro_samples, *module._modules)}
    bound = copy.copy(module)
    bound.__dict__.update(values)
    return bound
