"""Likelihood of hyperparameters of an exact process by importance sampling around Laplace's approximation.

    L = int p(y | offset + h) N(h | 0, K) dh,    h_s ~ N(mode, (K^-1 + W)^-1)

with the curvature W of the log likelihood at the mode. Cost: O(N^3) per Newton step. Symbols: N data, S draws.
"""

import torch


def log_likelihood(density, covariance, offset, num_draws=20_000):
    """The logarithm of the likelihood, its standard error, and Laplace's approximation.

    Args:
        density: maps the predictor (..., N) to log densities of the data (..., N).
        covariance: K, (N, N).
        offset: the part of the predictor that is not random, (N,).
        num_draws: S.
    """
    n, h = len(offset), torch.zeros_like(offset)
    eye = torch.eye(n, dtype=h.dtype)
    tril = torch.linalg.cholesky(covariance + 1e-8 * covariance.diagonal().mean() * eye)
    white = torch.zeros_like(h)
    for _ in range(100):  # Newton steps in white coordinates, h = L white
        force, curvature = _derivatives(density, offset + h)
        precision = eye + tril.mT @ (curvature[:, None] * tril)
        new = torch.cholesky_solve((tril.mT @ (curvature * h + force))[:, None], torch.linalg.cholesky(precision))[:, 0]
        white, change = white + 0.7 * (new - white), (new - white).abs().max()
        h = tril @ white
        if change < 1e-9:
            break
    root = torch.linalg.cholesky(eye + tril.mT @ (_derivatives(density, offset + h)[1][:, None] * tril))
    laplace = density(offset + h).sum() - white.square().sum() / 2 - root.diagonal().log().sum()
    normal = torch.randn(num_draws, n, dtype=h.dtype)
    draws = white + torch.linalg.solve_triangular(root.mT, normal.mT, upper=True).mT
    weights = density(offset + draws @ tril.mT).sum(-1) - draws.square().sum(-1) / 2 + normal.square().sum(-1) / 2
    weights = weights - root.diagonal().log().sum()
    relative = (weights - weights.max()).exp()
    error = relative.std() / relative.mean() / num_draws**0.5
    return float(weights.logsumexp(0) - torch.tensor(float(num_draws)).log()), float(error), float(laplace)


def _derivatives(density, predictor):
    at = predictor.detach().requires_grad_()
    (force,) = torch.autograd.grad(density(at).sum(), at, create_graph=True)
    (second,) = torch.autograd.grad(force.sum(), at)
    return force.detach(), -second
