"""K neighbors beside the exact process: the divergence of the prior and of its response, and predictions, as K grows.

Hyperparameters are those of `fit(Vecchia(x, y))` and stay fixed; inputs and targets are in units of their standard
deviations. All figures are in float64, dense where exact. Columns:

- KL of f, of y: Kullback-Leibler divergence of the nearest-neighbor prior of the N latent values, or of the N data with
  noise, from the exact one, in nats per point. By the chain rule it is the mean of log(v_K / v_exact) / 2 over the
  conditional variances v.
- mean, sd: predictions of f at held-out points from K neighbors beside the exact ones: the root mean square of the
  difference of means in exact standard deviations, and the mean ratio of standard deviations.
- NLL: of held-out y, beyond that of the exact process, in nats per point.

Usage: python benchmarks/accuracy/exact_gp.py [--data elevators "house prices"] [--points 5000]
           [--neighbors 5 10 20 40 80 160] [--orderings random maximin coordinate]
           [--out benchmarks/results/exact_gp.md]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import argparse
import warnings
from pathlib import Path

import torch
from papers import TASKS  # beside this file
from rows import commit
from tasks import split
from torch.distributions import Normal

from pyro_nngp.data import Standardizer
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import fit
from pyro_nngp.models import Vecchia
from pyro_nngp.neighbors import NeighborGraph


def problem(name, points, seed=0):
    """Inputs and targets for training and test in units of their standard deviations, in float64."""
    (x, y), (x_test, y_test) = split(TASKS[name], seed, most=points)
    inputs, targets = Standardizer(x.double()), Standardizer(y.double())
    parts = inputs.transform(x.double()), targets.transform(y.double())
    return *parts, inputs.transform(x_test.double()), targets.transform(y_test.double())


class Exact:
    """The exact process of a trained method: conditional variances in an ordering, and predictions."""

    @torch.no_grad()
    def __init__(self, gp, x, y, jitter=1e-6):
        self.gp, self.x = gp, x
        self.noise = gp.likelihood.variance.detach()
        self.cov = gp.kernel(x)
        self.latent = self.cov + jitter * torch.diag(self.cov.diagonal())
        self.response = self.latent + self.noise * torch.eye(len(x), dtype=x.dtype)
        self.tril = torch.linalg.cholesky(self.response)
        self.weights = torch.cholesky_solve((y - gp.mean(x).reshape(-1))[:, None], self.tril)

    def log_determinants(self):
        """Of the covariances of f and of y: sums of log conditional variances in any ordering."""
        return [2 * torch.linalg.cholesky(cov).diagonal().log().sum() for cov in (self.latent, self.response)]

    @torch.no_grad()
    def predict(self, x_new):
        """Mean and variance of f."""
        cross = self.gp.kernel(self.x, x_new)
        half = torch.linalg.solve_triangular(self.tril, cross, upper=False)
        mean = self.gp.mean(x_new).reshape(-1) + (cross.mT @ self.weights)[:, 0]
        return mean, self.gp.kernel(x_new, diag=True) - half.square().sum(0)


@torch.no_grad()
def row(name, ordering, num_neighbors, gp, exact, log_dets, x, x_test, y_test):
    """One line of the table."""
    metric = None if getattr(gp.graph, "lengthscale", None) is None else gp.kernel.lengthscale.detach()
    graph = NeighborGraph(x, num_neighbors, ordering, metric=metric)
    latent = NNGP(gp.kernel, graph, jitter=1e-6)
    _, latent_var = latent.conditionals
    _, response_var = latent.response_conditionals(exact.noise.expand(len(x)))
    variances = latent_var, response_var + exact.noise
    divergences = [(var.log().sum() - log_det) / (2 * len(x)) for var, log_det in zip(variances, log_dets, strict=True)]
    mean, var = exact.predict(x_test)
    near_mean, near_var = gp(x_test, num_neighbors=num_neighbors)
    best = -Normal(mean, (var + exact.noise).sqrt()).log_prob(y_test).mean()
    near = -Normal(near_mean, (near_var + exact.noise).sqrt()).log_prob(y_test).mean()
    distance = ((near_mean - mean).square() / var).mean().sqrt()
    ratio = (near_var / var).sqrt().mean()
    cells = [f"{value:.1e}" for value in divergences] + [f"{distance:.3f}", f"{ratio:.3f}", f"{near - best:+.4f}"]
    return f"| {name} | {ordering} | {num_neighbors} | " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="+", default=["elevators", "kin40k", "house prices"], metavar="NAME")
    parser.add_argument("--points", type=int, default=5000)
    parser.add_argument("--neighbors", type=int, nargs="+", default=[5, 10, 20, 40, 80, 160])
    parser.add_argument("--orderings", nargs="+", default=["random", "maximin", "coordinate"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exact_gp.md"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [
        f"`python benchmarks/accuracy/exact_gp.py --points {args.points}`, commit {commit()}, torch "
        f"{torch.__version__}, float64. The docstring of the script explains the columns.",
        "",
        "| data | ordering | K | KL of f | KL of y | mean | sd | NLL |",
        "|---" * 8 + "|",
    ]
    for name in args.data:
        x, y, x_test, y_test = problem(name, args.points)
        gp = Vecchia(x, y)
        fit(gp, progress=False)
        exact = Exact(gp, x, y)
        log_dets = exact.log_determinants()
        for ordering in args.orderings:
            for num_neighbors in args.neighbors:
                lines.append(row(name, ordering, num_neighbors, gp, exact, log_dets, x, x_test, y_test))
                print(lines[-1], flush=True)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
