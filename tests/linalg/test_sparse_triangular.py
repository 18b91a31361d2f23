"""Sparse triangular solves against dense ones, in every way that they are done."""

import pytest
import torch
from oracles.pretended_device import DEVICE, pretended_device

from pyro_nngp.linalg import solve_triangular
from pyro_nngp.linalg.level_scheduling import dependency_levels
from pyro_nngp.linalg.sparse_triangular import SparseTriangle
from pyro_nngp.native import triangular as compiled

N, K = 40, 4
F64 = torch.float64


@pytest.fixture
def neighbors():
    """Predecessors in a random order, fewer than K for some points."""
    table, order = torch.full((N, K), -1), torch.randperm(N)
    for place, row in enumerate(order.tolist()):
        near = order[:place][torch.randperm(place)[: int(torch.randint(K + 1, ()))]]
        table[row, : len(near)] = near
    return table


def chosen(engine, monkeypatch):
    """Have solves done in one way."""
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "1" if engine == "compiled" else "0")


def triangle(w, neighbors):
    """I - A, dense."""
    rows = torch.arange(N)[:, None].expand_as(neighbors)[neighbors >= 0]
    matrix = torch.eye(N, dtype=w.dtype).expand(*w.shape[:-1], N).clone()
    matrix[..., rows, neighbors[neighbors >= 0]] = -w[..., neighbors >= 0]
    return matrix


@pytest.mark.parametrize("engine", ["compiled", "levels"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("weights", "batch"), [((), ()), ((), (3,)), ((), (2, 3)), ((3,), (2, 3)), ((3,), ()), ((2, 1), (3,))]
)
def test_solutions_are_those_of_the_dense_triangle(neighbors, weights, batch, transposed, engine, monkeypatch):
    chosen(engine, monkeypatch)
    w, right = torch.randn(*weights, N, K, dtype=F64) / K, torch.randn(*batch, N, dtype=F64)
    u = solve_triangular(w, neighbors, right, transposed=transposed)
    matrix = triangle(w, neighbors)
    system = matrix.mT if transposed else matrix
    assert u.shape == (*torch.broadcast_shapes(weights, batch), N)
    torch.testing.assert_close((system @ u[..., None])[..., 0], right.expand(u.shape), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ["compiled", "levels"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("weights", "batch"), [((), ()), ((), (2,)), ((2,), ()), ((2, 1), (3,))])
def test_first_and_second_derivatives(neighbors, weights, batch, transposed, engine, monkeypatch):
    chosen(engine, monkeypatch)
    w = (torch.randn(*weights, N, K, dtype=F64) / K).requires_grad_()
    right = torch.randn(*batch, N, dtype=F64, requires_grad=True)

    def solve(w, right):
        return solve_triangular(w, neighbors, right, transposed=transposed)

    torch.autograd.gradcheck(solve, (w, right), fast_mode=True)
    torch.autograd.gradgradcheck(solve, (w, right), fast_mode=True)


@pytest.mark.parametrize("in_dims", [(0, 1), (None, 0), (2, None)])
def test_members_of_a_vmap_are_solved_as_alone(neighbors, in_dims):
    w = torch.randn(3, N, K, dtype=F64) if in_dims[0] is not None else torch.randn(N, K, dtype=F64)
    right = torch.randn(3, 2, N, dtype=F64) if in_dims[1] is not None else torch.randn(2, N, dtype=F64)
    levels = dependency_levels(neighbors)

    def solve(w, right):
        return solve_triangular(w, neighbors, right, levels)

    moved = [x if dim is None else x.movedim(0, dim) for x, dim in zip((w, right), in_dims, strict=True)]
    each = [[x] * 3 if dim is None else x.unbind(0) for x, dim in zip((w, right), in_dims, strict=True)]
    want = torch.stack([solve(*member) for member in zip(*each, strict=True)])
    torch.testing.assert_close(torch.func.vmap(solve, in_dims)(*moved), want)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("native", ["0", "1"])
def test_the_prepared_triangle_solves_the_same(neighbors, batch, transposed, native, monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", native)
    w, right = torch.randn(N, K, dtype=F64).masked_fill(neighbors < 0, 0.0), torch.randn(*batch, N, dtype=F64)
    found = SparseTriangle(w, neighbors, dependency_levels(neighbors)).solve(right, transposed)
    torch.testing.assert_close(found, solve_triangular(w, neighbors, right, transposed=transposed))


@pytest.mark.parametrize("transposed", [False, True])
def test_systems_on_a_device_are_solved_on_the_cpu(neighbors, transposed, monkeypatch):
    w, right = torch.randn(N, K, dtype=F64).masked_fill(neighbors < 0, 0.0), torch.randn(N, dtype=F64)
    want, levels = solve_triangular(w, neighbors, right, transposed=transposed), dependency_levels(neighbors)
    solve, calls = compiled.solve, []
    monkeypatch.setattr(compiled, "solve", lambda *args: calls.append(args) or solve(*args))
    with pretended_device():
        there = [value.to(DEVICE) for value in (w, neighbors, right)]
        moved = [level.to(DEVICE) for level in levels]
        found = [
            solve_triangular(*there, moved, transposed=transposed),
            SparseTriangle(*there[:2], moved).solve(there[2], transposed),
        ]
        assert all(each.device == DEVICE for each in found)
        for each in found:
            torch.testing.assert_close(each.cpu(), want)
    assert len(calls) == 2  # one pass each, in place of a launch for each level


def test_what_stands_at_a_missing_neighbor_does_not_count(neighbors):
    w, right = torch.randn(N, K, dtype=F64), torch.randn(N, dtype=F64)
    want = solve_triangular(w.masked_fill(neighbors < 0, 0.0), neighbors, right)
    spoiled = w.masked_fill(neighbors < 0, torch.nan).requires_grad_()
    found = solve_triangular(spoiled, neighbors, right)
    torch.testing.assert_close(found, want)
    found.sum().backward()
    assert (spoiled.grad[neighbors < 0] == 0).all()


def test_cycles_are_refused():
    with pytest.raises(ValueError, match=r"dependency_levels: expected neighbors to form no cycle"):
        solve_triangular(torch.ones(2, 1), torch.tensor([[1], [0]]), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_code_gives_what_torch_gives_in_either_precision(neighbors, monkeypatch, dtype):
    w, right = torch.randn(N, K, dtype=dtype) / K, torch.randn(3, N, dtype=dtype)
    found = solve_triangular(w, neighbors, right.T.contiguous().T)
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "0")
    torch.testing.assert_close(found, solve_triangular(w, neighbors, right))
