"""A training step beside the part of it that no method can do without: the conditional with its gathers.

N = 139,000 points in 2 dimensions, K = 32, B = 1024, float32, one thread. "Conditional" is what a hand-written loop
would do for the same batch: neighbors of the rows, their distinct rows, coordinates (and targets, or mean and scale of
q(u), at these), weights and variances with their gradient by lengthscales, variance and noise, and for VNNGP the sparse
gradient of q(u); no likelihood, no divergence, no optimizer, no Pyro. Steps are timed with model and guide run at each
(PYRO_NNGP_REPLAY=0) and replayed. All three alternate in one run; times are those of the processor.
Usage: python benchmarks/speed/step_parts.py [--points 139000] [--rounds 10] [--out benchmarks/results/step_parts.md]
"""

import argparse
import itertools
import os
import statistics
import time
import warnings
from pathlib import Path

import torch
from torch.nn.functional import embedding

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.inference import fit
from pyro_nngp.inference._validation import validation_off
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import LOO, VNNGP, Vecchia

METHODS = {"VNNGP, mean-field": (VNNGP, {"posterior": "mean-field"}), "LOO": (LOO, {}), "Vecchia": (Vecchia, {})}
FIRST = 24  # steps before those that are timed
MARKS = {"VNNGP, mean-field": 12 / 7, "LOO": 9 / 4, "Vecchia": 9 / 4}


def method(name, num_points, num_neighbors):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_points, 2, generator=generator) * num_points**0.5 / 10
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(num_points, generator=generator)
    kind, options = METHODS[name]
    kernel = Matern52(2, variance=torch.tensor(1.0), lengthscale=torch.ones(2))
    return kind(x, y, kernel, Gaussian(0.1), num_neighbors=num_neighbors, **options)


def steps(gp, count, replays):
    """Milliseconds of some steps of `fit`, after those before the recording."""
    ticks = []
    os.environ["PYRO_NNGP_REPLAY"] = str(int(replays))
    settings = {"batch_size": 1024, "solve_every": 0, "refresh_every": 0, "progress": False}
    fit(gp, FIRST + count, callback=lambda *_: ticks.append(time.process_time()), **settings)
    return [1e3 * (b - a) for a, b in itertools.pairwise(ticks[FIRST - 1 :])]


def conditionals(gp, count):
    """Milliseconds of some conditionals with their gathers."""
    kernel, noise = gp.kernel, torch.full((), 0.1, requires_grad=True)
    tables = [gp.local.loc, gp.local.log_scale] if isinstance(gp, VNNGP) else []
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
    for name, mark in MARKS.items():
        gp = method(name, args.points, args.neighbors)
        times = [[], [], []]
        for round_ in range(args.rounds + 1):
            for kept, found in zip(
                times,
                (steps(gp, args.steps, False), steps(gp, args.steps, True), conditionals(gp, args.steps)),
                strict=True,
            ):
                kept += found if round_ else []  # the first round warms up
        middle, least = [statistics.median(kept) for kept in times], [min(kept) for kept in times]
        cells = [f"{middle[i]:.1f} ({least[i]:.1f})" for i in range(3)]
        cells += [f"{middle[1] / middle[2]:.2f} ({least[1] / least[2]:.2f})", f"{mark:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
