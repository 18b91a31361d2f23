r"""Check that labels, counts and other data that are not Gaussian show f.

A guide whose covariance is too simple costs the bound more, the more f varies among points that each say little. So
training may end where f is constant: of ten simulated sets of 500 labels with a signal (variance 1.5), the sparse
factor of ``NPVI`` ends four at variances of 2e-4 to .04, where 95 % intervals cover .09 to .26 of f; the bound is
higher there than at the hyperparameters that pseudo-observations find (336.0 for 345.9 nats lost). The variance of f
times the precision of one observation of it, at its posterior mean, tells: it is .15 - .4 for labels with a signal, and
6e-5 to .011 in the four sets.

Cost: predictions of f at 200 rows.
"""

from typing import Any

import torch

from pyro_nngp.inference.protocols import graph_of, single_output
from pyro_nngp.inference.svi.neighbor_check import moments_at, some_rows
from pyro_nngp.inference.svi.result import warn_of
from pyro_nngp.variational.natural_gradient import gaussian_sites
from pyro_nngp.variational.observed import ObservedGaussian

_ROWS = 200
_WEAK, _SIMPLE = 0.01, 0.05  # variance of f in units of that of one observation of it; by a guide that is too simple


@torch.no_grad()
def check_latent_signal(method: Any) -> None:
    """Warn if f is all but the mean function for what one datum tells of it; for one output and one function."""
    if single_output(method, 1) is None or method.likelihood.is_gaussian or method.likelihood.num_latents is not None:
        return
    bound, rows = method.bound(), some_rows(method.x, _ROWS)
    if getattr(bound.mean_function, "held", ()):  # data that show nothing, of which the method warned
        return
    x, graph = method.x[rows], graph_of(method)
    variance, offset = bound.covariance.diag(x), method.rows.mean(bound, rows) - bound.mean(x)
    loc, _ = moments_at(method, x, None if graph is None else graph.num_neighbors)
    sites = gaussian_sites(method.rows.likelihood(bound, rows), method.rows.targets(rows), loc + offset, variance)
    share = float((variance * sites[1]).mean())
    is_simple = not isinstance(method.q, ObservedGaussian)
    if share < (_SIMPLE if is_simple else _WEAK):
        cure = "Set the kernel's variance and lengthscale, or collect more rows."
        if is_simple:
            cure = "This guide may explain f away; take VNNGP, whose guide does not, and compare."
        warn_of(
            f"data that show f, got a variance of f of {float(variance.mean()):.1g}, {share:.1g} times "
            "the variance of one observation of it: predictions of f are the mean function, and their intervals have "
            f"no room for a signal that weak data hide. Where one is expected: {cure}"
        )
