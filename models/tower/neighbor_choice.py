"""How many neighbors a method trains with, where the number is not given."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._checks import check_int
from pyro_nngp.distributed import ShardedData
from pyro_nngp.hyperparameters import pyro_entry, release
from pyro_nngp.models.tower.predictive import PredictiveMethod
from pyro_nngp.neighbors import NeighborTable
from pyro_nngp.neighbors.choice_of_k import WORTHWHILE_TRAINING

_FIRST = 32
_MOST = 128
_TABLE = 2**24  # largest table of neighbors for which K is increased


def first_neighbors(where: str, num_neighbors: int | None, x: Float[Tensor, "N D"], usual: int = _FIRST) -> int:
    """K of a new graph: the given one, or the usual one, but at most the number of other points.

    Raises:
        ValueError, TypeError: unless a given K is an int >= 1.
    """
    if num_neighbors is None:
        return min(usual, len(x) - 1)
    check_int(where, "num_neighbors", num_neighbors, 1, "It is a number of points.")
    return num_neighbors


def typical_noise(precision: Float[Tensor, "*L N"]) -> Float[Tensor, "*L 1"]:
    """The harmonic mean of the variances of Gaussian observations; where the precision is 0 there is none."""
    return (precision > 0).sum(-1, keepdim=True) / precision.sum(-1, keepdim=True)


class NeighborChoice(PredictiveMethod):
    """A method that chooses its number of neighbors; a subclass defines :meth:`log_variances`."""

    graph: NeighborTable

    @property
    def chooses_neighbors(self) -> bool:
        """Whether a number that is not given is chosen."""
        return True

    def distribute(self, data: ShardedData, choose: bool) -> None:
        super().distribute(data, choose)
        if choose and self.chooses_neighbors:
            self.choose_neighbors()
            release(self)

    def _first_neighbors(self, num_rows: int, given: int, choose: bool) -> int:
        return min(_FIRST if choose and self.chooses_neighbors else given, num_rows - 1)

    @pyro_entry
    @torch.no_grad()
    def choose_neighbors(self) -> None:
        """Double K up to 128 while that lowers the predictive variance by more than 10 %.

        For constructors without a given K, at the initial hyperparameters. Smooth functions of many inputs need it:
        there 32 neighbors explain little of the variance. N K is at most 2^24.
        """
        enough = self._enough_neighbors(self._most_neighbors(), WORTHWHILE_TRAINING)
        if enough != self.graph.num_neighbors:
            self.graph.resize(enough)
            self._follow_neighbors()

    def _most_neighbors(self) -> int:
        """The largest number that is chosen."""
        return min(_MOST, _TABLE // self.num_rows)

    def _follow_neighbors(self) -> None:
        """Take up what depends on the neighbors, after their number has changed."""
        if self.shard is not None:
            self.take_rows()

    def _enough_neighbors(self, most: int, worthwhile: float) -> int:
        """K, doubled while that lowers the mean log predictive variance by more than `worthwhile`."""
        enough = self.graph.num_neighbors
        most = min(most, self.num_rows - 1)
        if enough >= most:
            return enough
        view, trial = (self, self.graph.trial(most)) if self.shard is None else self.neighbor_trial(most)
        return trial.choose_k(lambda near: view.log_variances(trial.rows, near), enough, worthwhile)

    def log_variances(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B K"]) -> Float[Tensor, "*L B"]:
        """Logarithms of the predictive variances of y at some rows, given its neighbors, at the initial values."""
        self.undefined("log_variances")
