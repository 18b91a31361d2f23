"""VNNGP on a UCI set: what closed-form local updates, refreshed neighbors and the sparse-Cholesky guide add.

Splits are 64/16/20, inputs and targets standardized on the training rows, Matern-5/2 ARD, K = 32, batches of 1024,
all hyperparameters started at 0.6931 (the recipe of the paper). The table shows test rows.

Usage: python benchmarks/accuracy/vnngp.py elevators [--epochs 100] [--seeds 2] [--target 0.5] [--out FILE]
The data come from `pyro_nngp.data.datasets.uci`, or from the folder that PYRO_NNGP_DATA names.
"""

import argparse
import time
from pathlib import Path

import torch

from pyro_nngp.data import Standardizer, coverage, crps_gaussian, gaussian_interval, nll, random_split, rmse, uci
from pyro_nngp.inference import Schedule, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import VNNGP

VARIANTS = {
    "gradients (Adam 0.01, of rows 0.1)": {
        "lr": 0.01,
        "schedule": Schedule(local_lr=0.1),
        "solve_every": 0,
        "refresh_every": 0,
    },
    "closed-form q(u)": {"lr": 0.03, "solve_every": 25, "refresh_every": 0},
    "+ refreshed, lengthscale-scaled neighbors": {"lr": 0.03, "solve_every": 25, "refresh_every": 100},
    "+ maximin ordering": {"lr": 0.03, "solve_every": 25, "refresh_every": 100, "ordering": "maximin"},
    "+ sparse-Cholesky guide": {"lr": 0.03, "solve_every": 100, "refresh_every": 100, "guide_neighbors": 10},
}


def split(name, seed):
    """Training, validation and test rows, standardized."""
    data = uci(name)
    parts = random_split(len(data.x), (0.64, 0.16, 0.2), seed)
    to_x, to_y = Standardizer(data.x[parts[0]]), Standardizer(data.y[parts[0]])
    return [(to_x.transform(data.x[rows]), to_y.transform(data.y[rows])) for rows in parts]


def scores(gp, x, y):
    with torch.no_grad():
        predictive = gp.predict(x)
    loc, scale = predictive.mean, predictive.stddev
    interval = gaussian_interval(loc, scale)
    values = (nll(y, predictive), rmse(y, loc), crps_gaussian(y, loc, scale), coverage(y, *interval))
    return [float(value) for value in values]


def run(name, variant, epochs, seed, neighbors):
    settings = dict(VARIANTS[variant])
    model = {key: settings.pop(key) for key in ("ordering", "guide_neighbors", "scale") if key in settings}
    (x, y), (x_val, y_val), (x_test, y_test) = split(name, seed)
    width, start = x.shape[1], torch.tensor(0.6931)
    kernel = Matern52(width, variance=start, lengthscale=start.expand(width).clone())
    gp = VNNGP(x, y, kernel, Gaussian(0.6931), num_neighbors=neighbors, seed=seed, **model)
    trace, begin, spent = [], time.perf_counter(), 0.0
    steps = epochs * (len(x) // 1024)

    def follow(step, loss):
        nonlocal spent
        if step % max(1, steps // 20) == 0:
            now = time.perf_counter()
            trace.append((now - begin - spent, scores(gp, x_val, y_val)[0]))
            spent += time.perf_counter() - now

    result = fit(gp, steps, seed=seed, callback=follow, progress=False, **settings)
    return scores(gp, x_test, y_test), result.seconds - spent, trace


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--neighbors", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--target", type=float, help="validation NLL whose time is reported")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        f"VNNGP on {args.name}: {args.epochs} epochs, K = {args.neighbors}, B = 1024, float32, "
        f"{torch.get_num_threads()} threads, mean of {args.seeds} splits; torch {torch.__version__}.",
        "",
        f"| variant | NLL | RMSE | CRPS | coverage | training [s] | seconds to validation NLL {args.target} |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for variant in args.variants:
        runs = [run(args.name, variant, args.epochs, seed, args.neighbors) for seed in range(args.seeds)]
        means = torch.tensor([values for values, _, _ in runs]).mean(0).tolist()
        seconds = sum(spent for _, spent, _ in runs) / len(runs)
        reached = [next((t for t, value in trace if value <= args.target), None) for _, _, trace in runs if args.target]
        when = "" if not reached else "never" if None in reached else f"{sum(reached) / len(reached):.1f}"
        row = " | ".join(f"{value:.3f}" for value in means)
        lines.append(f"| {variant} | {row} | {seconds:.1f} | {when} |")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
