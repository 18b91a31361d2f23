"""L-BFGS steps: minima of functions that are known, bounded moves, and states that continue with the same bits."""

import copy
import math

import pytest
import torch

from pyro_nngp.inference.svi.lbfgs import LBFGS

F64 = torch.float64


def closure_of(params, function, calls=None):
    """A loss of two tensors that leaves its gradient in them."""

    def closure():
        for param in params:
            param.grad = None
        loss = function(*params)
        if loss.requires_grad:
            loss.backward()
        if calls is not None:
            calls.append(float(loss.detach()))
        return float(loss.detach())

    return closure


def rosenbrock(x, y):
    return ((1 - x) ** 2).sum() + 100 * ((y - x**2) ** 2).sum()


def leaves(x=-1.2, y=1.0):
    return [torch.tensor([x], dtype=F64, requires_grad=True), torch.tensor(y, dtype=F64, requires_grad=True)]


def test_the_minimum_of_a_curved_valley_is_found():
    params = leaves()
    optimizer, calls = LBFGS(params), []
    closure = closure_of(params, rosenbrock, calls)
    losses = [optimizer.step(closure) for _ in range(60)]
    assert optimizer.start_loss == calls[0] == pytest.approx(24.2)
    assert losses[-1] < 1e-12
    torch.testing.assert_close(params[0].detach(), torch.ones(1, dtype=F64), rtol=0, atol=1e-5)
    assert (torch.tensor(losses).diff() <= 1e-7 * torch.tensor(losses[:-1])).all()  # none rises beyond rounding
    assert len(calls) < 1.5 * 60  # accepted points are not evaluated again


def test_no_coordinate_moves_farther_than_the_bound():
    params = leaves(50.0, -30.0)
    optimizer = LBFGS(params)
    closure = closure_of(params, lambda x, y: (x**2).sum() + 3 * y**2)
    for _ in range(12):
        before = [param.detach().clone() for param in params]
        optimizer.step(closure)
        moves = [float((param.detach() - old).abs().max()) for param, old in zip(params, before, strict=True)]
        assert max(moves) <= 1 + 1e-12
    assert max(moves) == pytest.approx(1.0)


def test_a_loss_that_is_not_finite_shortens_the_step_and_fails_only_at_the_start():
    params = leaves(0.2, 0.0)
    optimizer = LBFGS(params)
    closure = closure_of(params, lambda x, y: (-x.log() + 4 * x).sum() + y**2)  # infinite or NaN from x = 0 down
    for _ in range(40):
        assert math.isfinite(optimizer.step(closure))
    torch.testing.assert_close(params[0].detach(), torch.tensor([0.25], dtype=F64), rtol=0, atol=1e-5)
    with torch.no_grad():
        params[0].fill_(-1.0)
    optimizer.forget()
    with pytest.raises(ArithmeticError, match="loss nan"):
        optimizer.step(closure)


def test_an_infinite_gain_is_no_gain():
    params = leaves(0.2, 0.0)
    optimizer = LBFGS(params)
    closure = closure_of(params, lambda x, y: torch.where(x < 0.5, -4 * x, -torch.inf).sum() + y**2)
    losses = [optimizer.step(closure) for _ in range(40)]
    assert math.isfinite(losses[-1])
    assert 0.2 < params[0].item() < 0.5


def test_forgetting_evaluates_the_changed_loss():
    params, scale = leaves(1.0, 0.0), [1.0]
    optimizer = LBFGS(params)
    closure = closure_of(params, lambda x, y: scale[0] * (x**2).sum() + y**2)
    optimizer.step(closure)
    scale[0] = 7.0
    optimizer.forget()
    place = float(params[0].detach())
    optimizer.step(closure)
    assert optimizer.start_loss == pytest.approx(7 * place**2)
    assert optimizer.state_dict()["pairs"]


def test_a_loaded_state_continues_with_the_same_bits():
    one, other = leaves(), leaves()
    first, second = LBFGS(one), LBFGS(other)
    for _ in range(7):
        first.step(closure_of(one, rosenbrock))
    with torch.no_grad():
        for mine, theirs in zip(other, one, strict=True):
            mine.copy_(theirs)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(5):
        assert first.step(closure_of(one, rosenbrock)) == second.step(closure_of(other, rosenbrock))
    assert torch.equal(one[0], other[0])


def test_the_expected_gain_of_a_quadratic_loss_is_its_distance_from_the_minimum():
    params = leaves(2.0, -1.0)
    optimizer = LBFGS(params)
    closure = closure_of(params, lambda x, y: (x**2).sum() + 2 * y**2)
    optimizer.step(closure)
    assert LBFGS(params).expected_gain == math.inf
    loss = optimizer.step(closure)
    loss = optimizer.step(closure)  # two pairs determine the curvature of two coordinates
    assert loss > 1e-9
    assert optimizer.expected_gain == pytest.approx(loss, rel=0.5)


def test_curvature_of_another_objective_saves_steps():
    def bowl(x, y):
        return ((x - 0.6) ** 2).sum() + 50 * (y + 0.3) ** 2 + 5 * (x * y).sum()

    def steps_of(optimizer, params, function):
        for step in range(1, 40):
            optimizer.step(closure_of(params, function))
            if optimizer.expected_gain < 1e-6:
                return step
        return math.inf

    first, second, third = leaves(0.0, 0.0), leaves(0.0, 0.0), leaves(0.0, 0.0)
    optimizer, follower, alone = LBFGS(first), LBFGS(second), LBFGS(third)
    steps_of(optimizer, first, bowl)
    follower.follow(optimizer)
    new = [steps_of(one, params, lambda x, y: 1.1 * bowl(x, y)) for one, params in ((follower, second), (alone, third))]
    assert new[0] <= 3 < new[1] < math.inf
    other = LBFGS([torch.zeros(5, dtype=F64)])
    other.follow(optimizer)
    assert other.expected_gain == math.inf
