r"""Checks of residuals: heavy tails under Gaussian noise, and errors far beyond their predicted size.

Residuals of rows from their predictions by the nearest others, over predictive standard deviations, are standard normal
if the model is right. Outliers and skewed targets give them heavy tails: Gaussian noise is then too large for most rows
and too small for some. The largest mean log likelihood of a scaled Student-t distribution of the residuals,

.. math:: \max_{\nu, s}\ \frac1n \sum_i \log \frac{1}{s}\, t_\nu(z_i / s),

less the density of a normal distribution, is about the gain in nats per row of held-out data. The cure is ``VNNGP``
with ``StudentT()``, for ``LOO`` too: its pseudo-likelihood of Student-t data lost .03 nats to the one of Gaussian data
on elevations, where ``VNNGP`` gained .19. Noise has to be a quarter of predictive variances: tails of what the kernel
leaves are no matter of the likelihood, and ``StudentT()`` lost .06 nats on airfoil, where residuals promise .17.

Leave-one-out densities alone do not bound the errors of predictions from fewer rows: where targets follow from the
inputs, as on bike, they grow as noise vanishes, far beyond the densities of new data (5.7 nats per row, and -4.6; those
of ``Vecchia`` 3.5). The errors of 512 rows, each predicted from those before it, show it: their squares are 670 times
their predictive variances on bike, and once if the model is right. On 29 other sets of 1,500 rows they are 5 times as
large at most, on 6,000 rows of naval 13 times.

Cost: one prediction of up to 1,000 rows, fewer with more than 180 neighbors; a factor of 512 rows.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Normal, StudentT

from pyro_nngp.inference.protocols import LeavesOut, graph_of, offers, single_output
from pyro_nngp.inference.svi.exact_rows import ExactRows, exact_rows
from pyro_nngp.inference.svi.neighbor_check import some_rows
from pyro_nngp.inference.svi.result import warn_of
from pyro_nngp.linalg import half_solve

_ROWS, _LEAST, _ENTRIES = 1000, 100, 2**25  # rows, and entries of their neighbor covariances
_DEGREES, _ROUNDS = (2.0, 3.0, 5.0, 10.0), 30
_GAIN, _NOISE = 0.06, 0.25  # nats, part of predictive variances
_EXCESS = 50.0  # of squared errors over their predictive variances


def gain_of_heavy_tails(z: Float[Tensor, " B"]) -> float:
    """Mean log likelihood of residuals under the best scaled Student-t distribution less that under the best normal."""
    z = z.double()
    normal, best = Normal(0.0, z.square().mean().sqrt()).log_prob(z).mean(), z.new_tensor(-torch.inf)
    for degrees in _DEGREES:
        square = z.square().median()
        for _ in range(_ROUNDS):  # of expectation maximization
            square = ((degrees + 1) * z.square() / (degrees + z.square() / square)).mean()
        best = torch.maximum(best, StudentT(degrees, 0.0, square.sqrt()).log_prob(z).mean())
    return float(best - normal)


def tails_of(method: Any) -> tuple[float, float] | None:
    """Tails of the residuals of a trained method, in units of predictive standard deviations.

    Returns:
        The gain of :func:`gain_of_heavy_tails`, and the part of the noise in predictive variances; None where noise is
        not Gaussian, or rows are few.
    """
    graph = graph_of(method)
    if graph is None or single_output(method, _LEAST) is None:
        return None
    count = min(_ROWS, _ENTRIES // graph.num_neighbors**2)
    if count < _LEAST:
        return None
    posterior: Any = method.posterior(method.bound())
    if not offers(posterior, LeavesOut):
        return None
    found = posterior.standardized_residuals(some_rows(method.x, count))
    if found is None or not bool(found[0].any()):
        return None
    return gain_of_heavy_tails(found[0]), float(found[1].mean())


def check_tails(method: Any) -> None:
    """Warn if residuals of a trained method with Gaussian noise have heavy tails."""
    gain, noise = tails_of(method) or (0.0, 0.0)
    if noise >= _NOISE and gain > _GAIN:
        warn_of(
            "residuals with the tails of a normal distribution, got tails that a Student-t distribution "
            f"fits better by {gain:.2g} nats per row. Take VNNGP(x, y, likelihood=StudentT())."
        )


def excess_of_errors(exact: ExactRows) -> float:
    """Mean squared error of rows predicted from those before them, in predictive variances: 1 if the model is right."""
    return float(half_solve(exact.tril, exact.residual[:, None]).square().mean())


def is_overconfident(method: Any) -> bool:
    """Whether predictions from fewer rows err far beyond their size."""
    exact = exact_rows(method)
    return exact is not None and excess_of_errors(exact) > _EXCESS


def check_errors(method: Any, exact: ExactRows | None) -> None:
    """Warn if predictions of a trained method with Gaussian noise, from fewer rows, err far beyond their size."""
    excess = 0.0 if exact is None else excess_of_errors(exact)
    if excess <= _EXCESS:
        return
    other = "Take Vecchia(x, y), or keep" if type(method).__name__ == "LOO" else "Keep"
    least = 1e-4 * float(method.y.var())
    warn_of(
        f"errors of the size that is predicted, got errors {excess**0.5:.2g} times as large where each of some rows is "
        f"predicted from others that are fewer: intervals are too narrow away from the data. {other} noise above 1e-4 "
        "of the variance of y: likelihood = Gaussian(); likelihood.variance = "
        f"PyroParam(torch.tensor({100 * least:.2g}), constraints.greater_than({least:.2g}))."
    )
