"""Hyperparameters of kernels and likelihoods: positive parameters by default, priors wherever the user wants them."""

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributions import constraints

from pyro_nngp._checks import check_tensor, fail
from pyro_nngp.hyperparameters.batches import is_computed

Hyperparameter: TypeAlias = Tensor | float | int | PyroParam | PyroSample
"""A positive value, which becomes a ``PyroParam``; or a ``PyroParam``, a ``PyroSample`` or a tensor that a program has
computed, which are taken as they are."""

Module = TypeVar("Module", bound=nn.Module)


class Unset(PyroParam):
    """A ``PyroParam`` with a placeholder value until data suggest one.

    :class:`~pyro_nngp.hyperparameters.GPModule` remembers which of its attributes were assigned one; see
    :func:`~pyro_nngp.hyperparameters.unset_hyperparameters`.
    """


def positive(where: str, arg: str, value: Hyperparameter | None, default: float = 1.0, size: int = 1) -> Any:
    """A positive ``PyroParam``, or the user's own, prior or computed value, to become an attribute of a ``PyroModule``.

    Args:
        where: name of the class, for the error message.
        arg: name of the attribute, for the error message.
        value: initial value; a ``PyroParam`` or ``PyroSample`` is returned as it is, and so is a tensor with a gradient
            or with batch dimensions, such as the value of a site. None marks the attribute as unset: a method starts it
            from its data.
        default: value of an unset attribute where no data are at hand.
        size: number of columns, for those that may have one value each.

    Raises:
        ValueError: if the value is not positive, not finite, or not in floating point.
    """
    if isinstance(value, PyroParam | PyroSample):
        return value
    cure = "Pass a float or a float tensor."
    if isinstance(value, Tensor):
        check_tensor(where, arg, value)
    elif isinstance(value, bool) or not isinstance(value, int | float | None):
        fail(where, arg, "to be a number, a tensor, a PyroParam or a PyroSample", f"{value!r:.40}", cure, TypeError)
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(default if value is None else value))
    if is_functorch_wrapped_tensor(tensor):  # its entries cannot be looked at
        return tensor
    if not (tensor.is_floating_point() and bool((tensor > 0).all()) and bool(tensor.isfinite().all())):
        fail(where, arg, "to be positive and finite, in floating point", tensor.tolist(), cure)
    if isinstance(value, Tensor) and is_computed(value, ((), (1,), (size,))):
        return tensor
    return (Unset if value is None else PyroParam)(tensor, constraints.positive)


def lognormal_priors(
    module: Module, medians: Mapping[str, float] | None = None, scale: float = 1.0, like: Tensor | None = None
) -> Module:
    """Give positive hyperparameters of a kernel or likelihood, and of its parts, log-normal priors in place.

    Args:
        module: the kernel or likelihood; hyperparameters that have a prior already keep it.
        medians: medians by name; None is 1 for each lengthscale and 0.05 for a kernel's variance, the choice of Rossi
            et al. (2021), section 3.1, for standardized data.
        scale: standard deviation of the logarithms.
        like: tensor whose dtype and device the priors take, such as the inputs; None is that of the parameters.

    Returns:
        The module.

    Raises:
        ValueError: if the module has none of these hyperparameters.
    """
    medians, found = {"lengthscale": 1.0, "variance": 0.05} if medians is None else medians, False
    for part in module.modules():
        names = [name for name in medians if isinstance(part, PyroModule) and name in part._pyro_params]
        for name in names:
            value = getattr(part, name).detach()
            loc = torch.full_like(value if like is None else value.to(like), medians[name]).log()
            setattr(part, name, PyroSample(dist.LogNormal(loc, scale).to_event(loc.dim())))
            found = True
    if not found:
        where, cure = "lognormal_priors", "Name attributes that the module has as parameters."
        fail(where, "medians", f"of hyperparameters of {type(module).__name__}", sorted(medians), cure)
    return module
