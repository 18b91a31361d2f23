"""Posteriors of f beside NUTS on the exact Gaussian process, hyperparameters fixed.

f is a draw from a Matern-3/2 process (variance 1.5, lengthscale .3, level .5) at N random points in the unit square, y
one draw given f. NUTS runs on whitened values of the dense process, at the same hyperparameters. A method's mean and
standard deviation of f at the data are compared with those of the draws: distance of the means in posterior standard
deviations (largest and root mean square), ratio of the standard deviations (median, smallest, largest). Draws have
Monte Carlo errors of their own, in the last column: of a mean, in standard deviations; the relative one of a standard
deviation is .7 of it.

Usage: python benchmarks/accuracy/nuts.py [--points 150] [--draws 1500] [--out benchmarks/results/nuts.md]
"""

import argparse
import warnings
from pathlib import Path

import pyro
import torch
from coverage import FAMILIES  # beside this file
from pyro.infer import MCMC, NUTS
from pyro.ops.stats import effective_sample_size
from rows import commit  # beside this file

from pyro_nngp.kernels import Matern32
from pyro_nngp.models import NPVI, SVGP, VNNGP
from pyro_nngp.variational import MeanField

METHODS = {
    "VNNGP": lambda *a, **o: VNNGP(*a, num_neighbors=20, **o),
    "VNNGP, 10 neighbors": lambda *a, **o: VNNGP(*a, num_neighbors=10, **o),
    "VNNGP, mean-field": lambda *a, **o: VNNGP(*a, num_neighbors=20, guide=MeanField(), **o),
    "NPVI": lambda *a, **o: NPVI(*a, num_neighbors=20, **o),
    "SVGP, M = 100": lambda *a, **o: SVGP(*a, inducing=100, learn_inducing=False, **o),
}


def level(x):
    """The mean function."""
    return torch.full_like(x[..., 0], 0.5)


def problem(num_points, family):
    """x, y, kernel, likelihood and the factor of the dense covariance."""
    torch.manual_seed(0)
    x = torch.rand(num_points, 2, dtype=torch.float64)
    kernel = Matern32(2, variance=1.5, lengthscale=0.3).double().requires_grad_(False)
    tril = torch.linalg.cholesky(kernel(x) + 1.5e-6 * torch.eye(num_points))
    y = FAMILIES[family][1](0.5 + tril @ torch.randn(num_points, dtype=torch.float64))
    return x, y, kernel, FAMILIES[family][0]().double().requires_grad_(False), tril


def draws_of_f(y, likelihood, tril, count):
    """Draws of f by NUTS on whitened values."""
    bound = likelihood.bind()

    def potential(values):
        nu = values["nu"]
        return 0.5 * nu.square().sum() - bound(0.5 + tril @ nu).log_prob(y).sum()

    pyro.set_rng_seed(1)
    sampler = NUTS(potential_fn=potential)
    start = {"nu": torch.zeros_like(y, dtype=torch.float64)}
    chain = MCMC(sampler, count, 300, initial_params=start, disable_progbar=True)
    chain.run()
    return 0.5 + chain.get_samples()["nu"] @ tril.mT


def compared(gp, x, draws):
    """Largest and root mean square distance of means; median, least and largest ratio of standard deviations."""
    with torch.no_grad():
        loc, var = gp(x)
    scale = draws.std(0)
    distance, ratio = (loc - draws.mean(0)) / scale, var.sqrt() / scale
    return distance.abs().max(), distance.square().mean().sqrt(), ratio.median(), ratio.min(), ratio.max()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=150)
    parser.add_argument("--draws", type=int, default=1500)
    parser.add_argument("--families", nargs="+", default=["Bernoulli", "Poisson", "NegativeBinomial"])
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    lines = [
        f"`python benchmarks/accuracy/nuts.py --points {args.points} --draws {args.draws}`, commit {commit()}, torch "
        f"{torch.__version__}, {torch.get_num_threads()} thread(s). Matern-3/2, lengthscale 0.3, variance 1.5.",
        "",
        "| data | method | mean: largest z | root mean square | sd: median ratio | least | largest | error of NUTS |",
        "|---" * 8 + "|",
    ]
    print("\n".join(lines))
    for family in args.families:
        x, y, kernel, likelihood, tril = problem(args.points, family)
        draws = draws_of_f(y, likelihood, tril, args.draws)
        error = float(effective_sample_size(draws[None]).clamp(max=len(draws)).rsqrt().median())
        for name, method in METHODS.items():
            pyro.set_rng_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gp = method(x, y, kernel, likelihood, mean=level)
                gp.solve(max_steps=100, tolerance=1e-6)
            cells = " | ".join(f"{float(value):.2f}" for value in compared(gp, x, draws))
            lines.append(f"| {family} | {name} | {cells} | {error:.2f} |")
            print(lines[-1], flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
