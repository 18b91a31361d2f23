r"""Log density of the observations at a point given those at its neighbors, all sums of L latent functions.

At point j there are R observations :math:`s_j = H_j u(x_j) + \epsilon_j` with unit noise, as in
:mod:`pyro_nngp.conditionals.coregionalized`. With :math:`g_l` the covariances of latent function l, the covariances of
the observations are

.. math:: S_{jk} = \sum_l H_{jl}\, g_l(j, k)\, H_{kl}^\top + 1[j = k] I .

For the last point t given the others, n,

.. math:: \log p = -\tfrac12 (\log|\Sigma| + e^\top \Sigma^{-1} e), \quad \Sigma = W S W^\top, \quad e = W s, \quad
   W = [-S_{tn} S_{nn}^{-1},\ I],

without the constants. Its differential is of low rank: with :math:`\alpha = [S_{nn}^{-1} s_n;\ 0]` and
:math:`\beta = \Sigma^{-1} e`,

.. math:: d \log p = \tfrac12 \mathrm{tr}\big[(\beta\beta^\top - \Sigma^{-1})\, W\, dS\, W^\top\big]
   + \beta^\top W\, dS\, \alpha - \beta^\top W\, ds ,

so that gradients need the factor of :math:`S_{nn}` of the forward pass alone, no matrix of its size.

Cost: O(B (K R)^3) time, and O(B K^2 R L) for gradients; memory that is kept for them O(B K (K L + R^2)). Symbols: B
points, J = K + 1 places: K neighbors and the point, R observations at each, L latent functions.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._autograd import apply
from pyro_nngp._checks import fail
from pyro_nngp.conditionals.coregionalized import COPIES, observed_covariance
from pyro_nngp.linalg import cholesky, factor_inverse, factor_log_det, half_solve, in_blocks


def coregionalized_log_density(
    among: Float[Tensor, "B J J #L"], rows: Float[Tensor, "B J R L"], values: Float[Tensor, "B J R"]
) -> Float[Tensor, " B"]:
    """Log densities of the values at the last place given those at the others, less constants.

    Args:
        among: covariances of the latent functions between the places; one for all functions, or one for each.
        rows: H; zeros where there is no place or no observation, which then counts nothing.
        values: s, zeros where rows are.

    Raises:
        NotPositiveDefiniteError: if a covariance stays indefinite with a relative nugget of 1e-2.
        NotImplementedError: for second derivatives.
    """
    return apply(_LogDensity, among, rows, values)


class _LogDensity(torch.autograd.Function):
    """(among, rows, values) -> log densities, with the gradient of the module's docstring."""

    @staticmethod
    def forward(ctx: Any, among: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        _, places, width, _ = rows.shape

        def block(part: slice) -> tuple[Tensor, ...]:
            return _forward(among[part], rows[part], values[part])

        densities, *kept = in_blocks(block, len(rows), COPIES * (places * width) ** 2)
        ctx.save_for_backward(among, rows, *kept)
        return densities

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if torch.is_grad_enabled():
            cure = "Take first derivatives, without create_graph."
            fail(
                "coregionalized_log_density", "a gradient", "of first order", "create_graph", cure, NotImplementedError
            )
        among, rows, weights, alpha, beta, middle = ctx.saved_tensors
        count = rows.shape[-1]
        # by latent function: values at places (B, L, *, J) of W H, its products, and alpha' H
        each = torch.einsum("brjp,bjpl->blrj", weights, rows)
        around = torch.einsum("bjp,bjpl->blj", alpha, rows)
        of_mean = (beta[:, None, None] @ each)[:, :, 0]
        left = middle[:, None] @ each
        cov = among.movedim(-1, 1).expand(-1, count, -1, -1)
        outer = torch.cat([left, of_mean[:, :, None]], 2).mT @ torch.cat([each, around[:, :, None]], 2)
        in_among = (grad[:, None, None, None] * outer).movedim(1, -1).sum_to_size(among.shape)
        in_each = 2 * left @ cov + beta[:, None, :, None] * (around[:, :, None] @ cov)
        in_around = (of_mean[:, :, None] @ cov)[:, :, 0]
        in_rows = torch.einsum("brjp,blrj->bjpl", weights, in_each) + torch.einsum("bjp,blj->bjpl", alpha, in_around)
        in_values = -torch.einsum("br,brjp->bjp", beta, weights)
        return in_among, grad[:, None, None, None] * in_rows, grad[:, None, None] * in_values


def _forward(among: Tensor, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log densities; W (B, R, J, R), alpha (B, J, R), beta (B, R), and half of beta beta' less the precision."""
    b, places, width, _ = rows.shape
    size = (places - 1) * width
    cov, flat = observed_covariance(among, rows), values.flatten(1)
    cov.diagonal(dim1=-2, dim2=-1).add_(1.0)
    tril = cholesky(cov[:, :size, :size], 0.0, escalate=True)
    right = torch.cat([cov[:, :size, size:], flat[:, :size, None]], -1)
    half = half_solve(tril, right)
    solved = half_solve(tril, half, transposed=True)
    explained = half[..., :width].mT @ half
    last = cholesky(cov[:, size:, size:] - explained[..., :width], 0.0)
    error = flat[:, size:] - explained[..., width]
    white = half_solve(last, error[..., None])
    precision = factor_inverse(last)
    beta = (precision @ error[..., None])[..., 0]
    eye = torch.eye(width, dtype=cov.dtype, device=cov.device).expand(b, width, width)
    weights = torch.cat([-solved[..., :width].mT, eye], -1).view(b, width, places, width)
    alpha = torch.nn.functional.pad(solved[..., width], (0, width)).view(b, places, width)
    density = -(white.square().sum((-2, -1)) + factor_log_det(last)) / 2
    return density, weights, alpha, beta, (beta[:, :, None] * beta[:, None] - precision) / 2
