# %% [markdown]
# # Counts in space: a nearest-neighbor Gaussian process inside your own Pyro program
#
# Fish are counted at 600 stations. How does the catch change with depth, and where are the fish? A Poisson regression
# on depth answers the first question too confidently, because stations that lie near each other share what depth does
# not explain. A Gaussian process takes up that rest, but its covariance matrix has N x N entries. The
# nearest-neighbor Gaussian process (NNGP) replaces it by N small regressions: each site on its K nearest predecessors
# in some ordering. That costs O(N K^3), is close to the exact process for K of 10 to 30, and is a proper joint
# distribution of the values at all sites: one `pyro.sample` statement, which works under SVI, NUTS and `Predictive`
# alike.
#
# The sites and their depths are real: the sea floor off the coast of Washington, from matplotlib's sample data. The
# counts are simulated, so that the truth is known.
#
#     python tutorials/spatial_counts.py [--out tutorial_output/spatial_counts] [--smoke]

# %% tags=["hide-input"]
import argparse
import os
import time
from pathlib import Path

import arviz as az
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, SVI, Predictive, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value
from pyro.nn import PyroModule, PyroSample
from pyro.optim import ClippedAdam

from pyro_nngp.data import bathymetry
from pyro_nngp.distributions import NNGP, NNGPReparam
from pyro_nngp.inference import AutoNNGP, QuickNUTS, to_arviz
from pyro_nngp.kernels import Matern32
from pyro_nngp.neighbors import NeighborGraph

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/spatial_counts"), help="folder for the results")
parser.add_argument("--smoke", action="store_true", help="few sites and steps, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
if args.smoke:
    num_cells, num_stations, num_steps, num_draws, num_nuts_draws = 800, 200, 150, 20, 15
else:
    num_cells, num_stations, num_steps, num_draws, num_nuts_draws = 4841, 600, 1200, 100, 200
pyro.set_rng_seed(3)
real = torch.float64


def number(value):
    return torch.tensor(value, dtype=real)


# %% [markdown]
# ## Sites, covariate, counts
# Inputs are kilometers, the covariate is the logarithm of depth, standardized. The truth is an intercept of 1, a
# slope of -0.6, and a surface from the *exact* Gaussian process, whose dense Cholesky factor these few thousand cells
# still allow. So the model below is an approximation of what made the data, as it would be in practice.

# %%
TRUE_INTERCEPT, TRUE_SLOPE, TRUE_VARIANCE, TRUE_LENGTHSCALE = 1.0, -0.6, 0.5, 25.0

data = bathymetry(real)
sea = (data.y < 0).nonzero().squeeze(-1)
cells = sea[torch.randperm(len(sea))[:num_cells]]
x, depth = data.x[cells], (-data.y[cells]).log()
depth = (depth - depth.mean()) / depth.std()

exact = Matern32(2, variance=number(TRUE_VARIANCE), lengthscale=number(TRUE_LENGTHSCALE))(x).detach()
surface = torch.linalg.cholesky(exact + 1e-8 * torch.eye(num_cells, dtype=real)) @ torch.randn(num_cells, dtype=real)
log_rate = TRUE_INTERCEPT + TRUE_SLOPE * depth + surface
catch = dist.Poisson(log_rate.exp()).sample()

# The cells are in random order: the first ones are the stations, the others make the map.
x_station, x_map = x[:num_stations], x[num_stations:]
depth_station, depth_map = depth[:num_stations], depth[num_stations:]
counts = catch[:num_stations]
print(f"{num_stations} stations, counts from {int(counts.min())} to {int(counts.max())}, mean {counts.mean():.1f}")


# %% [markdown]
# Poisson regression on depth alone, by Newton's method: its standard error knows nothing of the surface.

# %%
design = torch.stack([torch.ones_like(depth_station), depth_station], -1)
coef = torch.stack([counts.mean().log(), number(0.0)])
for _ in range(20):
    rate = (design @ coef).exp()
    factor = torch.linalg.cholesky(design.mT @ (rate[:, None] * design))
    coef = coef + torch.cholesky_solve((design.mT @ (counts - rate))[:, None], factor)[:, 0]
error = torch.cholesky_inverse(factor)[1, 1].sqrt()
print(f"slope without a surface: {coef[1]:.2f}, standard error {error:.2f}, truth {TRUE_SLOPE}")

# %% [markdown]
# ## The model
# The neighbor graph is built once, outside: an ordering of the sites (random by default) and, for each, its K nearest
# predecessors. Priors go onto the attributes of the kernel with `PyroSample`, as with any `PyroModule`. The
# kernel is an attribute of one root module, which names its sites `kernel.variance` and `kernel.lengthscale`; two
# kernels in one program would both call them `variance` and collide.
#
# Prediction belongs in the same program: given f at the stations, `sample_new` draws it at new places, jointly.


# %%
class Counts(PyroModule):
    def __init__(self, x, num_neighbors=20):
        super().__init__()
        self.graph = NeighborGraph(x, num_neighbors)
        self.kernel = Matern32(
            2,
            variance=PyroSample(dist.LogNormal(number(0.0), 1.0)),
            lengthscale=PyroSample(dist.LogNormal(number(20.0).log(), 1.0)),
        )
        self.intercept = PyroSample(dist.Normal(number(0.0), 2.0))
        self.slope = PyroSample(dist.Normal(number(0.0), 2.0))

    def forward(self, depth, counts=None, x_new=None, depth_new=None):
        intercept, slope = self.intercept, self.slope
        prior = NNGP(self.kernel, self.graph)
        f = pyro.sample("f", prior)
        with pyro.plate("stations", len(depth)):
            pyro.sample("counts", dist.Poisson((intercept + slope * depth + f).exp()), obs=counts)
        if x_new is not None:
            f_new = prior.sample_new(x_new, f)
            pyro.deterministic("log_rate_new", intercept + slope * depth_new + f_new)


# %% [markdown]
# ## Three guides
# `train` is plain Pyro. `TraceMeanField_ELBO` takes Kullback-Leibler divergences in closed form where they are known.


# %%
def train(model, guide, steps):
    start = time.perf_counter()
    optimizer = ClippedAdam({"lr": 0.03, "lrd": 0.1 ** (1 / steps)})
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
    for _ in range(steps):
        svi.step(depth_station, counts)
    seconds = time.perf_counter() - start
    return sum(svi.evaluate_loss(depth_station, counts) for _ in range(30)) / 30, seconds


initial = {
    "intercept": counts.mean().log(),
    "slope": number(0.0),
    "kernel.variance": number(1.0),
    "kernel.lengthscale": number(20.0),
    "f": torch.zeros(num_stations, dtype=real),
}

# %% [markdown]
# **1. `AutoNormal` as it comes.** Everything is independent of everything else in this guide. A smooth surface is the
# opposite of independent values, so the fit prefers a rough one: the lengthscale comes out far too short.

# %%
model = Counts(x_station)
plain = AutoNormal(model, init_loc_fn=init_to_value(values=initial))

# %% [markdown]
# **2. `AutoNormal` on white noise.** `NNGPReparam` writes f as a function of independent standard normals, one for
# each site; now independence costs little, and f follows the kernel when that moves. One line.

# %%
white_model = poutine.reparam(model, config={"f": NNGPReparam()})
white = AutoNormal(white_model, init_loc_fn=init_to_value(values=initial))


# %% [markdown]
# **3. `AutoNNGP`.** It finds out which sites are Gaussian and that the log rate is linear in them: the coefficients and
# the surface. Given the hyperparameters these have one joint Gaussian posterior, so that the surface gives back what a
# larger slope explains; the hyperparameters move the whole surface. It starts near its optimum, and takes 50 steps.

# %%
joint = AutoNNGP(model)

# %% [markdown]
# ## What they say
# `Predictive` draws from a guide and runs the program on: every draw has different coefficients, kernel and surface,
# and the map of each draw is one coherent surface.

# %%
runs = {
    "AutoNormal": (model, plain, num_steps),
    "AutoNormal, whitened": (white_model, white, num_steps),
    "AutoNNGP": (model, joint, 50),
}
maps, sites = {}, ["slope", "kernel.lengthscale", "log_rate_new"]
print(f"{'guide':22}{'-ELBO':>8}{'slope, 95 %':>18}{'lengthscale, 95 %':>20}{'map corr.':>11}{'seconds':>9}")
print(f"{'(truth)':22}{'':8}{TRUE_SLOPE:18.2f}{TRUE_LENGTHSCALE:20.1f}")
for name, (program, guide, steps) in runs.items():
    loss, seconds = train(program, guide, steps)
    predictive = Predictive(program, guide=guide, num_samples=num_draws, return_sites=sites)
    with torch.no_grad():
        draws = predictive(depth_station, None, x_map, depth_map)
    maps[name] = draws["log_rate_new"].reshape(num_draws, -1)
    correlation = torch.corrcoef(torch.stack([maps[name].mean(0), log_rate[num_stations:]]))[0, 1]
    ends = [draws[site].flatten().quantile(number([0.025, 0.975])).tolist() for site in sites[:2]]
    slope, lengthscale = (f"[{low:.2f}, {high:.2f}]" for low, high in ends)
    print(f"{name:22}{loss:8.0f}{slope:>18}{lengthscale:>20}{correlation:11.3f}{seconds:9.1f}")

# %% [markdown]
# `AutoNNGP` is ahead in the loss, and takes a fraction of the time. Its interval of the slope is wider than those of
# the others, which hold slope and surface independent, and its interval of the lengthscale is many times as wide. On
# ten sets of counts made like these, its 95 % intervals covered the slope eight times and the lengthscale ten times,
# those of the whitened `AutoNormal` five times and once (`benchmarks/results/spatial_counts.md`).
#
# ## ArviZ
# `to_arviz` takes a pair of model and guide as well as an MCMC run, with posterior predictive draws and pointwise log
# likelihoods, and writes NetCDF.

# %%
coefficients = ["intercept", "slope", "kernel.variance", "kernel.lengthscale"]
idata = to_arviz((model, joint), depth_station, counts, num_samples=num_draws, progress=False)
idata.to_netcdf(str(args.out / "svi.nc"))
print(az.summary(idata, var_names=coefficients, kind="stats"))

# %% [markdown]
# ## NUTS
# Hamiltonian Monte Carlo approximates nothing, and takes many small steps where values are strongly correlated.
# `QuickNUTS` takes them on operations that are recorded once, and with the guide in coordinates that are nearly
# independent: some fifteen gradients make a draw. The draws come from the posterior of the program, however good the
# guide is. This page takes one short chain; take four longer ones, and look at R-hat.

# %%
start = time.perf_counter()
kernel = QuickNUTS(model, guide=joint)
mcmc = MCMC(kernel, num_nuts_draws, warmup_steps=num_nuts_draws // 2, disable_progbar=True)
mcmc.run(depth_station, counts)
print(f"NUTS: {time.perf_counter() - start:.0f} s")
chains = to_arviz(mcmc, progress=False)
chains.to_netcdf(str(args.out / "nuts.nc"))
print(az.summary(chains, var_names=coefficients, kind="stats"))

# %% [markdown]
# ## Figure

# %%
draws = maps["AutoNNGP"]
panels = {
    "counts": (x_station, counts),
    "true log intensity": (x_map, log_rate[num_stations:]),
    "posterior mean": (x_map, draws.mean(0)),
    "posterior standard deviation": (x_map, draws.std(0)),
}
figure, axes = plt.subplots(1, 4, figsize=(20, 4), constrained_layout=True)
for axis, (title, (places, values)) in zip(axes, panels.items(), strict=True):
    shown = {"vmin": float(log_rate.min()), "vmax": float(log_rate.max())} if title in list(panels)[1:3] else {}
    figure.colorbar(axis.scatter(*places.T, c=values, s=6, **shown), ax=axis)
    axis.set(title=title, xlabel="east [km]", ylabel="north [km]")
figure.savefig(args.out / "map.png", dpi=110)
print(f"wrote map.png, svi.nc and nuts.nc to {args.out}/")

# %% [markdown]
# ## Did it work?
# The slope, and the map at cells without a station beside a map from depth alone.

# %%
slope = torch.as_tensor(idata.posterior["slope"].values).flatten()
low, high = slope.quantile(0.025).item(), slope.quantile(0.975).item()
truth = log_rate[num_stations:]
ours, alone = (float(torch.corrcoef(torch.stack([guess, truth]))[0, 1]) for guess in (draws.mean(0), -depth_map))
print(f"slope in [{low:.2f}, {high:.2f}]; correlation with the true map {ours:.3f}, of depth alone {alone:.3f}")
assert args.smoke or low < TRUE_SLOPE < high
assert ours > alone + 0.05
assert ours > (0.7 if args.smoke else 0.85)
