r"""The optimum of a mean-field q(u) when prior and likelihood are Gaussian: no step size, no epochs.

With :math:`\Lambda = (I - A)^\top V^{-1} (I - A)` the precision of the nearest-neighbor prior and noise variances
:math:`\sigma_i^2` on observations y of u itself, the ELBO of :math:`q(u) = N(m, \mathrm{diag}\,s)` is largest at

.. math:: (\Lambda + \Sigma^{-1}) m = \Sigma^{-1} y, \qquad s_j = 1 / (\Lambda_{jj} + \sigma_j^{-2}),

so m is the exact posterior mean under the prior, found by conjugate gradients, and s_j the exact conditional variance
of u_j given all the others.

Cost: O(N K) per iteration of conjugate gradients, O(N K) memory.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def mean_field_optimum(
    w: Float[Tensor, "N K"],
    var: Float[Tensor, " N"],
    neighbors: Int[Tensor, "N K"],
    y: Float[Tensor, "*T N"],
    noise_var: Float[Tensor, ""] | Float[Tensor, " N"],
    start: Float[Tensor, "*T N"] | None = None,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
) -> tuple[Float[Tensor, "*T N"], Float[Tensor, " N"]]:
    """Mean and standard deviation of the optimal mean-field q(u).

    Args:
        w: weights of the prior's conditionals, 0 where there is no neighbor.
        var: their variances.
        neighbors: rows of the neighbors, -1 padded.
        y: observations of u (the mean function subtracted), one set per leading index.
        noise_var: noise variance, one or one per observation.
        start: where to start m.
        tolerance: on the residual relative to the right-hand side.
        max_iterations: at most so many iterations; the mean is then merely closer than `start`.

    Returns:
        m (..., N) and standard deviations (N,), in the dtype of `y`.
    """
    dtype = y.dtype
    w, var, y, noise = w.double(), var.double(), y.double(), noise_var.double().expand(var.shape)
    columns = neighbors.clamp(min=0)
    own = 1 / var + 1 / noise
    diagonal = own.scatter_add(0, columns.flatten(), (w.square() / var[:, None]).flatten())

    def product(m: Tensor) -> Tensor:
        r = (m - (w * m[..., columns]).sum(-1)) / var
        pulled = torch.zeros_like(m)
        pulled.index_add_(-1, columns.flatten(), (w * r[..., None]).flatten(-2))
        return r - pulled + m / noise

    right = y / noise
    m = right / diagonal if start is None else start.double().clone()
    residual = right - product(m)
    direction = scaled = residual / diagonal
    strength = (residual * scaled).sum(-1, keepdim=True)
    for _ in range(max_iterations):
        if (residual.norm(dim=-1) <= tolerance * right.norm(dim=-1)).all():
            break
        image = product(direction)
        step = strength / (direction * image).sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        m, residual = m + step * direction, residual - step * image
        scaled = residual / diagonal
        strength, before = (residual * scaled).sum(-1, keepdim=True), strength
        direction = scaled + strength / before.clamp(min=torch.finfo(torch.float64).tiny) * direction
    return m.to(dtype), diagonal.rsqrt().to(dtype)
