"""Counts and labels beside GPBoost: the same rows, kernel and number of neighbors, both from their defaults.

Usage: python benchmarks/accuracy/beside_gpboost.py [--sets bei_trees banana] [--seeds 0] [--out beside_gpboost.md]

``VNNGP`` with Gaussian sites against GPBoost's Vecchia-Laplace approximation: Matérn-3/2 with one lengthscale for each
of two inputs, K = 20, a constant mean, a random fifth of the rows held out. The negative log density of a held-out
datum is that of the likelihood for the normal distribution that each reports for f there. Processor time, one thread;
standard errors are GPBoost's. The data come from the folder that PYRO_NNGP_DATA names; `pip install gpboost`.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from rows import commit  # beside this file

import pyro_nngp as nngp
from pyro_nngp.data import datasets
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Poisson

K = 20
SETS = {"bei_trees": (Poisson, "poisson"), "banana": (Bernoulli, "bernoulli_logit")}
NAMES = ("variance", "lengthscale 1", "lengthscale 2")


def split(name, seed):
    data = datasets.load(name, torch.float64)
    x, y = data.x[:, :2], data.y.flatten().double()
    held_out = torch.zeros(len(x), dtype=torch.bool)
    held_out[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: len(x) // 5]] = True
    return x[~held_out], y[~held_out], x[held_out], y[held_out]


def ours(name, x, y, x_new):
    """Hyperparameters, moments of f at new places, seconds."""
    start = time.process_time()
    gp = nngp.VNNGP(x, y, Matern32(2), SETS[name][0](), num_neighbors=K)
    nngp.fit(gp, progress=False)
    with torch.no_grad():
        moments = gp(x_new)
    seconds = time.process_time() - start
    kernel = gp.bound().kernel
    return [kernel.variance.item(), *kernel.lengthscale.tolist()], None, moments, seconds


def theirs(name, x, y, x_new):
    """The same, with standard errors of the hyperparameters."""
    import gpboost as gpb

    start = time.process_time()
    model = gpb.GPModel(
        gp_coords=x.numpy(),
        cov_function="matern_ard",
        cov_fct_shape=1.5,
        likelihood=SETS[name][1],
        gp_approx="vecchia",
        num_neighbors=K,
        num_parallel_threads=1,
    )
    constant = np.ones((len(x), 1))
    model.fit(y=y.numpy(), X=constant)
    found = model.predict(
        gp_coords_pred=x_new.numpy(), X_pred=np.ones((len(x_new), 1)), predict_var=True, predict_response=False
    )
    seconds = time.process_time() - start
    table = np.asarray(model.get_cov_pars(std_err=True), float)
    moments = torch.from_numpy(found["mu"]), torch.from_numpy(found["var"])
    return table[0].tolist(), table[1].tolist(), moments, seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"| set | seed | | NLL | s | {' | '.join(NAMES)} |", "|---|---|---|---|---|---|---|---|"]
    for name in args.sets:
        for seed in args.seeds:
            x, y, x_new, y_new = split(name, seed)
            for label, run in (("VNNGP", ours), ("GPBoost", theirs)):
                values, errors, moments, seconds = run(name, x, y, x_new)
                nll = -SETS[name][0]().bind().marginal(*moments).log_prob(y_new).mean().item()
                shown = [f"{value:.4g}" for value in values]
                if errors is not None:
                    shown = [f"{value} ± {error:.2g}" for value, error in zip(shown, errors, strict=True)]
                lines.append(f"| {name} | {seed} | {label} | {nll:.4f} | {seconds:.1f} | {' | '.join(shown)} |")
                print(lines[-1], flush=True)
    text = "\n".join([*lines, "", f"Commit {commit()}."])
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
