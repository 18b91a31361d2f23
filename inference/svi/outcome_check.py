r"""Checks of a trained method: implausible losses, a mean function away from the data, leaks of labels, near copies.

With a loss of more than 1,000 nats per value the model all but excludes the data, whatever their units: f is where its
link is clamped, and has no gradient.

A constant mean is solved for given the kernel, as a sum of the data with weights that have both signs where the
function is smooth: differences between places or seasons are extrapolated. The constant can then lie far from the mean
of the data, and so do predictions beyond a lengthscale from them, such as forecasts of a series with seasons. With
residuals r of the mean function at n of the points, covariance matrix K and noise variance s^2, a right model has

.. math:: \bar r \sim N(0,\ 1^\top K 1 / n^2 + s^2 / n),

with a large variance for smooth functions, which may lie to one side of their mean at all data. So the mean residual
has to exceed one standard deviation of y, and two of its own.

Leave-one-out densities of labels can depend on auxiliary variables that know the label
(:mod:`pyro_nngp.models.loo`): more than a quarter of the loss is too much.

Where a third of rows have near copies (:mod:`pyro_nngp.plausibility.near_duplicates`), their densities without these
say what predictions are worth: a fall by more than two nats to squared errors of more than two predictive variances is
a model of the copies, and so is a loss of labels that rises to more than three times what it was.

Cost: a covariance matrix of 512 points; the leave-one-out densities of 200 rows, twice for copies, which are not looked
for with more than 800 neighbors.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.inference.protocols import Bounded, Checked, LeavesOut, ReportsLeak, graph_of, offers, shard_of
from pyro_nngp.inference.svi.neighbor_check import some_rows
from pyro_nngp.inference.svi.result import FitResult, warn_of
from pyro_nngp.kernels import Covariance

_MOST_LOSS = 1e3  # nats per value: more than the logarithm of the largest number, and so of any unit
_POINTS, _SPREADS, _DEVIATIONS = 512, 1.0, 2.0
_LABELS, _LEAK = 200, 0.25  # part of the loss
_COPIES, _FALL, _SQUARE = 1 / 3, 2.0, 2.0  # share of rows, nats, predictive variances
_LABEL_FALL, _LABEL_RATIO = 0.1, 2.0  # nats, and parts of the loss
_ENTRIES, _LEAST = 2**25, 50  # of the neighbor covariances of rows checked for near duplicates; of such rows
_MEAN_CURES = {
    False: "Put what repeats or lasts into it: seasons, trends and covariates by "
    "LinearMean(D, active_dims=[...], periods={...}).",
    True: "Its coefficients have a prior, and their posterior is decided by differences between near rows, which say "
    "little about a level if the kernel is not that of the data. Leave prior out: coefficients then follow from rows "
    "that are spread over the data. Or put what repeats or lasts into it, by active_dims=[...], periods={...}.",
}


class MeanDeparture(NamedTuple):
    """Distance of a mean function from the data, for the output where it is largest.

    Attributes:
        residual: mean residual of y.
        spreads: its size in standard deviations of y; 0 for a constant y.
        deviations: its size in standard deviations of the mean residual under the model.
    """

    residual: float
    spreads: float
    deviations: float


@torch.no_grad()
def mean_departure(method: Any) -> MeanDeparture | None:
    """Mean residual of Gaussian data from the mean function; None for other methods.

    Args:
        method: a method with one kernel.
    """
    if shard_of(method) is not None or not offers(method, Bounded) or not isinstance(method.y, Tensor):
        return None
    has_one_kernel = method.kernel is not None and not isinstance(method.kernel, torch.nn.ModuleList)
    rows = some_rows(method.y, _POINTS)
    if not has_one_kernel or not method.likelihood.is_gaussian or len(rows) < 2:
        return None
    bound, data = method.bound(), method.rows
    noise, mean = bound.likelihood.variance, data.mean(bound, rows)
    return departure(data.targets(rows).to(method.x), mean, noise, bound.covariance, method.x[rows])


def departure(
    y: Float[Tensor, "*T B"],
    mean: Float[Tensor, "*L B"],
    noise: Float[Tensor, "..."],
    covariance: Covariance,
    x: Float[Tensor, "B D"],
) -> MeanDeparture:
    """Mean residual of Gaussian data from the mean function, for the output where it is largest.

    Args:
        y: targets.
        mean: values of the mean function, and of the offset.
        noise: noise variance, which broadcasts to the shape of y.
        covariance: covariance function.
        x: inputs.
    """
    residual, noise = y - mean, noise.expand(y.shape).mean(-1)
    size = residual.mean(-1).abs()
    spread, rounding = y.std(-1), 4 * torch.finfo(y.dtype).eps * y.abs().amax(-1)
    spreads = torch.where(spread > rounding, size / spread, 0.0)  # a constant has no spread to measure by
    deviations = size / (covariance(x, x).mean() + noise / len(x)).sqrt()
    worst = int(torch.minimum(spreads / _SPREADS, deviations / _DEVIATIONS).argmax())
    return MeanDeparture(*(float(v.reshape(-1)[worst]) for v in (residual.mean(-1), spreads, deviations)))


def check_leak(method: Any) -> None:
    """Warn if leave-one-out densities of a trained method depend on variables that know the left-out label."""
    if not offers(method, ReportsLeak):
        return
    rows = some_rows(method.x, _LABELS)
    leak = method.leak(rows)
    if leak > 0.01 and leak > _LEAK * method.score(rows):
        warn_of(
            f"leave-one-out densities that do not know the label, got {leak:.2g} nats per label from "
            "what the auxiliary variables of neighbors know: kernel and mean fit labels that they have seen, and "
            'probabilities are too near 0 and 1. Compare with divergence="posterior", or with VNNGP.'
        )


def duplicate_dependence(method: Any, rows: Int[Tensor, " B"]) -> Any:
    """Densities of some rows with and without near copies of them; None for methods that do not know."""
    posterior: Any = method.posterior(method.bound()) if offers(method, Bounded) else None
    return posterior.duplicate_dependence(rows) if offers(posterior, LeavesOut) else None


def check_near_duplicates(method: Any) -> None:
    """Warn if a trained method predicts rows by near copies of them, and is wrong where there is none.

    Log losses of labels that come twice, and without the copy: .002 and .52 on banana, .02 and .26 on spambase, .004
    and .69 on cardiotocography. On sets as they are a sixth of the rows has copies, at most, and the loss rises to 2.4
    times.
    """
    graph = graph_of(method)
    if graph is None:
        return
    count = min(_LABELS, _ENTRIES // graph.num_neighbors**2)
    copies = duplicate_dependence(method, some_rows(method.x, count)) if count >= _LEAST else None
    if copies is None or not copies.share > _COPIES:
        return
    if copies.square is None:
        wrong = copies.fall > max(_LABEL_FALL, _LABEL_RATIO * copies.loss)
        error = f"a label costs {copies.loss + copies.fall:.2g} nats in place of {copies.loss:.2g}"
        others = "VNNGP suffers"
    else:
        wrong = copies.fall > _FALL and copies.square > _SQUARE
        error = f"squared errors are {copies.square:.2g} times the predictive variance"
        others = "Vecchia and VNNGP suffer"
    if not wrong:
        return
    less = f" {others} less than LOO." if type(method).__name__ == "LOO" else ""
    warn_of(
        "rows to be predicted by other rows than near copies of them, got copies of "
        f"{copies.share:.0%} of rows. Without these log densities fall by {copies.fall:.2g} nats, and {error}: "
        f"predictions at other places are that wrong. Drop copies of rows, or average rows that belong together.{less}"
    )


def check_outcome(method: Any, result: FitResult) -> None:
    """Warn if a trained method all but excludes the data, or its mean function lies away from them."""
    if offers(method, Checked) and isinstance(method.y, Tensor) and result.converged:
        weight = 1.0 if method.weights is None else float(method.weights.mean())
        values = math.prod(method.y.shape[1:]) * max(1.0, weight)
        if result.loss > _MOST_LOSS * values:
            warn_of(
                f"a loss of less than {_MOST_LOSS:g} nats per value, got {result.loss / values:.2g}: the "
                "model all but excludes the data, and its predictions mean nothing. Look at offset, which is on the "
                "scale of the link, and at hyperparameters that were set; counts may need NegativeBinomial()."
            )
            return
    away = mean_departure(method) if offers(method, Checked) else None
    if away is None or not (away.spreads > _SPREADS and away.deviations > _DEVIATIONS):
        return
    has_posterior = getattr(method._modules.get("mean"), "has_posterior", False)
    warn_of(
        f"the mean function to lie among the data, got residuals that average {away.residual:.3g}, "
        f"{away.spreads:.2g} standard deviations of y, and {away.deviations:.2g} times what the kernel explains. "
        f"Predictions away from the data, such as forecasts, go to the mean function. {_MEAN_CURES[has_posterior]}"
    )
