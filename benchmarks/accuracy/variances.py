"""Posterior variances of f from 10^5 pseudo-observations: ways to compute them, their seconds and errors.

f is a draw from a Matern-3/2 process (variance 1.5, lengthscale .03, level .5) at N points in the unit square (by its
nearest-neighbor factor with 40 neighbors), y one draw given f. VNNGP is trained by `fit(gp)` and asked for f at 500 new
points and 500 of the data; coverage of 95 % intervals counts the true f. Then standard deviations at 100 new points, at
the trained hyperparameters and sites, by

- what the package does: 64 pseudo-observations, pooled where they are noisy (:mod:`pyro_nngp.variational.pooling`),
- the conditional on K pseudo-observations without pooling,
- draws from the posterior over all N points by conjugate gradients, at the data (16 draws, whose standard deviation has
  a relative error of 1 / sqrt(2 S) of its own; the bias is that of the mean variance over 100 points),

beside the conditional on the 1,500 nearest pseudo-observations, which reach 2.3 lengthscales far. Seconds are processor
seconds for 1,000 points, without the first call's preparation, which is given apart.

Usage: python benchmarks/accuracy/variances.py [--points 100000] [--families Gaussian Bernoulli]
           [--out benchmarks/results/variances.md]
"""

import argparse
import time
import warnings
from pathlib import Path

import pyro
import torch
from coverage import FAMILIES, intervals  # beside this file
from rows import commit  # beside this file

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern32, bind
from pyro_nngp.models import VNNGP
from pyro_nngp.neighbors import NeighborGraph

REFERENCE, DRAWS = 1500, 16


def problem(num_points, family):
    """x, y and f at N points, then 500 new points and f there."""
    torch.manual_seed(0)
    x = torch.rand(num_points + 500, 2, dtype=torch.float64)
    with torch.no_grad():
        prior = NNGP(Matern32(2, variance=1.5, lengthscale=0.03).double(), NeighborGraph(x, 40))
        f = 0.5 + prior.sample()
    return x[:-500], FAMILIES[family][1](f[:-500]), f[:-500], x[-500:], f[-500:]


def timed(call):
    start = time.process_time()
    found = call()
    return found, time.process_time() - start


@torch.no_grad()
def ways(gp, x_new):
    """Lines of the table."""
    kernel, graph, noise = bind(gp.kernel), gp.graph, 1 / gp.q.observations()[1]

    def conditional(k, x):
        near = graph.query(x, k)
        parts = [
            graph_conditional(kernel, a, gp.x, b, noise, gp.jitter)[1]
            for a, b in zip(x.split(25), near.split(25), strict=True)
        ]
        return torch.cat(parts).sqrt()

    few = x_new[:100]
    exact, seconds = timed(lambda: conditional(REFERENCE, few))
    yield f"{REFERENCE} pseudo-observations", exact, exact, seconds * 10
    gp(few)  # pools
    yield "default", gp(few)[1].sqrt(), exact, 2 * timed(lambda: gp(x_new))[1]
    for k in (20, 64, 150, 400):
        yield (
            f"{k} pseudo-observations",
            conditional(k, few),
            exact,
            2 * timed(lambda k=k: conditional(k, x_new))[1]
            if k < 400
            else 10 * timed(lambda k=k: conditional(k, few))[1],
        )


@torch.no_grad()
def draws(gp):
    """Standard deviations at 100 of the data by draws, and by the conditional there."""
    rows = torch.arange(100)
    kernel, noise = bind(gp.kernel), 1 / gp.q.observations()[1]
    near = gp.graph.query(gp.x[rows], REFERENCE)
    parts = [
        graph_conditional(kernel, gp.x[a], gp.x, b, noise, gp.jitter)[1]
        for a, b in zip(rows.split(25), near.split(25), strict=True)
    ]
    exact = torch.cat(parts).sqrt()
    q = gp.q.distribution(NNGP(gp.kernel, gp.graph, jitter=gp.jitter))
    found, seconds = timed(lambda: torch.stack([q.sample() for _ in range(DRAWS)]))
    mean = q.loc
    every = (found - mean).square().mean(0)
    return every, exact, seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--families", nargs="+", default=["Gaussian", "Bernoulli"])
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    lines = [
        f"`python benchmarks/accuracy/variances.py --points {args.points}`, commit {commit()}, torch "
        f"{torch.__version__}, {torch.get_num_threads()} thread(s), other jobs on the machine.",
        "",
    ]
    coverage = ["| data | cover, data | sd (error), data | cover, new | sd (error), new | seconds of training |"]
    coverage += ["|---" * 6 + "|"]
    table = [
        "| data | way | relative error of sd: root mean square | mean | seconds per 1,000 points |",
        "|---" * 5 + "|",
    ]
    for family in args.families:
        x, y, f, x_new, f_new = problem(args.points, family)
        pyro.set_rng_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gp = VNNGP(x, y, Matern32(2), FAMILIES[family][0]())
            result, seconds = timed(lambda gp=gp: fit(gp, progress=False))
        print(result, flush=True)
        (_, first) = timed(lambda gp=gp, x_new=x_new: gp(x_new[:1]))
        a, b, c = intervals(gp, x[:500], f[:500])
        d, e, g = intervals(gp, x_new, f_new)
        coverage.append(f"| {family} | {a:.3f} | {b:.3f} ({c:.3f}) | {d:.3f} | {e:.3f} ({g:.3f}) | {seconds:.0f} |")
        print(coverage[-1], f"first call {first:.1f} s", flush=True)
        for name, sd, exact, cost in ways(gp, x_new):
            error = sd / exact - 1
            table.append(
                f"| {family} | {name} | {error.square().mean().sqrt():.3f} | {error.mean():+.3f} | {cost:.2f} |"
            )
            print(table[-1], flush=True)
        every, exact, cost = draws(gp)
        error = every[: len(exact)].sqrt() / exact - 1
        bias = (every[: len(exact)].mean() / exact.square().mean()).sqrt() - 1
        table.append(
            f"| {family} | {DRAWS} draws by conjugate gradients, all points | {error.square().mean().sqrt():.3f} | "
            f"{bias:+.3f} | {cost:.0f} in all |"
        )
        print(table[-1], flush=True)
    text = "\n".join([*lines, *coverage, "", *table]) + "\n"
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
