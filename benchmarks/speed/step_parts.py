"""A training step beside the part of it that no method can do without: the conditional with its gathers.

N = 139,000 points in 2 dimensions, K = 32, B = 1024, float32, one thread. "Conditional" is what a hand-written loop
would do for the same batch: neighbors of the rows, their distinct rows, coordinates (and targets, or mean and scale of
q(u), at these), weights and variances with their gradient by lengthscales, variance and noise, and for VNNGP the sparse
gradient of q(u); no likelihood, no divergence, no optimizer, no Pyro. Steps are timed with model and guide run at each
(``replay=False``) and replayed. All three alternate in one run; times are those of the processor. Methods with draws
that count, of hyperparameters or auxiliary variables, have no such conditional.
Usage: python benchmarks/speed/step_parts.py [--points 139000] [--rounds 10] [--methods LOO Vecchia]
           [--out FILE.md]
"""

import argparse
import itertools
import statistics
import time
import warnings
from pathlib import Path

import torch
from pyro.distributions import LogNormal
from pyro.nn import PyroSample
from torch.nn.functional import embedding

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.inference import fit
from pyro_nngp.inference._validation import validation_off
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import LOO, VNNGP, Vecchia
from pyro_nngp.variational import MeanField

METHODS = {"VNNGP, mean-field": (VNNGP, {"guide": MeanField()}), "LOO": (LOO, {}), "Vecchia": (Vecchia, {})}
DRAWING = {"LOO, labels": (LOO, {}), "LOO, a prior on lengthscales": (LOO, {})}
FIRST = 24  # steps before those that are timed
MARKS = {"VNNGP, mean-field": 12 / 7, "LOO": 9 / 4, "Vecchia": 9 / 4}


def method(name, num_points, num_neighbors):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_points, 2, generator=generator) * num_points**0.5 / 10
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(num_points, generator=generator)
    kind, options = (METHODS | DRAWING)[name]
    scale = PyroSample(LogNormal(torch.zeros(2), 1.0).to_event(1)) if "prior" in name else torch.ones(2)
    kernel, likelihood = Matern52(2, variance=torch.tensor(1.0), lengthscale=scale), Gaussian(0.1)
    if "labels" in name:
        y, likelihood = (y > 0).float(), Bernoulli()
    return kind(x, y, kernel, likelihood, num_neighbors=num_neighbors, **options)


def steps(gp, count, replays):
    """Milliseconds of some steps of `fit`, after those before the recording."""
    ticks = []
    settings = {"batch_size": 1024, "solve_every": 0, "refresh_every": 0, "replay": replays, "progress": False}
    fit(gp, FIRST + count, callback=lambda *_: ticks.append(time.process_time()), **settings)
    return [1e3 * (b - a) for a, b in itertools.pairwise(ticks[FIRST - 1 :])]


def conditionals(gp, count):
    """Milliseconds of some conditionals with their gathers."""
    kernel, noise = gp.kernel, torch.full((), 0.1, requires_grad=True)
    tables = [gp.q.loc, gp.q.log_scale] if isinstance(gp, VNNGP) else []
    leaves, times = [*kernel.parameters(), *(tables or [noise])], []
    for idx in torch.randperm(gp.num_data)[: count * 1024].split(1024):
        start = time.process_time()
        with validation_off():
            batch = gp.graph.batch(idx)
            points, places = gp.x.index_select(0, batch.rows), batch.neighbors.clamp(min=0).flatten()
            added = None if tables else noise.expand(len(points))
            w, v = graph_conditional(kernel, points.index_select(0, batch.targets), points, batch.neighbors, added)
        if tables:
            loc, scale = (embedding(batch.rows, table, sparse=True)[:, 0] for table in tables)
            near, spread = (part.index_select(0, places).view_as(w) for part in (loc, scale.exp().square()))
            loss = ((w * near).sum(-1) + (w.square() * spread).sum(-1) + v).sum()
        else:
            near = gp.y.index_select(0, batch.rows).index_select(0, places).view_as(w)
            loss = ((w * near).sum(-1) + v).sum()
        torch.autograd.grad(loss, leaves)
        times.append(1e3 * (time.process_time() - start))
    return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=139_000)
    parser.add_argument("--neighbors", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--methods", nargs="+", default=[*METHODS, *DRAWING])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = [
        "Milliseconds, median (least).",
        "",
        "| method | program at each step | replayed | conditional, gathers | replayed / conditional | mark |",
        "|---|---|---|---|---|---|",
    ]
    for name in args.methods:
        gp = method(name, args.points, args.neighbors)
        times = [[], [], []]
        for round_ in range(args.rounds + 1):
            for kept, found in zip(
                times,
                (
                    steps(gp, args.steps, False),
                    steps(gp, args.steps, True),
                    conditionals(gp, args.steps) if name in MARKS else [],
                ),
                strict=True,
            ):
                kept += found if round_ else []  # the first round warms up
        pairs = [(statistics.median(kept), min(kept)) for kept in times if kept]
        cells = [f"{middle:.1f} ({least:.1f})" for middle, least in pairs]
        if name in MARKS:
            cells += ["{:.2f} ({:.2f})".format(*(a / b for a, b in zip(*pairs[1:], strict=True))), f"{MARKS[name]:.2f}"]
        cells += [""] * (5 - len(cells))
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
