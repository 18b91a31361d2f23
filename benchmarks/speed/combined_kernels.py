"""Sums and products of kernels: a step and a plain `Vecchia` call, with the general conditional and the compiled one.

Points are uniform in the unit square and ten units of time, y is a smooth function of both with noise of sd .2. A step
is the conditional of all points given K random others, forward and backward by the hyperparameters, float64. The plain
call is constructor and `fit`. Both ways see the same data and take turns; seconds are those of the processor, medians.

Usage: python benchmarks/speed/combined_kernels.py [--points 3000] [--rounds 3] [--out FILE]
"""

import argparse
import contextlib
import statistics
import time
import warnings
from pathlib import Path
from unittest import mock

import torch

import pyro_nngp as nngp
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.kernels import RBF, Constant, Cosine, Matern, Matern12, Matern32, Periodic
from pyro_nngp.native import conditional

SPACE, TIME = [0, 1], [2]
KERNELS = {
    "Matern32(3)": lambda: Matern32(3),
    "space x time": lambda: Matern32(2, active_dims=SPACE) * Matern12(1, active_dims=TIME),
    "two scales": lambda: Matern32(3) + Matern32(3),
    "space + time + space x time": lambda: (
        Matern32(2, active_dims=SPACE)
        + Matern32(1, active_dims=TIME)
        + Matern32(2, active_dims=SPACE) * Matern32(1, active_dims=TIME)
    ),
    "trend + season": lambda: Matern(3) + Periodic(1, period=3.0, active_dims=TIME) * Matern32(1, active_dims=TIME),
    "space + level + wave": lambda: Matern32(3) + Constant(3) + RBF(3) * Cosine(3, period=2.0),
}
WAYS = ("general", "compiled")


def data(points):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(points, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 1.0, 10.0])
    f = (6 * x[:, 0]).sin() * (5 * x[:, 1]).cos() + x[:, 2].sin() + 0.3 * (20 * x[:, 0] + 2 * x[:, 2]).sin()
    return x, f + 0.2 * torch.randn(points, generator=generator, dtype=torch.float64)


def step(kernel, x, neighbors, noise):
    w, var = graph_conditional(kernel, x, x, neighbors, noise)
    torch.autograd.backward((w.sum() + var.sum()).requires_grad_())


def seconds(function):
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def compiled(way):
    """Without the compiled conditional, sums and products take the code for general kernels."""
    general = mock.patch.object(conditional, "supported", return_value=False)
    return general if way == "general" else contextlib.nullcontext()


def measure(made, points, neighbors, rounds):
    """Medians by way: seconds of a step, of a plain call, and the loss at its end."""
    x, y = data(points)
    near = torch.rand(points, points, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :neighbors]
    noise, kernel, found = torch.full((points,), 0.1, dtype=x.dtype), made().double(), {way: [] for way in WAYS}
    for _ in range(rounds + 1):
        for way in WAYS:
            with compiled(way):
                own, _ = seconds(lambda: step(kernel, x, near, noise))
                call, result = seconds(lambda: nngp.fit(nngp.Vecchia(x, y, kernel=made()), progress=False))
            found[way].append((own, call, result.loss))
    return {way: [statistics.median(column) for column in zip(*rows[1:], strict=True)] for way, rows in found.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=3000)
    parser.add_argument("--neighbors", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sizes = f"N = {args.points:,}, K = {args.neighbors}, float64"
    lines = [f"{sizes}, 1 thread, processor time; torch {torch.__version__}.", ""]
    lines += ["| kernel | step, general [ms] | compiled [ms] | plain call, general [s] | compiled [s] | loss per row |"]
    lines += ["|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    for name, made in KERNELS.items():
        general, fast = measure(made, args.points, args.neighbors, args.rounds).values()
        losses = f"{general[2]:.4f}, {fast[2]:.4f}"
        steps = f"{1e3 * general[0]:.1f} | {1e3 * fast[0]:.1f}"
        lines.append(f"| {name} | {steps} | {general[1]:.2f} | {fast[1]:.2f} | {losses} |")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
