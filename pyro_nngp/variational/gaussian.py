"""Gaussian variational families: one row of parameters per point, or one dense Cholesky factor for all of them.

Cost: a batch of :class:`LocalGaussian` reads its rows only. With ``sparse_grad`` the gradients are sparse too,
so that :class:`~pyro_nngp.inference.RowAdam` spends O(batch) per step whatever the number of points. Every operation of
:class:`DenseGaussian` is O(M^2) per latent function.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, register_kl

from pyro_nngp._checks import check_positive, check_tensor, fail
from pyro_nngp.distributed.world import Route
from pyro_nngp.distributions import NNGP, SparseCholeskyNormal
from pyro_nngp.hyperparameters import GPModule
from pyro_nngp.hyperparameters.reading import parameter, parameter_site
from pyro_nngp.linalg import cholesky, in_blocks
from pyro_nngp.neighbors.table import distinct_rows
from pyro_nngp.rows import Part
from pyro_nngp.variational.factors import prior_factor
from pyro_nngp.variational.family import Family
from pyro_nngp.variational.natural_gradient import variational_optimum


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
    def append_tables(self, other: "LocalTables") -> None:
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


class GivenGaussian(Family):
    """q(u) at some points as another family gave it; the others are not known here.

    Args:
        q: at these points, with their numbers among all.
    """

    def __init__(self, q: SparseCholeskyNormal) -> None:
        super().__init__()
        self._q = q

    def at_rows(self, given: Any, rows: Int[Tensor, " U"] | None = None) -> SparseCholeskyNormal:
        q = self._q
        if rows is None:
            return q
        parts = q.loc[..., rows], q.scale[..., rows], q.weights[..., rows, :], q.pattern[rows]
        return SparseCholeskyNormal(*parts, None if q.rows is None else q.rows[rows])


class LocalGaussian(LocalTables, Family):
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

    pattern: Any

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
        self._columns: Tensor | None = None  # numbers of the columns, on one of several processes
        if pattern is not None:
            self.weights = nn.Parameter(self.loc.new_zeros(num_points, (num_latents or 1) * pattern.shape[1]))

    def distribution(
        self,
        rows: Int[Tensor, " U"] | None = None,
        targets: Int[Tensor, " B"] | None = None,
        read: Callable[..., Tensor] = parameter,
    ) -> SparseCholeskyNormal:
        """q at some points (None: all), of batch shape (L,) or (); its log density sums over `targets`.

        Args:
            rows: the points.
            targets: positions among them.
            read: reads a parameter; guides give :func:`~pyro_nngp.hyperparameters.reading.parameter_site`.
        """
        loc, scale = (self._read(read(self, name), rows).mT for name in ("loc", "log_scale"))
        loc, scale = loc * self.unit, scale.exp() * self.unit
        weights, pattern = None, None
        if self.pattern is not None:
            relative = self._read(read(self, "weights"), rows).unflatten(-1, (loc.shape[0], -1)).movedim(0, -2)
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

    can_solve = True

    def at_rows(self, given: Any, rows: Int[Tensor, " U"] | None = None) -> SparseCholeskyNormal:
        return self.distribution(rows)

    def at_sets(self, sets: Int[Tensor, "B H"], read: Callable[..., Tensor] = parameter) -> Distribution:
        """q of the values at each of several sets of points; `read` as in :meth:`distribution`."""
        rows, positions = distinct_rows(sets)
        q = self.distribution(rows, read=read)
        return dist.Normal(q.loc[..., positions], q.scale[..., positions]).to_event(1)

    def at_batch(self, given: Any, prior: NNGP) -> SparseCholeskyNormal:
        return self.distribution(prior.batch.rows, prior.batch.targets, parameter_site)

    @torch.no_grad()
    def solve(self, read: Callable[[], Any], max_steps: int = 100, tolerance: float = 1e-3) -> None:
        """Put q at its optimum for the present hyperparameters, by natural-gradient steps; see :class:`Family`."""
        given = read()
        rows, bound = given.rows, given.bound
        prior = prior_factor(bound.covariance, given.graph, bound.jitter)
        likelihood, mean = rows.likelihood(bound, rows.own), rows.mean(bound, rows.own)
        q, y = self.distribution(rows.every), rows.targets(rows.every)
        self.assign(variational_optimum(likelihood, y, mean, prior, q, max_steps, tolerance, total=rows.total))
        if not rows.is_whole:
            for table in self.parameters():
                table.data = rows.complete(given.graph, table.detach()[: rows.num_data].clone())

    @property
    def needs_neighborhoods(self) -> bool:  # type: ignore[override]
        """With a factor."""
        return bool(self._buffers["pattern"] is not None)

    def neighbors_changed(self, given: Any) -> None:
        """Change the pattern to the nearest neighbors of the graph; entries of columns in both stay."""
        if hasattr(given.graph, "halo"):
            self._halo_changed(given)
        elif self.pattern is not None:
            self.change_pattern(given.graph.neighbors[:, : self.pattern.shape[1]])

    def _halo_changed(self, given: Any) -> None:
        graph, count = given.graph, given.rows.num_data
        if self.pattern is not None:
            width = self.pattern.shape[1]
            columns = graph.halo.numbers_at(graph.neighbors[:count, :width])
            if self._columns is not None:
                self.move_entries(self._columns, columns)
            self._columns, self.pattern = columns, graph.neighbors[:, :width].long()
        for table in self.parameters():
            table.data = given.rows.complete(graph, table.detach()[:count].clone())

    def restart(self, given: Any) -> None:
        graph, pattern = given.graph, self.pattern
        size = len(self.loc) if graph is None else graph.num_points
        if pattern is not None:
            pattern = graph.neighbors[:, : pattern.shape[1]].clone()
        start = LocalGaussian(size, pattern, self.num_latents, unit=self.unit, like=self.loc)
        self.pattern = pattern
        for name, table in start.named_parameters():
            setattr(self, name, table)

    def distributed(self, given: Any) -> None:
        for table in self.parameters():
            table.data = table.detach()[:1].expand(given.rows.num_data, -1)
        self._halo_changed(given)

    def append(self, given: Any, count: int, loc: Float[Tensor, "*L P"], variance: Float[Tensor, "*L P"]) -> None:
        graph, rows = given.graph, given.rows
        pattern = None if self.pattern is None else graph.neighbors[-count:, : self.pattern.shape[1]].clone()
        new = LocalGaussian(count, pattern, self.num_latents, unit=self.unit, like=graph.x)
        weights = None if pattern is None else loc.new_zeros(*loc.shape, pattern.shape[1])
        mean = given.bound.mean(rows.x[-count:])
        new.assign(SparseCholeskyNormal(loc - mean, variance.sqrt(), weights, pattern))
        self.append_tables(new)

    def at_part(self, given: Any, part: Part, x_new: Tensor | None = None, num_neighbors: int = 0) -> Part:
        return super().at_part(given, part) if self.pattern is None else with_neighborhoods(self, given, part)

    def with_tables(self, tables: Mapping[str, Tensor]) -> "LocalGaussian":
        new = self.__class__.__new__(self.__class__)
        parameters = {name: nn.Parameter(rows, requires_grad=False) for name, rows in tables.items()}
        new.__dict__.update(self.__dict__, _parameters=parameters)
        return new

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

    Other arguments and errors are as in :class:`LocalGaussian`, without a pattern.
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

    def distribution(self, read: Callable[..., Tensor] = parameter) -> Distribution:
        """q at all points, batch shape (L,) or (), event shape (M,); `read` as in :class:`LocalGaussian`."""
        loc, scale = read(self, "loc").mT * self.unit, read(self, "log_scale").mT.exp() * self.unit
        tril = None if self.mean_field else read(self, "weights").tril(-1) * self.unit + torch.diag_embed(scale)
        if self.num_latents is None:
            loc, scale, tril = loc[0], scale[0], None if tril is None else tril[0]
        return dist.Normal(loc, scale).to_event(1) if tril is None else dist.MultivariateNormal(loc, scale_tril=tril)

    def at_sets(self, sets: Int[Tensor, "B H"], read: Callable[..., Tensor] = parameter) -> Distribution:
        """q of the values at each of several sets of points; O(M min(M, B H)^2 + B H^3)."""
        q, (rows, positions) = self.distribution(read), distinct_rows(sets)
        root = factor(q)[..., rows, :]
        cov = (root @ root.mT)[..., positions[:, :, None], positions[:, None, :]]
        return dist.MultivariateNormal(q.mean[..., sets], scale_tril=cholesky(cov, 0.0, escalate=True))

    @torch.no_grad()
    def restart(self, given: Any) -> None:
        """Put q at N(0, unit^2), the prior of whitened values."""
        scale = torch.full_like(self.loc, self.unit).mT
        self.assign(dist.Normal(torch.zeros_like(scale), scale).to_event(1))

    @torch.no_grad()
    def assign(self, q: Distribution) -> None:
        """Set the parameters so that :meth:`distribution` is `q`; a mean-field guide takes the diagonal of its R."""
        loc, tril = q.mean / self.unit, factor(q) / self.unit
        self.loc.copy_(loc.reshape(self.loc.mT.shape).mT)
        self.log_scale.copy_(tril.diagonal(dim1=-2, dim2=-1).log().reshape(self.loc.mT.shape).mT)
        if not self.mean_field:
            self.weights.copy_(tril.tril(-1).reshape(self.weights.shape))


def with_neighborhoods(family: Family, given: Any, part: Part) -> Part:
    """A part with q as a family computes it on the process that has each row; all processes must call it."""
    if part.numbers is None:
        return part._replace(q=family)
    data, graph, device = given.rows.shard, given.graph, given.rows.x.device
    route = Route(data.world, data.owners(part.numbers))
    arrived = route.forward(part.numbers) - data.first
    asked, places = torch.cat([arrived, arrived.new_zeros(1)]).unique(return_inverse=True)  # at least one
    q = family.at_rows(given, asked.to(device))
    pattern = graph.halo.numbers_at(q.pattern)
    parts = q.loc.movedim(-1, 0), q.scale.movedim(-1, 0), q.weights.movedim(-2, 0), pattern
    loc, scale, weights, pattern = (route.back(value.cpu()[places[:-1]]).to(device) for value in parts)
    parts = loc.movedim(0, -1), scale.movedim(0, -1), weights.movedim(0, -2), pattern
    return part._replace(q=GivenGaussian(SparseCholeskyNormal(*parts, part.numbers.to(device))))


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
        a: coefficients; leading dimensions broadcast against q.

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
    check_positive(where, "scale", scale, "It is the initial standard deviation.")
    if loc is not None:
        check_tensor(where, "loc", loc)
    like, shape = torch.empty(0) if like is None else like, (num_points, num_latents or 1)
    if loc is not None and loc.dim() == 1:
        loc = loc[:, None]
    if loc is not None and loc.shape != shape:
        fail(where, "loc", f"of shape {shape}", tuple(loc.shape), "One initial mean per point and latent.")
    start = like.new_zeros(shape) if loc is None else loc.detach().clone().to(like)
    return nn.Parameter(start / unit), nn.Parameter(like.new_full(shape, scale / unit).log())
