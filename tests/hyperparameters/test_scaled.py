"""Scaled parameters: values in the user's units, gradient steps in multiples of a unit."""

import torch
from pyro.nn import PyroModule
from torch.distributions import biject_to

from pyro_nngp.hyperparameters.scaled import Scaled, assign, scaled

F64 = torch.float64
UNIT = torch.tensor([1e5, 1e-3], dtype=F64)


def test_the_unconstrained_parameter_is_the_value_in_units():
    value = torch.tensor([3e5, 2e-3], dtype=F64)
    module = PyroModule()
    module.place = scaled(value, UNIT)
    torch.testing.assert_close(module.place.detach(), value)
    torch.testing.assert_close(module.place_unconstrained.detach(), torch.tensor([3.0, 2.0], dtype=F64))


def test_one_step_moves_each_entry_by_the_rate_times_its_unit():
    module = PyroModule()
    module.place = scaled(torch.tensor([3e5, 2e-3], dtype=F64), UNIT)
    before = module.place.detach().clone()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    (module.place / UNIT).sum().backward()
    optimizer.step()
    torch.testing.assert_close(module.place.detach() - before, -0.1 * UNIT, rtol=1e-6, atol=0)


def test_assigning_keeps_the_unit_and_the_parameter():
    module = PyroModule()
    module.place = scaled(torch.zeros(2, dtype=F64), UNIT)
    parameter = module.place_unconstrained
    assign(module, "place", torch.tensor([1e5, 5e-3], dtype=F64))
    assert module.place_unconstrained is parameter
    torch.testing.assert_close(parameter.detach(), torch.tensor([1.0, 5.0], dtype=F64))


def test_the_transform_is_a_bijection_with_its_jacobian():
    transform, free = biject_to(Scaled(UNIT)), torch.tensor([0.3, -2.0], dtype=F64)
    value = transform(free)
    torch.testing.assert_close(transform.inv(value), free)
    jacobian = torch.autograd.functional.jacobian(transform, free)
    torch.testing.assert_close(jacobian.diagonal().abs().log(), transform.log_abs_det_jacobian(free, value))


def test_only_nan_is_off_the_constraint():
    value = torch.tensor([torch.nan, torch.inf, -3.0])
    assert Scaled(1.0).check(value).tolist() == [False, True, True]
