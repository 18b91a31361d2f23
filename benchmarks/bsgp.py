"""BSGP on UCI sets: depth, objective and prior over inducing inputs, beside the paper's table 5.

Splits are 80/20 at random, inputs and targets standardised on the training rows; scores are in the units of y. RBF
ARD with log-normal priors, M = 100, minibatches of 1000 (all rows where there are fewer). Chains start at the median of
a mean-field guide; the noise variance and the constant mean are optimised until burn-in ends, the rest is sampled by
SGHMC with the scale-adapted preconditioner.

Usage: python benchmarks/bsgp.py boston yacht [--layers 1 2] [--objectives fitc vfe] [--priors normal strauss]
           [--folds 2] [--svi 1500] [--burn-in 3000] [--samples 256] [--thin 10] [--out FILE]
The data come from `pyro_nngp.datasets.uci`, or from the folder that PYRO_NNGP_DATA names; of several targets the first.
"""

import argparse
import itertools
import math
import time
from pathlib import Path

import pyro
import torch
from pyro.infer import MCMC, Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value

from pyro_nngp.datasets import uci
from pyro_nngp.hyperparameters import lognormal_priors
from pyro_nngp.inference import SGHMC, Minibatch, fit
from pyro_nngp.kernels import RBF
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.metrics import coverage, nll, rmse
from pyro_nngp.models import BSGP
from pyro_nngp.preprocessing import Standardizer, random_split

PAPER = {  # test NLL of table 5, by layers
    "boston": (2.47, 2.47),
    "concrete": (3.12, 3.04),
    "energy": (0.97, 0.95),
    "protein": (2.78, 2.63),
    "yacht": (-0.23, -0.72),
}


def split(name, seed):
    """Training and test rows, standardised, and the standard deviation of y."""
    data = uci(name, torch.float64)
    y = data.y[:, 0] if data.y.dim() == 2 else data.y
    train, test = random_split(len(y), (0.8, 0.2), seed)
    to_x, to_y = Standardizer(data.x[train]), Standardizer(y[train])
    pairs = [(to_x.transform(data.x[rows]), to_y.transform(y[rows])) for rows in (train, test)]
    return *pairs, float(y[train].std(correction=0))


def run(name, layers, objective, prior, seed, args):
    pyro.set_rng_seed(seed)
    (x, y), (x_test, y_test), scale = split(name, seed)
    kernel = lognormal_priors(RBF(x.shape[1], lengthscale=torch.ones(x.shape[1])), like=x)
    gp = BSGP(
        x,
        y,
        kernel,
        Gaussian(0.05),
        inducing=args.inducing,
        objective=objective,
        inducing_prior=prior,
        num_layers=layers,
        seed=seed,
    )
    start = time.process_time()
    guide = AutoNormal(gp.model, init_loc_fn=gp.init_strategy, init_scale=0.05)
    fit((gp.model, guide), args.svi, batch_size=1000, lr=0.02, elbo=Trace_ELBO(), num_data=len(x), progress=False)
    median = init_to_value(values={name: value.detach() for name, value in guide.median().items()})
    sghmc = SGHMC(gp.model, args.step_size, num_steps=args.thin, optim={"lr": args.lr}, init_strategy=median)
    mcmc = MCMC(sghmc, args.samples, args.burn_in, disable_progbar=not args.progress)
    mcmc.run(Minibatch(len(x), min(1000, len(x))))
    seconds = time.process_time() - start
    predictive = gp.predict(x_test, mcmc.get_samples())
    interval = [predictive.mean + sign * 1.96 * predictive.variance.sqrt() for sign in (-1, 1)]
    found = sghmc.diagnostics()
    return [
        float(nll(y_test, predictive)) + math.log(scale),
        float(rmse(y_test, predictive.mean)) * scale,
        float(coverage(y_test, *interval)),
        float(gp.likelihood.variance.detach().sqrt()) * scale,
        found["configurational temperature"],
        seconds,
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--layers", type=int, nargs="+", default=[1])
    parser.add_argument("--objectives", nargs="+", default=["fitc"])
    parser.add_argument("--priors", nargs="+", default=["normal"])
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--inducing", type=int, default=100)
    parser.add_argument("--svi", type=int, default=1500)
    parser.add_argument("--burn-in", type=int, default=3000)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--thin", type=int, default=10)
    parser.add_argument("--step-size", type=float, default=0.01)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        f"BSGP, M = {args.inducing}: {args.svi} steps of SVI, {args.burn_in} updates of burn-in, {args.samples} draws "
        f"{args.thin} updates apart, step size {args.step_size}; float64, {torch.get_num_threads()} threads, "
        f"{args.folds} folds of 80/20; torch {torch.__version__}.",
        "",
        "| data | L | objective | prior of z | NLL | paper | RMSE | coverage of 95 % | noise | temperature | CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name, layers, objective, prior in itertools.product(args.names, args.layers, args.objectives, args.priors):
        folds = torch.tensor([run(name, layers, objective, prior, seed, args) for seed in range(args.folds)])
        mean, spread = folds.mean(0).tolist(), float(folds[:, 0].std() / len(folds) ** 0.5) if len(folds) > 1 else 0
        paper = PAPER[name][layers - 1] if name in PAPER and layers <= 2 else ""
        values = f"{mean[1]:.3g} | {mean[2]:.2f} | {mean[3]:.3g} | {mean[4]:.2f} | {mean[5]:.0f}"
        lines.append(
            f"| {name} | {layers} | {objective} | {prior} | {mean[0]:.2f} ± {spread:.2f} | {paper} | {values} |"
        )
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
