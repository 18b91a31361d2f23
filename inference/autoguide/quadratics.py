r"""Quadratic functions in place of the log densities of observations.

At a normal distribution :math:`q(\phi_i)` of the parameters of observation i, with mean :math:`\bar\phi_i` and
covariance :math:`S_i`, its log likelihood is replaced by

.. math:: \log t_i(\phi) =
   c_i + g_i^\top (\phi - \bar\phi_i) - \tfrac12 (\phi - \bar\phi_i)^\top H_i (\phi - \bar\phi_i)

with the expected gradient and curvature, which the optimal Gaussian q satisfies (Opper and Archambeau 2009), and the
expected value,

.. math:: g_i = E_q\, \nabla \log p(y_i \mid \phi_i), \quad H_i = -E_q\, \nabla^2 \log p(y_i \mid \phi_i), \quad
   c_i = E_q \log p(y_i \mid \phi_i) + \tfrac12 \mathrm{tr}(H_i S_i) .

Expectations are by Gauss-Hermite quadrature: 15 nodes for k = 1, 9, 7 and 4 in each direction for k = 2, 3 and 4, and
beyond that 64 nodes of a quasi-random sequence, symmetric and with the right covariance.

Cost: O(S n k^2). Symbols: n observations with k parameters each, S nodes.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.linalg import cholesky

_LEAST = 1e-6  # curvature of an observation, relative to the average
_NODES = {1: 15, 2: 9, 3: 7, 4: 4}  # of quadrature in each direction, by k
_PAIRS = 32  # of nodes of a quasi-random sequence, in more directions


class OpaqueSiteError(ValueError):
    """A site depends on the leaves in a way that no quadratic function of its parameters can represent."""


class Marginals(NamedTuple):
    """Normal distributions of the parameters of the observations of a site.

    Attributes:
        mean: means, (n, k).
        tril: Cholesky factors of the covariances, (n, k, k).
    """

    mean: Tensor
    tril: Tensor


class Quadratic(NamedTuple):
    """Values c (n,), gradients g (n, k) and positive definite curvatures H (n, k, k) of the observations of a site."""

    value: Tensor
    gradient: Tensor
    curvature: Tensor

    def root(self) -> Float[Tensor, "n k k"]:
        """A root R of H = R' R."""
        if self.curvature.shape[-1] == 1:
            return self.curvature.sqrt()
        return cholesky(self.curvature, 0.0).mT

    def log_factor(self, distance: Float[Tensor, "*S n k"]) -> Float[Tensor, "*S n"]:
        """log t at a distance from the mean of phi."""
        half = (self.curvature @ distance[..., None])[..., 0] / 2
        return self.value + (distance * (self.gradient - half)).sum(-1)


class Observations:
    """Observations of a program as functions of their parameters.

    Attributes:
        phi: parameters that depend on the leaves, (n, k); with gradients.
        name: name of the site.
    """

    phi: Tensor
    name: str
    widest: Tensor | float = math.inf  # standard deviations of parameters at the start, (k,)

    def log_prob(self, phi: Float[Tensor, "*S n k"]) -> Float[Tensor, "*S n"]:
        """Log densities of the observations, with their scales and masks."""
        raise NotImplementedError

    def start(self, variance: Float[Tensor, "n k"]) -> Marginals:
        """A distribution of phi about its present value, half as wide as one of some variances.

        Standard deviations of parameters that have been mapped to unconstrained space, such as logs, are at most 1/2.
        """
        scale = (variance.double().cpu().sqrt() / 2).clamp(max=self.widest)
        return Marginals(self.phi.detach().double().cpu(), torch.diag_embed(scale))

    def expected_log_prob(self, at: Marginals) -> Float[Tensor, " n"]:
        """Expected log densities of the observations."""
        phi, weights = self._nodes(at)
        return torch.tensordot(weights, self.log_prob(phi), 1)

    def quadratic(self, at: Marginals) -> Quadratic:
        """The quadratic functions with the expected value, gradient and curvature."""
        with torch.enable_grad():
            phi, weights = self._nodes(at)
            log_probs = self.log_prob(phi.requires_grad_())
            (gradient,) = torch.autograd.grad(log_probs.sum(), phi, create_graph=True)
            rows = [
                torch.autograd.grad(gradient[..., k].sum(), phi, retain_graph=True, allow_unused=True)[0]
                if gradient.requires_grad
                else None
                for k in range(phi.shape[-1])
            ]
        zero = torch.zeros_like(phi)
        hessian = torch.stack([zero if row is None else row for row in rows], -1)
        value, gradient, hessian = (
            torch.tensordot(weights, each.detach(), 1) for each in (log_probs, gradient, hessian)
        )
        curvature = _positive(-hessian)
        covariance = (at.tril @ at.tril.mT).to(curvature)
        return Quadratic(value + (curvature * covariance).sum((-2, -1)) / 2, gradient, curvature)

    def _nodes(self, at: Marginals) -> tuple[Float[Tensor, "S n k"], Float[Tensor, " S"]]:
        white, weights = (torch.from_numpy(each).to(self.phi) for each in _quadrature(at.mean.shape[-1]))
        mean, tril = (each.detach().to(self.phi) for each in at)
        return mean + torch.einsum("nij,sj->sni", tril, white), weights


@cache
def _quadrature(k: int) -> tuple[Float[np.ndarray, "S k"], Float[np.ndarray, " S"]]:
    """Nodes and weights of the standard normal distribution in k directions."""
    if k in _NODES:
        nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES[k])
        grids = np.meshgrid(*[nodes] * k, indexing="ij"), np.meshgrid(*[weights / weights.sum()] * k, indexing="ij")
        return np.stack(grids[0], -1).reshape(-1, k), np.stack(grids[1], -1).prod(-1).flatten()
    pairs = max(_PAIRS, 2 * k)
    uniform = torch.quasirandom.SobolEngine(k, scramble=True, seed=0).draw(pairs, dtype=torch.float64)
    white = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6)).numpy()
    white = np.linalg.solve(np.linalg.cholesky(white.T @ white / pairs), white.T).T
    return np.concatenate([white, -white]), np.full(2 * pairs, 0.5 / pairs)


def _positive(curvature: Float[Tensor, "n k k"]) -> Float[Tensor, "n k k"]:
    """Curvatures with eigenvalues of at least 1e-6 times the average."""
    average = curvature.diagonal(dim1=-2, dim2=-1).abs().mean().clamp(min=torch.finfo(curvature.dtype).tiny)
    if curvature.shape[-1] == 1:
        return curvature.clamp(min=_LEAST * average)
    values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
    return (vectors * values.clamp(min=_LEAST * average)[..., None, :]) @ vectors.mT
