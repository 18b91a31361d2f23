r"""Exact draws from a nearest-neighbor prior times a Gaussian likelihood, by solving with the sparse precision.

.. math:: p(u) \propto N(u \mid 0, \Lambda^{-1})\, \exp(h^\top u - \tfrac12 u^\top \mathrm{diag}(\tau)\, u), \qquad
   \Lambda = (I - A)^\top V^{-1} (I - A) .

Up to 1,000 points one Cholesky factorisation of :math:`P = \Lambda + \mathrm{diag}(\tau)`. Beyond, perturbation and
optimisation (Papandreou and Yuille 2010) in the whitened values z of :math:`u = G z`, :math:`G = (I - A)^{-1} V^{1/2}`,

.. math:: (I + G^\top \mathrm{diag}(\tau)\, G)\, z = G^\top (h + \tau^{1/2} e_1) + e_2, \qquad e_1, e_2 \sim N(0, I),

whose solution has the wanted law. All eigenvalues of that system are at least 1 and only as many exceed it as the data
determine directions, so conjugate gradients take few steps however ill-conditioned the prior is, and a residual bounds
the error of z.

Cost: O(N^3) up to 1,000 points; then O(N K) per step of conjugate gradients, in twice as many passes as the graph has
levels; O(N K) memory. In double precision throughout.
"""

import warnings

import torch
from jaxtyping import Float, Int
from torch import Tensor

_DENSE_UP_TO = 1000  # points; beyond, conjugate gradients are quicker


def draw_posterior(
    w: Float[Tensor, "N K"],
    var: Float[Tensor, " N"],
    neighbors: Int[Tensor, "N K"],
    levels: list[Int[Tensor, " _"]],
    linear: Float[Tensor, " N"],
    precision: Float[Tensor, " N"],
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> Float[Tensor, " N"]:
    """One draw of u, with mean P^-1 h and covariance P^-1.

    Args:
        w: weights of the prior's conditionals, 0 where there is no neighbor.
        var: their variances.
        neighbors: rows of the neighbors, -1 padded.
        levels: dependency levels of the neighbors.
        linear: h.
        precision: tau >= 0.
        tolerance: of the iterative solution, on the norm of the residual relative to that of the right-hand side. It
            also bounds the error of z relative to that norm, which is about sqrt(N).
        max_iterations: at most so many iterations; where they do not suffice, a warning says so.

    Returns:
        The draw, in the dtype of `linear`.
    """
    dtype, n = linear.dtype, len(var)
    w, var, linear, precision = w.double(), var.double(), linear.double(), precision.double()
    columns = neighbors.clamp(min=0)
    if n <= _DENSE_UP_TO:
        residuals = torch.eye(n, dtype=w.dtype, device=w.device).scatter_add(-1, columns, -w)
        system = residuals.mT @ (residuals / var[:, None]) + torch.diag_embed(precision)
        tril = torch.linalg.cholesky(system)
        half = torch.linalg.solve_triangular(tril, linear[:, None], upper=False) + torch.randn_like(linear)[:, None]
        return torch.linalg.solve_triangular(tril.mT, half, upper=True)[:, 0].to(dtype)

    def color(z: Tensor) -> Tensor:
        """G z."""
        u = var.sqrt() * z
        for rows in levels[1:]:
            u[rows] += (w[rows] * u[columns[rows]]).sum(-1)
        return u

    def color_transposed(u: Tensor) -> Tensor:
        """G' u."""
        u = u.clone()
        for rows in reversed(levels[1:]):
            u.index_add_(0, columns[rows].flatten(), (w[rows] * u[rows, None]).flatten())
        return var.sqrt() * u

    first, second = torch.randn(2, n, dtype=w.dtype, device=w.device)
    right = color_transposed(linear + precision.sqrt() * first) + second
    z, residual = torch.zeros_like(right), right
    direction, strength, enough = residual, residual.square().sum(), tolerance * right.norm()
    for _ in range(max_iterations):
        if strength.sqrt() <= enough:
            break
        image = direction + color_transposed(precision * color(direction))
        step = strength / (direction * image).sum()
        z, residual = z + step * direction, residual - step * image
        strength, before = residual.square().sum(), strength
        direction = residual + strength / before * direction
    else:
        warnings.warn(
            f"draw_posterior: conjugate gradients stopped after {max_iterations} iterations at a relative residual of "
            f"{float(strength.sqrt() / right.norm()):.1e}, so the draw is approximate.",
            stacklevel=2,
        )
    return color(z).to(dtype)
