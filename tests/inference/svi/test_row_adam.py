"""Adam of rows: torch's own SparseAdam as oracle, and what a step may touch."""

import copy

import pytest
import torch
import torch.nn.functional as F

from pyro_nngp.inference import RowAdam
from pyro_nngp.inference.svi.row_adam import coalesced

M, L = 50, 3


def tables():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(M, width, generator=generator, dtype=torch.float64)) for width in (1, L)]


def draw_rows(step, kind):
    rows = torch.randint(M, (20,), generator=torch.Generator().manual_seed(step))
    return rows.unique() if kind == "ascending" else rows


def backward(params, rows):
    """A loss of some rows of each table, that of repeated rows adding up."""
    for param in params:
        param.grad = None
        values = F.embedding(rows, param, sparse=True)
        (values.sin() * torch.arange(1.0, 1 + len(rows), dtype=values.dtype)[:, None]).sum().backward()


@pytest.mark.parametrize("kind", ["ascending", "repeated"])
def test_it_is_sparse_adam(kind):
    ours, theirs = tables(), tables()
    settings = {"lr": 0.1, "betas": (0.8, 0.97), "eps": 1e-6}
    one, two = RowAdam(ours, **settings), torch.optim.SparseAdam(theirs, **settings)
    schedules = [torch.optim.lr_scheduler.MultiStepLR(optimizer, [10], 0.1) for optimizer in (one, two)]
    for step in range(20):
        rows = draw_rows(step, kind)
        for params, optimizer, schedule in zip((ours, theirs), (one, two), schedules, strict=True):
            backward(params, rows)
            optimizer.step()
            schedule.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_rows_without_a_gradient_stay():
    params = tables()
    before = [param.detach().clone() for param in params]
    optimizer = RowAdam(params, lr=0.1)
    for rows in (torch.tensor([3, 7]), torch.tensor([3, 9])):
        backward(params, rows)
        optimizer.step()
    backward(params[:1], torch.tensor([11]))
    params[1].grad = None
    optimizer.step()
    for param, start, moved in zip(params, before, ([3, 7, 9, 11], [3, 7, 9]), strict=True):
        assert (param != start).any(-1).nonzero()[:, 0].tolist() == moved
        assert set(optimizer.state[param]["exp_avg_sq"].any(-1).nonzero()[:, 0].tolist()) == set(moved)


def test_a_closure_is_evaluated_first():
    params, by_hand = tables(), tables()
    assert RowAdam(params, lr=0.1).step(lambda: backward(params, torch.tensor([2, 5])) or 1.5) == 1.5
    backward(by_hand, torch.tensor([2, 5]))
    RowAdam(by_hand, lr=0.1).step()
    assert all(torch.equal(one, two) for one, two in zip(params, by_hand, strict=True))


def test_a_saved_state_goes_on_with_the_same_bits():
    params = tables()
    optimizer = RowAdam(params, lr=0.1)
    for step in range(3):
        backward(params, draw_rows(step, "repeated"))
        optimizer.step()
    again = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = RowAdam(again, lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group, each in ((params, optimizer), (again, resumed)):
        backward(group, draw_rows(9, "repeated"))
        each.step()
    assert all(torch.equal(one, two) for one, two in zip(params, again, strict=True))


def test_ascending_rows_are_taken_as_they_are():
    values = torch.arange(6.0).view(3, 2)
    ascending = torch.sparse_coo_tensor(torch.tensor([[1, 4, 5]]), values, (M, 2), check_invariants=True)
    assert coalesced(ascending).values().data_ptr() == values.data_ptr()
    repeated = torch.sparse_coo_tensor(torch.tensor([[4, 1, 4]]), values, (M, 2), check_invariants=True)
    assert coalesced(repeated).indices().tolist() == [[1, 4]]
    assert coalesced(repeated).values().tolist() == [[2.0, 3.0], [4.0, 6.0]]


def test_a_gradient_of_the_whole_table_is_refused():
    param = tables()[0]
    (param**2).sum().backward()
    with pytest.raises(
        ValueError, match=r"RowAdam.step: expected gradients to be sparse in the rows.* torch.optim.Adam"
    ):
        RowAdam([param], lr=0.1).step()


@pytest.mark.parametrize("params", [torch.tensor(float("nan")), torch.ones(M, L), 3])
def test_tables_come_in_an_iterable(params):
    with pytest.raises(TypeError, match=r"RowAdam: expected params to be an iterable of tables, got (Tensor|int)\."):
        RowAdam(params, lr=0.1)
