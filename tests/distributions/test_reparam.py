"""Whitened sites have the posterior and the density of the sites themselves."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar, uniform
from oracles.problems import conjugate_posterior, regression
from pyro.infer import MCMC, NUTS

from pyro_nngp.distributions import NNGP, NNGPReparam
from pyro_nngp.kernels import Matern32
from pyro_nngp.neighbors.graph import NeighborGraph

F64 = torch.float64


N = 40


@pytest.mark.slow
def test_nuts_with_whitening_recovers_the_exact_posterior():
    graph = NeighborGraph(uniform(100), 99)
    k = Matern32(2, lengthscale=torch.tensor(0.5)).double().requires_grad_(False)
    prior = NNGP(k, graph)  # built once: its hyperparameters are fixed, so its conditionals are too
    y = prior.sample() + 0.3 * torch.randn(100, dtype=F64)

    def conjugate():
        f = pyro.sample("f", prior)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    model = pyro.poutine.reparam(conjugate, config={"f": NNGPReparam()})
    mcmc = MCMC(NUTS(model), num_samples=600, warmup_steps=300, disable_progbar=True)
    mcmc.run()
    draws = prior.color(mcmc.get_samples()["f_white"])
    mean, cov = conjugate_posterior(k, graph, y, 0.09)
    ess = pyro.ops.stats.effective_sample_size(draws[None], chain_dim=0, sample_dim=1).clamp(max=600)
    assert ((draws.mean(0) - mean).abs() < 6 * (cov.diagonal() / ess).sqrt()).all()
    assert ((draws.var(0) / cov.diagonal()).log().abs() < 6 * (2 / ess).sqrt()).all()


def test_whitening_keeps_the_density():
    graph, y = NeighborGraph(uniform(N), 6), torch.randn(N, dtype=F64)
    model = pyro.poutine.reparam(regression, config={"f": NNGPReparam()})
    white = torch.randn(N, dtype=F64)
    conditioned = pyro.condition(model, data={"f_white": white})
    trace = pyro.poutine.trace(conditioned).get_trace(graph, y, scalar(0.5))
    prior = NNGP(Matern32(2, lengthscale=torch.tensor(0.5)), graph)
    f = prior.color(white)
    _, var = prior.conditionals
    torch.testing.assert_close(trace.nodes["f"]["value"], f)
    torch.testing.assert_close(prior.whiten(f), white)
    torch.testing.assert_close(prior.log_prob(f), trace.nodes["f_white"]["fn"].log_prob(white) - 0.5 * var.log().sum())


def test_whitening_rejects_other_sites():
    graph, y = NeighborGraph(uniform(N), 6), torch.randn(N, dtype=F64)
    with pytest.raises(TypeError, match=r"site 'y' to be an NNGP over all points"):
        pyro.poutine.reparam(regression, config={"y": NNGPReparam()})(graph, y, scalar(0.5))
    with pytest.raises(ValueError, match=r"site 'f' to be latent"):
        pyro.poutine.reparam(pyro.condition(regression, {"f": y}), config={"f": NNGPReparam()})(graph, y, scalar(0.5))
