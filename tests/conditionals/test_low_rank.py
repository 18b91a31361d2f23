import pytest
import torch
from builders import F64, matern, normal, uniform
from oracles.dense import dense_covariance

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.conditionals import low_rank as low_rank_part
from pyro_nngp.conditionals.low_rank import LowRank
from pyro_nngp.kernels import RBF, Matern, Matern32

N, M = 12, 4
NEAR = torch.tensor([[0, 3, -1], [5, -1, -1], [-1, -1, -1], [1, 2, 7]])


def low_rank(loc=None):
    return LowRank(matern(), uniform(M), 1e-6, loc)


def test_conditionals_are_those_of_the_dense_residual_with_the_nugget_of_the_process():
    part, x, new, noise = low_rank(), uniform(N), uniform(4), torch.rand(N, dtype=F64)
    w, var = graph_conditional(part.residual, part.inputs(new), part.inputs(x), NEAR, noise, 1e-6)
    every = torch.cat([x, new])
    cross = matern()(every, part.inducing)
    cov = dense_covariance(matern(), every) - cross @ torch.linalg.solve(
        dense_covariance(matern(), part.inducing), cross.mT
    )
    for i, row in enumerate(NEAR):
        near = row[row >= 0]
        weights = torch.linalg.solve(cov[near][:, near] + torch.diag(noise[near]), cov[near, N + i])
        torch.testing.assert_close(w[i, : len(near)], weights, rtol=0, atol=1e-8)
        want = cov[N + i, N + i] - weights @ cov[near, N + i]
        torch.testing.assert_close(var[i], want, rtol=0, atol=1e-8)
    assert not w[NEAR < 0].any()


def test_the_mean_is_that_of_the_features():
    part, x = low_rank(normal(M)), uniform(5)
    torch.testing.assert_close(part.mean(x), part.features(x) @ part.loc)
    assert not low_rank().mean(x).any()


def test_batches_of_points_have_their_features_as_further_columns():
    part, x = low_rank(), normal(2, 3, 2)
    inputs = part.inputs(x)
    assert inputs.shape == (2, 3, 2 + M)
    torch.testing.assert_close(part.features_of(inputs)[1], part.features(x[1]))


def product(dim, variance, lengthscale):
    return Matern32(dim, variance, lengthscale) * RBF(1, active_dims=[0]).double()


@pytest.mark.parametrize(("kind", "size"), [(RBF, 1), (Matern32, 2**28), (Matern, 2**28), (product, 2**28)])
def test_compiled_code_gives_the_values_and_gradients_of_general_code(kind, size, monkeypatch):
    monkeypatch.setattr(low_rank_part, "GRAM_BYTES", size)
    settings = {"smoothness": torch.tensor(1.2, dtype=F64)} if kind is Matern else {}
    kernel = kind(2, torch.tensor(1.3, dtype=F64), torch.tensor([0.3, 0.5], dtype=F64), **settings)
    x, points, z, noise = uniform(4), uniform(N), uniform(M), torch.rand(N, dtype=F64)
    leaves = [part.requires_grad_() for part in (x, points, z, noise)] + list(kernel.parameters())
    seeds = normal(4, 3), normal(4)
    found = []
    for native in "01":
        monkeypatch.setenv("PYRO_NNGP_NATIVE", native)
        part = LowRank(kernel, z, 1e-6)
        w, var = graph_conditional(part.residual, part.inputs(x), part.inputs(points), NEAR, noise, 1e-6)
        gradients = torch.autograd.grad((w * seeds[0]).sum() + (var * seeds[1]).sum(), leaves)
        found.append((w, var, gradients))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


def test_coinciding_neighbors_without_noise_get_a_nugget_as_in_general_code(monkeypatch):
    points = uniform(N)
    points[3] = points[0]
    part, x, found = low_rank(), uniform(4), []
    for native in "01":
        monkeypatch.setenv("PYRO_NNGP_NATIVE", native)
        with pytest.warns(UserWarning, match="took an extra nugget"):
            found.append(graph_conditional(part.residual, part.inputs(x), part.inputs(points), NEAR, jitter=0.0))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
