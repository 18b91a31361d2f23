import math

import pytest
import torch
from builders import tensor
from torch.distributions import Multinomial as Dense

import pyro_nngp as nngp
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Binomial, Categorical, Multinomial
from pyro_nngp.models import NPVI, SVGP, VNNGP

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
C, B = 4, 6
LOC = torch.randn(C, B, generator=GENERATOR, dtype=F64)
VAR = 0.1 + torch.rand(C, B, generator=GENERATOR, dtype=F64)
TRIALS = tensor(1.0, 3.0, 10.0, 50.0, 1000.0, 7.0)


def bound(trials=TRIALS):
    return Multinomial().bind().for_rows(trials=trials)


def counts(f, trials):
    torch.manual_seed(1)
    return torch.stack([Dense(int(n), logits=row).sample() for n, row in zip(trials, f.mT, strict=True)], -1)


Y = counts(LOC, TRIALS)


def test_density_is_the_multinomial_one_in_the_place_of_the_first_kind():
    found = bound()(LOC).log_prob(Y)
    want = torch.stack([Dense(int(n), logits=f).log_prob(y) for n, f, y in zip(TRIALS, LOC.mT, Y.mT, strict=True)])
    torch.testing.assert_close(found[0], want)
    assert (found[1:] == 0).all()
    shares = LOC.softmax(0)
    torch.testing.assert_close(bound()(LOC).mean, TRIALS * shares)
    torch.testing.assert_close(bound()(LOC).variance, TRIALS * shares * (1 - shares))
    sets = bound()(torch.stack([LOC, LOC.flip(0)])).log_prob(Y)
    assert sets.shape == (2, C, B)
    torch.testing.assert_close(sets[0], found)


def test_one_trial_is_a_class():
    one, label = torch.eye(C, dtype=F64)[:, [2] * B], torch.full((B,), 2)
    both = bound(torch.ones(B, dtype=F64)), Categorical(C)
    expected = [part.expected_log_prob(y, LOC, VAR) for part, y in zip(both, (one, label), strict=True)]
    torch.testing.assert_close(expected[0].sum(0), expected[1])
    density = [part.marginal(LOC, VAR).log_prob(y) for part, y in zip(both, (one, label), strict=True)]
    torch.testing.assert_close(density[0].sum(0), density[1], rtol=0, atol=5e-3)
    torch.testing.assert_close(both[0].marginal(LOC, VAR).mean.mT, both[1].marginal(LOC, VAR).probs)


def test_two_kinds_are_a_binomial_one():
    y, loc, var = torch.stack([Y[0], TRIALS - Y[0]]), LOC[:2], VAR[:2]
    other = Binomial().bind().for_rows(trials=TRIALS)
    difference, spread = loc[0] - loc[1], var.sum(0)
    found, want = bound().marginal(loc, var), other.marginal(difference, spread)
    torch.testing.assert_close(found.log_prob(y).sum(0), want.log_prob(Y[0]), rtol=0, atol=5e-3)
    torch.testing.assert_close((found.mean[0], found.variance[0]), (want.mean, want.variance), rtol=2e-3, atol=1e-6)
    expected = bound().expected_log_prob(y, loc, var).sum(0)
    torch.testing.assert_close(expected, other.expected_log_prob(Y[0], difference, spread), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_predictive_density_and_draws_of_several_kinds():
    predictive, generator = bound().marginal(LOC, VAR), torch.Generator().manual_seed(2)
    f = LOC + VAR.sqrt() * torch.randn(200_000, C, B, generator=generator, dtype=F64)
    few = TRIALS < 100  # of a thousand trials hardly a draw is near the counts
    density = bound()(f).log_prob(Y).sum(-2).exp()[:, few]
    error = 6 * density.std(0) / 200_000**0.5 + 2e-3 * density.mean(0)
    assert ((density.mean(0) - predictive.log_prob(Y).sum(0)[few].exp()).abs() < error).all()
    torch.manual_seed(0)
    draws = predictive.sample((20_000,))
    assert (draws.sum(-2) == TRIALS).all()
    assert ((draws.mean(0) - predictive.mean).abs() < 6 * (predictive.variance / 20_000).sqrt()).all()
    torch.testing.assert_close(draws.var(0), predictive.variance, rtol=0.1, atol=0.02)


def test_far_tails_in_float32():
    loc, var = torch.tensor([[60.0], [-60.0], [0.0]]), torch.full((3, 1), 0.3)
    y = torch.tensor([[0.0], [90_000.0], [10_000.0]])
    likelihood = bound(torch.tensor([1e5]))
    for found in (likelihood.expected_log_prob(y, loc, var), likelihood.marginal(loc, var).log_prob(y)):
        assert found.dtype == torch.float32
        assert found.isfinite().all()
    loc = loc.requires_grad_()
    (slope,) = torch.autograd.grad(likelihood.expected_log_prob(y, loc, var).sum(), loc)
    torch.testing.assert_close(slope, y - 1e5 * torch.tensor([[1.0], [0.0], [0.0]]), rtol=1e-4, atol=1.0)


def field(size):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(size, 1, generator=generator, dtype=F64) * 10
    f = torch.stack([x[:, 0].sin(), 1 + x[:, 0].cos(), torch.zeros(size, dtype=F64)])
    trials = torch.randint(1, 40, (size,), generator=generator).double()
    return x, f.softmax(0), counts(f, trials).mT, trials


@pytest.mark.parametrize(
    ("method", "settings"), [pytest.param(VNNGP, {}, marks=pytest.mark.slow), (SVGP, {"inducing": 12})]
)
def test_plain_calls_recover_the_shares(method, settings):
    x, shares, y, trials = field(80)
    gp = method(x, y, likelihood=Multinomial(), trials=trials, **settings)
    fit(gp, 20, progress=False)
    found = gp.predict(x)
    assert found.mean.shape == (3, 80)
    assert (found.mean - shares).abs().mean() < 0.05
    assert (found.mean.sum(0) - 1).abs().max() < 1e-3
    of_ten = gp.predict(x[:5], trials=torch.full((5,), 10))
    torch.testing.assert_close(of_ten.mean, 10 * found.mean[:, :5])
    assert (of_ten.sample().sum(0) == 10).all()


@pytest.mark.slow
def test_probability_integral_transforms_of_left_out_counts_are_uniform():
    x, _, y, trials = field(400)
    gp = VNNGP(x, y, likelihood=Multinomial(), trials=trials, num_neighbors=15)
    fit(gp, progress=False)
    torch.manual_seed(0)
    x, _, y, trials = field(2000)
    draws = gp.predict(x[400:], trials=trials[400:]).sample((400,))
    truth = y[400:].mT
    rank = (draws < truth).double().mean(0) + torch.rand(truth.shape) * (draws == truth).double().mean(0)
    for kind in rank:
        share = torch.histc(kind.float(), 5, 0, 1) / len(kind)
        assert (share - 0.2).abs().max() < 0.05


@pytest.mark.slow
def test_rows_with_their_trials_elsewhere(tmp_path):
    x, _, y, trials = field(60)
    gp = VNNGP(x, y, Matern52(1), Multinomial(), trials=trials, num_neighbors=8)
    gp.solve()
    assert gp.loo().shape == (3, 60)
    assert gp.loo()[0].max() < 0
    gp.save(tmp_path / "gp")
    torch.testing.assert_close(nngp.load(tmp_path / "gp").predict(x[:3]).mean, gp.predict(x[:3]).mean)
    found = nngp.to_arviz(gp, num_samples=3, progress=False)
    assert found.constant_data["trials"].shape == (60,)
    gp.extend(x[:2] + 0.01, y[:2], trials=trials[:2])
    assert len(gp.y) == 62
    for other in (NPVI(x, y, Matern52(1), Multinomial(), trials=trials, num_neighbors=8),):
        assert math.isfinite(fit(other, 3, progress=False).losses[-1])


def test_malformed_counts_are_refused():
    x, _, y, trials = field(20)
    for match, data, settings in (
        (r"expected trials of each row for Multinomial\(\)", y, {}),
        ("expected y to sum to their row's trials, got 20 rows that do not", y, {"trials": trials + 1}),
        ("expected y to be counts 0, 1, 2, .., got", y / 2, {"trials": trials / 1}),
        (r"Multinomial: expected y of shape \(N, C\) with C >= 2, got", y[:, 0], {"trials": trials}),
    ):
        with pytest.raises(ValueError, match=match):
            VNNGP(x, data, Matern52(1), Multinomial(), **settings)
    with pytest.raises(ValueError, match=r"Multinomial: expected y of shape \(N, C\) with C >= 2, got f of"):
        Multinomial()(torch.zeros(5))


def test_means_of_known_f_are_trials_times_shares():
    sets = torch.stack([LOC, LOC.flip(0)])
    torch.testing.assert_close(bound()(sets).mean, TRIALS * sets.softmax(1))
