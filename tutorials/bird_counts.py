# %% [markdown]
# # Bird counts: one posterior per place, or one network for all places
#
# Birdwatchers report how many sparrows they saw, at thousands of places that lie close together around towns and far
# apart elsewhere. We want a map of how many one would see. Counts rule out the closed forms of Gaussian-process
# regression, and the map has detail at the scale of the distance between neighbors, which a few hundred inducing points
# smooth away.
#
# **NPVI** (Liu and Liu 2019) gives each place separate variational parameters, a mean and a row of a sparse Cholesky
# factor over its K neighbors. **NPVI-NN** computes them by a network from what was counted around the place: a thousand
# weights whatever the number of places, and an answer for a new survey without any training.
#
# The counts are simulated, so that the truth is known: a surface of the *exact* Gaussian process, and
# Poisson counts whose rate is its softplus, as in the paper's study of the Savannah Sparrow.
#
#     python tutorials/bird_counts.py [--out tutorial_output/bird_counts] [--smoke]

# %% tags=["hide-input"]
import argparse
import copy
import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.optim import Adagrad
from torch.nn.functional import softplus

from pyro_nngp.data import nll
from pyro_nngp.inference import IntegratedELBO, fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Poisson
from pyro_nngp.models import NPVI
from pyro_nngp.variational import Amortized
from pyro_nngp.variational.encoders import ConditionalEncoder, GraphConvolutionEncoder, SiteEncoder

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/bird_counts"), help="folder for the results")
parser.add_argument("--smoke", action="store_true", help="few places and steps, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
num_places, num_map, num_steps = (300, 200, 60) if args.smoke else (1200, 900, 400)
pyro.set_rng_seed(4)

# %% [markdown]
# ## Two surveys
# The old survey is in the west, the new one in the east, twenty lengthscales away: nothing that was counted in one says
# anything of the other. Half of the places lie around towns. The map is a grid over the west.

# %%
SIDE, LENGTHSCALE, VARIANCE, MEAN = 1.0, 0.06, 4.0, 0.5


def places(count):
    towns = torch.rand(12, 2)
    near = towns[torch.randint(12, (count // 2,))] + 0.05 * torch.randn(count // 2, 2)
    return torch.cat([near.clamp(0, 1), torch.rand(count - count // 2, 2)]) * SIDE


def exact_surface(x):
    """A draw of the Gaussian process, by a dense Cholesky factor."""
    x = x.double()
    cov = Matern32(2, variance=torch.tensor(VARIANCE), lengthscale=torch.tensor(LENGTHSCALE)).double()(x).detach()
    factor = torch.linalg.cholesky(cov + 1e-6 * torch.eye(len(x), dtype=torch.float64))
    return (MEAN + factor @ torch.randn(len(x), dtype=torch.float64)).float()


side = int(num_map**0.5)
grid = torch.cartesian_prod(*[torch.linspace(0, SIDE, side)] * 2)
sizes = (num_places, num_places // 4, len(grid))
west = torch.cat([places(sizes[0]), places(sizes[1]), grid])
truth = exact_surface(west)
(x, x_test, _), (f, f_test, f_map) = west.split(sizes), truth.split(sizes)
y, y_test = (dist.Poisson(softplus(values)).sample() for values in (f, f_test))

east = torch.cat([places(num_places), places(num_places // 4)]) + torch.tensor([20 * LENGTHSCALE + SIDE, 0.0])
rate = softplus(exact_surface(east))
x_new, x_new_test = east.split(sizes[:2])
y_new, y_new_test = dist.Poisson(rate).sample().split(sizes[:2])
print(f"{len(y)} counts from 0 to {int(y.max())}, {(y == 0).float().mean():.0%} of them 0")

# %% [markdown]
# ## NPVI
# The graph joins each place with its near ones; prior and guide share it. Kernel and mean start from rough values and
# are learned. The nugget lets two visits to one place differ a little: around towns, where places all but coincide, the
# prior would otherwise tie their values together more tightly than a network that sees one neighborhood at a time can.

# %%
NUGGET = 0.02  # of the variance

kernel = Matern32(2, variance=torch.tensor(2.0), lengthscale=torch.tensor(0.1))
npvi = NPVI(x, y, kernel, Poisson("softplus"), num_neighbors=10, jitter=NUGGET)
found = fit(npvi, num_steps, batch_size=256, lr=0.03, solve_every=max(20, num_steps // 12), progress=False)
seconds = {"NPVI": found.seconds}

# %% [markdown]
# `fit` takes gradient steps for kernel and mean and now and then solves for the optimal q, in closed form given
# Gaussian approximations of the likelihood. The paper's recipe is AdaGrad on batches of 50, here in plain Pyro and for
# q alone, at the kernel that `fit` has found, beside what `solve` reaches.


# %%
def at_found_kernel(encoder=None):
    """A model on the old survey with NPVI's kernel and mean, which stay as they are."""
    kernel, mean = copy.deepcopy((npvi.kernel, npvi.mean))
    kernel.requires_grad_(False)
    mean.requires_grad_(False)
    guide = None if encoder is None else Amortized(encoder)
    return NPVI(x, y, kernel, Poisson("softplus"), num_neighbors=10, guide=guide, mean=mean, jitter=NUGGET)


by_hand = at_found_kernel()
svi = SVI(by_hand.model, by_hand.guide, Adagrad({"lr": 0.2}), TraceMeanField_ELBO())
for _ in range(num_steps):
    svi.step(torch.randperm(len(x))[:50])


def bound(gp):
    """ELBO per count."""
    with torch.no_grad():
        return -IntegratedELBO().loss(gp.model, gp.guide) / gp.num_data


print(f"ELBO per count: AdaGrad after {num_steps} steps {bound(by_hand):.3f}, solved {bound(npvi):.3f}")

# %% [markdown]
# ## NPVI-NN
# Three encoders. The paper's graph convolutional networks read the counts of the neighborhood and its kernel matrix and
# give a mean and a row of the factor. The second replaces each count by a Gaussian observation that the network chooses
# and conditions on these, as exact inference does for a Gaussian likelihood; it also sees the nearest places that come
# later in the ordering. The third starts with the Gaussian observations that the Poisson likelihood amounts to at a
# rough value and corrects them by a network of each place alone, which is quicker still. All are trained at NPVI's
# kernel; the paper, too, holds the kernel fixed.

# %%
encoders = {
    "NPVI-NN, paper": GraphConvolutionEncoder(),
    "NPVI-NN, sites": SiteEncoder(2, num_context=15),
    "NPVI-NN, conditional": ConditionalEncoder(num_context=15),
}
models = {"NPVI": npvi} | {name: at_found_kernel(encoder) for name, encoder in encoders.items()}
for name in encoders:
    seconds[name] = fit(models[name], num_steps, batch_size=256, lr=0.03, progress=False).seconds

scores = {}
print(f"{'':22}{'ELBO':>8}{'test NLL':>10}{'map corr.':>11}{'q has':>9} numbers{'seconds':>9}")
for name, gp in models.items():
    with torch.no_grad():
        scores[name] = float(nll(y_test, gp.predict(x_test)))
        correlation = float(torch.corrcoef(torch.stack([gp(grid)[0], f_map]))[0, 1])
    size = sum(parameter.numel() for parameter in gp.q.parameters())
    values = f"{bound(gp):8.3f}{scores[name]:10.3f}{correlation:11.3f}"
    print(f"{name:22}{values}{size:9,}        {seconds[name]:9.1f}")

# %% [markdown]
# ## A new survey without training
# `amortize` puts the trained kernel, mean and encoder on other data: q at the new places is one pass of the network.
# Beside it, NPVI fitted to the new survey, and a constant rate.

# %%
start = time.perf_counter()
transferred = models["NPVI-NN, sites"].amortize(x_new, y_new)
with torch.no_grad():
    at_once = float(nll(y_new_test, transferred.predict(x_new_test)))
instant = time.perf_counter() - start

kernel, mean = copy.deepcopy((npvi.kernel, npvi.mean))
refitted = NPVI(x_new, y_new, kernel, Poisson("softplus"), num_neighbors=10, mean=mean, jitter=NUGGET)
refitted.solve()
with torch.no_grad():
    solved = float(nll(y_new_test, refitted.predict(x_new_test)))
constant = float(nll(y_new_test, dist.Poisson(y_new.mean().expand(len(y_new_test)))))
print(
    f"new survey, test NLL: network {at_once:.3f} in {instant:.2f} s, NPVI {solved:.3f}, constant rate {constant:.3f}"
)

# %% [markdown]
# ## Maps

# %%
with torch.no_grad():
    images = {"true rate": softplus(f_map)} | {name: gp.predict(grid).mean for name, gp in models.items()}
figure, axes = plt.subplots(1, 1 + len(images), figsize=(5 * (1 + len(images)), 4.2), constrained_layout=True)
top = float(images["true rate"].quantile(0.99))
axes[0].scatter(*x.T, c=y.clamp(max=top), s=4, vmin=0, vmax=top)
axes[0].set(title="counts")
for axis, (title, image) in zip(axes[1:], images.items(), strict=True):
    shown = axis.imshow(image.view(side, side).T, origin="lower", extent=(0, SIDE, 0, SIDE), vmin=0, vmax=top)
    axis.set(title=title)
figure.colorbar(shown, ax=axes)
figure.savefig(args.out / "map.png", dpi=100)
print(f"wrote map.png to {args.out}/")

# %% [markdown]
# ## Did it work?
# Solving is worth more than AdaGrad steps; the network with sites comes near NPVI on the old survey, and on a new one
# without any training.

# %%
flat = float(nll(y_test, dist.Poisson(y.mean().expand(len(y_test)))))
assert bound(npvi) > bound(by_hand)
assert scores["NPVI"] < flat
assert scores["NPVI-NN, sites"] < scores["NPVI"] + (0.3 if args.smoke else 0.15) * (flat - scores["NPVI"])
assert at_once < solved + (0.3 if args.smoke else 0.15) * (constant - solved)
