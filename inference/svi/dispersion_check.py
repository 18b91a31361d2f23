r"""Checks of counts: of how they vary about their neighbors, and of what augmentation takes them to tell.

Of Poisson counts: a process follows counts that vary more: its lengthscale falls, or a learned smoothness falls to its
lower limit, where f is rough enough to stand for noise. Intervals of counts then stay right, but f and its lengthscale
mean nothing, and predictions lose. The mean log density of counts given the counts of four neighbors, as negative
binomial ones of one size r, over its limit at a large r is what r gains. It is .3 to 8 nats for simulated negative
binomial counts with r between .3 and 3, where ``NegativeBinomial`` gains .03 - .04 nats per held-out row on a learned
smoothness and .06 - .42 on ``Matern52``; .00 - .03 for Poisson counts of a process that neighbors share, and .02 on
bei_trees, where it gains nothing. Poisson counts of a process that changes from point to point reach 1.1, but then its
smoothness is learned as more than .2, and there is no warning.

Of negative binomial counts in ``LOO``: a Polya-Gamma variable is an observation of f with information :math:`E\, \omega
= (y + r) \tanh(c / 2) / (2 c)`, :math:`c^2 = E (f - \log r)^2`, where the count itself has :math:`\lambda r / (\lambda
+ r)` on average, :math:`\lambda = E\, y`. Both agree for :math:`r \approx \lambda`; as r grows, the counts becoming
Poisson ones, the first grows like :math:`r / (2 \log r)`, and standard deviations of f are too small by the root of the
ratio. Simulated, four sets of 600 counts each: 2.0 to 3.6 times for Poisson counts, where 95 % intervals of f cover .67
to .80; 1.3 to 1.7 for r = 20 (.76 to .90), 1.2 for r = 5 and 2, 1.6 to 2.0 for r = .5 (.72 to .95). Of 24 further sets,
with r from 1 to 32 and lengthscales from .06 to 1, six are below 1.17, where intervals cover .89 to .93; they cover .15
to .88 of f in the others.

Cost: the neighbors of 1,000 rows.
"""

from typing import Any

import torch

from pyro_nngp.inference.protocols import ReportsLeak, graph_of, offers, shard_of, single_output
from pyro_nngp.inference.svi.neighbor_check import some_rows
from pyro_nngp.inference.svi.result import warn_of
from pyro_nngp.kernels import Matern
from pyro_nngp.likelihoods import NegativeBinomial, Poisson
from pyro_nngp.likelihoods.counts import best_size

_ROWS, _LEAST, _NEIGHBORS = 1000, 100, 4
_GAIN, _ROUGH = 0.2, 0.2  # nats per row, smoothness
_EXCESS = 1.17  # of information: standard deviations of f are .92 of what they should be


@torch.no_grad()
def check_dispersion(method: Any) -> None:
    """Warn if Poisson counts without an offset vary about their neighbors far more than Poisson counts do."""
    graph, y = graph_of(method), single_output(method, _LEAST)
    if graph is None or y is None or not isinstance(method.likelihood, Poisson) or method.offset is not None:
        return
    if len(y) != len(graph.x):  # inducing points
        return
    if any(float(part.smoothness) > _ROUGH for part in method.kernel.modules() if _learns_smoothness(part)):
        return
    rows, y = some_rows(method.x, _ROWS), y.double()
    size, gain = best_size(y[rows], y[graph.others(_NEIGHBORS, rows)])
    if gain > _GAIN:
        warn_of(
            f"counts that vary about their neighbors as Poisson counts do, got {gain:.2g} nats per row "
            f"for negative binomial counts of size {float(size):.2g}: f follows what is noise, and its lengthscale "
            "and smoothness mean little. Take likelihood=NegativeBinomial(), and compare by cross_validate."
        )


@torch.no_grad()
def check_augmentation(method: Any) -> None:
    """Warn if Polya-Gamma variables of negative binomial counts know far more of f than the counts tell."""
    graph = graph_of(method) if offers(method, ReportsLeak) and shard_of(method) is None else None
    if graph is None or not isinstance(method.likelihood, NegativeBinomial) or len(method.y) < _LEAST:
        return
    rows, posterior = some_rows(method.x, _ROWS), method.posterior(method.bound())
    size = posterior.bound.likelihood.total_count.double().mean()
    near = torch.cat([rows[:, None], graph.others(_NEIGHBORS, rows)], -1)
    rate = method.y.double()[near].mean(-1)
    excess = float((1 / posterior.observations(rows)[1]).mean() / (rate * size / (rate + size)).mean())
    if excess > _EXCESS:
        warn_of(
            f"Polya-Gamma variables that tell of f what counts tell, got {excess:.2g} times as much at "
            f"total_count={float(size):.3g}: intervals of f are too narrow, {excess**-0.5:.2g} of their width. Take "
            "VNNGP(..., likelihood=NegativeBinomial()), or Poisson() there where total_count is large."
        )


def _learns_smoothness(part: torch.nn.Module) -> bool:
    return isinstance(part, Matern) and "smoothness" in part._pyro_params
