"""The warning for places in degrees, or in columns of different units."""

import warnings

import pandas as pd
import pytest
import torch

from pyro_nngp import Vecchia
from pyro_nngp.data import lon_lat
from pyro_nngp.kernels import Matern32, Matern52, Warped

generator = torch.Generator().manual_seed(0)
unit = torch.rand(60, 3, dtype=torch.float64, generator=generator)


def scaled(*ranges):
    """Random columns within the ranges."""
    return torch.stack([low + (high - low) * unit[:, i] for i, (low, high) in enumerate(ranges)], 1)


def build(x, kernel=None):
    return Vecchia(x, torch.zeros(len(x), dtype=torch.float64) + unit[:, 0], kernel, num_neighbors=4)


AMERICA = ((-125, -66), (25, 50))
COLORADO = ((-109, -101), (36.5, 41.5), (800, 3500))
BRITAIN = ((-5.7, 1.8), (50, 55.8))
UTM = ((3.4e5, 6.2e5), (1.45e6, 1.52e6), (0, 24))


@pytest.mark.parametrize(
    ("ranges", "kernel", "match"),
    [
        (AMERICA, None, r"columns 0 and 1 .* 1.4 times as long at one end .*lon_lat"),
        (AMERICA[::-1], None, "columns 1 and 0 .* look like degrees"),
        (((-179, 179), (-60, 60)), None, "as long at one end of the data"),
        (COLORADO[:2], Matern52(2, isotropic=True), r"share a lengthscale, but .* is 0\.7\d as long"),
        (COLORADO, Matern52(3, lengthscale=2.0), "share a lengthscale"),
        (((-179.9, 179.9), (-20, 20)), None, "date line"),
        (BRITAIN, Matern32(2, isotropic=True), "columns 0 and 1 .* share a lengthscale, but .* is 0.60 as long"),
        (BRITAIN[::-1], Matern32(2, isotropic=True), "columns 1 and 0 .* share a lengthscale"),
        (UTM, Matern32(3, isotropic=True), r"columns \[2\] .* share a lengthscale with columns \[0, 1\]"),
        (((0, 10), (0, 10), (0, 86400)), Matern32(3, isotropic=True), r"\[0, 1\] .* with columns \[2\]"),
    ],
)
def test_places_that_the_kernel_cannot_take_are_reported(ranges, kernel, match):
    with pytest.warns(UserWarning, match=match):
        build(scaled(*ranges), kernel)


@pytest.mark.parametrize("name", ["lon", "Longitude"])
def test_names_of_columns_say_more_than_values(name):
    x = pd.DataFrame(scaled((1.0, 9.0), (44.0, 70.0)).numpy(), columns=[name, "lat"])
    with pytest.warns(UserWarning, match="look like degrees"):
        build(x)
    build(x.rename(columns={name: "dose", "lat": "age"}))


@pytest.mark.parametrize(
    ("ranges", "kernel"),
    [
        (COLORADO, None),  # one lengthscale for each column absorbs the difference
        (COLORADO, Matern32(2, active_dims=[0, 1]) * Matern32(1, active_dims=[2])),
        (UTM, None),
        (UTM, Matern32(2, isotropic=True, active_dims=[0, 1]) * Matern32(1, active_dims=[2])),
        (UTM[:2], Matern32(2, isotropic=True)),
        (((0, 1), (0, 1), (0, 1)), Matern32(3, isotropic=True)),
        (((0, 10), (0, 10), (0, 86400)), None),
        (((0, 10), (0, 90), (5, 5)), Matern32(3, isotropic=True)),
        (((-3, 3), (-3, 3)), Matern32(2, lengthscale=torch.tensor([1.0, 2.0]))),
        (((-50, 50), (0, 80)), None),
        (((15, 25), (40, 60)), None),  # temperature and humidity
        (((60, 170), (-60, 60)), None),
        (BRITAIN, None),
        (((0.5, 4.9), (0.5, 5.7)), Matern32(2, isotropic=True)),  # kilometers
    ],
)
def test_ordinary_columns_are_not_reported(ranges, kernel):
    build(scaled(*ranges), kernel)


def test_columns_with_long_tails_about_zero_are_no_longitudes():
    """Third moments of images along an axis of a telescope's pictures, beside an angle in degrees."""
    x = scaled((0, 1), (0, 90))
    x[:, 0] = 12 * torch.tan(3.0 * (unit[:, 0] - 0.5))
    x[:2, 0] = torch.tensor([-150.0, 120.0])
    build(x)


def test_the_cure_is_not_reported():
    degrees = scaled(*AMERICA)
    build(
        torch.cat([lon_lat(degrees[:, :2]), unit[:, 2:]], 1),
        Matern32(3, isotropic=True, active_dims=[0, 1, 2]) * Matern32(1, active_dims=[3]),
    )


def test_whole_numbers_and_mapped_inputs_are_not_reported():
    build(scaled(*AMERICA).round())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(scaled(*COLORADO[:2]), Warped(Matern32(2, isotropic=True), torch.nn.Identity(), 2))
