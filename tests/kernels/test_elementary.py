"""Kernels without a lengthscale."""

import math

import pytest
import torch
from builders import normal, tensor
from pyro import poutine

import pyro_nngp as nngp
from pyro_nngp.kernels import RBF, ArcCosine, Cosine, Gibbs, Matern52, VerticalScaling, bind


def test_vertical_scaling() -> None:
    x, z = normal(2, 4, 1), normal(2, 5, 1)
    inner = Matern52(1)
    want = x.exp() * bind(inner)(x, z) * z.mT.exp()
    torch.testing.assert_close(bind(VerticalScaling(inner, lambda x: x[..., 0].exp()))(x, z), want)


def test_amplitude_networks_are_trained_along() -> None:
    kernel = VerticalScaling(RBF(2), torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(-2)))
    trace = poutine.trace(kernel).get_trace(torch.randn(3, 2))
    assert "vscaling_fn$$$0.weight" in trace.param_nodes


def test_wave_and_wide_layer_by_their_formulas() -> None:
    x, z = normal(5, 2), normal(4, 2)
    phase = 2 * math.pi * ((x[:, None] - z) / tensor(1.0, 3.0)).sum(-1)
    torch.testing.assert_close(bind(Cosine(2, 1.5, tensor(1.0, 3.0)))(x, z), 1.5 * phase.cos())
    weights, biases = torch.randn(200_000, 2, dtype=torch.float64) * 0.7**0.5, torch.randn(200_000).double() * 0.3**0.5
    left, right = ((weights @ p.mT + biases[:, None]).clamp(min=0) for p in (x, z))
    sampled = 2 * left.mT @ right / len(weights)
    torch.testing.assert_close(bind(ArcCosine(2, 0.7, 0.3))(x, z), sampled, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("made", [VerticalScaling, Gibbs])
def test_modules_in_kernels_serve_methods_and_points_of_another_dtype(made) -> None:
    """Methods asked every module for an attribute of kernels, and float64 points met float32 weights."""

    class Factor(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.5 + super().forward(x)[..., 0].tanh()

    kernel, x = made(Matern52(2), Factor(2, 1)), normal(12, 2)
    gp = nngp.VNNGP(x.float(), x[:, 0].float(), kernel=kernel, num_neighbors=4)
    gp.solve()
    assert gp.predict(x[:3].float()).mean.dtype is torch.float32
    torch.testing.assert_close(kernel(x, x), kernel.double()(x, x))
    assert torch.autograd.grad(kernel(x, x).sum(), list(kernel.parameters()), allow_unused=True)[-1] is not None
