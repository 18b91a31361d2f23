"""LOO-k, MLL-k and Vecchia on the data sets of Jankowiak and Pleiss (2021): regression, binary, multi-class.

Splits are 15:3:2 into training, test and validation rows, inputs (and real targets) standardised on the training rows,
Matern-5/2 ARD, Adam from 0.03 divided by 5 after 25, 50 and 75 % of the steps, B = 128 (64 for classes), neighbors
found again under the learned lengthscales. K, and the number of neighbors used for predictions, are to be chosen by
validation NLL. Columns: data, objective, seed, K, K of predictions, validation NLL, test NLL, then RMSE and CRPS or the
error rate, learned noise variance, seconds of training.

Usage: python benchmarks/loo.py elevators [--epochs 20] [--neighbors 32 64] [--seeds 2] [--objective loo mll vecchia]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import argparse
import time

import torch

from pyro_nngp.datasets import load
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian
from pyro_nngp.metrics import crps_gaussian, error_rate, nll, rmse
from pyro_nngp.models import LOO, SVGP, Vecchia
from pyro_nngp.preprocessing import Standardizer, random_split

RINGS = (8.5, 10.5)  # abalone in three classes
BINARY = ("titanic", "spambase", "musk2", "bank_marketing", "adult", "banana", "breast_cancer")
CLASSES = ("abalone", "page_blocks", "optdigits", "pendigits", "shuttle", "cardiotocography10")


def split(name, seed):
    """Training, test and validation rows, inputs standardised, and the likelihood."""
    data = load(name)
    x, y = data.x, data.y
    if name == "abalone":
        y = torch.bucketize(y, torch.tensor(RINGS))
    elif name in CLASSES:
        y = y.unique(return_inverse=True)[1]
    parts = random_split(len(x), (0.75, 0.15, 0.1), seed)
    to_x = Standardizer(x[parts[0]])
    if name in BINARY:
        likelihood = Bernoulli
    elif name in CLASSES:
        classes = len(y.unique())
        likelihood = lambda: Categorical(classes)  # noqa: E731
    else:
        y = Standardizer(y[parts[0]]).transform(y)
        likelihood = Gaussian
    return [(to_x.transform(x[rows]), y[rows]) for rows in parts], likelihood


@torch.no_grad()
def scores(gp, x, y, k, block=2000):
    """NLL, then RMSE and CRPS, or the error rate, from k neighbors (None: a method without them)."""
    total, weights = [], []
    for part in torch.arange(len(x)).split(block):
        predictive = gp.predict(x[part]) if k is None else gp.predict(x[part], k)
        density = float(nll(y[part], predictive))
        if isinstance(gp.likelihood, Gaussian):
            loc, scale = predictive.mean, predictive.stddev
            square, crps = float(rmse(y[part], loc)) ** 2, float(crps_gaussian(y[part], loc, scale))
            total.append((density, square, crps))
        elif isinstance(gp.likelihood, Bernoulli):
            total.append((density, float(error_rate(y[part], (predictive.probs > 0.5).to(y.dtype)))))
        else:
            total.append((density, float(error_rate(y[part], predictive.probs.argmax(-1)))))
        weights.append(len(part))
    means = (torch.tensor(total).mT * torch.tensor(weights)).sum(-1) / sum(weights)
    if len(means) == 3:
        means[1] = means[1].sqrt()
    return means.tolist()


def build(objective, x, y, likelihood, k, args, seed):
    kernel = Matern52(
        x.shape[1], variance=torch.tensor(args.variance), lengthscale=torch.full((x.shape[1],), x.shape[1] ** 0.5)
    )
    if objective == "loo":
        return LOO(x, y, kernel, likelihood, num_neighbors=k, guide=args.guide, objective=args.loo_objective, seed=seed)
    if objective == "svgp":
        return SVGP(x, y, kernel, likelihood, inducing=min(k, len(x)), seed=seed)
    return Vecchia(x, y, kernel, likelihood, num_neighbors=k, objective=objective, seed=seed)


def run(name, objective, k, args, seed):
    """Train once; for each number of neighbors of predictions the scores, learned noise, seconds of training."""
    ((x, y), test, validation), make = split(name, seed)
    if args.degenerate:
        torch.manual_seed(seed)
        x, y = (torch.cat([v, v + 0.01 * torch.randn_like(v)]) for v in (x, y))
    likelihood = Gaussian(0.25) if make is Gaussian else make()
    size = args.batch_size or (64 if isinstance(likelihood, Categorical) else 128)
    gp = build(objective, x, y, likelihood, k, args, seed)
    steps = max(1, round(args.epochs * len(x) / size))
    begin = time.perf_counter()
    refreshing = {} if objective == "svgp" else {"refresh_every": args.refresh_every}
    fit(
        gp,
        steps,
        batch_size=size,
        lr=args.lr,
        local_lr=args.local_lr,
        milestones=(0.25, 0.5, 0.75),
        decay=0.2,
        seed=seed,
        progress=False,
        solve_every=args.solve_every,
        **refreshing,
    )
    seconds = time.perf_counter() - begin
    neighbors = None if objective == "svgp" else k
    if neighbors:
        gp.refresh()
    noise = float(gp.likelihood.variance.detach()) if isinstance(likelihood, Gaussian) else float("nan")
    for n in args.predict or [neighbors]:
        yield n, scores(gp, *validation, n), scores(gp, *test, n), noise, seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--objective", nargs="+", default=["loo"], choices=["loo", "mll", "vecchia", "svgp"])
    parser.add_argument("--neighbors", type=int, nargs="+", default=[32, 64], help="K; inducing points for svgp")
    parser.add_argument("--guide", default="lognormal", choices=["lognormal", "conjugate"])
    parser.add_argument("--loo-objective", choices=["posterior", "prior"], help="of LOO; the default is its own")
    parser.add_argument("--solve-every", type=int, help="of fit; 0 takes gradients in q(omega)")
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--variance", type=float, default=1.0, help="of the kernel, to start from")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--local-lr", type=float, default=0.03)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--refresh-every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--degenerate", action="store_true", help="train on noisy duplicates too (section 5.5)")
    parser.add_argument("--predict", type=int, nargs="+", help="numbers of neighbors for predictions; default K")
    args = parser.parse_args()
    for objective in args.objective:
        for seed in range(args.seeds):
            for k in args.neighbors:
                for n, validation, test, noise, seconds in run(args.name, objective, k, args, seed):
                    cells = [args.name, objective, str(seed), str(k), str(n), f"{validation[0]:.4f}"]
                    cells += [f"{value:.4f}" for value in test] + [f"{noise:.4f}", f"{seconds:.0f}"]
                    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
