"""Warnings of guides with known weights."""

import warnings

import pytest
import torch

from pyro_nngp.inference.autoguide.fit_check import Weighted, joined, warn_of_poor_fit


def of_ratio(ratio, dimension):
    """Draws of N(0, ratio^2 I), weighted for N(0, I), of which all values are determined by the data."""
    white = torch.randn(400, dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares = white.square().sum(-1)
    return Weighted((1 - ratio**2) / 2 * squares, squares)


@pytest.mark.parametrize("dimension", [20, 500])
def test_the_width_counts_in_any_number_of_dimensions(dimension):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_poor_fit(of_ratio(0.95, dimension), 0, "it")
    with pytest.warns(UserWarning, match=r"AutoNNGP: it is far from the posterior.*QuickNUTS"):
        warn_of_poor_fit(of_ratio(0.4, dimension), 0, "it")


def test_weights_that_are_not_numbers_warn():
    draws = joined([of_ratio(1.0, 2), Weighted(torch.full((1,), -torch.inf).double(), torch.ones(1).double())])
    with pytest.warns(UserWarning, match="far from the posterior"):
        warn_of_poor_fit(draws, 0, "it")
