"""Search in the metric of a kernel: candidates from feature spaces, ranked by correlation.

Reference: Kang, Katzfuss (2023), "Correlation-based sparse inverse Cholesky factorization for fast Gaussian-process
inference". Differs from the paper: candidates come from exact searches in the kernel's feature spaces, not from a tree.

Cost: one search of 2 k neighbors in each feature space, and 2 k covariances per space and row. Symbols: as in
:mod:`pyro_nngp.neighbors.search.index`.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._indexing import repeats
from pyro_nngp.linalg import in_blocks
from pyro_nngp.neighbors.search.index import SearchIndex

_MORE = 2  # candidates per neighbor and feature space


@runtime_checkable
class FeatureMetric(Protocol):
    """Interface of a metric with feature spaces, such as :class:`~pyro_nngp.kernels.KernelMetric`."""

    def features(self, x: Tensor) -> list[Tensor]:
        """Feature spaces whose near points are candidates."""

    def distance(self, x: Tensor, z: Tensor) -> Tensor:
        """Distances (B, m) of points (B, D) from candidates (B, m, D)."""


class CorrelationIndex:
    """A search index in the metric of a kernel, with the interface of :class:`SearchIndex`.

    Args:
        points: (P, D).
        metric: features and distances.
        options: options of the searches for candidates, such as `backend`.
    """

    def __init__(self, points: Float[Tensor, "P D"], metric: FeatureMetric, **options: Any) -> None:
        self._points, self._metric = points, metric
        self._indices = [SearchIndex(space, **options) for space in metric.features(points)]

    def nearest(
        self, queries: Float[Tensor, "Q D"], k: int, exclude: Int[Tensor, " Q"] | None = None
    ) -> tuple[Int[Tensor, "Q k"], Float[Tensor, "Q k"]]:
        """Indices and distances in the metric of the k nearest points; arguments as for :meth:`SearchIndex.nearest`."""
        wanted = min(_MORE * k, len(self._points) - (exclude is not None))
        spaces = self._metric.features(queries)
        searches = zip(self._indices, spaces, strict=True)
        candidates = [index.nearest(space, wanted, exclude)[0] for index, space in searches]
        return self._ranked(queries, torch.cat(candidates, -1), k)

    def predecessors(self, k: int, start: int = 0) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
        """Indices and distances in the metric of the k nearest predecessors of the rows from `start`."""
        candidates = [index.predecessors(_MORE * k, start)[0] for index in self._indices]
        return self._ranked(self._points[start:], torch.cat(candidates, -1), k)

    def _ranked(self, queries: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best of some candidates, each counted once; ties by index."""

        def block(part: slice) -> tuple[Tensor, Tensor]:
            rows = candidates[part].sort(-1).values
            distance = self._metric.distance(queries[part], self._points[rows.clamp(min=0)])
            distance = distance.masked_fill(repeats(rows) | (rows < 0), torch.inf)
            value, order = distance.sort(dim=-1, stable=True)
            value, rows = value[:, :k], rows.gather(-1, order[:, :k])
            return torch.where(value.isinf(), -1, rows), value

        index, value = in_blocks(block, len(queries), candidates.shape[1] * (queries.shape[1] + 4))
        missing = k - index.shape[1]
        if missing > 0:
            index = torch.nn.functional.pad(index, (0, missing), value=-1)
            value = torch.nn.functional.pad(value, (0, missing), value=torch.inf)
        return index, value
