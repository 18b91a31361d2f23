"""Observed sites of a program with one latent tensor, for the tests of what `AutoNNGP` reads from it."""

import pyro
import torch
from pyro import poutine

from pyro_nngp.inference.autoguide.observations import observed_sites

Y = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
F = torch.tensor([0.1, -0.3, 0.7], dtype=torch.float64)


def observed(make, y=Y, **settings):
    """The observed site of a program whose latent values are F."""
    leaf = F.clone().requires_grad_()

    def run(at):
        return poutine.trace(lambda: pyro.sample("y", make(at), obs=y, **settings)).get_trace()

    return observed_sites(run(leaf), [leaf], run)
