"""Recorded operations give the numbers of the function itself, or refuse."""

import pytest
import torch
from torch.autograd import grad

from pyro_nngp._tape import AnotherBranch, Tape, operation
from pyro_nngp.linalg import solve_triangular
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
MATRIX = torch.randn(6, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
GRAPH = NeighborGraph(MATRIX[:, :2].contiguous(), 2)


def with_gradient(function):
    """The value of a function of x (6,) and s (), and its gradient."""

    def both(*values):
        leaves = [value.detach().requires_grad_() for value in values]
        value = function(*leaves)
        return (value.detach(), *grad(value, leaves))

    return both


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, dtype=F64, generator=generator), torch.rand((), dtype=F64, generator=generator)


def cholesky(x, s):
    covariance = (s * MATRIX) @ (s * MATRIX).mT + torch.diag(x.exp())
    factor = torch.linalg.cholesky(covariance)
    return factor.diagonal().log().sum() + torch.linalg.solve_triangular(factor, x[:, None], upper=False).square().sum()


def indexing(x, s):
    parts = torch.cat([x[1:] * s, x[:1]])[torch.tensor([0, 3, 3, 1])]
    return torch.where(x > 0, x, s * x).sum() + parts.cumsum(0).prod() + x.view(2, 3).T.softmax(0)[0, 1]


def filled(x, s):
    total = torch.zeros(3, dtype=F64).index_add_(0, torch.tensor([0, 1, 1, 2, 0, 2]), x * s)
    table = torch.eye(3, dtype=F64)
    table[0] = total
    return (table @ total).square().sum()


def compiled(x, s):
    w = 0.1 * (s + x[:, None]) * torch.ones(6, 2, dtype=F64)
    return solve_triangular(w, GRAPH.neighbors, x).square().sum()


@pytest.mark.parametrize("function", [cholesky, indexing, filled, compiled])
def test_replays_are_the_function_itself(function):
    both = with_gradient(function)
    tape = Tape("test", both, *values(0))
    for seed in (1, 2):
        for found, expected in zip(tape(*values(seed)), both(*values(seed)), strict=True):
            assert torch.equal(found, expected)
            assert not found.requires_grad


def test_what_does_not_vary_and_repetitions_are_computed_once():
    def function(x, s):
        fixed = torch.linalg.inv(MATRIX).exp()
        return (x.exp().sum() * (fixed * 1.0).detach() + x.exp().sum() + torch.ones((), dtype=F64) * s,)

    tape = Tape("test", function, *values(0))
    assert "inv" not in tape.source
    assert tape.source.count("exp") == 1
    assert tape.source.count("mul") == 1
    assert torch.equal(tape(*values(1))[0], function(*values(1))[0])


def test_marked_functions_are_one_operation():
    calls = []

    @operation
    def twice(x):
        calls.append(x)
        return torch.from_numpy(2 * x.numpy())

    tape = Tape("test", lambda x: (twice(x) + 1,), values(0)[0])
    assert torch.equal(tape(values(1)[0])[0], 2 * values(1)[0] + 1)
    assert torch.equal(twice(values(1)[0]), 2 * values(1)[0])
    assert len(calls) == 3


def test_another_branch_is_an_error():
    def function(x):
        return (x.exp() if (x > 0).all() else x,)

    tape = Tape("test", function, torch.ones(3))
    assert torch.equal(tape(torch.full((3,), 2.0))[0], torch.full((3,), 2.0).exp())
    with pytest.raises(AnotherBranch, match="a branch on False, recorded on True"):
        tape(-torch.ones(3))


OUTSIDE = torch.zeros(3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (x * x.sum().item(),), "reads a number out of a tensor"),
        (lambda x: (x * torch.randn(3),), "draws random numbers"),
        (lambda x: (torch.dropout(x, 0.5, True),), "draws random numbers"),
        (lambda x: (x[x > 0],), "selects by values"),
        (lambda x: (x.nonzero() * 2,), "selects by values"),
        (lambda x: (OUTSIDE.copy_(x) * 2,), "changes a tensor in place that existed before"),
        (lambda x: (x.add_(1) * 2,), "changes a tensor in place that existed before"),
        (lambda x: (torch.from_numpy((x * 2).numpy()) * 2,), "passes values on outside torch"),
    ],
)
def test_what_one_run_does_not_determine_is_refused(function, message):
    with pytest.raises(ValueError, match=f"^test: expected a function whose operations .*, got one that {message}"):
        Tape("test", function, torch.ones(3))


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="got one that computes on another device than the CPU"):
        Tape("test", lambda x: (2 * x,), torch.ones(3, device="meta"))


def test_random_draws_that_change_nothing_are_left_out():
    def function(x):
        torch.randn(3) * x
        return (2 * x,)

    state = torch.get_rng_state()
    tape = Tape("test", function, torch.ones(3))
    assert "randn" not in tape.source
    torch.set_rng_state(state)
    assert torch.equal(tape(torch.zeros(3))[0], torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_random_draws_are_made_anew_in_the_order_of_the_function():
    own = torch.Generator()

    def function(x):
        unused = torch.empty(5).normal_()  # advances the generator
        same = torch.randn(3) - torch.randn(3)
        return (x * torch.empty(3).normal_() + same, torch.rand(3, generator=own) + 0 * x, unused[:0])

    with torch.random.fork_rng():
        tape = Tape("test", function, torch.ones(3), draws=True)
        results, states = [], []
        for run in (tape, function):
            torch.manual_seed(0)
            own.manual_seed(1)
            results.append([part for _ in range(2) for part in run(torch.full((3,), 2.0))])
            states.append((torch.get_rng_state(), own.get_state()))
    assert all(map(torch.equal, *results))
    assert all(map(torch.equal, *states))
    assert not torch.equal(results[0][0], results[0][3])


def test_numbers_read_out_of_draws_are_refused():
    with pytest.raises(ValueError, match="got one that reads a number out of a tensor"):
        Tape("test", lambda x: (x * torch.rand(int(torch.randint(1, 9, ())))[0],), torch.ones(3), draws=True)


@operation
def positive(x):
    return x[x > 0]


def scattered(x):
    """A function of as many values as are positive."""
    kept = positive(x)
    total = kept.new_zeros(len(kept)).index_add(0, torch.arange(2), kept[:2])
    return (total.expand(3, len(kept)).exp().sum() / 2, kept.exp())


def test_sizes_that_differ_between_two_runs_are_read_off():
    generator = torch.Generator().manual_seed(0)
    one, other, new = (torch.randn(20, generator=generator) + shift for shift in (0.0, 1.0, -0.5))
    assert len({len(positive(x)) for x in (one, other, new)}) == 3
    tape = Tape("test", scattered, one, others=(other,))
    assert ".shape[0]" in tape.source
    for found, expected in zip(tape(new), scattered(new), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (positive(x).sum() / len(positive(x)) ** 2,), "has other numbers in another run"),
        (lambda x: (x * torch.ones(3) * len(positive(x)),), "has other numbers in another run"),
        (
            lambda x: (x * torch.full((3,), float(len(positive(x)))),),
            "has other constants or operations in another run",
        ),
        (lambda x: (x.exp() if len(positive(x)) > 1 else x.sin(),), "has other operations in another run"),
    ],
)
def test_two_runs_that_differ_in_more_than_sizes_are_refused(function, message):
    with pytest.raises(ValueError, match=f"got one that {message}"):
        Tape("test", function, torch.tensor([1.0, -1.0, -1.0]), others=(torch.ones(3),))
