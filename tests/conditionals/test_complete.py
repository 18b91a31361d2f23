"""Conditionals given all other points from one factor, beside those from a factor for each target."""

import pytest
import torch
from builders import F64, matern, normal, uniform

from pyro_nngp.conditionals import graph_conditional, nn_conditional
from pyro_nngp.kernels import RBF, Matern, Matern12
from pyro_nngp.neighbors import NeighborGraph

N = 12
KERNELS = {
    "Matern52": matern,
    "learned smoothness": lambda: Matern(2, 1.3, 0.4, smoothness=1.2).double(),
    "sum": lambda: (RBF(2, lengthscale=0.1) + Matern12(2)).double(),
}


def tables():
    """Targets and neighbors: each point given the earlier ones, some given all others, new ones given all."""
    x = uniform(N)
    others = torch.stack([torch.cat([torch.arange(i), torch.arange(i + 1, N)]) for i in (7, 0, 3)])
    return {
        "earlier": (x, x, NeighborGraph(x, N - 1).neighbors.long()),
        "others": (x[[7, 0, 3]], x, others.flip(-1)),
        "new": (uniform(4, seed=1), x, torch.stack([torch.randperm(N) for _ in range(4)])),
    }


def one_by_one(kernel, x, points, near, noise=None):
    given = None if noise is None else noise[near.clamp(min=0)]
    return nn_conditional(kernel, x, points[near.clamp(min=0)], near >= 0, given)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("table", ["earlier", "others", "new"])
def test_weights_variances_and_gradients_are_those_of_one_target_at_a_time(table, kernel, noisy):
    x, points, near = tables()[table]
    found = []
    for conditional in (graph_conditional, one_by_one):
        cov, noise = KERNELS[kernel](), (0.1 + uniform(N, 1, seed=2)[:, 0]).requires_grad_() if noisy else None
        w, var = conditional(cov, x, points, near, noise)
        (w.mul(torch.arange(w.numel()).view_as(w).cos()).sum() + var.log().sum()).backward()
        grads = [parameter.grad for parameter in cov.parameters()] + ([noise.grad] if noisy else [])
        found.append([w, var, *grads])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)


def test_sets_of_hyperparameters_and_mapped_ones_have_sets_of_weights():
    x, points, near = tables()["earlier"]
    scales, noise = torch.tensor([[0.2, 0.4], [0.5, 0.1]], dtype=F64), 0.1 + uniform(2, N)
    kernels = [Matern12(2, torch.tensor(1.3, dtype=F64), scale) for scale in scales]
    each = [one_by_one(kernel, x, points, near, own) for kernel, own in zip(kernels, noise, strict=True)]
    variances = torch.full((2,), 1.3, dtype=F64, requires_grad=True)
    together = graph_conditional(Matern12(2, variances, scales.clone().requires_grad_()), x, points, near, noise)
    mapped = torch.vmap(lambda own: graph_conditional(kernels[0], x, points, near, own))(noise)
    for i in range(2):
        torch.testing.assert_close(torch.stack([one[i] for one in each]), together[i], rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(each[0][i], mapped[i][0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("wrong", ["later", "twice", "elsewhere"])
def test_tables_that_leave_something_out_are_solved_as_usual(wrong):
    x, points, near = tables()["earlier"]
    place = (near >= 0).sum(-1)
    if wrong == "later":
        near[place == 3, 0] = int((place == 8).nonzero())
    elif wrong == "twice":
        near[place == 3, 0] = near[place == 3, 1]
        near[place == 3, 0] = int((place == 2).nonzero())
    else:
        x = x + 0.01
    noise = 0.1 + uniform(N, 1)[:, 0]
    for ours, theirs in zip(
        graph_conditional(matern(), x, points, near, noise), one_by_one(matern(), x, points, near, noise), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@torch.no_grad()
def test_variances_stay_above_the_nugget_under_much_noise_and_at_copies():
    x = uniform(N).float()
    x[1] = x[0]
    near = NeighborGraph(x, N - 1).neighbors.long()
    w, var = graph_conditional(matern(dtype=torch.float32), x, x, near, torch.full((N,), 1e9))
    assert w.dtype == var.dtype == torch.float32
    torch.testing.assert_close(var, torch.full_like(var, 1.3), rtol=1e-4, atol=0.0)
    _, var = graph_conditional(matern(dtype=torch.float32), x, x, near)
    assert (var >= 0.99e-6 * 1.3).all()
    assert float(var.min()) < 3e-6


def test_the_product_of_conditionals_is_the_density_of_the_dense_process():
    x, y, noise = uniform(N), normal(N), 0.1 + uniform(N, 1)[:, 0]
    near, cov = NeighborGraph(x, N - 1).neighbors.long(), matern()
    w, var = graph_conditional(cov, x, x, near, noise)
    loc = (w * y[near.clamp(min=0)]).sum(-1)
    dense = cov(x, x) + torch.diag(noise + 1e-6 * 1.3)
    exact = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=F64), dense).log_prob(y)
    ours = torch.distributions.Normal(loc, (var + noise).sqrt()).log_prob(y).sum()
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)
