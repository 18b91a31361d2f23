"""Seconds until held-out elevations are predicted as well as GPBoost's Vecchia does: RMSE 3.07 m and NLL -2.553.

The response nearest-neighbor process (`Vecchia`) and leave-one-out training (`LOO`) on the random split of
`tutorials/demo.py`, from its starting values. Training is cut into legs; after each the held-out points are scored with
the time of scoring left out. The steps of a leg are fixed beforehand, so no choice is made on held-out points.

Usage: python benchmarks/terrain.py [--out benchmarks/results/terrain_seconds.md]
"""

import argparse
import time
from pathlib import Path

import torch

from pyro_nngp.datasets import terrain
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.metrics import coverage, crps_gaussian, gaussian_interval, nll, rmse
from pyro_nngp.models import LOO, Vecchia
from pyro_nngp.preprocessing import Standardizer

MARK = 3.07, -2.553


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--legs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of a leg")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = terrain()
    test = torch.rand(len(data.x), generator=torch.Generator().manual_seed(0)) < 0.2
    standard = Standardizer(data.y[~test])
    x, y, scale = data.x, standard.transform(data.y), float(standard.scale)
    lines = [
        f"{int((~test).sum()):,} training and {int(test.sum()):,} held-out elevations, K = 32 in training and 64 in "
        f"prediction, B = {args.batch_size}, {torch.get_num_threads()} threads; torch {torch.__version__}. GPBoost's "
        f"mark is RMSE {MARK[0]} m, NLL {MARK[1]}, reached after a fit of 213 s on two cores.",
        "",
        "| method | steps | set-up and training [s] | RMSE [m] | NLL | CRPS | coverage | prediction [s] | mark |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method in (Vecchia, LOO):
        start = time.perf_counter()
        kernel = Matern52(2, variance=torch.tensor(1.0), lengthscale=torch.tensor([0.4, 0.4]))
        gp = method(x[~test], y[~test], kernel, Gaussian(2e-4), num_neighbors=32)
        seconds = time.perf_counter() - start
        for leg in range(args.legs):
            start = time.perf_counter()
            fit(gp, args.steps, batch_size=args.batch_size, lr=0.1 * 0.5**leg, seed=leg, progress=False)
            seconds += time.perf_counter() - start
            start = time.perf_counter()
            with torch.no_grad():
                predictive = gp.predict(x[test], num_neighbors=64)
            predicting = time.perf_counter() - start
            loc, sd = predictive.mean, predictive.stddev
            error, score = float(rmse(y[test], loc)) * scale, float(nll(y[test], predictive))
            lines.append(
                f"| {method.__name__} | {(leg + 1) * args.steps} | {seconds:.1f} | {error:.2f} | {score:.3f} "
                f"| {float(crps_gaussian(y[test], loc, sd)):.4f} "
                f"| {float(coverage(y[test], *gaussian_interval(loc, sd))):.3f} | {predicting:.1f} "
                f"| {'reached' if error <= MARK[0] and score <= MARK[1] else ''} |"
            )
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
