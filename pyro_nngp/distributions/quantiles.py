"""Quantiles and tail probabilities of predictive distributions, by formula or from draws.

A normal distribution has formulas for both, a mixture of normal ones for the tail; anything else is drawn from.

Cost: O(1) per value by formula, else O(S) for S draws.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, Normal

NUM_DRAWS = 2_000  # sd of a quantile: about 0.03 sd of the distribution at 0.05 and 0.95


def quantiles(distribution: Distribution, levels: Float[Tensor, " Q"]) -> Float[Tensor, "Q ..."]:
    """Values that are exceeded with probability 1 - level.

    Args:
        distribution: any, of batch shape (...).
        levels: in (0, 1).

    Returns:
        A quantile for each level; drawn from the global random state where there is no formula.
    """
    if isinstance(distribution, Normal):
        return distribution.icdf(levels.reshape(-1, *[1] * len(distribution.batch_shape)))
    draws = distribution.sample((NUM_DRAWS,)).to(levels.dtype)
    return draws.quantile(levels, 0)


def exceedance(distribution: Distribution, thresholds: Float[Tensor, " R"]) -> Float[Tensor, "R ..."]:
    """Probabilities of values above thresholds.

    Args:
        distribution: any, of batch shape (...).
        thresholds: in the unit of its values.

    Returns:
        P(y > threshold); the share of draws from the global random state where there is no formula.
    """
    places = thresholds.reshape(-1, *[1] * len(distribution.batch_shape))
    try:
        return 1 - distribution.cdf(places.expand(-1, *distribution.batch_shape))
    except NotImplementedError:
        draws = distribution.sample((NUM_DRAWS,))
        return torch.stack([(draws > threshold).to(thresholds.dtype).mean(0) for threshold in thresholds])


__all__ = ["NUM_DRAWS", "exceedance", "quantiles"]
