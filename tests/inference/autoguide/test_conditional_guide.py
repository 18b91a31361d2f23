"""Expansions of programs that are linear in their processes, and of one that is not."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_nngp import NNGP, NeighborGraph
from pyro_nngp.inference.autoguide.conditional_guide import ConditionalGuide
from pyro_nngp.inference.autoguide.linearized_program import LinearizedProgram
from pyro_nngp.kernels import Matern32

N = 12
NUMBER = {"dtype": torch.float64}
X = torch.linspace(0, 1, N, **NUMBER)[:, None]
Y = torch.sin(6 * X[:, 0])


def program(curvature=0.0):
    """Gaussian data of f + curvature f^2."""
    kernel = Matern32(1, variance=torch.tensor(1.0, **NUMBER), lengthscale=torch.tensor(0.3, **NUMBER))
    f = pyro.sample("f", NNGP(kernel, NeighborGraph(X, N - 1)))
    with pyro.plate("points", N):
        pyro.sample("y", dist.Normal(f + curvature * f.square(), 0.3), obs=Y)


def guide_of(*args):
    sites = dict(poutine.trace(program).get_trace(*args).iter_stochastic_nodes())
    return ConditionalGuide.of(LinearizedProgram(program, args, {}, False), sites, ["f"], {})


@pytest.mark.parametrize("curvature", [0.0, 0.1])
def test_the_best_expansion_is_one_at_the_posterior_itself(curvature):
    guide, start = guide_of(curvature)
    assert guide.is_linear == (curvature == 0)
    q, best = guide.best({}, start)
    (marginals,), f = q.marginals(), q.by_name(q.mean)["f"]
    torch.testing.assert_close(marginals.mean, best.marginals[0].mean, rtol=0, atol=0.05)
    torch.testing.assert_close(q.phi(q.mean)[0][:, 0], f + curvature * f.square(), rtol=0, atol=0.05)
    if curvature:
        torch.testing.assert_close(best.center["f"], f, rtol=0, atol=0.1)
    else:
        assert best.center is start.center


def test_an_expansion_follows_a_posterior_by_a_tenth():
    guide, start = guide_of(0.1)
    q = guide.posterior({}, *start)
    followed = guide.followed(start, q)
    (goal,) = q.marginals()
    torch.testing.assert_close(followed.center["f"], 0.1 * q.by_name(q.mean)["f"])
    torch.testing.assert_close(followed.marginals[0].mean, torch.lerp(start.marginals[0].mean, goal.mean, 0.1))


def test_draws_of_gaussian_data_have_equal_weights_and_the_values_of_their_leaves():
    guide, start = guide_of(0.0)
    q, _ = guide.best({}, start)
    draws = q.draw(5)
    torch.testing.assert_close(guide.weighted(q, {}, draws).log_weights, torch.zeros(5, **NUMBER), rtol=0, atol=1e-8)
    torch.testing.assert_close(guide.site_values(q, {}, q.by_name(draws[0]))["f"], draws[0])
