"""The evidence of labels along the ridge of variance and lengthscale: dense, and as VNNGP approximates it.

Usage: python benchmarks/accuracy/site_evidence.py [--points 1000] [--variances 10 30 100 300 1000] [--neighbors 20]

Some rows of banana, Matern-3/2 with lengthscales 1.9 (variance / 118)^(1/3), mean zero, logit link, hyperparameters
fixed. "dense": Laplace's evidence, and the variational evidence of a normal distribution with a full covariance matrix,
by Newton and natural-gradient steps on N x N matrices. "latent values": the bound of VNNGP with the evidence of its
sites under the nearest-neighbor prior; "observations": with Vecchia's approximation of the pseudo-observations. NLL of
the rows that were held out. The data come from the folder that PYRO_NNGP_DATA names.
"""

import argparse
import math

import numpy as np
import torch
from rows import commit  # beside this file
from torch import Tensor

from pyro_nngp.data import datasets
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import IntegratedELBO
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli
from pyro_nngp.models import VNNGP
from pyro_nngp.variational.latent_evidence import latent_log_evidence

_NODES, _STEPS, _LENGTH = 40, 60, 0.8


def split(points, seed=0):
    data = datasets.load("banana", torch.float64)
    order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(seed))
    rows, rest = order[:points], order[-1000:]
    y = data.y.flatten().double()
    return data.x[rows, :2], y[rows], data.x[rest, :2], y[rest]


def zero(x):
    return torch.zeros(len(x), dtype=x.dtype)


def conditioned(cov: Tensor, target: Tensor, precision: Tensor):
    """Posterior means and variances given sites, log |I + K D|, and K^-1 times the means."""
    root = precision.sqrt()
    tril = torch.linalg.cholesky(torch.eye(len(cov), dtype=cov.dtype) + root[:, None] * cov * root)
    half = torch.linalg.solve_triangular(tril, root[:, None] * cov, upper=False)
    shift = precision * target
    weights = shift - root * torch.cholesky_solve((root * (cov @ shift))[:, None], tril)[:, 0]
    return cov @ weights, cov.diagonal() - half.square().sum(0), 2 * tril.diagonal().log().sum(), weights


def laplace(cov: Tensor, y: Tensor):
    """Laplace's evidence, and the sites at the mode."""
    f = torch.zeros_like(y)
    for _ in range(_STEPS):
        p = f.sigmoid()
        precision = (p * (1 - p)).clamp(min=1e-12)
        target = f + (y - p) / precision
        new, _, log_det, weights = conditioned(cov, target, precision)
        moved, f = (new - f).abs().max(), f + (new - f).clamp(-4, 4)
        if moved < 1e-6:
            break
    value = -torch.nn.functional.softplus((1 - 2 * y) * f).sum() - (weights @ f + log_det) / 2
    return value.item(), target, precision


def variational(cov: Tensor, y: Tensor, target: Tensor, precision: Tensor):
    """The variational evidence, from the sites of Laplace's approximation, and how to predict."""
    nodes, weight = (torch.from_numpy(part) for part in np.polynomial.hermite.hermgauss(_NODES))
    nodes, weight, before = nodes * math.sqrt(2), weight / math.sqrt(math.pi), -math.inf
    mean, var, log_det, alpha = conditioned(cov, target, precision)
    for _ in range(_STEPS):
        p = (mean[:, None] + var.sqrt()[:, None] * nodes).sigmoid()
        found = ((p * (1 - p)) @ weight).clamp(min=1e-12)
        shift = torch.lerp(precision * target, found * mean + y - p @ weight, _LENGTH)
        precision = torch.lerp(precision, found, _LENGTH)
        target = shift / precision
        mean, var, log_det, alpha = conditioned(cov, target, precision)
        f = mean[:, None] + var.sqrt()[:, None] * nodes
        data = -(torch.nn.functional.softplus((1 - 2 * y[:, None]) * f) @ weight).sum()
        value = (data - (mean @ alpha + log_det - (precision * var).sum()) / 2).item()
        if abs(value - before) < 1e-3:
            break
        before = value
    return value, precision, alpha


def nll(moments, y):
    return -Bernoulli().bind().marginal(*moments).log_prob(y).mean().item()


@torch.no_grad()
def row(x, y, x_new, y_new, variance, k):
    scale = torch.full((2,), 1.9 * (variance / 118) ** (1 / 3), dtype=x.dtype)
    kernel = Matern32(2, variance=torch.tensor(variance, dtype=x.dtype), lengthscale=scale)
    cov, cross = kernel(x), kernel(x_new, x)
    by_laplace, target, precision = laplace(cov, y)
    exact, precision, alpha = variational(cov, y, target, precision)
    total = cov + torch.diag(1 / precision)
    var = kernel(x_new, diag=True) - (cross * torch.linalg.solve(total, cross.mT).mT).sum(-1)
    gp = VNNGP(x, y, kernel, Bernoulli(), num_neighbors=k, mean=zero)
    gp.solve()
    local, prior = gp.q, NNGP(kernel, gp.graph)
    q = local.distribution(prior)
    observed = (q.log_evidence(prior) - q.offset / len(x)).sum().item()
    bound = -IntegratedELBO().loss(gp.model, gp.guide) - q.offset.item()
    latent = bound - observed + latent_log_evidence(prior.factor, local.target, local.loc, local.precision).item()
    return by_laplace, exact, latent, bound, nll((cross @ alpha, var), y_new), nll(gp(x_new), y_new)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--variances", nargs="+", type=float, default=[10.0, 30.0, 100.0, 300.0, 1000.0])
    parser.add_argument("--neighbors", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| variance | dense, Laplace | dense | latent values | observations | NLL, dense | NLL, VNNGP |")
    print("|---|---|---|---|---|---|---|")
    data = split(args.points)
    for variance in args.variances:
        *evidence, exact, ours = row(*data, variance, args.neighbors)
        values = " | ".join(f"{value:.1f}" for value in evidence)
        print(f"| {variance:.0f} | {values} | {exact:.4f} | {ours:.4f} |", flush=True)
    print(f"Commit {commit()}.")


if __name__ == "__main__":
    main()
