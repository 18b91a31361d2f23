# %% [markdown]
# # VNNGP on terrain: what the settings do
#
# The variational nearest-neighbor Gaussian process (Wu, Pleiss, Cunningham 2022) puts an inducing value at every data
# point and conditions each on K neighbors. This tutorial shows, on the elevations around the Jacksboro fault, how to
# train it with Pyro's own tools and with `fit`, what K, the ordering and the guide change, how a non-Gaussian
# likelihood goes in, and what joint draws are for. `tutorials/demo.py` has the full-size fit.
# Run as `python tutorials/vnngp_terrain.py [--out tutorial_output/vnngp_terrain] [--smoke]`.

# %%
import argparse
import time
from pathlib import Path

import matplotlib as mpl
import torch
from pyro.infer import SVI
from pyro.optim import ClippedAdam

from pyro_nngp.datasets import terrain
from pyro_nngp.inference import IntegratedELBO, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.metrics import brier, coverage, gaussian_interval, nll, rmse
from pyro_nngp.models import VNNGP
from pyro_nngp.preprocessing import Standardizer
from pyro_nngp.search import nearest

mpl.use("Agg")
import matplotlib.pyplot as plt

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/vnngp_terrain"))
parser.add_argument("--smoke", action="store_true", help="a small window and few steps, to see that it runs")
args = parser.parse_args()
args.out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)

# %% [markdown]
# ## Data
# A window of the terrain, every point a candidate; a fifth is held out at random. Inputs are kilometres.

# %%
data = terrain()
height, width = data.grid_shape
size = 60 if args.smoke else 150
window = ((torch.arange(height)[:, None] < size) & (torch.arange(width) < size)).flatten()
x, elevation = data.x[window], data.y[window]
test = torch.rand(len(x)) < 0.2
standard = Standardizer(elevation[~test])
y = standard.transform(elevation)
x_train, y_train, x_test, y_test = x[~test], y[~test], x[test], y[test]
num_steps = 100 if args.smoke else 400


def start_kernel():
    return Matern52(2, variance=torch.tensor(1.0), lengthscale=torch.tensor([0.4, 0.4]))


# %% [markdown]
# ## Plain Pyro
# A method is an object with a `model` and a `guide` that take the rows of a minibatch. Nothing else is needed:

# %%
gp = VNNGP(x_train, y_train, start_kernel(), Gaussian(0.01), num_neighbors=16, loc=y_train)
svi = SVI(gp.model, gp.guide, ClippedAdam({"lr": 0.01}), IntegratedELBO())
losses = [svi.step(torch.randperm(gp.num_data)[:512]) / gp.num_data for _ in range(num_steps)]
print(f"plain SVI: loss per point {sum(losses[:10]) / 10:.3f} at the start, {sum(losses[-10:]) / 10:.3f} at the end")


# %% [markdown]
# ## `fit`, and what the settings do
# With a Gaussian likelihood the best mean-field q(u) for given hyperparameters is known in closed form.
# `fit` goes there once per epoch, so only a handful of hyperparameters are left to gradients. Of the
# sparse-Cholesky guide it solves the mean; the factor takes gradient steps, and needs more of them.


# %%
def score(predictive):
    interval = gaussian_interval(predictive.mean, predictive.stddev)
    error = float(rmse(y_test, predictive.mean) * standard.scale)
    return error, float(nll(y_test, predictive)), float(coverage(y_test, *interval))


def train(**settings):
    start = time.perf_counter()
    gp = VNNGP(x_train, y_train, start_kernel(), Gaussian(2e-4), **settings)
    fit(gp, num_steps, batch_size=512, lr=0.03, local_lr=0.01, progress=False)
    return gp, time.perf_counter() - start


variants = {
    "K = 8": {"num_neighbors": 8},
    "K = 16": {"num_neighbors": 16},
    "K = 32": {"num_neighbors": 32},
    "K = 16, maximin ordering": {"num_neighbors": 16, "ordering": "maximin"},
    "K = 16, coordinate ordering": {"num_neighbors": 16, "ordering": "coordinate"},
    "K = 16, sparse-Cholesky guide": {"num_neighbors": 16, "guide_neighbors": 8, "scale": 0.01},
}
fitted = {}
print(f"{'':32}{'RMSE [m]':>10}{'NLL':>8}{'cover':>8}{'seconds':>9}")
for name, settings in variants.items():
    fitted[name], seconds = train(**settings)
    with torch.no_grad():
        error, density, covered = score(fitted[name].predict(x_test))
    print(f"{name:32}{error:10.2f}{density:8.3f}{covered:8.3f}{seconds:9.1f}")

# %% [markdown]
# Prediction may take more neighbors than training did; it is cheap and helps.

# %%
best = fitted["K = 32"]
for num_neighbors in (16, 32, 64):
    with torch.no_grad():
        error, density, covered = score(best.predict(x_test, num_neighbors))
    print(f"K = 32 in training, {num_neighbors} in prediction: RMSE {error:.2f} m, NLL {density:.3f}")

near = nearest(x_test, x_train, 8, progress=False)
weight = 1 / (x_test[:, None] - x_train[near]).square().sum(-1)
inverse_distance = (weight * y_train[near]).sum(-1) / weight.sum(-1)
baseline = float(rmse(y_test, inverse_distance) * standard.scale)
print(f"inverse-distance weighting: RMSE {baseline:.2f} m")

# %% [markdown]
# ## Another likelihood
# Where is it higher than the median? Only yes or no is observed. `fit` solves for q(u) under every
# likelihood: where there is no closed form, by natural-gradient steps.

# %%
high = (elevation > elevation.median()).float()
classifier = VNNGP(x_train, high[~test], start_kernel(), Bernoulli("probit"), num_neighbors=16)
fit(classifier, num_steps // 2, batch_size=512, lr=0.03, progress=False)
with torch.no_grad():
    probability = classifier.predict(x_test).mean
mistakes = float(((probability > 0.5).float() != high[test]).float().mean())
print(f"probability of high ground: {100 * mistakes:.1f} % mistakes, Brier score {brier(high[test], probability):.4f}")

# %% [markdown]
# ## Joint draws
# How much of a hole in the data lies above a level? Each draw of `sample` is one possible terrain,
# so the spread of its answer is the uncertainty. Drawing each point on its own gives the right mean but takes every
# point's error for independent of its neighbors', and so far too narrow an interval.

# %%
gap = (x - x[len(x) // 2]).abs().amax(-1) < (0.4 if args.smoke else 1.0)  # a hole, where errors are shared
holed = VNNGP(x[~gap], y[~gap], start_kernel(), Gaussian(2e-4), num_neighbors=32)
fit(holed, num_steps // 2, batch_size=512, lr=0.03, progress=False)
level = y[gap].median()
joint = holed.sample(x[gap], 200)
with torch.no_grad():
    loc, var = holed(x[gap])
alone = loc + var.sqrt() * torch.randn(200, len(loc))
area = {name: (draws > level).float().mean(-1) for name, draws in (("joint", joint), ("pointwise", alone))}
for name, values in area.items():
    print(f"share above the level, {name} draws: {values.mean():.3f} +- {values.std():.3f} (truth 0.500)")

figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
for values, label in zip(area.values(), area, strict=True):
    axes[0].hist(values.numpy(), bins=20, alpha=0.6, label=f"{label} draws")
axes[0].axvline(0.5, color="k")
axes[0].set(title="share of the hole above the level", xlabel="share")
axes[0].legend()
axes[1].scatter(*x_test.T, c=probability, s=4, cmap="viridis")
axes[1].set(title="probability of high ground", xlabel="east [km]", ylabel="north [km]")
figure.savefig(args.out / "terrain.png", dpi=110)
print(f"wrote terrain.png to {args.out}/")

# %%
with torch.no_grad():
    error, _, covered = score(best.predict(x_test, 64))
assert error < 0.7 * baseline, f"RMSE {error:.2f} m against {baseline:.2f} m"
assert 0.9 < covered <= 1
assert mistakes < (0.1 if args.smoke else 0.05)
assert area["joint"].std() > 2 * area["pointwise"].std()
