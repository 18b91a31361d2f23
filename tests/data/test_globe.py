"""Longitude and latitude as points in space."""

import math

import pytest
import torch

from pyro_nngp.data import lon_lat
from pyro_nngp.data.globe import EARTH_RADIUS


def test_chords_are_those_of_the_great_circle():
    places = torch.tensor([[0.0, 0.0], [90.0, 0.0], [179.9, 10.0], [-179.9, 10.0], [12.0, 90.0], [77.0, 90.0]]).double()
    points = lon_lat(places)
    torch.testing.assert_close(points.norm(dim=1), torch.full((6,), EARTH_RADIUS).double())
    lon, lat = places.deg2rad().unbind(1)
    half = ((lat[:, None] - lat) / 2).sin() ** 2 + lat[:, None].cos() * lat.cos() * (
        (lon[:, None] - lon) / 2
    ).sin() ** 2  # haversines
    torch.testing.assert_close(torch.cdist(points, points), 2 * EARTH_RADIUS * half.sqrt(), atol=1e-3, rtol=1e-9)
    assert torch.dist(points[2], points[3]).item() == pytest.approx(22.24 * math.cos(math.radians(10)), rel=1e-3)
    torch.testing.assert_close(points[4], points[5])  # one pole


def test_the_radius_sets_the_unit():
    torch.testing.assert_close(lon_lat(torch.tensor([[30.0, 0.0]]), 2.0), torch.tensor([[3**0.5, 1.0, 0.0]]))


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (torch.zeros(3, 3), r"expected degrees of shape \(N, 2\), got \(3, 3\)"),
        (torch.tensor([[4e5, 45.0]]), r"expected longitudes in -360..360, got 400000.0"),
        (torch.tensor([[45.0, 100.0]]), r"expected latitudes in -90..90, got 100.0. Give degrees, longitude first"),
    ],
)
def test_other_than_degrees_are_refused(degrees, message):
    with pytest.raises(ValueError, match=message):
        lon_lat(degrees)
