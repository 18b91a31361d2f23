# %% [markdown]
# # Late flights: stochastic-gradient MCMC of a process of counts
#
# How many flights out of New York are more than an hour late, hour by hour? Storms and congestion come and go: hours
# next to each other have much in common that neither the time of day nor the number of flights explains. A
# nearest-neighbor Gaussian process over time takes it up, inside a Poisson regression.
#
# SGHMC draws from the posterior of such a program by minibatches: of the counts, and of the process, whose prior is a
# product of one conditional per hour. The values of the process are far too correlated for any step that moves them one
# by one, so that chains move in the coordinates of a guide. NUTS needs all rows at each step; on counts as few as these
# it would be faster. What minibatches buy is memory and steps whose cost does not grow with the number of rows.
#
#     python tutorials/late_flights.py [--out tutorial_output/late_flights] [--smoke]

# %%
import argparse
import os
from pathlib import Path

import arviz as az
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Predictive

from pyro_nngp.data import flights
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import SGHMC, SGMCMC, AutoNNGP, Minibatch, to_arviz
from pyro_nngp.kernels import Matern32
from pyro_nngp.neighbors import NeighborGraph

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/late_flights"), help="folder for the results")
parser.add_argument("--smoke", action="store_true", help="few days and updates, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
num_days, num_draws, num_warmup, num_steps = (10, 5, 20, 2) if args.smoke else (90, 60, 300, 80)
pyro.set_rng_seed(0)

# %% [markdown]
# ## Counts by the hour
# The table has one row per flight. A cell is an hour of a day with at least ten departures; its count is the number of
# flights that arrived more than an hour late.

# %%
data = flights(torch.float64)
month, day, minute = (data.x[:, data.feature_names.index(n)] for n in ("month", "day_of_month", "dep_time_min"))
late = data.y[:, 0] > 60
days_before = torch.tensor([0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334])
hour = (days_before[month.long() - 1] + day.long() - 1) * 24 + (minute // 60).long()
size = num_days * 24
inside = hour < size
departures = torch.bincount(hour[inside], minlength=size)
counts = torch.bincount(hour[inside], late[inside].double(), minlength=size)
cells = (departures >= 10).nonzero().squeeze(-1)
time, y, exposure = cells[:, None] / 24.0, counts[cells].float(), departures[cells].float()
time, clock = time.float(), ((cells % 24) / 12 - 1).float()
print(
    f"{len(y)} hours in {num_days} days, {int(y.sum())} late of {int(exposure.sum())} flights, at most {int(y.max())}"
)

# %% [markdown]
# ## The program
# The rate of late flights has a level, a slope and a bend over the hours of the day, and a process over time, in days.
# The rows are an argument, so that they may be a minibatch. The process is a site over all hours: the sampler itself
# takes its prior in minibatches.

# %%
graph = NeighborGraph(time, 6)
design = torch.stack([torch.ones_like(clock), clock, clock**2], -1)


def model(rows):
    slopes = pyro.sample("slopes", dist.Normal(torch.tensor([-3.0, 0.0, 0.0]), 1.0).to_event(1))
    variance = pyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(-1.0, 1.0))
    f = pyro.sample("f", NNGP(Matern32(1, variance=variance, lengthscale=lengthscale), graph))
    with pyro.plate("hours", len(y), subsample=rows):
        rate = exposure[rows] * (design[rows] @ slopes + f[rows]).exp()
        return pyro.sample("y", dist.Poisson(rate), obs=y[rows])


# %% [markdown]
# ## SGHMC in the coordinates of a guide
# `AutoNNGP` need not be trained: its first call finds the mode of the hyperparameters and the Gaussian posterior of
# the process there. Each chain moves independent standard normal values, from which sites of the program follow by a
# map that is fixed; the posterior belongs to the program, whatever the guide. Four chains start at draws of the guide.

# %%
rows = Minibatch(len(y), len(y) // 4)
kernel = SGHMC(model, guide=AutoNNGP(model), num_steps=num_steps)
mcmc = SGMCMC(kernel, num_draws, num_warmup, num_chains=4, disable_progbar=True)
mcmc.run(rows)
diagnostics = kernel.diagnostics()
for name in ("kinetic temperature", "configurational temperature", "gradient noise share"):
    print(name, [round(value, 3) for value in diagnostics[name]])

# %% [markdown]
# With 40 updates per draw the run ended with a warning: R-hat was 1.2 at some hours, since draws were still correlated.
#
# No Metropolis step corrects these chains. Both temperatures are 1 in a chain that is exact; they are the check of the
# step size, and R-hat the error of the length of the run.
#
# ## In ArviZ

# %%
idata = to_arviz(mcmc, num_samples=num_draws)
names = ["slopes", "variance", "lengthscale"]
summary = az.summary(idata, var_names=names)
print(summary)
if not args.smoke:
    assert all(0.9 < value < 1.1 for value in diagnostics["kinetic temperature"])
    rhat = az.rhat(idata, var_names=["f"])["f"].values
    print(f"R-hat of f: median {float(torch.tensor(rhat).median()):.3f}, largest {rhat.max():.3f}")

# %%
draws = Predictive(kernel.model, mcmc.get_samples())(torch.arange(len(y)))
logit = draws["slopes"].reshape(-1, 3) @ design.T + draws["f"].reshape(-1, len(y))
low, middle, high = logit.exp().quantile(torch.tensor([0.025, 0.5, 0.975]), 0)
shown = time[:, 0] > num_days - 14
figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6))
top.plot(time[shown, 0], (y / exposure)[shown], ".", color="0.4", label="share of late flights")
top.plot(time[shown, 0], middle[shown], color="C0", label="rate, median")
top.fill_between(time[shown, 0], low[shown], high[shown], color="C0", alpha=0.3, label="95 %")
top.set(xlabel="day of 2013", ylabel="more than an hour late", title="The last two weeks")
top.legend()
for chain in mcmc.get_samples(group_by_chain=True)["_white"][..., 0]:
    bottom.plot(chain, linewidth=0.8)
bottom.set(xlabel="draw", ylabel="first white value", title="Four chains")
figure.tight_layout()
figure.savefig(args.out / "late_flights.png", dpi=120)
