"""Intervals of residual correlations of a factor model, on simulated data: coverage, errors, and processor seconds.

Sites on the unit square, outputs, and factors of Matern-3/2 kernels with ranges from .15 to .5, standard normal
loadings (half as large for counts), constants of scale .7 (.35). Labels are Bernoulli under a logit link, counts are
Poisson under a log link. The fit starts from a range of .3 for each factor. Scale is the norm of all loadings, in units
of the true ones.

Usage: python benchmarks/accuracy/factors.py Bernoulli Poisson [--sizes 400 40 5] [--sets 10] [--first 0]
Seconds are processor time; use one thread.
"""

import argparse
import time

import torch

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Poisson
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.models import LMC

F64 = torch.float64


def simulated(kind, seed, sizes):
    """Sites (N, D), targets (N, T), and covariances of the outputs (T, T)."""
    N, T, F = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64)

    x = torch.rand(N, 2, generator=generator, dtype=F64)
    loading, constant = normal(T, F), 0.7 * normal(T)
    scaled = 3**0.5 * torch.cdist(x, x) / torch.linspace(0.15, 0.5, F, dtype=F64)[:, None, None]
    roots = torch.linalg.cholesky((1 + scaled) * torch.exp(-scaled) + 1e-8 * torch.eye(N, dtype=F64))
    f = constant[:, None] + loading @ torch.stack([root @ normal(N) for root in roots])
    if kind == "Bernoulli":
        y = torch.bernoulli(f.sigmoid(), generator=generator)
    else:
        y = torch.poisson((f / 2).exp(), generator=generator)
    loading = loading if kind == "Bernoulli" else loading / 2
    return x, y.mT.contiguous(), loading @ loading.mT


def run(kind, seed, sizes):
    (_, T, F), (x, y, cov) = sizes, simulated(kind, seed, sizes)
    truth = cov / cov.diagonal().sqrt() / cov.diagonal().sqrt()[:, None]
    start = time.process_time()
    kernels = [Matern32(2, lengthscale=torch.tensor(0.3, dtype=F64)) for _ in range(F)]
    gp = LMC(x, y, kernels, {"Bernoulli": Bernoulli, "Poisson": Poisson}[kind](), mixing=FactorLoadings(T, F))
    fit(gp, progress=False)
    found, seconds = gp.correlations(), time.process_time() - start
    i, j = torch.triu_indices(T, T, 1)
    inside = ((found.lower <= truth) & (truth <= found.upper))[i, j].to(F64).mean()
    error = (found.estimate - truth)[i, j].square().mean().sqrt()
    width = (found.upper - found.lower)[i, j].mean()
    scale = (gp.output_covariance().trace() / cov.trace()).sqrt()
    print(f"| {kind} | {seed} | {inside:.3f} | {error:.3f} | {width:.3f} | {scale:.2f} | {seconds:.1f} |", flush=True)
    return torch.stack([inside, error, width, scale, torch.tensor(seconds, dtype=F64)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="+", choices=["Bernoulli", "Poisson"])
    parser.add_argument("--sizes", type=int, nargs=3, default=[400, 40, 5], help="sites, outputs, factors")
    parser.add_argument("--sets", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    print("| data | set | coverage | RMSE | width | scale | seconds |\n|---|---|---|---|---|---|---|")
    for kind in arguments.kinds:
        seeds = range(arguments.first, arguments.first + arguments.sets)
        mean = torch.stack([run(kind, seed, arguments.sizes) for seed in seeds]).mean(0).tolist()
        print(f"| {kind} | all {arguments.sets} | {' | '.join(f'{value:.3f}' for value in mean)} |")
