"""Time of a training step against the number of points, which must not grow with it; graph, prediction and memory.

Points are uniform in a square whose area grows with their number, so that neighborhoods look the same at every size.
Few points are revisited by the neighbors of one batch (fewer distinct rows per step), so compare sizes from 10^5 up.
Usage: python benchmarks/speed/step_time.py [--sizes 10000 100000 1000000] [--out FILE.md]
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
from pyro_nngp.models import VNNGP
from pyro_nngp.variational import MeanField


class Setup:
    """A model on `num_points` points; `times` are the seconds of its steps."""

    def __init__(self, num_points, num_neighbors):
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(num_points, 2, generator=generator) * num_points**0.5 / 10
        y = torch.sin(x[:, 0]) + 0.1 * torch.randn(num_points, generator=generator)
        start = time.perf_counter()
        self.gp = VNNGP(x, y, Matern52(2), Gaussian(0.1), num_neighbors=num_neighbors, guide=MeanField(loc=y))
        self.graph_seconds, self.times = time.perf_counter() - start, []
        self.x_new = x[:10_000] + 1e-3

    def run(self, steps, seed):
        ticks = []
        fit(
            self.gp,
            steps,
            seed=seed,
            solve_every=0,
            progress=False,
            callback=lambda *_: ticks.append(time.perf_counter()),
        )
        self.times += [b - a for a, b in itertools.pairwise(ticks[5:])]

    @torch.no_grad()
    def prediction_seconds(self):
        self.gp(self.x_new)  # builds the search index
        start = time.perf_counter()
        self.gp(self.x_new)
        return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--neighbors", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    setups = {n: Setup(n, args.neighbors) for n in args.sizes}
    for round_ in range(args.rounds):  # alternating, so that all sizes meet the same disturbances
        for setup in setups.values():
            setup.run(args.steps, round_)
    lines = [
        f"VNNGP step, mean-field, B = 1024, K = {args.neighbors}, D = 2, float32, {torch.get_num_threads()} threads, "
        f"median of {args.rounds * (args.steps - 6)} steps; torch {torch.__version__}.",
        "",
        "| N | graph [s] | step [ms] | ratio to the smallest | prediction at 10,000 points [s] |",
        "|---|---|---|---|---|",
    ]
    medians = {n: 1e3 * statistics.median(setup.times) for n, setup in setups.items()}
    for n, setup in setups.items():
        ratio = medians[n] / medians[args.sizes[0]]
        lines.append(
            f"| {n:,} | {setup.graph_seconds:.1f} | {medians[n]:.1f} | {ratio:.2f} | {setup.prediction_seconds():.2f} |"
        )
    lines.append(f"\nPeak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB.")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
