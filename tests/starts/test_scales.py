"""Scales of the parts of composed kernels from the spread of inputs and observations."""

import math

import pytest
import torch
from oracles.problems import score

from pyro_nngp.hyperparameters import unset_hyperparameters
from pyro_nngp.kernels import Constant, Linear, Matern12, Matern32, Matern52, Periodic, VerticalScaling
from pyro_nngp.models import VNNGP, Vecchia
from pyro_nngp.starts.scales import frozen_copy, place_scales

F64 = torch.float64
N = 300
UTM = torch.tensor([5e5, 5e6], dtype=F64)
KERNELS = {
    "sum": lambda: Matern32(2) + Matern52(2),
    "product": lambda: Matern32(1, active_dims=[0]) * Matern12(1, active_dims=[1]),
    "sum with a constant": lambda: Matern32(2) + Constant(2),
    "scaled": lambda: VerticalScaling(Matern32(2), lambda x: 1 + 0 * x[..., 0]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("sum", marks=pytest.mark.slow), *[name for name in KERNELS if name != "sum"]]
)
def test_composed_kernels_start_too(name, field):
    x, _, y = field
    gp = Vecchia(UTM + 1e5 * x[:N], 1e4 * y[:N], KERNELS[name]())
    assert not unset_hyperparameters(gp.kernel)
    assert score(gp, UTM + 1e5 * x[N:], 1e4 * y[N:])[0] > 0.8


def test_variances_of_sums_and_products_add_up():
    x = torch.linspace(0, 10, 50, dtype=F64)[:, None]
    kernel = (Matern32(1) + Linear(1)) * Matern12(1)
    VNNGP(x, None, kernel, num_neighbors=5)
    assert kernel.double().bind().diag(x).mean().item() == pytest.approx(1.0, rel=1e-5)


def test_a_period_is_found():
    t = torch.arange(0, 300, dtype=F64)[:, None]
    y = torch.sin(2 * math.pi * t[:, 0] / 24.0) + 0.1 * torch.randn(300, dtype=F64)
    gp = Vecchia(t, y, Periodic(1))
    assert gp.kernel.period.item() == pytest.approx(24.0, rel=0.03)


COMPOSITES = {
    "product": lambda: Matern52(1, active_dims=[0]) * Matern12(1, active_dims=[1]),
    "sum": lambda: Matern52(1, active_dims=[0]) + Matern12(1, active_dims=[1]),
    "product with a sum": lambda: Matern52(1, active_dims=[0]) * (Matern12(1, active_dims=[1]) + Constant(2)),
}


@pytest.mark.parametrize("kernel", COMPOSITES.values(), ids=COMPOSITES)
def test_parts_of_a_kernel_share_the_variance_of_the_data(field, kernel):
    """Their product or sum has it, not each of them."""
    x, _, y = field
    whole = kernel()
    work, slots = frozen_copy(whole, unset_hyperparameters(whole), x.device)
    place_scales(work, slots, x, y[None], 7.0)
    torch.testing.assert_close(work.bind().diag(x).mean(), torch.tensor(7.0, dtype=F64), rtol=1e-9, atol=0)
    variances = [slot.part.variance for slot in slots if slot.name == "variance"]
    want = {"product": [7**0.5] * 2, "sum": [3.5] * 2, "product with a sum": [7**0.5, 7**0.5 / 2, 7**0.5 / 2]}
    expected = next(want[name] for name, make in COMPOSITES.items() if make is kernel)
    torch.testing.assert_close(torch.stack(variances), torch.tensor(expected, dtype=F64), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(COMPOSITES["product"], id="product"),
        pytest.param(COMPOSITES["sum"], id="sum", marks=pytest.mark.slow),
    ],
)
def test_composite_kernels_start_the_same_in_all_units(field, kernel):
    x, y = field[0][:120], field[2][:120]
    plain, scaled = Vecchia(x, y, kernel(), num_neighbors=8), Vecchia(x, 1e5 * y, kernel(), num_neighbors=8)
    ratio = scaled.kernel.bind().diag(x) / plain.kernel.bind().diag(x)
    torch.testing.assert_close(ratio.detach(), torch.full_like(ratio, 1e10), rtol=1e-4, atol=0)


def test_lengthscales_leave_the_spread_of_their_columns():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 2, generator=generator, dtype=F64)
    y = (20 * x[:, 0]).sin() + 0.1 * torch.randn(400, generator=generator, dtype=F64)
    found = Vecchia(x, y).kernel.lengthscale
    assert found[0] < 0.3 < found[1]
