"""Folds: every row has one, parts stay together, and sizes are balanced."""

import numpy as np
import pytest
import torch
from builders import uniform

from pyro_nngp.data.folds import assign_folds


def folds(x, *args, **options):
    return assign_folds("f", x, *args, **options)


def test_random_folds_have_equal_sizes_and_a_seed():
    x = uniform(103)
    fold = folds(x, seed=1)
    assert fold.bincount().tolist() == [11] * 3 + [10] * 7
    assert torch.equal(fold, folds(x, 10, seed=1))
    assert not torch.equal(fold, folds(x, 10, seed=2))
    assert folds(uniform(7)).bincount().tolist() == [1] * 7  # fewer rows than the usual folds


def test_groups_are_never_split_and_folds_are_balanced():
    labels = np.array(["a", "b", "c", "d", "e", "f"])[np.repeat(np.arange(6), [40, 10, 10, 10, 10, 40])]
    fold = folds(uniform(120), 3, groups=labels)
    for label in set(labels):
        assert len(fold[torch.from_numpy(labels == label)].unique()) == 1
    assert fold.bincount().tolist() == [40, 40, 40]
    assert folds(uniform(120), groups=labels).max() == 5  # as many folds as groups


def test_blocks_are_boxes_of_the_given_sides():
    x = uniform(300)
    fold = folds(x, 4, blocks=0.25)
    cells = ((x - x.min(0).values) / 0.25).floor()
    for cell in cells.unique(dim=0):
        assert len(fold[(cells == cell).all(1)].unique()) == 1
    assert len(cells.unique(dim=0)) == 16
    assert fold.bincount().max() - fold.bincount().min() < 60  # at most a few blocks apart
    slabs = folds(x, 4, blocks=(0.25, float("inf")))
    assert [len(slabs[cells[:, 0] == slab].unique()) for slab in range(4)] == [1] * 4


def test_a_number_of_blocks_gives_blocks_of_equal_size():
    x = uniform(300) * torch.tensor([1.0, 1e4], dtype=torch.float64)
    fold = folds(x, 12, num_blocks=12)
    assert fold.bincount().tolist() == [25] * 12
    spread = torch.stack([x[fold == k].std(0) for k in range(12)]) / x.std(0)
    assert (spread < 0.7).all()  # compact in both columns, whatever their units


def test_folds_of_the_caller():
    assert folds(uniform(4), [5, 5, 9, 5]).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"folds": 1}, "folds.*>= 2"),
        ({"folds": 11}, "not to exceed the number of rows, of which there are 10"),
        ({"folds": [0, 1]}, "one label for each of 10 rows"),
        ({"folds": "ten"}, "one label for each of 10 rows"),
        ({"folds": [0] * 10}, "two parts or more"),
        ({"folds": [0.0] * 9 + [np.nan]}, "to be known, got 1 NaN"),
        ({"groups": ["a"] * 9 + [None]}, "labels of one kind"),
        ({"groups": torch.zeros(10, device="meta")}, "groups to have values, got a meta tensor"),
        ({"groups": [0, 1] * 5, "folds": 3}, "number of groups, of which there are 2"),
        ({"groups": [0, 1] * 5, "blocks": 0.3}, "one of folds, blocks, num_blocks and groups, got blocks and groups"),
        ({"groups": [0, 1] * 5, "folds": [0, 1] * 5}, "got folds of each row and groups"),
        ({"blocks": -1.0}, "blocks to be a positive number, or 2 of them"),
        ({"blocks": (1.0, 2.0, 3.0)}, "blocks to be a positive number, or 2 of them"),
        ({"blocks": 5.0}, "blocks to make two parts or more, got one"),
        ({"num_blocks": 11}, "num_blocks <= 10"),
        ({"num_blocks": 1}, "num_blocks.*>= 2"),
    ],
)
def test_refusals(args, message):
    with pytest.raises((ValueError, TypeError), match=message):
        folds(uniform(10), **args)
