"""Twelve programs with processes inside: AutoNNGP beside QuickNUTS on the same program and data.

Sixty random points in the unit square, processes of Matérn-3/2 kernels with ten neighbors; data of each program are
drawn from it. AutoNNGP takes 100 steps of SVI; QuickNUTS 300 + 500 iterations, which is the reference. Of each number
of each site, each value of a process among them: distances of means in standard deviations of the reference, and ratios
of standard deviations; the table has the largest distance and the range of the ratios. Seconds are of the processor.

Usage: python benchmarks/accuracy/programs.py [NAME ...] [--seeds 0 1 2] [--rows FILE.csv]
"""

import argparse
import time
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from pyro.optim import ClippedAdam
from rows import append, commit, read  # beside this file

from pyro_nngp import NNGP, AutoNNGP, NeighborGraph
from pyro_nngp.inference import QuickNUTS
from pyro_nngp.kernels import Matern32

POINTS, NEIGHBORS, GROUPS, STEPS, WARMUP, DRAWS = 60, 10, 6, 100, 300, 500
FIELDS = ["program", "seed", "khat", "warned", "distance", "least", "largest", "seconds", "nuts"]
GENERATOR = torch.Generator().manual_seed(1)
X = torch.rand(POINTS, 2, generator=GENERATOR, dtype=torch.float64)
Z = torch.randn(POINTS, generator=GENERATOR, dtype=torch.float64)
COLUMNS = 12
W = torch.randn(POINTS, COLUMNS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
GROUP = torch.randint(0, GROUPS, (POINTS,), generator=GENERATOR)
GRAPH = NeighborGraph(X, NEIGHBORS)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def normal(name, scale=1.0):
    return pyro.sample(name, dist.Normal(number(0.0), scale))


def positive(name, log_median, scale=0.5):
    return pyro.sample(name, dist.LogNormal(number(log_median), scale))


def process(name):
    return pyro.sample(name, NNGP(Matern32(2, positive(f"{name}_variance", -0.5), number(0.3)), GRAPH))


def observe(y, distribution):
    with pyro.plate("data", POINTS):
        return pyro.sample("y", distribution, obs=y)


def groups(y=None):
    intercept, slope = normal("intercept", 2.0), normal("slope")
    scale = pyro.sample("scale", dist.HalfNormal(number(1.0)))
    effects = pyro.sample("effects", dist.Normal(torch.zeros(GROUPS).double(), scale).to_event(1))
    return observe(y, dist.Poisson((intercept + slope * Z + effects[GROUP] + process("f")).exp()))


def heavy_tails(y=None):
    return observe(y, dist.StudentT(number(4.0), normal("slope") * Z + process("f"), positive("scale", -1.0)))


def varying_slope(y=None):
    return observe(y, dist.Bernoulli(logits=normal("intercept") + 2 * process("f") + process("g") * Z))


def gamma(y=None):
    shape = positive("shape", 0.0)
    return observe(y, dist.Gamma(shape, shape * (-process("f")).exp()))


def mean_and_scale(y=None):
    return observe(y, dist.Normal(process("f"), (process("g") - 1).exp()))


def product(y=None):
    return observe(y, dist.Normal(process("f") * process("g").exp(), 0.3))


def shares(y=None):
    share, size = process("f").sigmoid(), positive("size", 1.5)
    return observe(y, dist.Beta(share * size, (1 - share) * size))


def sine(y=None):
    return observe(y, dist.Normal(positive("height", 0.0) * torch.sin(2 * process("f")), 0.2))


def survival(y=None):
    return observe(y, dist.Weibull(process("f").exp(), positive("shape", 0.3, 0.3)))


def zeros(y=None):
    gate = pyro.sample("gate", dist.Beta(number(2.0), number(4.0)))
    return observe(y, dist.ZeroInflatedPoisson((1 + process("f")).exp(), gate=gate))


def horseshoe(y=None):
    """Twelve coefficients with a scale each."""
    with pyro.plate("columns", COLUMNS):
        scale = pyro.sample("scales", dist.HalfCauchy(number(0.5)))
        slope = pyro.sample("slopes", dist.Normal(number(0.0), scale))
    return observe(y, dist.Normal(W @ slope + process("f"), positive("noise", -1.0)))


def scales(y=None):
    """A Student-t distribution as a normal one with a precision for each point."""
    with pyro.plate("each", POINTS):
        precision = pyro.sample("precision", dist.Gamma(number(2.0), 2.0))
    return observe(y, dist.Normal(process("f"), positive("noise", -1.0) * precision.rsqrt()))


PROGRAMS = (groups, heavy_tails, varying_slope, gamma, mean_and_scale, product, shares, sine, survival, zeros)
PROGRAMS += (horseshoe, scales)


def guided(model, y, sites):
    """Draws of AutoNNGP, its k-hat, and whether it warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guide = AutoNNGP(model)
        svi = SVI(model, guide, ClippedAdam({"lr": 0.02}), Trace_ELBO())
        for _ in range(STEPS):
            svi.step(y)
        khat = float(guide.khat(200, progress=False))
        draws = Predictive(model, guide=guide, num_samples=2 * DRAWS, return_sites=sites)(y)
    return draws, khat, any("AutoNNGP" in str(one.message) for one in caught)


def sampled(model, y, sites):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = QuickNUTS(model, guide=AutoNNGP(model))
        mcmc = MCMC(kernel, num_samples=DRAWS, warmup_steps=WARMUP, disable_progbar=True)
        mcmc.run(y)
        return Predictive(kernel.model, posterior_samples=mcmc.get_samples(), return_sites=sites)(y)


def run(model, seed):
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    trace = pyro.poutine.trace(model).get_trace()
    y = trace.nodes["y"]["value"].detach()
    sites = [name for name in trace.stochastic_nodes if name not in ("columns", "data", "each", "y")]
    start = time.process_time()
    ours, khat, warned = guided(model, y, sites)
    middle = time.process_time()
    theirs = sampled(model, y, sites)
    end, distances, ratios = time.process_time(), [], []
    for name in sites:
        a, b = (draws[name].reshape(len(draws[name]), -1).double() for draws in (ours, theirs))
        distances.append((a.mean(0) - b.mean(0)).abs() / b.std(0))
        ratios.append(a.std(0) / b.std(0))
    distances, ratios = torch.cat(distances), torch.cat(ratios)
    numbers = {"khat": khat, "distance": distances.max(), "least": ratios.min(), "largest": ratios.max()}
    row = {name: f"{float(value):.2f}" for name, value in numbers.items()} | {"warned": "yes" if warned else "no"}
    return row | {"seconds": f"{middle - start:.1f}", "nuts": f"{end - middle:.0f}"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[model.__name__ for model in PROGRAMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=Path, default=Path("programs.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Commit {commit()}, torch {torch.__version__}, one thread.", flush=True)
    done = {(row["program"], row["seed"]) for row in read(args.rows)}
    for seed in args.seeds:
        for model in (model for model in PROGRAMS if model.__name__ in args.names):
            if (model.__name__, str(seed)) not in done:
                row = {"program": model.__name__, "seed": seed} | run(model, seed)
                append(args.rows, FIELDS, row)
                print(row, flush=True)
    print("| program | data set | k-hat | warning | distance of means | ratios of sds | s | s, NUTS |")
    print("|---|---|---|---|---|---|---|---|")
    for row in read(args.rows):
        values = row["program"].replace("_", " "), row["seed"], row["khat"], row["warned"], row["distance"]
        print("|", " | ".join([*values, f"{row['least']} - {row['largest']}", row["seconds"], row["nuts"]]), "|")


if __name__ == "__main__":
    main()
