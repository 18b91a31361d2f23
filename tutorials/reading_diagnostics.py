# %% [markdown]
# # Reading diagnostics: what good and bad look like
#
# Four numbers that say whether a posterior may be used, each on a case where it is good and one where it is bad, made
# on purpose: R-hat and the temperature for chains, k-hat for guides, and the PIT for predictions.
#
#     python tutorials/reading_diagnostics.py [--out tutorial_output/reading_diagnostics] [--smoke]

# %% tags=["hide-input"]
import argparse
import os
import warnings
from pathlib import Path

import arviz as az
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal, init_to_sample
from pyro.optim import ClippedAdam
from torch.distributions import Normal

import pyro_nngp as nngp
from pyro_nngp.inference import SGHMC, SGMCMC, Minibatch, pit, plot_pit, psis_khat, symmetry, uniformity

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/reading_diagnostics"), help="for the figures")
parser.add_argument("--smoke", action="store_true", help="short chains, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
num_draws, num_steps = (60, 300) if args.smoke else (200, 1_000)
pyro.set_rng_seed(1)

# %% [markdown]
# ## R-hat: have the chains met?
# R-hat compares the spread between chains with that within them. Near 1 (below 1.01 for careful work, 1.1 at most) they
# agree. Below, a logistic regression by SGHMC from scattered starts: left with a burn-in of 10 updates and a step far
# too small, right with 600 updates and a good step. R-hat cannot see a bias that all chains share.

# %%
x = torch.randn(2_000, 2) @ torch.tensor([[1.0, 0.9], [0.0, 0.45]])
labels = torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.0, -1.0])))


def regression(idx):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    with pyro.plate("data", len(x), subsample=idx):
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=labels[idx])


def run(burn_in, step_size, num_steps=10):
    kernel = SGHMC(regression, step_size, num_steps=num_steps, init_strategy=init_to_sample)
    mcmc = SGMCMC(kernel, num_draws, burn_in, num_chains=4, disable_progbar=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says what we are about to see
        mcmc.run(Minibatch(len(x), 500))
    draws = mcmc.get_samples(group_by_chain=True)["w"]
    return mcmc, draws, az.rhat(az.convert_to_dataset({"w": draws.numpy()}))["w"].values.max()


chains = {"bad: burn-in 10": run(10, 0.002, 1), "good: burn-in 600": run(600, 0.05)}
figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), constrained_layout=True)
for axis, (name, (_, draws, rhat)) in zip(axes, chains.items(), strict=True):
    axis.plot(draws[..., 0].mT.numpy(), linewidth=0.8)
    axis.set(title=f"{name}, R-hat {rhat:.2f}", xlabel="draw", ylabel="first coefficient")
figure.savefig(args.out / "rhat.png", dpi=110)
rhats = [rhat for *_, rhat in chains.values()]

# %% [markdown]
# ## Temperature: are the chains too hot?
# Minibatches and large steps add noise that stochastic-gradient chains do not correct. In an exact chain the
# configurational temperature is 1. Above it, intervals are too wide by about its square root; far below or negative,
# the burn-in was too short. Here the chains above, and chains of eight times their step. (Without a step size SGHMC
# looks for one; the search assumes starts that are not far from the posterior, which these are, on purpose.)

# %%
temperatures = {}
for name, mcmc in {"good": chains["good: burn-in 600"][0], "too large": run(600, 0.4)[0]}.items():
    values = mcmc.diagnostics()["configurational temperature"]
    temperatures[name] = sum(values.values()) / len(values)
    print(f"step size {name:10} temperature {temperatures[name]:.2f}")

# %% [markdown]
# ## k-hat: is the guide close to the posterior?
# `psis_khat` looks at how heavy the tail of the weights p / q is. Below 0.5 a guide is close, above 0.7 it is not to be
# trusted. The two coefficients depend on each other, which a mean-field guide cannot say. (With thousands of latent
# values k-hat is large for any guide; look at calibration there.)

# %%
rows = torch.arange(len(x))
khats = {}
for family in (AutoNormal, AutoMultivariateNormal):
    name, guide = family.__name__, family(regression)
    svi = SVI(regression, guide, ClippedAdam({"lr": 0.05, "lrd": 0.01 ** (1 / num_steps)}), Trace_ELBO())
    for _ in range(num_steps):
        svi.step(rows)
    khats[name] = psis_khat(regression, guide, rows, progress=False)
    print(f"{name:24} k-hat {khats[name]:.2f}")

# %% [markdown]
# ## PIT: are the predictions calibrated?
# The probability integral transform is the place of each observation in its predictive distribution. Uniform is good. A
# hump says that intervals are too wide, a valley that they are too narrow, a slope that predictions are off to one
# side. `uniformity` and `symmetry` give p-values, of any fault and of bias.

# %%
num_places = 300 if args.smoke else 800
places = torch.rand(num_places + 700, 2)
heights = torch.sin(6 * places[:, 0]) * torch.cos(4 * places[:, 1]) + 0.2 * torch.randn(len(places))
gp = nngp.Vecchia(places[:num_places], heights[:num_places], num_neighbors=20)
nngp.fit(gp, progress=False)
with torch.no_grad():
    predictive = gp.predict(places[num_places:])
loc, sd = predictive.mean, predictive.stddev
cases = {"good": (loc, sd), "too wide": (loc, 2 * sd), "too narrow": (loc, sd / 2), "biased": (loc + 0.7 * sd, sd)}
figure, axes = plt.subplots(1, 4, figsize=(14, 3.2), constrained_layout=True, sharey=True)
pvalues = {}
for axis, (name, moments) in zip(axes, cases.items(), strict=True):
    values = pit(Normal(*moments), heights[num_places:])
    plot_pit(values, ax=axis)
    pvalues[name] = uniformity(values), symmetry(values)
    axis.set(title=f"{name}: p = {pvalues[name][0]:.2g}, {pvalues[name][1]:.2g}")
figure.savefig(args.out / "pit.png", dpi=110)

# %%
assert rhats[0] > 1.1 > rhats[1], rhats
if not args.smoke:
    assert abs(temperatures["good"] - 1) < 0.25 < abs(temperatures["too large"] - 1), temperatures
    assert khats["AutoMultivariateNormal"] < 0.7 < khats["AutoNormal"], khats
assert pvalues["good"][0] > 0.001, pvalues
assert max(pvalues[name][0] for name in ("too wide", "too narrow", "biased")) < 0.001, pvalues
assert pvalues["biased"][1] < 0.001 < pvalues["too wide"][1], pvalues
