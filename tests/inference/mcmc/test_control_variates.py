"""Control variates: the gradient of all rows, no bias, less noise, the exact posterior of a linear model."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide.initialization import init_to_value

from pyro_nngp.inference import SGHMC, SGLD, SGMCMC, Minibatch
from pyro_nngp.inference.mcmc.control_variates import AnchoredPotential
from pyro_nngp.inference.mcmc.potential import ModelPotential

F64 = torch.float64
NOISE = 1e-3
X = torch.randn(600, 3, dtype=F64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 20.0])
Y = X.sum(1) + NOISE * torch.randn(600, dtype=F64, generator=torch.Generator().manual_seed(1))
PRECISION = X.mT @ X / NOISE**2 + torch.eye(3)
MEAN = torch.linalg.solve(PRECISION, X.mT @ Y / NOISE**2)
SPREAD = PRECISION.inverse().diagonal().sqrt()
NEAR = init_to_value(values={"slopes": MEAN + SPREAD})


def model(idx):
    slopes = pyro.sample("slopes", dist.Normal(torch.zeros(3, dtype=F64), 1.0).to_event(1))
    with pyro.plate("data", 600, subsample=idx):
        pyro.sample("y", dist.Normal(X[idx] @ slopes, NOISE), obs=Y[idx])


def potential(kind=AnchoredPotential, size=7, program=model):
    return kind("Test", program, (Minibatch(600, size),), {}, NEAR)


@pytest.fixture
def unchecked():
    """Without the checks of values, which torch.vmap cannot follow and which the samplers turn off."""
    with pyro.validation_enabled(False):
        yield


def exact(position):
    return (position - MEAN) @ PRECISION


@pytest.mark.parametrize("chains", [(), (2,)])
@pytest.mark.parametrize("size", [7, 200, 600])
def test_the_gradient_of_all_rows_is_summed_over_minibatches(chains, size, unchecked):
    position = MEAN + SPREAD * torch.randn(*chains, 3, dtype=F64)
    whole = potential(size=size).whole_gradient(position)
    torch.testing.assert_close(whole, exact(position), rtol=1e-8, atol=1e-4)


@pytest.mark.parametrize("chains", [(), (2,)])
def test_gradients_are_exact_at_the_anchor_and_unbiased_elsewhere(chains, unchecked, monkeypatch):
    reduced = potential(size=200)
    at, elsewhere = (MEAN + SPREAD * torch.randn(*chains, 3, dtype=F64) for _ in range(2))
    reduced.anchor = at, reduced.whole_gradient(at)
    torch.testing.assert_close(reduced.gradient(at)[1], exact(at), rtol=1e-8, atol=1e-4)
    found = []
    for k in range(3):  # the three minibatches that partition the rows
        monkeypatch.setattr(Minibatch, "draw", lambda self, k=k: self.in_order(k))
        found.append(reduced.gradient(elsewhere)[1])
    assert bool((found[0] != found[1]).any())
    torch.testing.assert_close(torch.stack(found).mean(0), exact(elsewhere), rtol=1e-8, atol=1e-4)


def test_gradients_have_a_small_part_of_the_noise():
    plain, reduced = potential(ModelPotential), potential()
    at, position = MEAN - SPREAD, MEAN + SPREAD
    reduced.anchor = at, reduced.whole_gradient(at)
    noise = [torch.stack([one.gradient(position)[1] for _ in range(40)]).var(0) for one in (plain, reduced)]
    assert bool((noise[1] < noise[0] / 10).all())


def test_both_gradients_see_the_same_random_numbers_and_the_next_ones_others():
    def noisy(idx):
        model(idx)
        pyro.factor(
            "noise", torch.randn((), dtype=F64) * pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), 1.0))
        )

    start = init_to_value(values={"slopes": MEAN, "z": torch.zeros((), dtype=F64)})
    reduced = AnchoredPotential("Test", noisy, (Minibatch(600, 7),), {}, start)
    at = reduced.initial()
    reduced.anchor = at, torch.zeros_like(at)
    torch.testing.assert_close(reduced.gradient(at)[1], torch.zeros_like(at), rtol=0, atol=1e-9)
    state = torch.get_rng_state()
    assert not torch.equal(state, (reduced.gradient(at), torch.get_rng_state())[1])


@pytest.mark.slow
def test_tiny_noise_gives_the_exact_posterior():
    """N / B is 200, with which plain minibatches leave too short steps: the temperature is far from one."""
    pyro.set_rng_seed(0)
    mcmc = SGMCMC(SGHMC(model, control_variates=True, init_strategy=NEAR), 200, 600, 4, disable_progbar=True)
    mcmc.run(Minibatch(600, 3))
    found = mcmc.get_samples()["slopes"]
    torch.testing.assert_close((found.mean(0) - MEAN) / SPREAD, torch.zeros(3, dtype=F64), rtol=0, atol=0.2)
    torch.testing.assert_close(found.std(0) / SPREAD, torch.ones(3, dtype=F64), rtol=0.2, atol=0)
    assert all(abs(value - 1) < 0.2 for value in mcmc.diagnostics()["configurational temperature"].values())


@pytest.mark.parametrize("kernel", [SGHMC, pytest.param(SGLD, marks=pytest.mark.slow)])
def test_the_anchor_stays_after_the_middle_of_burn_in(kernel):
    made = kernel(model, control_variates=True, init_strategy=NEAR)
    mcmc = SGMCMC(made, 2, 16, 2, disable_progbar=True)
    anchors = []
    follow = AnchoredPotential.at_update

    def seen(self, state, update, end):
        state = follow(self, state, update, end)
        anchors.append(state["anchor"])
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnchoredPotential, "at_update", seen)
        mcmc.run(Minibatch(600, 60))
    moved = [i for i in range(1, len(anchors)) if not torch.equal(anchors[i], anchors[i - 1])]
    assert moved == [2, 4, 6, 8]


def test_a_run_without_burn_in_has_its_anchor_at_the_start():
    mcmc = SGMCMC(SGLD(model, 1e-12, control_variates=True, init_strategy=NEAR), 3, 0, 1, disable_progbar=True)
    mcmc.run(Minibatch(600, 60))
    torch.testing.assert_close(mcmc.get_samples()["slopes"][-1], MEAN + SPREAD, rtol=0, atol=1e-4)


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"SGHMC: expected control_variates to be True or False, got str"):
        SGHMC(model, control_variates="yes")
    with pytest.raises(ValueError, match=r"SGHMC: expected optim to be None with control variates"):
        SGHMC(model, control_variates=True, optim={"lr": 0.01})
    with pytest.raises(ValueError, match=r"SGHMC: expected the model with one Minibatch for control variates, got 0"):
        SGMCMC(SGHMC(model, control_variates=True, init_strategy=NEAR), 2, 2, 1).run(torch.arange(600))
