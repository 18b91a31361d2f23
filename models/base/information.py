r"""Covariances of estimated hyperparameters, from the information that Gaussian data have of them.

The hyperparameters :math:`\theta` are on their unconstrained scales, where positive ones are logarithms. For a product
of conditional densities :math:`N(y_i \mid w_i^\top y_{n(i)}, v_i)` of data less the mean function, the information is

.. math:: H_{kl} = \sum_i \tfrac12\, \partial_k \log v_i\, \partial_l \log v_i
   + \partial_k w_i^\top C_{n(i) n(i)}\, \partial_l w_i / v_i,

C the covariance of the data. It is the expectation of minus the Hessian, and has no noise. If the neighbors precede i
(:class:`~pyro_nngp.models.Vecchia`), scores of different i are uncorrelated, and the covariance of the estimate is
:math:`H^{-1}`. In a pseudo-likelihood they are correlated: the total score is a quadratic form
:math:`y^\top A_k y`, and

.. math:: \mathrm{Cov}\, \hat\theta = H^{-1} J H^{-1}, \qquad J_{kl} = 2\, \mathrm{tr}(A_k C A_l C)

(Godambe's sandwich; Varin, Reid, Firth 2011, section 2.3). Coefficients of the mean are orthogonal to
:math:`\theta`, and have the covariance of generalized least squares. Derivatives by :math:`\theta` are central
differences in double precision.

Of more than 2,048 rows, 2,048 random ones count for all, with all of their neighbors; of a pseudo-likelihood, whose
scores are correlated nearby, more than 1,024 are represented by the 1,024 around a random one.

Likelihoods in which coefficients of the mean are maximized over underestimate variances. Intervals of conditional
densities are centered where a step of Newton's method on the restricted likelihood,
:math:`\log p(y \mid \theta, \hat\beta) - \tfrac12 \log |\sum_j a_j a_j^\top / v_j|`, leads from the estimate
(Harville 1977), and standard errors of coefficients are averaged over the distribution of :math:`\theta` around that
center.

Cost: O(p B K^3), of a pseudo-likelihood O(p U^3). Symbols: p hyperparameters, B rows, U of them and their neighbors.

Reference: Varin, Reid, Firth (2011), "An overview of composite likelihood methods", Statistica Sinica; Harville (1977),
"Maximum likelihood approaches to variance component estimation and to related problems", JASA.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from pyro.nn import PyroModule
from torch import Tensor
from torch.distributions import transform_to

from pyro_nngp._random import shuffled
from pyro_nngp.bound import Bound, read
from pyro_nngp.coefficients import posterior_of_coefficients
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.linalg import add_diagonal, cholesky, factor_inverse, factor_solve
from pyro_nngp.means import BasisMean
from pyro_nngp.models.base.posterior import Observed
from pyro_nngp.models.base.trend import normal_equations
from pyro_nngp.rows import EVERY

_STEP = 1e-4  # of differences, on the unconstrained scale
SOME_ROWS, SOME_TOGETHER = 2048, 1024
_RESTRICTED = 0.01  # step of differences of the determinant
_FARTHEST = 1.5  # from the estimates that hyperparameters are taken, on the unconstrained scale
_CHUNK = 256  # rows whose covariances of neighbors are held at once
_EVIDENCE_STEP, _TOLERANCE = 0.02, 1e-5  # of the gradient of the evidence, and of the solutions for q(u)
MOST_ROWS = 10_000
"""Rows up to which the evidence is solved for at changed hyperparameters."""
_WEAK = 1e-4  # precision of a normal prior that keeps directions without any information finite


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
        free = self.free if self.shift is None else _moved_by(self.free, self.shift)
        return {(each.module, each.name): each.value for each in free}

    def scales(self) -> dict[tuple[PyroModule, str], Tensor]:
        """Standard errors by module and attribute, of the shape of the unconstrained parameter."""
        sizes = [each.value.numel() for each in self.free]
        parts = self.cov.diagonal().sqrt().split(sizes)
        pairs = zip(self.free, parts, strict=True)
        return {(each.module, each.name): part.reshape(each.value.shape) for each, part in pairs}


def free_parameters(method: Any) -> list[Free]:
    """The parameters of kernel and likelihood that training changes."""
    found = []
    for part in ("kernel", "likelihood"):
        for module in method._modules[part].modules() if part in method._modules else ():
            for name, (constraint, _) in getattr(module, "_pyro_params", {}).items():
                value = module._parameters[f"{name}_unconstrained"]
                if value.requires_grad:
                    found.append(Free(module, name, constraint, value.detach().double().cpu()))
    return found


@torch.no_grad()
def of_conditionals(method: Any) -> Information:
    """Inverse information of conditional densities given preceding neighbors."""
    count = min(method.num_data, SOME_ROWS)
    rows = shuffled(method.num_data, 0, method.x.device)[:count]
    places = Places.of(method, rows)
    bread = sum(times * one.fisher() for one, times in _each_noise(places))
    cov = _inverse(bread * (method.num_data / count))
    if not isinstance(places.present.mean_function, BasisMean) or not places.present.mean_function.is_learned:
        return Information(places.free, cov)
    slopes = [(_log_root(places, k, _RESTRICTED) - _log_root(places, k, -_RESTRICTED)) for k in range(len(cov))]
    shift = (cov @ torch.stack(slopes) / (2 * _RESTRICTED)).clamp(-_FARTHEST, _FARTHEST)
    strengths, axes = torch.linalg.eigh(cov)
    points = axes * (len(cov) * strengths.clamp(0, _FARTHEST**2)).sqrt()  # of a cubature rule, exact to degree 3
    moved = [replace(places, free=_moved_by(places.free, shift + sign * p)) for p in points.mT for sign in (1, -1)]
    each = [_coefficient_root(places, there.present) for there in moved]
    errors = torch.stack([root.square().sum(-1) for root in each]).mean(0).sqrt()
    return Information(places.free, cov, shift, errors)


def _moved_by(free: list[Free], shift: Float[Tensor, " p"]) -> list[Free]:
    """Hyperparameters with a shift added on their unconstrained scales."""
    parts = shift.cpu().split([each.value.numel() for each in free])
    return [
        each._replace(value=each.value + part.reshape(each.value.shape)) for each, part in zip(free, parts, strict=True)
    ]


def _coefficient_root(places: "Places", bound: Bound) -> Float[Tensor, "*own c c"]:
    """Root of the covariance of the coefficients of the mean at some hyperparameters, in double precision."""
    rows = places.method.rows
    doubled = {name: None if value is None else value.double() for name, value in vars(rows).items() if name != "shard"}
    observed = Observed(replace(rows, **doubled), places.method.graph, bound)
    return posterior_of_coefficients(bound.mean_function, *normal_equations(observed))[1]


def _log_root(places: "Places", entry: int, step: float) -> Tensor:
    """The logarithm of the determinant of the root with one entry of the hyperparameters changed."""
    root = _coefficient_root(places, places.bound(entry, step))
    diagonal = root.diagonal(dim1=-2, dim2=-1).abs()
    return diagonal[diagonal > 0].log().sum()


@torch.no_grad()
def of_leave_one_out(method: Any) -> Information:
    """Godambe's sandwich for densities given the nearest others."""
    places = Places.around(method)
    bread: Any = 0.0
    meat: Any = 0.0
    for one, times in _each_noise(places):
        bread, meat = bread + times * one.fisher(), meat + times * _traces(one.forms())
    return Information(places.free, _sandwich(bread, meat) * (len(places.own) / method.num_data))


@torch.no_grad()
def of_blocks(method: Any) -> Information:
    """Godambe's sandwich for joint densities of points with their neighbors, each divided by their number."""
    places = Places.around(method)
    bread: Any = 0.0
    meat: Any = 0.0
    blocks = torch.cat([places.own[:, None], places.near], 1)
    n, size = len(places.rows), blocks.shape[1]
    index = (blocks[:, :, None] * n + blocks[:, None, :]).flatten()
    for one, times in _each_noise(places):
        tril = cholesky(one.cov[blocks[:, :, None], blocks[:, None, :]], 0.0)
        ratios, forms = [], []
        for change in one.changes(Gaussians.covariance):
            ratios.append(factor_solve(tril, change[blocks[:, :, None], blocks[:, None, :]]))  # C^-1 dC
            inner = factor_solve(tril, ratios[-1].mT)  # C^-1 dC C^-1
            form = change.new_zeros(n * n).index_add_(0, index, inner.flatten() / (2 * size))
            forms.append(form.reshape(n, n) @ one.cov)
        flat = torch.stack([ratio.flatten() for ratio in ratios])
        turned = torch.stack([ratio.mT.flatten() for ratio in ratios])
        bread, meat = bread + times * (flat @ turned.mT) / (2 * size), meat + times * _traces(forms)
    return Information(places.free, _sandwich(bread, meat) * (len(places.own) / method.num_data))


def of_evidence(method: Any) -> Information:
    """Inverse of minus the Hessian of the largest bound of all q(u), by differences of its gradient, O(p) solutions."""
    free, method = free_parameters(method), copy.deepcopy(method)
    tensors = [each.module._parameters[f"{each.name}_unconstrained"] for each in free_parameters(method)]
    columns = []
    for tensor in tensors:
        for entry in range(tensor.numel()):
            ends = []
            for step in (_EVIDENCE_STEP, -_EVIDENCE_STEP):
                with _moved(tensor, entry, step), method.profile.optimum(_TOLERANCE), torch.enable_grad():
                    slopes = torch.autograd.grad(method.profile.bound(), tensors)
                ends.append(torch.cat([slope.detach().flatten().double().cpu() for slope in slopes]))
            columns.append((ends[1] - ends[0]) / (2 * _EVIDENCE_STEP))
    hessian = torch.stack(columns)
    strengths, axes = torch.linalg.eigh((hessian + hessian.mT) / 2)
    return Information(free, (axes / strengths.clamp(min=_WEAK)) @ axes.mT)


@contextmanager
def _moved(tensor: Tensor, entry: int, step: float) -> Iterator[None]:
    """One entry of a parameter changed for the time of a block."""
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.view(-1)[entry] += step
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(before)


@dataclass(frozen=True)
class Places:
    """Some rows of the data with their neighbors, and the hyperparameters of which they have information.

    Attributes:
        method: the method.
        free: its hyperparameters.
        rows: the rows and their neighbors, (U,).
        own: positions of the B rows among them.
        near: positions of the neighbors, (B, K), -1 padded.
    """

    method: Any
    free: list[Free]
    rows: Int[Tensor, " U"]
    own: Int[Tensor, " B"]
    near: Int[Tensor, "B K"]

    @classmethod
    def of(cls, method: Any, rows: Int[Tensor, " B"]) -> "Places":
        """Rows and their neighbors in the graph of a method."""
        batch = method.graph.batch(rows)
        return cls(method, free_parameters(method), batch.rows, batch.targets, batch.neighbors)

    @classmethod
    def around(cls, method: Any) -> "Places":
        """All rows, or those nearest to a random one."""
        n = method.num_data
        if n <= SOME_TOGETHER:
            return cls.of(method, method.rows.every)
        center = torch.randint(n, (1,), generator=torch.Generator().manual_seed(0), device="cpu").to(method.x.device)
        return cls.of(method, method.graph.query(method.x[center], SOME_TOGETHER)[0])

    def bound(self, entry: int, step: float) -> Bound:
        """All hyperparameters in double precision, one entry changed by a step; those with priors at their medians."""
        medians = {key: value.double() for key, value in self.method.hyper_guide.medians().items()}
        return read(self.method, {**medians, **self._values(entry, step)}, is_median=True)

    @cached_property
    def present(self) -> Bound:
        """All hyperparameters in double precision, those with priors at their medians."""
        return self.bound(0, 0.0)

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
class Gaussians:
    """The densities of one output, or of all whose noise is the same."""

    places: Places
    output: int

    @cached_property
    def cov(self) -> Float[Tensor, "U U"]:
        """Covariance of the data."""
        return self.covariance(self.places.present)

    def covariance(self, bound: Bound, at: Any = EVERY) -> Float[Tensor, "... U U"]:
        """Covariance of the data at some hyperparameters: of all rows, or of those at sets of positions."""
        x = self._x[at]
        cov = self._kernel(bound)(x, x)
        return add_diagonal(cov, cov.diagonal(dim1=-2, dim2=-1) * bound.jitter + self._noise(bound)[at])

    def conditionals(self, bound: Bound) -> Float[Tensor, "B _"]:
        """Logarithms of the variances of the rows given their neighbors, and the neighbors' weights."""
        places, x, noise = self.places, self._x, self._noise(bound)
        w, var = graph_conditional(self._kernel(bound), x[places.own], x, places.near, noise, bound.jitter)
        return torch.cat([(var + noise[places.own]).log()[:, None], w], 1)

    def changes(self, function: Callable[["Gaussians", Bound], Tensor]) -> Iterator[Tensor]:
        """Derivatives of a function in each entry of the hyperparameters."""
        for entry in range(sum(each.value.numel() for each in self.places.free)):
            high, low = (function(self, self.places.bound(entry, step)) for step in (_STEP, -_STEP))
            yield (high - low) / (2 * _STEP)

    @cached_property
    def _present(self) -> tuple[Float[Tensor, " B"], Float[Tensor, "B K"]]:
        """Variances of the rows given their neighbors, and the neighbors' weights."""
        present = self.conditionals(self.places.present)
        return present[:, 0].exp(), present[:, 1:]

    @cached_property
    def _derivatives(self) -> tuple[Float[Tensor, "p B"], Float[Tensor, "p B K"]]:
        """Derivatives of the logarithms of the variances, and of the weights."""
        change = torch.stack(list(self.changes(Gaussians.conditionals)))
        return change[..., 0], change[..., 1:]

    def fisher(self) -> Float[Tensor, "p p"]:
        """The sum of the information of each row given its neighbors."""
        (var, _), (of_var, of_w), places = self._present, self._derivatives, self.places
        total = of_var @ of_var.mT / 2
        if len(places.rows) <= SOME_TOGETHER:
            dense = self._dense(of_w)
            return total + ((dense @ self.cov) / var[:, None]).flatten(1) @ dense.flatten(1).mT
        for some in torch.arange(len(var), device=var.device).split(_CHUNK):
            cov = self.covariance(places.present, places.near[some].clamp(min=0))
            some_w = of_w[:, some] * (places.near[some] >= 0)
            total = total + ((some_w[:, :, None] @ cov)[:, :, 0] / var[some, None]).flatten(1) @ some_w.flatten(1).mT
        return total

    def forms(self) -> list[Float[Tensor, "U U"]]:
        """A C for each hyperparameter, with the total score y' A y less its mean."""
        (var, w), (of_var, of_w), places = self._present, self._derivatives, self.places
        dense = self._dense(torch.cat([-w[None], of_w]))
        dense[0, torch.arange(len(places.own)), places.own] += 1.0  # residuals are linear in y
        forms = []
        for change, moved in zip(of_var, dense[1:], strict=True):
            form = dense[0].mT @ (dense[0] * (change / (2 * var))[:, None] + moved / var[:, None])
            forms.append((form + form.mT) / 2 @ self.cov)
        return forms

    def _dense(self, weights: Float[Tensor, "S B K"]) -> Float[Tensor, "S B U"]:
        """Numbers that belong to the neighbors of each row, as dense rows."""
        near, sets = self.places.near, len(weights)
        dense = weights.new_zeros(sets, len(near), len(self.places.rows))
        return dense.scatter_add_(-1, near.clamp(min=0).expand(sets, *near.shape), weights * (near >= 0).to(weights))

    @property
    def _x(self) -> Float[Tensor, "U D"]:
        return self.places.method.x[self.places.rows].double()

    def _kernel(self, bound: Bound) -> Any:
        return bind_double(bound.kernel, self.places.method.x.dtype)

    def _noise(self, bound: Bound) -> Float[Tensor, " U"]:
        return _noises(self.places, bound)[self.output]


def _noises(places: Places, bound: Bound) -> Float[Tensor, "O U"]:
    """Noise variances at the rows, once for all outputs or for each."""
    rows = places.method.rows
    y = rows.targets(places.rows).double()
    noise = gaussian_observations(rows.likelihood(bound, places.rows), y, None, torch.float64)[1]
    return noise.reshape(-1, noise.shape[-1])


def _each_noise(places: Places) -> Iterator[tuple[Gaussians, int]]:
    """The densities of outputs whose noise differs, and for how many outputs each stands."""
    count, outputs = len(_noises(places, places.present)), max(1, math.prod(places.method.latent_shape))
    for number in range(count):
        yield Gaussians(places, number), outputs // count


def _traces(forms: list[Float[Tensor, "U U"]]) -> Float[Tensor, "p p"]:
    """Covariances of quadratic forms of normal values."""
    flat, turned = (torch.stack([part.flatten() for part in parts]) for parts in (forms, [form.mT for form in forms]))
    return 2 * flat @ turned.mT


def _inverse(information: Float[Tensor, "p p"]) -> Float[Tensor, "p p"]:
    return factor_inverse(cholesky(information + _WEAK * torch.eye(len(information)).to(information), 0.0))


def _sandwich(bread: Any, meat: Any) -> Float[Tensor, "p p"]:
    slices = _inverse(bread)
    return slices @ meat @ slices


__all__ = [
    "MOST_ROWS",
    "Free",
    "Information",
    "free_parameters",
    "of_blocks",
    "of_conditionals",
    "of_evidence",
    "of_leave_one_out",
]
