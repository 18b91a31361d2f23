# %% [markdown]
# # Everything sampled: a Bayesian sparse Gaussian process on a curved boundary
#
# A sparse Gaussian process summarizes a function by its values u at M inducing inputs z. Usually z and the
# hyperparameters are optimized and u gets a Gaussian approximation. The Bayesian sparse GP (Rossi et al. 2021) puts
# priors on all three and samples them together by stochastic-gradient Hamiltonian Monte Carlo. Predictions are averages
# over draws, so what is uncertain about the kernel and about the inducing inputs ends up in the predictive
# distribution, where it belongs.
#
# The data are two interleaved half moons with so much noise that they overlap. We look at convergence over several
# chains, at where the inducing inputs go under three priors, and at a second layer.
#
#     python tutorials/bayesian_sparse_gp.py [--out tutorial_output/bayesian_sparse_gp] [--smoke]

# %% tags=["hide-input"]
import argparse
import os
import warnings
from pathlib import Path

import arviz as az
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import init_to_sample
from sklearn.datasets import make_moons

from pyro_nngp.data import Standardizer, error_rate, nll
from pyro_nngp.hyperparameters import lognormal_priors
from pyro_nngp.inducing import Determinantal, Strauss
from pyro_nngp.inference import SGHMC, SGMCMC, to_arviz
from pyro_nngp.kernels import RBF
from pyro_nngp.likelihoods import Bernoulli
from pyro_nngp.models import BSGP

warnings.filterwarnings("ignore", "There is a performance drop")  # vmap calls log_ndtr chain by chain

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/bayesian_sparse_gp"), help="folder for results")
parser.add_argument("--smoke", action="store_true", help="short chains, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
burn_in, num_draws, thin, num_inducing = (150, 15, 3, 8) if args.smoke else (1500, 100, 15, 12)
pyro.set_rng_seed(0)

# %% [markdown]
# ## Data
# 400 points to train on and 1000 to test with, standardized, since the default prior of z is standard normal.

# %%
points, labels = (torch.as_tensor(part).double() for part in make_moons(1400, noise=0.3, random_state=0))
scaled = Standardizer(points[:400]).transform(points)
x, y, x_test, y_test = scaled[:400], labels[:400], scaled[400:], labels[400:]

# %% [markdown]
# ## One layer, several chains
# `lognormal_priors` replaces the kernel's parameters by priors with the medians of the paper. With a probit link the
# FITC likelihood has a closed form. Chains start at independent draws from the prior, which is farther apart than the
# posterior is wide: if they agree in the end, that says something. `SGMCMC` moves them side by side. Every update
# sees all 400 rows; with many more, `mcmc.run(Minibatch(N, B))` shows it B of them, others in each chain.


# %%
def classifier(**settings):
    kernel = lognormal_priors(RBF(2, lengthscale=torch.ones(2)), like=x)
    return BSGP(x, y, kernel, Bernoulli("probit"), inducing=num_inducing, **settings)


def run(gp, num_chains=1, init_strategy=None):
    init_strategy = gp.init_strategy if init_strategy is None else init_strategy
    kernel = SGHMC(gp.model, 0.03, num_steps=thin, init_strategy=init_strategy)
    mcmc = SGMCMC(kernel, num_draws, burn_in, num_chains, disable_progbar=True)
    mcmc.run()
    return mcmc


def scores(gp, samples):
    predictive = gp.predict(x_test, samples=samples)
    return float(nll(y_test, predictive)), float(error_rate(y_test, (predictive.mean > 0.5).double()))


shallow = classifier()
chains = run(shallow, 3, init_to_sample)
shallow_nll, shallow_error = scores(shallow, chains.get_samples())
print(f"one layer: test NLL {shallow_nll:.3f}, error {shallow_error:.3f}")
temperatures = chains.diagnostics()["configurational temperature"]
print("temperatures, 1 in an exact chain:", [round(value, 2) for value in temperatures.values()])

# %% [markdown]
# ## Have the chains met?
# Inducing points can trade places without changing anything, and a value of u means nothing without its z. So R-hat of
# single entries of u and z says little, and so does the warning of `SGMCMC` that these have not settled. What has to
# agree is the posterior of the function: `moments_by_draw` gives the mean of f at chosen points, and ArviZ the rest.
# The hyperparameters are in the export of `to_arviz`.

# %%
by_chain = chains.get_samples(group_by_chain=True)
probes = x_test[:25]
each = [{name: value[c] for name, value in by_chain.items()} for c in range(3)]
f = torch.stack([shallow.moments_by_draw(probes, samples=draws)[0] for draws in each])
predictive_draws = az.convert_to_dataset({"f": f.numpy()})
rhat, ess = az.rhat(predictive_draws)["f"].values, az.ess(predictive_draws)["f"].values
print(f"f at {len(probes)} points: R-hat {rhat.mean():.2f} on average, at most {rhat.max():.2f}; ESS {ess.mean():.0f}")
posterior = to_arviz(chains, posterior_predictive=False, log_likelihood=False, progress=False)
names = ["layers.0.kernel.lengthscale", "layers.0.kernel.variance"]
print(az.summary(posterior, var_names=names)[["mean", "sd", "r_hat", "ess_bulk"]])

# %% [markdown]
# ## Where the inducing inputs go
# The posterior of z, all draws of all points on one map, under three priors: standard normal, Strauss (close pairs cost
# a factor) and determinantal (the determinant of the matrix of their correlations). The last two keep the points apart.
# Both are improper on the plane, so they get a box.

# %%
box = dist.Uniform(torch.full((num_inducing, 2), -3.0).double(), 3.0).to_event(2)
priors = {
    "normal": "normal",
    "Strauss": lambda kernel, z: Strauss(box, radius=0.7, repulsion=0.2),
    "determinantal": lambda kernel, z: Determinantal(kernel, box),
}
figure, axes = plt.subplots(1, len(priors), figsize=(15, 4.6))
grid = torch.cartesian_prod(*[torch.linspace(-2.6, 2.6, 40, dtype=torch.float64)] * 2)
for axis, (name, prior) in zip(axes, priors.items(), strict=True):
    gp = classifier(inducing_prior=prior)
    samples = chains.get_samples() if name == "normal" else run(gp).get_samples()
    z = samples["layers.0.z"].flatten(0, 1)
    axis.hist2d(*z.mT.numpy(), bins=40, range=[[-2.6, 2.6]] * 2, cmap="Blues")
    axis.scatter(*x.mT.numpy(), c=y.numpy(), s=4, cmap="coolwarm", alpha=0.6)
    probability = gp.predict(grid, samples=samples).mean.reshape(40, 40)
    ticks = grid[::40, 0].numpy()
    axis.contour(ticks, ticks, probability.mT.numpy(), levels=[0.1, 0.5, 0.9], colors="black", linewidths=1)
    axis.set_title(f"{name} prior: test NLL {scores(gp, samples)[0]:.3f}")
figure.tight_layout()
figure.savefig(args.out / "inducing_inputs.png", dpi=120)

# %% [markdown]
# ## A second layer
# Two hidden functions warp the plane, and a process on the warped plane separates the classes. The hidden values are
# drawn anew at every update. One layer was enough here, and two should not be worse: the priors keep them from
# overfitting.

# %%
deep = classifier(num_layers=2)
deep_nll, deep_error = scores(deep, run(deep).get_samples())
print(f"two layers: test NLL {deep_nll:.3f}, error {deep_error:.3f}")

# %% [markdown]
# ## Results

# %%
if args.smoke:
    assert shallow_nll < 0.69, shallow_nll  # better than a coin
else:
    assert shallow_nll < 0.2, shallow_nll
    assert deep_nll < shallow_nll + 0.02, (deep_nll, shallow_nll)
    assert rhat.mean() < 1.1, rhat
