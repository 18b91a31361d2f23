r"""The evidence of Gaussian sites under a nearest-neighbor prior of latent values, and its gradient.

Sites t with precisions :math:`D = \mathrm{diag}\,\tau` have the evidence

.. math:: \log Z = -\tfrac12 \big[ \log|\Lambda + D| - \log|\Lambda| - \log|D|
   + t^\top D\, (t - m) + N \log 2\pi \big], \qquad (\Lambda + D)\, m = D\, t .

Its gradient is one of the conditionals :math:`u_j \mid u_{n(j)} \sim N(w_j^\top u_{n(j)}, v_j)` and of the sites
(Fisher's identity): with :math:`e_j = u_j - w_j^\top u_{n(j)}` under :math:`q(u) = N(m, (\Lambda + D)^{-1})`, whose
marginal variances are s,

.. math:: \frac{\partial \log Z}{\partial w_j} = \frac{E[e_j u_{n(j)}]}{v_j}, \quad
   \frac{\partial \log Z}{\partial v_j} = \frac{E[e_j^2] - v_j}{2 v_j^2}, \quad
   \frac{\partial \log Z}{\partial t_j} = -\tau_j (t_j - m_j), \quad
   \frac{\partial \log Z}{\partial \tau_j} = \tfrac12 \big( \tau_j^{-1} - (t_j - m_j)^2 - s_j \big) .

Where a sparse factor of the posterior precision is small enough, and up to 1,000 points, the expectations are exact.
Elsewhere they are averages over draws of q(u),

.. math:: (\Lambda + D)\, u = D^{1/2} \epsilon + (I - A)^\top V^{-1/2} \zeta, \qquad \epsilon, \zeta \sim N(0, I) .

Where data say little, e_j is near :math:`v_j^{1/2} \zeta_j`, as for a draw of the prior, and where they say all,
:math:`u_j` is near :math:`\tau_j^{-1/2} \epsilon_j`. The moments of these, whose expectations are known, are control
variates, with the weights that are the best for a point alone. The random numbers are the same each time, so that
training converges, and belong to rows, so that they do not depend on the number of processes.

Cost: a sparse factorization, or up to 1,000 points O(N^3); elsewhere 2 to 32 solutions by conjugate gradients, O(N K)
per iteration. Symbols: N points, K neighbors.
"""

import math
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_nngp._random import normal_by_row
from pyro_nngp.distributed.factor import ShardedFactor
from pyro_nngp.linalg import VecchiaFactor, factor_inverse, factor_log_det
from pyro_nngp.linalg.gaussian_sampling import DENSE_UP_TO
from pyro_nngp.linalg.multifrontal import MultifrontalFactor
from pyro_nngp.variational.factored_posterior import FactoredPosterior
from pyro_nngp.variational.posterior_mean import posterior_mean

_DRAWN, _DRAWS = 2**17, (8, 32)  # values drawn; fewest and most draws: errors of a fifth to a third of a standard error
_MANY, _FEWEST = 2**19, 2  # beyond, fewer serve: two thirds of a standard error are little there
TOLERANCE = 0.01
"""Relative residual of the solutions for draws. Errors do not average out: at 0.05 lengthscales of counts are off."""


Factor: TypeAlias = VecchiaFactor | ShardedFactor
"""(I - A, V) of all rows, or of local rows on several processes; N is then the number of local rows below."""


class EvidenceGradient(NamedTuple):
    """Gradient of log Z in weights (N, K) and variances (N,) of the prior's conditionals, and in the sites (N,)."""

    w: Tensor
    var: Tensor
    target: Tensor
    precision: Tensor


class Moments(NamedTuple):
    """Means of e u' at the neighbors (N, K), and of the square of e (N,)."""

    cross: Tensor
    residual: Tensor


def evidence_gradient(
    prior: Factor,
    target: Float[Tensor, " N"],
    loc: Float[Tensor, " N"],
    precision: Float[Tensor, " N"],
    seed: int = 0,
    factor: MultifrontalFactor | None = None,
) -> EvidenceGradient:
    """The gradient of log Z.

    Args:
        prior: (I - A, V), from :meth:`~pyro_nngp.linalg.VecchiaFactor.prepared`.
        target: t.
        loc: posterior mean m of the latent values.
        precision: of the sites.
        seed: of the draws.
        factor: of the posterior precision, for exact moments; None has dense ones or draws.
    """
    target, loc, precision = target.double(), loc.double(), precision.double()
    if isinstance(prior, ShardedFactor) and len(prior) <= DENSE_UP_TO:
        target, loc, precision = (prior.gather(part) for part in (target, loc, precision))
        whole = evidence_gradient(prior.gathered(), target, loc, precision, seed)
        w, *rest = (prior.own(part) for part in (whole.w.mT, whole.var, whole.target, whole.precision))
        return EvidenceGradient(w.mT, *rest)
    if factor is not None:
        cov, variance = _factored(cast(VecchiaFactor, prior), factor)
    elif isinstance(prior, VecchiaFactor) and len(prior) <= DENSE_UP_TO:
        cov, variance = _exact(prior, precision)
    else:
        cov, variance = _drawn(prior, precision, seed)
    return _gradient(prior, target, loc, precision, cov, variance)


def _gradient(
    prior: Factor, target: Tensor, loc: Tensor, precision: Tensor, cov: Moments, variance: Tensor
) -> EvidenceGradient:
    error = target - loc
    in_precision = (1 / precision - error.square() - variance) / 2
    return EvidenceGradient(*prior_gradient(prior, loc, cov), -precision * error, in_precision)


def prior_gradient(
    prior: Factor, loc: Float[Tensor, " N"], central: Moments
) -> tuple[Float[Tensor, "N K"], Float[Tensor, " N"]]:
    """Gradient of log Z in weights and variances of the conditionals.

    Args:
        prior: (I - A, V).
        loc: posterior means.
        central: moments of the deviations from them.
    """
    at_mean = moments_of_draws(prior, loc[None])
    cross = (at_mean.cross + central.cross).masked_fill(prior.neighbors < 0, 0.0)
    return cross / prior.var[:, None], (at_mean.residual + central.residual - prior.var) / (2 * prior.var.square())


def moments_of_draws(prior: Factor, draws: Float[Tensor, "S N"]) -> Moments:
    """Averages over draws of u."""
    cross, residual = torch.zeros_like(prior.w), torch.zeros_like(prior.var)
    for u in draws:
        near = prior.near(u)
        error = u - (prior.w * near).sum(-1)
        cross += error[:, None] * near / len(draws)
        residual += error.square() / len(draws)
    return Moments(cross, residual)


def moments_of_covariance(prior: VecchiaFactor, cov: Float[Tensor, "N N"]) -> Moments:
    """Expectations where u has the mean zero and this covariance."""
    near = prior.neighbors.clamp(min=0)
    weights = torch.zeros_like(cov).scatter_add_(-1, near, prior.w)
    joint = cov - weights @ cov  # covariances of e with u
    cross = joint.gather(-1, near)
    return Moments(cross, joint.diagonal() - (prior.w * cross).sum(-1))


def moments_of_products(prior: VecchiaFactor, products: Float[Tensor, "N k"]) -> Moments:
    """Expectations from the entries of R P^-1, R the root of the prior's precision, at each point and its neighbors."""
    cov = products * prior.var.sqrt()[:, None]  # of e with u_j and with the values at its neighbors
    return Moments(cov[:, 1:], cov[:, 0] - (prior.w * cov[:, 1:]).sum(-1))


def controlled(
    prior: Factor, draws: Float[Tensor, "S N"], of_prior: Float[Tensor, "S N"], strength: Float[Tensor, " N"]
) -> Moments:
    """Averages over central draws of u, with draws of the prior as control variates.

    Args:
        prior: (I - A, V).
        draws: of q(u) less its mean.
        of_prior: the white values of the prior that they were made from.
        strength: variances of the conditionals times the precision of the data there.
    """
    ours, theirs, weight = (
        moments_of_draws(prior, draws),
        moments_of_draws(prior, prior.color(of_prior)),
        1 / (1 + strength),
    )
    weight = weight.square()
    residual = ours.residual - weight * (theirs.residual - prior.var)
    return Moments(ours.cross - weight[:, None] * theirs.cross, residual)


def number_of_draws(num_values: int) -> int:
    """Draws for averages over so many latent values."""
    least = min(max(_MANY // num_values, _FEWEST), _DRAWS[0])
    return min(max(_DRAWN // num_values, least), _DRAWS[1])


def latent_log_evidence(
    prior: Factor,
    target: Float[Tensor, " N"],
    loc: Float[Tensor, " N"],
    precision: Float[Tensor, " N"],
    factor: MultifrontalFactor | None = None,
) -> Float[Tensor, ""]:
    """log Z.

    Args:
        prior: (I - A, V).
        target: t.
        loc: posterior mean m.
        precision: of the sites.
        factor: of the posterior precision; None makes a dense one, O(N^3).
    """
    target, loc, precision = target.double(), loc.double(), precision.double()
    if isinstance(prior, ShardedFactor):
        target, loc, precision = (prior.gather(part) for part in (target, loc, precision))
        return latent_log_evidence(prior.gathered(), target, loc, precision)
    posterior = factor_log_det(prior.posterior_tril(precision)) if factor is None else factor.log_det
    log_det = posterior + prior.var.log().sum() - precision.log().sum()
    quadratic = (precision * target * (target - loc)).sum()
    return -(log_det + quadratic + len(prior) * math.log(2 * math.pi)) / 2


class ExactLogEvidence(torch.autograd.Function):
    """log Z as a differentiable function of the prior's conditionals and of the pseudo-observations.

    Arguments: weights (N, K), variances (N,), targets (N,) and precisions (N,); neighbors (N, K) and the posterior at
    the last solution. Cost: a factorization, unless the posterior is that one, and moments.
    """

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, var: Tensor, target: Tensor, precision: Tensor, neighbors: Tensor, last: FactoredPosterior
    ) -> Tensor:
        prior = VecchiaFactor(w.detach().double(), var.detach().double(), neighbors)
        factor = last.factor(prior, precision.detach())
        target, precision = (part.detach().double() for part in (target, precision))
        loc = factor.solve(precision * target)
        if any(ctx.needs_input_grad):
            found = _factored(prior, factor)
            ctx.save_for_backward(*_gradient(prior, target, loc, precision, *found))
        return latent_log_evidence(prior, target, loc, precision, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(grad * part for part in ctx.saved_tensors), None, None


def _factored(prior: VecchiaFactor, factor: MultifrontalFactor) -> tuple[Moments, Tensor]:
    """Central moments and marginal variances under q(u), by a sparse factor of its precision."""
    variance, (products,) = factor.moments
    return moments_of_products(prior, products), variance


def _exact(prior: VecchiaFactor, precision: Tensor) -> tuple[Moments, Tensor]:
    """Central moments and marginal variances under q(u)."""
    cov = factor_inverse(prior.posterior_tril(precision))
    return moments_of_covariance(prior, cov), cov.diagonal()


def _drawn(prior: Factor, precision: Tensor, seed: int) -> tuple[Moments, Tensor]:
    """Estimates of the same, see the module's docstring."""
    of_data, of_prior = normal_by_row(prior.rows, 2 * number_of_draws(len(prior)), seed).chunk(2)
    strength = prior.var * precision
    right = precision.sqrt() * of_data + prior.whiten_transposed(of_prior)
    draws = posterior_mean(prior, right / precision, precision.expand_as(right), torch.zeros_like(right), TOLERANCE)
    weight = (strength / (1 + strength)).square()
    variance = draws.square().mean(0) - weight * (of_data.square().mean(0) - 1) / precision
    return controlled(prior, draws, of_prior, strength), variance
