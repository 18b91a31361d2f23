"""Construction of a method: checks of its parts, starts of hyperparameters, and the guide of those with priors.

Symbols as in :mod:`pyro_nngp.models.base.method`.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_nngp._checks import check_number, fail, warn, warn_if_coarse
from pyro_nngp._kinds import check_callable, check_metric
from pyro_nngp._random import seeded
from pyro_nngp.bound import Bound, read
from pyro_nngp.hyperparameters import HyperparameterGuide, unset_hyperparameters
from pyro_nngp.hyperparameters.values import Values
from pyro_nngp.kernels.binding import check_covariance
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.linalg import DEFAULT_JITTER
from pyro_nngp.means import BasisMean, ConstantMean, LinearMean
from pyro_nngp.models.base.arguments import (
    as_stored,
    check_by_row,
    check_data,
    check_kernel_place,
    check_unshared,
    copied_parts,
)
from pyro_nngp.plausibility.data import (
    constant_outputs,
    warn_of_coarse_targets,
    warn_of_codes,
    warn_of_constants,
    warn_of_copies,
    warn_of_offset,
    warn_of_prior_variance,
)
from pyro_nngp.plausibility.units import warn_of_units
from pyro_nngp.starts.from_data import Start
from pyro_nngp.starts.unbounded import unbounded_levels

StartFrom: TypeAlias = Callable[[Values, Callable[[Tensor], Tensor] | None], Start]
"""Starts unset hyperparameters, given values of those with priors, and the mean function at rows if it is set."""


class Parts(NamedTuple):
    """Checked arguments of a method, with defaults filled in.

    Attributes:
        kernel, likelihood, mean, jitter: the parts.
        latent_shape: () or (L,).
        values: tensors with a row per datum, by name.
    """

    kernel: Any
    likelihood: Any
    mean: Any
    jitter: float
    latent_shape: tuple[int, ...]
    values: Mapping[str, Tensor | None]


def checked_parts(
    method: Any,
    x: Tensor,
    y: Any,
    kernel: Any,
    likelihood: Likelihood | None,
    mean: Callable | None,
    jitter: float | None,
    metric: Any,
    start: Any,
    by_row: dict[str, Any],
) -> Parts:
    """Check the arguments of :class:`~pyro_nngp.models.base.Method`, and fill in defaults."""
    where = type(method).__name__
    if torch.is_inference_mode_enabled():
        cure = "Its tensors could not be trained: build it outside, and predict inside."
        fail(where, "gradients", "to be possible", "torch.inference_mode()", cure, RuntimeError)
    given = {"kernel": kernel, "likelihood": likelihood, "mean": mean}
    if start is not None:
        kernel, likelihood, mean = copied_parts(where, start, kernel, likelihood, mean, y is not None)
    if likelihood is None and y is not None:
        likelihood = Gaussian()
    latent_shape = check_data(where, x, y, likelihood, method._targets)
    values: dict[str, Tensor | None] = check_by_row(where, x, y, likelihood, latent_shape, by_row)
    warn_if_coarse(where, x)
    for arg, part in given.items():
        check_unshared(where, arg, part, x)
    kernel = method._default_kernel(x, likelihood) if kernel is None else kernel
    if kernel is not None:
        check_kernel_place(where, kernel)
        check_covariance(where, kernel, x)
    warn_of_units(where, x, method.columns, kernel)
    if mean is not None:
        check_callable(where, "mean", mean, "Pass a function (B, D) -> (B,) or a module.")
    check_metric(where, "metric", metric, x.shape[1])
    if jitter is not None:
        check_number(where, "jitter", jitter, cure="It is a relative nugget; the default is 1e-6.")
    mean = ConstantMean(num_latents=latent_shape[0] if latent_shape else None) if mean is None else mean
    data = {"x": x.detach().clone(), "y": as_stored(y, likelihood, x)}
    return Parts(kernel, likelihood, mean, DEFAULT_JITTER if jitter is None else jitter, latent_shape, values | data)


@torch.no_grad()
def start(method: Any, start_from: StartFrom, solves_coefficients: bool) -> None:
    """Start unset hyperparameters of a method from its data, in place, and build the guide of those with priors.

    Args:
        method: the method, with all parts that have hyperparameters.
        start_from: starts those of kernel and likelihood.
        solves_coefficients: whether it solves for the joint posterior of coefficients with normal priors.
    """
    where, mean = type(method).__name__, method._modules.get("mean")
    at = HyperparameterGuide(method, latents=method._latents).medians()
    unset = unset_hyperparameters(method)
    bound = read(method, at)
    _try_mean(where, bound, method.x[:2])
    _try_likelihood(where, bound, method.x)
    is_started = isinstance(mean, BasisMean) and not mean.is_set
    from_data = start_from(at, None if is_started else lambda rows: bound.mean(method.x[rows]))
    method._unit = from_data.unit
    modules = {module: path for path, module in method.named_modules()}
    method._first_values = {
        f"{modules[part]}.{name}": part._parameters[f"{name}_unconstrained"].detach().clone()
        for part, name in unset
        if name in part._pyro_params
    }
    if isinstance(mean, BasisMean):
        mean.start(from_data.level, from_data.spread, method.x)
    if isinstance(mean, LinearMean):
        mean.has_posterior = solves_coefficients and mean.is_normal
        if mean.is_sampled_alone and hasattr(type(method), "guide"):
            warn(
                f"{where}: its guide holds the coefficients of the mean independent of f, so that their intervals are "
                "too narrow. Take Vecchia, LOO or VNNGP with pseudo-observations, or NUTS."
            )
    method.hyper_guide = HyperparameterGuide(method, latents=method._latents)
    if method.y is not None and method.likelihood is not None:
        bound = read(method, method.hyper_guide.medians())
        hold_unbounded_levels(method, bound)
        _warn_of_data(method, from_data.spread)
        parts = [part for part in (bound.kernel, *bound.others.values()) if isinstance(part, nn.Module)]
        warn_of_prior_variance(where, chain.from_iterable(part.modules() for part in parts), from_data.spread)
    for origin in method._origin:
        method.hyper_guide.take(origin.hyper_guide)
    method._origin = ()


def hold_unbounded_levels(method: Any, started: Bound | None = None) -> None:
    """Hold the levels of the mean that the data of a method do not bound, and no others; all processes must call it.

    Args:
        method: the method.
        started: at a start, the hyperparameters: levels move to the nearest ones that fit the data. None leaves levels
            as they are.
    """
    mean, likelihood = method._modules.get("mean"), method.likelihood
    if method.y is None or likelihood is None or likelihood.is_gaussian:
        return
    if not (isinstance(mean, BasisMean) and mean.is_free):
        return
    found = unbounded_levels(method.rows, method.bound() if started is None else started, method._unit)
    if started is not None and any(found.held):
        mean.shift(found.move)
    mean.held = found.held if any(found.held) else ()


def free_bounded_levels(method: Any) -> bool:
    """Let go of levels that are held and that more data bound, and return whether there are any.

    All processes must call it.
    """
    mean = method._modules.get("mean")
    before = sum(getattr(mean, "held", ()))
    if before:
        hold_unbounded_levels(method)
    return before > sum(getattr(mean, "held", ()))


def changed(method: nn.Module, first: Mapping[str, Tensor]) -> dict[str, bool]:
    """For each name of a parameter, whether its value is another than the first one, or is a parameter no more."""
    found = {}
    for name, value in first.items():
        path, _, attribute = name.rpartition(".")
        now = method.get_submodule(path)._parameters.get(f"{attribute}_unconstrained")
        found[name] = now is None or not torch.equal(now.detach().cpu(), value.cpu())
    return found


def _warn_of_data(method: Any, spread: Tensor) -> None:
    """Warn of targets and offsets that are hardly meant."""
    where, y, likelihood = type(method).__name__, method.y, method.likelihood
    constant = constant_outputs(y)
    if method.offset is not None:
        warn_of_offset(where, method.offset, y, likelihood, method.latent_shape)
    differs = any(value is not None for value in (method.offset, method.trials, method.limits))
    warn_of_constants(where, y, [] if differs else constant, method._modules.get("mean"))
    if y.dim() == 2:
        method._targets.warn_of_spreads(where, likelihood, spread, constant)
    if likelihood.is_gaussian:
        warn_of_copies(where, method.x, y)
        warn_of_codes(where, y)
        warn_of_coarse_targets(where, y)


def _try_mean(where: str, bound: Bound, x: Tensor) -> None:
    """Raise unless the mean function can be evaluated at x and returns one value per row."""
    with poutine.block(), seeded(0, x):
        try:
            bound.mean(x)
        except (RuntimeError, TypeError, IndexError) as error:
            expectation, cure = f"to take inputs of shape {tuple(x.shape)}", "It is called with rows of x, (B, D)."
            fail(where, "mean", expectation, f"{type(error).__name__} ({error})", cure, type(error))


def _try_likelihood(where: str, bound: Bound, x: Tensor) -> None:
    """Raise if hyperparameters of the likelihood do not broadcast against the data."""
    if bound.likelihood is None:
        return
    f = x.new_zeros(*bound.latent_shape, len(x))
    want = f.shape if bound.likelihood.num_latents is None else f.shape[1:]
    # Shapes alone: a noise variance that was trained to the smallest numbers has a standard deviation of 0.
    with poutine.block(), seeded(0, f), pyro.validation_enabled(False):
        try:
            actual: Any = bound.likelihood(f).batch_shape
        except (RuntimeError, ValueError, IndexError) as error:
            actual = f"{type(error).__name__} ({error!s:.120})"
    if actual != want:
        cure = "Give scalars; or (T, 1), one value for each of T outputs."
        fail(where, "likelihood", f"with hyperparameters that broadcast to {tuple(want)}", actual, cure)
