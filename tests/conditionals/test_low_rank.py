import torch
from builders import F64, matern, normal, uniform
from oracles.dense import dense_covariance

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.conditionals.low_rank import LowRank

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
