"""Near duplicates of rows among their nearest others, and how much densities of the data owe to them.

If each row comes twice, with little noise between the copies, each copy predicts the other. Training on leave-one-out
densities then takes the noise between copies for all the noise there is, and lengthscales longer than their distance
gain nothing: predictions at places without a copy are wrong and over-confident (Jankowiak and Pleiss 2021, section
5.5). With labels in place of real targets, lengthscales become short, as each label is known from its copy.

The near duplicates of a row are the nearest others before the first gap, where the next distance is more than ten times
as long. Points that are scattered at random have such a gap among K = 32 neighbors in a tenth of rows on a line and one
percent in the plane, whatever their density.

Symbols: B rows, K neighbors.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from pyro_nngp.neighbors import NeighborTable

_GAP = 10.0


class DuplicateDependence(NamedTuple):
    """Dependence of the densities of some rows on their near duplicates.

    Attributes:
        share: fraction of rows that have near duplicates.
        fall: decrease, in nats, of the mean log density of these rows when the near duplicates are left out of the
            neighbors.
        loss: minus the mean log density given all neighbors, in nats.
        square: mean square error without the near duplicates, in predictive variances: 1 if these are right; None for
            labels.
    """

    share: float
    fall: float
    loss: float
    square: float | None


class NearDuplicates(NamedTuple):
    """Rows that have near duplicates, b of B.

    Attributes:
        rows: whether each row has any, (B,).
        near: nearest others (b, K) of the rows that have some.
        among: whether each of these is a near duplicate, (b, K).
    """

    rows: Bool[Tensor, " B"]
    near: Int[Tensor, "b K"]
    among: Bool[Tensor, "b K"]


def find_near_duplicates(graph: NeighborTable, rows: Int[Tensor, " B"]) -> NearDuplicates | None:
    """Near duplicates of some rows; None if there are none, or if the metric is a function.

    Args:
        graph: points and their metric.
        rows: rows of the points.
    """
    if not isinstance(graph.metric, Tensor):
        return None
    near, places = graph.others(None, rows), graph.x.double() / graph.metric.double()
    distance = (places[rows, None] - places[near]).norm(dim=-1)
    gap = _GAP * distance[:, :-1] < distance[:, 1:]
    among = torch.cat([gap, torch.zeros_like(gap[:, :1])], 1)
    has = gap.any(1)
    if not has.any():
        return None
    among = torch.arange(near.shape[1], device=near.device) <= among.int().argmax(1, keepdim=True)
    return NearDuplicates(has, near[has], among[has])
