r"""Dense positive definite matrices :math:`A = L L^\top` by their Cholesky factors: factorization, solves, determinant.

A factorization adds a relative nugget. With ``escalate=True`` a matrix that is still not positive definite in floating
point gets a larger one, for that matrix only, with a warning (:mod:`pyro_nngp.linalg.nuggets`).

Cost: O(B M^3) for a factor, O(B M^2 R) for a solve. Symbols: B matrices of M x M, R right-hand sides.
"""

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.linalg.nuggets import (
    DEFAULT_JITTER,
    ESCALATION,
    NotPositiveDefiniteError,
    are_quiet,
    indefinite,
    warn_of_nuggets,
)

_PANEL, _PANELED = 16, range(80, 129)  # columns of a panel, and sizes at which LAPACK itself does not work in blocks


def cholesky(
    cov: Float[Tensor, "*B M M"], jitter: float = DEFAULT_JITTER, *, escalate: bool = False
) -> Float[Tensor, "*B M M"]:
    """Cholesky factors of covariance matrices with a relative nugget.

    Args:
        cov: covariance matrices.
        jitter: relative nugget.
        escalate: whether a matrix that has no factor gets a larger nugget, with a warning, instead of an error.

    Raises:
        NotPositiveDefiniteError: if some matrix has no factor; with `escalate`, not even with a nugget of 1e-2.
    """
    system = _with_nugget(cov, jitter) if jitter else cov
    if escalate:
        return _escalated(system)
    try:
        return torch.linalg.cholesky(system)
    except torch.linalg.LinAlgError as error:
        # Pyro's Hamiltonian Monte Carlo treats errors with these words as divergences.
        raise NotPositiveDefiniteError(
            f"cholesky: input is not positive-definite: a covariance of size {cov.shape[-1]} in {cov.dtype} with a "
            f"relative nugget of {jitter:.0e}. Coinciding points, a long lengthscale or NaN hyperparameters are the "
            "usual cause; a larger jitter or float64 helps with the first two."
        ) from error


def cholesky_above(matrix: Float[Tensor, "M M"], blocks: Float[Tensor, "T p p"], least: float) -> Float[Tensor, "M M"]:
    """A Cholesky factor of a symmetric matrix; of one that is not positive-definite, raised to a part of another.

    Args:
        matrix: the matrix, of size M = T p.
        blocks: the diagonal blocks of the other, a positive-definite one.
        least: eigenvalues of the matrix in units of the other that are smaller become this.
    """
    try:
        return cholesky(matrix, 0.0)
    except torch.linalg.LinAlgError:
        tril = torch.block_diag(*cholesky(blocks, 0.0))
        white = half_solve(tril, half_solve(tril, matrix).mT)
        part, axes = torch.linalg.eigh((white + white.mT) / 2)
        repaired = (axes * part.clamp(min=least)) @ axes.mT
        return tril @ cholesky(repaired, 0.0)


def reverse_cholesky(matrix: Float[Tensor, "*B M M"]) -> Float[Tensor, "*B M M"]:
    r"""The upper triangular U with :math:`A = U U^\top`; its inverse transposed is the lower factor of :math:`A^{-1}`.

    Raises:
        NotPositiveDefiniteError: if some matrix has no factor.
    """
    return cholesky(matrix.flip(-1, -2), 0.0).flip(-1, -2)


def half_solve(
    tril: Float[Tensor, "*#B M M"], right: Float[Tensor, "*#B M R"], *, transposed: bool = False
) -> Float[Tensor, "*C M R"]:
    r""":math:`L^{-1} R`, or :math:`L^{-\top} R`, by one substitution.

    The first whitens: the columns of :math:`L^{-1} R` have the dot products :math:`R^\top A^{-1} R`. The second after
    the first is :func:`factor_solve`, for callers that need both.
    """
    if transposed:
        return torch.linalg.solve_triangular(tril.mT, right, upper=True)
    return torch.linalg.solve_triangular(tril, right, upper=False)


def factor_solve(tril: Float[Tensor, "*#B M M"], right: Float[Tensor, "*#B M R"]) -> Float[Tensor, "*C M R"]:
    r""":math:`A^{-1} R`, given the factor of A."""
    return torch.cholesky_solve(right, tril)


def factor_inverse(tril: Float[Tensor, "*B M M"]) -> Float[Tensor, "*B M M"]:
    r""":math:`A^{-1}`, given the factor of A."""
    return torch.cholesky_inverse(tril)


def factor_log_det(tril: Float[Tensor, "*B M M"]) -> Float[Tensor, "*B"]:
    r""":math:`\log |A|`, given the factor of A."""
    return 2 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def add_diagonal(matrix: Float[Tensor, "*#B M M"], diagonal: Float[Tensor, "*#B M"]) -> Float[Tensor, "*C M M"]:
    """The matrix plus a diagonal one."""
    return matrix + torch.diag_embed(diagonal)


def _with_nugget(cov: Tensor, jitter: float) -> Tensor:
    if torch.is_grad_enabled():
        return add_diagonal(cov, cov.diagonal(dim1=-2, dim2=-1) * jitter)
    system = cov.clone()
    system.diagonal(dim1=-2, dim2=-1).mul_(1 + jitter)
    return system


def _escalated(system: Tensor) -> Tensor:
    tril, info = torch.linalg.cholesky_ex(system)
    if not info.any():
        return tril
    with torch.no_grad():
        _, extra = factorize(system.detach())
    more = cast(Tensor, extra)[..., None].expand(system.shape[:-1])
    return torch.linalg.cholesky(add_diagonal(system, more))


def factorize(system: Float[Tensor, "*B M M"]) -> tuple[Float[Tensor, "*B M M"], Float[Tensor, "*B"] | None]:
    """Cholesky factors, and the extra nuggets of the members that failed (None: no member failed)."""
    tril, info = paneled_cholesky(system)
    failed = info > 0
    if not failed.any():
        return tril, None
    scale = system.diagonal(dim1=-2, dim2=-1).mean(-1)
    extra = torch.zeros_like(scale)
    for step in ESCALATION:
        extra[failed] = step * scale[failed]
        retry = system[failed]
        retry.diagonal(dim1=-2, dim2=-1).add_(extra[failed][:, None])
        tril[failed], info = paneled_cholesky(retry)
        again = torch.zeros_like(failed)
        again[failed] = info > 0
        count, failed = int((extra > 0).sum()), again
        if not failed.any():
            if not are_quiet():
                warn_of_nuggets(count, step, system.dtype)
            return tril, extra
    raise indefinite(str(int(failed.sum())), system.shape[-1], system.dtype)


def paneled_cholesky(system: Float[Tensor, "*B M M"]) -> tuple[Float[Tensor, "*B M M"], Int[Tensor, "*B"]]:
    """Cholesky factors of a batch, and LAPACK's info numbers: positive where the factorization failed.

    Sizes at which LAPACK is slow for batches are factorized here, by batched products on the transpose, whose rows are
    contiguous: the contributions of the panels above are subtracted from each panel of rows, which is then multiplied
    by the inverse of its triangle.
    """
    size = system.shape[-1]
    if system.device.type != "cpu" or size not in _PANELED:
        return torch.linalg.cholesky_ex(system)
    triu, info = torch.zeros_like(system), system.new_zeros(system.shape[:-2], dtype=torch.int32)
    for start in range(0, size, _PANEL):
        stop = min(start + _PANEL, size)
        panel = system[..., start:stop, start:]
        if start:
            panel = panel - triu[..., :start, start:stop].mT @ triu[..., :start, start:]
        tril, failed = torch.linalg.cholesky_ex(panel[..., : stop - start])
        eye = torch.eye(stop - start, dtype=system.dtype, device=system.device)
        triu[..., start:stop, start:stop] = tril.mT
        triu[..., start:stop, stop:] = half_solve(tril, eye) @ panel[..., stop - start :]
        info |= failed
    return triu.mT, info
