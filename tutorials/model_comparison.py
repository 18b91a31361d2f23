# %% [markdown]
# # Which kernel? Model comparison by leave-one-out
#
# How well would each model predict one more datum? `gp.loo()` answers with the log density of every datum given all
# others, with the latent function integrated out, in closed form: no refits, no importance weights that fail. ArviZ
# ranks the sums. Here five kernels are compared on the sea floor off the coast of Washington (matplotlib's sample
# data), and the ranking is held against data that no model has seen.
#
#     python tutorials/model_comparison.py [--out tutorial_output/model_comparison] [--smoke]

# %% tags=["hide-input"]
import argparse
import os
import warnings
from pathlib import Path

import arviz as az
import matplotlib.pyplot as plt
import torch

import pyro_nngp as nngp
from pyro_nngp.data import bathymetry
from pyro_nngp.inference import elpd
from pyro_nngp.kernels import RBF, Matern12, Matern32, Matern52, RationalQuadratic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/model_comparison"), help="folder for the figure")
parser.add_argument("--smoke", action="store_true", help="few points, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
num_train = 500 if args.smoke else 3_000

# %% [markdown]
# ## Data and models
# Random points of the map in kilometers, heights in kilometers; as many others are left out for the end.

# %%
data = bathymetry(torch.float64)
rows = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[: 2 * num_train]
x, height = data.x[rows], data.y[rows] / 1_000
x, x_test, y, y_test = x[:num_train], x[num_train:], height[:num_train], height[num_train:]

models = {}
for kernel in (RBF, RationalQuadratic, Matern52, Matern32, Matern12):
    models[kernel.__name__] = gp = nngp.Vecchia(x, y, kernel(2))
    print(f"{kernel.__name__:18} {nngp.fit(gp, progress=False)}")

# %% [markdown]
# ## Leave-one-out densities
# One number per datum. Their sum estimates the expected log predictive density (elpd) of as many fresh data; ArviZ
# also gives differences to the best with their standard errors, which are smaller than those of the sums because the
# data are the same. `elpd` wraps densities for `az.compare`; with posterior draws of the hyperparameters take
# `az.loo(to_arviz(...))` instead.

# %%
densities = {name: gp.loo() for name, gp in models.items()}
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its next version
    table = az.compare({name: elpd(values) for name, values in densities.items()})
columns = [name for name in table.columns if name in ("elpd_loo", "elpd", "se", "elpd_diff", "dse", "weight")]
print(table[columns])

# %% [markdown]
# ## Were they right?
# The same sums over the points that were left out, given all training points.

# %%
held_out = {}
for name, gp in models.items():
    with torch.no_grad():
        held_out[name] = gp.predict(x_test).log_prob(y_test)
    loo, fresh = densities[name].mean(), held_out[name].mean()
    print(f"{name:18} leave-one-out {loo:8.4f}, left out {fresh:8.4f} nats per datum")

# %% [markdown]
# ## Where does a model win?
# Densities are pointwise, so their difference is a map: a smooth kernel is good on the deep plain and fails at the
# shelf and its canyons, where heights change over a few kilometers.

# %%
best, worst = (max if choice else min for choice in (True, False))
best, worst = best(held_out, key=lambda n: held_out[n].sum()), worst(held_out, key=lambda n: held_out[n].sum())
difference = (densities[best] - densities[worst]).clamp(-3, 3)
figure, axes = plt.subplots(1, 2, figsize=(12, 4), constrained_layout=True)
names = list(table.index)
means = [float(densities[name].mean()) for name in names]
errors = [float(densities[name].std() / num_train**0.5) for name in names]
axes[0].errorbar(means, range(len(names)), xerr=errors, fmt="o", capsize=3, label="leave-one-out, with standard error")
axes[0].plot([float(held_out[n].mean()) for n in names], range(len(names)), "kx", label="points left out")
axes[0].set_yticks(range(len(names)), names)
axes[0].invert_yaxis()
axes[0].set(xlabel="log density per datum [nats]", title="Ranking")
axes[0].legend(loc="upper left")
points = axes[1].scatter(*x.T, c=difference, s=6, cmap="RdBu", vmin=-3, vmax=3)
figure.colorbar(points, ax=axes[1], label="nats")
axes[1].set(title=f"{best} minus {worst}, by datum", xlabel="east [km]", ylabel="north [km]", aspect="equal")
figure.savefig(args.out / "comparison.png", dpi=110)

# %%
assert names[0] == best, (names, best)
assert all(abs(float(densities[n].mean() - held_out[n].mean())) < (0.3 if args.smoke else 0.15) for n in names)
