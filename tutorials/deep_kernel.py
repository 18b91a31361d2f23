# %% [markdown]
# # A deep kernel: a network that bends the map
#
# The sea floor off the coast of Washington (matplotlib's sample data) is smooth on the abyssal plain and rough at the
# shelf. A stationary kernel has one lengthscale for both. A deep kernel puts the inputs through a small network first,
# so that distances stretch where the surface is rough. It is a plain `torch.nn.Module`; every method takes it like any
# kernel, and its correlations rank the neighbors.
#
#     python tutorials/deep_kernel.py [--out tutorial_output/deep_kernel] [--smoke]

# %% tags=["hide-input"]
import argparse
import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import pyro_nngp as nngp
from pyro_nngp.data import bathymetry, coverage, crps_gaussian, gaussian_interval, nll, rmse
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Gaussian

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/deep_kernel"), help="folder for the figure")
parser.add_argument("--smoke", action="store_true", help="few points and steps, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
num_train, num_steps = (600, 60) if args.smoke else (4_000, 600)
torch.manual_seed(0)

# %% [markdown]
# ## Data
# Random points of the map; inputs standardized for the network, heights in kilometers.

# %%
data = bathymetry()
rows = torch.randperm(len(data.x))
inputs = (data.x - data.x.mean(0)) / data.x.std(0)
x, x_test = inputs[rows[:num_train]], inputs[rows[num_train:]]
y, y_test = (data.y[part] / 1_000 for part in (rows[:num_train], rows[num_train:]))


# %% [markdown]
# ## The kernel
# The network adds a bend to the inputs, which starts small, and gives the logarithm of a standard deviation at each
# place. Everything is learned together.


# %%
class DeepKernel(nn.Module):
    def __init__(self, lengthscale, variance, hidden=24):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 3)
        )
        with torch.no_grad():
            self.network[-1].weight.mul_(0.1)
        self.kernel = Matern32(2, lengthscale=lengthscale, variance=variance)

    def warp(self, x):
        """Bent coordinates, and the standard deviation at each place."""
        bend = self.network(x)
        return x + bend[..., :2], bend[..., 2].exp()

    def forward(self, x, z):
        (x, left), (z, right) = self.warp(x), self.warp(z)
        return left[..., :, None] * right[..., None, :] * self.kernel(x, z)


# %% [markdown]
# ## Train both
# The deep kernel starts from what the stationary one has learned.


# %%
def score(name, gp, seconds):
    with torch.no_grad():
        predictive = gp.predict(x_test)
    values = {
        "RMSE [m]": 1_000 * rmse(y_test, predictive.mean),
        "NLL": nll(y_test, predictive),
        "CRPS [m]": 1_000 * crps_gaussian(y_test, predictive.mean, predictive.stddev),
        "coverage": coverage(y_test, *gaussian_interval(predictive.mean, predictive.stddev)),
    }
    print(
        f"{name:12}" + "".join(f"  {key} {float(value):8.3f}" for key, value in values.items()) + f"  {seconds:.0f} s"
    )
    return {key: float(value) for key, value in values.items()}, predictive


start = time.perf_counter()
plain = nngp.Vecchia(x, y, Matern32(2), num_neighbors=20)
nngp.fit(plain, progress=False)
stationary, flat = score("stationary", plain, time.perf_counter() - start)

start = time.perf_counter()
lengthscale, variance = plain.kernel.lengthscale.detach(), plain.kernel.variance.detach()
noise = Gaussian(plain.likelihood.variance.detach())
gp = nngp.Vecchia(x, y, DeepKernel(lengthscale, variance), noise, mean=plain.mean, num_neighbors=20)
nngp.fit(gp, num_steps, batch_size=256, lr=0.01, refresh_every=max(50, num_steps // 4), progress=False)
deep, bent = score("deep", gp, time.perf_counter() - start)

# %% [markdown]
# ## What it has learned
# Lines that are straight on the map, as the kernel sees them; and its standard deviations beside the stationary ones.

# %%
side = torch.linspace(-1.7, 1.7, 41)
grid = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1)
with torch.no_grad():
    bending = gp.kernel.warp(grid)[0]
figure, axes = plt.subplots(1, 3, figsize=(15, 4.3), constrained_layout=True)
for line in (*bending.unbind(0), *bending.unbind(1)):
    axes[0].plot(*line.T, color="tab:blue", linewidth=0.6)
axes[0].set(title="the map as the kernel sees it", xticks=[], yticks=[])
kilometers = data.x[rows[num_train:]]
for axis, name, predictive in zip(axes[1:], ("stationary", "deep"), (flat, bent), strict=True):
    points = axis.scatter(*kilometers.T, c=1_000 * predictive.stddev, s=4, cmap="magma", vmin=0, vmax=400)
    axis.set(title=f"standard deviation [m], {name}", xlabel="east [km]", ylabel="north [km]", aspect="equal")
figure.colorbar(points, ax=axes[1:])
figure.savefig(args.out / "deep_kernel.png", dpi=110)

# %%
assert deep["NLL"] < stationary["NLL"] - (0.05 if args.smoke else 0.3), (deep["NLL"], stationary["NLL"])
assert (0.85 if args.smoke else 0.9) < deep["coverage"] < 0.99, deep["coverage"]
