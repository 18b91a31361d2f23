"""Detections among visits: the mixture over the state of a site, its limits, and where the detection starts."""

import pyro.distributions as dist
import pytest
import torch
from builders import F64, data

from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Occupancy
from pyro_nngp.models import VNNGP

X, _ = data()
VISITS = torch.tensor([1.0, 3.0, 6.0], dtype=F64)


def test_the_state_of_a_site_is_summed_out():
    f, y, p = torch.tensor([-1.0, 0.3, 2.0], dtype=F64), torch.tensor([0.0, 1.0, 0.0], dtype=F64), 0.3
    likelihood = Occupancy(detection=p).bind().for_rows(trials=VISITS)
    detected = dist.Binomial(VISITS, probs=torch.tensor(p, dtype=F64)).log_prob(y).exp()
    want = f.sigmoid() * detected + (1 - f.sigmoid()) * (y == 0)
    torch.testing.assert_close(likelihood(f).log_prob(y).exp(), want, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(likelihood(f).mean, VISITS * p * f.sigmoid(), rtol=1e-6, atol=0)


def test_with_sure_detection_it_is_a_label():
    f, y = torch.tensor([-1.0, 0.3], dtype=F64), torch.tensor([0.0, 4.0], dtype=F64)
    found = Occupancy(4, 1 - 1e-6)(f).log_prob(y)
    torch.testing.assert_close(found, Bernoulli()(f).log_prob(y / 4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("p", [0.1, 0.4, 0.9])
def test_detection_starts_at_its_estimate_from_sites_with_any(p):
    torch.manual_seed(0)
    y = dist.Binomial(4, torch.tensor(p, dtype=F64)).sample((20_000,)) * torch.bernoulli(torch.full((20_000,), 0.6))
    assert Occupancy(4).start("detection", y, y[:, None]).item() == pytest.approx(p, abs=0.02)
    assert Occupancy(4).start("detection", 0 * y, y[:, None]) is None


def test_visits_of_each_site_equal_visits_of_all():
    y = torch.arange(len(X), dtype=F64) % 4
    settings = {"num_neighbors": 8, "mean": lambda x: torch.zeros_like(x[:, 0])}
    each = VNNGP(X, y, Matern32(2, 1.3, 0.4), Occupancy(detection=0.4), trials=torch.full_like(y, 3), **settings)
    same = VNNGP(X, y, Matern32(2, 1.3, 0.4), Occupancy(3, 0.4), **settings)
    for gp in (each, same):
        gp.solve()
    torch.testing.assert_close(each(X[:5]), same(X[:5]))
    assert each.predict(X[:5], trials=torch.full((5,), 9)).sample().max() <= 9


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"Occupancy: expected total_count >= 2, got 1. One visit does not tell"):
        Occupancy(1)
    with pytest.raises(ValueError, match=r"Occupancy: expected detection .* got 1.2"):
        Occupancy(3, 1.2)
    with pytest.raises(ValueError, match=r"Pass trials=n, or Occupancy\(n\) for one number of all rows"):
        VNNGP(X, torch.zeros(len(X), dtype=F64), Matern32(2), Occupancy(), num_neighbors=8)
    with pytest.raises(ValueError, match=r"Pass the number of visits with a detection"):
        VNNGP(X, torch.full((len(X),), 4.0, dtype=F64), Matern32(2), Occupancy(3), num_neighbors=8)


def test_pseudo_observations_are_a_step_of_fisher_scoring_from_zero():
    y = torch.tensor([0.0, 1.0, 0.0], dtype=F64)
    likelihood = Occupancy(detection=0.3).bind().for_rows(trials=VISITS)
    f = torch.zeros(3, dtype=F64, requires_grad=True)
    slope = torch.autograd.grad(likelihood(f).log_prob(y).sum(), f)[0]
    at = likelihood(f)
    every = torch.arange(7, dtype=F64)[:, None]
    inside = every <= VISITS
    each = at.log_prob(torch.where(inside, every, 0.0))
    slopes = torch.stack([torch.autograd.grad(row.sum(), f, retain_graph=True)[0] for row in each])
    information = (each.exp() * slopes.square() * inside).sum(0).detach()
    found = likelihood.observations(y)
    torch.testing.assert_close(found.noise, 1 / information)
    torch.testing.assert_close(found.obs, slope / information)
