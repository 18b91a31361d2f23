"""Splits and standardization: partitions, block structure, inversion, and the messages for input they refuse."""

import math

import numpy as np
import pytest
import torch

from pyro_nngp.data.preprocessing import Standardizer, block_split, random_split


@pytest.fixture
def grid() -> torch.Tensor:
    """A 30 x 40 unit grid, away from the origin."""
    axes = torch.arange(30, dtype=torch.float64) - 7, torch.arange(40, dtype=torch.float64) + 100
    return torch.cartesian_prod(*axes)


def test_random_split_is_a_partition_of_the_wanted_sizes():
    parts = random_split(101, (0.7, 0.2, 0.1), seed=3)
    assert [len(part) for part in parts] == [71, 20, 10]
    assert torch.cat(parts).sort().values.tolist() == list(range(101))
    assert all(bool((part.diff() > 0).all()) for part in parts)


def test_random_split_follows_its_seed_alone():
    state = torch.get_rng_state()
    first = random_split(50, (0.5, 0.5), seed=1)[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(random_split(50, (0.5, 0.5), seed=1)[0], first)
    assert not torch.equal(random_split(50, (0.5, 0.5), seed=2)[0], first)


def test_block_split_holds_out_whole_blocks_and_no_more_than_needed(grid):
    held_out = block_split(grid, cell_size=5, fraction=0.2, seed=0)
    per_block = held_out.reshape(6, 5, 8, 5).sum((1, 3))  # the grid is 6 x 8 blocks of 25 points
    assert set(per_block.unique().tolist()) == {0, 25}
    assert int(held_out.sum()) == 25 * math.ceil(0.2 * 48)


def test_block_split_does_not_depend_on_the_origin(grid):
    moved = block_split(grid - 1e5, cell_size=5, fraction=0.2, seed=0)
    assert torch.equal(moved, block_split(grid, cell_size=5, fraction=0.2, seed=0))


def test_block_split_follows_its_seed(grid):
    masks = {tuple(block_split(grid, cell_size=5, fraction=0.2, seed=seed).tolist()) for seed in (0, 0, 1)}
    assert len(masks) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standardizer_uses_the_training_rows_alone(dtype):
    train, test = 5 + 3 * torch.randn(40, 3, dtype=dtype), torch.randn(7, 3, dtype=dtype)
    map_ = Standardizer(train)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    expected = (test.numpy() - train.numpy().mean(0)) / train.numpy().std(0)
    np.testing.assert_allclose(map_.transform(test), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(map_.inverse(map_.transform(test)), test, rtol=tolerance, atol=tolerance)
    assert map_.transform(test).dtype == dtype


def test_standardizer_of_a_vector():
    y = torch.tensor([1.0, 3.0])
    assert Standardizer(y).transform(y).tolist() == [-1, 1]


@pytest.mark.parametrize("value", [0.0, 0.1, 1e8])
def test_a_column_constant_up_to_rounding_maps_to_zero(value):
    column = torch.full((1000, 1), value)
    map_ = Standardizer(column)
    assert map_.scale.tolist() == [1]
    assert float(map_.transform(column).abs().max()) <= 1e-5 * value


def test_a_small_spread_about_a_large_mean_is_not_taken_for_constant():
    column = 1000 + 0.01 * torch.randn(500, 1, dtype=torch.float64)
    assert float(Standardizer(column).transform(column).std(unbiased=False)) == pytest.approx(1)


X = torch.rand(20, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random_split(10, (0.5, 0.4), seed=0), r"random_split: expected fractions to be positive with sum 1"),
        (lambda: random_split(10, (1.5, -0.5), seed=0), r"random_split: expected fractions to be positive with sum 1"),
        (
            lambda: random_split(10, (0.99, 0.01), seed=0),
            r"random_split: expected every part to hold a row, got \(10, 0\)",
        ),
        (lambda: block_split(X[:, 0], 1.0, 0.2, seed=0), r"block_split: expected x of shape \(N, D\)"),
        (lambda: block_split(X, 0.0, 0.2, seed=0), "block_split: expected cell_size to be finite and > 0, got 0.0"),
        (lambda: block_split(X, 0.1, 1.0, seed=0), r"block_split: expected fraction in \(0, 1\), got 1.0"),
        (
            lambda: block_split(X, 5.0, 0.2, seed=0),
            "block_split: expected cell_size small enough to leave a block, got 1",
        ),
        (lambda: Standardizer(X[:0]), r"Standardizer: expected train of shape .*, got \(0, 2\)"),
        (lambda: Standardizer(torch.tensor(1.0)), r"Standardizer: expected train of shape .*, got \(\)"),
        (lambda: Standardizer(X * math.nan), "Standardizer: expected train to be finite, got 40 NaN"),
    ],
)
def test_wrong_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([1.0, 2.0], "Standardizer: expected train to be a torch.Tensor, got list"),
        (torch.tensor([1, 2]), "Standardizer: expected train of a floating-point dtype, got torch.int64"),
    ],
)
def test_wrong_kinds_are_named(train, message):
    with pytest.raises(TypeError, match=message):
        Standardizer(train)


def test_flags_are_not_in_standard_units():
    with pytest.raises(TypeError, match=r"Standardizer.transform: expected values to be numbers, got torch.bool"):
        Standardizer(X).transform(X > 0)
