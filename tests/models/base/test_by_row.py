"""Offsets, weights and trials of the rows: shifts of the targets, repeated rows, one number of trials for all."""

import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from builders import METHODS, data, fresh, methods
from pyro.nn import PyroSample

import pyro_nngp as nngp
from pyro_nngp.inference import IntegratedELBO, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import (
    Bernoulli,
    BetaBinomial,
    Binomial,
    Gaussian,
    Poisson,
    PolyaGammaBound,
    StudentT,
    ZeroInflated,
)
from pyro_nngp.models import BSGP, LOO, SVGP, VNNGP, CoregionalizedLOO, MLLk, Vecchia
from pyro_nngp.variational import MeanField

F64 = torch.float64
X, Y = data()
GENERATOR = torch.Generator().manual_seed(3)
OFFSET = 3 * torch.rand(60, generator=GENERATOR, dtype=F64)
COUNTS = 1 + torch.randint(3, (60,), generator=GENERATOR)
NEW = X[:5] + 0.01


def kernel():
    return Matern52(2, variance=1.0, lengthscale=0.5)


def build(name, y=Y, **by_row):
    method, settings = METHODS[name]
    torch.manual_seed(0)
    gp = method(X, y, kernel(), Gaussian(0.05), **fresh(settings), **by_row)
    gp.mean.value = 0.3
    if getattr(gp, "can_solve", False) and name not in ("Vecchia", "LOO", "MLLk"):
        gp.solve()
    return gp


@pytest.mark.parametrize("name", methods())
def test_an_offset_is_a_shift_of_gaussian_targets(name):
    plain, shifted = build(name), build(name, Y + OFFSET, offset=OFFSET)
    for gp in (plain, shifted):
        with torch.no_grad():
            gp.mean.value = 0.3
    for mine, other in zip(shifted(NEW), plain(NEW), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    if name != "NPVI-NN":  # whose network starts at other scores
        torch.testing.assert_close(shifted.loo(), plain.loo(), rtol=1e-6, atol=1e-6)
    torch.manual_seed(1)
    losses = fit(plain, 2, batch_size=20, progress=False).losses
    torch.manual_seed(1)
    torch.testing.assert_close(fit(shifted, 2, batch_size=20, progress=False).losses, losses, rtol=1e-5, atol=1e-5)


def test_predictions_add_the_offset_of_new_rows():
    gp = build("VNNGP", Y + OFFSET, offset=OFFSET)
    at = OFFSET[:5]
    torch.testing.assert_close(gp(NEW, offset=at)[0], gp(NEW)[0] + at)
    torch.testing.assert_close(gp.predict(NEW, offset=at).mean, gp.predict(NEW).mean + at)
    draws = gp.sample(NEW, 3, seed=1, offset=at)
    torch.testing.assert_close(draws, gp.sample(NEW, 3, seed=1) + at)
    samples = {"u": torch.zeros(2, 60, dtype=F64)}
    torch.testing.assert_close(gp(NEW, samples=samples, offset=at)[0], gp(NEW, samples=samples)[0] + at)
    torch.testing.assert_close(gp.predict(NEW, samples=samples, offset=at).mean, gp.mean.value + at)
    f, _ = gp.predictions_by_draw(NEW, offset=100 + at)({"u": torch.zeros(60, dtype=F64)})
    assert (f > 90).all()


def test_starts_know_exposures():
    x = torch.rand(400, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    rate, hours = (0.5 + torch.sin(5 * x[:, 0])).exp(), torch.logspace(-1, 2, 400, dtype=F64)
    torch.manual_seed(0)
    gp = VNNGP(x, torch.poisson(rate * hours), Matern52(2), Poisson(), num_neighbors=10, offset=hours.log())
    assert gp.mean.value.item() == pytest.approx(0.8, abs=0.5)  # that of the mean rate
    gp.solve()
    assert (gp(x[::9])[0] - rate[::9].log()).abs().median() < 0.3
    counts = gp.predict(x[::9], offset=hours[::9].log()).mean
    assert (counts / (rate * hours)[::9]).log().abs().median() < 0.3


@pytest.mark.filterwarnings("ignore:.* of the rows are exact copies of others:UserWarning")
@pytest.mark.parametrize("name", ["Vecchia", "SVGP", "VNNGP"])
def test_integer_weights_are_repeated_rows(name):
    rows = torch.arange(60).repeat_interleave(COUNTS)
    settings = {
        "Vecchia": {"num_neighbors": 59, "jitter": 1e-10},
        "SVGP": {"inducing": X[:20].clone(), "learn_inducing": False},
        "VNNGP": {"inducing": X[:20].clone(), "num_neighbors": 19, "guide": MeanField(Y[:20].clone(), 0.1)},
    }[name]
    method = getattr(nngp, name)

    def made(x, y, **by_row):
        if name == "Vecchia":
            settings["num_neighbors"] = len(x) - 1
        gp = method(x, y, kernel(), Gaussian(0.05), **settings, **by_row)
        gp.mean.value = 0.3
        return gp

    weighted, repeated = made(X, Y, weights=COUNTS), made(X[rows], Y[rows])
    if name == "SVGP":
        weighted.solve()
        repeated.solve()
    if name == "Vecchia":
        torch.testing.assert_close(weighted.log_prob(), repeated.log_prob(), rtol=1e-6, atol=1e-4)
    else:
        elbo = IntegratedELBO()
        losses = [elbo.loss(gp.model, gp.guide) for gp in (weighted, repeated)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    k = {"Vecchia": (60, len(rows)), "SVGP": (None, None), "VNNGP": (20, 20)}[name]
    ends = zip(weighted(NEW, num_neighbors=k[0]), repeated(NEW, num_neighbors=k[1]), strict=True)
    for mine, other in ends:
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.* of the rows are exact copies of others:UserWarning")
def test_weights_of_blocks_and_sites_count():
    one = MLLk(X, Y, kernel(), Gaussian(0.05), num_neighbors=59, weights=COUNTS, jitter=1e-10)
    rows = torch.arange(60).repeat_interleave(COUNTS)
    two = Vecchia(X[rows], Y[rows], kernel(), Gaussian(0.05), num_neighbors=len(rows) - 1)
    one.mean.value = two.mean.value = 0.3
    torch.testing.assert_close(one.log_prob(), two.log_prob(), rtol=1e-4, atol=1e-3)
    for likelihood in (Gaussian(0.05), StudentT(4.0, 0.2)):
        gp = VNNGP(X, Y, kernel(), likelihood, num_neighbors=20, weights=torch.full_like(Y, 1e4))
        plain = VNNGP(X, Y, kernel(), likelihood, num_neighbors=20)
        for each in (gp, plain):
            each.solve()
        assert (gp(X)[0] - Y).abs().mean() < 0.2 * (plain(X)[0] - Y).abs().mean()
        assert gp(X)[1].max() < plain(X)[1].min()


@pytest.mark.slow
def test_trials_of_each_row_are_those_of_one_number():
    generator = torch.Generator().manual_seed(0)
    y = torch.binomial(torch.full((60,), 7.0, dtype=F64), torch.sigmoid(Y), generator=generator)
    n = torch.full((60,), 7)
    for method, settings in ((VNNGP, {"num_neighbors": 8}), (LOO, {"num_neighbors": 8}), (SVGP, {"inducing": 9})):
        each = method(X, y, kernel(), Binomial(), trials=n, **settings)
        same = method(X, y, kernel(), Binomial(7), **settings)
        for gp in (each, same):
            gp.mean.value = 0.3
            gp.solve()
            gp.mean.value = 0.3
        torch.testing.assert_close(each(NEW)[0], same(NEW)[0])
        torch.testing.assert_close(each.loo(), same.loo())
        torch.testing.assert_close(each.predict(NEW, trials=n[:5]).mean, same.predict(NEW).mean)
        torch.testing.assert_close(each.predict(NEW).mean, same.predict(NEW).mean / 7)
        each.extend(NEW, y[:5], trials=n[:5])
        assert len(each.trials) == 65
        assert len(fit(each, 2, batch_size=20, progress=False).losses) == 2
    bound = SVGP(X, y, kernel(), PolyaGammaBound(Binomial()), inducing=9, trials=n)
    bound.solve()
    assert bound(NEW)[0].isfinite().all()
    with pytest.raises(ValueError, match="counts in 0..their row's trials"):
        VNNGP(X, y + 1, Matern52(2), Binomial(), trials=n)


def test_the_start_of_trials_knows_their_numbers():
    n = torch.logspace(0, 3, 60).round().double()
    y = (n * torch.sigmoid(Y - 2)).round()
    gp = VNNGP(X, y, None, BetaBinomial(), trials=n, num_neighbors=8)
    gp.solve()
    assert gp.predict(X[:2], trials=n[:2]).mean.shape == (2,)
    gp = VNNGP(X, y, None, Binomial(), trials=n, num_neighbors=8)
    assert gp.mean.value.item() == pytest.approx((Y - 2).mean().item(), abs=0.4)


def test_rows_of_other_methods():
    both = torch.stack([Y + OFFSET, OFFSET - Y], -1)
    gp = CoregionalizedLOO(X, both, 1, num_neighbors=6, offset=OFFSET)
    other = CoregionalizedLOO(X, both - OFFSET[:, None], 1, num_neighbors=6)
    torch.testing.assert_close(gp.predict(NEW, offset=OFFSET[:5]).loc, other.predict(NEW).loc + OFFSET[:5, None])
    torch.testing.assert_close(gp.loo(), other.loo())
    torch.testing.assert_close(gp.sample(NEW, 2, seed=1), other.sample(NEW, 2, seed=1))
    deep = BSGP(X, Y + OFFSET, kernel(), Gaussian(0.05), inducing=6, offset=OFFSET, weights=COUNTS, inducing_prior=None)
    assert deep.model().shape == (60,)
    draws = {"layers.0.nu": torch.zeros(2, 6, dtype=F64)}
    shift = deep(NEW, samples=draws, offset=OFFSET[:5])[0] - deep(NEW, samples=draws)[0]
    torch.testing.assert_close(shift, OFFSET[:5])
    moved = {"samples": draws, "offset": OFFSET[:5]}
    torch.testing.assert_close(deep.predict(NEW, **moved).mean, deep(NEW, **moved)[0])
    assert deep.sample(NEW, 2, samples=draws, offset=1e3 + OFFSET[:5]).min() > 900


def test_tables_rows_and_exports(tmp_path):
    frame = pd.DataFrame(X.numpy(), columns=["a", "b"]).assign(log_hours=OFFSET.numpy(), w=COUNTS.numpy())
    gp = Vecchia(
        frame[["a", "b"]], Y.numpy(), Matern52(2), num_neighbors=8, offset=frame["log_hours"], weights=frame["w"]
    )
    assert torch.equal(gp.offset, OFFSET)
    assert torch.equal(gp.weights, COUNTS.double())
    mean, _ = gp(frame[["a", "b"]][:3], offset=frame["log_hours"][:3])
    torch.testing.assert_close(torch.tensor(mean.to_numpy()), gp(X[:3], offset=OFFSET[:3])[0].detach())
    gp.save(tmp_path / "gp")
    assert torch.equal(nngp.load(tmp_path / "gp").offset, OFFSET)
    gp.extend(frame[["a", "b"]][:3], Y[:3].numpy(), offset=frame["log_hours"][:3], weights=frame["w"][:3])
    assert (len(gp.offset), len(gp.weights)) == (63, 63)
    with pytest.raises(ValueError, match="extend: expected offset of the new rows, got None"):
        gp.extend(NEW, Y[:5], weights=COUNTS[:5])
    with pytest.raises(ValueError, match="extend: expected trials None, as the method has none, got values"):
        gp.extend(NEW, Y[:5], weights=COUNTS[:5], offset=OFFSET[:5], trials=COUNTS[:5])
    counts = VNNGP(X, torch.ones_like(Y), Matern52(2), Poisson(), num_neighbors=8, offset=OFFSET)
    counts.solve()
    there = {"x_new": NEW, "offset": torch.full((5,), 9.0, dtype=F64)}
    found = nngp.to_arviz(counts, num_samples=3, predictions=there, log_likelihood=True, progress=False)
    assert found.constant_data["offset"].shape == (60,)
    assert found.predictions["f"].min() > 5
    assert found.log_likelihood["y"].shape == (1, 3, 60)


def test_malformed_rows_are_refused():
    gp = build("VNNGP")
    for match, arguments in (
        (r"expected offset of shape \(60,\), got \(59,\)", {"offset": OFFSET[1:]}),
        ("offset", {"offset": torch.full_like(OFFSET, torch.inf)}),
        (r"expected weights > 0, got 0", {"weights": torch.zeros(60)}),
        (r"expected trials None for this likelihood, got Gaussian", {"trials": COUNTS}),
    ):
        with pytest.raises(ValueError, match=match):
            VNNGP(X, Y, Matern52(2), Gaussian(), **arguments)
    labels = (Y > 1).double()
    with pytest.raises(ValueError, match=r"expected trials of each row for Binomial\(\), got None"):
        VNNGP(X, labels, Matern52(2), Binomial())
    with pytest.raises(ValueError, match="expected trials to be whole numbers >= 1"):
        VNNGP(X, labels, Matern52(2), Binomial(), trials=torch.full((60,), 1.5))
    with pytest.raises(ValueError, match="expected weights None unless noise is Gaussian, got Bernoulli"):
        LOO(X, labels, Matern52(2), Bernoulli(), weights=COUNTS)
    with pytest.raises(ValueError, match="expected weights, trials and limits None without a likelihood"):
        VNNGP(X, None, Matern52(2), weights=COUNTS)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        nngp.models.base.Method(X, Y, Matern52(2), Gaussian(), other=COUNTS)
    with pytest.raises(ValueError, match=r"forward: expected offset of shape \(5,\), got \(4,\)"):
        gp(NEW, offset=OFFSET[:4])
    with pytest.raises(ValueError, match="predict: expected trials None for this likelihood"):
        gp.predict(NEW, trials=COUNTS[:5])
    binomial = VNNGP(X, labels, Matern52(2), Binomial(), trials=COUNTS)
    with pytest.raises(ValueError, match=r"predict: expected trials to be numbers >= 1, \(5,\)"):
        binomial.predict(NEW, trials=COUNTS[:4])


def test_priors_and_offsets_go_together():
    likelihood = Gaussian()
    likelihood.variance = PyroSample(dist.LogNormal(torch.tensor(-2.0, dtype=F64), 1.0))
    gp = VNNGP(X, Y + OFFSET, Matern52(2), likelihood, num_neighbors=8, offset=OFFSET, weights=COUNTS)
    assert len(fit(gp, 2, progress=False).losses) == 2


@pytest.mark.parametrize("counts", [Binomial, pytest.param(BetaBinomial, marks=pytest.mark.slow)])
def test_zero_inflated_successes_have_the_trials_of_each_row(counts):
    n = torch.full((60,), 4)
    y = torch.bernoulli(torch.full((60,), 0.7, dtype=F64)) * dist.Binomial(4, logits=Y).sample()
    settings = {"num_neighbors": 8, "mean": None}
    each = VNNGP(X, y, kernel(), ZeroInflated(counts(), 0.3), trials=n, **settings)
    same = VNNGP(X, y, kernel(), ZeroInflated(counts(4), 0.3), **settings)
    each.load_state_dict(each.state_dict() | {k: v for k, v in same.state_dict().items() if "mean" in k or "conc" in k})
    for gp in (each, same):
        gp.solve()
    found, want = each.predict(NEW, trials=n[:5]), same.predict(NEW)
    for own, other in ((found.mean, want.mean), (found.variance, want.variance)):
        torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(each.loo().sum(), same.loo().sum(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(each.predict(NEW, trials=100 * n[:5]).mean, 100 * found.mean)
    with pytest.raises(ValueError, match="counts in 0..their row's trials"):
        VNNGP(X, y + 4, kernel(), ZeroInflated(counts()), trials=n)
    with pytest.raises(ValueError, match=r"expected trials of each row for ZeroInflated\(\), got None"):
        VNNGP(X, y.clamp(max=1), kernel(), ZeroInflated(counts()))
