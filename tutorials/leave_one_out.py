# %% [markdown]
# # Leave-one-out Gaussian processes: regression and classification
#
# A kernel can be judged by how well each datum is predicted from the others. LOO-k (Jankowiak and Pleiss 2021) takes
# the K nearest others, and trains on the sum of these log densities. Nothing else has to be learned: there are no
# inducing points and no ordering, and a step costs the same whatever the number of data. For labels, counts and
# heavy-tailed noise auxiliary variables make the neighbors Gaussian again.
#
# Here: regression on a sea floor that no stationary kernel describes, against the marginal likelihood with the same
# neighbors; labels in two bananas with their decision boundary; and how to see whether predictions are calibrated.
# The sea floor is part of matplotlib; the bananas are made here, so that the true probabilities are known.
#
#     python tutorials/leave_one_out.py [--out tutorial_output/leave_one_out] [--smoke]

# %% tags=["hide-input"]
import argparse
import math
import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from pyro_nngp.data import Standardizer, bathymetry, coverage, error_rate, gaussian_interval, nll, rmse
from pyro_nngp.inference import Schedule, fit, pit, plot_coverage, plot_pit, plot_reliability, reliability
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, StudentT
from pyro_nngp.models import LOO, Vecchia
from pyro_nngp.variational import Conjugate, LogNormal

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/leave_one_out"), help="folder for the figures")
parser.add_argument("--smoke", action="store_true", help="few points and steps, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)

# %% [markdown]
# ## Regression
# Heights of land and sea floor off Washington, at a third of the places of a grid; the others are for scores. The deep
# sea floor is smooth, the land is not: one lengthscale and one variance for both are wrong somewhere.
#
# `Vecchia` trains on the marginal likelihood, as a product of densities given the nearest *predecessors* in an
# ordering. `LOO` is its counterpart without one. Both predict from the nearest training points, so only the
# hyperparameters differ. The third model has heavy-tailed noise, with an auxiliary precision for each datum. It takes
# rough land for outliers: densities gain from that, and heights lose.

# %%
data = bathymetry()
train = torch.rand(len(data.x)) < (0.1 if args.smoke else 0.33)
to_x, to_y = Standardizer(data.x[train]), Standardizer(data.y[train])
x, y = to_x.transform(data.x), to_y.transform(data.y)
num_steps = 100 if args.smoke else 1500
recipe = {"batch_size": 128, "lr": 0.03, "schedule": Schedule((0.25, 0.5, 0.75), 0.2), "refresh_every": 100}


def kernel():
    return Matern52(2, variance=torch.tensor(1.0), lengthscale=torch.tensor([0.5, 0.5]))


def train_and_score(name, gp):
    start = time.perf_counter()
    fit(gp, num_steps, **recipe, progress=False)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        predictive = gp.predict(x[~train])
    error = float(rmse(y[~train], predictive.mean) * to_y.scale)
    density = float(nll(y[~train], predictive))
    print(f"{name:24}{error:>10.1f}{density:>10.3f}{seconds:>10.1f}")
    return predictive, density


print(f"{'':24}{'RMSE [m]':>10}{'NLL':>10}{'seconds':>10}")
xt, yt = x[train], y[train]
marginal, marginal_nll = train_and_score("Vecchia", Vecchia(xt, yt, kernel(), Gaussian(0.1), num_neighbors=32))
left_out, left_out_nll = train_and_score("LOO", LOO(xt, yt, kernel(), Gaussian(0.1), num_neighbors=32))
student = LOO(xt, yt, kernel(), StudentT(4.0, 0.1), num_neighbors=32, guide=Conjugate())
heavy, heavy_nll = train_and_score("LOO, Student-t noise", student)

# %% [markdown]
# ## Are the predictions calibrated?
# The transform of an observation is where it falls in its predictive distribution, from 0 to 1. If predictions are
# calibrated, transforms are uniform. Here neither Gaussian is: most of the sea floor is smoother than the kernel
# thinks, so most transforms crowd in the middle, and some land is far rougher, so the rest are at the ends. The
# density of what was observed is what the leave-one-out objective trains, and what it is better at.

# %%
figure, axes = plt.subplots(1, 3, figsize=(15, 4), constrained_layout=True)
for axis, predictive, title in zip(axes[:2], (marginal, left_out), ("Vecchia", "LOO"), strict=True):
    plot_pit(pit(predictive, y[~train]), ax=axis)
    axis.set_title(title)
plot_coverage(pit(left_out, y[~train]), ax=axes[2])
axes[2].set_title("LOO")
figure.savefig(args.out / "regression.png", dpi=110)
inside = coverage(y[~train], *gaussian_interval(left_out.mean, left_out.stddev))
print(f"95 % intervals of LOO hold {100 * float(inside):.1f} % of the test points")

# %% [markdown]
# ## Classification
# Two crescents with Gaussian noise. The probability of a label at a place follows from their densities.


# %%
def arcs(angle):
    """Points of the two crescents, (2, ..., 2)."""
    upper = torch.stack([angle.cos(), angle.sin()], -1)
    return torch.stack([upper, torch.tensor([1.0, 0.4]) - upper])


def true_probability(places, noise):
    """Probability of label 1."""
    along = arcs(torch.linspace(0, math.pi, 200))
    square = (places[None, :, None] - along[:, None]).square().sum(-1)
    return torch.softmax(torch.logsumexp(-square / (2 * noise**2), -1), 0)[1]


noise, num_points = 0.3, 400 if args.smoke else 3000
label = (torch.rand(2 * num_points) < 0.5).float()
place = arcs(math.pi * torch.rand(len(label)))[label.long(), torch.arange(len(label))]
place = place + noise * torch.randn_like(place)
fitted, held_out = torch.arange(len(label)).split(num_points)

# %% [markdown]
# Given its auxiliary Polya-Gamma variable each label is a Gaussian observation with some noise variance. The guide
# learns one distribution per label: log-normal as in the paper, or of the conjugate family, where the objective has no
# Monte-Carlo noise. Labels may be 0 and 1, -1 and 1, or booleans.
#
# The paper takes gradients in all parameters, the guide's too, which costs confidence: the boundary is right,
# but probabilities stay away from 0 and 1 (`solve_every=0` below). By default `fit` finds the best guide for the
# present kernel without gradients.

# %%
truth = true_probability(place[held_out], noise)
best = float(nll(label[held_out], torch.distributions.Bernoulli(truth)))
print(f"\n{'':24}{'errors [%]':>10}{'NLL':>10}{'seconds':>10}")
print(f"{'true probabilities':24}{100 * float(error_rate(label[held_out], (truth > 0.5).float())):>10.1f}{best:>10.3f}")
ways = {"log-normal, gradients": (LogNormal(), 0), "log-normal": (LogNormal(), None), "conjugate": (Conjugate(), None)}
for name, (guide, solve_every) in ways.items():
    start = time.perf_counter()
    gp = LOO(place[fitted], label[fitted], kernel(), Bernoulli(), num_neighbors=32, guide=guide)
    fit(gp, num_steps, **recipe, solve_every=solve_every, progress=False)
    with torch.no_grad():
        probability = gp.predict(place[held_out]).mean
    found = float(nll(label[held_out], torch.distributions.Bernoulli(probability)))
    wrong = 100 * float(error_rate(label[held_out], (probability > 0.5).float()))
    print(f"{name:24}{wrong:>10.1f}{found:>10.3f}{time.perf_counter() - start:>10.1f}")

# %% [markdown]
# The decision boundary beside the true one, and predicted probabilities against frequencies.

# %%
side = 60 if args.smoke else 150
grid = torch.cartesian_prod(torch.linspace(-2, 3, side), torch.linspace(-1.8, 2.3, side))
with torch.no_grad():
    surface = gp.predict(grid).mean.view(side, side)
figure, axes = plt.subplots(1, 2, figsize=(13, 4.5), constrained_layout=True)
across, up = grid.view(side, side, 2).unbind(-1)
figure.colorbar(axes[0].pcolormesh(across, up, surface, cmap="coolwarm", vmin=0, vmax=1), ax=axes[0])
axes[0].scatter(*place[fitted].T, c=label[fitted], cmap="coolwarm", s=4, edgecolors="k", linewidths=0.1)
axes[0].contour(across, up, surface, [0.5], colors="k")
axes[0].contour(across, up, true_probability(grid, noise).view(side, side), [0.5], colors="k", linestyles="dotted")
axes[0].set(xlabel="$x_1$", ylabel="$x_2$", title="probability of label 1; boundary found, and true (dotted)")
plot_reliability(reliability(probability, label[held_out]), ax=axes[1])
figure.savefig(args.out / "classification.png", dpi=110)
print(f"wrote regression.png and classification.png to {args.out}/")

# %% [markdown]
# ## Did it work?
# Leave-one-out training against the marginal likelihood, and the loss against the true probabilities.

# %%
print(f"NLL: LOO {left_out_nll:.3f}, Vecchia {marginal_nll:.3f}; labels {found:.3f}, at best {best:.3f}")
assert left_out_nll < marginal_nll + (0.2 if args.smoke else 0)
assert found < best + (0.1 if args.smoke else 0.02)
