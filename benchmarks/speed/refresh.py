"""A search of all neighbors anew, as `refresh_neighbors()` does, in training steps: how often it may be called.

N = 139,000 points, K = 32, B = 1024, float32, one thread, processor time, hyperparameters given. A refresh every R
steps takes at most R / 10 steps from R = 10 times the cost of one on.
Usage: python benchmarks/speed/refresh.py [--points 139000] [--rounds 2] [--out refresh.md]
"""

import argparse
import itertools
import statistics
import time
import warnings
from pathlib import Path

import torch

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import LOO, VNNGP, Vecchia
from pyro_nngp.variational import MeanField

FIRST, STEPS = 24, 24  # `fit` records at the 21st step
METHODS = {"VNNGP, mean-field": (VNNGP, {"guide": MeanField()}), "Vecchia": (Vecchia, {}), "LOO": (LOO, {})}


def steps(gp):
    """Seconds of some steps."""
    ticks = []
    settings = {"batch_size": 1024, "solve_every": 0, "refresh_every": 0, "progress": False}
    fit(gp, FIRST + STEPS, callback=lambda *_: ticks.append(time.process_time()), **settings)
    return [later - earlier for earlier, later in itertools.pairwise(ticks[FIRST - 1 :])]


def refresh(gp):
    """Seconds until all neighbors are found again, after the kernel has moved; LOO waits until it needs them."""
    with torch.no_grad():
        for parameter in gp.kernel.parameters():
            parameter.mul_(1.01)
    start = time.process_time()
    gp.refresh_neighbors()
    gp.graph.batch(None)
    return time.process_time() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=139_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = ["| D | method | refresh [s] | step [ms] | refresh in steps | R |", "|---|---|---|---|---|---|"]
    for dim, (name, (method, options)) in itertools.product((2, 8), METHODS.items()):
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(args.points, dim, generator=generator) * args.points ** (1 / dim)
        y = torch.sin(x[:, 0]) + 0.1 * torch.randn(args.points, generator=generator)
        kernel = Matern52(dim, variance=torch.tensor(1.0), lengthscale=torch.full((dim,), 3.0))
        gp = method(x, y, kernel, Gaussian(0.1), num_neighbors=32, **options)
        times = [(refresh(gp), statistics.median(steps(gp))) for _ in range(args.rounds)]
        again, step = map(min, zip(*times, strict=True))
        lines.append(
            f"| {dim} | {name} | {again:.2f} | {1e3 * step:.1f} | {again / step:.0f} | {10 * again / step:.0f} |"
        )
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
