"""Noisy waves on the unit square, a kernel for them, and what tests of several methods ask of a pair on them."""

import torch
from oracles.dense import dense_cholesky

from pyro_nngp.inference import IntegratedELBO
from pyro_nngp.kernels import Matern52
from pyro_nngp.variational.encoders import ConditionalEncoder, GraphConvolutionEncoder, SiteEncoder

N = 48

ENCODERS = [
    GraphConvolutionEncoder,
    lambda: SiteEncoder(2, num_context=6),
    lambda: ConditionalEncoder(num_context=6),
]


def data(n=N, dtype=torch.float64):
    x = torch.rand(n, 2, dtype=dtype)
    return x, torch.sin(5 * x.sum(-1)) + 0.2 * torch.randn(n, dtype=dtype)


def kernel():
    return Matern52(2, variance=torch.tensor(1.3), lengthscale=torch.tensor([0.3, 0.5]))


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
    return dense_cholesky(gp.local.distribution()).detach()
