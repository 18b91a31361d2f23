import importlib

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_nngp.inference import IntegratedELBO, PredictiveLogLikelihood
from pyro_nngp.inference._validation import validation_off
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, NegativeBinomial
from pyro_nngp.models import BSGP, LOO, SVGP, SWSGP, VNNGP
from pyro_nngp.variational import SparseCholesky

N = 30


def data(binary=False):
    x = torch.rand(N, 2, dtype=torch.float64)
    f = torch.sin(5 * x.sum(-1))
    return x, (f > 0).double() if binary else f


def kernel():
    return Matern52(2, 1.0, 0.5)


CASES = {
    "VNNGP": lambda: VNNGP(*data(), kernel(), Gaussian(0.1), num_neighbors=5),
    "VNNGP, inducing points": lambda: VNNGP(*data(), kernel(), Gaussian(0.1), num_neighbors=5, inducing=10),
    "VNNGP, labels": lambda: VNNGP(*data(True), kernel(), Bernoulli(), num_neighbors=5, guide=SparseCholesky(2)),
    "LOO, labels": lambda: LOO(*data(True), kernel(), Bernoulli(), num_neighbors=5),
    "LOO, counts": lambda: LOO(data()[0], torch.arange(N) % 4, kernel(), NegativeBinomial(2.0), num_neighbors=5),
    "SVGP": lambda: SVGP(*data(), kernel(), Gaussian(0.1), inducing=8),
    "SWSGP": lambda: SWSGP(*data(), kernel(), Gaussian(0.1), inducing=8, num_neighbors=4),
}


def loss_and_gradients(elbo, model, guide, params, args):
    torch.manual_seed(3)
    loss = elbo.differentiable_loss(model, guide, *args)
    return loss, torch.autograd.grad(loss, params, allow_unused=True)


def assert_same(one, two):
    assert one[0].item() == pytest.approx(two[0].item(), rel=1e-12)
    for a, b in zip(one[1], two[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("elbo", [IntegratedELBO(), PredictiveLogLikelihood(0.3)], ids=["integrated", "predictive"])
def test_without_validation_loss_and_gradients_are_the_same(name, elbo):
    torch.manual_seed(0)
    gp = CASES[name]()
    args = (torch.arange(0, N, 3),)
    checked = loss_and_gradients(elbo, gp.model, gp.guide, list(gp.parameters()), args)
    with validation_off():
        assert_same(loss_and_gradients(elbo, gp.model, gp.guide, list(gp.parameters()), args), checked)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_that_is_built_once_gives_the_same_loss(name):
    torch.manual_seed(0)
    gp, idx = CASES[name](), torch.arange(0, N, 3)
    rows = getattr(gp, "batch_args", lambda idx, generator: (idx,))(idx, torch.Generator().manual_seed(1))
    alone = (idx, rows[1].rows[rows[1].targets]) if name == "VNNGP, inducing points" else (idx,)
    params = list(gp.parameters())
    shared = loss_and_gradients(IntegratedELBO(), gp.model, gp.guide, params, rows)
    assert_same(shared, loss_and_gradients(IntegratedELBO(), gp.model, gp.guide, params, alone))


def test_sites_without_a_closed_form_fall_back_on_sampling():
    gp = BSGP(*data(), kernel(), Gaussian(0.1), inducing=5)
    guide = AutoNormal(gp.model)
    guide()
    params = list(guide.parameters())
    checked = loss_and_gradients(TraceMeanField_ELBO(), gp.model, guide, params, ())
    with validation_off():
        assert_same(loss_and_gradients(IntegratedELBO(), gp.model, guide, params, ()), checked)


def test_without_validation_no_density_is_computed_that_nobody_reads(monkeypatch):
    gp = CASES["VNNGP"]()
    read = []
    density = torch.distributions.Normal.log_prob
    monkeypatch.setattr(torch.distributions.Normal, "log_prob", lambda *args: (read.append(args[0]), density(*args))[1])
    IntegratedELBO().loss(gp.model, gp.guide)
    assert len(read) == 2  # of y at a draw, and integrated
    read.clear()
    with validation_off():
        IntegratedELBO().loss(gp.model, gp.guide)
    assert len(read) == 1


def test_validation_returns_when_the_last_one_has_left():
    first, second = validation_off(), validation_off()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not pyro.infer.util.is_validation_enabled()
    second.__exit__(None, None, None)
    assert pyro.infer.util.is_validation_enabled()
    assert pyro.distributions.is_validation_enabled()
    assert pyro.poutine.util.is_validation_enabled()


@pytest.mark.parametrize("method", ["SVGP", "SWSGP", "VNNGP"])
def test_model_and_guide_of_one_method_share_the_conditional(method, monkeypatch):
    """One evaluation instead of two, the same loss and gradients; not where the model has other hyperparameters."""
    module = importlib.import_module(f"pyro_nngp.models.{method.lower()}")
    name = "whitened_conditional" if method == "SVGP" else "graph_conditional"
    original, calls = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    x = torch.rand(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = {} if method == "SVGP" else {"num_neighbors": 4}
    gp = getattr(module, method)(x, x.sum(-1), kernel(), Gaussian(0.1), inducing=10, **options)
    rows = torch.arange(20)

    def gradients(model):
        calls.clear()
        torch.manual_seed(0)
        loss = IntegratedELBO().differentiable_loss(model, gp.guide, rows)
        loss.backward()
        found = [loss.detach(), *(param.grad.to_dense() for param in gp.parameters() if param.grad is not None)]
        gp.zero_grad()
        return found, len(calls)

    before, twice = gradients(gp.model)
    with validation_off():
        shared, once = gradients(gp.model)
        separate, again = gradients(poutine.condition(gp.model, {}))
    assert (twice, once, again) == (2, 1, 2)
    for other in (shared, separate):
        for one, two in zip(other, before, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["VNNGP, inducing points", "SVGP", "SWSGP"])
def test_draws_do_not_enter_where_the_guide_draws_f_as_the_model(name):
    torch.manual_seed(0)
    gp, found = CASES[name](), []
    params, generator = list(gp.parameters()), torch.Generator().manual_seed(1)
    args = gp.batch_args(torch.arange(0, N, 3), generator) if hasattr(gp, "batch_args") else (torch.arange(0, N, 3),)
    with validation_off():
        for seed in (1, 2):
            torch.manual_seed(seed)
            loss = IntegratedELBO().differentiable_loss(gp.model, gp.guide, *args)
            found.append([loss.detach(), *torch.autograd.grad(loss, params, allow_unused=True)])
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_the_divergence_of_f_counts_where_the_model_is_another_one():
    torch.manual_seed(0)
    gp = CASES["SVGP"]()
    other = SVGP(gp.x, gp.y, Matern52(2, 2.0, 0.3), Gaussian(0.1), inducing=gp.z.detach().clone())
    args, params = (torch.arange(0, N, 3),), list(gp.parameters())
    checked = loss_and_gradients(IntegratedELBO(), other.model, gp.guide, params, args)
    with validation_off():
        assert_same(loss_and_gradients(IntegratedELBO(), other.model, gp.guide, params, args), checked)
