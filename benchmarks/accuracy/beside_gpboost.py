"""Counts, labels and Gaussian data beside GPBoost: the same rows, kernel and number of neighbors, both from defaults.

Usage: python benchmarks/accuracy/beside_gpboost.py [--sets bei_trees banana 2d-1000 2d-10000] [--seeds 0]
           [--only VNNGP GPBoost Vecchia] [--out FILE]

``VNNGP`` with Gaussian sites against GPBoost's Vecchia-Laplace approximation: Matérn-3/2 with one lengthscale for each
of two inputs, K = 20, a constant mean, a random fifth of the rows held out. The negative log density of a held-out
datum is that of the likelihood for the normal distribution that each reports for f there. "2d-N" has N rows of waves
with Gaussian noise, Matérn-5/2, and a row for ``Vecchia``, which integrates f out; "labels-N" has N labels whose logits
are twice these waves, "counts-N" N Poisson counts whose logarithmic mean they are. Processor time, one thread; standard
errors are GPBoost's. The data come from the folder that PYRO_NNGP_DATA names; it needs `pip install gpboost`.
"""

import argparse
import re
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rows import commit  # beside this file

import pyro_nngp as nngp
from pyro_nngp.data import datasets
from pyro_nngp.kernels import Matern32, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, Poisson

K = 20
SETS = {"bei_trees": (Poisson, "poisson"), "banana": (Bernoulli, "bernoulli_logit")}
SIMULATED = re.compile(r"(2d|labels|counts)-(\d+)")
LIKE = {"labels": "banana", "counts": "bei_trees"}
NAMES = ("variance", "lengthscale 1", "lengthscale 2")


def is_gaussian(name):
    return name.startswith("2d-")


def likelihood_of(name):
    """The likelihood here, and its name there."""
    if is_gaussian(name):
        return Gaussian, "gaussian"
    found = SIMULATED.fullmatch(name)
    return SETS[LIKE[found[1]] if found else name]


def simulated(kind, n):
    """Waves at a constant density of points, with noise of a tenth of their amplitude; 2,000 rows are held out."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n + 2000, 2, generator=generator, dtype=torch.float64) * (n / 1000) ** (1 / 2)
    f = torch.sin(3 * x[:, 0]) + torch.cos(4 * x[:, 1])
    if kind == "labels":
        y = torch.bernoulli((2 * f).sigmoid(), generator=generator)
    elif kind == "counts":
        y = torch.poisson(f.exp(), generator=generator)
    else:
        y = f + 0.1 * torch.randn(len(x), generator=generator, dtype=torch.float64)
    return x[:n], y[:n], x[n:], y[n:]


def split(name, seed):
    if found := SIMULATED.fullmatch(name):
        return simulated(found[1], int(found[2]))
    data = datasets.load(name, torch.float64)
    x, y = data.x[:, :2], data.y.flatten().double()
    held_out = torch.zeros(len(x), dtype=torch.bool)
    held_out[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: len(x) // 5]] = True
    return x[~held_out], y[~held_out], x[held_out], y[held_out]


def ours(name, x, y, x_new, method=nngp.VNNGP):
    """Hyperparameters, moments of f at new places (of y with Gaussian noise), seconds."""
    start = time.process_time()
    kernel, likelihood = Matern52 if is_gaussian(name) else Matern32, likelihood_of(name)[0]
    gp = method(x, y, kernel(2), likelihood(), num_neighbors=K)
    nngp.fit(gp, progress=False)
    with torch.no_grad():
        moments = gp(x_new)
    seconds = time.process_time() - start
    if is_gaussian(name):
        moments = moments[0], moments[1] + gp.bound().likelihood.variance.detach()
    kernel = gp.bound().kernel
    return [kernel.variance.item(), *kernel.lengthscale.tolist()], None, moments, seconds


def theirs(name, x, y, x_new):
    """The same, with standard errors of the hyperparameters."""
    import gpboost as gpb

    start = time.process_time()
    model = gpb.GPModel(
        gp_coords=x.numpy(),
        cov_function="matern_ard",
        cov_fct_shape=2.5 if is_gaussian(name) else 1.5,
        likelihood=likelihood_of(name)[1],
        gp_approx="vecchia",
        num_neighbors=K,
        num_parallel_threads=1,
    )
    constant = np.ones((len(x), 1))
    model.fit(y=y.numpy(), X=constant)
    found = model.predict(
        gp_coords_pred=x_new.numpy(),
        X_pred=np.ones((len(x_new), 1)),
        predict_var=True,
        predict_response=is_gaussian(name),
    )
    seconds = time.process_time() - start
    table = np.asarray(model.get_cov_pars(std_err=True), float)[:, -3:]  # without the variance of the noise
    moments = torch.from_numpy(found["mu"]), torch.from_numpy(found["var"])
    return table[0].tolist(), table[1].tolist(), moments, seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", nargs="+", default=[*SETS, "2d-1000", "2d-10000"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--only", nargs="+", default=["VNNGP", "GPBoost", "Vecchia"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours("2d-200", *split("2d-200", 0)[:3])  # imports
    lines = [f"| set | seed | | NLL | s | {' | '.join(NAMES)} |", "|---|---|---|---|---|---|---|---|"]
    for name in args.sets:
        for seed in args.seeds:
            x, y, x_new, y_new = split(name, seed)
            runs = {"VNNGP": ours, "GPBoost": theirs}
            if is_gaussian(name):
                runs |= {"Vecchia": partial(ours, method=nngp.Vecchia)}
            for label, run in ((label, run) for label, run in runs.items() if label in args.only):
                values, errors, moments, seconds = run(name, x, y, x_new)
                if is_gaussian(name):
                    density = torch.distributions.Normal(moments[0], moments[1].sqrt())
                else:
                    density = likelihood_of(name)[0]().bind().marginal(*moments)
                nll = -density.log_prob(y_new).mean().item()
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
