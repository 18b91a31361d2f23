r"""The covariance factor that maximizes an ELBO of Gaussian sites, in closed form for any sparsity pattern.

For :math:`q(u) = N(m, R R^\top)` and the posterior precision :math:`P = \Lambda + \mathrm{diag}\,\tau`, prior and
sites together, the ELBO depends on R through

.. math:: \sum_c \log R_{cc} - \tfrac12 \mathrm{tr}(P R R^\top)
   = \sum_c \big[ \log R_{cc} - \tfrac12 r_c^\top P_{S_c S_c} r_c \big],

where :math:`r_c` is column c of R on its support :math:`S_c`: c and the rows whose pattern contains c. The columns
separate, and each has its optimum at

.. math:: r_c = P_{S_c S_c}^{-1} e_c \big/ \sqrt{(P_{S_c S_c}^{-1})_{cc}} = L^{-\top} e_c
   \quad\text{for } P_{S_c S_c} = L L^\top \text{ with c in the last place.}

An empty pattern gives the mean-field optimum :math:`R_{cc} = P_{cc}^{-1/2}`, a full one the exact posterior. It is
the counterpart, for covariances, of the sparse precision factors of Schäfer, Katzfuss and Owhadi (2021); as a
preconditioner it is the factorized sparse approximate inverse of Kolotilina and Yeremin (1993).

Columns with more than 256 entries, such as the column of the first of many points at one place, come from conjugate
gradients on the sparse :math:`P_{S_c S_c} x = e_c` with :math:`r_c = x / \sqrt{x_c}`. The value of the bound is then
:math:`\tfrac12 \log x_c`, which grows with every iteration by a known amount (Strakoš and Tichý 2002); iterations
end when the last eight together gain less than 1e-6 nats.

Cost: :math:`O(\sum_c |S_c|^3)`, about 6 N K^3 for a random ordering, less where columns are long. Memory: O(N K), and a
block of rows of the precision at a time. The columns are processed in blocks whose rows of the precision have at most
2^27 entries by an upper bound (a third is typical, 12 bytes each). Up to about 300,000 points with K = 20 that is
one block, which is kept between calls; rows that several blocks need are computed several times. Symbols: N points, K
neighbors, S the largest support of a group of columns, L latent functions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor

from pyro_nngp._checks import warn
from pyro_nngp.linalg import VecchiaFactor, add_diagonal, cholesky, half_solve
from pyro_nngp.linalg.conjugate_gradients import conjugate_gradients

_SIZE_STEP = 1.2  # supports padded to one size differ at most by this factor
_MISSING = 2e-6  # energy of a long column, relative to the solution: 1e-6 nats


class FactorLimits(NamedTuple):
    """Block sizes of :class:`FactorOptimum`, and which columns count as long; the results agree.

    Attributes:
        group_entries: entries of the systems factorized at once.
        batch_entries: entries of the systems filled at once; more entries share more rows of the precision.
        lookups: entries of the precision looked up at once.
        block_entries: upper bound on the entries of the precision kept at once.
        long: entries of a column from which on conjugate gradients are used.
        max_iterations: largest number of iterations of conjugate gradients.
    """

    group_entries: int = 2**21
    batch_entries: int = 2**25
    lookups: int = 2**22
    block_entries: int = 2**27
    long: int = 256
    max_iterations: int = 1000


class FactorOptimum:
    """Optimal factors on one pattern, for one prior and any number of site precisions.

    Args:
        prior: (I - A, V) of the prior.
        pattern: columns of R beside the diagonal in each row, -1 padded.
        limits: block sizes; None takes the quickest.
        num_columns: compute so many columns, the first ones, of which alone the pattern may have entries; None is N.
    """

    def __init__(
        self,
        prior: VecchiaFactor,
        pattern: Int[Tensor, "N P"],
        limits: FactorLimits | None = None,
        num_columns: int | None = None,
    ) -> None:
        self._prior, self._limits = prior, limits or FactorLimits()
        self._supports = _Supports(pattern.cpu().numpy(), self._limits, num_columns)
        self._blocks = list(self._supports.blocks(prior.row_bounds()))
        self._kept = prior.sparse(self._blocks[0][1]) if len(self._blocks) == 1 else None

    def __call__(self, tau: Float[Tensor, "*L N"]) -> tuple[Float[Tensor, "*L N"], Float[Tensor, "*L N P"]]:
        """Diagonal and off-diagonal entries of R for the precisions of the sites; in double precision.

        Args:
            tau: positive precisions of the Gaussian sites, one set per leading index.

        Returns:
            Diagonal of R, and its entries at the pattern, 0 where that is padded, and without the other columns.

        Columns for which 1,000 iterations of conjugate gradients do not suffice are left unfinished, with a warning.
        """
        tau = tau.double().contiguous()
        scale, weights = torch.zeros_like(tau), tau.new_zeros(*tau.shape, self._supports.width)
        entries, unfinished = weights.view(*tau.shape[:-1], -1), 0
        for columns, rows in self._blocks:
            precision = self._prior.sparse(rows) if self._kept is None else self._kept
            short, long = self._supports.by_length(columns)
            for systems, members, slots in self._supports.systems(short, precision, rows):
                _by_cholesky(systems, members, slots, tau, scale, entries)
            for column in long.tolist():
                unfinished += not _by_gradients(
                    precision, rows, *self._supports.one(column), tau, scale, entries, self._limits.max_iterations
                )
        if unfinished:
            most = self._limits.max_iterations
            warn(
                f"FactorOptimum: {unfinished} of {len(self._prior)} columns stopped after {most} iterations of "
                "conjugate gradients, short of their optimum. Their rows of q(u) are valid, but not the best."
            )
        return scale, weights


def _by_cholesky(
    systems: np.ndarray, members: np.ndarray, slots: np.ndarray, tau: Tensor, scale: Tensor, entries: Tensor
) -> None:
    """Compute the columns of one group: supports (C, S), each column last, and places (C, S - 1) in `entries`.

    Only the lower triangles of the systems (C, S, S) are read; where the support is padded they are zero.
    """
    support, places, lower = (torch.from_numpy(table).to(tau.device) for table in (members, slots, systems))
    real = torch.cat([places >= 0, support[:, -1:] >= 0], -1)
    added = torch.where(real, tau[..., support], 1.0)  # a padded row becomes a row of the identity
    tril = cholesky(add_diagonal(lower, added), 0.0)
    last = torch.eye(lower.shape[-1], dtype=tau.dtype, device=tau.device)[:, -1:].expand(*tril.shape[:-1], 1)
    solved = half_solve(tril, last, transposed=True)[..., 0]
    scale[..., support[:, -1]] = solved[..., -1]
    entries[..., places[real[:, :-1]]] = solved[..., :-1][..., real[:, :-1]]


def _by_gradients(
    precision: csr_array,
    rows: np.ndarray,
    members: np.ndarray,
    slots: np.ndarray,
    tau: Tensor,
    scale: Tensor,
    entries: Tensor,
    max_iterations: int,
) -> bool:
    """Compute one column with support (S,), itself last, and places (S - 1,); return whether iterations sufficed."""
    prior, added = precision[np.searchsorted(rows, members)][:, members], tau[..., members].cpu()
    right = torch.zeros_like(added)
    right[..., -1] = 1.0

    def product(z: Tensor) -> Tensor:
        image = prior @ z.reshape(-1, len(members)).numpy().T
        return torch.from_numpy(image.T).reshape(z.shape) + added * z

    diagonal = torch.from_numpy(prior.diagonal()) + added
    x, left = conjugate_gradients(product, right, None, diagonal, _MISSING, max_iterations, energy=True)
    solved = (x / x[..., -1:].sqrt()).to(tau)
    scale[..., members[-1]] = solved[..., -1]
    entries[..., slots] = solved[..., :-1]
    return left <= _MISSING


class _Supports:
    """The supports of the columns of R, and the places of their entries in the pattern."""

    def __init__(self, pattern: np.ndarray, limits: FactorLimits, num_columns: int | None) -> None:
        self._limits = limits
        self._num_points, self.width = pattern.shape
        self._num_columns = self._num_points if num_columns is None else num_columns
        self._column = pattern.ravel()  # column of each place
        self._places = np.argsort(self._column, kind="stable")[np.count_nonzero(self._column < 0) :]  # by column
        self._members = self._places // max(self.width, 1)
        self._count = np.bincount(self._column[self._places], minlength=self._num_points)
        self._start = self._count.cumsum() - self._count
        self._rank = np.zeros_like(self._column)  # rank of each place in its column
        self._rank[self._places] = np.arange(len(self._places)) - np.repeat(self._start, self._count)

    def one(self, column: int) -> tuple[np.ndarray, np.ndarray]:
        """Support (S,) of a column, itself last, and places (S - 1,) of the others."""
        entries = slice(self._start[column], self._start[column] + self._count[column])
        return np.append(self._members[entries], column), self._places[entries]

    def by_length(self, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Split some columns into short ones, sorted by length, and long ones."""
        columns = columns[np.argsort(self._count[columns], kind="stable")]
        first = np.searchsorted(self._count[columns], self._limits.long)
        return columns[:first], columns[first:]

    def blocks(self, row_bounds: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Columns in blocks with the sorted union of their supports; the row bounds of a block have a bounded sum."""
        columns = np.arange(self._num_columns)
        if row_bounds.sum() > self._limits.block_entries:  # puts near columns into one block
            inside = np.ones(len(self._places), np.int8), self._members, np.append(self._start, len(self._places))
            order = reverse_cuthill_mckee(csr_array(inside, shape=2 * (self._num_points,))).astype(np.int64)
            columns = order[order < self._num_columns]
        waiting = [columns]
        while waiting:
            columns = waiting.pop()
            rows = np.union1d(columns, self._members[_runs(self._start[columns], self._count[columns])])
            if row_bounds[rows].sum() > self._limits.block_entries and len(columns) > 1:
                waiting += np.array_split(columns, 2)
            else:
                yield columns, rows

    def systems(
        self, columns: np.ndarray, precision: csr_array, rows: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Groups of columns, given sorted by length, whose supports are of similar size.

        For each group the lower triangles of the prior's precision on the supports, (C, S, S); the supports (C, S),
        each column last and repeated as padding; and the places (C, S - 1) in the flattened pattern
        that their other entries belong to, -1 where they are padded. A batch of groups is filled row by row of the
        precision, so that each row is in the processor's cache while it is read.
        """
        groups = self._groups(columns)
        batch = (
            np.array([len(group) * (self._count[group[-1]] + 1) ** 2 for group in groups]).cumsum()
            // self._limits.batch_entries
        )
        for number in np.unique(batch):
            together = [groups[i] for i in np.flatnonzero(batch == number)]
            for group, filled in zip(together, self._filled(together, precision, rows), strict=True):
                real = np.arange(filled.shape[1] - 1) < self._count[group][:, None]
                entries = _runs(self._start[group], self._count[group])
                slots, members = np.full(real.shape, -1), np.repeat(group[:, None], filled.shape[1], 1)
                slots[real], members[:, :-1][real] = self._places[entries], self._members[entries]
                yield filled, members, slots

    def _groups(self, columns: np.ndarray) -> list[np.ndarray]:
        if not len(columns):
            return []
        sizes = self._count[columns] + 1
        kind = np.ceil(np.log(sizes) / np.log(_SIZE_STEP)).astype(np.int64)
        part = (sizes.astype(np.float64) ** 2).cumsum() // self._limits.group_entries
        return np.split(columns, np.flatnonzero((np.diff(kind) != 0) | (np.diff(part) != 0)) + 1)

    def _filled(self, groups: list[np.ndarray], precision: csr_array, rows: np.ndarray) -> list[np.ndarray]:
        """For each group its systems (C, S, S), lower triangles."""
        columns = np.concatenate(groups)
        lengths = np.array([len(group) for group in groups])
        size = np.repeat([self._count[group[-1]] + 1 for group in groups], lengths)
        base = np.append(0, (size**2).cumsum())
        filled = np.zeros(base[-1])
        number = np.full(self._num_points + 1, -1)  # position among those requested; last: "no column"
        number[columns] = np.arange(len(columns))

        places = np.flatnonzero(number[self._column] >= 0)  # row by row
        asked, rank = number[self._column[places]], self._rank[places]
        wanted = [(places // max(self.width, 1), asked, rank, rank + 1)]  # each row of a triangle except the last
        by_row = columns.argsort()
        wanted += [(columns[by_row], by_row, size[by_row] - 1, self._count[columns[by_row]])]
        for row, asked, rank, count in wanted:
            ends = np.flatnonzero(np.diff(count.cumsum() // self._limits.lookups)) + 1
            for r, i, k, n in zip(*(np.split(part, ends) for part in (row, asked, rank, count)), strict=True):
                if n.any():
                    column = self._members[_runs(self._start[columns[i]], n)]
                    filled[_runs(base[i] + k * size[i], n)] = precision[np.repeat(np.searchsorted(rows, r), n), column]
        filled[base[1:] - 1] = precision[np.searchsorted(rows, columns), columns]
        ends = lengths.cumsum()
        parts = zip(np.split(filled, base[ends[:-1]]), lengths, size[ends - 1], strict=True)
        return [part.reshape(count, width, width) for part, count, width in parts]


def _runs(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The numbers start[0], start[0] + 1, .. (count[0] of them), start[1], .. ."""
    return np.repeat(start - count.cumsum() + count, count) + np.arange(count.sum())
