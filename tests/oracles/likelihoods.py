"""Expectations and marginals of likelihoods by sums on a fine grid."""

import math

import pyro.distributions as dist
import torch
from builders import scalar
from torch import Tensor

from pyro_nngp.likelihoods import Likelihood


def grid(loc: float, var: float, num: int = 100_001, width: float = 12.0) -> tuple[Tensor, Tensor]:
    """A fine grid of f, and the logarithms of its trapezoidal weights under N(loc, var)."""
    f = loc + math.sqrt(var) * torch.linspace(-width, width, num, dtype=torch.float64)
    return f, dist.Normal(scalar(loc), math.sqrt(var)).log_prob(f) + math.log(float(f[1] - f[0]))


def dense_expected(likelihood: Likelihood, y: float, loc: float, var: float) -> float:
    f, log_weights = grid(loc, var)
    return (log_weights.exp() * likelihood.forward(f).log_prob(scalar(y))).sum().item()


def dense_marginal(likelihood: Likelihood, y: float, loc: float, var: float, width: float = 12.0) -> float:
    f, log_weights = grid(loc, var, width=width)
    return (log_weights + likelihood.forward(f).log_prob(scalar(y))).logsumexp(0).item()
