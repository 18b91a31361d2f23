"""Distributions behind independent dimensions and masks."""

import torch
from pyro.distributions import LogNormal, Normal

from pyro_nngp._wrappers import base_distribution


def test_masks_are_taken_away_if_wanted_and_transforms_never():
    base = Normal(torch.zeros(2, 3), 1.0)
    masked = base.to_event(1).mask(torch.tensor([True, False]))
    assert base_distribution(masked.to_event(1)) is base
    assert base_distribution(masked.to_event(1), unmask=False) is masked
    assert base_distribution(base.to_event(2), unmask=False) is base
    assert isinstance(base_distribution(LogNormal(torch.zeros(3), 1.0).to_event(1)), LogNormal)
