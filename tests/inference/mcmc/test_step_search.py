"""Step sizes that samplers find: posteriors of any scale from the plain call."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import slow_except
from pyro.infer import MCMC
from pyro.infer.autoguide.initialization import init_to_generated, init_to_value

from pyro_nngp.inference import SGHMC, SGLD, SGMCMC, SGNHT, Minibatch
from pyro_nngp.inference.mcmc.step_search import updates_per_draw

F64 = torch.float64
SCALES = torch.tensor([1e-3, 0.1, 1.0, 30.0, 1e3], dtype=F64)
CENTERS = torch.tensor([1.0, -2.0, 5.0, 300.0, -4e3], dtype=F64)


def scaled():
    pyro.sample("z", dist.Normal(CENTERS, SCALES).to_event(1))


def normal_mean(scale, dtype=F64):
    y = (0.7 * scale + scale * torch.randn(1_000, dtype=F64)).to(dtype)

    def model(idx):
        mu = pyro.sample("mu", dist.Normal(torch.zeros((), dtype=dtype), 10 * scale))
        with pyro.plate("data", 1_000, subsample=idx):
            pyro.sample("y", dist.Normal(mu, scale), obs=y[idx])

    precision = 1_000 / scale**2 + 1 / (10 * scale) ** 2
    return model, float(y.double().sum()) / scale**2 / precision, precision**-0.5


@pytest.mark.slow
@pytest.mark.parametrize("sampler", slow_except([SGHMC, SGLD, SGNHT], SGHMC))
def test_scales_over_six_decades_in_one_model(sampler):
    mcmc = SGMCMC(sampler(scaled), 1, 500, 100, disable_progbar=True)
    mcmc.run()
    z = (mcmc.get_samples()["z"] - CENTERS) / SCALES
    assert (z.mean(0).abs() < 6 * 100**-0.5).all()
    assert ((z.std(0) - 1).abs() < 0.25).all()


@pytest.mark.parametrize("sampler", slow_except([SGHMC, SGLD, SGNHT], SGHMC))
def test_a_burn_in_without_noise_finds_the_mode(sampler):
    mcmc = SGMCMC(sampler(scaled, temperature=lambda update: float(update >= 60)), 1, 60, 2, disable_progbar=True)
    mcmc.run()
    assert (((mcmc.get_samples()["z"] - CENTERS) / SCALES).abs() < 6).all()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_minibatches_at_any_scale(scale):
    model, mean, sd = normal_mean(scale)
    mcmc = SGMCMC(SGHMC(model), 8, 500, 12, disable_progbar=True)
    mcmc.run(Minibatch(1_000, 100))
    mu = mcmc.get_samples()["mu"]
    assert abs(mu.mean() - mean) < 0.6 * sd
    assert abs(mu.std() / sd - 1) < 0.25
    assert max(mcmc.diagnostics()["gradient noise share"].values()) <= 0.3 + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_plain_call_in_pyro_mcmc(dtype):
    model, mean, sd = normal_mean(1.0, dtype)
    mcmc = MCMC(SGHMC(model), num_samples=400, warmup_steps=1_000, disable_progbar=True)
    mcmc.run(Minibatch(1_000, 100))
    mu = mcmc.get_samples()["mu"]
    assert abs(mu.mean() - mean) < 0.02
    assert abs(mu.std() / sd - 1) < 0.25


def test_updates_per_draw_are_the_autocorrelation_time():
    x = torch.randn(1_000, 4, 1, dtype=F64)
    for s in range(1, 1_000):
        x[s] = 0.8 * x[s - 1] + 0.6 * x[s]
    assert updates_per_draw(x, 1_000) == pytest.approx(1.8 / 0.2, rel=0.3)
    assert updates_per_draw(x, 4_000) == pytest.approx(4 * 1.8 / 0.2, rel=0.3)
    assert updates_per_draw(x.cumsum(0), 1_000) == 100
    assert updates_per_draw(x[:10], 20) == 10


@pytest.mark.slow
def test_starts_in_log_linear_tails_of_correlated_regressions():
    """Far out a logistic likelihood has no curvature, and steps as long as the prior's would lead from tail to tail."""
    torch.manual_seed(0)
    x = 0.9**0.5 * torch.randn(500, 1, dtype=F64) + 0.1**0.5 * torch.randn(500, 5, dtype=F64)
    y = dist.Bernoulli(logits=x @ torch.randn(5, dtype=F64)).sample()

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(5, dtype=F64), 10.0).to_event(1))
        pyro.sample("y", dist.Bernoulli(logits=w @ x.mT).to_event(1), obs=y)

    starts = init_to_generated(generate=lambda: init_to_value(values={"w": 3 * torch.randn(5, dtype=F64)}))
    mcmc = SGMCMC(SGHMC(model, init_strategy=starts, num_steps=20), 50, 120, 4, disable_progbar=True)
    mcmc.run()  # warnings are errors
    assert mcmc.get_samples()["w"].std(0).max() < 0.45  # of the Laplace approximation: .30
