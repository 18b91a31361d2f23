r"""Methods that condition on noisy observations of the neighbors, f integrated out.

Cost: O(B K^3) per batch. Symbols: N data points, K neighbors, P new points, S fantasies.
"""

import math
from typing import Any

import pyro
import torch
from jaxtyping import Float, Int
from pyro import poutine
from torch import Tensor, nn

from pyro_nngp._checks import check_int, fail
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.table import ShardedGraph, ShardedOthers
from pyro_nngp.hyperparameters.priors import modules_with_priors
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models.base import neighbor_choice
from pyro_nngp.models.base.draws import Draw, can_be_mapped
from pyro_nngp.models.base.method import Method
from pyro_nngp.models.base.neighbor_choice import MOST_NEIGHBORS, USUAL_NEIGHBORS, choose_neighbors
from pyro_nngp.models.base.posterior import Observed
from pyro_nngp.models.base.program import Program
from pyro_nngp.models.base.several_processes import distribute
from pyro_nngp.models.base.trend import can_solve_mean, solve_mean, solved_mean
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.rows import Part


class ResponseMethod(Method):
    """A method that predicts f from noisy observations of its neighbors, up to N of them per new point.

    A subclass sets ``graph`` and defines ``model`` and ``guide``.
    """

    _has_fantasies = False  # whether outputs are fantasies of one output, which have its coefficients of the mean
    refresh_neighbors = neighbor_choice.refresh_neighbors
    prediction_neighbors = neighbor_choice.prediction_neighbors

    def posterior(self, bound: Any, draw: Draw | None = None, part: Part | None = None) -> Observed:
        """f given the observations of its neighbors."""
        observed = Observed(self.rows, self.graph, bound)
        return observed if part is None else observed.on(part)

    @property
    def _maps_draws(self) -> bool:
        return can_be_mapped(modules_with_priors(self))  # the rows that draws need are at hand

    @property
    def _has_posterior(self) -> bool:
        """Whether the coefficients of the mean have a joint posterior."""
        return getattr(self._modules.get("mean"), "has_posterior", False)

    @property
    def can_solve(self) -> bool:
        """Whether :meth:`solve` applies: the mean is linear in its parameters, which have no prior or a normal one."""
        return can_solve_mean(self)

    def solve(self) -> None:
        """Set the coefficients of the mean to their optimum, by :mod:`pyro_nngp.models.base.trend`."""
        solve_mean(self)

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets."""
        return solved_mean(self)

    def _append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        super()._append_rows(x, y, by_row)
        self.graph.append(x)
        self._solve_coefficients()

    def _keep_rows(self, rows: Int[Tensor, " S"]) -> None:
        super()._keep_rows(rows)
        self.graph = self.graph.subset(rows)
        self._solve_coefficients()

    def _solve_coefficients(self) -> None:
        """Solve for the joint posterior of coefficients of the mean, if they have one, after a change of the rows."""
        if self._has_posterior and self.likelihood.is_gaussian and not self._has_fantasies:
            solve_mean(self)

    def _repeat_targets(self, where: str, y: Tensor) -> Tensor:
        if not self.likelihood.is_gaussian or y.shape[0] < 1:
            return super()._repeat_targets(where, y)
        self.latent_shape, self._has_fantasies = (len(y),), True
        self.y = self.y[:, None].expand(-1, len(y))
        return y.mT

    def _distribute(self, data: ShardedData, choose: bool) -> None:
        if self._has_posterior:
            expectation, cure = "without a prior on several processes", "Pass LinearMean(D) without one."
            fail(type(self).__name__, "mean", expectation, type(self.mean).__name__, cure, NotImplementedError)
        distribute(self, data, choose)

    def _sharded_table(self, data: ShardedData, choose: bool) -> ShardedGraph | ShardedOthers:
        kind = ShardedGraph if isinstance(self.graph, NeighborGraph) else ShardedOthers
        first = self._usual_neighbors(data.num_rows) if choose else self.graph.num_neighbors
        return kind(data, min(first, data.num_rows - 1), self._neighbor_metric())

    def _distributed(self, choose: bool) -> None:
        if choose:
            self._choose_neighbors()

    def _usual_neighbors(self, num_rows: int) -> int:
        """K where none is given, before the data choose it."""
        return USUAL_NEIGHBORS

    def _choose_neighbors(self) -> None:
        """Choose K where none is given, for y, and for f where neighbors are noisy observations."""
        choose_neighbors(self, most_for_f=MOST_NEIGHBORS if self.likelihood.is_gaussian else 0)


def check_gaussian(method: Method) -> None:
    """Raise unless the likelihood is Gaussian."""
    if not isinstance(method.likelihood, Gaussian):
        where, cure = type(method).__name__, "Use LOO or VNNGP for other data."
        fail(where, "likelihood", "to be Gaussian", type(method.likelihood).__name__, cure, TypeError)


def count_weights(program: Program, rows: Int[Tensor, " I"] | Int[Tensor, "I K"]) -> None:
    r"""A site for the factor by which a normal density to the power w is not one with noise :math:`\sigma^2 / w`.

    .. math:: N(y \mid f, \sigma^2)^w = (2\pi\sigma^2)^{(1 - w) / 2}\, w^{-1/2}\, N(y \mid f, \sigma^2 / w)
    """
    if program.rows.weights is None:
        return
    w, variance = program.rows.weights[rows], program.bound.likelihood.variance
    variance = variance if rows.dim() == 1 else variance[..., None]
    factor = ((1 - w) * (2 * math.pi * variance.to(w)).log() - w.log()) / 2
    pyro.factor(program.site("weights"), factor if rows.dim() == 1 else factor.sum(-1))


@torch.no_grad()
def log_prob_of_rows(method: Any, batch_size: int) -> Float[Tensor, ""]:
    """Sum over all rows, of all processes, of the log density that ``model`` gives them.

    Hyperparameters with priors are at the median of their guide.
    """
    check_int(f"{type(method).__name__}.log_prob", "batch_size", batch_size, 1)
    method.bound()  # raises if priors do not fit the guide
    names, total = (method.site("y"), method.site("weights")), method.x.new_zeros(())
    at = {method.site(name): value for name, value in _by_name(method).items()}
    for idx in method.rows.every.split(batch_size):
        trace = poutine.trace(poutine.condition(method.model, at)).get_trace(idx)
        trace.compute_log_prob(lambda name, _: name in names)
        terms = [trace.nodes[name]["log_prob_sum"] for name in names if name in trace.nodes]
        total = total + sum(terms) * len(idx) / method.num_data  # undo the scale of the plate
    return method.rows.total(total)


def _by_name(method: Any) -> dict[str, Tensor]:
    """Medians of the hyperparameters with priors, by attribute path."""
    paths = {module: path for path, module in method.named_modules()}
    medians = method.hyper_guide.medians().items()
    return {f"{paths[part]}.{name}" if paths[part] else name: value for (part, name), value in medians}


__all__ = ["ResponseMethod", "check_gaussian", "count_weights", "log_prob_of_rows"]
