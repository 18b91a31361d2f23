"""Starts from the data: the same in all units, near the truth, and only where the user has set nothing."""

import gc
import math
import weakref

import pyro.distributions as dist
import pytest
import torch
from oracles.problems import draw, score
from pyro.nn import PyroSample
from torch import nn

from pyro_nngp.hyperparameters import freeze, unset_hyperparameters
from pyro_nngp.inference import fit
from pyro_nngp.kernels import RBF, Matern, Matern12, Matern32, Matern52
from pyro_nngp.likelihoods import (
    Bernoulli,
    Binomial,
    Categorical,
    Censored,
    Gamma,
    Gaussian,
    LogNormal,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from pyro_nngp.means import ConstantMean, LinearMean
from pyro_nngp.models import BSGP, LOO, NPVI, SVGP, SWSGP, VNNGP, MLLk, Vecchia
from pyro_nngp.starts.from_data import noise_variance, start_from_data

F64 = torch.float64
N = 300
UTM = torch.tensor([5e5, 5e6], dtype=F64)
METHODS = {
    "Vecchia": lambda x, y: Vecchia(x, y, num_neighbors=12),
    "MLLk": lambda x, y: MLLk(x, y, num_neighbors=8),
    "LOO": lambda x, y: LOO(x, y, num_neighbors=12),
    "VNNGP": lambda x, y: VNNGP(x, y, num_neighbors=12),
    "NPVI": lambda x, y: NPVI(x, y, num_neighbors=8),
    "SVGP": lambda x, y: SVGP(x, y, inducing=x[:60]),
    "SWSGP": lambda x, y: SWSGP(x, y, inducing=x[:60], learn_inducing=False, num_neighbors=12),
}


def in_units(x, y):
    """Data in several units and precisions, the unit of y, and the map of inputs back."""
    for shift, unit, level, size, dtype in (
        (0.0, 1.0, 0.0, 1.0, F64),
        (UTM, 1e5, 3e5, 1e5, F64),
        (UTM, 1e5, 3e5, 1e5, torch.float32),
    ):
        raw_x, raw_y = (shift + unit * x).to(dtype), (level + size * y).to(dtype)
        yield raw_x, raw_y, size, lambda z, shift=shift, unit=unit: (z - shift) / unit


def check_alike(scores):
    (r2, nll), *others = scores
    for other_r2, other_nll in others:
        assert other_r2 == pytest.approx(r2, abs=0.02)
        assert other_nll == pytest.approx(nll, abs=0.05)


@pytest.mark.parametrize("name", [n if n == "VNNGP" else pytest.param(n, marks=pytest.mark.slow) for n in METHODS])
def test_the_plain_call_on_raw_units_is_that_on_standardized_data(name, field):
    x, _, y = field
    found = []
    for raw_x, raw_y, size, _ in in_units(x, y):
        gp = METHODS[name](raw_x[:N], raw_y[:N])
        steps, rate = (40, 0.1) if name == "SWSGP" else (8, 0.01)  # its q(u) is not solved for
        fit(gp, steps, lr=rate, batch_size=100, progress=False)
        found.append(score(gp, raw_x[N:], raw_y[N:], size))
    assert found[0][0] > 0.8
    check_alike(found)


def test_overdispersed_counts_with_zeros_start_at_the_scale_of_their_logits():
    """A count of zero far below its mean has an almost linear log density: no Laplace approximation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 2, generator=generator, dtype=F64)
    f = 8 + 2 * draw(Matern52(2, lengthscale=torch.tensor([0.3, 0.3], dtype=F64)).bind()(x, x))
    torch.manual_seed(0)
    y = dist.NegativeBinomial(0.2, logits=f).sample()
    assert 0.2 < (y == 0).double().mean() < 0.6
    gp = VNNGP(x, y, Matern52(2), NegativeBinomial(), num_neighbors=12)
    assert 0.1 < gp.kernel.variance.item() < 40


@pytest.mark.slow
def test_inducing_points_are_learned_alike_in_all_units(field):
    x, _, y = field
    places, scores = [], []
    for raw_x, raw_y, size, standard in in_units(x, y):
        gp = SWSGP(raw_x[:N], raw_y[:N], inducing=60, num_neighbors=12)
        before = standard(gp.z.detach())
        fit(gp, 20, batch_size=100, progress=False)
        places.append(standard(gp.z.detach()))
        scores.append(score(gp, raw_x[N:], raw_y[N:], size))
        assert (places[-1] - before).norm(dim=-1).median() > 0.01
    torch.testing.assert_close(places[1], places[0], rtol=0, atol=1e-5)
    check_alike(scores)


@pytest.mark.parametrize("name", ["Vecchia", "LOO"])
def test_starts_move_with_the_units_of_each_column(name, field):
    x, _, y = field
    unit = torch.tensor([1e-3, 1e6], dtype=F64)
    one = METHODS[name](x[:N], y[:N])
    other = METHODS[name](1e6 * unit + unit * x[:N], -7e4 + 1e5 * y[:N])
    torch.testing.assert_close(other.kernel.lengthscale, one.kernel.lengthscale * unit, rtol=1e-5, atol=0)
    torch.testing.assert_close(other.kernel.variance, one.kernel.variance * 1e10, rtol=1e-4, atol=0)
    torch.testing.assert_close(other.likelihood.variance, one.likelihood.variance * 1e10, rtol=1e-5, atol=0)
    torch.testing.assert_close(other.mean.value, -7e4 + one.mean.value * 1e5, rtol=1e-9, atol=1e-3)
    assert torch.equal(other.graph.order, one.graph.order)
    assert (other.graph.neighbors == one.graph.neighbors).double().mean() > 0.999


def test_starts_are_near_the_truth(field):
    x, _, y = field
    gp = Vecchia(x, y, Matern32(2))
    assert gp.kernel.lengthscale.shape == (2,)
    assert float((gp.kernel.lengthscale.detach().log() - math.log(0.3)).abs().max()) < 0.7
    assert float(gp.likelihood.variance.detach()) == pytest.approx(0.04, rel=0.4)
    assert score(Vecchia(x[:N], y[:N]), x[N:], y[N:])[0] > 0.8


def test_what_is_set_stays(field):
    x, _, y = field
    kernel, likelihood = Matern32(2, lengthscale=0.123), Gaussian(0.5)
    gp = LOO(x, y, kernel, likelihood, num_neighbors=8, mean=ConstantMean(0.25))
    assert float(kernel.lengthscale.detach()) == pytest.approx(0.123)
    assert float(likelihood.variance.detach()) == pytest.approx(0.5)
    assert float(gp.mean.value.detach()) == pytest.approx(0.25)
    started = float(kernel.variance.detach())
    assert not unset_hyperparameters(kernel)
    LOO(x, 100 * y, kernel, likelihood, num_neighbors=8)  # a kernel that serves again keeps its values
    assert float(kernel.variance.detach()) == started


def test_values_that_were_trained_elsewhere_stay(field):
    x, _, y = field
    kernel = Matern32(2).double()
    with torch.no_grad():
        kernel.lengthscale_unconstrained.add_(0.5)
    Vecchia(x, y, kernel)
    assert kernel.lengthscale.item() == pytest.approx(math.exp(0.5))
    assert kernel.variance.item() != 1.0


def test_priors_stay_and_the_rest_starts_given_their_medians(field):
    x, _, y = field
    kernel = Matern32(2)
    kernel.lengthscale = PyroSample(dist.LogNormal(torch.tensor(-1.2, dtype=F64), 0.1))
    gp = Vecchia(1e3 * x, 1e3 * y, kernel)
    assert "lengthscale" in gp.kernel._pyro_samples
    assert gp.likelihood.variance.item() > 1e4


def test_odd_columns(field):
    x, _, y = field
    odd = torch.stack([x[:, 0], torch.full_like(x[:, 0], 7.0), (10 * x[:, 1]).round(), 1e6 * x[:, 1]], -1)
    gp = Vecchia(odd[:N], y[:N])
    assert gp.kernel.lengthscale.isfinite().all()
    assert score(gp, odd[N:], y[N:])[0] > 0.8


def test_a_callable_and_a_deep_kernel(field):
    x, _, y = field
    plain = Matern32(2, lengthscale=0.3).double().requires_grad_(False)
    gp = Vecchia(x, y, lambda a, b: plain.bind()(a, b))
    assert gp.likelihood.variance.item() == pytest.approx(0.04, rel=0.5)

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.kernel = nn.Linear(2, 3), Matern32(3)

        def forward(self, a, b):
            return self.kernel(self.net(a), self.net(b))

    deep = Deep()
    before = deep.net.weight.detach().double().clone()
    Vecchia(x, y, deep)
    torch.testing.assert_close(deep.net.weight.detach(), before)
    assert 0.1 < deep.kernel.variance.item() / y.var().item() < 10
    assert not unset_hyperparameters(deep)


LIKELIHOODS = {
    "bernoulli": (Bernoulli(), lambda f: (f > 0).to(F64), lambda y: 0.0, 1.0),
    "probit": (Bernoulli("probit"), lambda f: (f > 0).to(F64), lambda y: 0.0, 1.0),
    "binomial": (Binomial(8), lambda f: (8 * f.sigmoid()).round(), lambda y: torch.logit(y.mean() / 8), 0.2),
    "poisson": (Poisson(), lambda f: (f + 5).exp().round(), lambda y: y.mean().log(), 1e-3),
    "negative binomial": (NegativeBinomial(2.0), lambda f: (f + 5).exp().round(), lambda y: y.mean().log(), 1e-3),
    "gamma": (Gamma(3.0), lambda f: (f - 4).exp(), lambda y: y.mean().log(), 1e-3),
    "log-normal": (LogNormal(), lambda f: (f + 9).exp(), lambda y: y.log().median(), 1e-6),
    "student": (StudentT(), lambda f: 1e4 * f + 3e5, lambda y: y.median(), 1.0),
    "ordinal": (Ordinal(torch.tensor([-1.0, 1.0])), lambda f: torch.bucketize(f, torch.tensor([-1.0, 1.0])), None, 0.0),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_mean_starts_at_the_level_of_the_data_through_the_link(name, field):
    x, f, _ = field
    likelihood, make, level, tolerance = LIKELIHOODS[name]
    y = make(f)
    gp = VNNGP(x, y, None, likelihood, num_neighbors=8)
    if level is not None:
        assert gp.mean.value.item() == pytest.approx(float(level(y)), abs=tolerance)
    assert gp.kernel.lengthscale.shape == (2,)
    assert float((gp.kernel.lengthscale.detach().log() - math.log(0.3)).abs().max()) < 2


def test_classes_start_at_their_log_frequencies(field):
    x, f, _ = field
    y = torch.bucketize(f, torch.tensor([-1.0, 0.5], dtype=F64))
    gp = VNNGP(x, y, None, Categorical(3), num_neighbors=8)
    want = y.bincount().double().log()
    torch.testing.assert_close(gp.mean.value.detach(), want - want.mean(), rtol=0, atol=1e-2)


@pytest.mark.slow
def test_shape_parameters_start_at_moments():
    x = torch.rand(500, 2, dtype=F64)
    counts = dist.NegativeBinomial(torch.tensor(3.0, dtype=F64), logits=torch.sin(3 * x[:, 0]) + 2).sample()
    negative = NegativeBinomial()
    VNNGP(x, counts, None, negative, num_neighbors=8)
    assert 1.5 < negative.total_count.item() < 6
    gamma = Gamma()
    VNNGP(x, dist.Gamma(torch.full((500,), 4.0, dtype=F64), 1e-3).sample(), None, gamma, num_neighbors=8)
    assert 2 < gamma.concentration.item() < 8


@pytest.mark.parametrize(
    ("likelihood", "variance"),
    [(Gaussian(0.5), 0.5), (Censored(Gaussian(0.5), lower=0.0), 0.5), (StudentT(5.0, 2.0), 2.4**2), (Poisson(), None)],
)
def test_the_noise_around_f_is_that_of_the_values(likelihood, variance):
    found = noise_variance(freeze(likelihood))
    assert found == variance if variance is None else float(found) == pytest.approx(variance, rel=1e-6)


def test_sparse_layers_start_from_the_data_and_priors_ask_for_standardized_inputs(field):
    x, _, y = field
    with pytest.warns(UserWarning, match=r"BSGP: the prior of the inducing inputs has units of one"):
        gp = BSGP(UTM + 1e5 * x, 3e5 + 1e5 * y, inducing=20)
    plain = BSGP(x, y, inducing=20)
    torch.testing.assert_close(
        gp.layers[0].kernel.lengthscale, 1e5 * plain.layers[0].kernel.lengthscale, rtol=1e-4, atol=0
    )
    torch.testing.assert_close(gp.likelihood.variance, 1e10 * plain.likelihood.variance, rtol=1e-4, atol=0)
    deep = BSGP(x, y, inducing=20, num_layers=2)
    assert deep.layers[0].kernel.variance.item() < 0.1


def test_a_start_from_another_method_is_a_copy(field):
    x, _, y = field
    first = Vecchia(x, y)
    fit(first, 5, progress=False)
    second = VNNGP(x, y, start=first, num_neighbors=8)
    for one, other in zip(
        first.parameters(), (*second.kernel.parameters(), *second.likelihood.parameters()), strict=False
    ):
        torch.testing.assert_close(one, other)
        assert one is not other
    torch.testing.assert_close(second.mean.value, first.mean.value)
    fit(second, 2, progress=False)
    assert not torch.equal(second.kernel.lengthscale, first.kernel.lengthscale)
    given = LOO(x, y, Matern12(2, lengthscale=0.7), start=first, num_neighbors=8)
    assert given.kernel.lengthscale.item() == pytest.approx(0.7)
    torch.testing.assert_close(given.likelihood.variance, first.likelihood.variance)
    with pytest.raises(TypeError, match=r"LOO: expected start to be a trained method, got Matern52"):
        LOO(x, y, start=Matern52(2))


def test_another_method_takes_over_a_noise_variance_that_was_trained_to_zero() -> None:
    """The logarithm of a noise variance in float32 ends below -104 on data without noise."""
    x = torch.rand(60, 2)
    first = LOO(x, x.sum(1), num_neighbors=8)
    with torch.no_grad():
        first.likelihood.variance_unconstrained.fill_(-110.0)
    second = Vecchia(x, x.sum(1), start=first, num_neighbors=8)
    assert second.likelihood.variance == 0
    assert second.predict(x[:5]).mean.isfinite().all()


def test_a_method_does_not_hold_the_one_that_it_started_from():
    x = torch.rand(30, 2)
    first = Vecchia(x, x[:, 0], num_neighbors=4)
    alive, second = weakref.ref(first), Vecchia(x, x[:, 0], num_neighbors=4, start=first)
    del first
    gc.collect()
    assert alive() is None
    assert second.y is not None


def test_coarse_inputs_warn():
    x = torch.rand(300, 2, dtype=F64)
    y = x.sum(-1)
    with pytest.warns(UserWarning, match=r"columns \[0, 1\] of x hold 5e\+05 \+- 1.*Subtract their means"):
        Vecchia((UTM + x).float(), y.float())
    Vecchia(UTM + x, y)  # warnings are errors


def test_linear_mean_is_solved_for(field):
    x, _, y = field
    trend = 1e5 * (3 + 2 * x[:, 0] - 5 * x[:, 1])
    gp = Vecchia(UTM + 1e5 * x, 1e2 * y + trend, Matern52(2), mean=LinearMean(2))
    gp.solve()
    torch.testing.assert_close(gp.mean.slope.detach(), torch.tensor([2.0, -5.0], dtype=F64), rtol=0, atol=3e-2)
    with torch.no_grad():
        want = torch.stack([gp.mean(UTM + 1e5 * x[:1])[0]])
    torch.testing.assert_close(want, trend[:1], rtol=0, atol=5e3)


def test_counts_of_few_rows_do_not_start_overdispersed():
    """Neighbors that are far apart have different f, which looks like a small size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(80, 2, generator=generator, dtype=F64)
    f = 1.5 + 2 * (15 * x[:, 0]).sin() * (15 * x[:, 1]).cos()
    counts = torch.poisson(f.exp(), generator=generator)
    near = torch.cdist(x, x).argsort(-1)[:, 1:5]
    alone = NegativeBinomial().start("total_count", counts, counts[near])
    assert alone < 4
    assert VNNGP(x, counts, None, NegativeBinomial()).likelihood.total_count.item() > 3 * alone


@pytest.mark.parametrize(("truth", "low", "high"), [(Matern12, 0.1, 1.2), (RBF, 1.6, 5.0)])
def test_smoothness_starts_near_that_of_the_data(truth, low, high) -> None:
    x = torch.rand(250, 1, dtype=F64)
    y = draw(freeze(truth(1, 1.0, 0.2))(x, x)) + 0.03 * torch.randn(250, dtype=F64)
    assert low < Vecchia(x, y, num_neighbors=12).kernel.smoothness.item() < high


def test_the_kernel_that_is_made_has_a_smoothness_where_data_tell_it() -> None:
    x = torch.rand(120, 2)
    y, labels = x.sum(-1), (x.sum(-1) > 1).float()
    assert type(Vecchia(x, y, num_neighbors=4).kernel) is Matern
    assert type(VNNGP(x, labels, likelihood=Poisson(), num_neighbors=4).kernel) is Matern
    for gp in (
        Vecchia(x[:99], y[:99], num_neighbors=4),
        LOO(x, labels, likelihood=Bernoulli(), num_neighbors=4),
        LOO(x, labels.long(), likelihood=Categorical(2), num_neighbors=4),
        VNNGP(x, labels, likelihood=Ordinal(torch.tensor([0.0])), num_neighbors=4),
        VNNGP(x, None, num_neighbors=4),
        MLLk(x, y, num_neighbors=4),
        SVGP(x, y, inducing=10),
    ):
        assert type(gp.kernel) is Matern52


@pytest.mark.parametrize("likelihood", [Bernoulli, Gaussian])
def test_many_data_under_much_noise_start_at_the_range_of_f(likelihood):
    """The 16 nearest of 60,000 points lie within 1/60 of a wave, and say that f is alike, not how far."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60_000, 2, generator=generator, dtype=F64) * 7.7
    f = 2 * torch.sin(3 * x[:, 0]) + 2 * torch.cos(4 * x[:, 1])
    noise = 4 * torch.randn(len(f), generator=generator, dtype=F64)
    y = f + noise if likelihood is Gaussian else torch.bernoulli(f.sigmoid(), generator=generator)
    kernel = Matern32(2)
    start_from_data(kernel, likelihood(), x, y, None, 1e-6)
    assert ((kernel.lengthscale > 0.3) & (kernel.lengthscale < 2.5)).all()  # 1.1 to 1.5 after training
