"""Proofs of candidates by their floor."""

import numpy as np
import torch
from oracles.neighbors import POINTS, oracle
from tqdm.auto import tqdm

from pyro_nngp.neighbors.search import backends as search_backends
from pyro_nngp.neighbors.search import certification as search_proof
from pyro_nngp.neighbors.search.copies import earlier_copies
from pyro_nngp.neighbors.search.index import SearchIndex

F64 = torch.float64


def test_places_that_many_points_share_are_searched_once(monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "0")
    sizes = []
    build = search_backends.BruteForce.__init__
    monkeypatch.setattr(
        search_backends.BruteForce, "__init__", lambda s, p, *args: (sizes.append(len(p)), build(s, p, *args))[1]
    )
    points = POINTS["few places"]
    index = SearchIndex(points, backend="kdtree")
    for k in (3, 12, 3):
        index.nearest(points[:5], k)
    assert sizes == [25 * 4, 25 * 13]


def nearest_of_all(queries, points, k, **options):
    return oracle(torch.from_numpy(queries), torch.from_numpy(points), k, **options).numpy()


class Frugal(search_backends.CandidateBackend):
    """Candidates of brute force with floors that may be lowered, as those of a backend that rounds coarsely."""

    growth = 1.0

    def __init__(self, points, lowered):
        self._brute = search_backends.BruteForce(points, torch.device("cpu"), F64, None)
        self._lowered, self.asked = lowered, []

    def prefix(self, stop):
        self._stop = stop
        self._brute.prefix(stop)

    def max_fetch(self, k):
        return 4 * k

    def candidates(self, queries, fetch, limit, exclude):
        self.asked.append((len(queries), fetch))
        everyone, no_one = np.full_like(limit, self._stop), np.full_like(exclude, -1)
        found = self._brute.candidates(queries, fetch, everyone, no_one)
        return found._replace(floor=found.floor - self._lowered)


def asked(points, queries, k, lowered=0.0, kept=None, limit=None, exclude=None):
    """The answer of a Source to queries, the share of hard ones, and what the backend was asked."""
    kept = np.arange(len(points)) if kept is None else kept
    backend = Frugal(points[kept], lowered)
    brute = search_backends.BruteForce(points[kept], torch.device("cpu"), F64, None)
    source = search_proof.Source(backend, brute, kept)
    source.prefix(len(points))
    size = len(queries)
    limit = np.full(size, len(points)) if limit is None else limit
    exclude = np.full(size, -1) if exclude is None else exclude
    index, value = np.empty((size, k), np.int64), np.empty((size, k))
    work = search_proof.Queries(queries, limit, exclude, index, value)
    hard = source.answer(work, k + 1, tqdm(disable=True))
    assert work.proven.all()
    return work, hard, backend.asked


def test_candidates_below_their_floor_are_taken_at_once():
    points = POINTS["uniform in 3-d"].numpy()
    work, hard, calls = asked(points, points[:50] + 0.01, 6)
    assert (work.index == nearest_of_all(points[:50] + 0.01, points, 6)).all()
    assert hard == 0
    assert calls == [(50, 7)]


def test_candidates_that_no_floor_proves_are_asked_for_again_and_then_by_brute_force():
    points = POINTS["uniform in 3-d"].numpy()
    work, hard, calls = asked(points, points[:50] + 0.01, 6, lowered=np.inf)
    assert (work.index == nearest_of_all(points[:50] + 0.01, points, 6)).all()
    assert hard == 1
    assert calls == [(50, 7), (50, 14)]  # 28 are more than the backend's most


def test_predecessors_that_are_not_among_the_candidates_are_hard():
    points = POINTS["uniform in 3-d"].numpy()
    rows = np.arange(len(points))
    work, hard, calls = asked(points, points, 6, limit=rows)
    assert (work.index == nearest_of_all(points, points, 6, limit=rows)).all()
    assert 0 < hard < 1
    assert calls[1][0] == round(hard * len(points))


def test_ties_at_the_last_place_go_by_number():
    points = np.array([[1.0], [-1.0], [3.0], [-3.0], [0.5]])
    work, hard, _ = asked(points, np.zeros((1, 1)), 2)
    assert work.index.tolist() == [[4, 0]]
    assert hard == 1  # a third candidate as near as the second proves nothing
    assert work.value.tolist() == [[0.25, 1.0]]


def test_numbers_are_those_of_all_points_where_copies_are_not_searched():
    points = POINTS["few places"].numpy()
    kept = np.flatnonzero(earlier_copies(torch.from_numpy(points)) < 5)
    assert len(kept) < len(points)
    rows = np.arange(0, len(points), 11)
    work, _, _ = asked(points, points[rows], 4, kept=kept, exclude=rows)
    assert (work.index == nearest_of_all(points[rows], points, 4, exclude=rows)).all()
