"""Priors in NPVI's bound, for `npvi_figures.py`: nearest neighbors, as in the paper's experiments, or of low rank.

The cross-entropy of q(f) = N(m, V) and the prior takes the prior's precision P. Equation 9 of the paper puts a Nystrom
or FITC approximation of P, from M inducing points, in place of the nearest-neighbor prior of equation 11. It estimates
the trace of P (V + m m') from the pairs of a point with itself and its parents, which count once, and the pair with one
other point drawn at random, which counts for all others.

For Gaussian noise the optimal q of each prior is known. Shown are

- KL: its divergence from the exact posterior, KL(q || p), in nats per point;
- error: the standard deviation of the estimate of the cross-entropy from 50 points, in nats per point, at that q.

The Nystrom precision is the pseudo-inverse of the covariance, of rank M. The first 1,500 points of a method, at its
hyperparameters; inducing points at random points, for any M the first of one order; float64.
"""

from types import SimpleNamespace

import torch
from npvi import log_response  # beside this file

from pyro_nngp.distributions import NNGP
from pyro_nngp.neighbors import SymmetricGraph

NUM_POINTS, BATCH = 1500, 50
NUGGET = 0.01  # relative
PAIRED = 20  # parents whose pairs count once in equation 9


def inverse(matrix):
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))


def posterior(at, precision):
    """Mean and covariance of f given the data, by the precision of the prior."""
    var = inverse(precision + torch.eye(NUM_POINTS).to(precision) / at.noise)
    return var @ at.residual / at.noise, var


@torch.no_grad()
def problem(gp):
    """Points, kernel and its matrix, residuals of the mean function, noise variance, and the exact posterior."""
    x, y = gp.x[:NUM_POINTS], log_response(gp.likelihood, gp.y[:NUM_POINTS])
    cov = gp.kernel(x)
    cov.diagonal().mul_(1 + NUGGET)
    at = SimpleNamespace(x=x, kernel=gp.kernel, cov=cov, noise=gp.likelihood.variance, residual=y - gp.mean(x)[:, 0])
    at.posterior = posterior(at, inverse(cov))
    return at


def divergence(at, loc, var):
    """KL of N(loc, var) from the exact posterior, per point."""
    mean, cov = at.posterior
    tril, own = torch.linalg.cholesky(cov), torch.linalg.cholesky(var)
    half = torch.linalg.solve_triangular(tril, torch.cat([own, (loc - mean)[:, None]], 1), upper=False)
    logs = (tril.diagonal().log() - own.diagonal().log()).sum()
    return float((half.square().sum() - NUM_POINTS) / 2 + logs) / NUM_POINTS


def dense(weights, neighbors):
    """Weights on neighbors as a matrix."""
    found = weights.new_zeros(NUM_POINTS, NUM_POINTS + 1)
    found.scatter_(1, torch.where(neighbors < 0, NUM_POINTS, neighbors), weights)
    return found[:, :-1]


def scores(at, precision, terms):
    """Of a prior, and of an estimate by one of the terms of each point, of which all have the same chance."""
    loc, var = posterior(at, precision)
    found, chosen = terms(var + loc.outer(loc))
    chances = chosen / chosen.sum(1, keepdim=True) / NUM_POINTS
    mean, square = (chances * found).sum(), (chances * found.square()).sum()
    return {"value": divergence(at, loc, var), "error": float((square - mean.square()).sqrt() / 2 / BATCH**0.5)}


@torch.no_grad()
def of_neighbors(at, k):
    """Scores of the nearest-neighbor prior and equation 11."""
    factor = NNGP(at.kernel, SymmetricGraph(at.x, k), jitter=NUGGET).factor
    residual = torch.eye(NUM_POINTS).to(at.cov) - dense(factor.w, factor.neighbors)

    def terms(moment):
        found = ((residual @ moment) * residual).sum(1, keepdim=True) / factor.var[:, None]
        return found, torch.ones_like(found)

    return scores(at, residual.mT @ (residual / factor.var[:, None]), terms)


@torch.no_grad()
def of_rank(at, name, m):
    """Scores of the FITC or Nystrom prior and equation 9."""
    chosen = torch.randperm(NUM_POINTS, generator=torch.Generator().manual_seed(0))[:m]
    tril = torch.linalg.cholesky(at.cov[chosen][:, chosen])
    low = torch.linalg.solve_triangular(tril, at.kernel(at.x[chosen], at.x), upper=False).mT
    if name == "FITC":
        rest = (at.cov.diagonal() - low.square().sum(1)).clamp(min=NUGGET * float(at.cov[0, 0]))
        scaled = low / rest[:, None]
        precision = rest.reciprocal().diag() - scaled @ inverse(torch.eye(m).to(low) + low.mT @ scaled) @ scaled.mT
    else:
        root = low @ inverse(low.mT @ low)
        precision = root @ root.mT
    parents = SymmetricGraph(at.x, PAIRED).neighbors
    paired = dense(torch.ones_like(parents, dtype=at.cov.dtype), parents) + torch.eye(NUM_POINTS).to(at.cov)

    def terms(moment):
        products, others = precision * moment, 1 - paired
        return others.sum(1, keepdim=True) * products + (paired * products).sum(1, keepdim=True), others

    return scores(at, precision, terms)
