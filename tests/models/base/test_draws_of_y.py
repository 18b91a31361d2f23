"""Draws of y have the distribution that ``predict`` gives, with the hyperparameters that were fitted."""

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Binomial, Categorical, Gaussian
from pyro_nngp.models import BSGP, LOO, VNNGP, CoregionalizedLOO, Vecchia

N, S = 30, 2000
X = torch.rand(N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.sin(5 * X[:, 0])
NEW = X[:3] + 0.01


def kernel():
    return Matern32(2, variance=1.0, lengthscale=0.5)


def noise_prior():
    return PyroSample(dist.LogNormal(torch.tensor(0.0, dtype=torch.float64), 2.0))


def agree(draws, predictive):
    """Whether marginal means and variances of draws, (S, ..), are those of a distribution of y."""
    mean, variance, count = predictive.mean.detach(), predictive.variance.detach(), len(draws)
    assert ((draws.mean(0) - mean) / (variance / count).sqrt()).abs().max() < 6
    torch.testing.assert_close(draws.var(0), variance, rtol=6 * (3 / count) ** 0.5, atol=0)


def test_noise_with_a_prior_is_that_of_its_guide_or_of_each_posterior_draw():
    gp = Vecchia(X, Y, kernel(), Gaussian(noise_prior()), num_neighbors=8)
    gp.hyper_guide.loc_0.data.fill_(-6.0)
    agree(gp.sample_y(NEW, 100, seed=0), gp.predict(NEW))  # the median of the prior is 400 times as large
    assert gp.sample(NEW, 3).shape == (3, len(NEW))
    samples = {"likelihood.variance": torch.tensor([0.01, 4.0], dtype=torch.float64)}
    draws = gp.sample_y(NEW, S, seed=1, samples=samples)
    for half, value in zip(draws.split(S // 2), samples["likelihood.variance"], strict=True):
        agree(half, gp.predict(NEW, samples={"likelihood.variance": value[None]}))
    torch.testing.assert_close(gp.sample_y(NEW, 2, seed=3), gp.sample_y(NEW, 2, seed=3), rtol=0, atol=0)


def test_classes_have_the_coupling_of_the_method():
    gp = LOO(X, torch.arange(N) % 3, kernel(), Categorical(3), num_neighbors=8, coupling="probabilities")
    gp.mean.value = torch.tensor([0.0, 0.5, -3.0])
    draws = gp.sample_y(NEW, S, seed=0)
    with torch.no_grad():
        probs = gp.predict(NEW).probs
    found = torch.stack([(draws == k).double().mean(0) for k in range(3)], -1)
    assert ((found - probs) / (probs * (1 - probs) / S).sqrt()).abs().max() < 6


def test_several_outputs_trials_and_a_method_without_guide():
    both = CoregionalizedLOO(X, torch.stack([Y, 5 - Y], 1), [kernel()], num_neighbors=5)
    draws = both.sample_y(NEW, S, seed=0)
    assert draws.shape == (S, 2, 3)
    agree(draws.mT, both.predict(NEW))
    trials = torch.tensor([1.0, 40.0, 400.0], dtype=torch.float64)
    counts = VNNGP(X, (Y > 0).double(), kernel(), Binomial(), num_neighbors=8, trials=torch.ones(N).double())
    agree(counts.sample_y(NEW, S, seed=0, trials=trials), counts.predict(NEW, trials=trials))
    labels = BSGP(X, (Y > 0).double(), kernel(), Bernoulli(), inducing=5)
    samples = {name: torch.stack([v, v + 0.3]) for name, v in latents(labels).items()}
    agree(labels.sample_y(NEW, S, seed=0, samples=samples), labels.predict(NEW, samples=samples))


def latents(gp):
    from pyro import poutine

    trace = poutine.trace(gp.model).get_trace()
    return {name: site["value"].detach() for name, site in trace.nodes.items() if name not in observed(trace)}


def observed(trace):
    return {name for name, site in trace.nodes.items() if site["type"] != "sample" or site["is_observed"]}


def test_draws_of_y_need_a_likelihood_and_points():
    with pytest.raises(ValueError, match=r"VNNGP.sample_y: expected a likelihood in the model, got None"):
        VNNGP(X, None, kernel(), num_neighbors=8).sample_y(NEW, 2)
    gp = VNNGP(X, X[:, 0], kernel(), num_neighbors=8)
    for wrong in (NEW[0], "no tensor"):
        with pytest.raises((TypeError, ValueError), match=r"VNNGP.sample_y: expected x_new"):
            gp.sample_y(wrong, 2)


def test_draws_by_draw_need_points():
    gp = Vecchia(X, X[:, 0], kernel(), Gaussian(0.1), num_neighbors=8)
    for wrong in (NEW[0], "no tensor"):
        with pytest.raises((TypeError, ValueError), match=r"Vecchia.predictions_by_draw: expected x_new"):
            gp.predictions_by_draw(wrong)
