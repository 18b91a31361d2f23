"""Exact neighbor search in torch operations alone, on the device of the points, which no point or answer leaves.

Up to three dimensions points are sorted into the cells of a grid. A query looks at its cell and the cells around it,
and is answered if its k-th distance is below the distance to whatever lies outside of them; otherwise it is asked again
on a grid of cells twice as wide. The first grid is so fine that even the fullest cells hold few points, so clusters and
empty regions cost about the same as evenly spread points. In more dimensions distances to all points are computed in
tiles, as products of matrices in float64, with a bound on their rounding; distances of a metric of the user's too.

Either way an answer is exact: distances equal `squared_distances` bit for bit, and ties go to the smaller
number, as in all backends.

Cost per query over P points: O(k 3^D) on a grid, after O(P log P) per grid; O(P D) in tiles. Memory is bounded.

Symbols: Q queries, P points, D dimensions, k neighbors, C candidates.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nngp._checks import fail

GRID_DIMS = 3
_SPARE = 9  # candidates beyond k among which ties are resolved
_FINEST = 20  # cells per side, as a power of two: three of them fit into one key
_WANTED = 4, 8, 16  # candidates per neighbor: for the sphere in a cube of cells, and where half are later points
_CROWDED = 8  # times as many are too many
CPU_BLOCK, GPU_BLOCK = 2**21, 2**26  # candidates held at a time
TILE = 2**13  # points
_ROUNDING = 1e-12  # of cell borders, relative to the extent of the points

Metric = Callable[[Tensor, Tensor], Tensor]
Progress = Callable[[int], object]  # called with the number of queries answered since the last call


class Queries(NamedTuple):
    """Queries, and memory for their answers."""

    places: Tensor  # (Q, D)
    limit: Tensor  # (Q,): only points with smaller numbers count
    exclude: Tensor  # (Q,): the number of one point to leave out, -1 for none
    numbers: Tensor  # (Q, k), to be written: numbers of the points, -1 where there is none
    value: Tensor  # (Q, k), to be written: distances, infinite where there is no point

    @property
    def k(self) -> int:
        """Number of neighbors wanted."""
        return self.numbers.shape[1]

    def at(self, rows: Any) -> "Queries":
        """Some of the queries; their memory is shared if `rows` is a slice."""
        return Queries(*(each[rows] for each in self))

    def counts(self, rows: Tensor, candidates: Tensor) -> Tensor:
        """Whether each candidate counts for each of some queries."""
        return (candidates < self.limit[rows, None]) & (candidates != self.exclude[rows, None])

    def write(self, numbers: Tensor, value: Tensor) -> None:
        """Keep the answers, unless they were written in place."""
        for memory, answer in ((self.numbers, numbers), (self.value, value)):
            if memory.data_ptr() != answer.data_ptr():
                memory.copy_(answer)


class PointsInTorch:
    """Fixed points, and the grids over them that were built so far.

    Args:
        points: finite points, (P, D), in float64 unless there is a metric.
        metric: callable (n, D), (m, D) -> (n, m) of distances; None is the squared Euclidean one.
    """

    def __init__(self, points: Tensor, metric: Metric | None = None) -> None:
        self.points, self.columns, self.low = points, points.T.contiguous(), points.amin(0)
        self.extent = float((points.amax(0) - self.low).max())
        self.metric = metric
        self._grids: dict[int, tuple[Tensor, Tensor, int]] = {}

    def answer(self, queries: Queries, done: Progress) -> None:
        """Write the nearest points of all queries into their memory."""
        by_grid = self.points.shape[1] <= GRID_DIMS and self.metric is None
        (_by_grid if by_grid else _by_tiles)(self, queries, done)

    def grid(self, level: int) -> tuple[Tensor, Tensor, int]:
        """Sorted cells of the points, the points in this order, and the largest number of points in a cell."""
        if level not in self._grids:
            key = torch.zeros(len(self.points), dtype=torch.int64, device=self.points.device)
            for column in self.cells(self.points, level).T:
                key = (key << level) + column
            keys, order = key.sort(stable=True)
            self._grids[level] = keys, order, int(keys.unique_consecutive(return_counts=True)[1].max())
        return self._grids[level]

    def cells(self, places: Tensor, level: int) -> Tensor:
        """The cell of each place, counted along each dimension, (Q, D)."""
        side = 2**level
        return ((places - self.low) * (side / (self.extent or 1.0))).floor().clamp(0, side - 1).long()

    def finest(self, wanted: int) -> int:
        """Finest useful level: cells hold about `wanted` points on average, and the fullest not many more."""
        dim = self.points.shape[1]
        if not self.extent:
            return 0
        level = math.ceil(math.log2(max(1.0, len(self.points) * 3**dim / wanted)) / dim)
        while level < _FINEST and self.grid(level)[2] * 3**dim > _CROWDED * wanted:
            level += 1
        return level


def distances(columns: Tensor, queries: Tensor, index: Tensor) -> Tensor:
    """Squared distances of queries (Q, D) to points `index` (Q, C) of (D, P), rounded as everywhere in the search."""
    total = torch.zeros(index.shape, dtype=torch.float64, device=columns.device)
    for column, place in zip(columns, queries.T, strict=True):
        difference = column[index] - place[:, None]
        difference *= difference
        total += difference
    return total


def _by_grid(given: PointsInTorch, queries: Queries, done: Progress) -> None:
    """Grids from fine to coarse, the last of one cell, until every query is answered."""
    wanted = _WANTED[given.points.shape[1] - 1] * queries.k
    level = given.finest(wanted)
    points, todo = given.points, torch.arange(len(queries.places), device=given.points.device)
    while len(todo):
        order = given.grid(level)[1]
        first, count, floor = _around(given, queries.places[todo], level)
        total = count.sum(-1)
        ready = torch.nonzero((total >= wanted) | (level == 0))[:, 0]
        ready = ready[total[ready].argsort()]  # queries of one block have about as many candidates
        proven = torch.zeros(len(todo), dtype=torch.bool, device=points.device)
        ends = total[ready].cpu()
        stop = len(ready)
        while stop:
            width = max(1, int(ends[stop - 1]))
            start = max(0, stop - max(1, _block(points) // width))
            part = ready[start:stop]
            rows = todo[part]
            candidates = order[_members(first[part], count[part], width)]
            real = torch.arange(width, device=points.device) < total[part, None]
            real &= queries.counts(rows, candidates)
            squares = distances(given.columns, queries.places[rows], candidates).masked_fill_(~real, math.inf)
            numbers, least = _smallest(candidates, squares, queries.k)
            queries.numbers[rows], queries.value[rows] = numbers, least
            proven[part] = (least[:, -1] < floor[part]) | floor[part].isinf()
            stop = start
        done(int(proven.sum()))
        todo, level = todo[~proven], level - 1


def _around(given: PointsInTorch, queries: Tensor, level: int) -> tuple[Tensor, Tensor, Tensor]:
    """Runs of sorted points in the 3^D cells around queries: first and count (Q, 3^(D-1)); and the floor (Q,).

    All points outside have squared distances of at least the floor.
    """
    side, width, low, keys = 2**level, given.extent / 2**level, given.low, given.grid(level)[0]
    cell = given.cells(queries, level)
    below = torch.where(cell <= 1, math.inf, queries - (low + (cell - 1) * width))
    above = torch.where(cell >= side - 2, math.inf, low + (cell + 2) * width - queries)
    radius = torch.minimum(below, above).amin(-1) - _ROUNDING * given.extent
    offsets = torch.cartesian_prod(*[torch.arange(-1, 2)] * (cell.shape[1] - 1)) if cell.shape[1] > 1 else None
    offsets = torch.zeros(1, 0, dtype=torch.int64) if offsets is None else offsets.reshape(-1, cell.shape[1] - 1)
    firsts, counts = [], []
    for offset in offsets.to(cell.device):
        near = cell[:, :-1] + offset
        inside = ((near >= 0) & (near < side)).all(-1)
        base = torch.zeros_like(cell[:, 0])
        for column in near.T:
            base = (base << level) + column
        base = base << level
        start = torch.searchsorted(keys, base + (cell[:, -1] - 1).clamp(min=0))
        stop = torch.searchsorted(keys, base + (cell[:, -1] + 1).clamp(max=side - 1), right=True)
        firsts.append(start)
        counts.append(torch.where(inside, stop - start, 0))
    return torch.stack(firsts, -1), torch.stack(counts, -1), radius.clamp(min=0).square()


def _members(first: Tensor, count: Tensor, width: int) -> Tensor:
    """Positions (Q, width) of the points of some runs, one run after the other; arbitrary beyond the last."""
    at = torch.arange(width, device=first.device)
    ends = count.cumsum(-1)
    position = first[:, :1] + at
    for run in range(1, first.shape[1]):
        shift = first[:, run] - ends[:, run - 1]
        position = torch.where(at >= ends[:, run - 1, None], shift[:, None] + at, position)
    return torch.where(at < ends[:, -1:], position, 0)


def _by_tiles(given: PointsInTorch, queries: Queries, done: Progress) -> None:
    """All distances, tile by tile; queries that rounding or ties leave open are repeated with more candidates."""
    points = given.points
    far = _Products(points) if given.metric is None else _Measured(points, given.metric)
    size = max(1, _block(points) // TILE)
    for start in range(0, len(queries.places), size):
        rows, fetch = torch.arange(len(queries.places), device=points.device)[start : start + size], queries.k + _SPARE
        while len(rows):
            stop = max(1, int(queries.limit[rows].max()))
            places = queries.places[rows]
            best = torch.full((len(rows), 0), math.inf, dtype=queries.value.dtype, device=points.device)
            numbers = torch.zeros(len(rows), 0, dtype=torch.int64, device=points.device)
            for tile in range(0, stop, TILE):
                every = torch.arange(tile, min(stop, tile + TILE), device=points.device)
                near = far.values(places, every).masked_fill(~queries.counts(rows, every), math.inf)
                top, at = near.topk(min(fetch, len(every)), largest=False)
                best, numbers = torch.cat([best, top], -1), torch.cat([numbers, every[at]], -1)
                best, at = best.topk(min(fetch, best.shape[1]), largest=False)
                numbers = numbers.gather(-1, at)
            exact = best if given.metric is not None else distances(given.columns, places, numbers)
            exact = exact.masked_fill(best.isinf(), math.inf)
            queries.numbers[rows], queries.value[rows] = _smallest(numbers, exact, queries.k)
            last = best[:, -1] if best.shape[1] == fetch else torch.full_like(best[:, 0], math.inf)
            proven = (queries.value[rows, -1] < far.floor(places, last)) | last.isinf()
            done(int(proven.sum()))
            rows, fetch = rows[~proven], 4 * fetch


class _Products:
    """|p|^2 - 2 p.q of all points p and queries q, which grows with the distance of p."""

    def __init__(self, points: Tensor) -> None:
        self._center = points.mean(0)
        self._points = points - self._center
        self._norms = self._points.square().sum(-1)

    def values(self, places: Tensor, rows: Tensor) -> Tensor:
        return torch.addmm(self._norms[rows], places - self._center, self._points[rows].T, alpha=-2)

    def floor(self, places: Tensor, value: Tensor) -> Tensor:
        """The smallest squared distance that may have led to a value."""
        square = (places - self._center).square().sum(-1)
        bound = 2 * (places.shape[1] + 8) * torch.finfo(value.dtype).eps
        return value + square - bound * (square.sqrt() + self._norms.max().sqrt()).square()


class _Measured:
    """Distances in a metric of the user's."""

    def __init__(self, points: Tensor, metric: Metric) -> None:
        self._points, self._metric = points, metric

    @torch.no_grad()
    def values(self, places: Tensor, rows: Tensor) -> Tensor:
        value = self._metric(places, self._points[rows])
        if not isinstance(value, Tensor) or value.shape != (len(places), len(rows)):
            expectation = f"to return a tensor of shape {(len(places), len(rows))}"
            actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            fail("SearchIndex", "metric", expectation, actual, "Map (n, D), (m, D) to (n, m).")
        if bool(value.isnan().any()):
            fail("SearchIndex", "metric", "to return numbers", "NaN", "Try it on a few of the points.")
        return value.double()

    def floor(self, places: Tensor, value: Tensor) -> Tensor:
        return value


def _smallest(index: Tensor, value: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest values of each row with their numbers, ties by number; -1 where a value is infinite."""
    fetch = min(value.shape[1], k + _SPARE)
    top, at = value.topk(fetch, largest=False)
    numbers, least = _in_order(index.gather(-1, at), top, k)
    if fetch < value.shape[1]:
        open_ = torch.nonzero((top[:, -1] == top[:, k - 1]) & top[:, -1].isfinite())[:, 0]
        if len(open_):
            numbers[open_], least[open_] = _in_order(index[open_], value[open_], k)
    return numbers, least


def _in_order(index: Tensor, value: Tensor, k: int) -> tuple[Tensor, Tensor]:
    index, at = index.sort(dim=-1)
    value, second = value.gather(-1, at).sort(stable=True, dim=-1)
    index = index.gather(-1, second).masked_fill_(value.isinf(), -1)
    lacking = max(0, k - value.shape[1])
    pad = torch.nn.functional.pad
    return pad(index[:, :k], (0, lacking), value=-1), pad(value[:, :k], (0, lacking), value=math.inf)


def _block(points: Tensor) -> int:
    return CPU_BLOCK if points.device.type == "cpu" else GPU_BLOCK
