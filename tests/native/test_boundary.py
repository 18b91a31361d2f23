"""What may not cross into compiled code, and malformed calls drawn at random."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.compiled import needs_library

from pyro_nngp import native
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import Matern32
from pyro_nngp.native import conditional, search
from pyro_nngp.native.boundary import address, check_range, contiguous
from pyro_nngp.neighbors import NeighborGraph


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ([1.0, 2.0], r"f: expected a to be a tensor or an array, got list"),
        (torch.zeros(2, 3, device="meta"), r"f: expected a to be a dense tensor on the CPU, got torch.strided on meta"),
        (torch.zeros(2, 3).to_sparse(), r"f: expected a to be a dense tensor on the CPU, got torch.sparse_coo on cpu"),
        (torch.zeros(2, 3, dtype=torch.float64), r"f: expected a of dtype torch.float32, got torch.float64"),
        (torch.zeros(3, 2), r"f: expected a of shape \(2, 3\), got \(3, 2\)"),
        (torch.zeros(3, 2).mT, r"f: expected a to be contiguous, got other strides"),
        (torch.zeros(7)[1:].view(2, 3), r"f: expected a to start at a multiple of 64 bytes"),
    ],
)
def test_memory_of_another_kind_is_refused(memory, message):
    with pytest.raises((ValueError, TypeError), match=message):
        address("f", "a", memory, (2, 3), torch.float32, 64)


def test_addresses_are_those_of_the_memory():
    tensor, array = torch.zeros(2, 3), np.zeros((4, 1))
    assert address("f", "a", tensor, (2, 3), torch.float32) == tensor.data_ptr()
    assert address("f", "a", array, (4, 1), np.float64) == array.ctypes.data
    with pytest.raises(ValueError, match=r"expected a to be contiguous"):
        address("f", "a", np.zeros((4, 2))[:, :1], (4, 1), np.float64)


def test_memory_to_read_is_copied_where_it_is_not_contiguous():
    tensor = torch.randn(3, 2)
    assert contiguous("f", "a", tensor) is tensor
    assert torch.equal(contiguous("f", "a", tensor.mT), tensor.mT)
    with pytest.raises(TypeError, match=r"expected a to be a dense tensor on the CPU, got torch.strided on meta"):
        contiguous("f", "a", tensor.to("meta"))


@pytest.mark.parametrize("numbers", [[-1, 0], [0, 5]])
def test_row_numbers_are_in_range(numbers):
    check_range("f", "rows", np.array([0, 4]), 5)
    with pytest.raises(IndexError, match=r"f: expected rows in 0\.\.4, got"):
        check_range("f", "rows", np.array(numbers), 5)


@needs_library
def test_an_instruction_set_that_is_not_there_is_refused():
    count = native.library().nn_levels()
    for level in (-1, count):
        with pytest.raises(ValueError, match=rf"native: expected level in 0\.\.{count - 1}, got {level}"):
            native.best_level(level)


@needs_library
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 2)}, r"expected neighbors of shape \(4, 3\)|expected neighbors of shape \(5, 3\)"),
        ({"x": torch.zeros(4)}, r"expected x with 2 dimensions, got 1"),
        ({"points": torch.zeros(9, 3)}, r"expected points of shape \(9, 2\), got \(9, 3\)"),
        ({"neighbors": torch.zeros(4, 1025, dtype=torch.int64)}, r"expected x, K float32 or float64, K in 1\.\.1024"),
        ({"neighbors": torch.zeros(4, 3, dtype=torch.int32)}, r"expected neighbors of dtype torch.int64"),
        ({"lengthscale": torch.ones(3)}, r"expected scale of shape \(2,\), got \(3,\)"),
        ({"noise": torch.ones(4, 2)}, r"expected noise of shape \(4, 3\), got \(4, 2\)"),
    ],
)
def test_conditionals_of_other_shapes_are_refused(change, message):
    one = torch.tensor(1.0)
    rows = torch.zeros(4, 3, dtype=torch.int64)
    problem = conditional.Problem(
        torch.zeros(4, 2), torch.zeros(9, 2), torch.ones(2), one, None, rows, Matern32.profile, 1e-6
    )
    with pytest.raises((ValueError, TypeError), match=message):
        conditional.forward(problem._replace(**change))


@needs_library
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", np.array([0, 7]), r"expected rows in 0\.\.6, got 0\.\.7"),
        ("places", np.zeros((7, 3)), r"expected places of shape \(7, 2\), got \(7, 3\)"),
        ("limit", np.zeros(6, np.int64), r"expected limit of shape \(7,\), got \(6,\)"),
        ("exclude", np.zeros(7, np.int32), r"expected exclude of dtype .*int64.*, got int32"),
        ("index", np.zeros((3, 7), np.int64).T, r"expected index to be contiguous"),
        ("index", np.zeros((7, 0), np.int64), r"expected index of shape \(Q, k\) with k >= 1"),
        ("value", np.zeros((7, 2)), r"expected value of shape \(7, 3\), got \(7, 2\)"),
    ],
)
def test_queries_of_other_shapes_are_refused(name, value, message):
    given = {
        "rows": np.arange(7),
        "places": np.zeros((7, 2)),
        "limit": np.full(7, 20),
        "exclude": np.full(7, -1),
        "index": np.zeros((7, 3), np.int64),
        "value": np.zeros((7, 3)),
    }
    tree = search.Tree(np.random.default_rng(0).random((20, 2)))
    tree.nearest(**given)
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        tree.nearest(**(given | {name: value}))


@needs_library
@pytest.mark.parametrize("points", [np.zeros((0, 2)), np.zeros(3), np.zeros((3, 2, 1))])
def test_trees_over_no_points_are_refused(points):
    for build in (search.Tree, search.spatial_order):
        with pytest.raises(ValueError, match=r"nn_search: expected points of shape \(P, D\)"):
            build(points)


@needs_library
def test_trees_over_what_is_not_finite_are_refused():
    with pytest.raises(ValueError, match=r"nn_search: expected points to be finite"):
        search.Tree(np.array([[0.0], [np.nan]]))


@needs_library
def test_numbers_beyond_32_bits_are_no_other_numbers():
    points = np.arange(5.0)[:, None]
    index, value = np.zeros((1, 5), np.int64), np.zeros((1, 5))
    search.Tree(points).nearest(np.array([0]), points[:1], np.array([2**32 + 1]), np.array([2**32 + 3]), index, value)
    assert index.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"neighbors": torch.zeros(5, 3, dtype=torch.int64)}, r"expected neighbors of shape \(4, K\), got \(5, 3\)"),
        ({"neighbors": torch.full((4, 3), 9)}, r"expected neighbors in -1\.\.8, got 9\.\.9"),
        ({"neighbors": torch.full((4, 3), -2)}, r"expected neighbors in -1\.\.8, got -2\.\.-2"),
        ({"neighbors": torch.zeros(4, 3)}, r"expected neighbors of dtype torch.int64, got torch.float32"),
        ({"neighbors": [[0]] * 4}, r"expected neighbors to be a torch.Tensor, got list"),
        ({"points": torch.zeros(9, 3)}, r"expected x, points of shapes \(B, D\), \(N, D\)"),
        ({"points": torch.zeros(9, 2).double()}, r"expected x, points of one dtype, torch.float32 or torch.float64"),
        ({"x": torch.zeros(4, 2).to_sparse()}, r"expected x to be a dense tensor, got torch.sparse_coo"),
        ({"noise": torch.zeros(8)}, r"expected noise of shape \(\.\.\., 9\), got \(8,\)"),
    ],
)
def test_public_conditionals_of_other_shapes_are_refused(change, message):
    given = {"x": torch.zeros(4, 2), "points": torch.zeros(9, 2), "neighbors": torch.zeros(4, 3, dtype=torch.int64)}
    with pytest.raises((ValueError, TypeError, IndexError), match="graph_conditional: " + message):
        graph_conditional(Matern32(2), **(given | change))


def test_new_values_need_a_row_of_neighbors_for_each_new_point_and_a_value_for_each_old_one():
    prior, new = NNGP(Matern32(2), NeighborGraph(torch.rand(12, 2), 4)), torch.rand(5, 2)
    neighbors = prior.graph.extend(new)[1]
    for rows in (neighbors[:-1], torch.cat([neighbors, neighbors])):
        with pytest.raises(ValueError, match=r"graph_conditional: expected neighbors of shape \(5, K\)"):
            prior.sample_new(new, torch.randn(12), neighbors=rows)
    with pytest.raises(IndexError, match=r"graph_conditional: expected neighbors in -1\.\.16, got"):
        prior.sample_new(new, torch.randn(12), neighbors=neighbors + 10)
    for call in (prior.sample_new, prior.predict):
        with pytest.raises(ValueError, match=r"expected f of shape \(\.\.\., 12\), got \(13,\)"):
            call(new, torch.randn(13))


@needs_library
@pytest.mark.slow
def test_malformed_calls_drawn_at_random(monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "1")
    spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).with_name("fuzz.py"))
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    outcomes = fuzz.run(0, 300)
    assert outcomes["refused"] > 50
    assert outcomes["computed"] > 100
