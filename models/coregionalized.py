r"""Leave-one-out training of several correlated outputs: a linear model of coregionalization on nearest neighbors.

:math:`y(x) = c(x) + G g(x) + \epsilon` with independent Gaussian processes :math:`g_1..g_Q` gives the outputs of points
i and j the covariance :math:`\sum_q G_q G_q^\top k_q(x_i, x_j)`, T x T. The objective of LOO-k (Jankowiak and Pleiss
2021, eq. 9) then consists of T-dimensional densities given K T values (section 5.7 there).

Differs from the paper: a noise variance per output; neighbors under the metric :math:`\frac1Q \sum_q 1 / \ell_{qd}^2`
of all kernels' lengthscales.

Cost per step: O(B (K T)^3) time and, for the gradients, O(B (K T)^2) memory, independent of N: train on batches.
Symbols: T outputs, Q latent functions, G mixing matrix (T, Q).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro.nn import PyroModule, PyroParam, PyroSample, pyro_method
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_nngp._checks import check_inputs, check_same_kind, check_tensor, fail
from pyro_nngp.bound import Bound
from pyro_nngp.coefficients import MOST_LEVERAGE, Trend, joint_trend
from pyro_nngp.conditionals.mixed_precision import needs_float64
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributions.partly_observed import PartlyObservedNormal
from pyro_nngp.hyperparameters import assign, release, scaled
from pyro_nngp.hyperparameters.values import Values, stacked_sets
from pyro_nngp.kernels import Matern52
from pyro_nngp.kernels.binding import check_covariance, check_kernels
from pyro_nngp.kernels.metric import column_scale
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.linalg import add_diagonal, cholesky, half_solve, in_blocks, solve_triangular
from pyro_nngp.models.base import Method, Posterior, Program, neighbor_choice
from pyro_nngp.models.base.arguments import check_unshared
from pyro_nngp.models.base.draws import Draw
from pyro_nngp.models.base.neighbor_choice import first_neighbors
from pyro_nngp.models.base.output_arguments import check_loading
from pyro_nngp.models.base.targets import SeparateTargets
from pyro_nngp.neighbors import NearestOthers, nearest
from pyro_nngp.rows import At, Part
from pyro_nngp.starts.from_data import Start
from pyro_nngp.starts.outputs import principal_axes, start_from_component
from pyro_nngp.variational.coregionalized import changes_of_mean

_LEVEL_ROWS = 4096  # rows that determine the coefficients of the mean
_COPIES = 6  # copies of the neighbors' covariance in memory while its Cholesky factor is computed


class CoregionalizedLOO(Method):
    r"""Gaussian processes for T correlated outputs, trained on nearest-neighbor leave-one-out densities.

    The model, n(n) the K nearest other points of point n:

    .. math::
        y_n \mid y_{n(n)} &\sim N(m_n, S_n), \quad n = 1..N, \\
        m_n &= c(x_n) + C_{n,n(n)} C_{n(n),n(n)}^{-1} (y_{n(n)} - c(x_{n(n)})), \quad
        S_n = C_{n,n} - C_{n,n(n)} C_{n(n),n(n)}^{-1} C_{n(n),n},

    with T x T blocks :math:`C_{ij} = \sum_q G_q G_q^\top k_q(x_i, x_j) + 1[i = j]\, \mathrm{diag}(\sigma^2)`. Sites:
    ``y``, of event shape (T,), and one for each hyperparameter that has a prior.

    Predictions of f refer to the T noise-free outputs :math:`c(x) + G g(x)`, given the nearest training points:
    moments (T, P), joint draws (S, T, P), with the uncertainty of a level and of slopes that are learned, jointly over
    the outputs: universal cokriging. The predictive distribution of y is joint over the outputs of a point: batch
    shape (P,), event shape (T,). Either costs O(P (K T)^3) per posterior draw.

    Args:
        x: inputs (N, D).
        y: targets (N, T), T > 1. NaN are missing values, in any pattern, such as outputs at other sites; they are left
            out of the densities and of the neighbors' values. K counts sites.
        kernels: one for each of the Q latent functions, or Q for kernels of Matern52 with one lengthscale per column;
            their variances and the columns of G share their scale. Unset hyperparameters start from the data.
        likelihood: Gaussian with a variance that broadcasts against (T, 1); None has one variance per output.
        num_neighbors: K; None is 16, or all others where there are fewer.
        mixing: initial G (T, Q), or a prior; None starts at the principal axes of the outputs.
        mean: mean function ``(B, D) -> (B, T)``, or ``(B,)`` for all outputs; None is a learnable constant per output.
        jitter: relative nugget; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function; None takes the metric of the kernel.
        offset: of each row, as in :class:`~pyro_nngp.models.base.Method`.
        seed: seed of the order that breaks ties between neighbors at one distance.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, K out of range, a likelihood
            that is not Gaussian, no kernels.

    Reference: Alvarez, Rosasco, Lawrence (2012), "Kernels for vector-valued functions: a review", section 4.2.
    """

    _hyperparameters = ("mixing",)
    _targets = SeparateTargets()
    refresh_neighbors = neighbor_choice.refresh_neighbors
    prediction_neighbors = neighbor_choice.prediction_neighbors

    @from_tables
    def __init__(
        self,
        x: Float[Tensor, "N D"] | Table,
        y: Float[Tensor, "N T"] | Table,
        kernels: Sequence[Any] | int,
        likelihood: Likelihood | None = None,
        *,
        num_neighbors: int | None = None,
        mixing: Float[Tensor, "T Q"] | PyroParam | PyroSample | None = None,
        mean: Callable | None = None,
        jitter: float | None = None,
        metric: Float[Tensor, " *D"] | Callable | None = None,
        offset: Float[Tensor, "N *L"] | Table | None = None,
        seed: int = 0,
    ) -> None:
        where = type(self).__name__
        if not isinstance(y, Tensor) or y.dim() != 2 or y.shape[1] < 2:
            fail(where, "y", "of shape (N, T) with T > 1", getattr(y, "shape", type(y).__name__), "Use LOO for one.")
        check_inputs(where, "x", x)
        if isinstance(kernels, int) and not isinstance(kernels, bool):
            if not 1 <= kernels <= len(x):
                fail(where, "kernels", f"in 1..{len(x)}", kernels, "It is the number of latent functions.")
            kernels = [Matern52(x.shape[1]) for _ in range(kernels)]
        functions = check_kernels(where, kernels)
        t, q = y.shape[1], len(functions)
        is_open = likelihood is None
        likelihood = Gaussian(torch.ones(t, 1)) if likelihood is None else likelihood
        if not isinstance(likelihood, Gaussian):
            cure = "Fit one LOO model per output."
            fail(where, "likelihood", "to be Gaussian", type(likelihood).__name__, cure, TypeError)
        if not isinstance(mixing, PyroParam | PyroSample | None):
            check_tensor(where, "mixing", mixing)
            check_same_kind(where, x=x, mixing=mixing)
        if isinstance(mixing, Tensor):
            check_loading(where, mixing, (t, q))
        for each in functions:
            check_unshared(where, "kernels", each, x)
            release(each)
        super().__init__(x, y, PyroModule[nn.ModuleList](functions), likelihood, mean, jitter, metric, offset=offset)
        for each in functions:
            check_covariance(where, each, x)
        spread = column_scale(_filled(x, y))[:, None]
        start = x.new_zeros(t, q) if mixing is None else mixing
        self.mixing: Any = scaled(start.to(x), spread) if isinstance(start, Tensor) else start
        self._start(partial(self._start_outputs, mixing is None, is_open))
        k = first_neighbors(where, num_neighbors, x, 16)
        self.graph = NearestOthers(x, k, seed=seed, metric=self._neighbor_metric())

    @torch.no_grad()
    def _start_outputs(
        self, starts_mixing: bool, starts_noise: bool, at: Values, trend: Callable[[Tensor], Tensor] | None
    ) -> Start:
        """Start each kernel from one principal component of the standardized outputs, and mixing from the axes.

        With more kernels than outputs, components are used again, at shorter lengthscales.
        """
        y = _filled(self.x, self.y).double()
        if self.offset is not None:
            y = y - _outputs_last(self.offset.movedim(0, -1)).double()
        if trend is not None:
            y = y - _outputs_last(trend(self.rows.every)).double()
        level, spread = y.median(0).values, column_scale(y)
        outputs = ((y - level) / spread).clamp(-8, 8)
        values, axes = principal_axes(outputs)
        values = values.clamp(min=1e-12)
        count, rest = len(self.kernel), values.clone()
        columns, noise = [], values.new_zeros(len(axes))
        for q, kernel in enumerate(self.kernel):
            which = q % len(axes)
            component = outputs @ axes[:, which] / values[which].sqrt()
            likelihood = start_from_component(kernel, self.x, component, self.jitter, q // len(axes), at)
            columns.append(axes[:, which] * values[which].sqrt() / (1 + q // len(axes)))
            noise += axes[:, which].square() * values[which] * likelihood.variance.detach().double()
            rest[which] = 0.0
        noise = noise / max(1, count // len(axes)) + (axes.square() * rest).sum(-1) / 2
        if starts_mixing:
            assign(self, "mixing", spread[:, None] * torch.stack(columns, -1))
        if starts_noise:
            self.likelihood.variance = (noise.clamp(min=1e-4) * spread.square())[:, None].to(self.x)
        return Start(level, spread)

    @property
    def num_plates(self) -> int:
        """Number of plates of the model, 1 for the data: the outputs of a point are one event."""
        return 1

    @pyro_method
    def model(self, idx: Int[Tensor, " I"] | None = None) -> Tensor:
        r"""The leave-one-out densities of a batch of data (None: all); returns its y, (I, T).

        .. math:: y_n \mid y_{n(n)} \sim N(m_n, S_n)
        """
        program, batch = Program.model(self, idx), self.graph.batch(idx)
        near = batch.rows[batch.neighbors]
        sets, shape = program.sets()
        moments = [self.posterior(one).given_neighbors(program.x, near, True, program.at) for one in sets]
        m, s_tril = (stacked_sets(list(values), shape) for values in zip(*moments, strict=True))
        m, s_tril = program.outside(m, 2), program.outside(s_tril, 3)
        data, _ = program.plates
        with data:  # eq. 9, with T outputs (section 5.7)
            target = PartlyObservedNormal(m, scale_tril=s_tril, validate_args=False)
            return pyro.sample(self.site("y"), target, obs=program.y.mT, infer={"given_data": True})

    @pyro_method
    def guide(self, idx: Int[Tensor, " I"] | None = None) -> None:
        """The guide of the hyperparameters; nothing else is latent."""
        Program.guide(self, idx)

    def posterior(self, bound: Bound, draw: Draw | None = None, part: Part | None = None) -> "Coregionalized":
        """The outputs given the outputs of the nearest rows; a posterior draw has no latent values."""
        posterior = Coregionalized(self.rows, self.graph, bound)
        return posterior if part is None else posterior.on(part)

    def _append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        super()._append_rows(x, y, by_row)
        self.graph.append(x)

    def _keep_rows(self, rows: Int[Tensor, " S"]) -> None:
        super()._keep_rows(rows)
        self.graph = self.graph.subset(rows)

    def _show_functions(self) -> str:
        return f", T={self.num_latents}, Q={len(self.kernel)}"


@dataclass(frozen=True)
class Coregionalized(Posterior):
    """T correlated outputs given the nearest rows, latent functions integrated out."""

    def find_trend(self) -> Trend:
        """The coefficients of the mean functions of all outputs, jointly, under a flat prior.

        By generalized least squares, from densities given preceding rows; O((K T)^3) for each of some rows.
        """
        rows, mean = self.rows, self.bound.mean_function
        part = rows.preceding(self.graph, min(_LEVEL_ROWS, rows.num_rows), self.graph.metric)
        places, near = part.places, part.graph
        near = torch.where(near < 0, -1, places[near])
        weights, tril = self._weights(rows.x[places], rows.x, near, True)
        missing = rows.y[places].isnan()
        rest = self._rest(rows.x[places], near, weights).masked_fill(missing[..., None], 0.0).double()
        cov = (tril @ tril.mT).double().masked_fill(missing[:, :, None] | missing[:, None, :], 0.0)
        white = half_solve(cholesky(add_diagonal(cov, missing.double()), 0.0), rest)
        information = (white.mT @ white).sum(0)
        return joint_trend(mean, information)

    def given_neighbors(
        self, x: Float[Tensor, "B D"], near: Int[Tensor, "B K"], noisy: bool, own: At | None = None
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T T"]]:
        r"""Means m and Cholesky factors of S of the outputs at x given y at near rows.

        .. math:: m_n = c(x_n) + C_{n,n(n)} C_{n(n),n(n)}^{-1} (y_{n(n)} - c(x_{n(n)})), \quad
           S_n = C_{n,n} - C_{n,n(n)} C_{n(n),n(n)}^{-1} C_{n(n),n}

        Args:
            x: points.
            near: rows of the neighbors of each.
            noisy: whether the outputs have noise.
            own: the rows of x among the data, whose offset counts; None for new points.
        """
        return self._given_neighbors(x, near, noisy, own)[:2]

    def _given_neighbors(
        self, x: Tensor, near: Tensor, noisy: bool, own: At | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Moments as of :meth:`given_neighbors`, and a root (B, T, q) of what coefficients of the mean add to S."""
        weights, tril = self._weights(x, self.rows.x, near, noisy)
        mean = self._mean(self.rows.x[near].flatten(0, 1), near.flatten()).unflatten(0, near.shape)
        residual = (self.rows.y[near] - mean).nan_to_num()  # missing values have no weight
        loc = self._mean(x, own) + (weights @ residual.flatten(1).to(weights)[..., None])[..., 0].to(x)
        tril = tril.to(x)
        return loc, tril, self._level_root(self._rest(x, near, weights)) if self.bound.trend is not None else None

    def _rest(
        self, x: Float[Tensor, "B D"], near: Int[Tensor, "B K"], weights: Float[Tensor, "B T KT"]
    ) -> Float[Tensor, "B T C"]:
        """Outputs at points given those at near rows, per unit of each coefficient of the mean."""
        mean, t = self.bound.mean_function, weights.shape[1]
        known = changes_of_mean(mean, self.rows.x[near.clamp(min=0)].flatten(0, 1), t).unflatten(0, near.shape)
        return changes_of_mean(mean, x, t).to(weights) - weights @ known.flatten(1, 2).to(weights)

    def _level_root(self, rest: Float[Tensor, "B T C"]) -> Float[Tensor, "B T q"]:
        """A root of the covariance that the coefficients of the mean bring."""
        return rest @ cast(Trend, self.bound.trend).root.flatten(0, -2).to(rest)

    def moments(self, x_new: Float[Tensor, "P D"], near: Any) -> tuple[Tensor, Tensor]:
        """O(P (K T)^3) time; O(P K T^2) memory, O(P (K T)^2) where gradients are recorded."""
        loc, tril, root = self._given_neighbors(x_new, near, noisy=False)
        added = 0.0 if root is None else root.square().sum(-1)
        return loc.mT, (tril.square().sum(-1) + added).mT

    def response_moments(self, x_new: Float[Tensor, "P D"], near: Any) -> tuple[Tensor, Tensor]:
        """Means (P, T) and Cholesky factors (P, T, T) of y."""
        loc, tril, root = self._given_neighbors(x_new, near, noisy=True)
        return loc, tril if root is None else cholesky(tril @ tril.mT + root @ root.mT, 0.0)

    def response(self, loc: Tensor, spread: Tensor, by_row: Mapping[str, Tensor]) -> Distribution:
        return dist.MultivariateNormal(loc, scale_tril=spread)

    def given_f(self, f: Tensor, by_row: Mapping[str, Tensor]) -> Distribution:
        return self.bound.likelihood.for_rows(**by_row).marginal(f, torch.zeros_like(f))

    def shifted(self, loc: Tensor, offset: Tensor) -> Tensor:
        return loc + _outputs_last(offset)

    def joint(self, x_new: Float[Tensor, "P D"], near: Any, count: int) -> Float[Tensor, "S *L P"]:
        """O(P (K T)^3), O(P K T^2) per draw; O(P T (K T + S)) memory."""
        x, n = self.rows.x, self.rows.num_data
        weights, tril = self._weights(x_new, torch.cat([x, x_new]), near, noisy=False)
        t, old = tril.shape[-1], (near < n)[..., None]
        residual = (self.rows.y - self._mean(x, slice(None))).nan_to_num()[near.clamp(0, n - 1)] * old
        noise = torch.randn(len(x_new), t, count, dtype=weights.dtype, device=x_new.device)
        values = weights @ residual.flatten(1).to(weights)[..., None] + tril @ noise
        # Among the new points, T outputs each, the blocks of weights are one sparse triangle of P T rows.
        rows = torch.where(old, -1, (near - n)[..., None] * t + torch.arange(t, device=near.device)).flatten(1)
        triangle = weights.flatten(0, 1), rows.repeat_interleave(t, 0)
        values = solve_triangular(*triangle, values.permute(2, 0, 1).flatten(1))
        if self.bound.trend is not None:  # f less its mean falls with the data less theirs, and the mean rises
            at = changes_of_mean(self.bound.mean_function, x_new, t).to(weights)
            seen = weights * old.expand(-1, -1, t).flatten(1)[:, None]
            falls, rises = self._level_root(self._rest(x_new, near.clamp(max=n - 1), seen) - at), self._level_root(at)
            roots = [part.permute(2, 0, 1).flatten(1) for part in (falls, rises)]
            root = solve_triangular(*triangle, roots[0]) + roots[1]
            values = values + torch.randn(count, len(root)).to(root) @ root
        return values.unflatten(1, (-1, t)).mT.to(x_new) + self._mean(x_new).mT

    def others(self, rows: Int[Tensor, " I"], num_neighbors: int | None) -> tuple[Tensor, Tensor]:
        """The rows and the nearest others of each."""
        self._check_neighbors(num_neighbors, self.rows.num_rows - 1)
        return rows, self.graph.others(num_neighbors, rows)

    def leave_one_out(self, others: tuple[Tensor, Tensor]) -> Float[Tensor, " I"]:
        """All outputs of a point given the outputs of its nearest others; O(I (K T)^3)."""
        rows, near = others
        loc, tril, root = self._given_neighbors(self.rows.x[rows], near, True, rows)
        if root is not None:
            loc, tril = _without_own(loc, tril, root, self.rows.y[rows])
        return PartlyObservedNormal(loc, scale_tril=tril, validate_args=False).log_prob(self.rows.y[rows])

    def entries(self, x_new: Float[Tensor, "P D"], near: Any) -> int:
        return len(near) * self._block_entries(near.shape[1])

    def loo_entries(self, others: tuple[Tensor, Tensor]) -> int:
        return self.entries(self.rows.x, others[1])

    def _mean(self, x: Float[Tensor, "B D"], own: At | None = None) -> Tensor:
        """Values of the mean function, (B, T), or (B, 1) if all outputs share it; with the offset of `own` rows."""
        mean = self.bound.mean(x) if own is None else self.rows.mean(self.bound, own, x)
        return _outputs_last(mean)

    def _weights(
        self, x: Float[Tensor, "B D"], points: Float[Tensor, "U D"], near: Int[Tensor, "B K"], noisy: bool
    ) -> tuple[Float[Tensor, "B T KT"], Float[Tensor, "B T T"]]:
        """Weights of the neighbors' outputs, point by point, and the Cholesky factor of the conditional covariance.

        In float64 where that is needed. Rows of `points` beyond the data are noise-free; `noisy`: whether the targets
        are noisy. -1 means no neighbor.
        """
        if needs_float64(x, self.bound.likelihood.variance, self.bound.covariances):
            return self._weights(x.double(), points.double(), near, noisy)

        def block(part: slice) -> tuple[Tensor, Tensor]:
            return self._block_weights(x[part], points, near[part], noisy)

        weights, tril = in_blocks(block, len(x), self._block_entries(near.shape[1]))
        return weights, tril

    def _block_entries(self, num_neighbors: int) -> int:
        """Entries of the temporaries of a point: covariances of its neighbors."""
        return _COPIES * ((num_neighbors + 1) * self.rows.y.shape[1]) ** 2

    def _block_weights(self, x: Tensor, points: Tensor, near: Tensor, noisy: bool) -> tuple[Tensor, Tensor]:
        bound, y = self.bound, self.rows.y
        g, (b, k) = bound.others["mixing"], near.shape
        t = len(g)
        block = torch.cat([points[near.clamp(min=0)], x[:, None]], 1)
        cov = block.new_zeros(b, k + 1, t, k + 1, t)
        for covariance, column in zip(bound.covariances, g.unbind(-1), strict=True):  # sum_q G_q G_q^T k_q(x_i, x_j)
            cov = cov + covariance(block, block)[:, :, None, :, None] * (column[:, None, None] * column)
        cov = cov.flatten(3).flatten(1, 2)
        variance = bound.likelihood.variance.to(cov.dtype).expand(t, 1)[:, 0]
        is_noisy = torch.cat([near < len(y), torch.full_like(near[:, :1], noisy, dtype=torch.bool)], -1)
        added = cov.diagonal(dim1=-2, dim2=-1) * bound.jitter + (is_noisy[..., None] * variance).flatten(1)
        seen = torch.ones(len(points), t, dtype=torch.bool, device=near.device)
        seen[: len(y)] = ~y.isnan()
        seen = torch.where((near >= 0)[..., None], seen[near.clamp(min=0)], False)
        real = torch.cat([seen, torch.ones_like(seen[:, :1])], 1).flatten(1)
        cov = torch.where(real[:, :, None] & real[:, None, :], cov, 0.0)
        tril = cholesky(add_diagonal(cov, torch.where(real, added, 1.0)), 0.0)
        inner, cross = tril[:, : k * t, : k * t], tril[:, k * t :, : k * t]
        weights = half_solve(inner, cross.mT, transposed=True).mT
        return weights, tril[:, k * t :, k * t :]


def _without_own(
    loc: Float[Tensor, "I T"], tril: Float[Tensor, "I T T"], root: Float[Tensor, "I T q"], y: Float[Tensor, "I T"]
) -> tuple[Float[Tensor, "I T"], Float[Tensor, "I T T"]]:
    r"""Moments of outputs given all others, coefficients of the mean integrated over given these others as well.

    With S and the residual e at the coefficients of all data, and the covariance V that they add, the moments move by
    :math:`-V (S - V)^{-1} e` and to :math:`S (S - V)^{-1} S`, the form for vectors of
    :meth:`~pyro_nngp.coefficients.Trend.left_out`.
    """
    missing = y.isnan()
    cov = (tril @ tril.mT).masked_fill(missing[:, :, None] | missing[:, None, :], 0.0)
    tril = cholesky(add_diagonal(cov, missing.to(cov)), 0.0)  # S, of the outputs that are there
    white = half_solve(tril, root.masked_fill(missing[..., None], 0.0))
    leverage, axes = torch.linalg.eigh(white @ white.mT)  # of S^(-1/2) V S^(-1/2)
    leverage = leverage.clamp(0.0, MOST_LEVERAGE)
    along = axes.mT @ half_solve(tril, (y - loc).nan_to_num()[..., None])
    shift = tril @ axes @ (along * (leverage / (1 - leverage))[..., None])
    half = tril @ axes * (1 - leverage).rsqrt()[..., None, :]
    return loc - shift[..., 0], cholesky(half @ half.mT, 0.0)


def _outputs_last(values: Tensor) -> Tensor:
    """Values (), (P,) or (T, P) as they are added to (P, T)."""
    return values.mT if values.dim() == 2 else values[..., None]


def _filled(x: Tensor, y: Tensor) -> Tensor:
    """Targets in which the nearest site with that output gives each missing value."""
    missing = y.isnan()
    if not bool(missing.any()):
        return y
    places, filled = x / column_scale(x).to(x), y.clone()
    for output in missing.any(0).nonzero()[:, 0].tolist():
        gone = missing[:, output]
        if bool(gone.all()):
            fail("CoregionalizedLOO", f"y[:, {output}]", "with values", "NaN in all rows", "Leave the output out.")
        near = nearest(places[gone], places[~gone], 1, progress=False)[:, 0]
        filled[gone, output] = y[~gone, output][near]
    return filled


__all__ = ["CoregionalizedLOO"]
