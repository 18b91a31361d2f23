"""Limits of detection of each row: one limit for all is a number of the likelihood, no limit is no censoring."""

import pandas as pd
import pytest
import torch
from builders import METHODS, data, fresh

import pyro_nngp as nngp
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Censored, Gaussian, LogNormal
from pyro_nngp.models import BSGP, LMC, NPVI, SVGP, VNNGP

F64 = torch.float64
X, VALUES = data()
LIMITS = torch.where(torch.arange(60) % 3 == 0, 0.6, torch.where(torch.arange(60) % 3 == 1, 0.2, -torch.inf)).double()
Y = torch.maximum(VALUES, LIMITS)
NEW = X[:5] + 0.01
SLOW = [name for name in METHODS if name not in ("VNNGP", "SVGP", "LOO", "Vecchia", "MLLk", "Vecchia-inducing")]


def kernel():
    return Matern52(2, variance=1.0, lengthscale=0.5)


def build(name, y, likelihood, **by_row):
    method, settings = METHODS[name]
    torch.manual_seed(0)
    gp = method(X, y, kernel(), likelihood, **fresh(settings), **by_row)
    if getattr(gp, "can_solve", False):
        gp.solve()
    gp.mean.value = 0.3
    return gp


@pytest.mark.filterwarnings("ignore:(VNNGP|SWSGP). intervals of f from Censored data")
@pytest.mark.parametrize("name", ["VNNGP", "SVGP", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_one_limit_for_all_rows_is_a_number(name):
    y, limits = Y.clamp(min=0.5), torch.full((60,), 0.5, dtype=F64)
    each = build(name, y, Censored(Gaussian(0.05), lower="limits"), limits=limits)
    same = build(name, y, Censored(Gaussian(0.05), lower=0.5))
    torch.testing.assert_close(each(NEW), same(NEW))
    torch.testing.assert_close(each.loo(), same.loo())
    found, want = each.predict(NEW, limits=limits[:5]), same.predict(NEW)
    torch.testing.assert_close((found.mean, found.variance), (want.mean, want.variance))
    torch.manual_seed(1)
    losses = fit(each, 2, batch_size=20, progress=False).losses
    torch.manual_seed(1)
    torch.testing.assert_close(losses, fit(same, 2, batch_size=20, progress=False).losses)


def test_rows_see_beyond_their_own_limit():
    gp = VNNGP(X, Y, kernel(), Censored(Gaussian(0.05), lower="limits"), num_neighbors=20, limits=LIMITS)
    naive = VNNGP(X, Y, kernel(), Gaussian(0.05), num_neighbors=20)
    for each in (gp, naive):
        each.solve()
    is_censored = LIMITS == Y
    assert is_censored.sum() > 10
    error, before = ((each(X)[0] - VALUES)[is_censored].square().mean() for each in (gp, naive))
    assert error < 0.6 * before
    value = gp.predict(NEW)
    torch.testing.assert_close(value.mean, gp(NEW)[0])  # nothing limits a value at a new row that has no limit
    recorded = gp.predict(NEW, limits=torch.full((5,), 9.0)).mean
    torch.testing.assert_close(recorded, torch.full((5,), 9.0, dtype=F64))


def test_upper_limits_of_times_in_other_methods():
    times = VALUES.exp()
    ends = torch.where(torch.arange(60) % 2 == 0, 2.0, torch.inf).double()
    likelihood = Censored(LogNormal(0.05), upper="limits")
    gp = NPVI(X, torch.minimum(times, ends), kernel(), likelihood, num_neighbors=8, limits=ends)
    assert len(fit(gp, 2, progress=False).losses) == 2
    assert gp.predict(NEW, limits=torch.full((5,), 1.5)).mean.max() < 1.5
    deep = BSGP(X, torch.minimum(times, ends), kernel(), likelihood, inducing=6, limits=ends, inducing_prior=None)
    draws = {"layers.0.nu": torch.zeros(2, 6, dtype=F64)}
    assert deep.predict(NEW, samples=draws, limits=torch.full((5,), 1.5)).mean.max() < 1.5


@pytest.mark.slow
def test_outputs_with_limits_beside_others():
    y, limits = torch.stack([Y, VALUES], -1), torch.stack([LIMITS, torch.zeros(60, dtype=F64)], -1)
    y[3, 0] = torch.nan

    def parts():
        return [Censored(Gaussian(0.05), lower="limits"), Gaussian(0.05)]

    gp = LMC(X, y, 1, parts(), limits=limits, num_neighbors=8)
    gp.solve()
    found = gp.predict(NEW, limits=torch.full((5,), 9.0)).mean
    torch.testing.assert_close(found[0], torch.full((5,), 9.0, dtype=F64))
    torch.testing.assert_close(found[1], gp(NEW)[0][1])
    with pytest.raises(ValueError, match="expected y to be from the limit of their row to inf, got"):
        LMC(X, y - 1, 1, parts(), limits=limits, num_neighbors=8)


def test_tables_rows_and_exports(tmp_path):
    frame = pd.DataFrame(X.numpy(), columns=["a", "b"]).assign(lod=LIMITS.numpy())
    likelihood = Censored(Gaussian(0.05), lower="limits")
    gp = VNNGP(frame[["a", "b"]], Y.numpy(), kernel(), likelihood, num_neighbors=8, limits=frame["lod"])
    gp.solve()
    gp.save(tmp_path / "gp")
    assert torch.equal(nngp.load(tmp_path / "gp").limits, LIMITS)
    there = {"x_new": NEW, "limits": torch.full((5,), 9.0, dtype=F64)}
    found = nngp.to_arviz(gp, num_samples=3, predictions=there, progress=False)
    assert found.constant_data["limits"].shape == (60,)
    assert (found.predictions["y"] == 9).all()
    gp.extend(frame[["a", "b"]][:3], Y[:3].numpy(), limits=frame["lod"][:3])
    assert len(gp.limits) == 63
    with pytest.raises(ValueError, match="extend: expected limits of the new rows, got None"):
        gp.extend(NEW, Y[:5])


def test_malformed_limits_are_refused():
    likelihood = Censored(Gaussian(), lower="limits")
    for match, settings in (
        (r"expected limits of each row for Censored\(\), got None", {}),
        (r"expected limits of shape \(60,\), got \(59,\)", {"limits": LIMITS[1:]}),
        ("expected limits to be numbers, got NaN", {"limits": LIMITS * torch.nan}),
        ("expected y to be from the limit of their row to inf, got", {"limits": LIMITS + 1}),
    ):
        with pytest.raises(ValueError, match=match):
            VNNGP(X, Y, kernel(), likelihood, **settings)
    with pytest.raises(ValueError, match="expected limits None for this likelihood, got Gaussian"):
        SVGP(X, Y, kernel(), Gaussian(), inducing=9, limits=LIMITS)
    with pytest.raises(ValueError, match=r"Censored: expected lower < upper .*got limits and limits"):
        Censored(Gaussian(), "limits", "limits")
    gp = SVGP(X, Y, kernel(), Gaussian(), inducing=9)
    with pytest.raises(ValueError, match="predict: expected limits None for this likelihood"):
        gp.predict(NEW, limits=LIMITS[:5])
    gp = SVGP(X, Y, kernel(), likelihood, inducing=9, limits=LIMITS)
    with pytest.raises(ValueError, match=r"predict: expected limits to be numbers, \(5,\)"):
        gp.predict(NEW, limits=LIMITS[:4])
