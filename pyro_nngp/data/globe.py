r"""Places on the globe: longitude and latitude as points in space.

.. math:: x = R (\cos\phi \cos\lambda, \cos\phi \sin\lambda, \sin\phi)

Distances between such points are chords, on which every kernel of ``R^3`` is a valid covariance; a Matérn kernel of
great-circle distances is none in general. Chords order neighbors as great circles do, have no seam at the date line,
and fall short of the arc by 0.1 % at 1,000 km. Spherical Earth; against the ellipsoid distances are off by 0.5 % at
most.

Cost: O(N).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_inputs, check_number, fail

EARTH_RADIUS = 6371.0088
"""Mean radius of the Earth [km] (IUGG)."""


def lon_lat(degrees: Float[Tensor, "N 2"], radius: float = EARTH_RADIUS) -> Float[Tensor, "N 3"]:
    """Points in space for longitudes and latitudes, as inputs of a kernel.

    Args:
        degrees: longitude in -360..360 and latitude in -90..90 [degrees], in this order.
        radius: of the globe; lengthscales of a kernel are in its unit, kilometers by default.

    Returns:
        Cartesian coordinates in the unit of `radius`.

    Raises:
        ValueError, TypeError: for other shapes or values.
    """
    check_inputs("lon_lat", "degrees", degrees)
    check_number("lon_lat", "radius", radius)
    if degrees.shape[1] != 2:
        fail("lon_lat", "degrees", "of shape (N, 2)", tuple(degrees.shape), "Give longitude and latitude.")
    for column, (name, limit) in enumerate((("longitudes", 360), ("latitudes", 90))):
        largest = degrees[:, column].abs().amax().item()
        if largest > limit:
            fail("lon_lat", name, f"in -{limit}..{limit}", largest, "Give degrees, longitude first.")
    longitude, latitude = degrees.deg2rad().unbind(1)
    parts = latitude.cos() * longitude.cos(), latitude.cos() * longitude.sin(), latitude.sin()
    return radius * torch.stack(parts, 1)


__all__ = ["EARTH_RADIUS", "lon_lat"]
