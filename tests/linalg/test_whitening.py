"""Whitened coordinates against dense matrices."""

import pytest
import torch

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import Matern52
from pyro_nngp.linalg.whitening import Whitening
from pyro_nngp.neighbors.graph import NeighborGraph

N = 50


@pytest.fixture
def white():
    graph = NeighborGraph(torch.rand(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 6)
    prior = NNGP(Matern52(2, lengthscale=0.3).double().requires_grad_(False), graph, jitter=1e-4)
    return Whitening(*prior.conditionals, graph.neighbors, graph.levels()), prior


def test_products_are_those_of_one_matrix(white):
    white, prior = white
    root = white.color(torch.eye(N, dtype=torch.float64)).mT
    torch.testing.assert_close(root.mT, prior.color(torch.eye(N, dtype=torch.float64)))
    u = torch.randn(3, N, dtype=torch.float64)
    torch.testing.assert_close(white.color_transposed(u), u @ root)
    torch.testing.assert_close(white.color(white.whiten(u)), u)


@pytest.mark.parametrize("start", [False, True])
def test_solves_agree_with_the_dense_system(white, start):
    white, _ = white
    root = white.color(torch.eye(N, dtype=torch.float64)).mT
    precision, right = torch.rand(2, N, dtype=torch.float64) * 10, torch.randn(2, N, dtype=torch.float64)
    z = white.solve(right, precision, torch.randn(2, N, dtype=torch.float64) if start else None, tolerance=1e-12)
    for i in range(2):
        system = torch.eye(N, dtype=torch.float64) + root.mT @ (precision[i, :, None] * root)
        torch.testing.assert_close(system @ z[i], right[i])


def test_a_solve_that_does_not_arrive_says_so(white):
    right = torch.randn(N, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"stopped after 2 iterations at a relative residual of"):
        white[0].solve(right, torch.full_like(right, 1e6), max_iterations=2)
