# %% [markdown]
# # Terrain from 110,000 elevations
#
# The elevations around the Jacksboro fault (138,632 points on a grid, part of matplotlib) with a fifth of them held
# out, once at random and once in whole blocks of a square kilometer. A nearest-neighbor Gaussian process learns the
# rest and predicts them. Nothing is set by hand: inputs are in kilometers, elevations in meters, and hyperparameters
# start from the data. Run as `python tutorials/demo.py [--out demo] [--smoke]`.

# %% tags=["hide-input"]
import argparse
import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.distributions import Normal

import pyro_nngp as nngp
from pyro_nngp.data import block_split, coverage, crps_gaussian, gaussian_interval, nll, rmse, terrain
from pyro_nngp.inference import coverage_curve, pit
from pyro_nngp.neighbors import nearest

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for figures and the NetCDF file")
parser.add_argument("--smoke", action="store_true", help="a corner of the terrain, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
print(f"Fits elevations twice, predicts those held out, and writes maps to {args.out}/: about a minute on two cores.")

# %% [markdown]
# ## Data

# %%
data = terrain()
x, y, (height, width) = data.x, data.y, data.grid_shape
num_draws = 20
if args.smoke:
    corner = (torch.arange(height)[:, None] < 90) & (torch.arange(width) < 100)
    x, y, (height, width) = x[corner.flatten()], y[corner.flatten()], (90, 100)
    num_draws = 5

held_out = {
    "random": torch.rand(len(x), generator=torch.Generator().manual_seed(0)) < 0.2,
    "blocks": block_split(x, cell_size=1.0, fraction=0.2, seed=0),
}

# %% [markdown]
# ## Two baselines
# The elevation of the nearest training point, and the mean of the eight nearest weighted by inverse squared distance.
# Their normal errors have the standard deviation from predicting each of 5,000 training points from the others.


# %%
def baseline(x_train, y_train, x_new, k):
    def interpolate(queries, exclude=None):
        near = nearest(queries, x_train, k, exclude, progress=False)
        weight = 1 / (queries[:, None] - x_train[near]).square().sum(-1)
        return (weight * y_train[near]).sum(-1) / weight.sum(-1)

    some = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(0))[:5_000]
    error = (interpolate(x_train[some], some) - y_train[some]).square().mean().sqrt()
    return Normal(interpolate(x_new), error)


# %% [markdown]
# ## The model
# Vecchia's approximation: each elevation given 32 earlier ones, with Gaussian noise, f integrated out. `fit` trains
# until it has converged; predictions take as many neighbors as pay.


# %%
def scores(y_new, predictive):
    loc, sd = predictive.mean, predictive.stddev
    return {
        "RMSE [m]": rmse(y_new, loc),
        "NLL": nll(y_new, predictive),
        "CRPS [m]": crps_gaussian(y_new, loc, sd),
        "coverage": coverage(y_new, *gaussian_interval(loc, sd)),
    }


# %%
table, predictions = {}, {}
for split, test in held_out.items():
    print(f"\n{split} split: {int((~test).sum()):,} points to train on, {int(test.sum()):,} held out")
    start = time.perf_counter()
    gp = nngp.Vecchia(x[~test], y[~test])
    result = nngp.fit(gp)
    trained = time.perf_counter()
    with torch.no_grad():
        predictive = gp.predict(x[test])
    predicted = time.perf_counter()
    table[split] = {
        "nearest neighbor": scores(y[test], baseline(x[~test], y[~test], x[test], 1)),
        "inverse distance": scores(y[test], baseline(x[~test], y[~test], x[test], 8)),
        "Vecchia": scores(y[test], predictive),
    }
    print(f"{'':18}" + "".join(f"{name:>10}" for name in table[split]["Vecchia"]))
    for name, row in table[split].items():
        print(f"{name:18}" + "".join(f"{float(value):10.4f}" for value in row.values()))
    lengthscale, noise = gp.kernel.lengthscale.tolist(), float(gp.likelihood.variance.detach()) ** 0.5
    print(f"lengthscales {lengthscale[0]:.3f} and {lengthscale[1]:.3f} km, noise {noise:.2f} m")
    print(f"{result}; in all {trained - start:.1f} s, prediction {predicted - trained:.1f} s")
    predictions[split] = (gp, test, predictive)

# %% [markdown]
# ## Posterior draws for ArviZ
# `VNNGP` keeps the elevations without noise as latent values. It starts from what `Vecchia` has learned, so that its
# posterior is one solution away. Draws of f and of new elevations at 2,000 of the training points.

# %%
gp, test, _ = predictions["random"]
latent = nngp.VNNGP(x[~test], y[~test], start=gp)
latent.solve()
rows = torch.randperm(latent.num_data, generator=torch.Generator().manual_seed(1))[:2_000].sort().values
idata = nngp.to_arviz(latent, rows, num_samples=num_draws, var_names=["~u"], log_likelihood=False)
idata.to_netcdf(str(args.out / "terrain.nc"))

# %% [markdown]
# ## Figures
# A map of the whole terrain from the block split, where the holes show, and the calibration of both splits.

# %%
gp, *_ = predictions["blocks"]
with torch.no_grad():
    loc, var = gp(x)
panels = {
    "elevation [m], held-out blocks blank": torch.where(held_out["blocks"], torch.nan, y),
    "predicted elevation [m]": loc,
    "standard deviation of it [m]": var.sqrt(),
}
figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), constrained_layout=True)
for axis, (title, values) in zip(axes, panels.items(), strict=True):
    extent = (float(x[:, 0].min()), float(x[:, 0].max()), float(x[:, 1].min()), float(x[:, 1].max()))
    color = "magma" if "deviation" in title else "viridis"
    image = axis.imshow(values.reshape(height, width), extent=extent, cmap=color)
    axis.set(title=title, xlabel="east [km]", ylabel="north [km]")
    figure.colorbar(image, ax=axis, shrink=0.75)
figure.savefig(args.out / "map.png", dpi=120)

figure, axis = plt.subplots(figsize=(4.2, 4.2), constrained_layout=True)
axis.plot([0, 1], [0, 1], color="0.6", label="ideal")
levels = torch.linspace(0, 1, 101)
for split, (_, test, predictive) in predictions.items():
    axis.plot(levels, coverage_curve(pit(predictive, y[test]), levels), label=f"held out: {split}")
axis.set(title="Calibration", xlabel="probability of the central interval", ylabel="share of held-out points in it")
axis.legend()
figure.savefig(args.out / "calibration.png", dpi=120)
print(f"\nwrote map.png, calibration.png and terrain.nc to {args.out}/")

# %%
for split in table:
    ours, idw = (float(table[split][name]["RMSE [m]"]) for name in ("Vecchia", "inverse distance"))
    assert ours < (0.9 if args.smoke else 0.8) * idw, f"{split}: RMSE {ours:.2f} m against {idw:.2f} m"
if not args.smoke:
    assert float(table["random"]["Vecchia"]["RMSE [m]"]) < 3.4
    assert 0.93 < float(table["random"]["Vecchia"]["coverage"]) < 0.98
