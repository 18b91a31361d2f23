"""Warnings of chains that have not settled, and none for those that have."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import slow_except
from pyro.infer import MCMC
from pyro.infer.autoguide.initialization import init_to_value

from pyro_nngp.inference import SGHMC, SGLD, SGMCMC, SGNHT
from pyro_nngp.inference.mcmc.settling import unsettled, warn_unsettled

F64 = torch.float64


@pytest.mark.parametrize("chains", [1, 4])
@pytest.mark.parametrize("size", slow_except([50, 400], 50))
def test_no_false_alarms_of_independent_and_of_correlated_draws(chains, size):
    draws = torch.randn(chains, size, 2_000, dtype=F64)
    assert unsettled(draws).sum() == 0
    for s in range(1, size):
        draws[:, s] = 0.3 * draws[:, s - 1] + (1 - 0.3**2) ** 0.5 * draws[:, s]
    assert unsettled(draws).float().mean() <= (0.002 if size == 400 else 0.02)


def test_shifts_and_drifts_are_seen_in_their_coordinate():
    draws = torch.randn(4, 200, 5, dtype=F64)
    draws[2, :, 1] += 3  # a chain elsewhere
    draws[:, :, 3] += torch.linspace(-2, 2, 200, dtype=F64)  # all chains on their way
    draws[:, :100, 4] += 0.7  # R-hat below 1.1, a drift of nine standard errors
    assert unsettled(draws).tolist() == [False, True, False, True, True]


def far():
    pyro.sample("near", dist.Normal(torch.tensor(0.0, dtype=F64), 1.0))
    pyro.sample("far", dist.Normal(torch.tensor(100.0, dtype=F64), 1.0))


START = init_to_value(values={"near": torch.tensor(0.1, dtype=F64), "far": torch.tensor(0.0, dtype=F64)})


def test_chains_on_their_way_are_reported_by_site():
    message = r"expected chains to settle, got .* at the sites \[.*'far'.*\]. Increase warmup_steps"
    kernel = SGLD(far, 0.005, init_strategy=START)
    with pytest.warns(RuntimeWarning, match="SGMCMC: " + message):
        SGMCMC(kernel, 100, 10, 2, disable_progbar=True).run()
    with pytest.warns(RuntimeWarning, match="SGLD: " + message):
        MCMC(kernel, 100, 10, disable_progbar=True).run()


def test_a_hot_chain_is_reported():
    with pytest.warns(RuntimeWarning, match=r"expected a kinetic temperature near .*got 1.50 of it over .*\['z'\]"):
        warn_unsettled("Here", torch.randn(2, 100, 1, dtype=F64), lambda marked: ["z"], 1.5, 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unsettled("Here", torch.randn(2, 100, 1, dtype=F64), lambda marked: ["z"], 1.5, 0.1)
        warn_unsettled("Here", torch.arange(40.0, dtype=F64).reshape(1, 40, 1), lambda marked: ["z"], 9.0, 0.1)


SPREADS = torch.tensor([1e-3, 0.1, 1.0, 30.0, 1e3], dtype=F64)


def mixed_scales():
    pyro.sample("z", dist.Normal(torch.zeros_like(SPREADS), SPREADS).to_event(1))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [SGHMC, *(pytest.param(s, marks=pytest.mark.slow) for s in (SGLD, SGNHT))])
def test_a_start_a_thousand_deviations_away_is_forgotten(sampler):
    pyro.set_rng_seed(0)
    kernel = sampler(mixed_scales, num_steps=5, init_strategy=init_to_value(values={"z": 1e3 * SPREADS}))
    mcmc = SGMCMC(kernel, 100, 300, 4, disable_progbar=True)
    mcmc.run()  # warnings are errors
    draws = mcmc.get_samples()["z"] / SPREADS
    assert draws.mean(0).abs().max() < 0.6
    assert (draws.std(0) - 1).abs().max() < 0.4


@pytest.mark.slow
def test_settled_chains_raise_no_alarm():
    SGMCMC(SGHMC(far), 60, 400, 4, disable_progbar=True).run()  # warnings are errors
