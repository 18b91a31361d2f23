"""Intervals of parameters without priors: of hyperparameters from their information, of the mean's coefficients.

Intervals of hyperparameters are normal on the unconstrained scale (:mod:`pyro_nngp.models.base.information`), mapped to
the scale of the value, so that they respect its constraint. Coefficients of the mean have normal intervals, with the
covariance of generalized least squares (:mod:`pyro_nngp.models.base.trend`).

An interval that the data hardly narrow is none: its ends are then the ends of the constraint, and its note says "not
identified".

Cost: the information.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import transform_to

from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.models.base.information import Information
from pyro_nngp.models.base.trend import bound_for_predictions

_WIDE = 1e4  # ratio of the ends of an interval of a positive number that is absurd
_MOST = 0.9  # part of a bounded range that an interval may take
UNKNOWN = "not identified"


class Interval(NamedTuple):
    """Ends of the intervals of the entries of a parameter, and what there is to say of each."""

    lower: Tensor
    upper: Tensor
    notes: list[str]


class Intervals:
    """Intervals of the parameters of a method.

    Args:
        method: the method.
        probability: of an interval.
    """

    def __init__(self, method: Any, probability: float) -> None:
        self._mean = method._modules.get("mean")
        self._shift = math.sqrt(2) * float(torch.erfinv(torch.tensor(probability).double()))
        self._reason, self._scales, self._centers, self._errors, self._trend = "", {}, {}, None, None
        try:
            found = information_of(method)
        except NotPositiveDefiniteError:
            found = "no interval: the covariance of the data is singular in double precision"
        if isinstance(found, Information):
            self._scales, self._centers, self._errors = found.scales(), found.centers(), found.errors
        else:
            self._reason = found
        if method.likelihood is not None and method.rows.is_whole:
            self._trend = bound_for_predictions(method).trend

    def of(self, part: Any, name: str, value: Tensor) -> Interval:
        """The interval of a parameter of a part of the method."""
        if part is self._mean:
            return self._of_coefficients(name, value)
        if (part, name) in self._scales:
            return self._of_hyperparameter(part, name)
        free = part._parameters[f"{name}_unconstrained"]
        return _none(value, self._reason if free.requires_grad else "fixed")

    def _of_hyperparameter(self, part: Any, name: str) -> Interval:
        constraint, _ = part._pyro_params[name]
        free = self._centers[part, name]
        wide, transform = self._shift * self._scales[part, name].to(free), transform_to(constraint)
        ends = torch.stack([transform(free - wide), transform(free + wide)])
        lower, upper = ends.amin(0), ends.amax(0)
        least = float(getattr(constraint, "lower_bound", -math.inf))
        most = float(getattr(constraint, "upper_bound", math.inf))
        if math.isfinite(most - least):
            is_wide = upper - lower > _MOST * (most - least)
        else:
            is_wide = (upper - least > _WIDE * (lower - least)) & math.isfinite(least)
        lower, upper = torch.where(is_wide, least, lower), torch.where(is_wide, most, upper)
        return Interval(lower, upper, [UNKNOWN if flag else "" for flag in is_wide.flatten().tolist()])

    def _of_coefficients(self, name: str, value: Tensor) -> Interval:
        """A level is the first coefficient, slopes are the others; rows of the root are in this order."""
        mean, trend = self._mean, self._trend
        if trend is None or not trend.is_flat or name not in ("value", "slope"):
            return _none(value, "taken as it is in predictions")
        found = trend.root.square().sum(-1).sqrt() if self._errors is None else self._errors  # (*own, p)
        scales = found.double().cpu()
        scales = scales.mT if mean.own_shape else scales
        scales = (scales[0] if name == "value" else scales[1:]).reshape(value.shape)
        note = "level by generalized least squares" if name == "value" else "by generalized least squares"
        value, is_known = value.double().cpu(), scales > 0
        wide = torch.where(is_known, self._shift * scales, math.inf)
        return Interval(value - wide, value + wide, [note if flag else UNKNOWN for flag in is_known.flatten().tolist()])


def information_of(method: Any) -> Information | str:
    """Covariance of the estimates of hyperparameters without priors; or the reason why the method has none."""
    return method._information() if method.rows.is_whole else "no interval on several processes"


def _none(value: Tensor, note: str) -> Interval:
    """No interval, and why."""
    missing = torch.full_like(value, math.nan)
    return Interval(missing, missing, [note] * value.numel())


__all__ = ["UNKNOWN", "Interval", "Intervals", "information_of"]
