r"""The covariance factor that maximises an ELBO of Gaussian sites, in closed form for any sparsity pattern.

For :math:`q(u) = N(m, R R^\top)` and the posterior precision :math:`P = \Lambda + \mathrm{diag}\,\tau`, prior and
sites together, the ELBO depends on R through

.. math:: \sum_c \log R_{cc} - \tfrac12 \mathrm{tr}(P R R^\top)
   = \sum_c \big[ \log R_{cc} - \tfrac12 r_c^\top P_{S_c S_c} r_c \big],

where :math:`r_c` is column c of R on its support :math:`S_c`: c and the rows whose pattern names c. Columns do not
meet, and each has its optimum at

.. math:: r_c = P_{S_c S_c}^{-1} e_c \big/ \sqrt{(P_{S_c S_c}^{-1})_{cc}} = L^{-\top} e_c
   \quad\text{for } P_{S_c S_c} = L L^\top \text{ with c in the last place.}

An empty pattern gives the mean-field optimum :math:`R_{cc} = P_{cc}^{-1/2}`, a full one the exact posterior. It is
the counterpart, for covariances, of the sparse precision factors of Schäfer, Katzfuss and Owhadi (2021); as a
preconditioner it is the factorised sparse approximate inverse of Kolotilina and Yeremin (1993).

Cost: :math:`O(\sum_c |S_c|^3)`, about 6 N K^3 for a random ordering; O(N K^2) memory for the rows of the precision.
Symbols: N points, K neighbors, S the largest support of a group of columns, L latent functions.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.precision import PriorPrecision

_GROUP_ENTRIES = 2**22  # of the systems factorised at once
_SIZE_STEP = 1.2  # supports padded to one size differ by this factor at most


class FactorOptimum:
    """Optimal factors on one pattern, for one prior and any number of site precisions.

    Args:
        prior: precision of the prior.
        pattern: columns of R beside the diagonal in each row, -1 padded.
    """

    def __init__(self, prior: PriorPrecision, pattern: Int[Tensor, "N P"]) -> None:
        self._precision = prior.sparse()
        self._pattern_shape = pattern.shape
        self._groups = _groups(pattern)

    def __call__(self, tau: Float[Tensor, "*L N"]) -> tuple[Float[Tensor, "*L N"], Float[Tensor, "*L N P"]]:
        """Diagonal and off-diagonal entries of R for the precisions of the sites; in double precision.

        Args:
            tau: positive precisions of the Gaussian sites, one set per leading index.

        Returns:
            Diagonal of R, and its entries at the pattern, 0 where that is padded.
        """
        tau = tau.double()
        scale, weights = torch.empty_like(tau), tau.new_zeros(*tau.shape, self._pattern_shape[1])
        entries = weights.flatten(-2)
        for members, slots in self._groups:
            size = members.shape[1]
            row, column = np.tril_indices(size)
            lower = torch.from_numpy(self._precision[members[:, row].ravel(), members[:, column].ravel()])
            support, places = (torch.from_numpy(table).to(tau.device) for table in (members, slots))
            system = tau.new_zeros(len(support), size, size)
            system[:, row, column] = lower.to(tau.device).view(len(support), -1)
            system[:, column, row] = system[:, row, column]
            real = torch.cat([places >= 0, support[:, -1:] >= 0], -1)
            system = system * (real[:, :, None] & real[:, None, :])
            added = torch.where(real, tau[..., support], 1.0)  # a padded row is one of the identity
            tril = torch.linalg.cholesky(system + torch.diag_embed(added))
            last = torch.eye(size, dtype=tau.dtype, device=tau.device)[:, -1:].expand(*tril.shape[:-1], 1)
            found = torch.linalg.solve_triangular(tril.mT, last, upper=True)[..., 0]
            scale[..., support[:, -1]] = found[..., -1]
            entries[..., places[real[:, :-1]]] = found[..., :-1][..., real[:, :-1]]
        return scale, entries.unflatten(-1, self._pattern_shape)


def _groups(pattern: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """Columns in groups of supports of about one size.

    For each group the supports (C, S), their own column last, row 0 standing where they are padded; and the places
    (C, S - 1) in the flattened pattern that their other entries belong to, -1 where they are padded.
    """
    n, k = pattern.shape
    columns = pattern.cpu().numpy().ravel()
    places = np.argsort(columns, kind="stable")[np.count_nonzero(columns < 0) :]  # by column
    count = np.bincount(columns[places], minlength=n)
    start = count.cumsum() - count
    by_size = np.argsort(count, kind="stable")
    sizes = count[by_size] + 1
    kind = np.ceil(np.log(sizes) / np.log(_SIZE_STEP)).astype(np.int64)
    part = (sizes.astype(np.float64) ** 2).cumsum() // _GROUP_ENTRIES
    ends = np.flatnonzero((np.diff(kind) != 0) | (np.diff(part) != 0)) + 1
    groups = []
    for group in np.split(by_size, ends):
        width = count[group].max()
        offset = np.arange(width)
        real = offset < count[group][:, None]
        slots = np.full(real.shape, -1)
        slots[real] = places[(start[group][:, None] + offset)[real]]
        members = np.where(real, slots // max(k, 1), 0)
        groups.append((np.concatenate([members, group[:, None]], 1), slots))
    return groups
