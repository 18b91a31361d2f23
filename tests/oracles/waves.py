"""Encoders in tests, and a method's loss and factor of q(u)."""

import torch
from oracles.dense import dense_cholesky

from pyro_nngp.inference import IntegratedELBO
from pyro_nngp.variational.encoders import ConditionalEncoder, GraphConvolutionEncoder, SiteEncoder

N = 48  # rows of builders.waves

ENCODERS = [
    GraphConvolutionEncoder,
    lambda: SiteEncoder(2, num_context=6),
    lambda: ConditionalEncoder(num_context=6),
]


def shaken(encoder, amount=0.3):
    """The encoder with every parameter moved, so that no output is zero or constant by its start."""
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(amount * torch.randn_like(parameter))
    return encoder


def loss(gp, *args, elbo=None):
    return (IntegratedELBO() if elbo is None else elbo).loss(gp.model, gp.guide, *args)


def factor(gp):
    """R of q(u), as a matrix."""
    return dense_cholesky(gp.q.at_rows(gp.posterior(gp.bound()))).detach()
