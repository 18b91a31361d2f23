"""Estimated hyperparameters on their unconstrained scales, and the centers of their intervals.

Positive hyperparameters are logarithms there. Coefficients of the mean that are estimated too make estimates of
variances too small; intervals are centered where a step of Newton's method leads that corrects for it, and have the
information there. Standard errors of coefficients are averaged over the distribution of the hyperparameters around that
center.

Symbols: p hyperparameters, N data, U rows, L latent functions, c coefficients of the mean.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import torch
from jaxtyping import Float
from pyro.nn import PyroModule
from torch import Tensor
from torch.distributions import transform_to

from pyro_nngp.bound import Bound, read
from pyro_nngp.coefficients import posterior_of_coefficients
from pyro_nngp.means import BasisMean
from pyro_nngp.models.base.posterior import Observed
from pyro_nngp.models.base.trend import normal_equations

_STEP = 1e-4  # of differences
_FARTHEST = 1.5  # from the estimates that hyperparameters are taken
_UNIDENTIFIED = 2.5  # standard error of hyperparameters that stay where they are

Kind = TypeVar("Kind", bound="Estimates")


class Free(NamedTuple):
    """A hyperparameter that is estimated: a parameter without a prior, of the kernel or the likelihood."""

    module: PyroModule
    name: str
    constraint: Any
    value: Tensor
    """Unconstrained, in double precision."""


class Information(NamedTuple):
    """Covariance of hyperparameters on their unconstrained scales, and what follows for the mean's coefficients."""

    free: list[Free]
    cov: Float[Tensor, "p p"]
    shift: Float[Tensor, " p"] | None = None
    """From the estimates to the centers of their intervals."""
    errors: Float[Tensor, "*own c"] | None = None
    """Standard errors of the coefficients of the mean, of each function or of all."""

    def centers(self) -> dict[tuple[PyroModule, str], Tensor]:
        """Unconstrained values in the middle of the intervals, by module and attribute."""
        free = self.free if self.shift is None else _moved(self.free, self.shift)
        return {(each.module, each.name): each.value for each in free}

    def scales(self) -> dict[tuple[PyroModule, str], Tensor]:
        """Standard errors by module and attribute, of the shape of the unconstrained parameter."""
        sizes = [each.value.numel() for each in self.free]
        parts = self.cov.diagonal().sqrt().split(sizes)
        pairs = zip(self.free, parts, strict=True)
        return {(each.module, each.name): part.reshape(each.value.shape) for each, part in pairs}


@dataclass(frozen=True)
class Estimates:
    """A method with hyperparameters of which data have information.

    Attributes:
        method: the method.
        free: its hyperparameters.
    """

    method: Any
    free: list[Free]

    def moved(self: Kind, shift: Float[Tensor, " p"]) -> Kind:
        """The method with a shift added to the hyperparameters."""
        return replace(self, free=_moved(self.free, shift))

    @torch.no_grad()
    def put(self) -> list[Tensor]:
        """Give the parameters of the method these values; returns them."""
        found = [each.module._parameters[f"{each.name}_unconstrained"] for each in self.free]
        for tensor, each in zip(found, self.free, strict=True):
            tensor.copy_(each.value)
        return found

    def bound(self, entry: int, step: float) -> Bound:
        """All hyperparameters in double precision, one entry changed by a step; those with priors at their medians."""
        medians = {key: value.double() for key, value in self.method.hyper_guide.medians().items()}
        return read(self.method, {**medians, **self._values(entry, step)}, is_median=True)

    def changes(self, function: Callable[[Bound], Tensor]) -> Iterator[Tensor]:
        """Derivatives of a function of the hyperparameters in each entry of them."""
        for entry in range(sum(each.value.numel() for each in self.free)):
            high, low = (function(self.bound(entry, step)) for step in (_STEP, -_STEP))
            yield (high - low) / (2 * _STEP)

    @cached_property
    def present(self) -> Bound:
        """All hyperparameters in double precision, those with priors at their medians."""
        return self.bound(0, 0.0)

    def observed(self, bound: Bound) -> Observed:
        """f given the data, in double precision, at some hyperparameters."""
        rows = self.method.rows
        tables = {
            name: None if value is None else value.double() for name, value in vars(rows).items() if name != "shard"
        }
        if self.method.likelihood.is_gaussian:
            return Observed(replace(rows, **tables), self.method.graph, bound)
        sites = self.method.posterior(self.method.bound()).observations_of_u(rows.every)
        return _AtSites(replace(rows, **tables), self.method.graph, bound, *(part.double() for part in sites))

    @cached_property
    def root(self) -> Float[Tensor, "*own c c"] | None:
        """Root of the covariance of the coefficients of the mean; None where none are estimated."""
        mean = self.present.mean_function
        if not isinstance(mean, BasisMean) or not mean.is_learned:
            return None
        return posterior_of_coefficients(mean, *normal_equations(self.observed(self.present)))[1]

    @property
    def num_outputs(self) -> int:
        """Outputs that have the hyperparameters together."""
        return max(1, math.prod(self.method.latent_shape))

    def _values(self, entry: int, step: float) -> dict[tuple[PyroModule, str], Tensor]:
        """Values of the hyperparameters with one entry of all changed on its unconstrained scale."""
        values = {}
        for each in self.free:
            free, size = each.value.clone(), each.value.numel()
            if 0 <= entry < size:
                free.view(-1)[entry] += step
            entry -= size
            values[each.module, each.name] = transform_to(each.constraint)(free).to(self.method.x.device)
        return values


@dataclass(frozen=True)
class _AtSites(Observed):
    """f given pseudo-observations."""

    target: Float[Tensor, "*L N"]
    variance: Float[Tensor, "*L N"]

    def observations(self, rows: Any) -> tuple[Float[Tensor, "*L U"], Tensor]:
        return self.target[..., rows], self.variance[..., rows]


@torch.no_grad()
def around_center(
    start: Kind, find: Callable[[Kind], tuple[Tensor, Tensor | None]], solve: Callable[[Kind], None] | None = None
) -> Information:
    """Information at the centers of the intervals, and errors of coefficients averaged around them.

    Args:
        start: the estimates.
        find: the covariance of estimates, and the step to the centers; None where they are the centers.
        solve: finds the pseudo-observations at some hyperparameters; None where data are Gaussian.
    """
    if not start.free:
        return Information([], torch.zeros(0, 0).double())
    cov, shift = find(start)
    if start.root is None:
        return Information(start.free, cov)
    center = start
    if shift is not None:
        shift = torch.where(cov.diagonal().sqrt() < _UNIDENTIFIED, shift.clamp(-_FARTHEST, _FARTHEST), 0.0)
        center = start.moved(shift)
        cov, _ = find(center)
    strengths, axes = torch.linalg.eigh(cov)
    points = axes * (len(cov) * strengths.clamp(0, _FARTHEST**2)).sqrt()  # of a cubature rule, exact to degree 3
    squares = []
    for there in (center.moved(sign * point) for point in points.mT for sign in (1, -1)):
        if solve is not None:
            solve(there)
        squares.append(cast(Tensor, there.root).square().sum(-1))
    return Information(start.free, cov, shift, torch.stack(squares).mean(0).sqrt())


def free_parameters(method: Any) -> list[Free]:
    """The parameters of kernel and likelihood that training changes."""
    found = []
    for part in ("kernel", "likelihood"):
        for module in method._modules[part].modules() if part in method._modules else ():
            for name, (constraint, _) in getattr(module, "_pyro_params", {}).items():
                value = module._parameters[f"{name}_unconstrained"]
                if value.requires_grad:
                    found.append(Free(module, name, constraint, value.detach().double().cpu().clone()))
    return found


def _moved(free: list[Free], shift: Float[Tensor, " p"]) -> list[Free]:
    """Hyperparameters with a shift added on their unconstrained scales."""
    parts = shift.cpu().split([each.value.numel() for each in free])
    return [
        each._replace(value=each.value + part.reshape(each.value.shape)) for each, part in zip(free, parts, strict=True)
    ]


__all__ = ["Estimates", "Free", "Information", "around_center", "free_parameters"]
