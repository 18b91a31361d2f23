r"""Checks of residuals: heavy tails under Gaussian noise, and errors far beyond their size where noise has vanished.

Residuals of rows from their predictions by the nearest others, over predictive standard deviations, are standard normal
if the model is right. Outliers and skewed targets give them heavy tails: Gaussian noise is then too large for most rows
and too small for some. The largest mean log likelihood of a scaled Student-t distribution of the residuals,

.. math:: \max_{\nu, s}\ \frac1n \sum_i \log \frac{1}{s}\, t_\nu(z_i / s),

less the density of a normal distribution, is about the gain in nats per row of held-out data. The cure is ``VNNGP``
with ``StudentT()``, for ``LOO`` too: its pseudo-likelihood of Student-t data lost .03 nats to the one of Gaussian data
on elevations, where ``VNNGP`` gained .19. Noise has to be a quarter of predictive variances: tails of what the kernel
leaves are no matter of the likelihood, and ``StudentT()`` lost .06 nats on airfoil, where residuals promise .17.

With less noise than that a gain of more than a nat, and a residual of more than five standard deviations, are a model
that is exact at most rows and wrong at some. Leave-one-out densities reward that: on bike (targets that follow from the
inputs) ``LOO`` with noise of 3e-16 of the variance of y, gain 2.2 nats, has an NLL of 92, with noise above 1e-4 of the
variance of y -2.7, ``Vecchia`` -3.5. On six other sets with hardly any noise the gain is .4 nats at most.

Cost: one prediction of up to 1,000 rows, fewer with more than 180 neighbors.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Normal, StudentT

from pyro_nngp.inference.protocols import LeavesOut, graph_of, offers, single_output
from pyro_nngp.inference.svi.neighbor_check import some_rows
from pyro_nngp.inference.svi.result import warn_of

_ROWS, _LEAST, _ENTRIES = 1000, 100, 2**25  # rows, and entries of their neighbor covariances
_DEGREES, _ROUNDS = (2.0, 3.0, 5.0, 10.0), 30
_GAIN, _NOISE = 0.06, 0.25  # nats, part of predictive variances
_EXACT_GAIN, _FAR = 1.0, 5.0  # nats, standard deviations


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


class Tails(NamedTuple):
    """Residuals of a method in units of predictive standard deviations.

    Attributes:
        gain: nats per row that a Student-t distribution gains on a normal one.
        noise: part of the noise in predictive variances.
        largest: the largest residual.
    """

    gain: float
    noise: float
    largest: float

    @property
    def is_wrong_at_some(self) -> bool:
        """Whether the model is exact at most rows and wrong at some."""
        return self.noise < _NOISE and self.gain > _EXACT_GAIN and self.largest > _FAR


def tails_of(method: Any) -> Tails | None:
    """Tails of the residuals of a trained method; None where it has no Gaussian noise, or few rows."""
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
    return Tails(gain_of_heavy_tails(found[0]), float(found[1].mean()), float(found[0].abs().max()))


def check_tails(method: Any) -> None:
    """Warn if residuals of a trained method with Gaussian noise have heavy tails."""
    tails = tails_of(method)
    if tails is None:
        return
    gain, noise, largest = tails
    if noise >= _NOISE and gain > _GAIN:
        warn_of(
            "residuals with the tails of a normal distribution, got tails that a Student-t distribution "
            f"fits better by {gain:.2g} nats per row. Take VNNGP(x, y, likelihood=StudentT())."
        )
    elif tails.is_wrong_at_some:
        other = "Take Vecchia(x, y), or keep" if type(method).__name__ == "LOO" else "Keep"
        least = 1e-4 * float(method.y.var())
        warn_of(
            f"errors of the size that is predicted, got one of {largest:.2g} standard "
            f"deviations, and noise of {noise:.1g} of predictive variances: the model is exact at most rows and wrong "
            f"at some. {other} noise above 1e-4 of the variance of y: likelihood = Gaussian(); likelihood.variance = "
            f"PyroParam(torch.tensor({100 * least:.2g}), constraints.greater_than({least:.2g}))."
        )
