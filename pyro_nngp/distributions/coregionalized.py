r"""Several latent functions: their nearest-neighbor priors side by side, and the posterior given coregionalized sites.

Latent functions :math:`u_1, .., u_L` have independent priors on one graph. Sites are pseudo-observations
:math:`t_{pi}` with precisions :math:`\tau_{pi}` of the outputs :math:`f_p(x_i) = a_{pi}^\top u(x_i)`, with loadings
:math:`A_i` (T, L) that may differ between points:

.. math:: q(u) = \frac1Z \prod_l p(u_l) \prod_{p, i} N(t_{pi} \mid a_{pi}^\top u_i, \tau_{pi}^{-1}) .

A precision of zero is a missing output. As for one function (:mod:`pyro_nngp.distributions.site_posterior`) the prior
cancels in the divergence,

.. math:: KL(q \,\|\, p) = \sum_i \Big[ \sum_p E_q \log N(t_{pi} \mid a_{pi}^\top u_i, \tau_{pi}^{-1})
   - \log p\big(t_i \mid t_{n(i)}\big) \Big],

where the evidence of the sites is a product of T-dimensional normal densities, each given the sites of the K nearest
points before it (:mod:`pyro_nngp.conditionals.coregionalized`). With K = N - 1 it is exact.

Cost: O(B (K R)^3) for a divergence with R = min(T, L), independent of N. Symbols: N points, K neighbors, B points of a
batch, U rows of a batch and its neighbors, T outputs, L latent functions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import register_kl

from pyro_nngp._checks import fail
from pyro_nngp.conditionals.coregionalized import gathered, latent_covariances, outputs_of
from pyro_nngp.conditionals.coregionalized_density import coregionalized_log_density
from pyro_nngp.conditionals.mixed_precision import needs_float64
from pyro_nngp.distributions.nngp import NNGP
from pyro_nngp.distributions.sets import OneSet
from pyro_nngp.linalg import VecchiaFactor, add_diagonal, cholesky, half_solve
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior
from pyro_nngp.neighbors import Batch
from pyro_nngp.neighbors.table import same_rows

_LOG_TWO_PI = math.log(2 * math.pi)
_UNIT = 1e-6  # relative nugget of the covariance of the latent functions at a point
_REDUNDANT = 1e-12  # relative nugget of the information of the outputs at a point
_NONE = 1e-30  # information at a point without outputs


class NNGPs(OneSet):
    """L independent nearest-neighbor Gaussian processes on one batch of one graph, of event shape (L, U).

    Args:
        priors: one for each latent function, or one for all of them.
        count: L; None is the number of priors.

    Raises:
        ValueError: if there is none, they differ in the batch, or have batch dimensions.
    """

    def __init__(self, priors: Sequence[NNGP], count: int | None = None, validate_args: bool | None = None) -> None:
        if not priors or any(prior.batch is not priors[0].batch or prior.batch_shape for prior in priors):
            cure = "Build each from one batch, with one set of hyperparameters."
            fail("NNGPs", "priors", "on one batch, without batch dimensions", len(priors), cure)
        self.priors = tuple(priors)
        count = len(priors) if count is None else count
        if len(priors) not in (1, count):
            fail("NNGPs", "priors", f"1 or {count}", len(priors), "One per latent function, or one for all.")
        super().__init__(torch.Size(), torch.Size((count, *priors[0].event_shape)), validate_args=validate_args)

    @property
    def batch(self) -> Batch:
        """The batch of rows, which all priors share."""
        return self.priors[0].batch

    @property
    def each(self) -> list[NNGP]:
        """The prior of each latent function."""
        return [self.priors[0]] * self.event_shape[0] if len(self.priors) == 1 else list(self.priors)

    @property
    def is_whole(self) -> bool:
        """Whether the distribution is over all points of the graph."""
        return self.priors[0].is_whole

    @property
    def mean(self) -> Float[Tensor, "L U"]:
        """Zero."""
        return self.priors[0].graph.x.new_zeros(self.event_shape)

    def factors(self) -> list[VecchiaFactor]:
        """(I - A, V) of each latent function over all points, for iterative solvers."""
        factors = [prior.factor.prepared() for prior in self.priors]
        return factors * self.event_shape[0] if len(factors) == 1 else factors

    def _log_prob(self, value: Float[Tensor, "*S L U"]) -> Float[Tensor, "*S"]:
        """Log density, summed over latent functions and the batch's targets."""
        parts = [prior.log_prob(value[..., number, :]) for number, prior in enumerate(self.each)]
        return torch.stack(parts).sum(0)

    def rsample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "*S L U"]:
        """Exact joint draws."""
        return torch.stack([prior.rsample(sample_shape) for prior in self.each], -2)


class CoregionalizedPosterior(OneSet):
    r"""L nearest-neighbor priors times Gaussian sites of T outputs, of event shape (L, U).

    Draws over all points without gradients are exact and joint; otherwise independent between points, with the joint
    distribution of the L values at a point, as an ELBO needs them.

    Args:
        prior: p(u), over all points or a batch.
        loading: A at the rows of the batch, (U, T, L), or (1, T, L) for all.
        target: t at the rows of the batch, (T, U).
        precision: :math:`\tau \ge 0`, of the same shape; 0 where an output is missing.
        loc: marginal means of u, (L, U).
        covariance: covariances of the L values at each row, (U, L, L).
        offset: a number added to the log evidence, in equal parts for all points.
        evidence: maps priors over all points, loadings, targets and precisions to the log evidence under the prior of
            latent values, in place of the term of the observations and the offset; None has the latter.

    Raises:
        ValueError: if shapes disagree.
    """

    def __init__(
        self,
        prior: NNGPs,
        loading: Float[Tensor, "#U T L"],
        target: Float[Tensor, "T U"],
        precision: Float[Tensor, "T U"],
        loc: Float[Tensor, "L U"],
        covariance: Float[Tensor, "U L L"],
        *,
        offset: Float[Tensor, ""] | None = None,
        evidence: Callable[[NNGPs, Tensor, Tensor, Tensor], Tensor] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if loc.shape != prior.event_shape or target.shape != precision.shape or target.shape[1:] != loc.shape[1:]:
            shapes = tuple(target.shape), tuple(precision.shape), tuple(loc.shape)
            expectation = f"of shapes (T, U), (T, U) and {tuple(prior.event_shape)}"
            fail("CoregionalizedPosterior", "target, precision, loc", expectation, shapes, "One value per row.")
        self.prior, self.target, self.precision, self.loc = prior, target, precision, loc
        self.loading, self.covariance = loading.expand(loc.shape[1], *loading.shape[1:]), covariance
        self.offset, self.evidence = offset, evidence
        super().__init__(torch.Size(), loc.shape, validate_args=validate_args)

    @property
    def mean(self) -> Float[Tensor, "L U"]:
        """Marginal means."""
        return self.loc

    @property
    def variance(self) -> Float[Tensor, "L U"]:
        """Marginal variances."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).mT

    def outputs(self) -> tuple[Float[Tensor, "T U"], Float[Tensor, "T U"]]:
        """Means and variances of the outputs A u at the rows."""
        return outputs_of(self.loading, self.loc, self.covariance)

    def rsample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "*S L U"]:
        """Draws, see the class. Cost: a solution by conjugate gradients for each joint draw."""
        shape = torch.Size(sample_shape)
        if torch.is_grad_enabled() or not self.prior.is_whole:
            scale = cholesky(self.covariance, _UNIT)
            noise = torch.randn(*shape, *self.covariance.shape[:-1], 1, dtype=self.loc.dtype, device=self.loc.device)
            return self.loc + (scale @ noise)[..., 0].mT
        posterior = CoupledPosterior(self.prior.factors(), self.loading, self.precision)
        mean = posterior.mean(self.target, self.loc, tolerance=1e-6)
        draws = [posterior.draw(mean).to(self.loc) for _ in range(shape.numel())]
        return torch.stack(draws).reshape(*shape, *self.loc.shape)

    def _log_prob(self, value: Float[Tensor, "*S L U"]) -> Float[Tensor, "*S"]:
        """Log density: prior times sites over the evidence of the sites, each summed over the targets of the batch."""
        rows = self.prior.batch.targets
        f = torch.einsum("utl,...lu->...tu", self.loading, value)[..., rows]
        site = _log_normal(self.target[:, rows], f, self.precision[:, rows]).sum((-2, -1))
        return self.prior.log_prob(value) + site - self.log_evidence(self.prior).sum(-1)

    def log_evidence(self, prior: NNGPs) -> Float[Tensor, " B"]:
        """Log densities of the sites of the batch's targets given the sites of their neighbors, under a prior.

        With `evidence`, equal parts of the evidence.
        """
        if self.evidence is not None:
            whole = self.evidence(prior, self.loading, self.target, self.precision).to(self.loc)
            return (whole / self.loc.shape[1]).expand(self.loc.shape[1])
        batch, points = prior.batch, prior.priors[0].graph.x[prior.batch.rows]
        seen = self.precision[:, batch.targets] > 0
        rows, values, rest = whitened_sites(self.loading, self.target, self.precision)
        near = torch.cat([batch.neighbors, batch.targets[:, None]], 1)
        around, sites = gathered(rows, values, near)
        kernels, jitter = [each.kernel for each in prior.priors], prior.priors[0].jitter
        places, sites = points[near.clamp(min=0)], torch.where(near[..., None] >= 0, sites, 0.0)
        if needs_float64(points, sites, kernels):
            places, around, sites = places.double(), around.double(), sites.double()
        among = latent_covariances(kernels, places, jitter)
        density = coregionalized_log_density(among, around, sites).to(values)
        log_root = torch.where(seen, self.precision[:, batch.targets], 1.0).log().sum(0) / 2
        density = density + log_root - rest[batch.targets] / 2 - seen.sum(0).to(values) * _LOG_TWO_PI / 2
        return density if self.offset is None else density + self.offset.to(density) / prior.priors[0].graph.num_points


@register_kl(CoregionalizedPosterior, NNGPs)
def _kl_coregionalized_nngps(q: CoregionalizedPosterior, p: NNGPs) -> Tensor:
    """Divergence (see the module's docstring), summed over the batch's targets; both must be on the same rows."""
    if q.event_shape != p.event_shape or not same_rows(q.prior.batch.rows, p.batch.rows):
        shapes = tuple(q.event_shape), tuple(p.event_shape)
        fail("kl_divergence", "q and p", "on the same rows", shapes, "Build both from one Batch.")
    rows = p.batch.targets
    loc, variance = (part[:, rows] for part in q.outputs())
    target, precision = q.target[:, rows], q.precision[:, rows]
    expected = _log_normal(target, loc, precision) - 0.5 * precision * variance
    return expected.sum() - q.log_evidence(p).sum()


def whitened_sites(
    loading: Float[Tensor, "#N T L"], target: Float[Tensor, "T N"], precision: Float[Tensor, "T N"]
) -> tuple[Float[Tensor, "N R L"], Float[Tensor, "N R"], Float[Tensor, " N"]]:
    r"""Loadings H and targets s of sites in units of their standard deviations; zeros where the precision is 0.

    More outputs than latent functions are redundant: with :math:`H^\top H = C C^\top`, the L observations
    :math:`C^{-1} H^\top s` of :math:`C^\top u` have the likelihood of all T up to a constant.

    Returns:
        Loadings and targets of R = min(T, L) observations with unit noise at each point, and the squares of the
        targets less the squares of these. A relative nugget stands in where fewer than L outputs are there.
    """
    seen = precision > 0
    root = torch.where(seen, precision, 1.0).sqrt() * seen
    rows, values = root.mT[..., None] * loading, (root * target).mT
    count, size = rows.shape[-2:]
    if count <= size:
        return rows, values, torch.zeros_like(values[:, 0])
    wide, right = rows.double(), values.double()[..., None]
    gram = wide.mT @ wide
    tril = cholesky(add_diagonal(gram, gram.new_full((size,), _NONE)), _REDUNDANT)
    few = half_solve(tril, wide.mT @ right)[..., 0]
    return tril.mT.to(rows), few.to(rows), (right[..., 0].square().sum(-1) - few.square().sum(-1)).to(rows)


def _log_normal(value: Tensor, loc: Tensor, precision: Tensor) -> Tensor:
    """Log densities; 0 where the precision is 0."""
    seen = precision > 0
    log_precision = torch.where(seen, precision, 1.0).log()
    return 0.5 * (log_precision - precision * (value - loc).square() - seen.to(value) * _LOG_TWO_PI)
