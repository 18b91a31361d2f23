"""Bayesian optimization with NearestNeighborModel and with BoTorch's SingleTaskGP: regret and seconds.

Both models get the same first points, the same candidates and the same acquisition, and train on all observations
before each batch: SingleTaskGP anew, as BoTorch does, Vecchia by extend and 100 steps of fit. Lengthscales have
the same priors in both; the noise of Vecchia has one of the same kind, lower, relative to the variance of y.

    python benchmarks/accuracy/bayesian_optimization.py hartmann --seeds 2
    python benchmarks/accuracy/bayesian_optimization.py ackley --seeds 2
    python benchmarks/accuracy/bayesian_optimization.py candidates
"""

import argparse
import math
import time
import warnings

import pyro.distributions as dist
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.generation import MaxPosteriorSampling
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Ackley, Hartmann
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.mlls import ExactMarginalLogLikelihood
from pyro.nn import PyroSample

import pyro_nngp as nngp
from pyro_nngp.adapters.botorch import NearestNeighborModel
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian

F64 = torch.float64


def problem(name):
    """The function to maximize on the unit cube, its dimension and its maximum."""
    function = Hartmann(6, negate=True) if name == "hartmann" else Ackley(20, bounds=[(-5.0, 10.0)] * 20, negate=True)
    low, high = function.bounds.to(F64)
    return lambda x: function(low + (high - low) * x)[:, None], function.dim, function.optimal_value


def lognormal(loc, scale):
    return dist.LogNormal(torch.tensor(loc, dtype=F64), torch.tensor(scale, dtype=F64))


class Nearest:
    """Vecchia, with the priors of SingleTaskGP on lengthscales and noise, extended batch by batch."""

    def __init__(self, x, y):
        dim, level = x.shape[1], y.var().log().item()
        lengthscale = lognormal(math.sqrt(2) + math.log(dim) / 2, math.sqrt(3)).expand([dim]).to_event(1)
        kernel = Matern52(dim, variance=PyroSample(lognormal(level, 1.0)), lengthscale=PyroSample(lengthscale))
        self.gp = nngp.Vecchia(x, y[:, 0], kernel, Gaussian(PyroSample(lognormal(level - 8, 1.0))))
        self.steps = None

    def extend(self, x, y):
        self.gp.extend(x, y[:, 0])

    def train(self):
        nngp.fit(self.gp, self.steps, progress=False)
        self.steps = 100
        return NearestNeighborModel(self.gp)


class Exact:
    """SingleTaskGP with its defaults, built on all observations each time."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def extend(self, x, y):
        self.x, self.y = torch.cat([self.x, x]), torch.cat([self.y, y])

    def train(self):
        model = SingleTaskGP(self.x, self.y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model


def cube(dim):
    return torch.stack([torch.zeros(dim, dtype=F64), torch.ones(dim, dtype=F64)])


def improvement(model, best, dim, batch, seed, best_x):
    """The next batch by expected improvement."""
    acquisition = qLogExpectedImprovement(model, best_f=best)
    return optimize_acqf(acquisition, cube(dim), q=batch, num_restarts=4, raw_samples=128, sequential=True)[0]


def thompson(model, best, dim, batch, seed, best_x, count=2000):
    """The next batch by Thompson sampling: half of the candidates near the best point, in some of its coordinates."""
    candidates = draw_sobol_samples(cube(dim), count, 1, seed=seed)[:, 0]
    near = count // 2
    moved = best_x + 0.1 * torch.randn(near, dim, dtype=F64)
    some = torch.rand(near, dim) < min(1.0, 5 / dim)
    candidates[:near] = torch.where(some, moved, best_x).clamp(0, 1)
    with torch.no_grad():
        return MaxPosteriorSampling(model, replacement=False)(candidates, num_samples=batch)


def optimize(kind, name, acquire, first, batch, total, seed):
    """Best value after each batch, and processor seconds in training and in acquisition."""
    function, dim, _ = problem(name)
    torch.manual_seed(seed)
    x = draw_sobol_samples(cube(dim), first, 1, seed=seed)[:, 0]
    y = function(x)
    optimizer, best, training, acquiring = kind(x, y), [y.max().item()], 0.0, 0.0
    while len(x) < total:
        begin = time.process_time()
        model = optimizer.train()
        middle = time.process_time()
        new = acquire(model, y.max(), dim, batch, seed + len(x), x[y.argmax()])
        training, acquiring = training + middle - begin, acquiring + time.process_time() - middle
        values = function(new)
        optimizer.extend(new, values)
        x, y = torch.cat([x, new]), torch.cat([y, values])
        best.append(y.max().item())
    return best, training, acquiring


def table(name, seeds):
    settings = {"hartmann": (improvement, 20, 4, 80), "ackley": (thompson, 40, 20, 240)}[name]
    optimum = problem(name)[2]
    print(f"| {name} | regret halfway: better seed | regret at the end: range | s training | s acquisition |")
    print("|---|---|---|---|---|")
    for kind in (Nearest, Exact):
        runs = [optimize(kind, name, *settings, seed) for seed in range(seeds)]
        regret = optimum - torch.tensor([best for best, _, _ in runs], dtype=F64)
        seconds = torch.tensor([times for _, *times in runs]).median(0).values
        end, half = regret[:, -1], regret[:, regret.shape[1] // 2]
        label = "NearestNeighborModel(Vecchia)" if kind is Nearest else "SingleTaskGP"
        print(
            f"| `{label}` | {half.min():.3f} | {end.min():.3f} - {end.max():.3f} "
            f"| {seconds[0]:.1f} | {seconds[1]:.1f} |",
            flush=True,
        )


def candidates():
    """Seconds for one joint draw at many candidates, from 500 observations of the 20-dimensional function."""
    function, dim, _ = problem("ackley")
    x = torch.rand(500, dim, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = function(x)
    models = {"NearestNeighborModel(Vecchia)": Nearest(x, y).train(), "SingleTaskGP": Exact(x, y).train()}
    print("| candidates | " + " | ".join(f"`{name}`, s" for name in models) + " |\n|---|---|---|")
    for count in (1_000, 4_000, 100_000):
        row = []
        for name, model in models.items():
            if name == "SingleTaskGP" and count > 10_000:
                row.append("does not fit (80 GB)")
                continue
            at, begin = torch.rand(count, dim, dtype=F64), time.process_time()
            with torch.no_grad():
                MaxPosteriorSampling(model)(at, num_samples=1)
            row.append(f"{time.process_time() - begin:.2f}")
        print(f"| {count:,} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["hartmann", "ackley", "candidates"])
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if arguments.what == "candidates":
        candidates()
    else:
        table(arguments.what, arguments.seeds)
