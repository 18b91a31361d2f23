"""Whitened sites, and the parts of full-scale ones, have the posterior and the density of the sites themselves."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar, uniform
from oracles.problems import conjugate_posterior, regression
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide.initialization import InitMessenger, init_to_sample, init_to_value

from pyro_nngp.distributions import NNGP, FullScaleNNGP, FullScaleReparam, NNGPReparam
from pyro_nngp.inference import AutoNNGP
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


def full_scale(y, noise=0.3, of_prior=0.0):
    """A full-scale prior, and a program with it, of which the site is split."""
    graph, kernel = NeighborGraph(uniform(N), 5), Matern32(2, variance=0.8, lengthscale=0.4).double()
    prior = FullScaleNNGP(kernel, graph, uniform(7, seed=3), of_prior)

    def model():
        level = pyro.sample("level", dist.Normal(scalar(0.0), 1.0))
        f = pyro.sample("f", prior)
        with pyro.plate("points", N):
            pyro.sample("y", dist.Normal(level + f, noise), obs=y)

    return prior, pyro.poutine.reparam(model, config={"f": FullScaleReparam()})


def test_the_parts_of_a_full_scale_prior():
    prior, model = full_scale(torch.zeros(N, dtype=F64))
    nodes = pyro.poutine.trace(model).get_trace().nodes
    low, residual = nodes["f_low"], nodes["f_residual"]
    torch.testing.assert_close(nodes["f"]["value"], low["value"] @ prior.features.mT + residual["value"])
    torch.testing.assert_close(residual["fn"].conditionals, (prior.residual.w, prior.residual.var))
    normal = dist.Normal(scalar(0.0), 1.0).log_prob(low["value"])
    torch.testing.assert_close(low["fn"].log_prob(low["value"]), normal.sum())


def test_initial_values_of_a_full_scale_prior_are_those_of_its_site():
    prior, model = full_scale(torch.zeros(N, dtype=F64))
    start = prior.sample()
    at_start = InitMessenger(init_to_value(values={"f": start}, fallback=init_to_sample))(model)
    nodes = pyro.poutine.trace(at_start).get_trace().nodes
    torch.testing.assert_close(nodes["f"]["value"], start)
    parts = nodes["f_low"]["value"] @ prior.features.mT + nodes["f_residual"]["value"]
    torch.testing.assert_close(parts, start)


def test_the_residual_can_be_white():
    y = torch.sin(torch.arange(N, dtype=F64))
    prior, model = full_scale(y)
    white = pyro.poutine.reparam(model, config={"f_residual": NNGPReparam()})
    nodes = pyro.poutine.trace(white).get_trace().nodes
    found = nodes["f_low"]["value"] @ prior.features.mT + prior.residual.color(nodes["f_residual_white"]["value"])
    torch.testing.assert_close(nodes["f"]["value"], found)


def test_the_guide_of_a_full_scale_prior_has_the_exact_posterior():
    y = torch.sin(torch.arange(N, dtype=F64))
    prior, model = full_scale(y)
    guide = AutoNNGP(model)
    guide()
    q = guide.conditional_at(torch.zeros(0))
    root = torch.cat([prior.features.mT, prior.residual.color(torch.eye(N, dtype=F64))])
    cov = root.mT @ root
    total = cov + 1.0 + 0.09 * torch.eye(N, dtype=F64)
    weights = torch.linalg.solve(total, y)
    leaves = q.by_name(q.mean)
    found = leaves["f_low"] @ prior.features.mT + leaves["f_residual"]
    torch.testing.assert_close(found, cov @ weights, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(leaves["level"], weights.sum(), rtol=1e-6, atol=1e-8)
    exact = dist.MultivariateNormal(torch.zeros(N, dtype=F64), total).log_prob(y)
    assert q.log_evidence() == pytest.approx(float(exact), rel=1e-9)


def test_sites_that_have_no_such_parts():
    graph, y = NeighborGraph(uniform(N), 6), torch.randn(N, dtype=F64)
    with pytest.raises(TypeError, match="site 'f' to be a FullScaleNNGP"):
        pyro.poutine.reparam(regression, config={"f": FullScaleReparam()})(graph, y, scalar(0.5))
    with pytest.raises(ValueError, match="site 'f' of f itself, got a noise above 0"):
        full_scale(y, of_prior=0.1)[1]()
    prior, _ = full_scale(y)
    with pytest.raises(ValueError, match="site 'f' to be latent"):
        pyro.poutine.reparam(lambda: pyro.sample("f", prior, obs=y), config={"f": FullScaleReparam()})()
    with pytest.raises(ValueError, match="of a FullScaleNNGP see FullScaleReparam"):
        AutoNNGP(lambda: pyro.sample("f", prior))()
