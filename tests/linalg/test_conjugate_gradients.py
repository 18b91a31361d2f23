"""Conjugate gradients against dense solutions."""

import pytest
import torch
from builders import scalar

from pyro_nngp.linalg.conjugate_gradients import conjugate_gradients

N = 30


@pytest.fixture
def system():
    root = torch.randn(2, N, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = torch.logspace(-3, 3, N, dtype=torch.float64)  # of the unknowns: what a diagonal preconditioner undoes
    return scale[:, None] * (root @ root.mT / N + torch.eye(N, dtype=torch.float64)) * scale


@pytest.mark.parametrize("from_start", [False, True])
def test_each_right_hand_side_is_solved_with_its_own_system(system, from_start):
    want = torch.randn(2, N, dtype=torch.float64)
    right, diagonal = (system @ want[..., None])[..., 0], system.diagonal(dim1=-2, dim2=-1)
    start = torch.randn(2, N, dtype=torch.float64) if from_start else None
    z, residual = conjugate_gradients(lambda z: (system @ z[..., None])[..., 0], right, start, diagonal, 1e-13)
    assert residual <= 1e-13
    torch.testing.assert_close((system @ z[..., None])[..., 0], right, rtol=1e-9, atol=1e-9)


def test_the_preconditioner_saves_iterations_and_the_residual_is_the_true_one(system):
    system, right = system[0], torch.randn(N, dtype=torch.float64)
    found = {}
    for name, diagonal in (("plain", None), ("diagonal", system.diagonal())):
        z, found[name] = conjugate_gradients(lambda z: system @ z, right, None, diagonal, 1e-9, N)
        torch.testing.assert_close(float((right - system @ z).norm() / right.norm()), found[name], rtol=1e-3, atol=1e-9)
    assert found["diagonal"] < 1e-3 * found["plain"]


def test_nothing_moves_where_the_start_is_the_solution_or_no_iteration_is_allowed(system):
    system, start = system[0], torch.randn(N, dtype=torch.float64)
    z, residual = conjugate_gradients(lambda z: system @ z, system @ start, start)
    assert residual == 0
    assert z.equal(start)
    z, residual = conjugate_gradients(lambda z: system @ z, system @ start, max_iterations=0)
    assert residual == 1
    assert not z.any()


def test_nothing_is_solved_by_nothing_in_single_precision_too():
    z, residual = conjugate_gradients(lambda z: 2 * z, torch.zeros(2, N))
    assert residual == 0
    assert not z.any()


def test_nan_ends_the_iterations_at_once(system):
    products, right = [], torch.full((N,), torch.nan, dtype=torch.float64)
    _, residual = conjugate_gradients(lambda z: products.append(z) or system[0] @ z, right)
    assert residual != residual
    assert not products


def test_norm_size_and_looks_decide_when_it_ends(system):
    """In units of `size`, by a norm that is asked for every few iterations only."""
    system, right, asked = system[0], torch.randn(N, dtype=torch.float64), []

    def norm(residual):
        asked.append(residual)
        return residual.abs().amax(-1)

    size = scalar(50.0)
    diagonal = system.diagonal()
    z, worst = conjugate_gradients(lambda z: system @ z, right, None, diagonal, 1e-9, norm=norm, size=size, every=7)
    assert len(asked) > 1
    torch.testing.assert_close(asked[0], right)
    assert worst == pytest.approx(float(asked[-1].abs().max()) / 50)
    assert worst <= 1e-9 < float(asked[-2].abs().max()) / 50
    torch.testing.assert_close(system @ z, right, rtol=0, atol=1e-7)


def test_halving_gives_up_where_the_residual_stands_still(system):
    """Without a preconditioner this system takes far more iterations than it gets."""
    system, right = system[0], torch.randn(N, dtype=torch.float64)
    products = []

    def product(z):
        products.append(z)
        return system @ z

    _, left = conjugate_gradients(product, right, None, None, 1e-12, 1000, every=3, halving=True)
    assert left > 1e-12
    assert len(products) < 20


def test_a_tolerance_on_the_energy_bounds_the_energy_that_is_missing(system):
    """The estimate after 8 more iterations is from below, but no worse than by a factor here."""
    system, right = system[0], torch.randn(2, N, dtype=torch.float64)
    solution = torch.linalg.solve(system, right.mT).mT
    diagonal, products = system.diagonal(), []

    def product(z):
        products.append(z)
        return z @ system

    found = {}
    for tolerance in (1e-2, 1e-6):
        products.clear()
        z, left = conjugate_gradients(product, right, None, diagonal, tolerance, energy=True)
        error = z - solution
        missing = ((error @ system) * error).sum(-1) / ((solution @ system) * solution).sum(-1)
        assert left <= tolerance
        assert missing.max() < left
        found[tolerance] = len(products)
    assert 8 <= found[1e-2] < found[1e-6] < N
