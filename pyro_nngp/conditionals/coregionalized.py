r"""L latent functions at a point given linear observations of them at its neighbors.

At neighbor j there are R observations :math:`s_j = H_j u(x_j) + \epsilon_j` with rows :math:`H_j` (R, L) and noise
:math:`\epsilon_j \sim N(0, \mathrm{diag}\, \delta_j)`. The latent functions are independent a priori, so that

.. math:: \mathrm{Cov}(s_j, s_k) = H_j\, \mathrm{diag}(k_1(x_j, x_k), .., k_L(x_j, x_k))\, H_k^\top
   + 1[j = k]\, \mathrm{diag}\, \delta_j,

which conditions u(x) by one Cholesky factor of size K R. Rows of zeros are no observations, whatever their noise.

Cost: O(B (K R)^3) time; O(B K R L) memory, O(B (K R)^2) where gradients are recorded. Symbols: B points, K neighbors, R
observations at each, L latent functions.

Reference: Alvarez, Rosasco, Lawrence (2012), "Kernels for vector-valued functions: a review", section 4.2.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.conditionals.mixed_precision import needs_float64
from pyro_nngp.kernels import Covariance
from pyro_nngp.linalg import add_diagonal, cholesky, half_solve, in_blocks

COPIES = 6
"""Copies of the neighbors' covariance in memory while its Cholesky factor is computed."""


def latent_conditional(
    kernels: Sequence[Covariance],
    x: Float[Tensor, "B D"],
    near: Float[Tensor, "B K D"],
    rows: Float[Tensor, "B K R L"],
    noise: Float[Tensor, "B K R"],
    jitter: float,
) -> tuple[Float[Tensor, "B L KR"], Float[Tensor, "B L L"]]:
    """Weights of the observations, and the conditional covariance of u(x).

    Args:
        kernels: covariance functions, one for each latent function, or one for all of them.
        x: points.
        near: their neighbors.
        rows: H; zeros where there is no neighbor or no observation.
        noise: noise variances, positive where rows are zero.
        jitter: relative nugget of the latent functions.

    Returns:
        Weights, with the observations of a neighbor side by side, and covariances.

    Raises:
        NotPositiveDefiniteError: if a covariance stays indefinite with a relative nugget of 1e-2.
    """
    if needs_float64(x, noise, kernels):
        weights, cov = latent_conditional(kernels, x.double(), near.double(), rows.double(), noise.double(), jitter)
        return weights.float(), cov.float()
    size = near.shape[1] * rows.shape[2]

    def block(part: slice) -> tuple[Tensor, Tensor]:
        return _block(kernels, x[part], near[part], rows[part], noise[part], jitter)

    weights, cov = in_blocks(block, len(x), COPIES * size**2)
    return weights, cov


def _block(
    kernels: Sequence[Covariance], x: Tensor, near: Tensor, rows: Tensor, noise: Tensor, jitter: float
) -> tuple[Tensor, Tensor]:
    among = latent_covariances(kernels, near, jitter)
    cross = torch.stack([kernel(x[:, None], near)[:, 0] for kernel in kernels], -1)
    prior = torch.stack([kernel.diag(x) * (1 + jitter) for kernel in kernels], -1).expand(len(x), rows.shape[-1])
    cov = add_diagonal(observed_covariance(among, rows), noise.flatten(1))
    right = (cross[:, :, None] * rows).flatten(1, 2)
    tril = cholesky(cov, 0.0, escalate=True)
    half = half_solve(tril, right)
    weights = half_solve(tril, half, transposed=True).mT
    return weights, torch.diag_embed(prior) - half.mT @ half


def latent_covariances(
    kernels: Sequence[Covariance], places: Float[Tensor, "B J D"], jitter: float
) -> Float[Tensor, "B J J L"]:
    """Covariances between places, with the nugget: for each latent function, or once if all share a kernel."""
    each = torch.stack([kernel(places, places) for kernel in kernels], -1)
    return each + torch.diag_embed(each.diagonal(dim1=1, dim2=2) * jitter).movedim(1, -1)


def observed_covariance(among: Float[Tensor, "B J J #L"], rows: Float[Tensor, "B J R L"]) -> Float[Tensor, "B JR JR"]:
    """Covariances of the observations without their noise; the observations of a place are side by side."""
    b, places, width, count = rows.shape
    left = (among[:, :, :, None] * rows[:, None]).reshape(b, places, places * width, count)
    return (left @ rows.mT).movedim(1, 2).reshape(b, places * width, places * width)


def outputs_of(
    loading: Float[Tensor, "*S #P T L"], loc: Float[Tensor, "*S L P"], cov: Float[Tensor, "*#S P L L"]
) -> tuple[Float[Tensor, "*S T P"], Float[Tensor, "*S T P"]]:
    """Means and variances of the outputs A u at points.

    Args:
        loading: A, or one for all points.
        loc: means of the latent functions.
        cov: their covariances at each point.
    """
    loading = loading.expand(*loading.shape[:-3], loc.shape[-1], -1, -1)
    variance = torch.einsum("...ptl,...plk,...ptk->...tp", loading, cov, loading)
    return torch.einsum("...ptl,...lp->...tp", loading, loc), variance


def gathered(
    rows: Float[Tensor, "N R L"], noise: Float[Tensor, "N R"], near: Int[Tensor, "B K"]
) -> tuple[Float[Tensor, "B K R L"], Float[Tensor, "B K R"]]:
    """Observations at neighbors, -1 padded, with zeros and unit noise where there is no neighbor."""
    real, places = near >= 0, near.clamp(min=0)
    return torch.where(real[..., None, None], rows[places], 0.0), torch.where(real[..., None], noise[places], 1.0)
