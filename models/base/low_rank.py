r"""A low-rank part from inducing points beside neighbors, in methods that integrate f out.

The coefficients :math:`\nu \sim N(0, I)` of the features (:mod:`pyro_nngp.conditionals.low_rank`) are a trend with a
normal prior: with the conditionals of the residual given the noisy observations of preceding neighbors, whitened
features W and whitened observations e less the mean function,

.. math:: \log p(y) = \log N(e; 0, I + W W^\top) - \tfrac12 \log |V|, \qquad
   \nu \mid y \sim N(G^{-1} W^\top e, G^{-1}), \quad G = I + W^\top W,

and predictions integrate over them together with the coefficients of the mean (:mod:`pyro_nngp.coefficients`).

The density of a batch of rows is that of their errors given their neighbors, e: correlated through
:math:`\nu` within the batch, a likelihood of its own. Those of disjoint batches do not add up to that of all.

Cost: O(N (K^3 + K^2 M + M^2)) for the posterior, once for given hyperparameters, and for a density with its gradient.
Symbols: N data, K neighbors, M inducing points, p coefficients of the mean.

Reference: Gyger, Furrer, Sigrist (2025), "Vecchia-inducing-points full-scale approximations for Gaussian processes",
arXiv:2507.05064.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from pyro_nngp._checks import fail
from pyro_nngp.bound import Bound
from pyro_nngp.coefficients import Trend, posterior_of_coefficients
from pyro_nngp.conditionals.low_rank import LowRank
from pyro_nngp.linalg import cholesky, factor_solve, half_solve
from pyro_nngp.linalg.neighbor_products import combined
from pyro_nngp.models.base.posterior import Observed
from pyro_nngp.models.base.trend import basis_and_features, differentiable, whitened_rows, without_low_rank


@dataclass(frozen=True)
class FeatureTrend(Trend):
    """Coefficients of features, which are many: what neighbors make of them is computed chunk by chunk."""

    def combined(
        self, w: Float[Tensor, "... B K"], near: Int[Tensor, "B K"], values: Float[Tensor, "... U p"]
    ) -> Float[Tensor, "... B p"]:
        return combined(w, values.to(w), near)


def with_prior(bound: Bound) -> Bound:
    """Hyperparameters with the low-rank part at its prior, and its features as a trend."""
    if bound.covariance.batch_shape:
        cure, actual = "Build one model for each set.", f"a batch {tuple(bound.covariance.batch_shape)}"
        fail(bound.where, "hyperparameters", "of one set with inducing points", actual, cure, NotImplementedError)
    low_rank = LowRank(bound.kernel, bound.others["z"], bound.jitter)
    root = torch.eye(len(low_rank)).to(low_rank.inducing)
    return replace(bound, low_rank=low_rank, trend=FeatureTrend(low_rank.features_of, root, False))


def with_posterior(method: Any, bound: Bound) -> Bound:
    """Hyperparameters with the low-rank part given the data, whose coefficients predictions integrate over.

    So do they over the coefficients of the mean where the record has these as its trend. What is found at the present
    hyperparameters is kept until the method changes.
    """
    flat = bound.trend

    def find(bound: Bound) -> tuple[Tensor, Tensor]:
        return _posterior(Observed(method.rows, method.graph, with_prior(bound)), flat)

    prior = with_prior(bound)
    if bound.versions is None:
        loc, root = find(bound)
    else:
        kept = method._kept("low rank" if flat is None else "low rank and mean")
        values = kept.get(bound.versions, lambda: find(bound))
        loc, root = differentiable(method, values, lambda: find(method.bound()))
    low_rank: Any = prior.low_rank
    is_flat = flat is not None and flat.is_flat
    return replace(prior, low_rank=replace(low_rank, loc=loc), trend=FeatureTrend(_columns(prior, flat), root, is_flat))


def _posterior(posterior: Observed, flat: Trend | None) -> tuple[Float[Tensor, " M"], Float[Tensor, "q q"]]:
    """The mean of the coefficients of the features at the present mean function, and a root of the joint covariance."""
    bound: Any = posterior.bound
    a, b = whitened_rows(posterior, _columns(bound, flat), lambda rows: rows.mean(bound))
    own = a.shape[1] - len(bound.low_rank)
    precision = a.mT @ a
    tril = cholesky(precision[own:, own:] + torch.eye(len(bound.low_rank)).to(precision), 0.0)
    loc = factor_solve(tril, a[:, own:].mT @ b[:, None])[:, 0]
    root = half_solve(tril, torch.eye(len(tril)).to(tril), transposed=True)
    if not own:
        return loc, root
    linear = precision.new_zeros(len(precision))
    of_mean = posterior_of_coefficients(bound.mean_function, *without_low_rank(precision, linear, len(tril)))[1]
    below = -factor_solve(tril, precision[own:, :own] @ of_mean)
    return loc, torch.cat([pad(of_mean, (0, len(tril))), torch.cat([below, root], 1)])


def _columns(bound: Any, flat: Trend | None) -> Callable[[Tensor], Tensor]:
    """The features, behind the basis functions of the mean if its coefficients are integrated over."""
    return basis_and_features(None if flat is None else bound.mean_function.basis, bound.low_rank)


__all__ = ["FeatureTrend", "with_posterior", "with_prior"]
