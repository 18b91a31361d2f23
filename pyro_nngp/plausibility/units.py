r"""A warning for places in degrees, or columns of different units, that the kernel cannot take as they are.

A degree of longitude is :math:`\cos\phi` times as long as one of latitude. One lengthscale for each column absorbs that
where latitudes :math:`\phi` are much the same, but not over a continent, nor across the date line; a lengthscale that
both columns share never does. Columns of different units, such as kilometers and seconds, need separate lengthscales:
one with a hundredth of the spread of another counts for nothing in distances.

Cost: O(min(N, 4096) D).
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pyro_nngp._checks import warn
from pyro_nngp.hyperparameters import unset_hyperparameters
from pyro_nngp.kernels import Kernel, Stationary

_ROWS = 4096
_LONGITUDES, _LATITUDES = ("lon", "long", "lng", "longitude"), ("lat", "latitude")
_VARIES = 1.25  # ratio of the lengths of a degree of longitude at the latitudes of the data
_ALIKE = 0.95  # cosine above which a degree of longitude counts as long as one of latitude
_OTHER_UNIT = 100.0  # ratio of spreads
_QUARTILES = 45.0  # degrees between quartiles of longitudes around the globe; 15 for a column of a telescope's images


def warn_of_units(where: str, x: Float[Tensor, "N D"], names: tuple[str, ...] | None, kernel: Any) -> None:
    """Warn of columns of longitude and latitude, or of several units, that do not suit the kernel.

    Args:
        where: name of the caller.
        x: inputs.
        names: names of the columns, if known.
        kernel: kernel of the method; the columns that share one of its lengthscales need equal units.
    """
    sample = x.detach()[:: max(1, len(x) // _ROWS)].double()
    shared = _sharing(kernel, x.shape[1])
    degrees = _named(names) if names else _degrees(sample) or _degrees_in_europe(sample, shared)
    problem = None if degrees is None else _distortion(sample, *degrees, shared)
    if degrees is not None and problem:
        a, b = degrees
        warn(
            f"{where}: columns {a} and {b} of x look like degrees of longitude and latitude; {problem}. Replace them "
            f"by three columns of kilometers in space, pyro_nngp.data.lon_lat(x[:, [{a}, {b}]]), and leave the kernel "
            "unset, or give it three columns for two."
        )
    spread = sample.std(0, correction=0)
    for part in shared:
        small = {i for i in part if 0 < spread[i] * _OTHER_UNIT < spread[list(part)].max()}
        if small:
            warn(
                f"{where}: columns {sorted(small)} of x share a lengthscale with columns {sorted(part - small)}, but "
                f"have less than a hundredth of the largest spread: distances of {type(kernel).__name__} all but leave "
                "them out. Unless all have one unit, give each unit a kernel of its own by active_dims, and multiply "
                "them, or give each column its own lengthscale, as without isotropic=True."
            )


def _distortion(x: Tensor, lon: int, lat: int, shared: list[set[int]]) -> str | None:
    """Description of the largest error that the kernel makes with degrees; None if all are small."""
    lengths = torch.deg2rad(x[:, lat].clamp(-90, 90)).cos().quantile(torch.tensor([0.01, 0.5, 0.99]).to(x))
    low, middle, high = lengths.tolist()
    if any(part.issuperset((lon, lat)) for part in shared) and middle < _ALIKE:
        return f"they share a lengthscale, but a degree of longitude is {middle:.2f} as long as one of latitude"
    if low * _VARIES < high:
        return (
            f"a degree of longitude is {high / max(low, 1e-3):.2g} times as long at one end of the data as at another"
        )
    if bool((x[:, lon] < -170).any() & (x[:, lon] > 170).any()):
        return "neighbors across the date line are apart"
    return None


def _named(names: tuple[str, ...]) -> tuple[int, int] | None:
    """Longitude and latitude among names of columns."""
    lowered = [name.lower() for name in names]
    longitudes, latitudes = (
        [i for i, name in enumerate(lowered) if name in each] for each in (_LONGITUDES, _LATITUDES)
    )
    return (longitudes[0], latitudes[0]) if longitudes and latitudes else None


def _finer_than_tenths(x: Float[Tensor, "n D"]) -> Bool[Tensor, " D"]:
    """Whether more than a fifth of the values of each column are."""
    return ((10 * x - (10 * x).round()).abs() > 1e-3).double().mean(0) > 0.2


def _degrees_in_europe(x: Tensor, shared: list[set[int]]) -> tuple[int, int] | None:
    """Two columns with separate lengthscales, and no other column, with values as in Europe, finer than tenths.

    Other quantities have such values too, but are not given one lengthscale.
    """
    fine, low, high = _finer_than_tenths(x), x.amin(0), x.amax(0)
    for pair in (sorted(part) for part in shared if len(part) == 2):
        for a, b in (pair, pair[::-1]):
            in_europe = low[a] >= -25 and high[a] <= 60 and low[b] >= 35 and high[b] <= 72
            span, other = high[a] - low[a], high[b] - low[b]
            if fine[a] and fine[b] and in_europe and span / 8 <= other <= 2 * span:
                return a, b
    return None


def _degrees(x: Tensor) -> tuple[int, int] | None:
    """Adjacent columns whose values can hardly be anything but longitude and latitude.

    They are finer than tenths, and go around the globe, or lie in the Americas, or east of 60 degrees with latitudes
    of one sign. Longitudes around the globe have quartiles far apart; a symmetric quantity with long tails has not.
    """
    fine, low, high = _finer_than_tenths(x), x.amin(0), x.amax(0)
    lower, upper = x.quantile(torch.tensor([0.25, 0.75]).to(x), dim=0)
    for a in range(x.shape[1]):
        around = low[a] >= -180 and high[a] <= 360 and low[a] < -100 and high[a] > 100
        around = around and upper[a] - lower[a] > _QUARTILES
        part = (low[a] >= -180 and high[a] <= -30) or (low[a] >= 60 and high[a] <= 180)
        for b in (a + 1, a - 1):
            if not (0 <= b < x.shape[1] and fine[a] and fine[b] and low[b] >= -90 and high[b] <= 90):
                continue
            span, other = high[a] - low[a], high[b] - low[b]
            one_sign = (low[b] >= 5 or high[b] <= -5) and span / 8 <= other <= 2 * span
            if (around and other > 30) or (part and one_sign):
                return a, b
    return None


def _sharing(kernel: Any, dim: int) -> list[set[int]]:
    """Sets of columns that share a lengthscale."""
    parts = list(kernel.modules()) if isinstance(kernel, Kernel) else []
    if any(part.moves_inputs for part in parts if isinstance(part, Kernel)):
        return []
    unset = [part for part, name in unset_hyperparameters(kernel) if name == "lengthscale"] if parts else []
    kernels = [part for part in parts if isinstance(part, Stationary) and part.input_dim > 1]
    one = [part for part in kernels if part.isotropic or not (part in unset or _has_columns(part))]
    return [set(range(dim) if part.active_dims is None else part.active_dims) for part in one]


def _has_columns(kernel: Stationary) -> bool:
    """Whether a lengthscale that was set has a value for each column, or a prior, whose shape is not known."""
    return "lengthscale" in kernel._pyro_samples or kernel.lengthscale.numel() > 1
