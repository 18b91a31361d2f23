"""Hyperparameters of a batch, one set after the other."""

from contextlib import ExitStack

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_nngp.hyperparameters import each_set, pyro_entry, read_hyperparameters, stacked
from pyro_nngp.kernels import Matern52

X = torch.rand(5, 2)


class Reader(Matern52):
    @pyro_entry
    def both(self):
        read_hyperparameters(self)
        found, batch = each_set(self, lambda: self.bind()(X, X))
        return stacked(found, batch), self.bind()(X, X), (self.variance, self.lengthscale)


def build():
    scale = PyroSample(dist.LogNormal(torch.zeros(2), 0.3).to_event(1))
    return Reader(2, variance=PyroSample(dist.LogNormal(0.0, 0.3)), lengthscale=scale)


@pytest.mark.parametrize("plates", [(), (3,), (2, 3)])
def test_each_set_is_a_row_of_the_batch(plates):
    with ExitStack() as stack:
        for number, size in enumerate(plates):
            stack.enter_context(pyro.plate(f"plate {number}", size, dim=number - len(plates)))
        apart, together, values = build().both()
    assert apart.shape == (*plates, 5, 5)
    torch.testing.assert_close(apart, together)
    assert values[0].shape == plates  # restored
    assert values[1].shape == (*plates, 2)


def test_the_values_of_a_failed_set_do_not_stay():
    reader = build()

    @pyro_entry
    def both(kernel):
        read_hyperparameters(kernel)
        with pytest.raises(ZeroDivisionError):
            each_set(kernel, lambda: 1 / 0)
        return kernel.variance

    with pyro.plate("particles", 3):
        assert both(reader).shape == (3,)
