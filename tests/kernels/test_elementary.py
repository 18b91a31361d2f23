"""Kernels without a lengthscale."""

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_nngp.kernels import (
    RBF,
    Covariance,
    Kernel,
    Matern52,
    VerticalScaling,
)


def points(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def fresh(kernel: Kernel) -> Covariance:
    """Bind with an empty parameter store, where kernels that stand alone would find each other's values."""
    pyro.clear_param_store()
    return kernel.bind()


def test_vertical_scaling() -> None:
    x, z = points(2, 4, 1), points(2, 5, 1)
    inner = Matern52(1)
    want = x.exp() * fresh(inner)(x, z) * z.mT.exp()
    torch.testing.assert_close(fresh(VerticalScaling(inner, lambda x: x[..., 0].exp()))(x, z), want)


def test_amplitude_networks_are_trained_along() -> None:
    kernel = VerticalScaling(RBF(2), torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(-2)))
    trace = poutine.trace(kernel).get_trace(torch.randn(3, 2))
    assert "vscaling_fn$$$0.weight" in trace.param_nodes
