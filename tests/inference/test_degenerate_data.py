"""Plain calls on data that hardly say anything, or in extreme units: fit ends, and predictions make sense."""

import warnings

import pytest
import torch
from builders import uniform

from pyro_nngp.inference import fit
from pyro_nngp.models import VNNGP, Vecchia

N, NEW = 150, uniform(10, dtype=torch.float32, seed=1)
X = uniform(N, dtype=torch.float32, seed=0)
NOISE = torch.randn(N, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", [Vecchia, VNNGP])
@pytest.mark.parametrize(
    ("x", "y", "want", "within"),
    [
        (X, torch.full((N,), 7.0), 7.0, 1e-3),
        (X, torch.zeros(N), 0.0, 1e-3),
        (torch.ones(N, 2), NOISE, float(NOISE.mean()), 0.1),
    ],
)
def test_predictions_are_the_mean_where_data_say_no_more(method, x, y, want, within):
    gp = method(x, y, num_neighbors=8)
    fit(gp, progress=False)
    predictive = gp.predict(NEW)
    assert (predictive.mean - want).abs().max() < within
    assert predictive.variance.isfinite().all()


@pytest.mark.parametrize("unit", [1e-12, 1e12])
def test_extreme_units_change_nothing_else(unit):
    """In float32 a variance of 1e24 is near the largest number; its square is beyond."""
    f = torch.sin(6 * X[:, 0]) + 0.1 * NOISE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gp = Vecchia(X, unit * f, num_neighbors=8)
        fit(gp, progress=False)
    plain = Vecchia(X, f, num_neighbors=8)
    fit(plain, progress=False)
    torch.testing.assert_close(gp.predict(NEW).mean / unit, plain.predict(NEW).mean, rtol=0.0, atol=0.02)
