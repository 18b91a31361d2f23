# %% [markdown]
# # Many species at once: factors and residual correlations
#
# Which species occur together beyond what a covariate explains, and where? A *joint species distribution model* writes
# the presence of T species as a regression plus a few shared surfaces, the factors, times a loading for each species.
# `LMC` with `FactorLoadings` finds loadings, coefficients and nearest-neighbor factors together, without chains.
#
# Data are simulated, so that maps and correlations stand beside the truth: 14 species at 300 plots, an elevation that
# was measured, and two factors that nobody measured, such as moisture and disturbance.
#
#     python tutorials/species_together.py [--out tutorial_output/species_together] [--smoke]

# %% tags=["hide-input"]
import argparse
import os
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import pyro_nngp as nngp
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.means import LinearMean
from pyro_nngp.models import LMC

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/species_together"), help="for the figures")
parser.add_argument("--smoke", action="store_true", help="few plots and species, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
num_plots, num_species = (60, 4) if args.smoke else (300, 14)
torch.manual_seed(4)
real = torch.float64

# %% [markdown]
# ## Data
# The eastern quarter of the plots is left out.

# %%
plots = torch.rand(num_plots, 2, dtype=real) * 10  # km
plots = plots[plots[:, 0].argsort()]
elevation = torch.sin(plots[:, 0] / 3) + 0.5 * torch.randn(num_plots, dtype=real)


def factors_at(place):
    """The two surfaces that nobody measured, of mean about 0 and variance about 1."""
    moisture = 1.4 * torch.sin(place[:, 0] / 1.1) * torch.cos(place[:, 1] / 1.5)
    disturbance = 1.4 * torch.cos(place[:, 0] / 2.6 - place[:, 1] / 1.9)
    return torch.stack([moisture, disturbance])


loadings = 1.3 * torch.randn(num_species, 2, dtype=real)
slopes, levels = 0.8 * torch.randn(num_species, dtype=real), 0.5 * torch.randn(num_species, dtype=real)
logits = levels + elevation[:, None] * slopes + (loadings @ factors_at(plots)).mT
presence = torch.bernoulli(logits.sigmoid())  # (N, T)
known = num_plots * 3 // 4
x = torch.cat([plots, elevation[:, None]], -1)
print(f"{known} plots to learn from, {num_plots - known} left out; prevalence {presence.mean(0).min():.2f} to", end=" ")
print(f"{presence.mean(0).max():.2f}")

# %% [markdown]
# ## The model
# Each factor has a kernel of the place alone, `active_dims=[0, 1]`, with its own range. The mean has an intercept and a
# slope for each species on the third column. The number of factors is an upper limit: loadings of a factor that the
# data do not need shrink.

# %%
gp = LMC(
    x[:known],
    presence[:known],
    [Matern32(2, active_dims=[0, 1]) for _ in range(2)],
    Bernoulli(),
    mean=LinearMean(1, num_latents=num_species, active_dims=[2]).to(real),
    mixing=FactorLoadings(num_species, 2),
)
nngp.fit(gp, 5 if args.smoke else None, progress=False)
residual = gp.correlations(progress=False)

# %% [markdown]
# ## Residual correlations
# `correlations()` returns medians and 95 % intervals of the correlations of the species at a plot, beyond elevation.
# Pairs whose interval excludes 0 are marked. The right panel has the truth of the simulation.

# %%
truth = loadings @ loadings.mT
truth = truth / truth.diagonal().sqrt() / truth.diagonal().sqrt()[:, None]
order = loadings[:, 1].atan2(loadings[:, 0]).argsort()  # species with like loadings side by side
clear = (residual.lower > 0) | (residual.upper < 0)
figure, axes = plt.subplots(1, 2, figsize=(9.5, 4), constrained_layout=True)
for axis, values, title in zip(axes, (residual.estimate, truth), ("estimated", "truth"), strict=True):
    image = axis.imshow(values[order][:, order], cmap="RdBu_r", vmin=-1, vmax=1)
    axis.set(title=f"correlations of species, {title}", xlabel="species", ylabel="species")
marks = (clear[order][:, order] & ~torch.eye(num_species, dtype=torch.bool)).nonzero()
axes[0].scatter(marks[:, 1], marks[:, 0], s=6, color="black", label="interval excludes 0")
figure.colorbar(image, ax=axes)
figure.savefig(args.out / "correlations.png", dpi=110)

pairs = torch.triu_indices(num_species, num_species, 1)
inside = ((residual.lower <= truth) & (truth <= residual.upper))[pairs[0], pairs[1]].double().mean()
print(f"95 % intervals hold {100 * inside:.0f} % of the {pairs.shape[1]} correlations")

# %% [markdown]
# ## Maps of the factors
# `latent_functions` has means and covariances of the factors anywhere. Sign and order of factors say nothing: a factor
# and its loadings can change sign together. So each true surface stands beside the combination of the two factors that
# is nearest to it. In the east, where no plots are, the maps fade to the mean.

# %%
axis_km = torch.linspace(0, 10, 40, dtype=real)
grid = torch.cartesian_prod(axis_km, axis_km)
with torch.no_grad():
    found, _ = gp.latent_functions(torch.cat([grid, torch.zeros(len(grid), 1, dtype=real)], -1))
true = factors_at(grid)
turned = torch.linalg.lstsq(found.mT, true.mT).solution.mT @ found
match = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(turned, true, strict=True)])
print(f"correlation of maps with the true surfaces: {match[0]:.2f} and {match[1]:.2f}")
figure, axes = plt.subplots(2, 2, figsize=(9, 7.6), sharex=True, sharey=True, constrained_layout=True)
names = ("moisture", "disturbance")
for row, (name, *surfaces) in zip(axes, zip(names, turned, true, strict=True), strict=True):
    for axis, surface, title in zip(row, surfaces, ("found", "truth"), strict=True):
        image = axis.pcolormesh(axis_km, axis_km, surface.reshape(40, 40).T, vmin=-1.5, vmax=1.5)
        axis.set(title=f"{name}, {title}", xlabel="east [km]", ylabel="north [km]", aspect="equal")
    row[0].scatter(*plots[:known].T, s=5, color="white", edgecolor="black", linewidth=0.3)
figure.colorbar(image, ax=axes)
figure.savefig(args.out / "factors.png", dpi=110)

# %% [markdown]
# ## Plots left out, and what other species tell
# `predict` knows place and elevation of a plot alone, which says little beyond the last plots in the east.
# `predict_given` also knows some species there: here every second one, and the others are predicted.

# %%
new, rest = x[known:], presence[known:].clone()
rest[:, 1::2] = torch.nan  # to be predicted
scored = presence[known:, 1::2].mT


def score(chances):
    """Mean negative log probability of the species to be predicted."""
    chance = chances[1::2]
    return float(-(scored * chance.log() + (1 - scored) * (1 - chance).log()).mean())


with torch.no_grad():
    alone, given = score(gp.predict(new).mean), score(gp.predict_given(new, rest).mean)
flat = score(presence[:known].mean(0)[:, None].expand(-1, len(new)).clamp(0.01, 0.99))
print(
    f"negative log probability per species and plot: prevalence {flat:.3f}, factors {alone:.3f}, given half {given:.3f}"
)

# %%
assert residual.estimate.isfinite().all()
if not args.smoke:  # 45 plots say little
    assert alone < flat, (alone, flat)
    assert given < alone, (given, alone)
    assert match.min() > 0.6, match
    assert inside > 0.8, inside
