"""Gaussian observations of f: levels by hand."""

import torch
from builders import tensor

from pyro_nngp.likelihoods.observations import PseudoObservations


def test_the_level_is_the_median_or_the_mean_by_precision():
    obs, noise = tensor(1.0, 2.0, 9.0), tensor(1.0, 0.5, 2.0)
    assert PseudoObservations.of(obs).level == 2.0
    torch.testing.assert_close(PseudoObservations.of(obs, noise).level, tensor((1 + 4 + 4.5) / 3.5)[0])


def test_an_offset_moves_observations_and_levels():
    obs, noise = torch.randn(2, 5, dtype=torch.float64), torch.rand(2, 5, dtype=torch.float64)
    for seen in (PseudoObservations.of(obs), PseudoObservations.of(obs, noise)):
        moved = seen.without(torch.full_like(obs, 3.0))
        torch.testing.assert_close(moved.level, seen.level - 3)
        torch.testing.assert_close(moved.obs, obs - 3)
        assert moved.noise is seen.noise
