"""``fit``: the plain call, its arguments, and errors."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch.distributions import constraints
from training import BY_GRADIENTS, SETTINGS, Line, N, assert_same, values, vnngp

from pyro_nngp.inference import (
    IntegratedELBO,
    RowAdam,
    fit,
)
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import BSGP, LOO, VNNGP, Vecchia


def test_fit_is_ten_lines_of_pyro_and_torch():
    fitted, by_hand = vnngp(), vnngp()
    result = fit(fitted, 25, seed=3, **BY_GRADIENTS)

    elbo, rows = IntegratedELBO(), torch.Generator().manual_seed(3)
    elbo.loss(by_hand.model, by_hand.guide)  # touches every parameter once
    by_hand.q.sparse_grad = True
    sparse = [by_hand.q.loc, by_hand.q.log_scale, by_hand.q.weights]
    dense = [p for p in by_hand.parameters() if all(p is not q for q in sparse)]
    optims = [torch.optim.Adam(dense, 0.02), RowAdam(sparse, 0.02)]
    schedules = [torch.optim.lr_scheduler.MultiStepLR(o, [19, 22], 0.1) for o in optims]
    losses, epoch = [], []
    torch.randint(2, (1,), generator=rows)  # so that rows do not follow a random ordering of the same seed
    for _ in range(25):
        epoch = epoch or list(torch.randperm(N, generator=rows)[:48].split(16))
        loss = elbo.differentiable_loss(by_hand.model, by_hand.guide, epoch.pop(0)) / N
        loss.backward()
        losses.append(loss.item())
        for step in (*optims, *schedules):
            step.step()
        by_hand.zero_grad(set_to_none=True)
    assert result.losses.tolist() == pytest.approx(losses, rel=1e-6)
    assert_same(values(fitted), values(by_hand))


def test_a_pair_of_plain_functions_trains():
    x = torch.linspace(-1, 1, N)

    def model(idx=None):
        slope = pyro.sample("slope", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", N, subsample=idx) as rows:
            pyro.sample("y", dist.Normal(slope * x[rows], 0.1), obs=2 * x[rows])

    def guide(idx=None):
        scale = pyro.param("scale", torch.tensor(0.1), constraint=constraints.positive)
        pyro.sample("slope", dist.Normal(pyro.param("loc", torch.tensor(0.0)), scale))

    fit((model, guide), 400, num_data=N, elbo=TraceMeanField_ELBO(), lr=0.05, batch_size=20, progress=False)
    assert abs(pyro.param("loc") - 2) < 0.1


def test_the_random_state_outside_is_left_alone():
    line = Line()
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    one = fit(line, 5, seed=1, **SETTINGS).losses
    assert torch.equal(torch.rand(3), want)
    with pytest.raises(ValueError, match="clear_param_store"):  # two plain modules of Pyro share their names
        fit(Line(), 5, seed=1, **SETTINGS)
    pyro.clear_param_store()
    assert torch.equal(fit(Line(), 5, seed=1, **SETTINGS).losses[:1], one[:1]) is False  # other data: other loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"refresh_every": 3}, r"expected method to have refresh_neighbors\(\)"),
        ({"solve_every": 3}, r"expected method to be able to solve\(\)"),
        ({"solve_every": -1}, r"expected solve_every >= 0, got -1. .* 0 is never"),
        ({"solve_every": 1.5}, r"expected solve_every to be an int, got 1.5"),
        ({"refresh_every": -1}, r"expected refresh_every >= 0, got -1"),
        ({"lr": 0.0}, r"expected lr to be finite and > 0, got 0.0"),
        ({"lr": float("nan")}, r"expected lr to be finite and > 0, got nan"),
        ({"tolerance": -1.0}, r"expected tolerance to be finite and > 0, got -1.0"),
        ({"max_seconds": 0}, r"expected max_seconds to be finite and > 0, got 0"),
        ({"optimizer": "sgd"}, r"expected optimizer to be 'adam' or 'lbfgs', got 'sgd'"),
        ({"schedule": 0.1}, r"expected schedule to be a Schedule, got float"),
        ({"validation": print}, r"expected validation to be a Validation, got builtin_function_or_method"),
        ({"checkpoint": 3}, r"Checkpoint: expected path to be a path, got int"),
        ({"seed": 0.5}, r"expected seed to be an int, got 0.5"),
        ({"seed": 2**64}, r"expected seed in -2\*\*63..2\*\*64-1, got 18446744073709551616"),
        ({"device": "gpu"}, r"expected device to be a device of torch, got 'gpu'"),
        ({"callback": 3}, r"expected callback to be callable, got int"),
        ({"elbo": Trace_ELBO}, r"expected elbo to be a ELBO, got"),
        ({"batch": 3}, r"unexpected keyword argument 'batch'"),
        ({"batch_size": 0}, r"expected batch_size >= 1, got 0"),
        ({"num_steps": 0}, r"expected num_steps >= 1, got 0"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fit(Line(), **{"num_steps": 3, **settings})


def test_pairs_need_the_number_of_data_points_and_parameters():
    with pytest.raises(TypeError, match=r"expected num_data to be an int, got None"):
        fit((lambda: None, lambda: None), 3)
    for count in (10**12, 2**70):
        with pytest.raises(MemoryError, match=r"fit: expected num_data to fit into memory, got \d+ GiB"):
            fit((lambda: None, lambda: None), 3, num_data=count)
    with pytest.raises(ValueError, match=r"expected method to have parameters to train"):
        fit((lambda: None, lambda: None), 3, num_data=1)


@pytest.mark.parametrize("build", [Vecchia, LOO, VNNGP])
def test_with_held_hyperparameters_only_the_mean_is_set(build):
    x = torch.rand(40, 2, dtype=torch.float64)
    gp, other = (build(x, 5 + x.sum(-1), Matern52(2, 1.0, 0.5), Gaussian(0.1)) for _ in range(2))
    for method in (gp, other):
        method.kernel.requires_grad_(False)
        method.likelihood.requires_grad_(False)
    assert fit(gp, progress=False).converged
    other.solve()
    assert gp.mean.value.item() == pytest.approx(other.mean.value.item(), abs=1e-4)
    assert 5 < gp.mean.value < 7
    gp.mean.requires_grad_(False)
    with pytest.raises(ValueError, match=r"held needs solve\(\) alone"):
        fit(gp)


def test_an_autoguide_trains_on_minibatches():
    x = torch.rand(40, 2)
    sparse = BSGP(x, x.sum(-1), Matern52(2, 1.0, 0.5), Gaussian(0.1), inducing=5)
    pair = (sparse.model, AutoNormal(sparse.model))
    result = fit(pair, 3, batch_size=10, num_data=40, elbo=Trace_ELBO(), progress=False)
    assert result.losses.isfinite().all()


def test_a_model_alone_is_refused():
    with pytest.raises(TypeError, match=r"expected method with model and guide, got method"):
        fit(vnngp().model, 3)


def test_a_pair_is_of_functions():
    with pytest.raises(TypeError, match=r"expected method to be a pair of functions .*, got \(method, int\)"):
        fit((vnngp().model, 3), 3, num_data=40)


@pytest.mark.parametrize(
    ("off", "message"),
    [
        (torch.no_grad, r"expected gradients to be on, got torch.no_grad\(\). Call fit outside of it"),
        (torch.inference_mode, r"expected gradients to be on, got torch.inference_mode\(\). Call fit outside of it"),
    ],
)
def test_gradients_that_are_switched_off_are_an_error(off, message):
    method = vnngp()
    with off(), pytest.raises(RuntimeError, match=message):
        fit(method, 3, **SETTINGS)
    fit(method, 3, **SETTINGS)


def test_a_method_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        method = Line()
        with pytest.raises(RuntimeError, match=r"VNNGP: expected gradients to be possible, .* build it outside"):
            vnngp()
    with pytest.raises(RuntimeError, match=r"expected parameters that can have gradients, .* Build the method outside"):
        fit(method, 3, **SETTINGS)


def test_a_prior_without_data_is_refused():
    prior = VNNGP(torch.rand(N, 2), None, Matern52(2), num_neighbors=6)
    with pytest.raises(ValueError, match=r"expected method to have a likelihood, got a VNNGP without one"):
        fit(prior, 3, **SETTINGS)
