"""Seconds of a nearest-neighbor conditional and its gradient: Matérn of any smoothness beside Matérn-5/2.

Each round runs all ways one after the other, in processor time. A smoothness that is learned changes in each round, as
in training. Neighbors are the K nearest of 10,000 random points.

Usage: python benchmarks/speed/matern.py [--targets 1024] [--neighbors 16 32 64] [--dims 2] [--rounds 31]
    [--noise 0.1] [--out FILE.md]
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.kernels import Matern, Matern52

WAYS = ("Matern52", "fixed", "learned")


def made(way, dims):
    scale = torch.linspace(0.1, 0.3, dims)
    if way == "Matern52":
        return Matern52(dims, lengthscale=scale)
    kernel = Matern(dims, lengthscale=scale, smoothness=2.4)
    if way == "fixed":
        del kernel.smoothness
        kernel.smoothness = torch.tensor(2.4)
    return kernel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", type=int, default=1024)
    parser.add_argument("--neighbors", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--dims", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--noise", type=float, help="variance of the neighbors' noise; without, there is none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"torch {torch.__version__}, one thread, B = {args.targets}, D = {args.dims}: least"]
    lines += [
        f"processor time of {args.rounds} rounds [ms] and, in brackets, the median of its ratios to Matern52.",
        "",
    ]
    lines += ["| dtype | K | Matern52 | Matern, smoothness fixed | Matern, smoothness learned |", "|---" * 5 + "|"]
    for dtype in (torch.float32, torch.float64):
        for k in args.neighbors:
            torch.manual_seed(0)
            x = torch.rand(args.targets, args.dims, dtype=dtype)
            points = torch.rand(10_000, args.dims, dtype=dtype)
            rows = torch.cdist(x, points).topk(k, largest=False).indices
            grad = torch.randn(args.targets, k, dtype=dtype)
            noise = None if args.noise is None else torch.full((len(points),), args.noise, dtype=dtype)
            kernels = {way: made(way, args.dims) for way in WAYS}
            times = {way: [] for way in WAYS}
            for _ in range(args.rounds + 2):
                with torch.no_grad():
                    kernels["learned"].smoothness_unconstrained.add_(1e-4)
                for way, kernel in kernels.items():
                    kernel.zero_grad()
                    start = time.process_time()
                    w, var = graph_conditional(kernel, x, points, rows, noise)
                    torch.autograd.backward((w, var), (grad, torch.ones_like(var)))
                    times[way].append(time.process_time() - start)
            times = {way: each[2:] for way, each in times.items()}
            cells = [f"{1e3 * min(times[WAYS[0]]):.2f}"]
            for way in WAYS[1:]:
                ratio = statistics.median(a / b for a, b in zip(times[way], times[WAYS[0]], strict=True))
                cells.append(f"{1e3 * min(times[way]):.2f} ({ratio:.2f})")
            lines.append(f"| {str(dtype)[6:]} | {k} | {' | '.join(cells)} |")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
