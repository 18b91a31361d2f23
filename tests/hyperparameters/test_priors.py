"""The guide of hyperparameters with priors, and their values in posterior draws."""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample

from pyro_nngp.hyperparameters.priors import HyperparameterGuide, count_draws, count_draws_of
from pyro_nngp.hyperparameters.values import draw_values
from pyro_nngp.kernels import Matern32

F64 = torch.float64
PRIOR = dist.LogNormal(torch.tensor([-1.0, 2.0], dtype=F64), 0.5).to_event(1)


def owned():
    """A module that owns a kernel with a prior, and its guide."""
    owner = PyroModule()
    owner.kernel = Matern32(2).double()
    owner.kernel.lengthscale = PyroSample(PRIOR)
    owner.guide = HyperparameterGuide(owner, init_scale=0.2)
    return owner


def test_guides_start_near_the_median_of_the_prior_and_have_the_stated_quantiles():
    owner = owned()
    k, guide = owner.kernel, owner.guide
    ((module, attribute), middle), *rest = guide.quantiles(0.5).items()
    assert (module, attribute, rest) == (k, "lengthscale", [])
    torch.testing.assert_close(middle.log(), PRIOR.base_dist.loc, rtol=0, atol=6 * 0.5 * math.sqrt(math.pi / 2 / 99))
    upper = guide.quantiles(0.975)[k, "lengthscale"]
    torch.testing.assert_close((upper / middle).log(), torch.full((2,), 0.2 * 1.959964, dtype=F64), rtol=1e-6, atol=0)
    torch.testing.assert_close(guide.medians()[k, "lengthscale"].detach(), middle)


def test_the_guides_density_is_that_of_a_normal_in_unconstrained_space():
    guide = owned().guide
    (site,) = [s for s in poutine.trace(guide.sample).get_trace().nodes.values() if s["type"] == "sample"]
    assert site["name"] == "kernel.lengthscale"
    value = site["value"].detach()
    want = dist.LogNormal(guide.loc_0.detach(), 0.2).log_prob(value).sum()
    torch.testing.assert_close(site["fn"].log_prob(site["value"]).detach(), want)


def test_another_guide_is_taken_over_only_if_it_has_the_same_sites():
    one, other = owned().guide, owned().guide
    with torch.no_grad():
        other.loc_0.add_(1.0)
    one.take(other)
    assert torch.equal(one.loc_0, other.loc_0)
    plain = HyperparameterGuide(Matern32(2))
    plain.take(other)
    one.take(plain)
    assert torch.equal(one.loc_0, other.loc_0)
    assert not plain.has_sites


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([1], TypeError, "to be a dictionary of draws by site, got list"),
        ({"a": 1.0}, TypeError, r"samples\['a'\] to be a tensor of draws, got 1.0"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, ValueError, r"the same number >= 1 of draws .* got \[2, 3\]"),
        ({"a": torch.ones(0)}, ValueError, r"got \[0\]"),
    ],
)
def test_other_things_than_draws_are_refused(samples, error, message):
    with pytest.raises(error, match=message):
        count_draws("here", samples)


@pytest.mark.parametrize("chains", [1, 3])
def test_draws_by_chain_are_refused(chains):
    samples = {"kernel.lengthscale": torch.ones(chains, 4, 2), "z": torch.ones(chains, 4)}
    message = rf"before \(2,\), got shape \({chains}, 4, 2\)\. Call mcmc.get_samples\(\) without group_by_chain"
    with pytest.raises(ValueError, match=message):
        count_draws_of("here", owned(), samples)


def test_a_missing_site_is_named():
    with pytest.raises(ValueError, match=r"to hold the site 'kernel.lengthscale', got \['other'\]"):
        draw_values("here", owned(), {"other": torch.ones(2)})
