r"""Mean functions: a constant, or a linear function of the inputs and of waves of them, such as seasons.

Both are linear in their coefficients, :math:`\mu(x) = b(x)^\top \beta`, so that methods for Gaussian data solve for
them by generalized least squares, and predictions have the uncertainty that is left of them, under a flat prior or a
normal one (:mod:`pyro_nngp.coefficients`). Values are in the units of the latent function; gradient steps are in
multiples of `unit`, which a method sets to the spread of its data.

Coefficients with a normal prior have a joint normal posterior given Gaussian observations of f, which methods set by
:meth:`LinearMean.set_posterior`; it is the guide of the coefficients' sites.

Cost: O(B D). Symbols: p coefficients for each of L latent functions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyro.distributions as dist
import torch
from jaxtyping import Bool, Float
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroSample
from torch import Tensor
from torch.distributions.transforms import ReshapeTransform

from pyro_nngp._checks import check_int, check_memory, check_number, check_positive, fail, undefined
from pyro_nngp._kinds import check_sequence
from pyro_nngp._wrappers import base_distribution
from pyro_nngp.hyperparameters import GPModule, assign, scaled
from pyro_nngp.hyperparameters.batches import batch_shape_of, placed
from pyro_nngp.linalg import cholesky, half_solve

_PERIODS = "Pass periods by column number, such as periods={2: [12, 6]}."
_WEAK, _START = 10.0, 0.1  # scales of weak priors and of the first posterior, in spreads of f


class BasisMean(GPModule):
    """Base of mean functions that are linear in their coefficients.

    A subclass has parameters that :meth:`assign` sets, and defines :meth:`basis`.

    Attributes:
        is_set: whether the level has been set, by the user or from data.
        held: for each of L functions, or for the one, whether coefficients stay as they are: data do not bound their
            level. Empty if data bound all of them.
    """

    is_set: bool
    value: Any
    held: tuple[bool, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a tensor must have the shape of the coefficients that it replaces.

        Raises:
            ValueError: for a tensor of another shape.
        """
        if isinstance(value, Tensor) and name in self.__dict__.get("_pyro_params", ()):
            shape = tuple(self._parameters[f"{name}_unconstrained"].shape)
            if tuple(value.shape) != shape:
                cure = "Give num_latents=L to the constructor for one function per output."
                fail(type(self).__name__, name, f"of shape {shape}", tuple(value.shape), cure)
        super().__setattr__(name, value)

    def basis(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B p"]:
        """Values of the p basis functions."""
        undefined(self, "basis", "mean function")

    def assign(self, coefficients: Float[Tensor, "p L"]) -> None:
        """Set the coefficients, one column per latent function."""
        undefined(self, "assign", "mean function")

    @property
    def coefficients(self) -> Float[Tensor, "p *L"]:
        """The present coefficients of the basis functions."""
        undefined(self, "coefficients", "mean function")

    def start(self, level: Float[Tensor, " *L"], spread: Float[Tensor, " *L"], x: Float[Tensor, "N D"]) -> None:
        """Set the level, unless the user has set it, and the units of gradient steps."""
        undefined(self, "start", "mean function")

    def shift(self, move: Float[Tensor, " G"]) -> None:
        """Move the levels, of each function or of all."""
        coefficients = self.coefficients.detach().clone()
        coefficients = coefficients.reshape(len(coefficients), -1)
        coefficients[0] += move
        self.assign(coefficients)

    has_posterior = False
    """Whether a method sets the joint normal posterior of the coefficients."""

    @property
    def is_free(self) -> bool:
        """Whether all coefficients are parameters, without a prior."""
        return not self._pyro_samples

    @property
    def is_learned(self) -> bool:
        """Whether coefficients are parameters that training changes; their prior is then flat."""
        is_trained = all(parameter.requires_grad for parameter in self.solved_parameters())
        return self.is_free and is_trained and not (self.held and all(self.held))

    def free(self, values: Tensor) -> Bool[Tensor, "*own"]:
        """Which functions have coefficients that are not held; on the device of some values."""
        free = torch.tensor([not held for held in self.held] or [True], device=values.device)
        return free.expand(self.own_shape) if self.own_shape else free[0]

    def unless_held(self, name: str, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Values of an attribute, with the present ones, without gradient, of functions whose coefficients are held."""
        if not any(self.held):
            return values
        return torch.where(self.free(values), values, getattr(self, name).detach().to(values))

    def set_posterior(self, loc: Float[Tensor, "*own p"], cov: Float[Tensor, "*own p p"]) -> None:
        """Take over the posterior of the coefficients, of each function or of all; parameters take its mean."""
        self.assign(torch.atleast_2d(loc).mT)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """() if all latent functions have the same coefficients, else (L,)."""
        return () if self.num_functions is None else (self.num_functions,)

    @property
    def num_functions(self) -> int | None:
        """L; None where one function serves all latent functions."""
        return len(self.value) if self.value.dim() else None

    def sets(self, name: str) -> Float[Tensor, "*shape"]:
        """Values (*S, *columns, *L) of coefficients that have a prior.

        S are the dimensions of vectorized plates but that of the data, and of latent functions where L is theirs.

        Args:
            name: "value", or "slope" with a dimension of columns.
        """
        value = getattr(self, name)
        batch = batch_shape_of(self, name, value)
        own, batch = value.shape[len(batch) :], placed(batch)
        plates = 1 + len(own) - (name == "slope")  # of data and latent functions
        return value.reshape((*batch[: max(0, len(batch) - plates)], *own))

    def solved_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that :meth:`assign` sets."""
        return list(self.parameters(recurse=False))


class ConstantMean(BasisMean):
    """A learnable constant mean function, ``(B, D) -> (B,)``, or ``(B, L)`` with a constant for each of L functions.

    Predictions have the uncertainty of a constant that is learned, as in ordinary kriging, in ``Vecchia``, ``LOO``,
    ``MLLk``, ``CoregionalizedLOO``, in ``LMC`` without factors, and in ``VNNGP`` and ``NPVI`` with inducing points at
    the data. Other methods take it as it is, and so do these after ``gp.mean.requires_grad_(False)``. Data that put no
    bound on a constant, such as labels of one class, let it stay where it starts, with a warning, until ``gp.extend``
    brings others.

    Args:
        value: initial value, in the units of the latent function; if None, the method starts it at a robust level of
            its data.
        num_latents: L; None is one function.
    """

    def __init__(self, value: float | None = None, num_latents: int | None = None) -> None:
        super().__init__()
        if value is not None:
            check_number("ConstantMean", "value", value, -math.inf)
        if num_latents is not None:
            check_int("ConstantMean", "num_latents", num_latents, 1)
            check_memory("ConstantMean", "values", num_latents, torch.get_default_dtype())
        self.is_set = value is not None
        shape = () if num_latents is None else (num_latents,)
        self.value = scaled(torch.full(shape, 0.0 if value is None else float(value)), 1.0)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a number or tensor assigned to `value` is kept when a method starts from its data."""
        super().__setattr__(name, value)
        if name == "value" and isinstance(value, int | float | Tensor):
            self.is_set = True

    def forward(self, x: Tensor) -> Tensor:
        value = self.unless_held("value", self.value).to(x.dtype)
        return value.expand(*x.shape[:-1], *value.shape)

    def basis(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B p"]:
        return torch.ones_like(x[:, :1])

    @property
    def coefficients(self) -> Float[Tensor, "p *L"]:
        return self.value[None]

    @torch.no_grad()
    def assign(self, coefficients: Float[Tensor, "p L"]) -> None:
        assign(self, "value", self.unless_held("value", coefficients[0]))

    @torch.no_grad()
    def start(self, level: Float[Tensor, " *L"], spread: Float[Tensor, " *L"], x: Float[Tensor, "N D"]) -> None:
        if "value" not in self._pyro_params:
            return
        level, unit = _in_shape(level, spread, self.value.shape)
        is_learned = self.is_learned
        self.is_set, self.value = True, scaled((self.value.detach() if self.is_set else level).to(x), unit)
        self.value_unconstrained.requires_grad_(is_learned)


class LinearMean(BasisMean):
    r"""A linear mean function of some columns, and of waves of some, :math:`\mu(x) = c + s^\top (b(x) - \bar b)`.

    b(x) has the columns `active_dims`, then :math:`\sin(2 \pi x_d / P)` and :math:`\cos(2 \pi x_d / P)` for each
    period P of each column d in `periods`. A monthly series in years with a trend and a season of two harmonics has the
    mean ``LinearMean(1, active_dims=[2], periods={2: [1, 1/2]})`` if time is column 2.

    Without a prior, c and s are parameters, and predictions have their uncertainty, as in universal kriging, where they
    have the level of a :class:`ConstantMean`. With one, they are the sites ``mean.value`` and ``mean.slope`` of a
    method: their posterior is part of :meth:`~pyro_nngp.models.base.Method.summary` and of exports to ArviZ, and
    predictions have its uncertainty.

    Args:
        input_dim: number of columns that enter by themselves; 0 for waves alone.
        num_latents: number L of functions, each with its coefficients; None is one.
        prior: distribution of a number, the prior of each coefficient in the units of the data; or "weak", normal
            distributions with 10 times the spread of f in the data, per standard deviation of the column, as their
            standard deviations, whatever the units; None makes the coefficients parameters.
        active_dims: the columns; None is all of them.
        periods: for a column number, a period or several, in the units of the column: waves that repeat, such as
            seasons. Periods P, P/2 and P/3 are three harmonics of P.

    Attributes:
        value: c, the level at the center of the data, () or (L,).
        slope: s, (S,) or (S, L), for S columns and waves.
        center: :math:`\bar b`, (S,), which the method sets to the center of its data.
        waves: a pair (d, P) for each sine and cosine.
        posterior_loc, posterior_tril: mean and Cholesky factor of the covariance of the joint posterior of (c, s),
            flattened in this order, where the method solves for it.

    Raises:
        TypeError: if `prior` is no distribution of a number.
        ValueError, TypeError: if ``active_dims`` are not ``input_dim`` columns, ``periods`` are no positive numbers
            by column, or inputs lack one of the columns.
    """

    trained_buffers = frozenset({"posterior_loc", "posterior_tril"})  # not part of the identity of a run

    center: Tensor
    posterior_loc: Tensor
    posterior_tril: Tensor
    waves: tuple[tuple[int, float], ...] = ()  # of files that were written before there were any

    def __init__(
        self,
        input_dim: int,
        num_latents: int | None = None,
        prior: Any | Literal["weak"] | None = None,
        active_dims: Sequence[int] | None = None,
        periods: Mapping[int, float | Sequence[float]] | None = None,
    ) -> None:
        super().__init__()
        self.waves = _waves({} if periods is None else periods)
        check_int("LinearMean", "input_dim", input_dim, 0 if self.waves else 1, "Pass the number of columns.")
        check_memory("LinearMean", "slopes", input_dim, torch.get_default_dtype(), "Pass the number of columns.")
        if active_dims is not None:
            check_sequence("LinearMean", "active_dims", active_dims, "List column numbers.")
        columns = active_dims.tolist() if isinstance(active_dims, np.ndarray) else list(active_dims or ())
        for column in columns:
            check_int("LinearMean", "active_dims", column, cure="List column numbers.")
        if num_latents is not None:
            check_int("LinearMean", "num_latents", num_latents, 1)
            check_memory("LinearMean", "slopes", num_latents * input_dim, torch.get_default_dtype())
        if active_dims is not None and len(columns) != input_dim:
            fail("LinearMean", "active_dims", f"of length {input_dim}", len(columns), "Make it agree with input_dim.")
        self.active_dims = columns if active_dims is not None or input_dim == 0 else None
        num_slopes = input_dim + 2 * len(self.waves)
        self.is_set, self._single, self._given_prior = False, num_latents is None, prior is not None
        self._weak = isinstance(prior, str) and prior == "weak"
        shape = () if num_latents is None else (num_latents,)
        self.register_buffer("center", torch.zeros(num_slopes))
        size = (1 + num_slopes) * max(1, len(torch.zeros(shape).reshape(-1)))
        self.register_buffer("posterior_loc", torch.zeros(size if prior is not None else 0))
        self.register_buffer("posterior_tril", torch.eye(size if prior is not None else 0))
        if prior is None:
            self.value = scaled(torch.zeros(shape), 1.0)
            self.slope = scaled(torch.zeros(num_slopes, *shape), 1.0)
            return
        prior = dist.Normal(torch.tensor(0.0), 1.0) if self._weak else prior
        if not isinstance(prior, TorchDistributionMixin) or tuple(prior.batch_shape + prior.event_shape):
            cure = 'Pass one such as dist.Normal(0.0, 10.0), or "weak".'
            fail("LinearMean", "prior", "to be a Pyro distribution of a number", f"{prior!r:.60}", cure, TypeError)
        self.value = PyroSample(prior.expand(shape).to_event(len(shape)))
        self.slope = PyroSample(prior.expand((num_slopes, *shape)).to_event(1 + len(shape)))

    def forward(self, x: Tensor) -> Tensor:
        value, slope, x = self.value.to(x.dtype), self.slope.to(x.dtype), self._centered(x)
        value, slope = self.unless_held("value", value), self.unless_held("slope", slope)
        return value + ((x * slope).sum(-1) if self._single else x @ slope)

    def basis(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B p"]:
        return torch.cat([torch.ones_like(x[:, :1]), self._centered(x)], -1)

    @property
    def coefficients(self) -> Float[Tensor, "p *L"]:
        return torch.cat([self.value[None], self.slope])

    @torch.no_grad()
    def assign(self, coefficients: Float[Tensor, "p L"]) -> None:
        assign(self, "value", self.unless_held("value", coefficients[0]))
        assign(self, "slope", self.unless_held("slope", coefficients[1:]))

    @torch.no_grad()
    def start(self, level: Float[Tensor, " *L"], spread: Float[Tensor, " *L"], x: Float[Tensor, "N D"]) -> None:
        if self.is_set or not (self._given_prior or self.is_free):
            return
        x = self._columns(x)
        shape = self._pyro_samples["value"].event_shape if self._given_prior else self.value.shape
        width = (x - x[:1]).double().std(0, correction=0)
        width = torch.where(width > 0, width, 1.0).reshape(-1, *[1] * len(shape))
        level, unit = _in_shape(level, spread, shape)
        self.is_set, self.center = True, x[0] + (x - x[:1]).mean(0)
        if self._given_prior:
            self._start_posterior(level.to(x), unit.to(x), (unit / width).to(x))
            return
        self.value = scaled(level.to(x), unit)
        self.slope = scaled(torch.zeros(x.shape[1], *shape).to(x), unit / width)

    def _start_posterior(self, level: Tensor, unit: Tensor, slope: Tensor) -> None:
        """Set weak priors, if wanted, and start the posterior at the level of the data."""
        shape = level.shape
        if self._weak:
            value = dist.Normal(level, _WEAK * unit)
            slopes = dist.Normal(torch.zeros_like(slope), _WEAK * slope)
            self.value = PyroSample(value.to_event(len(shape)))
            self.slope = PyroSample(slopes.to_event(1 + len(shape)))
        scales = torch.cat([unit.reshape(-1), slope.reshape(-1)]) * _START
        self.posterior_loc = torch.cat([level.reshape(-1), torch.zeros_like(slope).reshape(-1)])
        self.posterior_tril = torch.diag(scales)

    @property
    def is_normal(self) -> bool:
        """Whether the coefficients have normal priors."""
        return self._given_prior and all(
            isinstance(base_distribution(prior), dist.Normal) for prior in self._pyro_samples.values()
        )

    @property
    def own_shape(self) -> tuple[int, ...]:
        """() if all latent functions have the same coefficients, else (L,)."""
        return tuple(self._pyro_samples["value"].event_shape) if self._given_prior else super().own_shape

    @property
    def is_sampled_alone(self) -> bool:
        """Whether the coefficients have normal priors, and no method sets their posterior."""
        return self.is_normal and not self.has_posterior

    def prior_moments(self) -> tuple[Float[Tensor, " pL"], Float[Tensor, " pL"]]:
        """Prior means and precisions of the coefficients, flattened."""
        bases = [base_distribution(self._pyro_samples[name]) for name in ("value", "slope")]
        locs, scales = (torch.cat([getattr(base, name).reshape(-1) for base in bases]) for name in ("loc", "scale"))
        return locs.to(self.posterior_loc), scales.to(self.posterior_loc).pow(-2)

    @torch.no_grad()
    def set_posterior(self, loc: Float[Tensor, "*own p"], cov: Float[Tensor, "*own p p"]) -> None:
        if self.is_free:
            super().set_posterior(loc, cov)
            return
        p, size = loc.shape[-1], self.posterior_loc.numel()
        self.posterior_loc.copy_(loc.mT.flatten() if self.own_shape else loc)
        tril = cholesky(cov, 0.0).reshape(-1, p, p)
        self.posterior_tril.copy_(torch.diag_embed(tril.movedim(0, -1)).movedim(-2, 1).reshape(size, size))

    def deviation(self) -> Float[Tensor, "*shape"]:
        """Current coefficients minus their posterior means, (p, *L), and in vectorized programs (*S, p, *L)."""
        value, slope = self.sets("value"), self.sets("slope")
        dim = -1 - len(self.own_shape)
        values = torch.cat([value.unsqueeze(dim), slope], dim)
        return values - self.posterior_loc.reshape(values.shape[dim:])

    def own_guide(self, name: str, before: Mapping[str, Tensor]) -> Any:
        """The posterior of one site given those that were drawn before it, by name."""
        shape = self._pyro_samples[name].event_shape
        first = self.posterior_loc.numel() // (1 + len(self.center))
        loc, tril = self.posterior_loc, self.posterior_tril
        if name == "value":
            if self._single:
                return dist.Normal(loc[0], tril[0, 0])
            q = dist.MultivariateNormal(loc[:first], scale_tril=tril[:first, :first])
        else:
            value = before["value"].to(loc)
            residual = (value[..., None] if self._single else value.flatten(-len(shape) + 1)) - loc[:first]
            white = half_solve(tril[:first, :first], residual[..., None])[..., 0]
            q = dist.MultivariateNormal(loc[first:] + white @ tril[first:, :first].mT, scale_tril=tril[first:, first:])
        return q if len(shape) == 1 else dist.TransformedDistribution(q, [ReshapeTransform(q.event_shape, shape)])

    def own_quantiles(self, name: str, shift: Tensor) -> Tensor:
        """Quantiles of each entry of a site, `shift` standard deviations from the mean."""
        first, shape = self.posterior_loc.numel() // (1 + len(self.center)), self._pyro_samples[name].event_shape
        part = slice(None, first) if name == "value" else slice(first, None)
        quantiles = self.posterior_loc + shift.to(self.posterior_loc) * self.posterior_tril.norm(dim=-1)
        return quantiles[part].reshape(shape)

    def nodes(self) -> dict[str, Float[Tensor, "n *event"]]:
        """Values of the sites over which a quadratic function of them averages to its posterior expectation.

        They are the p + 1 vertices of a simplex that has the mean and the covariance of the posterior, by attribute.
        """
        loc, tril, count = self.posterior_loc, self.posterior_tril, self.posterior_loc.numel()
        size = torch.arange(1, count + 1, dtype=tril.dtype, device=tril.device)
        rows = torch.ones(count, count + 1).to(tril).tril() - torch.diag_embed(size, offset=1)[:count]
        helmert = rows / (size * (size + 1)).sqrt()[:, None]  # orthonormal rows, and to ones
        values = loc + math.sqrt(count + 1) * (tril @ helmert).mT
        first = count // (1 + len(self.center))
        shapes = {name: self._pyro_samples[name].event_shape for name in ("value", "slope")}
        return {
            "value": values[:, :first].reshape(-1, *shapes["value"]),
            "slope": values[:, first:].reshape(-1, *shapes["slope"]),
        }

    def labels(self, columns: Sequence[str]) -> list[str]:
        """A name for each slope.

        Args:
            columns: names of the columns of x.
        """
        own = list(columns) if self.active_dims is None else [columns[d] for d in self.active_dims]
        return own + [f"{wave}(2 pi {columns[d]} / {period:g})" for d, period in self.waves for wave in ("sin", "cos")]

    def _centered(self, x: Tensor) -> Tensor:
        return self._columns(x) - self.center.to(x)

    def _columns(self, x: Tensor) -> Tensor:
        """b(x), the columns and waves."""
        num_own, num_columns = len(self.center) - 2 * len(self.waves), x.shape[-1]
        if self.active_dims is None and num_columns != num_own:
            cure = f"Write LinearMean({num_columns}), or name its columns by active_dims=[...]."
            fail("LinearMean", "x", f"with input_dim = {num_own} columns", num_columns, cure)
        own = x if self.active_dims is None else x[..., self.active_dims]
        if not self.waves:
            return own
        last = max(d for d, _ in self.waves)
        if last >= num_columns:
            fail("LinearMean", "x", f"to have column {last}, as periods say", f"{num_columns} columns", _PERIODS)
        angles = torch.stack([2 * math.pi / period * x[..., d] for d, period in self.waves], -1)
        return torch.cat([own, torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)], -1)


def _waves(periods: Any) -> tuple[tuple[int, float], ...]:
    """The column and the period of each wave."""
    if not isinstance(periods, Mapping):
        fail("LinearMean", "periods", "to be a dictionary", type(periods).__name__, _PERIODS, TypeError)
    waves = []
    for column, values in periods.items():
        check_int("LinearMean", "periods", column, 0, _PERIODS)
        several = [values] if isinstance(values, int | float) else values
        check_sequence("LinearMean", "periods", several, _PERIODS)
        for period in several:
            check_positive("LinearMean", "periods", period, _PERIODS)
            waves.append((int(column), float(period)))
    return tuple(waves)


def _in_shape(level: Tensor, spread: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Levels and spreads in the shape of the coefficients: averages where all latent functions share one."""
    if len(shape) < level.dim():
        return level.mean(), spread.square().mean().sqrt()
    return level.expand(shape), spread.expand(shape)


__all__ = ["BasisMean", "ConstantMean", "LinearMean"]
