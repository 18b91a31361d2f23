"""Sparse Cholesky factors front by front, and the order of elimination, beside dense matrices."""

import math

import pytest
import torch
from builders import F64, normal, uniform
from oracles.pretended_device import DEVICE, pretended_device

from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.linalg.multifrontal import MultifrontalFactor
from pyro_nngp.linalg.nested_dissection import nested_dissection
from pyro_nngp.neighbors import NeighborGraph


def families_of(x, num_neighbors):
    rows = torch.arange(len(x))[:, None]
    near = NeighborGraph(x, num_neighbors).neighbors.long()
    return torch.cat([rows, torch.where(near < 0, rows, near)], -1)


def system(num_columns, leaf, n=200):
    """A plan, a root and a diagonal, and the precision as a dense matrix with its root."""
    x = uniform(n, num_columns) * torch.tensor([1.0, 1e4, 1e-3][:num_columns], dtype=F64)
    families = families_of(x, 6)
    root, diagonal = normal(*families.shape), uniform(n, 1)[:, 0] + 0.1
    dense = torch.zeros(n, n, dtype=F64).scatter_add_(-1, families, root)
    plan = nested_dissection(x, [families], leaf=leaf)
    return plan, root, diagonal, families, dense, dense.mT @ dense + diagonal.diag()


def test_inner_products_of_many_points():
    plan, root, diagonal, _, _, precision = system(1, 16, n=2500)
    right = normal(3, len(root))
    found = MultifrontalFactor(plan, [root], diagonal).inner_products(right)
    torch.testing.assert_close(found, right @ torch.linalg.solve(precision, right.mT), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("num_columns", "leaf"), [(1, 10), (2, 4), (2, 16), (3, 16), (2, 200)])
def test_solutions_determinant_and_inverse_are_those_of_the_dense_matrix(num_columns, leaf):
    plan, root, diagonal, families, dense_root, precision = system(num_columns, leaf)
    factor, inverse = MultifrontalFactor(plan, [root], diagonal), precision.inverse()
    right = normal(3, len(root))
    before = right.clone()
    torch.testing.assert_close(factor.solve(right), right @ inverse, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(factor.solve(right[0]), inverse @ right[0], rtol=1e-9, atol=1e-11)
    many = normal(4, 5, len(root))  # in products of matrices
    torch.testing.assert_close(factor.solve(many), many @ inverse, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(factor.inner_products(right), right @ inverse @ right.mT, rtol=1e-9, atol=1e-11)
    assert torch.equal(right, before)
    assert factor.log_det == pytest.approx(float(torch.logdet(precision)), rel=1e-12)
    variances, (products,) = factor.moments
    torch.testing.assert_close(variances, inverse.diagonal(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(products, (dense_root @ inverse).gather(-1, families), rtol=1e-9, atol=1e-11)


def test_wide_borders():
    leaves, others = 3, 1100
    x = torch.cat([-1 - 100 * torch.arange(leaves), torch.arange(others)]).to(F64)[:, None] / others
    families = torch.cat([torch.arange(leaves)[:, None], (leaves + torch.arange(others)).expand(leaves, others)], -1)
    root, diagonal = normal(*families.shape), uniform(leaves + others, 1)[:, 0] + 0.5
    plan = nested_dissection(x, [families], leaf=8)
    assert int(plan.widths.max()) > 1000
    dense = torch.zeros(leaves, leaves + others, dtype=F64).scatter_(-1, families, root)
    inverse = (dense.mT @ dense + diagonal.diag()).inverse()
    factor, right = MultifrontalFactor(plan, [root], diagonal), normal(5, leaves + others)
    torch.testing.assert_close(factor.solve(right), right @ inverse, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(factor.moments[0], inverse.diagonal(), rtol=1e-8, atol=1e-10)


def test_a_factor_of_tensors_on_a_device_gives_results_there():
    plan, root, diagonal, _, _, _ = system(2, 16, n=60)
    here, right = MultifrontalFactor(plan, [root], diagonal), normal(2, 60)
    with pretended_device():
        there = MultifrontalFactor(plan, [root.to(DEVICE)], diagonal.to(DEVICE))
        found = [there.solve(right.to(DEVICE)), there.moments[0], *there.moments[1], *there.covariances([0])]
        found.append(there.inner_products(right.to(DEVICE)))
        assert all(each.device == DEVICE for each in found)
        want = [here.solve(right), here.moments[0], *here.moments[1], *here.covariances([0])]
        want.append(here.inner_products(right))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, want, strict=True))
    assert there.log_det == here.log_det


def test_products_are_half_the_gradient_of_the_log_determinant():
    plan, root, diagonal, families, _, _ = system(2, 16, n=60)
    root.requires_grad_()
    dense = torch.zeros(60, 60, dtype=F64).scatter_add(-1, families, root)
    (gradient,) = torch.autograd.grad(torch.logdet(dense.mT @ dense + diagonal.diag()), root)
    factor = MultifrontalFactor(plan, [root.detach()], diagonal)
    torch.testing.assert_close(2 * factor.moments[1][0], gradient, rtol=1e-9, atol=1e-11)


def test_tables_of_different_widths_add_up():
    x, families = uniform(60), families_of(uniform(60), 4)
    pairs, alone = torch.tensor([[0, 59], [3, 3], [7, 40]]), torch.arange(60)[:, None]
    tables = [families, pairs, alone]
    plan = nested_dissection(x, tables, leaf=8)
    root = [normal(*table.shape) for table in tables]
    rows = [torch.zeros(len(t), 60, dtype=F64).scatter_add_(-1, t, r) for t, r in zip(tables, root, strict=True)]
    dense = torch.cat(rows)
    factor, inverse = (
        MultifrontalFactor(plan, root, torch.ones(60, dtype=F64)),
        (dense.mT @ dense).add(torch.eye(60)).inverse(),
    )
    for table, found in zip((1, 0), factor.covariances([1, 0]), strict=True):
        near = tables[table]
        torch.testing.assert_close(found, inverse[near[:, :, None], near[:, None, :]], rtol=1e-9, atol=1e-12)


def test_a_table_of_blocks_is_that_of_its_rows():
    x, families = uniform(60), families_of(uniform(60), 4)
    pairs = torch.stack([torch.arange(30), torch.arange(30) + 30], -1)
    plan, root, rows = nested_dissection(x, [families, pairs], leaf=8), normal(60, 5), normal(30, 3, 2)
    root[:, 0] += 3
    blocks, none = rows.mT @ rows, torch.zeros(60, dtype=F64)
    factor = MultifrontalFactor(plan, [root, blocks], none)
    dense = [torch.zeros(60, 60, dtype=F64).scatter_add_(-1, families, root)]
    dense += [torch.zeros(30, 60, dtype=F64).scatter_add_(-1, pairs, rows[:, i]) for i in range(3)]
    dense = torch.cat(dense)
    inverse = (dense.mT @ dense).inverse()
    right = normal(2, 60)
    torch.testing.assert_close(factor.solve(right), right @ inverse, rtol=1e-8, atol=1e-10)
    variances, (products, among) = factor.moments
    torch.testing.assert_close(variances, inverse.diagonal(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(products, (dense[:60] @ inverse).gather(-1, families), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(among, inverse[pairs[:, :, None], pairs[:, None, :]], rtol=1e-9, atol=1e-12)


def test_a_singular_precision_is_refused():
    plan, root, diagonal, *_ = system(2, 16)
    with pytest.raises(NotPositiveDefiniteError, match="the precision of 200 values is singular"):
        MultifrontalFactor(plan, [0 * root], 0 * diagonal)


def test_each_point_has_one_front_and_each_family_lies_in_one():
    x = uniform(500)
    families = families_of(x, 5)
    plan = nested_dissection(x, [families], leaf=16)
    own = torch.cat([front.points[: front.size] for front in plan.fronts])
    assert sorted(own.tolist()) == list(range(500))
    assert sum(len(front.families[0]) for front in plan.fronts) == 500
    for number, front in enumerate(plan.fronts):
        assert torch.equal(front.points[front.members[0]], families[front.families[0]])
        for child in front.children:
            below = plan.fronts[child]
            assert child < number
            assert torch.equal(front.points[below.border], below.points[below.size :])


def test_entries_per_point_are_bounded_in_one_column_and_grow_slowly_in_two():
    def entries(n, num_columns):
        x = uniform(n, num_columns)
        return nested_dissection(x, [families_of(x, 6)], leaf=16).entries / n

    assert entries(4000, 1) < 1.5 * entries(1000, 1)
    assert entries(4000, 2) < 1.6 * entries(1000, 2)  # a dense factor has four times as many


def test_columns_that_neighbors_do_not_depend_on_leave_the_order_about_as_good():
    """Covariates beside the place, some with heavy tails, whose range is many times the distance of neighbors."""
    x = uniform(4000)
    families, more = families_of(x, 6), normal(4000, 12)
    wider = torch.cat([x, more, more[:, :3].exp() ** 3], -1)
    alone, beside = (nested_dissection(points, [families], leaf=16).operations for points in (x, wider))
    assert beside < 3 * alone  # 400 times, by ranges


def test_more_operations_than_allowed_give_no_order():
    x = uniform(1000, 8)
    families = families_of(x, 6)
    whole = nested_dissection(x, [families])
    assert nested_dissection(x, [families], most=whole.operations) is not None
    assert nested_dissection(x, [families], most=whole.operations / 2) is None
    assert nested_dissection(x, [families], most=1.0) is None
    assert math.isfinite(whole.operations)
