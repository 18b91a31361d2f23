r"""A Gaussian guide computed by an encoder instead of a table of parameters (Liu and Liu 2019, section 3.3).

:math:`q(u) = N(m, R R^\top)` on a neighbor graph, where an encoder computes :math:`m_i` and row i of R from the
data around point i. The number of parameters does not depend on the number of points, and a trained encoder applies to
new data.

The encoder reads kernel values at the present hyperparameters (sampled ones if they have priors), and gradients flow
through them: the guide's dependence on the kernel is part of the objective.

Cost: the encoder at the rows of a batch and its neighbors; memory of O(N K) integers for the nodes of the
points.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp._memory import at_once
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributed.table import ShardedNeighborhoods
from pyro_nngp.distributions import NNGP, SparseCholeskyNormal
from pyro_nngp.hyperparameters.reading import parameter_sites
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.neighbors.table import distinct_rows, without_parents
from pyro_nngp.rows import Part
from pyro_nngp.variational.encoders import Neighborhood, Row
from pyro_nngp.variational.family import Family, Given
from pyro_nngp.variational.gaussian import with_neighborhoods
from pyro_nngp.variational.natural_gradient import gaussian_sites

_ROUGH = 0.1  # variance of f at the rough value, for the likelihood's sites
_CHUNK_ENTRIES = 2**22  # of the kernel matrices of the points encoded at once


class AmortizedGaussian(Family):
    """q(u) by an encoder.

    Args:
        encoder: see :mod:`pyro_nngp.variational.encoders`: a module with ``response`` and ``num_context``, which maps a
            :class:`~pyro_nngp.variational.encoders.Neighborhood` to mean, diagonal and off-diagonal entries.
        given: data, neighbors and hyperparameters at the start.
        num_columns: off-diagonal entries per row of R, on the nearest of the neighbors; 0 is a mean-field guide.

    Raises:
        ValueError: if the encoder is for other columns, or its response is not one finite value per point and latent
            function.
    """

    response: Tensor
    context: Tensor
    rank: Tensor
    batches_sets = False
    needs_neighborhoods = True

    def __init__(self, encoder: nn.Module, given: Given, num_columns: int) -> None:
        super().__init__()
        x = given.graph.x
        columns = getattr(encoder, "input_dim", x.shape[1])
        if columns != x.shape[1]:
            name, cure = type(encoder).__name__, f"Write {type(encoder).__name__}({x.shape[1]})."
            fail(name, "x", f"with input_dim = {columns} columns", x.shape[1], cure)
        self.encoder, self.num_columns = encoder.to(x), num_columns
        for name in ("response", "rank", "context"):
            self.register_buffer(name, None)
        self.rows_changed(given)

    @property
    def num_context(self) -> int:  # type: ignore[override]
        """Further nodes of each point."""
        return self.network.num_context

    @property
    def network(self) -> Any:
        """The encoder, without effects on a program that runs."""
        return self._modules["encoder"]

    def at_rows(self, given: Given, rows: Int[Tensor, " U"] | None = None) -> SparseCholeskyNormal:
        return self._distribution(given, rows, None)

    def at_batch(self, given: Given, prior: NNGP) -> SparseCholeskyNormal:
        parameter_sites(self, "encoder")
        return self._distribution(given, prior.batch.rows, prior.batch.targets)

    def _distribution(
        self, given: Given, rows: Int[Tensor, " U"] | None, targets: Int[Tensor, " B"] | None
    ) -> SparseCholeskyNormal:
        graph = given.graph
        asked = torch.arange(graph.num_points, device=graph.x.device) if rows is None else rows
        nodes = 1 + graph.num_neighbors + self.context.shape[1]
        parts = [self._encode(given, part) for part in asked.split(at_once(_CHUNK_ENTRIES, nodes**2))]
        loc, scale = (torch.cat([part[i] for part in parts], -1) for i in range(2))
        if not self.num_columns:
            return SparseCholeskyNormal(loc, scale, rows=rows, targets=targets)
        weights = torch.cat([part[2][..., : self.num_columns] for part in parts], -2)
        return SparseCholeskyNormal(loc, scale, weights, graph.neighbors[asked, : self.num_columns], rows, targets)

    def _encode(self, given: Given, rows: Tensor) -> Row:
        """Mean and row of R of some points, from the nodes around each: the point, its parents and its context."""
        graph, bound = given.graph, given.bound
        parents = graph.neighbors[rows]
        nodes = torch.cat([rows[:, None], parents, self.context[rows]], -1)
        mask, nodes = nodes >= 0, nodes.clamp(min=0)
        touched, places = distinct_rows(nodes)
        x, response = graph.x[touched], self.response[..., touched]
        mean = bound.mean(x)
        added = given.rows.mean(bound, touched, x) - mean  # offsets, which the encoder does not see
        likelihood, y = given.rows.likelihood(bound, touched), given.rows.targets(touched)
        spread = torch.full_like(response, _ROUGH)
        target, precision = gaussian_sites(likelihood, y, response, spread, differentiable=True)
        w, var = graph_conditional(bound.covariance, graph.x[rows], graph.x, parents, jitter=bound.jitter)
        return self.network(
            Neighborhood(
                (response - added)[..., places],
                mean[..., places],
                graph.x[nodes],
                mask,
                bound.covariance,
                self.rank[nodes],
                w,
                var,
                bound.jitter,
                (target - added)[..., places],
                precision[..., places],
            )
        )

    def enough_neighbors(self, given: Given) -> int:
        """K: more would run the encoder at all of them."""
        return given.graph.num_neighbors

    def neighbors_changed(self, given: Given) -> None:
        """Find the further nodes of each point again."""
        if given.rows.is_whole:
            self.context = _context(given.graph, self.num_context)
        else:
            self.rows_changed(given)

    def restart(self, given: Given) -> None:
        """Read the data again: the encoder applies to any."""
        self.rows_changed(given)

    def rows_changed(self, given: Given) -> None:
        """Read the data again."""
        graph = given.graph
        self.response = self._response(given)
        self.rank = graph.rank if isinstance(graph, ShardedNeighborhoods) else graph.order.argsort()
        self.context = _context(graph, self.num_context)

    def append(self, given: Given, count: int, loc: Float[Tensor, "*L P"], variance: Float[Tensor, "*L P"]) -> None:
        self.rows_changed(given)

    def at_part(self, given: Given, part: Part, x_new: Tensor | None = None, num_neighbors: int = 0) -> Part:
        return with_neighborhoods(self, given, part)

    def _response(self, given: Given) -> Float[Tensor, "*L N"]:
        """Rough values of f from the data, latent functions first."""
        rows, bound = given.rows, given.bound
        response = self.network.response(rows.likelihood(bound), rows.y).to(given.graph.x)
        num_latents = bound.likelihood.num_latents
        latents = tuple(rows.y.shape[1:]) if num_latents is None else (num_latents,)
        if response.shape != (*latents, len(given.graph.x)) or not response.isfinite().all():
            expectation = f"finite and of shape {(*latents, len(given.graph.x))}"
            cure = "It maps (likelihood, y) to rough values of f, latent functions first."
            fail("AmortizedGaussian", "encoder.response", expectation, tuple(response.shape), cure)
        return response


def _context(graph: NeighborGraph, num_context: int) -> Int[Tensor, "N C"]:
    """The nearest other points of each point that are not its parents, -1 padded."""
    if isinstance(graph, ShardedNeighborhoods):
        return graph.context
    if not num_context:
        return graph.neighbors[:, :0]
    return without_parents(graph.others(min(num_context, graph.num_points - 1)), graph.neighbors)
