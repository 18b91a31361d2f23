"""Slow, readable oracles: nearest-neighbor Gaussian processes as N x N matrices in double precision."""

import torch

from pyro_nngp.linalg import DEFAULT_JITTER


def dense_covariance(kernel, x):
    """The kernel matrix with the package's default nugget."""
    cov = kernel(x)
    return cov + DEFAULT_JITTER * torch.diag(cov.diagonal())


def dense_factors(kernel, graph):
    """A (N, N) and v (N,) of the prior, one point and one small system at a time."""
    cov, n = dense_covariance(kernel, graph.x), graph.num_points
    weights, var = torch.zeros(n, n, dtype=cov.dtype), torch.zeros(n, dtype=cov.dtype)
    for i, row in enumerate(graph.neighbors):
        near = row[row >= 0]
        cross = cov[i, near]
        w = torch.cholesky_solve(cross[:, None], torch.linalg.cholesky(cov[near][:, near]))[:, 0]
        weights[i, near], var[i] = w, cov[i, i] - cross @ w
    return weights, var


def dense_precision(kernel, graph):
    """(I - A)^T V^-1 (I - A)."""
    weights, var = dense_factors(kernel, graph)
    residual = torch.eye(len(var), dtype=var.dtype) - weights
    return residual.mT @ (residual / var[:, None])


def dense_cholesky(q):
    """R of a SparseCholeskyNormal without batch dimensions, as an N x N matrix."""
    factor = torch.diag(q.scale)
    for i, row in enumerate(q.pattern):
        factor[i, row[row >= 0]] = q.weights[i, row >= 0]
    return factor


def gaussian_kl(mean, cov, precision):
    """KL[N(mean, cov) || N(0, precision^-1)]."""
    chol = torch.linalg.cholesky(precision)
    logdet = 2 * chol.diagonal().log().sum() + 2 * torch.linalg.cholesky(cov).diagonal().log().sum()
    return 0.5 * ((precision * cov).sum() + mean @ precision @ mean - len(mean) - logdet)
