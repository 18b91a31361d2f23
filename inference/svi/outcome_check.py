r"""Checks of what training came to: a loss that data do not have, a mean away from them, leaks of labels and copies.

A loss of more than 1,000 nats per value says that the model all but excludes the data, in whatever units they are: f is
then where its link is clamped, and has no gradient.

A constant mean is solved for given the kernel, as a sum of the data with weights that have both signs where the
function is smooth: differences between places or seasons are extrapolated. The constant can then lie far from the mean
of the data, and so do predictions beyond a lengthscale from them, such as forecasts of a series with seasons. With
residuals r of the mean function at n of the points, covariance matrix K and noise variance s^2, a right model has

.. math:: \bar r \sim N(0,\ 1^\top K 1 / n^2 + s^2 / n),

with a large variance for smooth functions, which may lie to one side of their mean at all data. So the mean residual
has to exceed one standard deviation of y, and two of its own.

Leave-one-out densities of labels can owe much to auxiliary variables that know the label
(:mod:`pyro_nngp.models.loo`): more than a quarter of the loss is too much.

Where a third of rows have near copies (:mod:`pyro_nngp.models.base.twins`), their densities without these say what
predictions are worth: a fall by more than two nats to squared errors of more than two predictive variances is a
model of the copies, and so is a loss of labels that rises to more than three times what it was.

Cost: a covariance matrix of 512 points; the leave-one-out densities of 200 rows, twice for copies, which are not looked
for with more than 800 neighbors.
"""

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nngp.hyperparameters import freeze, pyro_entry
from pyro_nngp.inference.svi.neighbor_check import some_rows
from pyro_nngp.inference.svi.result import ConvergenceWarning, FitResult
from pyro_nngp.kernels import bind

_MOST_LOSS = 1e3  # nats per value: more than the logarithm of the largest number, and so of any unit
_POINTS, _SPREADS, _DEVIATIONS = 512, 1.0, 2.0
_LABELS, _LEAK = 200, 0.25  # part of the loss
_TWINS, _FALL, _SQUARE = 1 / 3, 2.0, 2.0  # share of rows, nats, predictive variances
_LABEL_FALL, _LABEL_RATIO = 0.1, 2.0  # nats, and parts of the loss
_ENTRIES, _LEAST = 2**25, 50  # of the neighbor covariances of rows that twins are looked for at; of such rows


class MeanDeparture(NamedTuple):
    """The distance of a mean function from the data, of the output where it is farthest.

    Attributes:
        residual: mean residual of y.
        spreads: its size in standard deviations of y; 0 for a y that is constant.
        deviations: its size in standard deviations of its own under the model.
    """

    residual: float
    spreads: float
    deviations: float


@pyro_entry
@torch.no_grad()
def mean_departure(method: Any, seed: int = 0) -> MeanDeparture | None:
    """Mean residual of Gaussian data from the mean function; None for other methods.

    Args:
        method: a method with one kernel.
        seed: seed of the choice of points.
    """
    likelihood, y = getattr(method, "likelihood", None), getattr(method, "y", None)
    kernel: Any = getattr(method, "kernel", None)
    if (
        getattr(method, "shard", None) is not None
        or kernel is None
        or isinstance(kernel, torch.nn.ModuleList)
        or not (isinstance(y, Tensor) and getattr(likelihood, "is_gaussian", False))
    ):
        return None
    method.hyper_guide.median()
    trend = method.known_trend()
    rows = some_rows(y, _POINTS, seed)
    if trend is None or len(rows) < 2:
        return None
    x = method.x[rows]
    y = y[rows].to(x).movedim(0, -1)
    residual = y - trend(rows)
    if method.offset is not None:
        residual = residual - method.offset[rows].movedim(0, -1)
    noise = freeze(likelihood).variance.expand(y.shape).mean(-1)
    size = residual.mean(-1).abs()
    spread, rounding = y.std(-1), 4 * torch.finfo(y.dtype).eps * y.abs().amax(-1)
    spreads = torch.where(spread > rounding, size / spread, 0.0)  # a constant has no spread to measure by
    deviations = size / (bind(kernel)(x, x).mean() + noise / len(x)).sqrt()
    worst = int(torch.minimum(spreads / _SPREADS, deviations / _DEVIATIONS).argmax())
    return MeanDeparture(*(float(v.reshape(-1)[worst]) for v in (residual.mean(-1), spreads, deviations)))


def check_leak(method: Any, stacklevel: int) -> None:
    """Warn if the leave-one-out densities of a trained method owe much to variables that know the datum."""
    if not hasattr(method, "leak"):
        return
    rows = some_rows(method.x, _LABELS, 0)
    leak = method.leak(rows)
    if leak > 0.01 and leak > _LEAK * method.score(rows):
        warnings.warn(
            f"fit: expected leave-one-out densities that do not know the label, got {leak:.2g} nats per label from "
            "what the auxiliary variables of neighbors know of it: kernel and mean fit labels that they have seen, and "
            'probabilities are too near 0 and 1. Compare with divergence="posterior", or with VNNGP.',
            ConvergenceWarning,
            stacklevel=stacklevel + 1,
        )


def check_twins(method: Any, stacklevel: int) -> None:
    """Warn if a trained method predicts rows by near copies of them, and is wrong where there is none.

    Log losses of labels that come twice, and without the copy: .002 and .52 on banana, .02 and .26 on spambase, .004
    and .69 on cardiotocography. On sets as they are a sixth of the rows has copies, at most, and the loss rises to 2.4
    times.
    """
    if not hasattr(method, "twin_dependence"):
        return
    count = min(_LABELS, _ENTRIES // method.graph.num_neighbors**2)
    found = method.twin_dependence(some_rows(method.x, count, 0)) if count >= _LEAST else None
    if found is None or not found.share > _TWINS:
        return
    if found.square is None:
        wrong = found.fall > max(_LABEL_FALL, _LABEL_RATIO * found.loss)
        error = f"a label costs {found.loss + found.fall:.2g} nats in place of {found.loss:.2g}"
        others = "VNNGP suffers"
    else:
        wrong = found.fall > _FALL and found.square > _SQUARE
        error = f"squared errors are {found.square:.2g} times the predictive variance"
        others = "Vecchia and VNNGP suffer"
    if not wrong:
        return
    less = f" {others} less than LOO." if type(method).__name__ == "LOO" else ""
    warnings.warn(
        "fit: expected rows to be predicted by other rows than near copies of them, got copies of "
        f"{found.share:.0%} of rows. Without these log densities fall by {found.fall:.2g} nats, and {error}: "
        f"predictions at other places are that wrong. Drop copies of rows, or average rows that belong together.{less}",
        ConvergenceWarning,
        stacklevel=stacklevel + 1,
    )


def check_outcome(method: Any, result: FitResult, stacklevel: int) -> None:
    """Warn if training ended where the data are all but impossible, or with a mean function away from the data."""
    y, weights = getattr(method, "y", None), getattr(method, "weights", None)
    if isinstance(y, Tensor) and result.converged:
        values = math.prod(y.shape[1:]) * max(1.0, 1.0 if weights is None else float(weights.mean()))
        if result.loss > _MOST_LOSS * values:
            warnings.warn(
                f"fit: expected a loss of less than {_MOST_LOSS:g} nats per value, got {result.loss / values:.2g}: the "
                "model all but excludes the data, and its predictions mean nothing. Look at offset, which is on the "
                "scale of the link, and at hyperparameters that were set; counts may need NegativeBinomial().",
                ConvergenceWarning,
                stacklevel=stacklevel + 1,
            )
            return
    found = mean_departure(method) if hasattr(method, "hyper_guide") else None
    if found is None or not (found.spreads > _SPREADS and found.deviations > _DEVIATIONS):
        return
    warnings.warn(
        f"fit: expected the mean function to lie among the data, got residuals that average {found.residual:.3g}, "
        f"{found.spreads:.2g} standard deviations of y, and {found.deviations:.2g} times what the kernel explains. "
        "Predictions away from the data, such as forecasts, go to the mean function. Put what repeats or lasts into "
        'it: seasons, trends and covariates as columns of LinearMean(D, prior="weak", active_dims=[...]).',
        ConvergenceWarning,
        stacklevel=stacklevel + 1,
    )
