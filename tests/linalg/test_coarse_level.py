"""The coarse level against the dense matrix that it stands for, and the iterations that it saves."""

import pytest
import torch

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import Matern12, Matern52
from pyro_nngp.linalg import VecchiaFactor, vecchia_factor
from pyro_nngp.linalg.coarse_level import CoarseLevel
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
N = 5000


def graph_of(n=N, ordering="random", num_neighbors=20):
    x = torch.rand(n, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    return NeighborGraph(x, num_neighbors, ordering)


def prior_on(graph, kernel=None):
    kernel = Matern52(2, lengthscale=0.3) if kernel is None else kernel
    return NNGP(kernel.requires_grad_(False), graph).factor.prepared()


def preconditioner(graph, prior, precision):
    order = torch.cat(graph.levels())
    return CoarseLevel(graph.x, graph.neighbors).preconditioner(order, prior.w, prior.var, precision[..., order])


@pytest.fixture
def precision():
    return torch.randn(2, N, dtype=F64, generator=torch.Generator().manual_seed(1)).exp()


def collected(graph, prior, precision, coarse):
    """Precisions that coarse points collect, one point after the other."""
    position = {point: i for i, point in enumerate(coarse.tolist())}
    totals, first = torch.zeros(len(coarse), dtype=F64), graph.neighbors[:, 0].tolist()
    for point, (tau, var) in enumerate(zip(precision.tolist(), prior.var.tolist(), strict=True)):
        home = point
        while home not in position:
            home = first[home]
        totals[position[home]] += tau if home == point else tau / (1 + tau * var)
    return totals


def test_it_solves_with_a_coarse_block_and_a_diagonal(precision):
    graph = graph_of()
    prior, order = prior_on(graph), torch.cat(graph.levels())
    solve = preconditioner(graph, prior, precision)
    right = torch.randn(2, N, dtype=F64)
    found, fine = solve(right), right / (1 + prior.var * precision)[:, order]
    m = int((found != fine).any(0).sum())
    assert 256 <= m <= N // 5
    torch.testing.assert_close(found[:, m:], fine[:, m:], rtol=1e-12, atol=0)
    coarse = order[:m]
    root = prior.root().matrix(N).toarray()[coarse][:, coarse]
    inverse = torch.linalg.inv(torch.from_numpy(root))
    for each, tau, r in zip(found, precision, right, strict=True):
        block = torch.eye(m, dtype=F64) + inverse.mT @ (collected(graph, prior, tau, coarse)[:, None] * inverse)
        torch.testing.assert_close(each[:m], torch.linalg.solve(block, r[:m]), rtol=1e-6, atol=1e-8)


def test_equal_precisions_share_a_factor(precision):
    graph = graph_of()
    prior, right = prior_on(graph), torch.randn(3, N, dtype=F64)
    each = torch.stack([preconditioner(graph, prior, precision[i])(right[j]) for j, i in enumerate((0, 1, 0))])
    together = preconditioner(graph, prior, precision[[0, 1, 0]])(right)
    torch.testing.assert_close(together, each, rtol=1e-9, atol=1e-12)
    shared = preconditioner(graph, prior, precision[0])(right)
    torch.testing.assert_close(shared[[0, 2]], each[[0, 2]], rtol=1e-9, atol=1e-12)


def test_solutions_are_the_same_in_a_fraction_of_the_products(precision, monkeypatch):
    prior, right, products, counts = prior_on(graph_of()), torch.randn(2, N, dtype=F64), [], []
    iterate = vecchia_factor.conjugate_gradients

    def counted(product, *args, **options):
        return iterate(lambda z: products.append(1) or product(z), *args, **options)

    monkeypatch.setattr(vecchia_factor, "conjugate_gradients", counted)
    solutions = []
    for factor in (prior, VecchiaFactor(prior.w, prior.var, prior.neighbors, prior.levels).prepared()):
        solutions.append(factor.solve(right, 10 * precision, tolerance=1e-9))
        counts.append(len(products) - sum(counts))
    torch.testing.assert_close(*solutions, rtol=1e-6, atol=1e-7)
    assert counts[0] < counts[1] / 4


@pytest.mark.parametrize(
    ("settings", "kernel", "tau"),
    [
        ({"ordering": "coordinate"}, None, 10.0),
        ({"n": 600}, None, 10.0),
        ({"n": 8000, "num_neighbors": 8}, Matern12(2, lengthscale=0.2), 1e3),
    ],
    ids=["far from the rest", "too few", "say little of the rest"],
)
def test_there_is_none_where_few_points_do_not_stand_for_the_others(settings, kernel, tau):
    graph = graph_of(**settings)
    assert preconditioner(graph, prior_on(graph, kernel), torch.full((len(graph.x),), tau, dtype=F64)) is None


def test_a_precision_of_nan_is_reported_by_the_iterations(precision):
    prior = prior_on(graph_of())
    with pytest.warns(UserWarning, match=r"VecchiaFactor.solve: conjugate gradients stopped at a residual of NaN"):
        prior.solve(torch.randn(N, dtype=F64), precision[0] * torch.nan)
