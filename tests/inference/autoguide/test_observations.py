"""Observed sites as functions of their parameters, beside closed forms."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from oracles.observed_sites import F, Y, observed
from pyro import poutine

from pyro_nngp.inference.autoguide.observations import observed_sites


def test_masks_and_scales_weigh_the_density():
    mask = torch.tensor([True, False, True])

    def program(leaf):
        with poutine.scale(scale=2.0), poutine.mask(mask=mask):
            pyro.sample("y", dist.Poisson(leaf.exp()), obs=torch.tensor([0.0, torch.nan, 4.0]))

    leaf = F.clone().requires_grad_()
    with pyro.validation_enabled(False):
        (site,) = observed_sites(poutine.trace(program).get_trace(leaf), [leaf], None)
        want = torch.where(mask, 2 * dist.Poisson(F.exp()).log_prob(Y), 0.0)
        torch.testing.assert_close(site.log_prob(site.phi.detach()), want)


def test_independent_dimensions_are_single_observations():
    (site,) = observed(lambda f: dist.Poisson(f.exp()).mask(torch.tensor([True, True, False])).to_event(1))
    assert site.phi.shape == (3, 1)
    assert site.log_prob(site.phi.detach())[2] == 0


def test_a_scale_of_rows_weighs_each_entry_of_a_row():
    scale, y = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([[0.0, 2.0], [1.0, 4.0]])

    def program(leaf):
        with poutine.scale(scale=scale):
            pyro.sample("y", dist.Poisson(leaf.exp()).to_event(1), obs=y)

    leaf = torch.tensor([[0.1, 0.5], [-0.3, 1.2]], dtype=torch.float64).requires_grad_()
    (site,) = observed_sites(poutine.trace(program).get_trace(leaf), [leaf], None)
    want = (scale[:, None] * dist.Poisson(leaf.detach().exp()).log_prob(y)).flatten()
    torch.testing.assert_close(site.log_prob(site.phi.detach()), want)


def test_errors():
    with pytest.raises(ValueError, match=r"expected the program to have an observed site that depends on its NNGP"):
        observed(lambda f: dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0))
