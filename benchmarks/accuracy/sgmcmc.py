"""Stochastic-gradient MCMC of nearest-neighbor processes: coverage, NUTS, and response models of many rows.

    y_i ~ Poisson(exp(intercept + f(x_i))),   or   Normal(intercept + f(x_i), noise),   i = 1..N

at random points in the unit square, f a Matérn-3/2 process with 10 neighbors. Intercept, hyperparameters and f are
drawn from the program anew for each data set: intervals of an exact posterior then cover at their nominal rate.

``coverage``: 95 % intervals of SGHMC with an AutoNNGP guide that is not trained, four chains; of intercept + f the
share over all points. ``nuts``: the ratios of posterior standard deviations to those of QuickNUTS with the same guide,
and distances of means in these. ``noise``: the noise that the data of ``coverage`` drew, in standard errors of its
standard deviation, beside the errors of the posterior means in the rows. ``response``: SGHMC with control variates on
``Vecchia.model``, starting from ``fit``. Seconds are of the processor, one thread.

Usage: python benchmarks/accuracy/sgmcmc.py [coverage|nuts|noise|response ...] [--points 10000] [--batch 2000]
    [--seeds 0 1] [--rows FILE.csv]
"""

import argparse
import statistics
import time
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, Predictive
from pyro.infer.autoguide import init_to_value
from pyro.nn import PyroSample
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from rows import append, commit, read  # beside this file

from pyro_nngp import NNGP, AutoNNGP, NeighborGraph, Vecchia, fit
from pyro_nngp.inference import SGHMC, SGMCMC, Minibatch, QuickNUTS
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Gaussian

KINDS, NEIGHBORS, CHAINS, PREDICTOR = ("Poisson", "Gaussian"), 10, 4, "intercept + f"
PRIORS = {
    "intercept": lambda: dist.Normal(number(0.5), 1.0),
    "variance": lambda: dist.LogNormal(number(0.5).log(), 0.5),
    "lengthscale": lambda: dist.LogNormal(number(0.2).log(), 0.4),
    "noise": lambda: dist.LogNormal(number(0.5).log(), 0.5),
}
RESPONSE = {"kernel.variance": 1.0, "kernel.lengthscale": 0.3, "likelihood.variance": 0.25}
FIELDS = ["part", "kind", "N", "B", "seed", "name", "truth", "mean", "sd", "rhat", "ess", "other", "seconds"]


def number(value):
    return torch.tensor(float(value))


class Problem:
    """A data set, its truth and its program, on the rows of a minibatch."""

    def __init__(self, kind, num_points, seed):
        pyro.set_rng_seed(seed)
        self.x, self.kind = torch.rand(num_points, 2), kind
        names = [name for name in PRIORS if name != "noise" or kind == "Gaussian"]
        self.truth = {name: PRIORS[name]().sample() for name in names}
        kernel = Matern32(2, variance=self.truth["variance"], lengthscale=self.truth["lengthscale"])
        self.names, self.graph = names, NeighborGraph(self.x, NEIGHBORS)
        self.truth[PREDICTOR] = predictor = self.truth["intercept"] + NNGP(kernel, self.graph).sample()
        self.y = self.observation(predictor, self.truth.get("noise")).sample()

    def observation(self, predictor, noise):
        return dist.Poisson(predictor.exp()) if self.kind == "Poisson" else dist.Normal(predictor, noise)

    def model(self, idx):
        values = {name: pyro.sample(name, PRIORS[name]()) for name in self.names}
        kernel = Matern32(2, variance=values["variance"], lengthscale=values["lengthscale"])
        f = pyro.sample("f", NNGP(kernel, self.graph))
        with pyro.plate("points", len(self.x), subsample=idx):
            y = self.observation(values["intercept"] + f[idx], values.get("noise"))
            pyro.sample("y", y, obs=self.y[idx])


def sghmc(problem, args):
    """Draws by site, (chains, draws, ...), processor seconds of guide and run, and the diagnostics."""
    start, guide = time.process_time(), AutoNNGP(problem.model)
    kernel = SGHMC(problem.model, guide=guide, num_steps=args.steps)
    mcmc = SGMCMC(kernel, args.draws, args.warmup, CHAINS, disable_progbar=True)
    with pyro.validation_enabled(False):
        kernel.model.prepare(torch.arange(len(problem.x)))
        prepared = time.process_time()
        mcmc.run(Minibatch(len(problem.x), args.batch))
    seconds = time.process_time() - start
    print(f"guide and map {prepared - start:.0f} s, all {seconds:.0f} s", kernel.diagnostics(), flush=True)
    draws = Predictive(kernel.model, mcmc.get_samples())(torch.arange(10))
    return by_name({name: values.reshape(CHAINS, args.draws, -1) for name, values in draws.items()}), seconds, guide


def by_name(draws):
    """Draws of numbers, (chains, draws), and of intercept + f, (chains, draws, N)."""
    found = {name: draws[name].squeeze(-1) for name in PRIORS if name in draws}
    return found | {PREDICTOR: draws["intercept"] + draws["f"]}


def summary(draws):
    """Mean, standard deviation, R-hat (the worst) and effective size (the median)."""
    rhat, size = split_gelman_rubin(draws), effective_sample_size(draws)
    return draws.mean((0, 1)), draws.std((0, 1)), float(rhat.max()), float(size.median())


def coverage(args):
    done = {(row["kind"], row["N"], row["seed"]) for row in read(args.rows) if row["part"] == "coverage"}
    for seed in args.seeds:
        for kind in args.kinds:
            if (kind, str(args.points), str(seed)) in done:
                continue
            problem = Problem(kind, args.points, seed)
            draws, seconds, _ = sghmc(problem, args)
            for name, truth in problem.truth.items():
                mean, sd, rhat, size = summary(draws[name])
                low, high = draws[name].flatten(0, 1).quantile(torch.tensor([0.025, 0.975]), dim=0)
                inside = float(((low <= truth) & (truth <= high)).double().mean())
                numbers = {"truth": truth.double().mean(), "mean": mean.mean(), "sd": sd.mean(), "other": inside}
                save(args, "coverage", kind, seed, name, rhat, size, seconds, numbers)


def print_coverage(path):
    """Shares of intervals that cover, and medians over data sets."""
    rows = [row for row in read(path) if row["part"] == "coverage"]
    print("| data | sets | | cover | error / sd | R-hat | n_eff | s |\n|---|---|---|---|---|---|---|---|")
    for kind, name in sorted({(row["kind"], row["name"]) for row in rows}):
        own = [row for row in rows if (row["kind"], row["name"]) == (kind, name)]
        cover = statistics.mean(float(row["other"]) for row in own)
        errors = [(float(row["mean"]) - float(row["truth"])) / float(row["sd"]) for row in own]
        of_sd = "" if name == PREDICTOR else f"{statistics.fmean(error**2 for error in errors) ** 0.5:.2f}"
        rhat, size, seconds = (statistics.median(float(row[key]) for row in own) for key in ("rhat", "ess", "seconds"))
        print(f"| {kind} | {len(own)} | {name} | {cover:.3f} | {of_sd} | {rhat:.2f} | {size:.0f} | {seconds:.0f} |")


def beside_nuts(args):
    for seed in args.seeds:
        for kind in args.kinds:
            problem = Problem(kind, args.points, seed)
            draws, seconds, guide = sghmc(problem, args)
            start, rows = time.process_time(), torch.arange(args.points)
            kernel = QuickNUTS(problem.model, guide=guide)
            mcmc = MCMC(kernel, args.nuts_draws, 150, disable_progbar=True)
            mcmc.run(rows)
            print(f"NUTS {time.process_time() - start:.0f} s", flush=True)
            theirs = Predictive(kernel.model, mcmc.get_samples())(rows)
            theirs = by_name({name: values.reshape(1, args.nuts_draws, -1) for name, values in theirs.items()})
            for name, truth in problem.truth.items():
                mean, sd, rhat, size = summary(draws[name])
                other = theirs[name][0]
                numbers = {"truth": truth.double().mean(), "mean": ((mean - other.mean(0)) / other.std(0)).abs().mean()}
                numbers |= {"sd": sd.mean(), "other": (sd / other.std(0)).mean()}
                save(args, "nuts", kind, seed, name, rhat, size, seconds, numbers)


def drawn_noise(args):
    """Root mean squares of errors in standard deviations: of drawn from true noise, and of means from both."""
    rows = {row["seed"]: row for row in read(args.rows) if (row["part"], row["name"]) == ("coverage", "noise")}
    errors = []
    for seed, row in rows.items():
        problem = Problem("Gaussian", int(row["N"]), int(seed))
        truth, drawn = float(problem.truth["noise"]), float((problem.y - problem.truth[PREDICTOR]).double().std())
        mean, sd = float(row["mean"]), float(row["sd"])
        of_sample = (drawn / truth - 1) * (2 * len(problem.y)) ** 0.5
        errors.append((of_sample, (mean - truth) / sd, (mean - drawn) / sd))
    sizes = [statistics.fmean(error**2 for error in column) ** 0.5 for column in zip(*errors, strict=True)]
    print("drawn {:.2f} from the truth; posterior means {:.2f} from the truth, {:.2f} from drawn".format(*sizes))


def response(args):
    """Vecchia's response model at points of one density, whatever N."""
    for seed in args.seeds:
        pyro.set_rng_seed(seed)
        x = torch.rand(args.points, 2) * (args.points / 1000) ** 0.5
        kernel = Matern32(2, variance=number(1.0), lengthscale=number(0.3))
        y = NNGP(kernel, NeighborGraph(x, NEIGHBORS)).sample() + 0.5 * torch.randn(args.points)
        kernel, likelihood = Matern32(2), Gaussian()
        kernel.variance, kernel.lengthscale = (
            PyroSample(dist.LogNormal(0.0, 1.0)),
            PyroSample(dist.LogNormal(-1.0, 1.0)),
        )
        likelihood.variance = PyroSample(dist.LogNormal(-1.0, 1.0))
        start = time.process_time()
        gp = Vecchia(x, y, kernel, likelihood, num_neighbors=NEIGHBORS)
        fit(gp, num_steps=300, batch_size=args.batch, progress=False)
        fitted = time.process_time()
        sites = ("kernel.variance", "kernel.lengthscale", "likelihood.variance")
        medians = dict(zip(sites, gp.hyper_guide.medians().values(), strict=True))
        values = {name: value.detach() for name, value in medians.items()}
        sampler = SGHMC(gp.model, control_variates=True, init_strategy=init_to_value(values=values))
        mcmc = SGMCMC(sampler, args.draws, args.warmup, CHAINS, disable_progbar=True)
        mcmc.run(Minibatch(args.points, args.batch))
        seconds = time.process_time() - start
        print(f"fit {fitted - start:.0f} s, all {seconds:.0f} s", sampler.diagnostics(), flush=True)
        draws_by_name = mcmc.get_samples(group_by_chain=True)
        means = {name: summary(draws)[0] for name, draws in draws_by_name.items()}
        gain = log_density(gp.x, gp.y, means) - log_density(gp.x, gp.y, RESPONSE)
        print(f"log density of all rows at the means less that at the values of the simulation: {gain:.1f}", flush=True)
        for name, draws in draws_by_name.items():
            mean, sd, rhat, size = summary(draws)
            save(args, "response", "Vecchia", seed, name, rhat, size, seconds,
                 {"truth": RESPONSE[name], "mean": mean, "sd": sd, "other": (RESPONSE[name] - mean) / sd})  # fmt: skip


def log_density(x, y, values):
    """Log density of all rows in the response model."""
    variance, lengthscale, noise = (torch.as_tensor(values[name]) for name in RESPONSE)
    gp = Vecchia(
        x, y, Matern32(2, variance=variance, lengthscale=lengthscale), Gaussian(noise), num_neighbors=NEIGHBORS
    )
    return float(gp.log_prob(50_000))


def save(args, part, kind, seed, name, rhat, size, seconds, numbers):
    row = {"part": part, "kind": kind, "N": args.points, "B": args.batch, "seed": seed, "name": name}
    row |= {key: f"{float(value):.4g}" for key, value in numbers.items()}
    row |= {"rhat": f"{rhat:.3f}", "ess": f"{size:.0f}", "seconds": f"{seconds:.0f}"}
    append(args.rows, FIELDS, row)
    print(row, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parts = {"coverage": coverage, "nuts": beside_nuts, "noise": drawn_noise, "response": response}
    parser.add_argument("parts", nargs="*", default=["coverage"])
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=2_000)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--nuts-draws", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", type=Path, default=Path("sgmcmc.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"Commit {commit()}, torch {torch.__version__}, one thread.", flush=True)
    for part in args.parts:
        parts[part](args)
    print_coverage(args.rows)


if __name__ == "__main__":
    main()
