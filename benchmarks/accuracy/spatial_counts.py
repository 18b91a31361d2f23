"""Guides on the model of the tutorial spatial_counts: ELBO, and coverage of 95 % intervals.

Poisson counts at 600 places off the coast of Washington, log rate intercept + slope * log depth + f. Places, depths,
priors, starts and the truth (intercept 1, slope -0.6, variance 0.5, lengthscale 25 km) are those of the tutorial; for
each data set the places are chosen anew and f is drawn from the exact process. Guides:

    AutoNNGP             50 steps of SVI from its own start
    AutoNormal, AutoLowRankMultivariateNormal, and AutoNormal on white values (NNGPReparam)
    by hand              a sparse Cholesky factor for f that moves with the coefficients by learned weights

All but AutoNNGP take 1,200 steps, TraceMeanField_ELBO and the tutorial's learning rate. The ELBO is the mean of 100
values of Trace_ELBO; intervals are quantiles of 500 draws. Coverage of f is the share of the 600 values.

Usage: python benchmarks/accuracy/spatial_counts.py [--sets 10] [--guides ...] [--rows FILE.csv]
"""

import argparse
import time
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoNormal, init_to_value
from pyro.nn import PyroModule, PyroParam
from pyro.optim import ClippedAdam
from rows import append, read  # beside this file
from torch.distributions import constraints

from pyro_nngp import NNGP, AutoNNGP, NeighborGraph, NNGPReparam
from pyro_nngp.data import bathymetry
from pyro_nngp.distributions import SparseCholeskyNormal
from pyro_nngp.hyperparameters.reading import parameter_site
from pyro_nngp.kernels import Matern32
from pyro_nngp.variational import LocalGaussian

NUM_PLACES, NEIGHBORS, STEPS = 600, 20, 1200
TRUTH = {"intercept": 1.0, "slope": -0.6, "variance": 0.5, "lengthscale": 25.0}


def number(value):
    return torch.tensor(float(value))


class Problem:
    """A data set with its truth and its program."""

    def __init__(self, seed):
        pyro.set_rng_seed(seed)
        data = bathymetry(torch.float64)
        sea = (data.y < 0).nonzero().squeeze(-1)
        depth = (-data.y[sea]).log()
        chosen = torch.randperm(len(sea))[:NUM_PLACES]
        x, self.depth = data.x[sea[chosen]], ((depth - depth.mean()) / depth.std())[chosen]
        kernel = Matern32(2, variance=number(TRUTH["variance"]), lengthscale=number(TRUTH["lengthscale"]))
        self.f = torch.linalg.cholesky(kernel(x).detach() + 1e-8 * torch.eye(len(x))) @ torch.randn(len(x))
        self.counts = torch.poisson((TRUTH["intercept"] + TRUTH["slope"] * self.depth + self.f).exp())
        self.graph = NeighborGraph(x, NEIGHBORS)
        starts = {"intercept": self.counts.mean().log(), "slope": number(0), "f": torch.zeros(len(x))}
        self.starts = starts | {"variance": number(1), "lengthscale": number(20)}

    def model(self):
        variance = pyro.sample("variance", dist.LogNormal(number(0), 1.0))
        lengthscale = pyro.sample("lengthscale", dist.LogNormal(number(20).log(), 1.0))
        intercept = pyro.sample("intercept", dist.Normal(number(0), 2.0))
        slope = pyro.sample("slope", dist.Normal(number(0), 2.0))
        f = pyro.sample("f", NNGP(Matern32(2, variance=variance, lengthscale=lengthscale), self.graph))
        with pyro.plate("places", len(self.depth)):
            pyro.sample("counts", dist.Poisson((intercept + slope * self.depth + f).exp()), obs=self.counts)


class ByHand(PyroModule):
    """The posterior of f given hyperparameters is not known: f has a sparse Cholesky factor of its own."""

    def __init__(self, problem, num_columns=5):
        super().__init__()
        starts, depth = problem.starts, problem.depth
        self.kernel_loc = torch.nn.Parameter(torch.stack([starts["lengthscale"].log(), starts["variance"].log()]))
        self.kernel_scale = PyroParam(torch.full((2,), 0.1), constraints.positive)
        self.coef_loc = torch.nn.Parameter(torch.stack([starts["intercept"], starts["slope"]]))
        self.coef_scale = PyroParam(torch.full((2,), 0.1), constraints.positive)
        self.tilt = torch.nn.Parameter(-torch.stack([torch.ones_like(depth), depth]))
        self.f = LocalGaussian(len(depth), problem.graph.neighbors[:, :num_columns], scale=0.3, like=depth)

    def forward(self):
        pyro.sample("variance", dist.LogNormal(self.kernel_loc[1], self.kernel_scale[1]))
        pyro.sample("lengthscale", dist.LogNormal(self.kernel_loc[0], self.kernel_scale[0]))
        intercept = pyro.sample("intercept", dist.Normal(self.coef_loc[0], self.coef_scale[0]))
        slope = pyro.sample("slope", dist.Normal(self.coef_loc[1], self.coef_scale[1]))
        moved = (torch.stack([intercept, slope]) - self.coef_loc) @ self.tilt
        q = self.f.distribution(read=parameter_site)
        pyro.sample("f", SparseCholeskyNormal(q.loc + moved, q.scale, q.weights, q.pattern))


def auto(kind, whitened=False):
    def make(problem):
        program = problem.model
        if whitened:
            program = poutine.reparam(program, config={"f": NNGPReparam()})
        return program, kind(program, init_loc_fn=init_to_value(values=problem.starts))

    return make


GUIDES = {
    "AutoNNGP": lambda problem: (problem.model, AutoNNGP(problem.model)),
    "by hand": lambda problem: (problem.model, ByHand(problem)),
    "AutoNormal, whitened": auto(AutoNormal, whitened=True),
    "AutoLowRankMultivariateNormal": auto(AutoLowRankMultivariateNormal),
    "AutoNormal": auto(AutoNormal),
}


def row(seed, name):
    """Minus the ELBO, processor seconds, and which intervals cover."""
    problem = Problem(seed)
    pyro.clear_param_store()
    start = time.process_time()
    program, guide = GUIDES[name](problem)
    steps, rate, elbo = (50, 0.02, Trace_ELBO()) if name == "AutoNNGP" else (STEPS, 0.03, TraceMeanField_ELBO())
    svi = SVI(program, guide, ClippedAdam({"lr": rate, "lrd": 0.1 ** (1 / steps)}), elbo)
    for _ in range(steps):
        svi.step()
    seconds = time.process_time() - start
    plain = SVI(program, guide, ClippedAdam({}), Trace_ELBO())
    with torch.no_grad():
        loss = sum(plain.evaluate_loss() for _ in range(100)) / 100
        draws = Predictive(program, guide=guide, num_samples=500, return_sites=[*TRUTH, "f"])()
    found = {"guide": name, "seed": seed, "loss": loss, "seconds": seconds}
    for site, truth in (TRUTH | {"f": problem.f}).items():
        ends = draws[site].reshape(500, -1).quantile(torch.tensor([0.025, 0.975]), dim=0)
        found[site] = ((ends[0] <= truth) & (truth <= ends[1])).double().mean().item()
        found[f"{site} width"] = (ends[1] - ends[0]).mean().item()
    return found


def table(rows):
    names = [*TRUTH, "f"]
    header = ["guide", "sets", "- ELBO", *(f"{name}, width" for name in names), "seconds"]
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for guide in GUIDES:
        own = [row for row in rows if row["guide"] == guide]
        if own:
            mean = {key: sum(float(row[key]) for row in own) / len(own) for key in own[0] if key != "guide"}
            cells = [f"{100 * mean[name]:.0f} %, {mean[f'{name} width']:.2g}" for name in names]
            shown = [guide, str(len(own)), f"{mean['loss']:.1f}", *cells, f"{mean['seconds']:.1f}"]
            print(f"| {' | '.join(shown)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", type=int, default=10)
    parser.add_argument("--guides", nargs="+", choices=GUIDES, default=list(GUIDES))
    parser.add_argument("--rows", type=Path, default=Path("spatial_counts.csv"))
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    done = {(each["guide"], int(each["seed"])) for each in read(args.rows)}
    for seed in range(args.sets):
        for name in args.guides:
            if (name, seed) not in done:
                found = row(seed, name)
                append(args.rows, list(found), found)
    table(read(args.rows))
