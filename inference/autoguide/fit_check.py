r"""Importance weights of draws of a guide: whether it is close to the posterior.

The log weights :math:`\log p(\theta, z, y) - \log q(\theta, z)` of a good guide vary little. With d values that are
determined by the data, and standard deviations that are r times the posterior's in each direction, their
variance is :math:`d (1 - r^2)^2 / 2`, so that the Pareto shape of Yao et al. grows with d however good each marginal
is. A guide counts as poor if the shape is large and so is the variance per value: .045 corresponds to r = .84.

The number of values that the data determine is the trace of the covariance of q times the curvature of the log
likelihood (Spiegelhalter et al. 2002).

Reference: Yao, Vehtari, Simpson, Gelman (2018), "Yes, but did it work? Evaluating variational inference", ICML;
Spiegelhalter, Best, Carlin, van der Linde (2002), "Bayesian measures of model complexity and fit", JRSS B.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import warn
from pyro_nngp.inference.diagnostics.calibration import pareto_shape

ENOUGH = 100  # draws
_LARGE, _PER_VALUE = 0.7, 0.045  # Pareto shape, variance of log weights per value


class Weighted(NamedTuple):
    """Draws of a guide.

    Attributes:
        log_weights: log densities of the program minus log densities of the guide, (S,).
        determined: squared distances of the draws from the guide's mean, weighted by the curvatures of the data, (S,).
    """

    log_weights: Tensor
    determined: Tensor


def joined(parts: Sequence[Weighted]) -> Weighted:
    """Several sets of draws as one."""
    return Weighted(*map(torch.cat, zip(*parts, strict=True)))


def warn_of_poor_fit(draws: Weighted, num_hyperparameters: int, what: str) -> None:
    """Warn if draws of a guide have the weights of a poor one.

    Args:
        draws: the draws, at least 25.
        num_hyperparameters: number of values among them that are drawn without curvatures of the data.
        what: the distribution that the weights belong to, for the message.
    """
    weights: Float[Tensor, " S"] = draws.log_weights
    values = max(float(draws.determined.mean()) + num_hyperparameters, 1.0)
    variance, shape = float(weights.var()) / values, pareto_shape(weights)
    if not (variance < _PER_VALUE or shape < _LARGE):
        warn(
            f"AutoNNGP: {what} is far from the posterior, and intervals are probably too narrow: Pareto k-hat "
            f"{shape:.2g} > {_LARGE}, variance of log weights {variance:.2g} > {_PER_VALUE} for each value that the "
            "data determine. Draw with QuickNUTS(model, guide=guide), or QuickNUTS(model) if it does not mix; see "
            "guide.khat()."
        )
