"""Quantiles and tail probabilities of predictive distributions, by formula or from draws.

A normal distribution, also of several variables, has formulas for both, a mixture of normal ones for the tail; anything
else is drawn from.

Cost: O(1) per value by formula, else O(S) for S draws.
"""

from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, Normal

NUM_DRAWS = 2_000  # sd of a quantile: about 0.03 sd of the distribution at 0.05 and 0.95


def quantiles(distribution: Distribution, levels: Float[Tensor, " Q"]) -> Float[Tensor, "Q ..."]:
    """Quantiles of a distribution: values that are exceeded with probability 1 - level.

    Args:
        distribution: any, of batch and event shape (...); each variable of an event alone.
        levels: in (0, 1).

    Returns:
        A quantile for each level; without a closed form, from draws by the global random state.
    """
    distribution = _alone(distribution)
    if isinstance(distribution, Normal):
        return distribution.icdf(levels.reshape(-1, *[1] * len(distribution.batch_shape)))
    draws = distribution.sample((NUM_DRAWS,)).to(levels.dtype)
    return draws.quantile(levels, 0)


def exceedance(distribution: Distribution, thresholds: Float[Tensor, " R"]) -> Float[Tensor, "R ..."]:
    """Probabilities of values above thresholds.

    Args:
        distribution: any, of batch and event shape (...); each variable of an event alone.
        thresholds: in the unit of its values.

    Returns:
        P(y > threshold); without a closed form, the share of draws by the global random state.
    """
    distribution = _alone(distribution)
    places = thresholds.reshape(-1, *[1] * len(distribution.batch_shape))
    try:
        return 1 - distribution.cdf(places.expand(-1, *distribution.batch_shape))
    except NotImplementedError:
        draws = distribution.sample((NUM_DRAWS,))
        shares = thresholds.new_empty(len(thresholds), *distribution.batch_shape)
        for share, threshold in zip(shares, thresholds, strict=True):
            share.copy_((draws > threshold).to(share).mean(0))
        return shares


def _alone(distribution: Distribution) -> Distribution:
    """The marginal distributions of the variables of a multivariate normal one; any other is returned unchanged."""
    if isinstance(distribution, MultivariateNormal):
        return Normal(distribution.mean, distribution.variance.sqrt())
    return distribution
