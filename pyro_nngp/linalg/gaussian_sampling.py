r"""Exact draws from a nearest-neighbor prior times a Gaussian likelihood, by solving with the sparse precision.

.. math:: p(u) \propto N(u \mid 0, \Lambda^{-1})\, \exp(h^\top u - \tfrac12 u^\top \mathrm{diag}(\tau)\, u), \qquad
   \Lambda = (I - A)^\top V^{-1} (I - A) .

For up to 1,000 points, one Cholesky factorization of :math:`P = \Lambda + \mathrm{diag}(\tau)`. Beyond that,
perturbation and optimization (Papandreou and Yuille 2010) in the whitened values z of :math:`u = G z`, :math:`G = (I -
A)^{-1} V^{1/2}`,

.. math:: (I + G^\top \mathrm{diag}(\tau)\, G)\, z = G^\top (h + \tau^{1/2} e_1) + e_2, \qquad e_1, e_2 \sim N(0, I),

whose solution z, by conjugate gradients (:mod:`pyro_nngp.linalg.vecchia_factor`), gives a draw u = G z.

Cost: O(N^3) up to 1,000 points; then O(N K) per step of conjugate gradients, in twice as many passes as the graph has
levels; O(N K) memory. In double precision throughout.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.linalg.dense_factor import half_solve
from pyro_nngp.linalg.vecchia_factor import VecchiaFactor

DENSE_UP_TO = 1000
"""Points up to which one dense factorization is quicker than conjugate gradients."""


def draw_posterior(
    factor: VecchiaFactor,
    linear: Float[Tensor, " N"],
    precision: Float[Tensor, " N"],
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    dense_up_to: int = DENSE_UP_TO,
) -> Float[Tensor, " N"]:
    """One draw of u, with mean P^-1 h and covariance P^-1.

    Args:
        factor: (I - A, V) of the prior.
        linear: h.
        precision: tau >= 0.
        tolerance: of the iterative solution, on the residual relative to the right-hand side, in the 2-norm. It
            also bounds the error of z relative to that norm, which is about sqrt(N).
        max_iterations: largest number of iterations; a warning reports if they did not suffice.
        dense_up_to: number of points up to which the precision is factorized instead.

    Returns:
        The draw, in the dtype of `linear`.
    """
    dtype, n = linear.dtype, len(factor)
    linear, precision = linear.double(), precision.double()
    if n <= dense_up_to:
        tril = factor.posterior_tril(precision)
        half = half_solve(tril, linear[:, None]) + torch.randn_like(linear)[:, None]
        return half_solve(tril, half, transposed=True)[:, 0].to(dtype)

    first, second = torch.randn(2, n, dtype=linear.dtype, device=linear.device)
    white = factor.prepared()
    right = white.color_transposed(linear + precision.sqrt() * first) + second
    return white.color(white.solve(right, precision, None, tolerance, max_iterations)).to(dtype)
