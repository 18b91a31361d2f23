r"""Posterior draws of factor loadings, with factors, coefficients and kernels unknown, given the sites of the data.

Outputs :math:`f_{pi} = b_p^\top z_i + a_p^\top u(x_i)` have Gaussian sites with targets t and precisions :math:`\tau`,
which stand for the likelihood (:mod:`pyro_nngp.variational.coregionalized`). A Markov chain draws in turn

* each factor :math:`u_f` given all else, from its prior precision plus a diagonal;
* the hyperparameters :math:`\phi_f` of its kernel by Metropolis steps, twice: once with the white values of the factor
  held, so that the factor moves along, and once with the factor held, where the scale moves along:
  :math:`(a_{\cdot f}, u_f) \to (s\, a_{\cdot f}, u_f / s)` leaves f as it is. Range and scale of a factor are hardly
  told apart within a window of a few ranges, so that proposals follow their correlation in the chain so far;
* for each factor f and each other one or basis function g, the s of :math:`(u_f, a_{\cdot g}) \to (u_f + s u_g,
  a_{\cdot g} - s a_{\cdot f})`, which leaves the outputs as they are and whose distribution is normal. Rotations of
  factors, and of levels and smooth factors, take thousands of rounds otherwise;
* coefficients and loadings of each output, a linear regression;
* the precisions of the normal distributions whose mixture the prior of the loadings is, and the shrinkage.

The ranges matter: with ranges held at estimates, 95 % intervals of residual correlations cover .75 of them in twelve
simulated sets of labels of 400 sites, 40 outputs and 5 factors, and .95 with ranges drawn
(``benchmarks/results/factors.md``). Neither the normal approximation nor the sites were to blame: a chain with
Polya-Gamma variables in their place covered no more with ranges held, and no more with ranges drawn.

Priors: of the loadings as in :mod:`pyro_nngp.loadings`; of numbers of the kernels that training changes, normal ones on
the unconstrained, for positive numbers logarithmic, scale, around the estimates with a standard deviation of 1. Those
that have priors are held at their medians.

Cost per round: for each factor a sparse or dense factorization of N values, and three evaluations of conditionals, O(N
K^3). Symbols: N points, T outputs, F factors, P basis functions, G kernels.

References: Bhattacharya, Dunson (2011), "Sparse Bayesian infinite factor models"; Haario, Saksman, Tamminen (2001), "An
adaptive Metropolis algorithm"; Liu, Sabatti (2000), "Generalised Gibbs sampler and multigrid Monte Carlo".
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from pyro.nn import PyroModule
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor, nn
from torch.distributions import Gamma, transform_to
from torch.nn.functional import normalize, pad
from tqdm.auto import tqdm

from pyro_nngp._checks import warn
from pyro_nngp._random import RandomStream
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.hyperparameters.module import freeze
from pyro_nngp.kernels import bind
from pyro_nngp.linalg import VecchiaFactor, cholesky, factor_solve, half_solve
from pyro_nngp.linalg.nested_dissection import Elimination
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.factor_solution import regression_of
from pyro_nngp.variational.factored_posterior import elimination_of

MOST_VALUES = 5000
"""Most values of all factors for which draws take a minute or two."""
_WARMUP, _ROUNDS, _MOST_ROUNDS = 400, 500, 4000  # rounds that do not count, between looks at R-hat, and at most
_R_HAT, _SHARE, _PAIRS = 1.1, 0.9, 1000  # of this share of so many pairs of outputs
_FAR = 1.2  # R-hat beyond which a warning says that the draws are too few
_FIRST_STEP, _LEAST_STEP = 0.2, 0.02  # standard deviations of proposals, at first and at least
_ADAPT_FROM = 20  # rounds after which proposals follow the chain


@torch.no_grad()
def draw_loadings(
    q: Any,
    given: Any,
    loadings: FactorLoadings,
    kernels: nn.ModuleList,
    medians: Mapping[tuple[PyroModule, str], Tensor],
    progress: bool,
) -> Float[Tensor, "S T F"]:
    """Draws of the loadings of factors of unit variance; the global random state stays as it is.

    Rounds take turns with the random numbers of other threads. The chain ends where nine tenths of the correlations of
    outputs have an R-hat of at most 1.1 between its halves.

    Args:
        q: a solved :class:`~pyro_nngp.variational.coregionalized.CoregionalizedObservations`.
        given: data, neighbors and hyperparameters, and the mean function as a module.
        loadings: their mode and prior.
        kernels: of the factors, one for each or one for all.
        medians: values of hyperparameters that have priors.
        progress: whether to show a bar.

    A warning says if the chain ends, after 4,000 draws, with an R-hat above 1.2.
    """
    regression, (target, precision) = regression_of(given, loadings), q.observations(given)
    target = target.double() + regression.coefficients @ regression.basis.mT
    parts = q.loc, target, precision, regression.basis, (regression.center, regression.precision)
    plan, stream = elimination_of(given.graph), RandomStream(0, [q.loc.device.index] if q.loc.is_cuda else [])
    draws: list[Tensor] = []
    with stream:
        chain = LoadingsChain(loadings, kernels, medians, given.graph, given.bound.jitter, *parts, plan)
    with tqdm(total=_WARMUP, desc="correlations", unit="round", disable=not progress) as bar:
        for _ in range(_WARMUP):
            with stream:
                chain.round(adapts=True)
            bar.update()
        while True:
            bar.total += _ROUNDS
            for _ in range(_ROUNDS):
                with stream:
                    chain.round(adapts=False)
                draws.append(chain.scaled_loading())
                bar.update()
            worst = _split_r_hat(torch.stack(draws))
            if worst <= _R_HAT or len(draws) >= _MOST_ROUNDS:
                break
    if worst > _FAR:
        warn(
            f"LMC.correlations: expected draws that agree between halves of the chain, got R-hat {worst:.2f} after "
            f"{len(draws)} of them: intervals are rough. Take fewer factors, or kernels with given lengthscales."
        )
    return torch.stack(draws).to(q.loc)


def _split_r_hat(draws: Float[Tensor, "S T F"]) -> float:
    """R-hat of the correlations between halves of a chain, of nine tenths of them."""
    unit, count = normalize(draws, dim=-1), draws.shape[1]
    first, second = torch.triu_indices(count, count, 1, device=draws.device)
    some = torch.linspace(0, len(first) - 1, min(len(first), _PAIRS), device=draws.device).long()
    if not len(some):
        return 1.0
    pairs = (unit[:, first[some]] * unit[:, second[some]]).sum(-1)
    return float(split_gelman_rubin(pairs[None]).nan_to_num(1.0).quantile(_SHARE))


class LoadingsChain:
    """The state of a chain, changed by :meth:`round`, in double precision.

    Args:
        loadings: mode and prior of the loadings.
        kernels: of the factors, one for each or one for all.
        medians: values of hyperparameters that have priors.
        graph: the points and their neighbors.
        jitter: relative nugget.
        u: factors to start from, (F, N).
        target: targets of the sites less the parts of the mean that are known, (T, N).
        precision: their precisions, (T, N), 0 where an output is missing.
        basis: basis functions of the mean, (N, P).
        prior: mean and precision of the normal priors of their coefficients, (T, P) each.
        plan: the order of elimination for the precision of a factor; None factorizes dense matrices.

    Attributes:
        kernels: a :class:`FactorKernel` for each kernel.
        loading, u, coefficients: (T, F), (F, N) and (T, P).
        ratios: the shrinkage, (F,).
        weights: precisions of the normal priors of the loadings, (T, F).
    """

    def __init__(
        self,
        loadings: FactorLoadings,
        kernels: nn.ModuleList,
        medians: Mapping[tuple[PyroModule, str], Tensor],
        graph: NeighborGraph,
        jitter: float,
        u: Float[Tensor, "F N"],
        target: Float[Tensor, "T N"],
        precision: Float[Tensor, "T N"],
        basis: Float[Tensor, "N P"],
        prior: tuple[Float[Tensor, "T P"], Float[Tensor, "T P"]],
        plan: Elimination | None,
    ) -> None:
        count = len(u)
        shares = count if len(kernels) == 1 else 1
        self.kernels = [
            FactorKernel(kernel, medians, graph, jitter, list(range(first, first + shares)))
            for kernel, first in zip(kernels, range(0, count, shares), strict=True)
        ]
        self._loadings, self._plan, self._prior = loadings, plan, prior
        self.target, self._precision, self._basis = target.double(), precision.double(), basis.double()
        self.loading, self.u = loadings.mode.double().clone(), u.double().clone()
        self.ratios, self._unit = loadings.shrinkage_mean.double().clone(), loadings.unit.double()
        self.coefficients = prior[0].double()
        self._draw_coefficients()

    def round(self, adapts: bool) -> None:
        """Draw everything once, for the present targets.

        Args:
            adapts: whether proposals may change; draws count from the rounds where they do not.
        """
        for kernel in self.kernels:
            self.draw_factors(kernel)
            self._move_along(kernel)
            self._rescale(kernel)
            self._shear(kernel)
            kernel.remember(float(self.loading[:, kernel.factors].norm().log()), adapts)
        self._draw_coefficients()
        self._draw_shrinkage()

    def mean(self) -> Float[Tensor, "T N"]:
        """What the sites observe, the mean and the factors."""
        return self.coefficients @ self._basis.mT + self.loading @ self.u

    def scaled_loading(self) -> Float[Tensor, "T F"]:
        """Loadings of factors of unit variance at the first point."""
        scale = torch.cat([kernel.variance().sqrt().expand(len(kernel.factors)) for kernel in self.kernels])
        return self.loading * scale

    def draw_factors(self, kernel: "FactorKernel") -> None:
        """Draw the values of the factors of a kernel, each given all else."""
        self._residual = self.target - self.mean()
        for f in kernel.factors:
            a, own = self.loading[:, f, None], self.u[f]
            diagonal = (self._precision * a.square()).sum(0)
            right = (a * self._precision * (self._residual + a * own)).sum(0)
            new = self._drawn(kernel.prior, diagonal, right)
            self._residual -= a * (new - own)
            self.u[f] = new

    def _drawn(self, prior: VecchiaFactor, diagonal: Tensor, right: Tensor) -> Float[Tensor, " N"]:
        """A draw from the normal distribution of precision P = Lambda + diag(diagonal) and mean P^-1 right."""
        noise = torch.randn(2, len(right), dtype=right.dtype, device=right.device)
        if self._plan is None:
            tril = prior.posterior_tril(diagonal)
            draw = factor_solve(tril, right[:, None]) + half_solve(tril, noise[0, :, None], transposed=True)
            return draw[:, 0]
        right = right + diagonal.sqrt() * noise[0] + prior.whiten_transposed(noise[1])
        return prior.multifrontal(self._plan, diagonal).solve(right)

    def _move_along(self, kernel: "FactorKernel") -> None:
        """A step for a kernel's hyperparameters with the white values of its factors held."""
        move = kernel.propose()[:-1]
        if not len(move) or (prior := kernel.at(kernel.place + move)) is None:
            return
        some = kernel.factors
        change = prior.prepared().color(kernel.prior.whiten(self.u[some])) - self.u[some]
        shift = self.loading[:, some] @ change
        gain = (self._precision * shift * (self._residual - shift / 2)).sum()
        if _accepted(float(gain) + kernel.log_prior(move)):
            kernel.move(move, prior)
            self.u[some] += change

    def _rescale(self, kernel: "FactorKernel") -> None:
        """A step for a kernel's hyperparameters and the scale of its loadings, with f held."""
        some = kernel.factors
        move = kernel.propose()
        prior = kernel.at(kernel.place + move[:-1])
        if prior is None:
            return
        log_scale, (count, _), n = float(move[-1]), self.loading.shape, len(prior)
        scale = math.exp(log_scale)
        before, after = kernel.prior.whiten(self.u[some]), prior.whiten(self.u[some]) / scale
        gain = (before.square().sum() - after.square().sum()) / 2
        gain = gain + len(some) * (prior.log_det() - kernel.prior.log_det()) / 2
        weights = self.weights[:, some] * self.loading[:, some].square()
        gain = gain - (scale**2 - 1) / 2 * weights.sum() + len(some) * (count - n) * log_scale
        if _accepted(float(gain) + kernel.log_prior(move[:-1])):
            kernel.move(move[:-1], prior)
            self.u[some] /= scale
            self.loading[:, some] *= scale

    def _shear(self, kernel: "FactorKernel") -> None:
        """Draw how much of each other factor and basis function a factor has, with f held."""
        size, (center, of_prior) = len(self.u), self._prior
        directions = torch.cat([self.u, self._basis.mT])
        white = kernel.prior.whiten(directions)
        precision = torch.cat([self.weights, of_prior], -1)
        theta = torch.cat([self.loading, self.coefficients - center], -1)
        for f in kernel.factors:
            own = theta[:, f].clone()
            for other in range(len(directions)):
                if other == f:
                    continue
                strength = white[other] @ white[other] + precision[:, other] @ own.square()
                slope = white[other] @ white[f] - (precision[:, other] * theta[:, other]) @ own
                s = (torch.randn_like(slope) - slope / strength.sqrt()) / strength.sqrt()
                white[f] += s * white[other]
                directions[f] += s * directions[other]
                theta[:, other] -= s * own
        self.u, self.loading, self.coefficients = directions[:size], theta[:, :size], theta[:, size:] + center

    def _draw_coefficients(self) -> None:
        """Draw coefficients and loadings of each output given the factors, after the weights of their priors."""
        self._draw_weights()
        center, precision = self._prior
        design, p = torch.cat([self._basis, self.u.mT], -1), self._basis.shape[1]
        weights = torch.cat([precision, self.weights], -1)
        right = (self._precision * self.target) @ design + pad(precision * center, (0, self.loading.shape[1]))
        information = torch.einsum("tn,np,nq->tpq", self._precision, design, design) + torch.diag_embed(weights)
        tril = cholesky(information, 0.0)
        noise = torch.randn_like(right)[..., None]
        theta = (factor_solve(tril, right[..., None]) + half_solve(tril, noise, transposed=True))[..., 0]
        self.coefficients, self.loading = theta[:, :p], theta[:, p:].contiguous()

    def _draw_weights(self) -> None:
        """Precisions of the normal distributions of loadings, whose mixture is a t distribution."""
        degrees, tau = self._loadings.degrees, self.ratios.cumprod(0)
        precision = tau / self._unit.square()[:, None]
        rate = (degrees + precision * self.loading.square()) / 2
        self.weights = precision * Gamma(torch.full_like(rate, (degrees + 1) / 2), rate).sample()

    def _draw_shrinkage(self) -> None:
        """Ratios of the precisions of successive factors."""
        count, size = self.loading.shape
        shapes = self._loadings.shapes.double()
        for f in range(size):
            spread = (self.weights * self.loading.square())[:, f:].sum() / self.ratios[f]
            new = Gamma(shapes[f] + count * (size - f) / 2, 1 + spread / 2).sample()
            self.weights[:, f:] *= new / self.ratios[f]
            self.ratios[f] = new


class FactorKernel:
    """A kernel of some factors in a chain, and its proposals.

    Attributes:
        factors: their numbers.
        place: its free numbers on the unconstrained scale.
        prior: (I - A, V) there.
        root: a root of the covariance of proposals, of the place and of the logarithm of the scale of the loadings.
    """

    def __init__(
        self,
        kernel: nn.Module,
        medians: Mapping[tuple[PyroModule, str], Tensor],
        graph: NeighborGraph,
        jitter: float,
        factors: list[int],
    ) -> None:
        self._kernel, self._graph, self._jitter, self.factors = freeze(kernel, medians), graph, jitter, factors
        self._parts, values = [], [graph.x.new_zeros(0, dtype=torch.float64)]
        for old, new in zip(kernel.modules(), self._kernel.modules(), strict=True):
            for name, (constraint, _) in getattr(old, "_pyro_params", {}).items():
                value = old._parameters[f"{name}_unconstrained"]
                if value is not None and value.requires_grad:
                    self._parts.append((new, name, constraint, value.shape))
                    values.append(value.detach().double().flatten())
        self.place = self._start = torch.cat(values)
        self._history: list[Tensor] = []
        self.root = torch.eye(len(self.place) + 1).to(self.place) * _FIRST_STEP
        self.prior = self._factor()

    def at(self, place: Float[Tensor, " d"]) -> VecchiaFactor | None:
        """(I - A, V) at other hyperparameters; None where a conditional variance is not positive."""
        self._set(place)
        prior = self._factor()
        return prior if bool((prior.var > 0).all()) else None

    def propose(self) -> Float[Tensor, " _"]:
        """A move of the place, and of the logarithm of the scale of the loadings."""
        return self.root @ torch.randn(len(self.root), dtype=self.root.dtype, device=self.root.device)

    def move(self, move: Float[Tensor, " d"], prior: VecchiaFactor) -> None:
        """Take a move, at which the prior is known."""
        self.place, self.prior = self.place + move, prior

    def variance(self) -> Float[Tensor, ""]:
        """Variance of the factors at the first point."""
        self._set(self.place)
        return bind(self._kernel).diag(self._graph.x[:1]).double()[..., 0]

    def log_prior(self, move: Float[Tensor, " d"]) -> float:
        """Change of the log prior density by a move."""
        old, new = self.place - self._start, self.place + move - self._start
        return float(old.square().sum() - new.square().sum()) / 2

    def remember(self, log_scale: float, adapts: bool) -> None:
        """Take note of the state, and let proposals follow the covariance of states so far."""
        if not adapts:
            return
        self._history.append(torch.cat([self.place, self.place.new_tensor([log_scale])]))
        if len(self._history) % _ADAPT_FROM == 0:
            later = torch.stack(self._history[len(self._history) // 2 :])
            cov = torch.cov(later.mT).view(len(self.root), -1) * 2.38**2 / len(self.root)
            self.root = cholesky(cov + _LEAST_STEP**2 * torch.eye(len(cov)).to(cov), 0.0)

    def _factor(self) -> VecchiaFactor:
        x, near = self._graph.x, self._graph.neighbors
        w, var = graph_conditional(bind(self._kernel), x, x, near, None, self._jitter)
        return VecchiaFactor(w.double(), var.double(), near, self._graph.levels())

    def _set(self, place: Float[Tensor, " d"]) -> None:
        sizes = [shape.numel() for *_, shape in self._parts]
        for (part, name, constraint, shape), value in zip(self._parts, place.split(sizes), strict=True):
            part.__dict__[name] = transform_to(constraint)(value.view(shape)).to(self._graph.x)


def _accepted(log_ratio: float) -> bool:
    return math.isfinite(log_ratio) and float(torch.rand(())) < math.exp(min(log_ratio, 0.0))


__all__ = ["MOST_VALUES", "FactorKernel", "LoadingsChain", "draw_loadings"]
