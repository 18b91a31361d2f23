"""Threads that predict, train and draw at the same time get what each gets alone."""

import copy
import pickle
import sys
import threading

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pyro_nngp._random import RandomStream, seeded
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import LOO, SVGP, VNNGP, Vecchia

X = torch.rand(60, 2, generator=torch.Generator().manual_seed(1))
Y = torch.sin(5 * X[:, 0])
X_NEW = torch.rand(10, 2, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def quick_switches():
    """Change threads every 10 microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*tasks):
    """Results of functions that run at the same time, one thread each."""
    results, barrier = [None] * len(tasks), threading.Barrier(len(tasks))

    def run(i):
        barrier.wait()
        try:
            results[i] = tasks[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def build(method, lengthscale, likelihood=None, **options):
    y = Y if likelihood is None else (Y > 0.5).float()
    return method(X, y, Matern52(2, lengthscale=lengthscale), likelihood or Gaussian(0.1), **options)


def moments(gp, **options):
    with torch.no_grad():
        return torch.stack(gp(X_NEW, **options))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "times"), [(Vecchia, 200), (VNNGP, 40)])
def test_two_models_predict_in_two_threads(method, times):
    models = [build(method, scale, num_neighbors=5) for scale in (1.0, 0.1)]
    alone = [moments(gp) for gp in models]
    found = together(*(lambda gp=gp: [moments(gp) for _ in range(times)] for gp in models))
    for expected, results in zip(alone, found, strict=True):
        assert all(torch.equal(result, expected) for result in results)
    assert [round(gp.kernel.lengthscale.item(), 6) for gp in models] == [1.0, 0.1]
    assert models[0].kernel.lengthscale_unconstrained is not models[1].kernel.lengthscale_unconstrained


def test_one_model_with_priors_predicts_in_two_threads():
    gp = build(Vecchia, PyroSample(dist.LogNormal(0.0, 1.0)), num_neighbors=5)
    draws = [{"kernel.lengthscale": torch.tensor(values)} for values in ([0.1, 0.2], [1.0, 2.0])]
    alone = [moments(gp, samples=samples) for samples in draws]
    found = together(*(lambda s=s: [moments(gp, samples=s) for _ in range(20)] for s in draws))
    for expected, results in zip(alone, found, strict=True):
        assert all(torch.equal(result, expected) for result in results)


METHODS = {
    "vecchia": lambda: build(Vecchia, 0.5, num_neighbors=5),
    "vnngp": lambda: build(VNNGP, 0.5, Bernoulli(), num_neighbors=5),
    "loo": lambda: build(LOO, 0.3, num_neighbors=5),
    "svgp": lambda: build(SVGP, 0.5, Bernoulli(), inducing=8),
    "prior": lambda: build(VNNGP, PyroSample(dist.LogNormal(0.0, 0.5)), num_neighbors=5),
}


def train(gp, seed):
    losses = fit(gp, 8, batch_size=20, seed=seed, progress=False).losses
    return losses, [p.detach().clone() for p in gp.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("vecchia", "vnngp"), ("loo", "svgp"), ("prior", "prior")])
def test_two_models_train_in_two_threads(pair):
    alone = [train(METHODS[name](), seed) for seed, name in enumerate(pair)]
    before = torch.get_rng_state()
    found = together(*(lambda n=name, s=seed: train(METHODS[n](), s) for seed, name in enumerate(pair)))
    assert torch.equal(torch.get_rng_state(), before)
    for (losses, params), (same_losses, same_params) in zip(alone, found, strict=True):
        assert torch.equal(losses, same_losses)
        assert all(torch.equal(p, q) for p, q in zip(params, same_params, strict=True))


@pytest.mark.slow
def test_one_model_predicts_while_another_trains():
    predicting, training = build(Vecchia, 0.1, num_neighbors=5), METHODS["vnngp"]
    alone, losses = moments(predicting), train(training(), 0)[0]
    found, (same_losses, _) = together(lambda: [moments(predicting) for _ in range(40)], lambda: train(training(), 0))
    assert all(torch.equal(result, alone) for result in found)
    assert torch.equal(losses, same_losses)


def test_parameters_of_the_global_store_are_common_to_threads():
    pyro.param("common", torch.tensor(1.0))
    (seen,) = together(lambda: pyro.param("common").item())
    assert seen == 1.0
    together(lambda: pyro.param("late", torch.tensor(2.0)))
    assert pyro.param("late").item() == 2.0


def test_parameters_that_a_function_makes_are_in_the_store_of_pyro():
    def mean(x):
        return pyro.param("level", torch.tensor(3.0)).expand(len(x))

    gp = Vecchia(X, Y, Matern52(2), Gaussian(0.1), num_neighbors=5, mean=mean)
    fit(gp, 3, lr=0.5, progress=False)
    level = pyro.param("level")
    assert level.item() != 3.0
    together(*[lambda: [moments(gp) for _ in range(10)]] * 2)
    assert set(pyro.get_param_store()) == {"level"}


def test_streams_of_random_numbers_are_their_own():
    def draws(seed):
        stream, numbers = RandomStream(seed, []), []
        for _ in range(50):
            with stream:
                numbers.append(torch.randn(3))
                with stream.paused():
                    torch.empty(100).sum()
        return torch.stack(numbers)

    alone = [draws(seed) for seed in (1, 2)]
    assert torch.equal(alone[0].flatten()[:3], torch.randn(3, generator=torch.Generator().manual_seed(1)))
    before = torch.get_rng_state()
    found = together(lambda: draws(1), lambda: draws(2))
    assert torch.equal(torch.stack(found), torch.stack(alone))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_seeds_no_device_that_takes_no_part(monkeypatch):
    """Else draws on another device would repeat after each use of a stream."""
    seeded_all = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded_all.append)
    with RandomStream(3, []):
        pass
    assert not seeded_all


def test_seeded_draws_of_two_threads_are_those_of_their_seeds():
    gp = build(Vecchia, 0.5, num_neighbors=5)
    alone = [gp.sample(X_NEW, 3, seed=seed) for seed in (1, 2)]
    found = together(*(lambda s=s: [gp.sample(X_NEW, 3, seed=s) for _ in range(8)] for s in (1, 2)))
    for expected, results in zip(alone, found, strict=True):
        assert all(torch.equal(result, expected) for result in results)
    with seeded(None, X):
        state = torch.get_rng_state()
        torch.randn(1)
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_callback_draws_from_the_global_stream():
    plain = train(METHODS["svgp"](), 0)[0]
    gp, drawn = METHODS["svgp"](), []
    torch.manual_seed(5)
    losses = fit(gp, 8, batch_size=20, progress=False, callback=lambda *_: drawn.append(torch.randn(()))).losses
    assert torch.equal(losses, plain)
    torch.manual_seed(5)
    assert torch.equal(torch.stack(drawn), torch.stack([torch.randn(()) for _ in range(8)]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda gp: pickle.loads(pickle.dumps(gp))])
def test_copies_have_a_context_of_their_own_that_their_parts_share(copied):
    gp = build(Vecchia, 0.5, num_neighbors=5, mean=PyroModule[nn.Linear](2, 1))
    alone = moments(gp)
    twin = copied(gp)
    contexts = {id(part._pyro_context) for part in twin.modules() if isinstance(part, PyroModule)}
    assert contexts == {id(twin._pyro_context)}
    assert twin._pyro_context is not gp._pyro_context
    assert torch.equal(moments(twin), alone)


@pytest.mark.parametrize("method", [Vecchia, VNNGP])
def test_predictions_see_the_data_before_or_after_an_extension(method):
    gp = method(X[:40], Y[:40], Matern52(2, lengthscale=0.3), Gaussian(0.1), num_neighbors=5)
    if method is VNNGP:
        gp.solve()
    extended = copy.deepcopy(gp)
    valid = [moments(extended)]
    for start in (40, 50):
        extended.extend(X[start : start + 10], Y[start : start + 10])
        valid.append(moments(extended))

    def predict():
        return [moments(gp) for _ in range(6)]

    def append():
        for start in (40, 50):
            gp.extend(X[start : start + 10], Y[start : start + 10])

    found = together(predict, append, predict)
    for each in found[0] + found[2]:
        assert any(torch.allclose(each, one, rtol=1e-4, atol=1e-5) for one in valid)
    torch.testing.assert_close(moments(gp), valid[-1], rtol=1e-4, atol=1e-5)
