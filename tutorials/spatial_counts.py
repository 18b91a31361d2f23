# %% [markdown]
# # Counts in space: a nearest-neighbor Gaussian process inside your own Pyro program
#
# You have counts at many sites, a covariate, and neighbors that resemble each other more than the covariate explains.
# A Gaussian process takes up the rest, but its covariance matrix has N x N entries. A *nearest-neighbor* Gaussian
# process (NNGP) conditions each site on its K nearest predecessors in some ordering, so its density costs O(N K^3), and
# it is a proper distribution over the values at all sites: one `pyro.sample` statement.
#
# The sites are real, the sea floor of matplotlib's topography. The counts are simulated, so that we know the truth.
# Run as `python tutorials/spatial_counts.py [--out tutorial_output/spatial_counts] [--smoke]`.

# %%
import argparse
from pathlib import Path

import matplotlib as mpl
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample, pyro_method
from pyro.optim import ClippedAdam

from pyro_nngp.datasets import bathymetry
from pyro_nngp.distributions import NNGP, NNGPReparam
from pyro_nngp.guides import LocalGaussian
from pyro_nngp.inference import to_arviz
from pyro_nngp.kernels import Matern32
from pyro_nngp.neighbors import NeighborGraph

mpl.use("Agg")
import matplotlib.pyplot as plt

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/spatial_counts"))
parser.add_argument("--smoke", action="store_true", help="few sites and steps, to see that it runs")
args = parser.parse_args()
args.out.mkdir(parents=True, exist_ok=True)
pyro.set_rng_seed(0)

# %% [markdown]
# ## Sites, covariate, counts
# The covariate is log depth, standardised; inputs are in hundreds of kilometres. The truth: an intercept of 1, a slope
# of -0.5, and a smooth random surface, drawn from an NNGP with many neighbors, which is close to the exact process.

# %%
sea = bathymetry(torch.float64)
under = sea.y < -1
sites = torch.randperm(int(under.sum()))[: 400 if args.smoke else 2_000]
x, depth = sea.x[under][sites] / 100, (-sea.y[under][sites]).log()
depth = (depth - depth.mean()) / depth.std()
true_slope, true_kernel = -0.5, Matern32(2, variance=0.4, lengthscale=0.5).double()
surface = NNGP(true_kernel, NeighborGraph(x, 60)).sample()
counts = dist.Poisson((1 + true_slope * depth + surface).exp()).sample()


# %% [markdown]
# ## The model
# The graph is built once, outside. Priors go onto the attributes of the kernel with `PyroSample`, as onto those of any
# PyroModule; the kernel is an attribute of one root module, which gives its sites their names.


# %%
def positive(median):
    return PyroSample(dist.LogNormal(torch.tensor(median, dtype=torch.float64).log(), 0.7))


class SpatialCounts(PyroModule):
    def __init__(self, x, depth, num_neighbors=15):
        super().__init__()
        self.graph, self.depth = NeighborGraph(x, num_neighbors), depth
        self.kernel = Matern32(2, variance=positive(0.5), lengthscale=positive(0.5))
        self.intercept = PyroSample(dist.Normal(torch.zeros((), dtype=torch.float64), 2.0))
        self.slope = PyroSample(dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))

    def forward(self, counts=None):
        trend = self.intercept + self.slope * self.depth
        f = pyro.sample("f", NNGP(self.kernel, self.graph))
        log_rate = pyro.deterministic("log_rate", trend + f)
        with pyro.plate("sites", len(self.depth)):
            return pyro.sample("counts", dist.Poisson(log_rate.exp()), obs=counts)


# %% [markdown]
# ## Variational inference
# The four numbers get an AutoGuide. The values of f get a Gaussian whose covariance has a sparse Cholesky factor, so
# that neighbors may vary together; its divergence from the NNGP is known in closed form, and `TraceMeanField_ELBO`
# uses it. With an empty pattern (`LocalGaussian(len(x))`) it would be a mean-field guide.


# %%
model = SpatialCounts(x, depth)


class Guide(PyroModule):
    def __init__(self):
        super().__init__()
        self.numbers = AutoNormal(poutine.block(model, hide=["f", "log_rate", "counts"]), init_scale=0.05)
        pattern = model.graph.neighbors[:, :8].clone()
        self.surface = LocalGaussian(len(x), pattern, scale=0.2, like=x)

    @pyro_method
    def forward(self, counts=None):
        self.numbers(counts)
        pyro.sample("f", self.surface.distribution())


guide = Guide()
num_steps = 250 if args.smoke else 2_000
optimizer = ClippedAdam({"lr": 0.03, "lrd": 0.1 ** (1 / num_steps)})
svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
losses = torch.tensor([svi.step(counts) for _ in range(num_steps)])
print(f"SVI: loss {losses[:20].mean():.0f} at the start, {losses[-20:].mean():.0f} at the end")

idata = to_arviz((model, guide), counts, num_samples=100, var_names=["~f"], losses=losses, progress=False)
posterior = idata.posterior
log_rate = torch.as_tensor(posterior["log_rate"].mean(("chain", "draw")).values)
truth = 1 + true_slope * depth + surface
correlation = float(torch.corrcoef(torch.stack([log_rate, truth]))[0, 1])
plain = float(torch.corrcoef(torch.stack([(counts + 0.5).log(), truth]))[0, 1])
print(f"correlation with the true log intensity: {correlation:.3f}; of the log counts themselves: {plain:.3f}")
idata.to_netcdf(str(args.out / "svi.nc"))

# %% [markdown]
# ## NUTS on a part of the data
# Hamiltonian Monte Carlo knows no independence assumptions, but walks badly on strongly correlated values.
# `NNGPReparam` gives it white noise instead and colors it inside the model. Here it runs on some of the sites.

# %%
few = torch.arange(60 if args.smoke else 200)
small = SpatialCounts(x[few], depth[few], num_neighbors=10)
whitened = poutine.reparam(small, config={"f": NNGPReparam()})
draws = 60 if args.smoke else 200
mcmc = MCMC(NUTS(whitened, max_tree_depth=6), num_samples=draws, warmup_steps=draws, disable_progbar=True)
mcmc.run(counts[few])
slope = mcmc.get_samples()["slope"]
lower, upper = slope.quantile(0.005).item(), slope.quantile(0.995).item()
print(
    f"NUTS on {len(few)} sites: slope {slope.mean():.2f}, 99 % interval [{lower:.2f}, {upper:.2f}], truth {true_slope}"
)

# %% [markdown]
# ## Prediction at new sites
# `Predictive` gives draws of f at the sites; `sample_new` extends each of them to new places. The draws are joint: in
# each of them f is one smooth surface, so sums and maxima over the map have honest uncertainty.

# %%
rest = torch.randperm(int(under.sum()))[:500]
x_new = sea.x[under][rest] / 100
f = Predictive(model, guide=guide, num_samples=30)(counts)["f"].reshape(30, -1)
with torch.no_grad():
    kernel = Matern32(2, **{name: guide.numbers.median()[f"kernel.{name}"] for name in ("variance", "lengthscale")})
    f_new = NNGP(kernel.double(), model.graph).sample_new(x_new, f)

figure, axes = plt.subplots(1, 3, figsize=(16, 4.5), constrained_layout=True)
for axis, (title, places, values) in zip(
    axes,
    [
        ("true log intensity", x, truth),
        ("posterior mean of the log intensity", x, log_rate),
        ("one joint draw of f at new sites", x_new, f_new[0]),
    ],
    strict=True,
):
    axis.set(title=title, xlabel="100 km east", ylabel="100 km north")
    figure.colorbar(axis.scatter(*places.T, c=values, s=8), ax=axis)
figure.savefig(args.out / "intensity.png", dpi=110)
print(f"wrote svi.nc and intensity.png to {args.out}/")

# %%
assert correlation > plain + 0.02, f"smoothing should beat the counts themselves: {correlation:.3f} against {plain:.3f}"
assert correlation > (0.6 if args.smoke else 0.75)
assert lower < true_slope < upper
