# %% [markdown]
# # Terrain from 110,000 elevations
#
# The elevations around the Jacksboro fault (138,632 points on a grid, part of matplotlib) with a fifth of them held
# out, once at random and once in whole blocks of a square kilometre. A variational nearest-neighbor Gaussian process
# learns the rest and predicts them. Run as `python tutorials/demo.py [--out demo] [--smoke]`.

# %%
import argparse
import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.distributions import Normal

from pyro_nngp.data import Standardizer, block_split, coverage, crps_gaussian, gaussian_interval, nll, rmse, terrain
from pyro_nngp.inference import coverage_curve, fit, pit, to_arviz
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import VNNGP
from pyro_nngp.neighbors import nearest

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for figures and the NetCDF file")
parser.add_argument(
    "--smoke",
    action="store_true",
    default="SMOKE" in os.environ,
    help="a corner of the terrain and few steps, to see that it runs",
)
args, _ = parser.parse_known_args()  # a notebook's kernel has arguments of its own
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Data
# Inputs in kilometres east and north; elevations standardized on the training points, scores in metres again.

# %%
data = terrain()
x, y, (height, width) = data.x, data.y, data.grid_shape
num_steps, num_draws = 1200, 20
if args.smoke:
    corner = (torch.arange(height)[:, None] < 90) & (torch.arange(width) < 100)
    x, y, (height, width) = x[corner.flatten()], y[corner.flatten()], (90, 100)
    num_steps, num_draws = 150, 5

held_out = {
    "random": torch.rand(len(x), generator=torch.Generator().manual_seed(0)) < 0.2,
    "blocks": block_split(x, cell_size=1.0, fraction=0.2, seed=0),
}

# %% [markdown]
# ## Two baselines
# The elevation of the nearest training point, and the mean of the eight nearest weighted by inverse squared distance.
# Their normal errors have the standard deviation found by predicting each of 5,000 training points from the others.


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
# A nearest-neighbor prior on the elevations at all training points, each conditioned on 32 neighbors, and a mean-field
# Gaussian guide. `fit` moves the hyperparameters by minibatches and, every 200 steps, the guide to its exact optimum.
# Predictions take 128 neighbors, which matters inside the blocks, where the nearest 32 points are all on one side.


# %%
def train(x_train, y_train):
    start = time.perf_counter()
    kernel = Matern52(2, variance=torch.tensor(1.0), lengthscale=torch.tensor([0.4, 0.4]))
    gp = VNNGP(x_train, y_train, kernel, Gaussian(2e-4), num_neighbors=32)
    search = time.perf_counter() - start
    result = fit(gp, num_steps, batch_size=1024, lr=0.03, solve_every=200)
    return gp, result, search


def scores(y_new, predictive, scale):
    loc, sd = predictive.mean, predictive.stddev
    return {
        "RMSE [m]": rmse(y_new, loc) * scale,
        "NLL": nll(y_new, predictive),
        "CRPS": crps_gaussian(y_new, loc, sd),
        "coverage": coverage(y_new, *gaussian_interval(loc, sd)),
    }


# %%
table, predictions = {}, {}
for split, test in held_out.items():
    standard = Standardizer(y[~test])
    z, scale = standard.transform(y), float(standard.scale)
    print(f"\n{split} split: {int((~test).sum()):,} points to train on, {int(test.sum()):,} held out")
    gp, result, search = train(x[~test], z[~test])
    start = time.perf_counter()
    with torch.no_grad():
        predictive = gp.predict(x[test], num_neighbors=128)
    seconds = time.perf_counter() - start
    table[split] = {
        "nearest neighbor": scores(z[test], baseline(x[~test], z[~test], x[test], 1), scale),
        "inverse distance": scores(z[test], baseline(x[~test], z[~test], x[test], 8), scale),
        "VNNGP": scores(z[test], predictive, scale),
    }
    print(f"{'':18}" + "".join(f"{name:>10}" for name in table[split]["VNNGP"]))
    for name, row in table[split].items():
        print(f"{name:18}" + "".join(f"{float(value):10.4f}" for value in row.values()))
    lengthscale, noise = gp.kernel.lengthscale.tolist(), float(gp.likelihood.variance.detach()) ** 0.5 * scale
    print(f"lengthscales {lengthscale[0]:.3f} and {lengthscale[1]:.3f} km, noise {noise:.2f} m")
    print(f"seconds: search {search:.1f}, training {result.seconds:.1f}, prediction {seconds:.2f}")
    predictions[split] = (gp, standard, result, z[test], predictive)

# %% [markdown]
# ## Posterior draws for ArviZ
# Draws of f and of new elevations at 2,000 of the training points, with the pointwise log likelihood.

# %%
gp, standard, result, _, _ = predictions["random"]
rows = torch.randperm(gp.num_data, generator=torch.Generator().manual_seed(1))[:2_000].sort().values
idata = to_arviz(gp, rows, num_samples=num_draws, var_names=["~u"], losses=result.losses)
idata.to_netcdf(str(args.out / "terrain.nc"))

# %% [markdown]
# ## Figures
# A map of the whole terrain from the block split, where the holes show, and the calibration of both splits.

# %%
gp, standard, *_ = predictions["blocks"]
with torch.no_grad():
    loc, var = gp(x, num_neighbors=128)
panels = {
    "elevation [m], held-out blocks blank": torch.where(held_out["blocks"], torch.nan, y),
    "posterior mean [m]": standard.inverse(loc),
    "posterior standard deviation [m]": var.sqrt() * standard.scale,
}
figure, axes = plt.subplots(1, 3, figsize=(17, 5), constrained_layout=True)
for axis, (title, values) in zip(axes, panels.items(), strict=True):
    extent = (float(x[:, 0].min()), float(x[:, 0].max()), float(x[:, 1].min()), float(x[:, 1].max()))
    color = "viridis" if "deviation" in title else "terrain"
    image = axis.imshow(values.reshape(height, width), extent=extent, cmap=color)
    axis.set(title=title, xlabel="east [km]", ylabel="north [km]")
    figure.colorbar(image, ax=axis, shrink=0.7)
figure.savefig(args.out / "map.png", dpi=120)

figure, axis = plt.subplots(figsize=(5, 5), constrained_layout=True)
axis.plot([0, 1], [0, 1], color="0.7")
levels = torch.linspace(0, 1, 101)
for split, (_, _, _, z_test, predictive) in predictions.items():
    axis.plot(levels, coverage_curve(pit(predictive, z_test), levels), label=f"{split} split")
axis.set(
    title="calibration of VNNGP", xlabel="probability of the central interval", ylabel="share of held-out points in it"
)
axis.legend()
figure.savefig(args.out / "calibration.png", dpi=120)
print(f"\nwrote map.png, calibration.png and terrain.nc to {args.out}/")

# %%
for split in table:
    ours, idw = (float(table[split][name]["RMSE [m]"]) for name in ("VNNGP", "inverse distance"))
    assert ours < (0.9 if args.smoke else 0.8) * idw, f"{split}: RMSE {ours:.2f} m against {idw:.2f} m"
if not args.smoke:
    assert float(table["random"]["VNNGP"]["RMSE [m]"]) < 3.4
    assert 0.93 < float(table["random"]["VNNGP"]["coverage"]) < 0.98
