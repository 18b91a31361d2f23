"""Time of an SWSGP training step against the number of inducing points: free of it where they are fixed.

The setting of section 4.4 of the paper: H = 100 of up to 100,000 inducing points, here a part of the data, with
a diagonal covariance. Learned inducing points are searched at each step, which is not free.
Usage: python benchmarks/speed/swsgp_steps.py [--sizes 1000 10000 100000] [--out FILE.md]
"""

import argparse
import itertools
import resource
import statistics
import time
from pathlib import Path

import torch

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import SWSGP

NUM_DATA, DIM = 100_000, 8


class Setup:
    """A model with `num_inducing` inducing points; `times` are the seconds of its steps."""

    def __init__(self, num_inducing, num_neighbors, learn):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(NUM_DATA, DIM, generator=generator)
        y = torch.sin(x.sum(-1)) + 0.1 * torch.randn(NUM_DATA, generator=generator)
        start = time.perf_counter()
        kernel = Matern52(DIM, lengthscale=torch.tensor(2.0))
        settings = {"inducing": x[:num_inducing].clone(), "learn_inducing": learn, "num_neighbors": num_neighbors}
        self.gp = SWSGP(x, y, kernel, Gaussian(0.1), **settings)
        self.build_seconds, self.times = time.perf_counter() - start, []

    def run(self, steps, batch_size, seed):
        ticks = []
        settings = {"batch_size": batch_size, "lr": 0.001, "seed": seed, "progress": False}
        fit(self.gp, steps, callback=lambda *_: ticks.append(time.perf_counter()), **settings)
        self.times += [b - a for a, b in itertools.pairwise(ticks[3:])]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--neighbors", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    setups = {(m, learn): Setup(m, args.neighbors, learn) for learn in (False, True) for m in args.sizes}
    for round_ in range(args.rounds):  # alternating, so that all sizes meet the same disturbances
        for setup in setups.values():
            setup.run(args.steps, args.batch_size, round_)
    lines = [
        f"SWSGP step, N = {NUM_DATA:,}, D = {DIM}, H = {args.neighbors}, B = {args.batch_size}, diagonal covariance, "
        f"float32, {torch.get_num_threads()} threads, median of {args.rounds * (args.steps - 4)} steps; "
        f"torch {torch.__version__}.",
        "",
        "| M | inducing points | first neighbor search [s] | step [ms] | ratio to the smallest |",
        "|---|---|---|---|---|",
    ]
    medians = {key: 1e3 * statistics.median(setup.times) for key, setup in setups.items()}
    for (m, learn), setup in setups.items():
        found = "" if learn else f"{setup.build_seconds:.1f}"
        ratio = medians[m, learn] / medians[args.sizes[0], learn]
        lines.append(f"| {m:,} | {'learned' if learn else 'fixed'} | {found} | {medians[m, learn]:.1f} | {ratio:.2f} |")
    lines.append(f"\nPeak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB.")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
