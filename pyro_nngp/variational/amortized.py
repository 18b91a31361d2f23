r"""A Gaussian guide computed by an encoder instead of a table of parameters (Liu and Liu 2019, section 3.3).

:math:`q(u) = N(m, R R^\top)` on a neighbor graph, where an encoder computes :math:`m_i` and row i of R from the
data around point i. The number of parameters does not depend on the number of points, and a trained encoder applies to
new data.

The encoder reads kernel values at the present hyperparameters (sampled ones if they have priors), and gradients flow
through them: the guide's dependence on the kernel is part of the objective.

Cost: that of the encoder at the rows of a batch and its neighbors; memory of O(N K) integers for the nodes of the
points.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp._memory import at_once
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributed import ShardedNeighborhoods
from pyro_nngp.distributions import SparseCholeskyNormal
from pyro_nngp.hyperparameters import GPModule, pyro_entry
from pyro_nngp.kernels import Covariance, bind
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.linalg import DEFAULT_JITTER
from pyro_nngp.neighbors import NeighborGraph, distinct_rows, without_parents
from pyro_nngp.variational.encoders import Neighborhood, Row
from pyro_nngp.variational.natural_gradient import gaussian_sites

_ROUGH = 0.1  # variance of f at the rough value, for the likelihood's sites
_CHUNK_ENTRIES = 2**22  # of the kernel matrices of the points encoded at once


class AmortizedGaussian(GPModule):
    """q(u) by an encoder, with the interface of :class:`~pyro_nngp.variational.gaussian.LocalGaussian`.

    Args:
        encoder: see :mod:`pyro_nngp.variational.encoders`: a module with ``response`` and ``num_context``, which maps a
            :class:`~pyro_nngp.variational.encoders.Neighborhood` to mean, diagonal and off-diagonal entries.
        y: data.
        likelihood: p(y | f).
        kernel: of the prior.
        graph: neighbors of the prior; rows of R are supported on them.
        mean: mean function ``(B, D) -> (B,)``; with rows of the graph as a second argument, at these.
        num_columns: off-diagonal entries per row of R, on the nearest of the neighbors; 0 is a mean-field guide.
        jitter: relative nugget of the prior.
        likelihood_at: the bound likelihood of some rows, for weights and trials; None is the same for all.

    Raises:
        ValueError: if the encoder is for other columns, or its response is not one finite value per point and latent
            function.
    """

    encoder: Any
    context: Tensor
    rank: Tensor
    y: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        y: Tensor,
        likelihood: Likelihood,
        kernel: Any,
        graph: NeighborGraph,
        mean: Callable[..., Tensor],
        num_columns: int,
        jitter: float = DEFAULT_JITTER,
        likelihood_at: Callable[..., Likelihood] | None = None,
    ) -> None:
        super().__init__()
        columns = getattr(encoder, "input_dim", graph.x.shape[1])
        if columns != graph.x.shape[1]:
            name, cure = type(encoder).__name__, f"Write {type(encoder).__name__}({graph.x.shape[1]})."
            fail(name, "x", f"with input_dim = {columns} columns", graph.x.shape[1], cure)
        self.encoder = encoder.to(graph.x)
        # in a tuple: they are modules of the model, not of the guide
        self._prior = kernel, graph, mean, jitter, likelihood
        self._likelihood_at = likelihood_at
        self.register_buffer("y", y)
        self.num_columns = num_columns
        self.register_buffer("response", self._response())
        is_sharded = isinstance(graph, ShardedNeighborhoods)
        self.register_buffer("rank", graph.rank if is_sharded else graph.order.argsort())
        self.register_buffer("context", _context(graph, self.encoder.num_context))

    def _response(self) -> Float[Tensor, "*L N"]:
        """Rough values of f from the data, latent functions first."""
        _, graph, _, _, likelihood = self._prior
        of_rows = likelihood if self._likelihood_at is None else self._likelihood_at(slice(None))
        response = self.encoder.response(of_rows, self.y).to(graph.x)
        latents = tuple(self.y.shape[1:]) if likelihood.num_latents is None else (likelihood.num_latents,)
        if response.shape != (*latents, len(graph.x)) or not response.isfinite().all():
            expectation = f"finite and of shape {(*latents, len(graph.x))}"
            cure = "It maps (likelihood, y) to rough values of f, latent functions first."
            fail("AmortizedGaussian", "encoder.response", expectation, tuple(response.shape), cure)
        return response

    @property
    def pattern(self) -> Int[Tensor, "N P"] | None:
        """Columns of R beside the diagonal; None for a mean-field guide."""
        return self._prior[1].neighbors[:, : self.num_columns] if self.num_columns else None

    @pyro_entry
    def distribution(
        self, rows: Int[Tensor, " U"] | None = None, targets: Int[Tensor, " B"] | None = None
    ) -> SparseCholeskyNormal:
        """q at some points (None: all), of batch shape (L,) or (); its log density sums over `targets`."""
        graph = self._prior[1]
        asked = torch.arange(graph.num_points, device=graph.x.device) if rows is None else rows
        covariance = bind(self._prior[0])
        nodes = 1 + graph.num_neighbors + self.context.shape[1]
        parts = [self._encode(covariance, part) for part in asked.split(at_once(_CHUNK_ENTRIES, nodes**2))]
        loc, scale = (torch.cat([part[i] for part in parts], -1) for i in range(2))
        pattern = self.pattern
        if pattern is None:
            return SparseCholeskyNormal(loc, scale, rows=rows, targets=targets)
        weights = torch.cat([part[2][..., : self.num_columns] for part in parts], -2)
        return SparseCholeskyNormal(loc, scale, weights, pattern[asked], rows, targets)

    def follow(self, graph: NeighborGraph) -> None:
        """Find the further nodes of each point again after a refresh of the graph."""
        self.context = _context(graph, self.encoder.num_context)

    def take(self, y: Tensor) -> None:
        """Read the data again after the rows of a graph on several processes have changed."""
        self.y, self.rank = y, cast(ShardedNeighborhoods, self._prior[1]).rank
        self.response = self._response()

    def _encode(self, covariance: Covariance, rows: Tensor) -> Row:
        _, graph, mean, jitter, shared = self._prior
        parents = graph.neighbors[rows]
        nodes = torch.cat([rows[:, None], parents, self.context[rows]], -1)
        mask, nodes = nodes >= 0, nodes.clamp(min=0)
        touched, places = distinct_rows(nodes)
        x, response = graph.x[touched], self.response[..., touched]
        added = mean(x, touched) - mean(x)  # offsets, which the encoder does not see
        likelihood = shared.bind() if self._likelihood_at is None else self._likelihood_at(touched)
        y = self.y[touched].movedim(0, -1)
        spread = torch.full_like(response, _ROUGH)
        target, precision = gaussian_sites(likelihood, y, response, spread, differentiable=True)
        w, var = graph_conditional(covariance, graph.x[rows], graph.x, parents, jitter=jitter)
        return self.encoder(
            Neighborhood(
                (response - added)[..., places],
                mean(x)[..., places],
                graph.x[nodes],
                mask,
                covariance,
                self.rank[nodes],
                w,
                var,
                jitter,
                (target - added)[..., places],
                precision[..., places],
            )
        )


def _context(graph: NeighborGraph, num_context: int) -> Int[Tensor, "N C"]:
    """The nearest other points of each point that are not its parents, -1 padded."""
    if isinstance(graph, ShardedNeighborhoods):
        return graph.context
    if not num_context:
        return graph.neighbors[:, :0]
    return without_parents(graph.others(min(num_context, graph.num_points - 1)), graph.neighbors)
