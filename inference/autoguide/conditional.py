r"""The Gaussian posterior of the Gaussian sites of a program at one value of its hyperparameters.

.. math:: q(z \mid \theta) \propto p(z \mid \theta) \prod_i t_i(\phi_i), \qquad \phi = \phi_0 + J z ,

with t the exponentials of quadratic functions (:mod:`pyro_nngp.inference.autoguide.quadratics`).

Values are vectors of leaves (:mod:`pyro_nngp.inference.autoguide.linear_predictor`): those with sparse columns of J
first, then the dense ones. The root of the precision is the root of the prior above :math:`H^{1/2} J`.

Cost: see :mod:`pyro_nngp.linalg.factored_precision`.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from pyro.distributions.util import scale_and_mask
from pyro.poutine import Trace
from scipy.linalg import solve_triangular
from torch import Tensor

from pyro_nngp.distributions import NNGP
from pyro_nngp.inference.autoguide.fit_check import Weighted
from pyro_nngp.inference.autoguide.linear_predictor import Blocks, Jacobian, gaussian_base, log_det_root
from pyro_nngp.inference.autoguide.quadratics import Marginals, Observations, Quadratic
from pyro_nngp.linalg import cholesky
from pyro_nngp.linalg.factored_precision import FactoredPrecision
from pyro_nngp.linalg.sparse_rows import SparseRows

_NUGGET = 1e-12  # of covariances, relative
_PRIOR_DRAWS = 16


class ConditionalPosterior:
    """The posterior q(z | theta).

    Args:
        trace: trace of the program at the hyperparameters, with leaves of zero or, if it is not linear, of the center.
        observed: the observed sites that depend on the leaves.
        jacobian: J at these leaves.
        blocks: the structure of J.
        at: for each observed site the distribution of phi at which its log likelihood is replaced.

    Attributes:
        mean: mean of the leaves, (d,).
        precision: precision matrix of the leaves.
        sparse_names, dense_names: names of the sites, in the order of the leaves.
    """

    def __init__(
        self,
        trace: Trace,
        observed: list[Observations],
        jacobian: Jacobian,
        blocks: Blocks,
        at: Sequence[Marginals],
    ) -> None:
        self.trace, self.observed = trace, observed
        self.sparse_names, self.dense_names = [*blocks.entries], [*blocks.dense]
        self._names = [*self.sparse_names, *self.dense_names]
        self._shapes = [jacobian.leaves[name].shape for name in self._names]
        self._positions, self._scales, self._dense = blocks.of(jacobian)
        for each, rows in zip(observed, self._rows(), strict=True):
            self._positions[rows] = _filled(self._positions[rows].reshape(len(each.phi), -1)).reshape(
                -1, self._positions.shape[1]
            )
        m, p = sum(shape.numel() for shape in self._shapes[: len(blocks.entries)]), self._dense.shape[1]
        self._prior = [self._prior_rows(name) for name in self.sparse_names]
        self._sparse = SparseRows(torch.from_numpy(self._positions), torch.from_numpy(self._scales)).matrix(m)
        self._quadratics = [each.quadratic(part) for each, part in zip(observed, at, strict=True)]
        roots = [each.root().double().cpu().numpy() for each in self._quadratics]
        of_data, beside = zip(*map(self._times_root, roots, self._rows()), strict=True)
        of_coefficients = SparseRows(torch.zeros(p, 1, dtype=torch.long), torch.zeros(p, 1, dtype=torch.float64))
        tables = [*self._prior, *of_data, of_coefficients]
        largest = max(self.processes, key=lambda name: self.prior(name).graph.num_points)
        x = self.prior(largest).graph.x
        plan = blocks.order.plan([table.columns for table in tables], x, self.sparse_place(largest).start, m)
        dense = [np.zeros((len(table.values), p)) for table in self._prior]
        self.precision = FactoredPrecision(tables, np.concatenate([*dense, *beside, np.eye(p)]), plan)
        leaves = torch.cat([jacobian.leaves[name].detach().flatten() for name in self._names]).double().cpu()
        here = torch.cat([each.phi.detach().double().cpu().flatten() for each in observed])
        self._phi_at_zero = here - self._product(leaves)
        self._means = [part.mean.double().cpu() for part in at]
        starts = zip(self._quadratics, self._means, self._split(self._phi_at_zero), strict=True)
        force = [_force(each, mean - start) for each, mean, start in starts]
        self.mean = self.precision.solve(self._transposed_product(torch.cat(force)))

    def __len__(self) -> int:
        return len(self.precision)

    @property
    def is_flat(self) -> bool:
        """Whether the prior of no site depends on the values of other sites."""
        priors = [self.prior(name) for name in self._names if name not in self.processes]
        return not any(prior.mean.requires_grad or prior.variance.requires_grad for prior in priors)

    @property
    def processes(self) -> list[str]:
        """Names of the processes."""
        return [name for name in self.sparse_names if isinstance(self.prior(name), NNGP)]

    def prior(self, name: str) -> Any:
        """The prior of a site, without independent dimensions."""
        return gaussian_base(self.trace.nodes[name]["fn"])

    @property
    def dense_shapes(self) -> list[torch.Size]:
        """Shapes of the dense leaves."""
        return self._shapes[len(self.sparse_names) :]

    def sparse_place(self, name: str) -> slice:
        """Position of the values of a sparse leaf in the vector of leaves."""
        i = self.sparse_names.index(name)
        start = sum(shape.numel() for shape in self._shapes[:i])
        return slice(start, start + self._shapes[i].numel())

    def phi(self, leaves: Float[Tensor, "*S d"]) -> list[Float[Tensor, "*S n k"]]:
        """Parameters of each observed site at leaves, by the linear approximation."""
        return self._split(self._phi_at_zero + self._product(leaves))

    def by_name(self, leaves: Float[Tensor, "*S d"]) -> dict[str, Tensor]:
        """Leaves by name, in their shapes."""
        parts = leaves.split([shape.numel() for shape in self._shapes], -1)
        shaped = [part.reshape(leaves.shape[:-1] + shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return dict(zip(self._names, shaped, strict=True))

    def draw(self, count: int) -> Float[Tensor, "S d"]:
        """Draws of the leaves."""
        return self.mean + self.precision.draw(count)

    def marginals(self) -> list[Marginals]:
        """Distribution of the parameters of each observed site under q."""
        result, slope, tril = [], self.precision.slope(), self.precision.dense_tril()
        tables = range(len(self._prior), len(self._prior) + len(self.observed))
        parts = zip(self.phi(self.mean), self._rows(), self.precision.sparse_covariances(tables), strict=True)
        for mean, rows, among in parts:
            n, k = mean.shape
            positions = self._positions[rows].reshape(n, -1)
            scales = (np.eye(k)[:, :, None] * self._scales[rows].reshape(n, 1, k, -1)).reshape(n, k, -1)
            cov = scales @ among[::k].numpy() @ scales.swapaxes(1, 2)
            side = scales @ slope[positions] + self._dense[rows].reshape(n, k, -1)
            half = solve_triangular(tril, side.reshape(n * k, -1).T, lower=True).T.reshape(n, k, -1)
            result.append(Marginals(mean, covariance_tril(torch.from_numpy(cov + half @ half.swapaxes(1, 2)))))
        return result

    def prior_covariance(self, name: str) -> Float[Tensor, "n k k"]:
        """Covariances among each value of a sparse leaf and its neighbors, given the dense leaves."""
        (covariance,) = self.precision.sparse_covariances([self.sparse_names.index(name)])
        return covariance

    def log_prior(self, leaves: Float[Tensor, " d"]) -> float:
        """Log density of the leaves, without the constant."""
        white = [(table.values * leaves[table.columns]).sum(-1) for table in self._prior]
        return -float(torch.cat([*white, leaves[self._sparse.shape[1] :]]).square().sum()) / 2

    def expected_log_likelihood(self, at: Sequence[Marginals]) -> float:
        """Expected log density of the data."""
        return sum(float(each.expected_log_prob(part).sum()) for each, part in zip(self.observed, at, strict=True))

    def elbo(self, marginals: Sequence[Marginals]) -> float:
        """Evidence lower bound of q given the hyperparameters, without their density.

        Args:
            marginals: marginal distributions under q.
        """
        spread = 0.0  # trace of the covariance times the precision that the data add
        for each, part in zip(self._quadratics, marginals, strict=True):
            spread += float((each.curvature.double().cpu() * (part.tril @ part.tril.mT)).sum())
        divergence = -self.log_prior(self.mean) + (self.precision.log_det() - spread) / 2 + self._log_det_processes
        return self.expected_log_likelihood(marginals) - divergence

    def log_weights(self, leaves: Float[Tensor, "S d"], observed: list[Observations] | None = None) -> Weighted:
        """Log density of the data over the factors that replace it, at leaves.

        Args:
            leaves: draws of q.
            observed: the observed sites at them, if the data are not linear and there is one draw.
        """
        total, determined = torch.zeros(2, len(leaves), dtype=torch.float64)
        parts = zip(self._quadratics, self._means, self.phi(self.mean), self.phi(leaves), strict=True)
        for i, (quadratic, center, mean, phi) in enumerate(parts):
            each = self.observed[i]
            exact = each.log_prob(phi.to(each.phi)) if observed is None else observed[i].log_prob(observed[i].phi)
            replaced = quadratic.log_factor((phi - center).to(each.phi))
            total += (exact - replaced).detach().double().cpu().sum(-1)
            curvature, distance = quadratic.curvature.double().cpu(), phi - mean
            determined += torch.einsum("sni,nij,snj->s", distance, curvature, distance)
        return Weighted(total, determined)

    def log_white_prob(self, leaves: Float[Tensor, "*S d"]) -> Float[Tensor, "*S"]:
        """Log density of the independent standard normal values from which the sites are computed."""
        return self.precision.log_prob(leaves - self.mean) + self._log_det_processes

    def log_evidence(self) -> float:
        """Log density of hyperparameters and of the factors in place of the data, leaves integrated out.

        Where q is optimal, it is the evidence lower bound and has its gradient in the hyperparameters.
        """
        density = self.log_prior(self.mean) - len(self) * math.log(2 * math.pi) / 2
        for quadratic, mean, phi in zip(self._quadratics, self._means, self.phi(self.mean), strict=True):
            density += float(quadratic.log_factor((phi - mean).to(quadratic.gradient)).sum())
        return density + self.log_hyperprior() - float(self.log_white_prob(self.mean))

    def log_hyperprior(self) -> float:
        """Log density of the other sites of the program."""
        names, density = {each.name for each in self.observed} | set(self._names), 0.0
        for name, site in self.trace.nodes.items():
            if site["type"] == "sample" and name not in names:
                log_prob = site["fn"].log_prob(site["value"])
                density += float(torch.as_tensor(scale_and_mask(log_prob, site["scale"], site["mask"])).sum())
        return density

    @cached_property
    def _log_det_processes(self) -> float:
        priors = [self.trace.nodes[name]["fn"] for name in self.processes]
        return sum(float(log_det_root(fn).detach().sum()) for fn in priors)

    def _product(self, leaves: Float[Tensor, "*S d"]) -> Float[Tensor, "*S r"]:
        m, flat = self._sparse.shape[1], leaves.reshape(-1, leaves.shape[-1]).numpy()
        product = (self._sparse @ flat[:, :m].T).T + flat[:, m:] @ self._dense.T
        return torch.from_numpy(product).reshape(*leaves.shape[:-1], -1)

    def _transposed_product(self, rows: Float[Tensor, " r"]) -> Float[Tensor, " d"]:
        return torch.from_numpy(np.concatenate([self._sparse.T @ rows.numpy(), self._dense.T @ rows.numpy()]))

    def _split(self, phi: Float[Tensor, "*S r"]) -> list[Tensor]:
        parts = phi.split([each.phi.numel() for each in self.observed], -1)
        return [part.reshape(*phi.shape[:-1], *e.phi.shape) for part, e in zip(parts, self.observed, strict=True)]

    def _rows(self) -> list[slice]:
        """Rows of J for each observed site."""
        ends = np.cumsum([0, *(each.phi.numel() for each in self.observed)])
        return [slice(*pair) for pair in pairwise(ends)]

    def _times_root(self, root: Float[np.ndarray, "n k k"], rows: slice) -> tuple[SparseRows, Float[np.ndarray, "r p"]]:
        """The sparse and the dense part of H^(1/2) J."""
        n, k, _ = root.shape
        scales = (root[:, :, :, None] * self._scales[rows].reshape(n, 1, k, -1)).reshape(n * k, -1)
        positions = np.repeat(self._positions[rows].reshape(n, -1), k, 0)
        beside = root @ self._dense[rows].reshape(n, k, -1)
        return SparseRows(torch.from_numpy(positions), torch.from_numpy(scales)), beside.reshape(n * k, -1)

    def _prior_rows(self, name: str) -> SparseRows:
        """Root of the prior precision of a sparse leaf: a row for each of its values."""
        place, base = self.sparse_place(name), self.prior(name)
        if not isinstance(base, NNGP):
            own = torch.arange(place.start, place.stop)[:, None]
            return SparseRows(own, torch.ones(own.shape, dtype=torch.float64))
        roots = [factor.root() for factor in base.factor.sets(base.batch_shape)]
        columns = [place.start + i * base.graph.num_points + root.columns.cpu() for i, root in enumerate(roots)]
        return SparseRows(torch.cat(columns), torch.cat([root.values.cpu() for root in roots]))


def prior_variances(trace: Trace, jacobian: Jacobian, blocks: Blocks) -> Float[Tensor, " r"]:
    """Rough variances of J z under the prior, from a few draws of the processes."""
    positions, scales, dense = blocks.of(jacobian)
    parts = []
    for name in blocks.entries:
        base, leaf = gaussian_base(trace.nodes[name]["fn"]), jacobian.leaves[name]
        square = base.sample((_PRIOR_DRAWS,)).square().mean((0, -1), keepdim=True)[0] if isinstance(base, NNGP) else 1.0
        parts.append(torch.as_tensor(square).expand(leaf.shape).flatten().double().cpu().numpy())
    return torch.from_numpy((np.square(scales) * np.concatenate(parts)[positions]).sum(-1) + np.square(dense).sum(-1))


def covariance_tril(covariance: Float[Tensor, "n k k"]) -> Float[Tensor, "n k k"]:
    """Cholesky factors of covariances, which may be singular."""
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    floor = _NUGGET * diagonal.amax(-1, keepdim=True).clamp(min=_NUGGET)
    return cholesky(covariance + torch.diag_embed(floor.expand_as(diagonal)), 0.0)


def _filled(positions: Int[np.ndarray, "n E"]) -> Int[np.ndarray, "n E"]:
    """Positions with one that is read in the same row where none is read, so that no others are linked."""
    return np.where(positions < 0, np.maximum(positions.max(-1, keepdims=True), 0), positions)


def _force(quadratic: Quadratic, distance: Float[Tensor, "n k"]) -> Float[Tensor, " r"]:
    """Gradient of the quadratic function at phi_0, given the distance of its center from there."""
    curvature, gradient = quadratic.curvature.double().cpu(), quadratic.gradient.double().cpu()
    return ((curvature @ distance[..., None])[..., 0] + gradient).flatten()
