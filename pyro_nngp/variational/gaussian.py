"""Gaussian variational families: one row of parameters per point, or one dense Cholesky factor for all of them.

Cost: a batch of :class:`LocalGaussian` reads its own rows only. With ``sparse_grad`` the gradients are sparse too,
so that :class:`~pyro_nngp.inference.RowAdam` spends O(batch) per step whatever the number of points. Every operation of
:class:`DenseGaussian` is O(M^2) per latent function.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, register_kl

from pyro_nngp._checks import fail
from pyro_nngp.distributions import SparseCholeskyNormal
from pyro_nngp.hyperparameters import GPModule, pyro_entry
from pyro_nngp.linalg import in_blocks
from pyro_nngp.neighbors import NeighborGraph


class Read(NamedTuple):
    """Rows that were read from a table, and a leaf of autograd's graph with their values."""

    table: Tensor
    rows: Tensor
    values: Tensor


_READS: ContextVar[list[Read] | None] = ContextVar("reads", default=None)


@contextmanager
def reads_as_leaves() -> Iterator[list[Read]]:
    """Within this block, in this thread, rows of tables are leaves, which the list holds: gradients are by them."""
    reads: list[Read] = []
    token = _READS.set(reads)
    try:
        yield reads
    finally:
        _READS.reset(token)


class LocalTables(GPModule):
    """Base of families with parameters (M, L), one row per point, that are read a batch at a time.

    Attributes:
        sparse_grad: whether gradients are sparse; :func:`~pyro_nngp.inference.fit` sets it while it trains on batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sparse_grad = False

    @torch.no_grad()
    def append(self, other: "LocalTables") -> None:
        """Append the rows of another table of the same kind, in place; the parameters become new ones."""
        for name, rows in list(other.named_parameters(recurse=False)):
            setattr(self, name, nn.Parameter(torch.cat([getattr(self, name), rows])))
        for name, rows in list(other.named_buffers(recurse=False)):
            setattr(self, name, torch.cat([getattr(self, name), rows]))

    def row_tables(self) -> dict[str, Tensor]:
        """The parameters, with a row for each point."""
        return dict(self.named_parameters(recurse=False))

    def _read(self, table: Tensor, rows: Tensor | None) -> Tensor:
        if rows is None:
            return table
        reads = _READS.get()
        if reads is None:
            return F.embedding(rows, table, sparse=self.sparse_grad)
        reads.append(Read(table, rows, table.detach().index_select(0, rows).requires_grad_()))
        return reads[-1].values


class GivenGaussian(nn.Module):
    """q(u) at some points as another family gave it; the others are not known here.

    Args:
        q: at these points, with their numbers among all.
    """

    def __init__(self, q: SparseCholeskyNormal) -> None:
        super().__init__()
        self._q = q

    def distribution(self, rows: Int[Tensor, " U"] | None = None) -> SparseCholeskyNormal:
        """q at some of the points (None: all)."""
        q = self._q
        if rows is None:
            return q
        parts = q.loc[..., rows], q.scale[..., rows], q.weights[..., rows, :], q.pattern[rows]
        return SparseCholeskyNormal(*parts, None if q.rows is None else q.rows[rows])


class LocalGaussian(LocalTables):
    r"""q(u) = N(m, R R^T) for L independent latent functions at M points; R diagonal, or sparse on a pattern.

    Off-diagonal entries are parameters relative to the diagonal, :math:`R_{jk} = R_{jj} W_{jk}`, so that one learning
    rate suits large and small variances alike.

    Args:
        num_points: M.
        pattern: columns of R beside the diagonal, (M, K), -1 padded; None for a mean-field family.
        num_latents: L; None is one function, without a batch dimension.
        loc: initial mean, (M, L), or (M,) for one function; None is zero.
        scale: initial standard deviation, positive; None is a tenth of `unit`.
        unit: scale of the values and of gradient steps; a method passes the spread of its data.
        like: tensor whose dtype and device the parameters take.

    Raises:
        ValueError: if `scale` is not positive or a shape is wrong.
    """

    def __init__(
        self,
        num_points: int,
        pattern: Int[Tensor, "M K"] | None = None,
        num_latents: int | None = None,
        loc: Float[Tensor, "M *L"] | None = None,
        scale: float | None = None,
        unit: float = 1.0,
        like: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_latents, self.unit = num_latents, unit
        self.loc, self.log_scale = _start("LocalGaussian", num_points, num_latents, loc, scale, unit, like)
        self.register_buffer("pattern", pattern)
        if pattern is not None:
            self.weights = nn.Parameter(self.loc.new_zeros(num_points, (num_latents or 1) * pattern.shape[1]))

    @pyro_entry
    def distribution(
        self, rows: Int[Tensor, " U"] | None = None, targets: Int[Tensor, " B"] | None = None
    ) -> SparseCholeskyNormal:
        """q at some points (None: all), of batch shape (L,) or (); its log density sums over `targets`."""
        loc, scale = self._read(self.loc, rows).mT * self.unit, self._read(self.log_scale, rows).mT.exp() * self.unit
        weights, pattern = None, None
        if self.pattern is not None:
            relative = self._read(self.weights, rows).unflatten(-1, (loc.shape[0], -1)).movedim(0, -2)
            weights = relative * scale[..., None]
            pattern = self.pattern if rows is None else self.pattern[rows]
        if self.num_latents is None:
            loc, scale, weights = loc[0], scale[0], None if weights is None else weights[0]
        return SparseCholeskyNormal(loc, scale, weights, pattern, rows, targets)

    @torch.no_grad()
    def assign(self, q: SparseCholeskyNormal) -> None:
        """Set the parameters so that :meth:`distribution` is `q`, which has the same pattern, at its points.

        These are all points, or the first ones.
        """
        count = q.loc.shape[-1]
        loc, scale = (part.detach().clone().reshape(-1, count) / self.unit for part in (q.loc, q.scale))
        self.loc[:count] = loc.mT
        self.log_scale[:count] = scale.log().mT
        if self.pattern is not None:
            relative = q.weights.reshape(*scale.shape, -1) / (scale[..., None] * self.unit)
            self.weights[:count] = relative.movedim(0, -2).flatten(-2)

    def follow(self, graph: NeighborGraph) -> None:
        """Change the pattern to the nearest neighbors in a refreshed graph; see :meth:`change_pattern`."""
        if self.pattern is not None:
            self.change_pattern(graph.neighbors[:, : self.pattern.shape[1]])

    @torch.no_grad()
    def change_pattern(self, pattern: Int[Tensor, "M K"]) -> None:
        """Change to another pattern of the same width: columns in both keep their entries, new ones start at 0."""
        self.move_entries(self.pattern, pattern)
        self.pattern.copy_(pattern)

    @torch.no_grad()
    def move_entries(self, before: Int[Tensor, "B K"], after: Int[Tensor, "B K"]) -> None:
        """Move the entries of the first B rows from one pattern to another, as :meth:`change_pattern` does."""
        old = self.weights[: len(after)].unflatten(-1, (self.loc.shape[1], -1))

        def block(part: slice) -> tuple[Tensor]:
            same = (after[part][:, :, None] == before[part][:, None, :]) & (after[part] >= 0)[:, :, None]
            return (torch.einsum("mij,mlj->mli", same.to(old.dtype), old[part]),)

        (new,) = in_blocks(block, len(after), after.shape[1] ** 2)
        self.weights[: len(after)] = new.flatten(-2)


class DenseGaussian(GPModule):
    r"""q(u) = N(m, R R^T) for L independent latent functions at M points; R a dense lower triangle, or diagonal.

    Args:
        mean_field: whether R is diagonal.

    Other arguments and errors are those of :class:`LocalGaussian`, without a pattern.
    """

    def __init__(
        self,
        num_points: int,
        num_latents: int | None = None,
        mean_field: bool = False,
        loc: Float[Tensor, "M *L"] | None = None,
        scale: float | None = None,
        unit: float = 1.0,
        like: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_latents, self.mean_field, self.unit = num_latents, mean_field, unit
        self.loc, self.log_scale = _start("DenseGaussian", num_points, num_latents, loc, scale, unit, like)
        if not mean_field:
            self.weights = nn.Parameter(self.loc.new_zeros(num_latents or 1, num_points, num_points))

    @pyro_entry
    def distribution(self) -> Distribution:
        """q at all points, batch shape (L,) or (), event shape (M,)."""
        loc, scale = self.loc.mT * self.unit, self.log_scale.mT.exp() * self.unit
        tril = None if self.mean_field else self.weights.tril(-1) * self.unit + torch.diag_embed(scale)
        if self.num_latents is None:
            loc, scale, tril = loc[0], scale[0], None if tril is None else tril[0]
        return dist.Normal(loc, scale).to_event(1) if tril is None else dist.MultivariateNormal(loc, scale_tril=tril)

    @torch.no_grad()
    def assign(self, q: Distribution) -> None:
        """Set the parameters so that :meth:`distribution` is `q`; a mean-field guide takes the diagonal of its R."""
        loc, tril = q.mean / self.unit, factor(q) / self.unit
        self.loc.copy_(loc.reshape(self.loc.mT.shape).mT)
        self.log_scale.copy_(tril.diagonal(dim1=-2, dim2=-1).log().reshape(self.loc.mT.shape).mT)
        if not self.mean_field:
            self.weights.copy_(tril.tril(-1).reshape(self.weights.shape))


def factor(q: Distribution) -> Float[Tensor, "*L M M"]:
    """R of a distribution of :class:`DenseGaussian`."""
    return q.scale_tril if isinstance(q, MultivariateNormal) else torch.diag_embed(q.stddev)


def combined(u: Float[Tensor, "*L M"], a: Float[Tensor, "... B M"]) -> Float[Tensor, "... B"]:
    r"""The combinations :math:`a_b^\top u`; leading dimensions broadcast."""
    return u @ a.mT if a.dim() == 2 else (u[..., None, :] @ a.mT)[..., 0, :]


def combined_variance(q: Distribution, a: Float[Tensor, "... B M"]) -> Float[Tensor, "... B"]:
    r"""Variances :math:`\| R^\top a_b \|^2` of the combinations :math:`a_b^\top u` under a :class:`DenseGaussian`.

    Args:
        q: a distribution of :class:`DenseGaussian`.
        a: coefficients; leading dimensions broadcast against those of q.

    Cost: O(B M^2) for a dense factor, O(B M) for a diagonal one.
    """
    if isinstance(q, MultivariateNormal):
        return (a @ q.scale_tril).square().sum(-1)
    return (a.square() @ q.variance[..., None])[..., 0]


def neighbor_variance(
    w: Float[Tensor, "B H"], neighbors: Int[Tensor, "B H"], cov: Float[Tensor, "*L M M"]
) -> Float[Tensor, "*L B"]:
    r"""Variances :math:`w_b^\top S_{n(b) n(b)} w_b` of combinations of a few of M values with covariance S.

    Args:
        w: coefficients.
        neighbors: n(b), indices of the values.
        cov: S, one for each latent function.

    Cost: O(B H^2), in blocks.
    """

    def block(part: slice) -> tuple[Tensor]:
        rows = neighbors[part]
        near = cov[..., rows[:, :, None], rows[:, None, :]]
        return (((near @ w[part][..., None])[..., 0] * w[part]).sum(-1),)

    return in_blocks(block, len(w), neighbors.shape[1] ** 2 * cov[..., 0, 0].numel(), -1)[0]


@register_kl(MultivariateNormal, Independent)
def _kl_dense_independent(q: MultivariateNormal, p: Independent) -> Tensor:
    """The divergence from independent normal values, such as a whitened prior, without a factorization."""
    if not isinstance(p.base_dist, Normal) or p.reinterpreted_batch_ndims != 1:
        raise NotImplementedError("no closed form: known for Normal(...).to_event(1) only")
    tril, scale = q.scale_tril, p.base_dist.scale
    spread = tril.square().sum(-1) + (q.loc - p.base_dist.loc).square()
    return (0.5 * (spread / scale.square() - 1) + scale.log() - tril.diagonal(dim1=-2, dim2=-1).log()).sum(-1)


def _start(
    where: str,
    num_points: int,
    num_latents: int | None,
    loc: Tensor | None,
    scale: float | None,
    unit: float,
    like: Tensor | None,
) -> tuple[nn.Parameter, nn.Parameter]:
    """Initial mean and logarithm of the standard deviation, (M, L), in units."""
    scale = 0.1 * unit if scale is None else scale
    if scale <= 0:
        fail(where, "scale", "> 0", scale, "It is the initial standard deviation.")
    like, shape = torch.empty(0) if like is None else like, (num_points, num_latents or 1)
    if loc is not None and loc.dim() == 1:
        loc = loc[:, None]
    if loc is not None and loc.shape != shape:
        fail(where, "loc", f"of shape {shape}", tuple(loc.shape), "One initial mean per point and latent.")
    start = like.new_zeros(shape) if loc is None else loc.detach().clone().to(like)
    return nn.Parameter(start / unit), nn.Parameter(like.new_full(shape, scale / unit).log())
