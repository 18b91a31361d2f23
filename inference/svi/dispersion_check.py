r"""Check of Poisson counts: a count varies about the counts of its neighbors no more than a Poisson distribution does.

A process follows counts that vary more: its lengthscale falls, or a learned smoothness falls to its lower limit, where
f is rough enough to stand for noise. Intervals of counts then stay right, but f and its lengthscale mean nothing, and
predictions lose. The mean log density of counts given the counts of four neighbors, as negative binomial ones of one
size r, over its limit at a large r is what r gains. It is .3 to 8 nats for simulated negative binomial counts with r
between .3 and 3, where ``NegativeBinomial`` gains .03 - .04 nats per held-out row on a learned smoothness and .06 - .42
on ``Matern52``; .00 - .03 for Poisson counts of a process that neighbors share, and .02 on bei_trees, where it gains
nothing. Poisson counts of a process that changes from point to point reach 1.1, but then its smoothness is learned as
more than .2, and there is no warning.

Cost: the neighbors of 1,000 rows.
"""

from typing import Any

import torch

from pyro_nngp._checks import warn
from pyro_nngp.inference.protocols import Checked, graph_of, offers, shard_of
from pyro_nngp.inference.svi.neighbor_check import some_rows
from pyro_nngp.inference.svi.result import ConvergenceWarning
from pyro_nngp.kernels import Matern
from pyro_nngp.likelihoods import Poisson
from pyro_nngp.likelihoods.counts import best_size

_ROWS, _LEAST, _NEIGHBORS = 1000, 100, 4
_GAIN, _ROUGH = 0.2, 0.2  # nats per row, smoothness


@torch.no_grad()
def check_dispersion(method: Any) -> None:
    """Warn if Poisson counts without an offset vary about their neighbors far more than Poisson counts do."""
    graph = graph_of(method) if offers(method, Checked) and shard_of(method) is None else None
    if graph is None or not isinstance(method.likelihood, Poisson) or method.offset is not None:
        return
    if not isinstance(method.y, torch.Tensor) or method.y.dim() != 1 or not _LEAST <= len(method.y) == len(graph.x):
        return
    if any(float(part.smoothness) > _ROUGH for part in method.kernel.modules() if _learns_smoothness(part)):
        return
    rows, y = some_rows(method.x, _ROWS), method.y.double()
    size, gain = best_size(y[rows], y[graph.others(_NEIGHBORS, rows)])
    if gain > _GAIN:
        warn(
            f"fit: expected counts that vary about their neighbors as Poisson counts do, got {gain:.2g} nats per row "
            f"for negative binomial counts of size {float(size):.2g}: f follows what is noise, and its lengthscale "
            "and smoothness mean little. Take likelihood=NegativeBinomial(), and compare by cross_validate.",
            ConvergenceWarning,
        )


def _learns_smoothness(part: torch.nn.Module) -> bool:
    return isinstance(part, Matern) and "smoothness" in part._pyro_params
