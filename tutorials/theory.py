# %% [markdown]
# # What nearest neighbors do to a variational bound
#
# Two methods give each point K neighbors among many inducing points, and differ in one term. VNNGP takes the
# divergence of q(u) from a nearest-neighbor *prior*, another Gaussian process. SWSGP averages *local* divergences,
# each over the neighbors of one data point. Three small experiments of Wu, Pleiss and Cunningham (2022, section 4.2)
# show what follows from that, all at fixed kernels, so that nothing is left to training recipes.
#
#     python tutorials/theory.py [--out tutorial_output/theory] [--smoke]

# %% tags=["hide-input"]
import argparse
import os
from pathlib import Path

import matplotlib.pyplot as plt
import pyro
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import IntegratedELBO
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import SVGP, SWSGP, VNNGP
from pyro_nngp.variational import MeanField

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/theory"), help="folder for the figures")
parser.add_argument("--smoke", action="store_true", help="few points and settings, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
num_grid, num_points, num_noises = (30, 100, 4) if args.smoke else (60, 400, 10)
real = torch.float64


def number(value):
    return torch.tensor(value, dtype=real)


def draw(kernel, x, noise=0.0):
    """A draw of the exact process at x, with noise."""
    cov = kernel(x).detach() + (noise + 1e-8) * torch.eye(len(x), dtype=real)
    return MultivariateNormal(torch.zeros(len(x), dtype=real), cov).sample()


def loss(gp):
    return IntegratedELBO().loss(gp.model, gp.guide)


# %% [markdown]
# ## The divergence against K
# Inducing points on a grid of spacing 1; q(u) has the mean of a draw from a process of lengthscale 5 and unit
# variances. The dashed line is the divergence from the exact process. Both methods reach it at K = M; VNNGP does so at
# small K, as soon as the neighbors screen off the rest. The average of local divergences can only lose by leaving
# values out (appendix C of that paper), and it loses most of it: for a short lengthscale it grows in proportion to K.

# %%
pyro.set_rng_seed(1)  # the data of each experiment are the same, whatever the methods of the one before drew
grid = torch.arange(float(num_grid), dtype=real)[:, None]
mean = draw(RBF(1, variance=number(1.0), lengthscale=number(5.0)), grid)
neighbors = [k for k in (1, 2, 3, 5, 8, 12, 20, 30, 40, 50) if k < num_grid - 1] + [num_grid]


def divergences(kernel, k):
    """Of VNNGP; and of SWSGP, where it is what the expected log likelihood leaves of the loss."""
    few, start = min(k, num_grid - 1), {"guide": MeanField(mean, 1.0), "jitter": 1e-4}
    vnngp = VNNGP(grid, mean, kernel, Gaussian(1.0), num_neighbors=few, **start)
    ours = kl_divergence(vnngp.q.distribution(), NNGP(kernel, vnngp.graph, jitter=1e-4))
    at_data = {"inducing": grid, "learn_inducing": False, "num_neighbors": k}
    swsgp = SWSGP(grid, mean, kernel, Gaussian(1.0), **at_data, **start)
    local = loss(swsgp) + swsgp.likelihood.expected_log_prob(mean, *swsgp(grid)).sum()
    return float(ours.detach()), float(local.detach())


figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
reached = {}
for axis, lengthscale in zip(axes, (1.0, 3.0, 5.0), strict=True):
    kernel = RBF(1, variance=number(1.0), lengthscale=number(lengthscale))
    prior = kernel(grid).detach() + 1e-4 * torch.eye(num_grid, dtype=real)
    q = MultivariateNormal(mean, torch.eye(num_grid, dtype=real))
    exact = float(kl_divergence(q, MultivariateNormal(torch.zeros(num_grid, dtype=real), prior)))
    ours, local = zip(*(divergences(kernel, k) for k in neighbors), strict=True)
    reached[lengthscale] = exact, ours, local
    axis.plot(neighbors, ours, "o-", color="tab:green", label="VNNGP")
    axis.plot(neighbors, local, "o-", color="tab:orange", label="SWSGP")
    axis.axhline(exact, ls="--", color="tab:blue", label="exact prior")
    axis.set(title=f"kernel lengthscale {lengthscale:.0f}", xlabel="K", ylabel="KL [nats]", yscale="log")
    print(f"lengthscale {lengthscale:.0f}: exact {exact:.4g}")
    for k, one, two in zip(neighbors, ours, local, strict=True):
        print(f"  K = {k:3d}: VNNGP {one / exact:6.3f} of it, SWSGP {two / exact:6.3f}")
axes[0].legend()
figure.savefig(args.out / "divergence.png", dpi=110)

# %% [markdown]
# ## Fifty noisy points
# Two dense clusters and ten points between them, noise as large as the signal, everything known but f. Mean-field q(u)
# with inducing points at the data, K = 5. VNNGP has its optimum in closed form (`solve`); SWSGP's comes from L-BFGS,
# for which a guide is a module with parameters and the bound a function of them. The mean of VNNGP stays near the exact
# one between the clusters, SWSGP's does not; the intervals of both are far too narrow there, as the intervals of
# independent values under a smooth prior must be.


# %%
def optimize(gp, steps):
    """Put q(u) alone at its optimum."""
    optimizer = torch.optim.LBFGS(gp.q.parameters(), max_iter=steps, line_search_fn="strong_wolfe")
    elbo = IntegratedELBO()

    def closure():
        optimizer.zero_grad()
        value = elbo.differentiable_loss(gp.model, gp.guide)
        value.backward(inputs=list(gp.q.parameters()))
        return value

    optimizer.step(closure)
    return gp


def posterior(kernel, noise, x, y, x_new):
    """Of the exact process."""
    chol = torch.linalg.cholesky(kernel(x).detach() + noise * torch.eye(len(x), dtype=real))
    half = torch.linalg.solve_triangular(chol, kernel(x, x_new).detach(), upper=False)
    white = torch.linalg.solve_triangular(chol, y[:, None], upper=False)
    return (half.mT @ white)[:, 0], kernel(x_new, diag=True).detach() - half.square().sum(0)


pyro.set_rng_seed(2)
SIGNAL = NOISE = 5.0
kernel = RBF(1, variance=number(SIGNAL), lengthscale=number(5.0))
clusters = torch.cat(
    [2 * torch.randn(20, dtype=real), 50 + 2 * torch.randn(20, dtype=real), 4 + 42 * torch.rand(10, dtype=real)]
)
x = clusters.sort().values[:, None]
y = draw(kernel, x, NOISE)
x_new = torch.linspace(-5, 55, 200, dtype=real)[:, None]
between = (x_new[:, 0] > 5) & (x_new[:, 0] < 45)

shared = {"jitter": 1e-4, "mean": lambda x: torch.zeros_like(x[:, 0])}
fits = {"exact": posterior(kernel, NOISE, x, y, x_new)}
vnngp = VNNGP(x, y, kernel, Gaussian(number(NOISE)), num_neighbors=5, **shared)
vnngp.solve()
at_data = {"inducing": x, "learn_inducing": False, "num_neighbors": 5}
swsgp = optimize(SWSGP(x, y, kernel, Gaussian(number(NOISE)), **at_data, **shared), 200)
fits |= {name: [v.detach() for v in gp(x_new)] for name, gp in {"VNNGP": vnngp, "SWSGP": swsgp}.items()}

figure, axis = plt.subplots(figsize=(9, 4), constrained_layout=True)
axis.plot(x, y, "k.", ms=4)
gaps = {}
for (name, (loc, var)), color in zip(fits.items(), ("tab:purple", "tab:green", "tab:orange"), strict=True):
    axis.plot(x_new, loc, color=color, label=name)
    axis.fill_between(x_new[:, 0], loc - 2 * var.sqrt(), loc + 2 * var.sqrt(), color=color, alpha=0.15)
    miss = ((loc - fits["exact"][0]) / fits["exact"][1].sqrt())[between].square().mean().sqrt()
    ratio = (var / fits["exact"][1]).sqrt()[between].mean()
    gaps[name] = float(miss)
    print(f"{name:6}: between the clusters off by {miss:.2f} exact standard deviations, its own {ratio:.2f} of those")
axis.legend()
figure.savefig(args.out / "noisy.png", dpi=110)

# %% [markdown]
# ## The bound against the noise variance
# Which noise would each bound choose, everything else at the truth? For each value q(u) is at its optimum. With few
# inducing points SVGP mistakes for noise what they cannot follow. VNNGP has its optimum in between. The bound of SWSGP
# with an inducing point at each data point goes on rising far below the true noise: a perfect fit gains N
# log-densities, and costs the divergence of one neighborhood. Only a pair of points very close together can stop it.

# %%
kernel, truth = Matern52(2, variance=number(1.0), lengthscale=number(2 / num_points**0.5)), 0.1
shared["jitter"] = 1e-6
pyro.set_rng_seed(3)
x = torch.rand(num_points, 2, dtype=real)
y = draw(kernel, x, truth)
noises = torch.logspace(-4, 0.5, num_noises, dtype=real)
bounds = {name: [] for name in ("exact", "SVGP, M = 16", "VNNGP", "SWSGP, M = N")}
at_data = {"inducing": x, "learn_inducing": False, "num_neighbors": 8}
for noise in noises:
    cov = kernel(x).detach() + noise * torch.eye(num_points, dtype=real)
    bounds["exact"].append(-float(MultivariateNormal(torch.zeros(num_points, dtype=real), cov).log_prob(y)))
    svgp = SVGP(x, y, kernel, Gaussian(noise), inducing=16, **shared)
    vnngp = VNNGP(x, y, kernel, Gaussian(noise), num_neighbors=8, **shared)
    for gp in (svgp, vnngp):
        gp.solve()
    start = MeanField(loc=y, scale=float(noise) ** 0.5)
    swsgp = optimize(SWSGP(x, y, kernel, Gaussian(noise), guide=start, **at_data, **shared), 150)
    for name, gp in zip(list(bounds)[1:], (svgp, vnngp, swsgp), strict=True):
        bounds[name].append(loss(gp))

figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
chosen = {}
for (name, values), color in zip(bounds.items(), ("tab:purple", "tab:blue", "tab:green", "tab:orange"), strict=True):
    values = torch.tensor(values)
    chosen[name] = float(noises[values.argmin()])
    axis.plot(noises, (values - values.min()) / (values.max() - values.min()), "o-", color=color, label=name)
    axis.axvline(chosen[name], ls=":", color=color)
    print(f"{name:13}: chooses {chosen[name]:.2g}; losses " + " ".join(f"{value:.3g}" for value in values.tolist()))
axis.axvline(truth, color="k", lw=0.5)
axis.set(xscale="log", xlabel="noise variance", ylabel="loss, scaled to 0..1")
axis.legend()
figure.savefig(args.out / "noise.png", dpi=110)
print(f"wrote divergence.png, noisy.png and noise.png to {args.out}/")

# %% [markdown]
# ## Did it work?

# %%
for exact, ours, local in reached.values():
    assert abs(ours[-1] / exact - 1) < 1e-6
    assert abs(local[-1] / exact - 1) < 1e-6
    assert all(value < exact for value in local[:-1])  # local divergences lose
    assert list(local) == sorted(local)
    assert all(
        abs(one - exact) < abs(two - exact)
        for k, one, two in zip(neighbors, ours, local, strict=True)
        if 3 < k < num_grid
    )
assert gaps["VNNGP"] < gaps["SWSGP"]
assert noises[0] < chosen["VNNGP"] <= chosen["exact"] <= chosen["SVGP, M = 16"]
assert chosen["SWSGP, M = N"] < truth / 10 < chosen["VNNGP"]
