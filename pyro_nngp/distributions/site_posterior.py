r"""The posterior of a nearest-neighbor prior given Gaussian sites, as a distribution.

Sites are pseudo-observations t of the values u with precisions :math:`\tau`, one for each value, that replace a
likelihood:

.. math:: q(u) = \frac1Z\, p(u) \prod_j N(t_j \mid u_j, \tau_j^{-1}) = N(m, P^{-1}), \qquad
   P = \Lambda + \mathrm{diag}\,\tau,

with :math:`\Lambda` the sparse precision of the prior. The prior cancels in the divergence, and the evidence of the
sites is the same as in a response model with known noise (Vecchia 1988; :class:`~pyro_nngp.models.Vecchia`), so that

.. math:: KL(q \,\|\, p) = \sum_j \Big[ E_{q(u_j)} \log N(t_j \mid u_j, \tau_j^{-1})
   - \log N\big(t_j \mid w_j^\top t_{n(j)},\; v_j + \tau_j^{-1}\big) \Big],

w and v from :mod:`pyro_nngp.conditionals.nearest_neighbor` with noise :math:`1 / \tau` on the neighbors. It is a sum
over points that involves only the marginals of q at the points themselves. At the optimal sites the likelihood
cancels the first term to first order, and the gradient with respect to the prior is the gradient of the evidence:
hyperparameters are learned as with the full Gaussian q (Khan and Lin 2017; Adam, Chang, Khan and Solin 2021), which a
mean-field q cannot do.

The evidence of the sites uses Vecchia's approximation of the *observations*; with K = N-1 it is exact. With smaller K,
it approximates the same exact Gaussian process, but is not exactly the normalizer of the sparse prior times the sites;
where noise is large or inputs are many it is too low. `offset` adds the difference
(:mod:`pyro_nngp.variational.evidence_excess`).

Cost: O(B K^3) for a divergence, independent of N. Symbols: N points, K neighbors, B points of a batch, U rows of a
batch and its neighbors, S batch dimensions (latent functions).
"""

import math
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import constraints, register_kl

from pyro_nngp._checks import fail
from pyro_nngp._indexing import values_at
from pyro_nngp.distributions.expandable import Expandable
from pyro_nngp.distributions.nngp import NNGP
from pyro_nngp.linalg.gaussian_sampling import draw_posterior
from pyro_nngp.neighbors.table import same_rows

_LOG_TWO_PI = math.log(2 * math.pi)


class SitePosterior(Expandable):
    r"""A nearest-neighbor prior times Gaussian sites.

    Draws over all points are exact and joint. While gradients are recorded, and for a batch, they are independent draws
    of the marginals: an ELBO needs no more, since the prior cancels between model and guide. Densities of single values
    on a batch are up to a term of the prior that cancels in the same way.

    Args:
        prior: p(u), over all points or a batch.
        target: t at the rows of the prior's batch, (*S, U).
        precision: :math:`\tau > 0`, of the same shape.
        loc: marginal means, of the same shape.
        variance: marginal variances, of the same shape.
        offset: a number added to the log evidence of each set of sites, in equal parts for all points.
        evidence: maps a prior over all points, targets and precisions to the log evidence under the prior of latent
            values, in place of the term of the observations and the offset; None has the latter.

    Raises:
        ValueError: if shapes disagree.
    """

    support = constraints.real_vector
    has_rsample = True
    batched = ("target", "precision", "loc", "_variance")

    def __init__(
        self,
        prior: NNGP,
        target: Float[Tensor, "*S U"],
        precision: Float[Tensor, "*S U"],
        loc: Float[Tensor, "*S U"],
        variance: Float[Tensor, "*S U"],
        *,
        offset: Float[Tensor, ""] | None = None,
        evidence: Callable[[NNGP, Tensor, Tensor], Tensor] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        shapes = [tuple(part.shape) for part in (target, precision, loc, variance)]
        if len(set(shapes)) > 1 or target.shape[-1:] != prior.event_shape:
            expectation = f"of one shape (..., {prior.event_shape[0]})"
            fail("SitePosterior", "target, precision, loc, variance", expectation, shapes, "One value per row.")
        self.prior, self.target, self.precision, self.loc, self._variance = prior, target, precision, loc, variance
        self.offset, self.evidence = offset, evidence
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=validate_args)

    @property
    def mean(self) -> Float[Tensor, "*S U"]:
        """Marginal means."""
        return self.loc

    @property
    def variance(self) -> Float[Tensor, "*S U"]:
        """Marginal variances."""
        return self._variance

    def outputs(self) -> tuple[Float[Tensor, "*S U"], Float[Tensor, "*S U"]]:
        """Means and variances of what is observed, u itself."""
        return self.loc, self._variance

    def rsample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "*S U"]:
        """Draws, joint over all points or of the marginals, see the class.

        Cost: one call of :func:`~pyro_nngp.linalg.gaussian_sampling.draw_posterior` for each joint draw.
        """
        shape = torch.Size(sample_shape) + self.loc.shape
        if torch.is_grad_enabled() or not self.prior.is_whole:
            return self.loc + self._variance.sqrt() * torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        linear, precision = (self.precision * self.target).expand(shape), self.precision.expand(shape)
        factor = self.prior.factor
        factors = factor.sets(shape[:-1]) if factor.batch_shape else repeat(factor, shape[:-1].numel())
        each = zip(factors, linear.reshape(-1, shape[-1]), precision.reshape(-1, shape[-1]), strict=True)
        draws = [draw_posterior(*one) for one in each]
        return torch.stack(draws).reshape(shape)

    def _log_prob(self, value: Float[Tensor, "*S U"]) -> Float[Tensor, "*S"]:
        """Log density: prior times sites over the evidence of the sites, each summed over the targets of the batch."""
        rows = self.prior.batch.targets
        target, precision = self.target[..., rows], self.precision[..., rows]
        site = _log_normal(target, value[..., rows], precision)
        return self.prior.log_prob(value) + (site - self.log_evidence(self.prior)).sum(-1)

    def log_evidence(self, prior: NNGP) -> Float[Tensor, "*S B"]:
        """Log densities of the targets of a batch given the observations of their neighbors, under a prior.

        With `evidence`, equal parts of the evidence.
        """
        if self.evidence is not None:
            whole = self.evidence(prior, self.target, self.precision).to(self.loc)
            return (whole[..., None] / len(prior.batch.targets)).expand_as(self.loc)
        w, var = prior.response_conditionals(1 / self.precision)
        rows, near = prior.batch.targets, values_at(self.target, prior.batch.neighbors)
        total = var + 1 / self.precision[..., rows]
        log_density = _log_normal(self.target[..., rows], (w * near).sum(-1), 1 / total)
        if self.offset is None:
            return log_density
        return log_density + self.offset.to(log_density) / prior.graph.num_rows


@register_kl(SitePosterior, NNGP)
def _kl_site_posterior_nngp(q: SitePosterior, p: NNGP) -> Tensor:
    """Divergence (see the module's docstring), summed over the batch's targets; both must be on the same rows."""
    if q.event_shape != p.event_shape or not same_rows(q.prior.batch.rows, p.batch.rows):
        shapes = tuple(q.event_shape), tuple(p.event_shape)
        fail("kl_divergence", "q and p", "on the same rows", shapes, "Build both from one Batch.")
    rows = p.batch.targets
    target, precision = q.target[..., rows], q.precision[..., rows]
    expected = _log_normal(target, q.loc[..., rows], precision) - 0.5 * precision * q.variance[..., rows]
    return (expected - q.log_evidence(p)).sum(-1)


def _log_normal(value: Tensor, loc: Tensor, precision: Tensor) -> Tensor:
    return 0.5 * (precision.log() - precision * (value - loc).square() - _LOG_TWO_PI)
