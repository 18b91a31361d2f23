"""Rows appended to a method, and copies conditioned on further ones, against methods built on all of the data."""

import math

import pandas as pd
import pytest
import torch
from builders import build, data, methods, solve_alone
from pyro import distributions as dist
from pyro.nn import PyroSample

import pyro_nngp as nngp
from pyro_nngp.inference import Checkpoint, CheckpointError, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, NegativeBinomial, Poisson
from pyro_nngp.means import LinearMean
from pyro_nngp.models import BSGP, LMC, LOO, SVGP, VNNGP, CoregionalizedLOO, Vecchia
from pyro_nngp.variational import MeanField

F64 = torch.float64
X, Y = data()
NEW = X[:5] + 0.01
UNTRAINED = pytest.mark.filterwarnings("ignore:.* has not seen the new rows")


def new_rows(count=15, seed=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, generator=generator, dtype=F64)
    return x, torch.sin(5 * x[:, 0]) + x[:, 1] + 0.3


def kernel():
    return Matern52(2, 1.0, 0.5)


def solved(name):
    gp = build(name)
    if getattr(gp, "can_solve", False):
        gp.solve()
    return gp


def dense_posterior(gp, x_new):
    """Mean and variance of f by the exact Gaussian process of a Vecchia."""
    with torch.no_grad():
        cov, cross = gp.kernel(gp.x), gp.kernel(x_new, gp.x)
        nugget = gp.jitter * cov.diagonal()
        tril = torch.linalg.cholesky(cov + torch.diag(gp.likelihood.variance + nugget))
        half = torch.linalg.solve_triangular(tril, cross.mT, upper=False)
        weights = torch.linalg.solve_triangular(tril.mT, half, upper=True).mT
        variance = gp.kernel(x_new).diagonal() * (1 + gp.jitter) - half.square().sum(0)
        return gp.mean(x_new) + weights @ (gp.y - gp.mean(gp.x)), variance


def test_an_extended_vecchia_is_that_of_all_data_in_its_ordering():
    gp, (x, y) = build("Vecchia"), new_rows()
    kept = gp.graph.neighbors.clone()
    gp.extend(x, y)
    whole = Vecchia(gp.x, gp.y, gp.kernel, gp.likelihood, num_neighbors=8, ordering=gp.graph.order, mean=gp.mean)
    assert torch.equal(gp.graph.neighbors, whole.graph.neighbors)
    assert torch.equal(gp.graph.neighbors[: len(kept)], kept)
    assert torch.equal(gp.log_prob(), whole.log_prob())
    for mine, other in zip(gp(X[:9] + 0.01), whole(X[:9] + 0.01), strict=True):
        assert torch.equal(mine, other)


def test_conditioning_gives_the_exact_posterior_and_leaves_the_method_alone():
    gp, (x, y) = build("Vecchia"), new_rows()
    gp.mean.requires_grad_(False)  # predictions take it as it is
    before, state = gp(x), {name: value.clone() for name, value in gp.named_buffers()}
    new = gp.condition_on(x, y)
    at = X[:9] + 0.01
    for mine, want in zip(new(at, num_neighbors=75), dense_posterior(new, at), strict=True):
        torch.testing.assert_close(mine.detach(), want, rtol=1e-9, atol=1e-10)
    assert gp.num_data == len(X)
    assert all(torch.equal(mine, old) for mine, old in zip(gp(x), before, strict=True))
    assert all(a is b for a, b in zip(gp.parameters(), new.parameters(), strict=True))
    new.kernel.lengthscale = 0.9
    new.refresh_neighbors()
    assert gp.kernel.lengthscale.item() == pytest.approx(0.9)
    assert all(torch.equal(value, state[name]) for name, value in gp.named_buffers())


@UNTRAINED
def test_copies_have_their_own_state_whatever_its_size():
    x, y = new_rows()
    gp = VNNGP(X[:3], Y[:3], kernel(), Gaussian(0.05), mean=LinearMean(2, prior="weak"))  # as many coefficients as rows
    gp.solve()
    before = gp.mean.posterior_loc.clone()
    gp.condition_on(x, 9 + y)
    assert torch.equal(gp.mean.posterior_loc, before)
    sparse = VNNGP(X[:9], Y[:9], kernel(), Gaussian(0.05), inducing=X[9:18], num_neighbors=3)
    near, new = sparse.graph.neighbors.clone(), sparse.condition_on(x, y)
    new.kernel.lengthscale = torch.tensor([0.01, 9.0], dtype=F64)
    new.refresh_neighbors()
    assert not torch.equal(new.graph.neighbors, near)
    assert torch.equal(sparse.graph.neighbors, near)


def test_fantasies_are_those_of_each_alone():
    gp, (x, y) = build("LOO"), new_rows()
    fantasies = torch.stack([y, y + 1, -y])
    together = gp.condition_on(x, fantasies)
    mean, variance = together(X[:4] + 0.01)
    assert mean.shape == variance.shape == (3, 4)
    for each, one in zip(mean, fantasies, strict=True):
        torch.testing.assert_close(each, gp.condition_on(x, one)(X[:4] + 0.01)[0], rtol=1e-12, atol=1e-12)
    assert together.predict(X[:4]).batch_shape == (3, 4)


@pytest.mark.parametrize("method", [VNNGP, LMC])
def test_rows_with_offsets_and_weights_are_shifted_weighted_rows(method):
    (x, y), offset = new_rows(), torch.linspace(-3, 3, 75, dtype=F64)
    targets, weights = torch.cat([Y, y]), torch.linspace(0.5, 2, 75, dtype=F64)
    settings = {"num_neighbors": 8, "metric": torch.ones(2, dtype=F64)}
    if method is LMC:
        settings |= {"num_latents": 1, "mixing": torch.tensor([[1.0], [-1.0]], dtype=F64)}
        targets, offset = torch.stack([targets, -targets], -1), torch.stack([offset, offset.cos()], -1)

    def made(shift):
        by_row = {"weights": weights} | ({} if shift is None else {"offset": shift})
        y = targets if shift is None else targets + shift
        old = {name: value[:60] for name, value in by_row.items()}
        gp = method(X, y[:60], kernel(), Gaussian(0.05), **settings, **old)
        gp.mean.value = torch.full_like(gp.mean.value, 0.3)
        solve_alone(gp)
        rest = {"x": x, "y": y[60:]} | {k: v[60:] for k, v in by_row.items()}
        fantasy = None if shift is None else gp.condition_on(**rest)
        gp.extend(**rest)
        return gp, fantasy

    (plain, _), (shifted, fantasy) = made(None), made(offset)
    assert torch.equal(shifted.offset, offset)
    assert torch.equal(shifted.weights, weights)
    for mine, other, want in zip(shifted(NEW), fantasy(NEW), plain(NEW), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other, mine, rtol=1e-9, atol=1e-9)
    other = offset[:5, None] if method is VNNGP else offset[:5, 0]
    with pytest.raises(ValueError, match=r"extend: expected offset of shape \(5"):
        shifted.extend(x[:5], targets[:5], offset=other, weights=weights[:5])


@pytest.mark.parametrize("name", ["VNNGP", "Vecchia", "LOO"])
def test_a_failure_leaves_the_method_as_it_was(name, monkeypatch):
    gp, (x, y) = solved(name), new_rows()
    at, state = gp(X[:5] + 0.01), {key: value.clone() for key, value in gp.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setattr("pyro_nngp.neighbors.table.random_ordering", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gp.extend(x, y)
    assert state.keys() == gp.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in gp.state_dict().items())
    assert all(torch.equal(mine, old) for mine, old in zip(gp(X[:5] + 0.01), at, strict=True))
    gp.extend(x, y)
    assert len(fit(gp, 1, progress=False).losses) == 1


def test_an_interruption_restores_values_that_were_changed_in_place(monkeypatch):
    gp, (x, y) = solved("VNNGP"), new_rows()
    state = {key: value.clone() for key, value in gp.state_dict().items()}

    def interrupted(*_, **__):
        with torch.no_grad():
            for parameter in gp.parameters():
                parameter.add_(1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("pyro_nngp.neighbors.table.random_ordering", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gp.extend(x, y)
    assert all(torch.equal(value, state[key]) for key, value in gp.state_dict().items())


@UNTRAINED
@pytest.mark.parametrize("name", methods())
def test_every_method_grows(name, tmp_path):
    gp, (x, y) = solved(name), new_rows()
    at, old = X[:5] + 0.01, gp(X[:5] + 0.01)
    fantasy = gp.condition_on(x, y)
    assert all(torch.equal(mine, before) for mine, before in zip(gp(at), old, strict=True))
    gp.extend(x, y)
    assert (gp.num_data, len(gp.y)) == (75, 75)
    for mine, other in zip(gp(at), fantasy(at), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    gp.save(tmp_path / "gp")
    again = nngp.load(tmp_path / "gp")
    assert all(torch.equal(mine, other) for mine, other in zip(again(at), gp(at), strict=True))
    result = fit(gp, 2, batch_size=20, progress=False)
    assert len(result.losses) == 2
    assert gp(at)[0].isfinite().all()


@pytest.mark.parametrize("name", ["VNNGP", "VNNGP-sparse", "NPVI", "SVGP"])
def test_q_is_the_optimum_for_all_data(name):
    gp, (x, y) = solved(name), new_rows()
    gp.extend(x, y)
    mine = gp(X[:9] + 0.01)
    gp.solve(tolerance=1e-6)
    for value, other in zip(mine, gp(X[:9] + 0.01), strict=True):
        torch.testing.assert_close(value, other, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Poisson()])
def test_sites_of_other_likelihoods_follow(likelihood):
    x, f = new_rows()
    torch.manual_seed(0)
    y, new = likelihood(Y).sample(), likelihood(f).sample()
    gp = VNNGP(X, y, kernel(), likelihood, num_neighbors=8)
    gp.mean.value = 0.3
    gp.solve()
    level = gp.mean.value.item()
    gp.extend(x, new)
    assert gp.mean.value.item() == level
    whole = VNNGP(gp.x, gp.y, gp.kernel, likelihood, num_neighbors=8, ordering=gp.graph.order, mean=gp.mean)
    solve_alone(whole)
    for mine, other in zip(gp(X[:9] + 0.01), whole(X[:9] + 0.01), strict=True):
        torch.testing.assert_close(mine, other, rtol=0.02, atol=0.01)


def test_an_unsolved_q_stays_the_prior():
    gp, (x, _) = VNNGP(X, (Y > 1).double(), kernel(), Bernoulli(), num_neighbors=8), new_rows()
    assert not gp.q.solved
    loc, variance = gp(x)
    gp.q.append(gp.posterior(gp.bound()), 15, loc, variance)
    assert (gp.q.loc == 0).all()
    assert gp.q.precision.unique().shape == (1,)


def test_q_of_a_method_without_targets_goes_on_where_it_was():
    gp = VNNGP(X, None, kernel(), num_neighbors=8, guide=MeanField(loc=Y))
    x, _ = new_rows()
    want, old = gp(x), gp.q.distribution().loc.detach().clone()
    gp.extend(x)
    q = gp.q.distribution()
    assert torch.equal(q.loc[:60], old)
    torch.testing.assert_close(q.loc[60:] + gp.mean.value, want[0])
    torch.testing.assert_close(q.variance[60:], want[1])
    with pytest.raises(ValueError, match=r"VNNGP.extend: expected y to be None, as the method has no targets"):
        gp.extend(x, Y[:15])


@pytest.mark.parametrize("likelihood", [Bernoulli(), NegativeBinomial(3.0), Categorical(3)])
def test_auxiliary_variables_of_new_rows_are_solved_for(likelihood):
    x, _ = new_rows()
    y = torch.arange(60) % 3
    new = torch.ones_like(y[:15])
    if isinstance(likelihood, Bernoulli):
        y, new = (y > 1).double(), torch.tensor([1.0, -1.0, -1.0] * 5).double()
    if isinstance(likelihood, NegativeBinomial):
        y, new = 90 * y.double(), 90 * new.double()
    gp = LOO(X, y, kernel(), likelihood, num_neighbors=8)
    gp.solve()
    gp.extend(x, new)
    whole = LOO(gp.x, gp.y, gp.kernel, likelihood, num_neighbors=8, mean=gp.mean)
    for _ in range(20):
        whole.solve()
        gp.solve()
    for mine, other in zip(gp(X[:9] + 0.01), whole(X[:9] + 0.01), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


def test_several_outputs_grow():
    x, y = new_rows()
    both, more = torch.stack([Y, -2 * Y], -1), torch.stack([y, -2 * y], -1)
    gp = CoregionalizedLOO(X, both, [kernel()], num_neighbors=6)
    gp.extend(x, more)
    assert gp.predict(X[:3]).loc.shape == (3, 2)
    torch.testing.assert_close(gp.loo(torch.tensor([70])), gp.loo()[70:71], rtol=1e-12, atol=0)
    gp = Vecchia(X, both, kernel(), num_neighbors=6)
    gp.extend(x, more)
    assert gp(X[:3])[0].shape == (2, 3)
    with pytest.raises(ValueError, match=r"condition_on: expected y of shape \(15, 2\), got \(2, 15\)"):
        gp.condition_on(x, more.mT)


def test_a_deep_process_keeps_fixed_draws_for_all_rows():
    x, y = new_rows()
    gp = BSGP(X, Y, kernel(), inducing=5, num_layers=2, fixed_draws=True, inducing_prior=None)
    before = gp.noise
    gp.extend(x, y)
    assert gp.noise.shape[2] == 75
    assert torch.equal(gp.noise[:, :, :60], before)
    gp.model(torch.tensor([70]))


def test_tables_grow_by_columns_of_the_same_names():
    x, y = new_rows()
    frame, more = pd.DataFrame(X.numpy(), columns=["a", "b"]), pd.DataFrame(x.numpy(), columns=["a", "b"])
    gp = Vecchia(frame, pd.Series(Y.numpy()), kernel(), num_neighbors=8)
    gp.extend(more, pd.Series(y.numpy()))
    other = Vecchia(X, Y, kernel(), num_neighbors=8)
    other.extend(x, y)
    assert torch.equal(gp.log_prob(), other.log_prob())
    with pytest.raises(ValueError, match=r"extend: expected x with the columns \['a', 'b'\], got \['b', 'a'\]"):
        gp.extend(more[["b", "a"]], y.numpy())


def test_training_refuses_data_that_change_and_goes_on_afterwards(tmp_path):
    gp, (x, y) = build("VNNGP"), new_rows()
    with pytest.raises(RuntimeError, match="fit: expected method to keep its 60 rows while it is trained, got 75"):
        fit(gp, 3, progress=False, callback=lambda *_: gp.extend(x, y))
    checkpoint = Checkpoint(tmp_path / "run", every=1)
    gp = build("VNNGP")
    fit(gp, 2, batch_size=20, progress=False, checkpoint=checkpoint)
    gp.extend(x, y)
    with pytest.raises(CheckpointError, match="of this run, got one with model.graph.neighbors"):
        fit(gp, 2, batch_size=20, progress=False, checkpoint=checkpoint)
    assert len(fit(gp, 2, batch_size=20, progress=False).losses) == 2


def test_untrained_inducing_values_are_announced():
    x, y = new_rows()
    for name in ("VNNGP-inducing", "SWSGP"):
        with pytest.warns(UserWarning, match=r"q\(u\) at the inducing points has not seen the new rows"):
            build(name).extend(x, y)


def test_malformed_rows_change_nothing():
    gp, (x, y) = build("VNNGP"), new_rows()
    with pytest.raises(ValueError, match=r"VNNGP.extend: expected y of shape \(P, ...\), got None"):
        gp.extend(x)
    with pytest.raises(ValueError, match=r"expected y of shape \(15,\), got \(14,\)"):
        gp.extend(x, y[:14])
    with pytest.raises(ValueError, match=r"condition_on: expected y of shape \(P,\) for this method and likelihood"):
        gp.condition_on(x, y[None])
    with pytest.raises(ValueError, match="y"):
        gp.extend(x, torch.full_like(y, torch.nan))
    with pytest.raises(TypeError, match="dtype"):
        gp.extend(x.float(), y)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="extend outside, and predict inside"):
        gp.extend(x, y)
    labels = SVGP(X, (Y > 1).double(), kernel(), Bernoulli(), inducing=9)
    with pytest.raises(ValueError, match="labels 0 and 1"):
        labels.extend(x, y)
    assert (gp.num_data, labels.num_data) == (60, 60)


def test_a_small_start_does_not_keep_neighbors_few():
    gp = Vecchia(X[:3], Y[:3], kernel(), Gaussian(0.05))
    gp.extend(X[3:], Y[3:])
    assert gp.graph.num_neighbors == 32
    whole = Vecchia(X, Y, gp.kernel, gp.likelihood, num_neighbors=32, ordering=gp.graph.order, mean=gp.mean)
    assert torch.equal(gp.log_prob(), whole.log_prob())


def test_hyperparameters_with_priors_stay_those_of_the_method():
    k = kernel()
    k.lengthscale = PyroSample(dist.LogNormal(torch.tensor(-1.0, dtype=F64), 0.5))
    gp, (x, y) = VNNGP(X, Y, k, num_neighbors=8), new_rows()
    with torch.no_grad():
        gp.hyper_guide.loc_0.fill_(-2.0)
    new = gp.condition_on(x, y)
    assert new.summary()["estimate"]["kernel.lengthscale"] == pytest.approx(math.exp(-2))
    assert not torch.equal(new(X[:3] + 0.01)[0], gp(X[:3] + 0.01)[0])


@UNTRAINED
def test_integers_are_real_data_unless_the_likelihood_is_discrete():
    whole, (x, y) = (10 * Y).round().long(), new_rows(3)
    gp, real = (SVGP(X, targets, kernel(), Gaussian(0.05), inducing=9) for targets in (whole, whole.double()))
    assert torch.equal(gp.condition_on(x, y).y[60:], y)
    gp.extend(x, y)
    real.extend(x, y)
    assert torch.equal(gp.y, real.y)
    assert all(torch.equal(mine, other) for mine, other in zip(gp(NEW), real(NEW), strict=True))
    counts = SVGP(X, whole.abs(), kernel(), Poisson(), inducing=9)
    counts.extend(x, torch.tensor([0.0, 3.0, 1.0], dtype=F64))
    assert counts.y[60:].tolist() == [0, 3, 1]
    assert counts.y.dtype == torch.int64
    with pytest.raises(ValueError, match="Poisson: expected y"):
        counts.extend(x, y)
