"""Hold-out splits and standardization.

A random split of spatial data asks for interpolation between close neighbors; `block_split` holds out whole blocks and
asks how a method bridges a gap. All splits are seeded and do not touch the global random state. Cost: O(N log N).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pyro_nngp._checks import (
    check_finite,
    check_fraction,
    check_inputs,
    check_int,
    check_memory,
    check_number,
    check_positive,
    check_seed,
    check_tensor,
    fail,
)
from pyro_nngp._random import shuffled


def random_split(num_points: int, fractions: Sequence[float], seed: int) -> tuple[Int[Tensor, " _"], ...]:
    """Divide the rows 0..N-1 at random.

    Args:
        num_points: N, at least the number of parts.
        fractions: positive shares of the parts, with sum one.
        seed: seed of the permutation.

    Returns:
        Disjoint sets of row numbers that together hold every row, each in ascending order.

    Raises:
        ValueError: if a share is not positive, they do not add to one, or a part would be empty.
    """
    check_int("random_split", "num_points", num_points, 1)
    check_memory("random_split", "row numbers", num_points, torch.int64)
    check_seed("random_split", seed)
    if not isinstance(fractions, Sequence) or isinstance(fractions, str | bytes) or not fractions:
        cure = "List the shares."
        fail("random_split", "fractions", "to be a list of numbers", f"{fractions!r:.40}", cure, TypeError)
    for share in fractions:
        check_number("random_split", "fractions", share, -math.inf)
    shares = torch.tensor(fractions, dtype=torch.float64)
    if bool((shares <= 0).any()) or abs(float(shares.sum()) - 1) > 1e-6:
        fail("random_split", "fractions", "to be positive with sum 1", tuple(fractions), "Rescale them.")
    ends = (shares.cumsum(0) * num_points).round().long().tolist()
    order = shuffled(num_points, seed)
    parts = torch.tensor_split(order, ends[:-1])
    if any(len(part) == 0 for part in parts):
        sizes = tuple(len(part) for part in parts)
        fail("random_split", "every part", "to hold a row", sizes, "Use more points or larger shares.")
    return tuple(part.sort().values for part in parts)


def block_split(x: Float[Tensor, "N D"], cell_size: float, fraction: float, seed: int) -> Bool[Tensor, " N"]:
    """Hold out whole cubes of side `cell_size`, drawn at random until they hold the wanted share of the points.

    Args:
        x: inputs, shape (N, D), all dimensions in one unit.
        cell_size: side of a cube in the units of `x`, positive.
        fraction: share of the points to hold out at least, in (0, 1).
        seed: seed of the order in which cubes are drawn.

    Returns:
        True at held-out points, shape (N,), on the device of `x`.

    Raises:
        ValueError: if an argument is out of range or nothing would be left to train on.
    """
    check_inputs("block_split", "x", x)
    check_positive("block_split", "cell_size", cell_size, "Give the side of a block in the units of x.")
    check_fraction("block_split", "fraction", fraction, "Use 0.2 to hold out a fifth of the points.")
    check_seed("block_split", seed)
    corner = x.min(dim=0).values
    _, cell, count = torch.unique(((x - corner) / cell_size).floor(), dim=0, return_inverse=True, return_counts=True)
    order = shuffled(len(count), seed, x.device)
    before = count[order].cumsum(0) - count[order]
    held_out = torch.zeros_like(count, dtype=torch.bool)
    held_out[order[before < fraction * len(x)]] = True
    if bool(held_out.all()):
        fail("block_split", "cell_size", "small enough to leave a block", f"{len(count)} blocks", "Use smaller blocks.")
    return held_out[cell]


class Standardizer:
    """Affine map of each column to mean zero and standard deviation one on the training rows.

    A column that is constant up to rounding keeps its unit, so that it maps to zero instead of to amplified rounding.

    Attributes:
        loc: column means of the training rows, shape () or (D,).
        scale: column standard deviations (divisor N), or 1 for a constant column, shape () or (D,).
    """

    def __init__(self, train: Float[Tensor, " N"] | Float[Tensor, "N D"]) -> None:
        """Compute the map.

        Args:
            train: training rows, shape (N,) or (N, D).

        Raises:
            TypeError: if `train` is not a floating-point tensor.
            ValueError: if it holds no row, or NaN or infinity.
        """
        check_tensor("Standardizer", "train", train)
        if train.dim() == 0 or train.numel() == 0:
            expectation = "of shape (N,) or (N, D) with N >= 1"
            fail("Standardizer", "train", expectation, tuple(train.shape), "Give training rows.")
        if not train.is_floating_point():
            fail("Standardizer", "train", "of a floating-point dtype", train.dtype, "Call .float() first.", TypeError)
        check_finite("Standardizer", "train", train)
        self.loc = train.mean(dim=0)
        scale = (train - self.loc).square().mean(dim=0).sqrt()
        rounding = 8 * torch.finfo(train.dtype).eps * train.abs().amax(dim=0)
        self.scale = torch.where(scale > rounding, scale, torch.ones_like(scale))

    def transform(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Map from original to standard units; the last dimension holds the columns."""
        self._check("transform", values)
        return (values - self.loc) / self.scale

    def inverse(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Map from standard to original units; multiply a standard deviation by `scale` instead."""
        self._check("inverse", values)
        return values * self.scale + self.loc

    def _check(self, method: str, values: Any) -> None:
        where = f"Standardizer.{method}"
        check_tensor(where, "values", values)
        if values.dtype == torch.bool:
            fail(where, "values", "to be numbers", values.dtype, "Give columns like those of train.", TypeError)
        if self.loc.dim() and values.shape[-1:] != self.loc.shape:
            fail(where, "values", f"with {len(self.loc)} columns", tuple(values.shape), "Give those of train.")
