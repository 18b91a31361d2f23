r"""The evidence of Gaussian sites under a nearest-neighbor prior of latent values, and its gradient.

Sites t with precisions :math:`D = \mathrm{diag}\,\tau` have the evidence

.. math:: \log Z = -\tfrac12 \big[ \log|\Lambda + D| - \log|\Lambda| - \log|D|
   + t^\top D\, (t - m) + N \log 2\pi \big], \qquad (\Lambda + D)\, m = D\, t .

Its gradient is one of the conditionals :math:`u_j \mid u_{n(j)} \sim N(w_j^\top u_{n(j)}, v_j)` (Fisher's identity):
with :math:`e_j = u_j - w_j^\top u_{n(j)}` under :math:`q(u) = N(m, (\Lambda + D)^{-1})`,

.. math:: \frac{\partial \log Z}{\partial w_j} = \frac{E[e_j u_{n(j)}]}{v_j}, \qquad
   \frac{\partial \log Z}{\partial v_j} = \frac{E[e_j^2] - v_j}{2 v_j^2} .

Up to 1,000 points the expectations are exact. Beyond, they are averages over draws of q(u) less those over draws of the
prior from the same random numbers, whose expectations are known: both draws agree except in directions that the data
determine. The random numbers are the same each time, so that training converges.

Cost: up to 1,000 points O(N^3); then 8 to 32 solutions by conjugate gradients, O(N K) per iteration. Symbols: N points,
K neighbors.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.linalg.cholesky import cholesky
from pyro_nngp.linalg.gaussian_sampling import DENSE_UP_TO

_DRAWN, _DRAWS = 2**17, (8, 32)  # values drawn; fewest and most draws: errors of a fifth to a third of a standard error
_TOLERANCE = 1e-3


class ConditionalGradient(NamedTuple):
    """Gradient of log Z in the weights (N, K) and variances (N,) of the prior's conditionals."""

    w: Tensor
    var: Tensor


def conditional_gradient(
    prior: VecchiaFactor, loc: Float[Tensor, " N"], precision: Float[Tensor, " N"], seed: int = 0
) -> ConditionalGradient:
    """The gradient of log Z in the prior's conditionals.

    Args:
        prior: (I - A, V), from :meth:`~pyro_nngp.linalg.VecchiaFactor.prepared`.
        loc: posterior mean m of the latent values.
        precision: of the sites.
        seed: of the draws.
    """
    loc, precision = loc.double(), precision.double()
    first, second = _moments(prior, loc[None])
    if len(prior) <= DENSE_UP_TO:
        tril = cholesky(prior.dense() + torch.diag_embed(precision), 0.0)
        cov, near = torch.cholesky_inverse(tril), prior.neighbors.clamp(min=0)
        weights = torch.zeros_like(cov).scatter_add_(-1, near, prior.w)
        cross = cov - weights @ cov  # of e with u
        w = cross.gather(-1, near)
        first, second = first + w, second + cross.diagonal() - (prior.w * w).sum(-1) - prior.var
    else:
        ours, theirs = (_moments(prior, draws) for draws in _paired_draws(prior, precision, seed))
        first, second = first + ours[0] - theirs[0], second + ours[1] - theirs[1]
    first = first.masked_fill(prior.neighbors < 0, 0.0)
    return ConditionalGradient(first / prior.var[:, None], second / (2 * prior.var.square()))


def latent_log_evidence(
    prior: VecchiaFactor, target: Float[Tensor, " N"], loc: Float[Tensor, " N"], precision: Float[Tensor, " N"]
) -> Float[Tensor, ""]:
    """log Z by a dense factorization, O(N^3).

    Args:
        prior: (I - A, V).
        target: t.
        loc: posterior mean m.
        precision: of the sites.
    """
    target, loc, precision = target.double(), loc.double(), precision.double()
    tril = cholesky(prior.dense() + torch.diag_embed(precision), 0.0)
    log_det = 2 * tril.diagonal().log().sum() + prior.var.log().sum() - precision.log().sum()
    quadratic = (precision * target * (target - loc)).sum()
    return -(log_det + quadratic + len(prior) * math.log(2 * math.pi)) / 2


def _moments(prior: VecchiaFactor, draws: Float[Tensor, "S N"]) -> tuple[Tensor, Tensor]:
    """Means of e u' at the neighbors (N, K), and of the square of e (N,)."""
    near, first, second = prior.neighbors.clamp(min=0), torch.zeros_like(prior.w), torch.zeros_like(prior.var)
    for u in draws:
        error, values = prior.residual(u), u[near]
        first += error[:, None] * values / len(draws)
        second += error.square() / len(draws)
    return first, second


def _paired_draws(prior: VecchiaFactor, precision: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Draws (S, N) of q(u) less its mean and of the prior, from common random numbers."""
    generator = torch.Generator().manual_seed(seed)
    count = min(max(_DRAWN // len(prior), _DRAWS[0]), _DRAWS[1])
    first, second = torch.randn(2, count, len(prior), generator=generator, dtype=torch.float64).to(precision.device)
    right = prior.color_transposed(precision.sqrt() * first) + second
    z = prior.solve(right, precision.expand_as(right), tolerance=_TOLERANCE)
    return prior.color(z), prior.color(second)
