r"""Gaussian with a sparse Cholesky factor of its covariance: :math:`N(m, R R^\top)`, and its divergence from an NNGP.

Row i of R is supported on column i and on the columns of a given pattern :math:`\alpha(i)`. An empty pattern is the
mean-field Gaussian of VNNGP, a pattern of K columns the guide of NPVI, and a full one appendix B of VNNGP. For all of
them the divergence from a nearest-neighbor Gaussian process is

.. math:: KL[q \| p] = \tfrac12 \sum_j \Big[ \log v_j - \log R_{jj}^2 - 1
   + \big( \| R_j - \textstyle\sum_k w_{jk} R_{n(j)_k} \|^2 + (m_j - w_j^\top m_{n(j)})^2 \big) / v_j \Big],

a sum over points, so that a batch of them gives an unbiased estimate of the whole.

Differs from the paper (VNNGP, eqs. 37-40): those square a sum term by term and drop a logarithm; this is the exact
divergence.

Cost: O(B K) for the mean-field case, O(B K^2 log K) with a pattern of K columns.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from pyro.distributions import Normal
from torch import Tensor
from torch.distributions import Independent, constraints, kl_divergence, register_kl

from pyro_nngp._checks import check_tensor, fail
from pyro_nngp._indexing import values_at
from pyro_nngp._kinds import draws_shape
from pyro_nngp._tape import operation
from pyro_nngp.distributions.expandable import Expandable
from pyro_nngp.distributions.nngp import NNGP
from pyro_nngp.linalg import in_blocks, solve_triangular
from pyro_nngp.neighbors.table import distinct_rows, same_rows

_INDICES = 10  # memory for sorting the row numbers of a block, in units of its entries


class SparseCholeskyNormal(Expandable):
    r"""Multivariate normal with mean m and covariance :math:`R R^\top`, R sparse and triangular in some ordering.

    Args:
        loc: mean m.
        scale: diagonal of R, positive (a standard deviation, not a variance).
        weights: off-diagonal entries of R; None for a diagonal R.
        pattern: columns of `weights` for each row of R, -1 padded; columns must form no cycle (predecessors in some
            ordering). Its entries are row numbers among all N points.
        rows: row numbers of the points of `loc`, `scale`, `weights` and `pattern` if these are not all N points (such
            as ``batch.rows``); values are at those points.
        targets: positions among the rows whose innovations the log density counts (such as ``batch.targets``); None is
            all of them.

    Raises:
        ValueError: if shapes disagree, or one of `weights` and `pattern` comes without the other.
    """

    arg_constraints = {"loc": constraints.real_vector, "scale": constraints.independent(constraints.positive, 1)}
    support = constraints.real_vector
    has_rsample = True
    batched = ("loc", "scale", "weights")

    def __init__(
        self,
        loc: Float[Tensor, "*S U"],
        scale: Float[Tensor, "*S U"],
        weights: Float[Tensor, "*S U K"] | None = None,
        pattern: Int[Tensor, "U K"] | None = None,
        rows: Int[Tensor, " U"] | None = None,
        targets: Int[Tensor, " B"] | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        where = "SparseCholeskyNormal"
        given = {"weights": weights, "pattern": pattern, "rows": rows, "targets": targets}
        for arg, value in {"loc": loc, "scale": scale, **{k: v for k, v in given.items() if v is not None}}.items():
            check_tensor(where, arg, value)
        if loc.shape != scale.shape or loc.dim() < 1:
            fail(where, "loc, scale", "of one shape (..., U)", (tuple(loc.shape), tuple(scale.shape)), "Expand one.")
        if (weights is None) != (pattern is None):
            fail(where, "weights, pattern", "together", "one of them", "Give both, or neither for a diagonal factor.")
        if weights is None or pattern is None:
            weights = loc[..., None][..., :0]
            pattern = torch.empty(loc.shape[-1], 0, dtype=torch.int64, device=loc.device)
        if weights.shape != loc.shape + pattern.shape[-1:]:
            expectation = f"of shape {(*loc.shape, pattern.shape[-1])}"
            fail(where, "weights", expectation, tuple(weights.shape), "Match pattern.")
        if rows is not None and rows.shape != loc.shape[-1:]:
            fail(where, "loc", f"to have {len(rows)} entries, one per row", loc.shape[-1], "Index it by rows.")
        self.loc, self.scale, self.pattern, self.rows, self.targets = loc, scale, pattern, rows, targets
        self.weights = torch.where(pattern >= 0, weights, 0.0)
        self._drawn: tuple[Tensor, Tensor] | None = None
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=validate_args)

    @property
    def mean(self) -> Float[Tensor, "*S U"]:
        """m."""
        return self.loc

    @property
    def variance(self) -> Float[Tensor, "*S U"]:
        """Marginal variances, the squared norms of the rows of R."""
        diagonal = self.scale.square()
        return diagonal if self.is_diagonal else diagonal + self.weights.square().sum(-1)

    @property
    def is_diagonal(self) -> bool:
        """Whether R has no entries beside its diagonal."""
        return self.pattern.shape[-1] == 0

    def rsample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "*S U"]:
        """Draws m + R white, with one white value per column that the rows touch."""
        shape = draws_shape("SparseCholeskyNormal.rsample", sample_shape) + self.batch_shape
        if self.is_diagonal:
            white = self._white(shape + self.event_shape)
            value = self.loc + self.scale * white
        else:
            columns = torch.cat([self._numbers()[:, None], self.pattern.clamp(min=0)], -1)
            if self.rows is None:
                every = self._white(shape + self.event_shape)
            else:
                touched, columns = distinct_rows(columns)
                every = self._white(shape + touched.shape)
            white = every[..., columns[:, 0]]
            value = self.loc + self.scale * white + (self.weights * every[..., columns[:, 1:]]).sum(-1)
        self._drawn = value, white
        return value

    def _log_prob(self, value: Float[Tensor, "*S U"]) -> Float[Tensor, "*S"]:
        """Log density, by forward substitution over the dependency levels of the pattern.

        Raises:
            ValueError: for a value that this object did not draw, if R has off-diagonal entries and only some rows are
                given: that density needs the whole factor.
        """
        white = self._whiten(value)
        log_prob = -0.5 * white.square() - self.scale.log() - 0.5 * math.log(2 * math.pi)
        return (log_prob if self.targets is None else log_prob[..., self.targets]).sum(-1)

    def combined_rows(
        self, coefficients: Float[Tensor, "*C B L"], positions: Int[Tensor, "B L"]
    ) -> Float[Tensor, "*S B"]:
        r"""Variance of a linear combination of values: :math:`\| \sum_l c_l R_{p_l} \|^2` for each row of (c, p).

        Args:
            coefficients: c, whose leading dimensions broadcast against the batch shape; a position that should not
                count gets coefficient 0.
            positions: p, positions among the rows of this object; those with coefficients other than 0 are distinct
                within a row.

        Returns:
            Variances, the batch shape in front of (B,).

        Cost: O(B L) for a diagonal factor; else O(B L K log(L K)), and memory O(L K) times a block of rows, or times
        all of them where gradients are recorded.
        """
        if self.is_diagonal:
            return (coefficients * values_at(self.scale, positions)).square().sum(-1)
        batch = torch.broadcast_shapes(self.batch_shape, coefficients.shape[:-2])
        entries = positions.shape[1] * (1 + self.pattern.shape[1]) * (_INDICES + 2 * batch.numel())
        return in_blocks(
            lambda part: (self._combined_block(coefficients[..., part, :], positions[part]),),
            len(positions),
            entries,
            -1,
        )[0]

    def _combined_block(self, coefficients: Tensor, positions: Tensor) -> Tensor:
        diagonal = coefficients * self.scale[..., positions]
        off = coefficients[..., None] * self.weights[..., positions, :]
        entries = torch.cat([diagonal[..., None], off], -1).flatten(-2)
        columns = torch.cat([self._numbers()[positions][..., None], self.pattern[positions]], -1).flatten(-2)
        order, slots = align(columns)
        ordered = entries[..., torch.arange(len(order), device=order.device)[:, None], order]
        sums = torch.zeros_like(entries).scatter_add(-1, slots.expand(entries.shape), ordered)
        return sums.square().sum(-1)

    def _numbers(self) -> Tensor:
        return torch.arange(self.event_shape[0], device=self.loc.device) if self.rows is None else self.rows

    def _white(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)

    def _whiten(self, value: Tensor) -> Tensor:
        if self.is_diagonal:
            return (value - self.loc) / self.scale
        if self._drawn is not None and self._drawn[0] is value:
            return self._drawn[1]
        if self.rows is not None:
            where = "SparseCholeskyNormal.log_prob"
            cure = "Its density needs the whole factor: build it over all points."
            fail(where, "value", "to be the last draw of these rows", "another value", cure)
        white = (value - self.loc) / self.scale
        return solve_triangular(-self.weights / self.scale[..., None], self.pattern, white)


@register_kl(SparseCholeskyNormal, NNGP)
def _kl_sparse_cholesky_nngp(q: SparseCholeskyNormal, p: NNGP) -> Tensor:
    """Divergence (see the module's docstring), summed over the batch's targets; both must be on the same rows.

    In NPVI it is minus the cross entropy (eq. 11) less the entropy (eq. 7), where R is L, m is mu, w is b, v is
    Sigma_i|alpha(i), and row j of R less what w predicts is Q; in VNNGP with a diagonal R it is eq. 28, where v is f.
    """
    batch = p.batch
    if q.event_shape != p.event_shape or not (q.rows is None or same_rows(q.rows, batch.rows)):
        shapes = tuple(q.event_shape), tuple(p.event_shape)
        fail("kl_divergence", "q and p", "on the same rows", shapes, "Build both from one Batch.")
    w, var = p.conditionals  # p(u_j | u_n(j)) = N(w_j^T u_n(j), v_j): NPVI, eq. 10
    scale = values_at(q.scale, batch.targets)
    if q.is_diagonal:  # s_j + (w_j^2)^T s_n(j)
        spread = scale.square() + q.combined_rows(w, batch.neighbors)
    else:  # Q Q^T, Q = R_j - w_j^T R_n(j)
        coefficients = torch.cat([torch.ones_like(w[..., :1]), -w], -1)
        spread = q.combined_rows(coefficients, torch.cat([batch.targets[:, None], batch.neighbors.clamp(min=0)], -1))
    spread = spread + p.residual(q.loc).square()  # (m_j - w_j^T m_n(j))^2
    return (0.5 * (var.log() - 1 + spread / var) - scale.log()).sum(-1)


@register_kl(Independent, NNGP)
def _kl_independent_nngp(q: Independent, p: NNGP) -> Tensor:
    """Divergence of a mean-field guide written as ``Normal(loc, scale).to_event(1)``."""
    if not isinstance(q.base_dist, Normal) or q.reinterpreted_batch_ndims != 1:
        raise NotImplementedError("no closed form: KL(Independent || NNGP) is known for Normal(...).to_event(1) only")
    return kl_divergence(SparseCholeskyNormal(q.base_dist.loc, q.base_dist.scale), p)


def align(columns: Int[Tensor, "B E"]) -> tuple[Tensor, Tensor]:
    """Per row: an order that brings equal columns together, and the slot of each sorted entry (one slot per column)."""
    ordered, order = _sorted(columns)
    slots = torch.zeros_like(order)
    slots[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return order, slots.cumsum_(-1)


@operation
def _sorted(columns: Tensor) -> tuple[Tensor, Tensor]:
    """``columns.sort(dim=-1, stable=True)``.

    On CPUs, NumPy sorts column and place as one number, with a vectorized sort that is three times as fast.
    """
    if columns.device.type != "cpu":
        return columns.sort(dim=-1, stable=True)
    bits = columns.shape[1].bit_length()
    keys = (columns.long() << bits) | torch.arange(columns.shape[1])
    keys.numpy().sort(-1)  # in place
    return keys >> bits, keys & (2**bits - 1)
