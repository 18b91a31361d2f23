"""Settings that several methods are put into alike."""

import math

import pyro
import pyro.distributions as dist
import torch
from oracles.dense import dense_precision
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.optim import Adam

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import Matern32


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


def draw(covariance, seed=0):
    """A draw of f at points with this covariance matrix."""
    noise = torch.randn(len(covariance), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    nugget = 1e-8 * torch.eye(len(covariance), dtype=torch.float64)
    return torch.linalg.cholesky(covariance.detach() + nugget) @ noise


@torch.no_grad()
def score(gp, x, y, unit=1.0):
    """R^2 and negative log predictive density of new data, in units of y."""
    predictive = gp.predict(x)
    misfit = (predictive.mean - y).square().mean() / y.var()
    return 1 - float(misfit), -float(predictive.log_prob(y).mean()) - math.log(unit)


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
