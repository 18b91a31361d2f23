"""A second start where few noisy data end at an edge, the choice between the two, and its warning."""

import copy
import math
import warnings

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_nngp.inference import ConvergenceWarning, fit
from pyro_nngp.inference.svi.second_start import (
    SecondStart,
    check_second_start,
    check_signal,
    kind_of,
    place_second_start,
)
from pyro_nngp.kernels import Matern32, Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.means import LinearMean
from pyro_nngp.models import LOO, Vecchia

methods = pytest.mark.parametrize("method", [Vecchia, LOO])


def waves(n=120, noise=0.3):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    return x, torch.sin(6 * x[:, 0]) + noise * torch.randn(n, generator=generator, dtype=torch.float64)


def set_values(gp, lengthscale, variance, noise):
    gp.kernel.lengthscale = torch.full_like(gp.kernel.lengthscale, lengthscale)
    gp.kernel.variance, gp.likelihood.variance = torch.tensor(variance).double(), torch.tensor(noise).double()
    gp.refresh_neighbors()
    gp.solve()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ((1e-4, 1.0, 0.1), "noise"),
        ((0.3, 1e-3, 1.0), "noise"),
        ((0.3, 1.0, 1e-5), "signal"),
        ((30.0, 1.0, 0.1), "trend"),
        ((30.0, 3000.0, 0.01), "middle"),  # smooth, but of some hundred times the noise
        ((30.0, 3000.0, 1e-4), "signal"),
        ((0.3, 0.1, 0.5), "weak"),
        ((0.3, 1.0, 0.1), "middle"),
    ],
)
def test_the_kind_of_f_follows_from_its_hyperparameters(values, kind):
    gp = Vecchia(*waves(60), Matern52(1))
    set_values(gp, *values)
    assert kind_of(gp) == kind


def test_no_second_start_for_what_was_set_or_for_many_rows():
    x, y = waves(60)
    assert kind_of(Vecchia(x, y, Matern52(1, lengthscale=1e-4))) is None
    assert kind_of(Vecchia(x, y, Matern52(1), Gaussian(0.1))) is None
    assert kind_of(Vecchia(x, y, Matern52(1), Gaussian(PyroSample(dist.LogNormal(0.0, 1.0))))) is None
    assert kind_of(Vecchia(torch.rand(2001, 1), torch.randn(2001), Matern52(1), num_neighbors=3)) is None
    assert kind_of(Vecchia(x, torch.stack([y, y], 1), Matern52(1))) is None


@pytest.mark.parametrize("mean", [None, LinearMean(1, prior="weak")])
@methods
def test_a_run_that_ends_at_noise_is_followed_by_one_that_finds_f(method, mean):
    x, y = waves()
    gp = method(x, y, Matern52(1), mean=copy.deepcopy(mean))
    want = fit(gp, progress=False).loss
    set_values(gp, 1e-5, 0.5, 0.1)  # where the gradient of the lengthscale is zero
    result = fit(gp, progress=False)
    assert result.second_start > 20
    assert "second of two starts" in str(result)
    assert result.loss < want + 2e-3
    assert gp.kernel.lengthscale > 0.05


def test_a_weak_signal_that_ends_at_short_lengthscales_has_a_second_start():
    """The first start is a maximum at three distances of neighbors, nearly two nats below that of the waves."""
    generator = torch.Generator().manual_seed(109)
    x = torch.rand(250, 1, generator=generator, dtype=torch.float64)
    cov = Matern32(1, 1.0, 0.3)(x, x).detach()
    white = torch.randn(2, 250, generator=generator, dtype=torch.float64)
    f = torch.linalg.cholesky(cov + 1e-8 * torch.eye(250)) @ white[0]
    gp = Vecchia(x, f + 3 * white[1])
    result = fit(gp, progress=False)
    assert 1 < result.second_start < 3
    assert gp.kernel.lengthscale > 0.1


def test_the_first_run_is_kept_where_it_is_better(monkeypatch):
    """Noise-free data end at signal only, and so does the second run, or above it."""
    x, y = waves(noise=1e-4)
    gp = Vecchia(x, y, Matern52(1))
    ends = []
    monkeypatch.setattr(
        "pyro_nngp.inference.svi.second_start.place_second_start",
        lambda gp, kind: (ends.append(kind), set_values(gp, 1e-5, 0.5, 0.1)),
    )
    result = fit(gp, progress=False)
    assert ends == ["signal"]
    assert result.second_start < -100
    assert "first of two starts" in str(result)
    alone = Vecchia(x, y, Matern52(1))
    monkeypatch.setattr("pyro_nngp.inference.svi.second_start.kind_of", lambda gp: None)
    assert fit(alone, progress=False).second_start is None
    torch.testing.assert_close(gp(x[:5] + 0.01), alone(x[:5] + 0.01))


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False), (True, True)])
def test_a_run_that_alone_is_overconfident_is_not_kept(monkeypatch, first, second):
    """The second run gains a nat or more, which decides where both are."""
    x, y = waves()
    gp = LOO(x, y, Matern52(1))
    set_values(gp, 1e-5, 0.5, 0.1)
    answers = iter([first, second])
    monkeypatch.setattr("pyro_nngp.inference.svi.second_start.is_overconfident", lambda gp: next(answers))
    result = fit(gp, progress=False)
    gain = {(False, True): -math.inf, (True, False): math.inf}.get((first, second))
    assert result.second_start == gain if gain else 1 < result.second_start < math.inf
    keeps_second = first or not second
    assert f"{'second' if keeps_second else 'first'} of two starts" in str(result)
    assert ("the other overconfident" in str(result)) == (gain is not None)
    assert (gp.kernel.lengthscale < 1e-3) != keeps_second


def test_the_second_start_is_in_the_units_of_the_data():
    x, y = waves(60)
    small, large = Vecchia(x, y, Matern52(1)), Vecchia(1e3 * x, 100 * y, Matern52(1))
    for gp in (small, large):
        place_second_start(gp, "noise")
    torch.testing.assert_close(large.kernel.lengthscale, 1e3 * small.kernel.lengthscale)
    torch.testing.assert_close(large.kernel.variance, 1e4 * small.kernel.variance, rtol=1e-4, atol=0)
    torch.testing.assert_close(large.likelihood.variance, large.kernel.variance)
    length = float(small.kernel.lengthscale.detach())
    place_second_start(small, "trend")
    assert float(small.kernel.lengthscale.detach()) == pytest.approx(length / 4)


@methods
def test_data_without_a_signal_are_said_to_show_none(method):
    x, _ = waves()
    gp = method(x, torch.randn(120, generator=torch.Generator().manual_seed(2), dtype=torch.float64), Matern52(1))
    with pytest.warns(ConvergenceWarning, match=r"data that show f among the noise, got a variance of f of .* times"):
        fit(gp, progress=False)
    set_values(gp, 0.3, 0.5, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_signal(gp, SecondStart(0.1, ("noise", "trend")))  # there is a signal
        set_values(gp, 0.3, 1e-4, 0.1)
        check_signal(gp, SecondStart(0.1, ("noise", "middle")))  # the starts differ
        check_signal(gp, None)


@pytest.mark.parametrize(
    ("gain", "kinds", "warns"),
    [
        (0.4, ("noise", "middle"), True),
        (-0.4, ("middle", "noise"), True),
        (0.4, ("trend", "signal"), False),  # as on airfoil: both follow the data
        (-3.0, ("noise", "middle"), False),  # data know
        (0.4, ("signal", "signal"), False),  # the two agree
    ],
)
def test_a_choice_that_data_hardly_make_is_said(gain, kinds, warns):
    if warns:
        with pytest.warns(ConvergenceWarning, match=r"two optima within 0.4 nats: .* \(kept\), or .* NUTS"):
            check_second_start(SecondStart(gain, kinds))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_second_start(SecondStart(gain, kinds))
        check_second_start(None)
