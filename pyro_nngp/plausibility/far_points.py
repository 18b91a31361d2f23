r"""A warning for predictions so far from data that they are the mean function.

f is the mean function where all neighbors together explain less than a tenth of its variance. That is so beyond the
data, as in forecasts, and in gaps wider than the lengthscale; a constant then stands for all that lasts or repeats. It
is also so everywhere if f is noise, or hidden by noise: then points about as far from data as data from one another
(half of the distance to the fourth nearest) are no better known, and there is no warning. The fourth, since designs
with pairs or triples of close sites know f within these alone, and not at a typical distance.

Cost: O(P) for P new points, in one kernel evaluation of the diagonal; 64 predictions where a tenth of them are far.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import warn
from pyro_nngp.bound import Bound
from pyro_nngp.means import ConstantMean

_UNKNOWN, _KNOWN = 0.9, 0.5  # shares of the prior variance
_NEIGHBOR = 4  # beyond pairs and triples
FAR_SHARE, _TRIED = 0.1, 64  # of new points, above which there is a warning; rows tried


@torch.no_grad()
def share_of_far_points(bound: Bound, x_new: Float[Tensor, "P D"], variance: Float[Tensor, "*L P"]) -> float:
    """Share of new points whose variance is all but the prior variance."""
    return float((variance > _UNKNOWN * bound.covariance.diag(x_new)).double().mean())


@torch.no_grad()
def data_are_connected(bound: Bound, graph: Any, variance_at: Callable[[Tensor], Tensor]) -> bool:
    """Whether points as far from data as data from one another are known, half of them to half of the variance.

    Args:
        bound: the hyperparameters.
        graph: neighbors of the data.
        variance_at: predictive variances of f at new points.
    """
    rows = torch.linspace(0, graph.num_points - 1, min(graph.num_points, _TRIED), device=graph.x.device).long()
    near = graph.others(min(_NEIGHBOR, graph.num_points - 1), rows)[:, -1]
    places = 1.5 * graph.x[rows] - 0.5 * graph.x[near]
    return float((variance_at(places) / bound.covariance.diag(places)).median()) < _KNOWN


def can_be_far(bound: Bound) -> bool:
    """Whether predictions far from data would be a constant, and the kernel's variance equal to the variance of f."""
    is_one = len(bound.covariances) == 1 and "mixing" not in bound.others  # no loadings of outputs
    return is_one and isinstance(bound.mean_function, ConstantMean)


def warn_of_far_points(
    where: str, x: Float[Tensor, "N D"], x_new: Float[Tensor, "P D"], share: float, names: tuple[str, ...] | None
) -> None:
    """Warn that a share of predictions is the mean function, and name what could carry them.

    Args:
        where: name of the caller.
        x: inputs of the data.
        x_new: new points.
        share: of these, from :func:`share_of_far_points`.
        names: names of the columns, if known.
    """
    beyond = ((x_new < x.amin(0)) | (x_new > x.amax(0))).double().mean(0)
    dim, column = x.shape[1], int(beyond.argmax())
    if float(beyond[column]) > FAR_SHARE:
        name = repr(names[column]) if names else str(column)
        place = f"beyond the data in column {name} of x"
        cure = (
            f"Put a trend and seasons into the mean by mean=LinearMean(1, active_dims=[{column}], "
            f"periods={{{column}: [...]}}), or seasons that change their shape into the kernel by a sum such as "
            f"Matern32({dim}) + Periodic({dim})."
        )
    else:
        place = "in gaps of the data"
        cure = (
            f"Covariates that are known there carry predictions into gaps, by mean=LinearMean({dim}), and so does a "
            f"sum of kernels with a longer lengthscale, such as Matern32({dim}) + Matern52({dim})."
        )
    warn(
        f"{where}: {share:.0%} of the new points lie so far {place} that predictions there are the constant of the "
        f"mean function, with the prior's variance. {cure}"
    )
