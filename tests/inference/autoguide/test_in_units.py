"""Parameters in units: optimizers take the same steps in all of them."""

import torch
from pyro.nn import PyroModule, PyroParam

from pyro_nngp.inference.autoguide.in_units import InUnits


def test_a_step_is_as_many_units_long_as_the_learning_rate():
    module, unit = PyroModule(), torch.tensor([0.01, 1.0, 100.0])
    module.loc = PyroParam(torch.ones(3), InUnits(unit))
    torch.testing.assert_close(module.loc.detach(), torch.ones(3))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    module.loc.sum().backward()
    optimizer.step()
    torch.testing.assert_close(module.loc.detach(), 1 - 0.02 * unit)
    assert InUnits(unit).check(torch.tensor([0.0, torch.nan])).tolist() == [True, False]
