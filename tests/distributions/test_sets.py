"""Distributions side by side, against each of them alone."""

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_nngp.distributions.sets import Sets


def normals(*shape):
    size = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(0)
    loc, scale = torch.randn(size, 3, generator=generator), 0.5 + torch.rand(size, 3, generator=generator)
    together = dist.Normal(loc.reshape(*shape, 3), scale.reshape(*shape, 3)).to_event(1)
    return together, Sets([dist.Normal(*pair).to_event(1) for pair in zip(loc, scale, strict=True)], shape)


def test_densities_moments_and_draws_are_those_of_a_batch():
    together, sets = normals(2, 3)
    for value in (torch.randn(3), torch.randn(2, 1, 3), torch.randn(5, 2, 3, 3)):
        torch.testing.assert_close(sets.log_prob(value), together.log_prob(value))
    torch.testing.assert_close(sets.mean, together.mean)
    torch.testing.assert_close(sets.variance, together.variance)
    assert sets.has_rsample
    assert sets.support.check(sets.sample()).all()
    draws = sets.rsample((40_000,))
    assert draws.shape == (40_000, 2, 3, 3)
    error = (draws.mean(0) - together.mean) / together.variance.sqrt() * 200
    assert error.abs().max() < 6
    assert sets.sample().shape == (2, 3, 3)


def test_a_wider_batch_repeats_the_parts_and_draws_each_anew():
    together, sets = normals(2, 1)
    wide = sets.expand((4, 2, 3))
    value = torch.randn(4, 2, 3, 3)
    torch.testing.assert_close(wide.log_prob(value), together.expand((4, 2, 3)).log_prob(value))
    assert len(wide.sample().flatten(0, 2).unique(dim=0)) == 24


def test_divergences_are_those_of_the_parts():
    (q, q_sets), (p, p_sets) = normals(2, 1), normals(3)
    torch.testing.assert_close(kl_divergence(q_sets, p_sets), kl_divergence(q.expand((2, 3)), p.expand((2, 3))))
    one = p_sets.parts[0]
    torch.testing.assert_close(kl_divergence(q_sets, one), kl_divergence(q, one.expand((2, 1))))
    with pytest.raises(NotImplementedError, match="no divergence of Sets from a Independent with batch dimensions"):
        kl_divergence(q_sets, p)


def test_parts_that_do_not_fit_are_refused():
    one = dist.Normal(torch.zeros(3), 1.0)
    with pytest.raises(ValueError, match=r"Sets: expected parts 2 distributions of one event shape.*Give one for each"):
        Sets([one.to_event(1)] * 3, (2,))
    with pytest.raises(ValueError, match="without batch dimensions"):
        Sets([one, one], (2,))
