"""Near copies of rows among their nearest others: what densities of data owe to them.

Of rows that come twice, with little noise between, each is predicted by the other. Training on leave-one-out densities
then takes the noise between copies for all the noise there is, and has no use for a lengthscale beyond their distance:
predictions at places without a copy are wrong and certain (Jankowiak and Pleiss 2021, section 5.5). Of labels it makes
lengthscales short, as each is known from its copy.

The twins of a row are the nearest others before the first gap, where the next distance is more than ten times as long.
Points that are scattered at random have a gap among K = 32 neighbors in a tenth of rows on a line and one percent in
the plane, whatever their density.

Symbols: B rows, K neighbors.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from pyro_nngp.neighbors import NeighborTable

_GAP = 10.0


class TwinDependence(NamedTuple):
    """What the densities of rows with twins owe to these.

    Attributes:
        share: of rows that have twins.
        fall: of the mean log density of these rows once it is given the other neighbors alone, in nats.
        loss: minus that density while the twins are given, in nats.
        square: mean square error given the other neighbors, in predictive variances, 1 if these are right; None of
            labels.
    """

    share: float
    fall: float
    loss: float
    square: float | None


class Twins(NamedTuple):
    """Rows with twins.

    Attributes:
        rows: which of the rows (B,) have some.
        near: the nearest others (B', K) of these.
        among: which of those are twins (B', K).
    """

    rows: Bool[Tensor, " B"]
    near: Int[Tensor, "b K"]
    among: Bool[Tensor, "b K"]


def find_twins(graph: NeighborTable, rows: Int[Tensor, " B"]) -> Twins | None:
    """The twins of some rows; None if there are none, or the metric is a function.

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
    return Twins(has, near[has], among[has])
