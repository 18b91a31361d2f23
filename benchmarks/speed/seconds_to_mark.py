"""Seconds of training until the scores of a peer's fit are reached, for methods that need no local parameters.

The marks: GPBoost's Vecchia on a random fifth of the terrain of `tutorials/demo.py` (RMSE 3.07 m, NLL -2.553, a fit of
213 s on two cores), and what `--peer`, run before on the same split, gave GPyTorch's VNNGP in 100 epochs (K = 32,
batches of 1,024, Adam with a rate of 0.01, all
hyperparameters from 0.6931) on elevators and protein, split 64/16/20. Training is cut into legs of steps
fixed beforehand; after each the held-out points are scored, and the time of scoring is left out.

Usage: python benchmarks/speed/seconds_to_mark.py terrain|elevators|protein [--legs 5] [--steps 60] [--peer]
           [--clock process_time] [--out FILE]; `--peer` needs the `bench` extra.
"""

import argparse
import time
from pathlib import Path

import torch
from peers import BATCH, GPyTorch
from torch.distributions import Normal

from pyro_nngp.data import (
    Standardizer,
    coverage,
    crps_gaussian,
    gaussian_interval,
    load,
    nll,
    random_split,
    rmse,
    terrain,
)
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import LOO, Vecchia

clock = time.perf_counter  # or time.process_time, see --clock
MARKS = {"terrain": (3.07, -2.553), "elevators": (0.395, 0.488), "protein": (0.584, 0.824)}  # RMSE as printed, and NLL


def split(name):
    """Training and held-out data, start of kernel and noise, and the unit of the RMSE."""
    if name == "terrain":
        data = terrain()
        test = torch.rand(len(data.x), generator=torch.Generator().manual_seed(0)) < 0.2
        rows, x = ((~test).nonzero()[:, 0], test.nonzero()[:, 0]), data.x
        start, noise = {"variance": torch.tensor(1.0), "lengthscale": torch.tensor([0.4, 0.4])}, 2e-4
    else:
        data = load(name)
        train, _, test = random_split(len(data.x), (0.64, 0.16, 0.2), 1)
        rows, x = (train, test), Standardizer(data.x[train]).transform(data.x)
        start, noise = {"variance": torch.tensor(0.6931), "lengthscale": torch.full((x.shape[1],), 2.0)}, 0.6931
    standard = Standardizer(data.y[rows[0]])
    y, unit = standard.transform(data.y), float(standard.scale) if name == "terrain" else 1.0
    return *((x[part], y[part]) for part in rows), start, noise, unit


def ours(method, train, start_values, noise, args):
    """Seconds so far and a function of inputs that gives mean and standard deviation, after each leg."""
    x, y = train
    start = clock()
    gp = method(x, y, Matern52(x.shape[1], **start_values), Gaussian(noise), num_neighbors=32)
    seconds = clock() - start

    def predict(x_new):
        predictive = gp.predict(x_new, num_neighbors=64)
        return predictive.mean, predictive.stddev

    for leg in range(args.legs):
        start = clock()
        if leg and args.name != "terrain":  # many inputs: neighbors follow the lengthscales
            gp.refresh_neighbors()
        fit(gp, args.steps, batch_size=args.batch_size, lr=0.1 * 0.5**leg, seed=leg, progress=False)
        seconds += clock() - start
        yield (leg + 1) * args.steps, seconds, predict


def peer(train):
    """The same of GPyTorch's VNNGP, after 100 epochs from the start that its paper takes."""
    start = clock()
    gp = GPyTorch(*train, 32, {"lengthscale": 0.6931, "noise": 0.6931})
    steps = 100 * (len(train[0]) // BATCH)
    gp.steps(steps)
    yield steps, clock() - start, gp.predict


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=list(MARKS))
    parser.add_argument("--legs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of a leg")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--out", type=Path, help="file that the table is added to")
    parser.add_argument("--clock", choices=["perf_counter", "process_time"], default="perf_counter")
    args = parser.parse_args()
    global clock
    clock = getattr(time, args.clock)
    (x, y), (x_test, y_test), start_values, noise, unit = split(args.name)
    worst_error, worst_score = MARKS[args.name]
    lines = [
        f"{args.name}: {len(x):,} training and {len(x_test):,} held-out points, K = 32 in training and 64 in "
        f"prediction, B = {args.batch_size}, {torch.get_num_threads()} threads, {args.clock}; torch "
        f"{torch.__version__}. The mark is RMSE {worst_error}, NLL {worst_score}.",
        "",
        "| method | steps | set-up and training [s] | RMSE | NLL | CRPS | coverage | prediction [s] | mark |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    fit(LOO(x[:100], y[:100], Matern52(x.shape[1]), Gaussian(noise), num_neighbors=5), 1, progress=False)  # imports
    systems = {method.__name__: ours(method, (x, y), start_values, noise, args) for method in (Vecchia, LOO)}
    if args.peer:
        GPyTorch(x[:100], y[:100], 5)
        systems = {"GPyTorch's VNNGP": peer((x, y))}
    for name, legs in systems.items():
        for steps, seconds, predict in legs:
            start = clock()
            with torch.no_grad():
                loc, sd = predict(x_test)
            predicting = clock() - start
            error, score = float(rmse(y_test, loc)) * unit, float(nll(y_test, Normal(loc, sd)))
            lines.append(
                f"| {name} | {steps} | {seconds:.1f} | {error:.3f} | {score:.3f} "
                f"| {float(crps_gaussian(y_test, loc, sd)):.4f} "
                f"| {float(coverage(y_test, *gaussian_interval(loc, sd))):.3f} | {predicting:.1f} "
                f"| {'reached' if error <= worst_error and score <= worst_score else ''} |"
            )
            print(lines[-1], flush=True)
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
