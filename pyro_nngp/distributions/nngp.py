r"""The nearest-neighbor Gaussian process prior as a Pyro distribution.

For an ordering of the points and :math:`n(j) \subset \{1..j-1\}` the at most K nearest predecessors of point j,

.. math:: p(u) = \prod_j N(u_j \mid w_j^\top u_{n(j)}, v_j),

with weights and variances from :mod:`pyro_nngp.conditionals.nearest_neighbor` (Vecchia 1988; Datta et al. 2016, eq. 5).
With K = N-1 it is the exact Gaussian process.

Cost: O(N K^3) for the conditionals, computed once per instance; then O(N K) per log density and per draw. A draw takes
one vectorized step per dependency level of the graph (a few hundred for 10^5 randomly ordered points).
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.distributions import Distribution, constraints

from pyro_nngp._checks import (
    check_finite,
    check_floating,
    check_new_inputs,
    check_num_neighbors,
    check_number,
    check_same_kind,
    check_tensor,
    fail,
)
from pyro_nngp._indexing import values_at
from pyro_nngp._kinds import draws_shape
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions.expandable import Expandable
from pyro_nngp.hyperparameters.batches import placed
from pyro_nngp.kernels import Covariance, Kernel, bind
from pyro_nngp.kernels.binding import check_covariance
from pyro_nngp.kernels.metric import warn_of_unset_lengthscale
from pyro_nngp.linalg import DEFAULT_JITTER, VecchiaFactor, solve_triangular
from pyro_nngp.neighbors import Batch, NeighborGraph


class NNGP(Expandable):
    r"""Zero-mean nearest-neighbor Gaussian process over the values at the points of a graph.

    Values are in the row order of ``graph.x``, whatever the ordering of the graph. With `batch`, the distribution is
    over the values at ``batch.rows`` (a batch and the neighbors that it needs) and its log density counts the
    conditionals of ``batch.targets`` alone, so that disjoint batches add up to the whole; scale it by ``batch.scale``
    for an unbiased estimate of the whole.

    Args:
        kernel: a :class:`~pyro_nngp.kernels.Kernel` or a callable ``(..., n, D), (..., m, D) -> (..., n, m)``. Its
            hyperparameters are read (and its Pyro sites fire) when the distribution is built.
        graph: the points, their ordering and their neighbors.
        batch: a batch of the graph, from :meth:`NeighborGraph.batch`; None is all points.
        points: locations used in place of ``graph.x`` in the kernel, such as inducing points that are being learned.
        jitter: relative nugget; None takes 1e-6.

    A kernel whose hyperparameters have batch dimensions, in a vectorized plate for instance, gives a distribution of
    that ``batch_shape``. A lengthscale that was left out is 1; where columns have spreads below .05 or above 20, a
    warning says so. Where a program goes on in a plate of the points, :func:`in_plate` puts the values there.

    Raises:
        TypeError: if `graph` is not a NeighborGraph, or `kernel` no covariance function.
        ValueError: if the kernel is one of other columns than the points have.

    Cost: O(B K^3) for the B points of a batch at the first use of a density, independent of N.

    Reference: Datta, Banerjee, Finley, Gelfand (2016), "Hierarchical nearest-neighbor Gaussian process models".
    """

    support = constraints.real_vector
    has_rsample = True

    def __init__(
        self,
        kernel: Any,
        graph: NeighborGraph,
        batch: Batch | None = None,
        *,
        points: Float[Tensor, "N D"] | None = None,
        jitter: float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        check_prior("NNGP", kernel, graph, jitter)
        if batch is not None and not isinstance(batch, Batch):
            cure = "Pass graph.batch(rows), or None for all points."
            fail("NNGP", "batch", "to be a Batch", type(batch).__name__, cure, TypeError)
        if points is not None:
            check_tensor("NNGP", "points", points)
            check_same_kind("NNGP", x=graph.x, points=points)
            columns = graph.x.shape[1:] if isinstance(kernel, Kernel) else points.shape[1:]
            if points.dim() != 2 or points.shape != (len(graph.x), *columns):
                expectation, cure = f"of shape {tuple(graph.x.shape)}", "One in place of each of x."
                fail("NNGP", "points", expectation, tuple(points.shape), cure)
        warn_of_unset_lengthscale("NNGP", kernel, graph.x)
        self.graph = graph
        self.batch = graph.batch() if batch is None else batch
        self._conditionals = _Conditionals(kernel, graph.x if points is None else points, jitter)
        batch_shape = self._conditionals.kernel.batch_shape
        if batch_shape is None:  # such a kernel may read Pyro sites when called: call it in the model
            batch_shape = self.conditionals[1].shape[:-1]
        super().__init__(batch_shape, self.batch.rows.shape, validate_args=validate_args)

    def at_batch(self, batch: Batch | None = None) -> "NNGP":
        """This distribution on another batch of its graph; None is all points."""
        new = self.expand(self.batch_shape)
        new.batch = self.graph.batch() if batch is None else batch
        new._event_shape = new.batch.rows.shape
        return new

    @property
    def conditionals(self) -> tuple[Float[Tensor, "*L B K"], Float[Tensor, "*L B"]]:
        """Weights and variances of the batch's targets given their neighbors, computed once.

        They are computed again where the first use recorded no gradients, such as a draw, and a later one needs them. A
        plain callable, which may read Pyro sites, is not called again: of one, they have gradients if the distribution
        was built while gradients were recorded.

        They have the batch dimensions of the kernel's hyperparameters, which broadcast to ``batch_shape``.
        """
        return self._conditionals.of(self.batch)

    def response_conditionals(
        self, noise: Float[Tensor, "*L U"]
    ) -> tuple[Float[Tensor, "*L B K"], Float[Tensor, "*L B"]]:
        """Weights and variances of the batch's targets given noisy observations of their neighbors.

        Args:
            noise: variance of the observation at each row of the batch, one set per latent function; leading dimensions
                broadcast against the kernel's batch dimensions.

        Cost: O(B K^3) for each set.
        """
        return self._conditionals.given(self.batch, noise)

    def __repr__(self) -> str:
        points = "" if self.is_whole else f"{len(self.batch.targets)} rows of "
        copies = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        return f"NNGP({self._conditionals.original!r}, {points}{self.graph!r}{copies})"

    @property
    def kernel(self) -> Covariance:
        """The covariance function, with its hyperparameters read."""
        return self._conditionals.kernel

    @property
    def jitter(self) -> float:
        """Relative nugget."""
        return DEFAULT_JITTER if self._conditionals.jitter is None else self._conditionals.jitter

    @property
    def is_whole(self) -> bool:
        """Whether the distribution is over all points of the graph."""
        return self.batch.neighbors is self.graph.neighbors

    @property
    def factor(self) -> VecchiaFactor:
        """(I - A, V) over all N points, whatever the batch."""
        w, var = self._conditionals.of(self._whole())
        return VecchiaFactor(w, var, self.graph.neighbors, self.graph.levels(), self.graph.coarse_level())

    @property
    def mean(self) -> Float[Tensor, "*S U"]:
        """Zero, shape ``batch_shape + event_shape``."""
        return self.graph.x.new_zeros(self._extended_shape())

    def residual(self, value: Float[Tensor, "*S U"]) -> Float[Tensor, "*R B"]:
        """Value of each target minus its expectation given the values of its neighbors."""
        w, _ = self.conditionals
        return values_at(value, self.batch.targets) - (w * values_at(value, self.batch.neighbors)).sum(-1)

    def _log_prob(self, value: Float[Tensor, "*S U"]) -> Float[Tensor, "*R"]:
        """Sum over the batch's targets of the log density given their neighbors."""
        _, var = self.conditionals
        log_prob = -0.5 * (self.residual(value).square() / var + var.log() + math.log(2 * math.pi)).sum(-1)
        return log_prob.expand(torch.broadcast_shapes(log_prob.shape, self.batch_shape))

    def rsample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "*S U"]:
        """Exact joint draws. A batch needs all its ancestors, so all N values are drawn, then the batch's rows."""
        shape = draws_shape("NNGP.rsample", sample_shape) + self.batch_shape + (self.graph.num_points,)
        white = torch.randn(shape, dtype=self.graph.x.dtype, device=self.graph.x.device)
        return self.color(white)[..., self.batch.rows]

    def color(self, white: Float[Tensor, "*S N"]) -> Float[Tensor, "*R N"]:
        """Map independent standard normal values to values at all N points: (I - A)^-1 V^1/2 white."""
        return self.factor.color(white)

    def whiten(self, value: Float[Tensor, "*S N"]) -> Float[Tensor, "*R N"]:
        """Map values to white ones, V^-1/2 (I - A) value; inverts :meth:`color`."""
        return self.factor.whiten(value)

    def _validate_sample(self, value: Any) -> None:
        check_tensor("NNGP.log_prob", "value", value)
        if value.dtype == torch.bool or value.shape[-1:] != self.event_shape:
            expectation = f"to be numbers of shape (..., {self.event_shape[0]})"
            actual = f"{value.dtype} of shape {tuple(value.shape)}"
            fail("NNGP.log_prob", "value", expectation, actual, "Give a value for each point.")
        super()._validate_sample(value)

    def _whole(self) -> Batch:
        return self.batch if self.is_whole else self.graph.batch()

    def predict(
        self, x_new: Float[Tensor, "P D"], f: Float[Tensor, "*S N"], num_neighbors: int | None = None
    ) -> Distribution:
        """Marginal conditionals at new points given the values at all points of the graph.

        Args:
            x_new: new inputs.
            f: values at ``graph.x``.
            num_neighbors: neighbors per new point; None takes the graph's.

        Returns:
            Normal of batch shape (..., P).

        Cost: O(P K^3), and one neighbor query per point.
        """
        check_values("NNGP.predict", "f", f, self.graph.x)
        w, var, neighbors = self.new_conditionals(x_new, num_neighbors)
        return dist.Normal((w * values_at(f, neighbors)).sum(-1), var.sqrt())

    def new_conditionals(
        self, x_new: Float[Tensor, "P D"], num_neighbors: int | None = None
    ) -> tuple[Float[Tensor, "*L P K"], Float[Tensor, "*L P"], Int[Tensor, "P K"]]:
        """Weights, variances and rows of the nearest neighbors of new points among all points of the graph.

        Args:
            x_new: new inputs.
            num_neighbors: neighbors per new point, up to N; None takes the graph's.

        Raises:
            ValueError, TypeError: for malformed arguments.

        Cost: O(P K^3), and one neighbor query per point.
        """
        if num_neighbors is not None:
            check_num_neighbors("NNGP", num_neighbors, self.graph.num_points)
        neighbors = self.graph.query(x_new, num_neighbors)
        w, var = self._conditionals.compute(x_new, neighbors)
        return w, var, neighbors

    def sample_new(
        self,
        x_new: Float[Tensor, "P D"],
        f: Float[Tensor, "*S N"],
        num_neighbors: int | None = None,
        seed: int = 0,
        *,
        neighbors: Int[Tensor, "P K"] | None = None,
    ) -> Float[Tensor, "*R P"]:
        """Joint draws at new points given the values at all points of the graph.

        The new points are appended to the ordering (in a random order, drawn from `seed`), so each is conditioned on
        its nearest points among the old and the earlier new ones: the draw is a smooth function, not independent noise
        around a mean.

        Args:
            x_new: new inputs.
            f: values at ``graph.x``, one draw per leading index.
            num_neighbors: neighbors per new point; None takes the graph's.
            seed: of the order of the new points alone; draws follow the global random state, as at any Pyro site.
            neighbors: the second value of ``graph.extend(x_new, num_neighbors, seed)``, for a search done once and for
                all where this is called for every draw, as in ``Predictive``; None searches.

        Returns:
            Values at the new points, same leading shape as `f`, broadcast with the batch dimensions of the kernel.

        Raises:
            ValueError, TypeError: for malformed arguments.

        Cost: O(P K^3) once, O(P K) per draw; memory O(P K + S (N + P)).
        """
        check_new_inputs("NNGP.sample_new", x_new, self.graph.x)
        check_values("NNGP.sample_new", "f", f, self.graph.x)
        if neighbors is None:
            _, neighbors = self.graph.extend(x_new, num_neighbors, seed)
        w, var = self._conditionals.compute(x_new, neighbors, x_new)
        old = neighbors < self.graph.num_points
        loc = ((w * old) * values_at(f, torch.where(old, neighbors, -1))).sum(-1)
        return draw_appended(w, var, neighbors, loc, self.graph.num_points)


def check_prior(where: str, kernel: Any, graph: Any, jitter: Any) -> None:
    """Raise unless a prior can be built of a kernel, a graph and a nugget."""
    if not isinstance(graph, NeighborGraph):
        actual, cure = type(graph).__name__, "Build one from the points."
        fail(where, "graph", "to be a NeighborGraph", actual, cure, TypeError)
    check_covariance(where, kernel, graph.x)
    if jitter is not None:
        check_number(where, "jitter", jitter, cure="It is a relative nugget; the default is 1e-6.")


def check_values(where: str, arg: str, value: Any, x: Float[Tensor, "N D"]) -> None:
    """Raise unless a tensor has finite values at all points x along its last dimension."""
    check_floating(where, arg, value)
    check_same_kind(where, **{"x": x, arg: value})
    if value.shape[-1:] != x.shape[:1]:
        expectation, cure = f"of shape (..., {len(x)})", "Give a value for each point of the graph."
        fail(where, arg, expectation, tuple(value.shape), cure)
    if not is_batchedtensor(value):
        check_finite(where, arg, value)


def in_plate(value: Float[Tensor, "... N"]) -> Float[Tensor, "... N"]:
    """Values of an NNGP site, reshaped for use in a plate of its points.

    ``with pyro.plate("sites", len(x)): pyro.sample("y", dist.Poisson(in_plate(f).exp()), obs=y)``

    Within the vectorized plates of ``Predictive(parallel=True)`` and ``vectorize_particles=True``, f has the shape
    (S, 1, N), where the 1 is the dimension that the plate of the points will have. It is left out: (S, N). Other values
    stay as they are.

    Args:
        value: f, with the points along the last dimension.

    Raises:
        ValueError: if there is no such 1.
    """
    batch = placed(value.shape[:-1])
    if not batch:
        return value.reshape(value.shape[-1:])
    if batch[-1] != 1:
        cure = "Call it once, on the value of a site outside of the plate, in a program that has the plate."
        fail("in_plate", "value", "of shape (N,) or (..., 1, N)", tuple(value.shape), cure)
    return value.reshape(*batch[:-1], value.shape[-1])


def draw_appended(
    w: Float[Tensor, "*#S P K"],
    var: Float[Tensor, "*#S P"],
    neighbors: Int[Tensor, "P K"],
    loc: Float[Tensor, "*S P"],
    num_old: int,
) -> Float[Tensor, "*S P"]:
    """Joint draws at new points that follow N old ones in an ordering.

    Args:
        w: weights of the new points' conditionals.
        var: their variances.
        neighbors: from :meth:`~pyro_nngp.neighbors.graph.NeighborGraph.extend`.
        loc: contribution of the old points' values to the conditional means, one draw per leading index.
        num_old: N.

    Returns:
        Values at the new points.

    Cost: O(P K) per draw.
    """
    among_new = torch.where(neighbors < num_old, -1, neighbors - num_old)
    return solve_triangular(w, among_new, loc + torch.randn_like(loc) * var.sqrt())


class _Conditionals:
    """Conditionals of a kernel, points and nugget, computed once per batch; expanded copies share them."""

    def __init__(self, kernel: Any, points: Tensor, jitter: float | None) -> None:
        self.original, self.kernel, self.points, self.jitter = kernel, bind(kernel), points, jitter
        self._batch: Batch | None = None
        self._result: tuple[Tensor, Tensor] | None = None
        self._complete = False  # whether the result has all gradients that there are

    def of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self._result is None or self._batch is not batch or self._lacks_gradients():
            self._result, self._batch, self._complete = self.given(batch, None), batch, torch.is_grad_enabled()
        return self._result

    def _lacks_gradients(self) -> bool:
        """Whether gradients are wanted that the last result lacks; an opaque kernel is not called again for them."""
        if self._complete or not torch.is_grad_enabled():
            return False
        point = self.points[:1]
        self._complete = self.kernel.batch_shape is None or not self.kernel(point, point).requires_grad
        return not self._complete

    def given(self, batch: Batch, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        points = self.points.index_select(0, batch.rows)
        x = points.index_select(0, batch.targets)
        return graph_conditional(self.kernel, x, points, batch.neighbors, noise, self.jitter)

    def compute(self, x: Tensor, neighbors: Tensor, new_points: Tensor | None = None) -> tuple[Tensor, Tensor]:
        points = self.points if new_points is None else torch.cat([self.points, new_points])
        return graph_conditional(self.kernel, x, points, neighbors, jitter=self.jitter)
