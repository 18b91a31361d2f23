"""Settings that several methods are put into alike."""

import pyro
import pyro.distributions as dist
import torch
from oracles.dense import dense_precision
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.optim import Adam

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Poisson


def losses_inside_a_larger_program(gp, y, covariate, steps, batch_size):
    """Train a method without likelihood as the prior of f in a program with a slope and a likelihood.

    The program has one parameter in Pyro's store, ``loc``.
    """
    one, n = torch.ones((), dtype=y.dtype), len(y)

    def model(idx):
        slope = pyro.sample("slope", dist.Normal(0 * one, 1.0))
        f = gp.model(idx)
        with pyro.plate("observations", n, subsample=idx):
            pyro.sample("y", dist.StudentT(4.0, f + slope * covariate[idx], 0.2), obs=y[idx])

    def guide(idx):
        pyro.sample("slope", dist.Normal(pyro.param("loc", 0 * one), 0.1))
        gp.guide(idx)

    svi = SVI(model, guide, Adam({"lr": 0.05}), TraceMeanField_ELBO())
    return torch.tensor([svi.step(torch.randperm(n)[:batch_size]) for _ in range(steps)])


def conjugate_posterior(k, graph, y, noise_var):
    """Mean and covariance of f given y = f + noise under a nearest-neighbor prior."""
    precision = dense_precision(k, graph) + torch.eye(len(y), dtype=torch.float64) / noise_var
    cov = torch.cholesky_inverse(torch.linalg.cholesky(precision))
    return cov @ y / noise_var, cov


def regression(graph, y, noise_scale):
    """A program: f from an NNGP, y = f + noise."""
    f = pyro.sample("f", NNGP(Matern32(2, lengthscale=torch.tensor(0.5)), graph))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(f, noise_scale), obs=y)


def surface(likelihood, n=300):
    """Noisy values, or counts with Poisson, on a smooth surface over the unit square, and nine new places."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    f = torch.sin(6 * x[:, 0]) * torch.cos(5 * x[:, 1])
    y = f + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    y = torch.poisson((f + 1).exp(), generator=generator) if likelihood is Poisson else y
    return x, y, torch.rand(9, 2, generator=generator, dtype=torch.float64)
