"""The Vecchia factor against dense matrices."""

import pytest
import torch
from builders import matern
from oracles.dense import dense_factors, dense_precision

from pyro_nngp.distributions import NNGP
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.linalg.vecchia_factor import determines
from pyro_nngp.neighbors import NeighborGraph

N = 50
F64 = torch.float64


@pytest.fixture
def kernel():
    return matern().requires_grad_(False)


@pytest.fixture
def graph():
    return NeighborGraph(torch.rand(N, 2, dtype=F64), 6)


@pytest.fixture
def factor(kernel, graph):
    return NNGP(kernel, graph).factor


def root_of(kernel, graph):
    """G = (I - A)^-1 V^1/2, dense."""
    weights, var = dense_factors(kernel, graph)
    return torch.linalg.inv(torch.eye(N, dtype=F64) - weights) * var.sqrt()


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_products_are_those_of_the_root(factor, kernel, graph, batch, prepared):
    factor, root, u = (
        factor.prepared() if prepared else factor,
        root_of(kernel, graph),
        torch.randn(*batch, N, dtype=F64),
    )
    torch.testing.assert_close(factor.color(u), u @ root.mT, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(factor.color_transposed(u), u @ root, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(factor.whiten(u), u @ torch.linalg.inv(root).mT, rtol=1e-8, atol=1e-8)
    weights, _ = dense_factors(kernel, graph)
    torch.testing.assert_close(factor.residual(u), u - u @ weights.mT, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("sparse_from", [0, 10**6])
def test_the_precision_in_all_its_forms(factor, kernel, graph, sparse_from):
    want, m = dense_precision(kernel, graph), torch.randn(2, N, dtype=F64)
    close = {"rtol": 1e-8, "atol": 1e-8}
    torch.testing.assert_close(factor.dense(sparse_from), want, **close)
    torch.testing.assert_close(factor.product(m), m @ want, **close)
    torch.testing.assert_close(factor.diagonal(), want.diagonal(), **close)
    rows = torch.tensor([4, 17, 30])
    assert factor.sparse(rows.numpy()).has_sorted_indices
    torch.testing.assert_close(torch.from_numpy(factor.sparse(rows.numpy()).toarray()), want[rows], **close)
    assert (factor.row_bounds() >= (factor.sparse().toarray() != 0).sum(1)).all()
    torch.testing.assert_close(factor.log_det(), torch.logdet(want), rtol=1e-9, atol=0)


def test_gradients(graph):
    w, var = 0.3 * torch.randn(N, 6, dtype=F64), 0.1 + torch.rand(N, dtype=F64)
    u = torch.randn(2, N, dtype=F64)

    def everything(w, var, u):
        factor = VecchiaFactor(w, var, graph.neighbors)
        return factor.color(u), factor.color_transposed(u), factor.whiten(u), factor.log_det()

    torch.autograd.gradcheck(everything, [part.requires_grad_() for part in (w, var, u)], fast_mode=True)


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_solves_agree_with_the_dense_system(factor, kernel, graph, start, prepared):
    factor, root = factor.prepared() if prepared else factor, root_of(kernel, graph)
    precision, right = torch.rand(2, N, dtype=F64) * 10, torch.randn(2, N, dtype=F64)
    z = factor.solve(right, precision, torch.randn(2, N, dtype=F64) if start else None, tolerance=1e-12)
    for i in range(2):
        system = torch.eye(N, dtype=F64) + root.mT @ (precision[i, :, None] * root)
        torch.testing.assert_close(system @ z[i], right[i], rtol=1e-7, atol=1e-9)


def test_a_solve_that_does_not_arrive_says_so(factor):
    right = torch.randn(N, dtype=F64)
    with pytest.warns(UserWarning, match=r"stopped after 2 iterations at a relative residual of"):
        factor.solve(right, torch.full_like(right, 1e6), max_iterations=2)
    with pytest.warns(UserWarning, match=r"stopped at a residual of NaN\. The usual cause is NaN among data"):
        factor.solve(right * torch.nan, torch.ones_like(right))


def test_what_stands_at_a_missing_neighbor_does_not_count(factor, graph):
    spoiled = torch.where(graph.neighbors < 0, torch.nan, factor.w)
    other, u = VecchiaFactor(spoiled, factor.var, graph.neighbors), torch.randn(N, dtype=F64)
    for name in ("color", "color_transposed", "whiten", "product"):
        torch.testing.assert_close(getattr(other, name)(u), getattr(factor, name)(u))


def test_results_have_the_dtype_of_the_factor_and_are_double_once_prepared(factor):
    single = VecchiaFactor(factor.w.float(), factor.var.float(), factor.neighbors)
    assert single.color(torch.randn(N)).dtype == torch.float32
    assert single.prepared().color(torch.randn(N, dtype=F64)).dtype == F64
    assert single.diagonal().dtype == F64


@pytest.mark.parametrize(("rows", "columns"), [(N - 1, 6), (N, 5)])
def test_shapes_that_disagree_are_refused(factor, rows, columns):
    with pytest.raises(
        ValueError, match=r"VecchiaFactor: expected w, var, neighbors of shapes \(N, K\), \(N,\), \(N, K\)"
    ):
        VecchiaFactor(factor.w[:, :columns], factor.var[:rows], factor.neighbors)


def test_the_median_value_decides_whether_data_or_neighbors_determine_values():
    var = torch.tensor([1e-9, 0.5, 2.0], dtype=F64)
    assert determines(var, torch.tensor([0.0, 3.0, 1.0], dtype=F64))
    assert not determines(var, torch.tensor([[0.0, 1.9, 1e9], [0.0, 1.0, 1.0]], dtype=F64))
