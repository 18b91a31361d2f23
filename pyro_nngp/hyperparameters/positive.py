"""Hyperparameters of kernels and likelihoods: constrained parameters, or what the user gives in their place."""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_nngp._checks import check_positive, check_tensor, fail
from pyro_nngp._kinds import check_kind
from pyro_nngp.hyperparameters.batches import is_computed

Hyperparameter: TypeAlias = Tensor | float | int | PyroParam | PyroSample
"""A positive value (it becomes a ``PyroParam``), or what is taken as it is: a ``PyroParam``, a ``PyroSample``, a tensor
of a running program."""

Module = TypeVar("Module", bound=nn.Module)


class Unset(PyroParam):
    """A ``PyroParam`` with a placeholder value until data suggest one.

    :class:`~pyro_nngp.hyperparameters.GPModule` remembers which of its attributes were assigned one; see
    :func:`~pyro_nngp.hyperparameters.unset_hyperparameters`.
    """


def positive(where: str, arg: str, value: Hyperparameter | None, default: float = 1.0) -> Any:
    """A positive ``PyroParam``, or the user's ``PyroParam`` or prior, to assign to a ``PyroModule``.

    A tensor that is given while a Pyro program runs, or has a gradient, stays as it is. So a model can build its kernel
    from what it draws; a parameter would cut the gradient off and take the name of the site.

    Args:
        where: name of the class, for the error message.
        arg: name of the attribute, for the error message.
        value: initial value; a ``PyroParam`` or ``PyroSample`` is returned as it is. None marks the attribute as unset:
            a method starts it from its data.
        default: value of an unset attribute without data.

    Raises:
        ValueError: if the value is not positive, finite and in floating point.
    """
    expectation = "to be positive and finite, in floating point"
    return _parameter(where, arg, value, default, constraints.positive, expectation, 0.0, math.inf)


def between(where: str, arg: str, value: Hyperparameter | None, low: float, high: float, default: float) -> Any:
    """A ``PyroParam`` in the open interval (low, high); else as :func:`positive`.

    Raises:
        ValueError: if the value is not in the interval and in floating point.
    """
    expectation = f"to lie between {low:g} and {high:g}, in floating point"
    return _parameter(where, arg, value, default, constraints.interval(low, high), expectation, low, high)


def _parameter(
    where: str, arg: str, value: Any, default: float, constraint: Any, expectation: str, low: float, high: float
) -> Any:
    if isinstance(value, PyroParam | PyroSample):
        return value
    if is_computed(value):
        return value  # also where a trajectory of a sampler has gone to infinity: it will be rejected
    cure = "Pass a float or a float tensor."
    if isinstance(value, Tensor):
        check_tensor(where, arg, value)
    elif isinstance(value, bool) or not isinstance(value, int | float | None):
        fail(where, arg, "to be a number, a tensor, a PyroParam or a PyroSample", f"{value!r:.40}", cure, TypeError)
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(default if value is None else value))
    if not (tensor.is_floating_point() and bool(((tensor > low) & (tensor < high)).all())):
        fail(where, arg, expectation, tensor.tolist(), cure)
    return (Unset if value is None else PyroParam)(tensor, constraint)


def lognormal_priors(
    module: Module, medians: Mapping[str, float] | None = None, scale: float = 1.0, like: Tensor | None = None
) -> Module:
    """Give positive hyperparameters of a kernel or likelihood, and of its parts, log-normal priors in place.

    Args:
        module: the kernel or likelihood; hyperparameters that have a prior already keep it.
        medians: medians by name; None is 1 for each lengthscale and 0.05 for a kernel's variance, the choice of Rossi
            et al. (2021), section 3.1, for standardized data.
        scale: standard deviation of the logarithms.
        like: tensor whose dtype and device the priors take, such as the inputs; None takes the parameters'.

    Returns:
        The module.

    Raises:
        ValueError: if the module has none of these hyperparameters.
    """
    where = "lognormal_priors"
    check_kind(where, "module", module, nn.Module, "a module", "Pass a kernel or a likelihood.")
    check_positive(where, "scale", scale, "It is a standard deviation of logarithms.")
    if like is not None:
        check_tensor(where, "like", like)
    if medians is not None:
        check_kind(where, "medians", medians, Mapping, "a dictionary", 'Write {"lengthscale": 1.0}.')
        for name, median in medians.items():
            check_positive(where, f"medians[{name!r}]", median)
    medians, is_any = {"lengthscale": 1.0, "variance": 0.05} if medians is None else medians, False
    for part in module.modules():
        names = [name for name in medians if isinstance(part, PyroModule) and name in part._pyro_params]
        for name in names:
            value = getattr(part, name).detach()
            loc = torch.full_like(value if like is None else value.to(like), medians[name]).log()
            setattr(part, name, PyroSample(dist.LogNormal(loc, scale).to_event(loc.dim())))
            is_any = True
    if not is_any:
        cure = "Name attributes that the module has as parameters."
        fail(where, "medians", f"of hyperparameters of {type(module).__name__}", sorted(medians), cure)
    return module
