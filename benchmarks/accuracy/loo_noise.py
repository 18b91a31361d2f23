"""Figure 2 of Jankowiak and Pleiss (2021): where LOO-k, the exact marginal likelihood and SVGP put noise and variance.

An exact Gaussian process (Matern-5/2 ARD) is trained on some rows of a data set by its marginal likelihood (MLL). Then
the noise variance alone, and the kernel variance alone, runs over a grid, everything else fixed, and each objective
says where it is largest: the MLL, LOO-k, and the bound of Titsias (2009) at the optimal q(u) with M inducing points
by k-means. Columns: the maximizers, divided by the trained values.

Usage: python benchmarks/accuracy/loo_noise.py bike elevators [--points 2000] [--neighbors 64] [--inducing 100]
The data come from the folder that PYRO_NNGP_DATA names. Seconds are processor time; use one thread.
"""

import argparse
import time

import torch
from pyro.infer import TraceMeanField_ELBO

from pyro_nngp.data import Standardizer, load
from pyro_nngp.inducing.points import inducing_points
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import LOO

JITTER = 1e-6


def subset(name, num_points):
    """Standardized rows of a data set, drawn with seed 0, in double precision."""
    data = load(name, torch.float64)
    rows = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:num_points]
    return Standardizer(data.x[rows]).transform(data.x[rows]), Standardizer(data.y[rows]).transform(data.y[rows])


def marginal_likelihood(cov, y, noise):
    """Log density of y under the exact process with mean zero, per point."""
    eye = torch.eye(len(y), dtype=y.dtype)
    tril = torch.linalg.cholesky(cov + (noise + JITTER * cov[0, 0]) * eye)
    return torch.distributions.MultivariateNormal(torch.zeros_like(y), scale_tril=tril).log_prob(y) / len(y)


def train(x, y, steps):
    """Kernel and noise variance at the maximum of the marginal likelihood."""
    dim = x.shape[1]
    kernel, noise = Matern52(dim, lengthscale=torch.full((dim,), dim**0.5)).double(), torch.tensor(0.1).double().log()
    optimizer = torch.optim.Adam([*kernel.parameters(), noise.requires_grad_()], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps // 2, 3 * steps // 4], 0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        (-marginal_likelihood(kernel(x, x), y, noise.exp())).backward()
        optimizer.step()
        schedule.step()
    return kernel, noise.detach().exp()


def evidence_bound(kernel, x, y, z, noise):
    """Bound of Titsias (2009, eq. 9) per point: what is left of f given z counts as misfit."""
    inner = kernel(z, z) + JITTER * kernel.variance * torch.eye(len(z), dtype=x.dtype)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(inner), kernel(z, x), upper=False)
    low_rank = torch.distributions.LowRankMultivariateNormal(torch.zeros_like(y), half.mT, noise.expand(len(y)))
    missed = len(y) * kernel.variance - half.square().sum()
    return (low_rank.log_prob(y) - missed / (2 * noise)) / len(y)


@torch.no_grad()
def scan(name, args):
    """Rows of the table for one data set."""
    start = time.process_time()
    x, y = subset(name, args.points)
    with torch.enable_grad():
        kernel, noise = train(x, y, args.steps)
    trained = kernel.variance.clone()
    z = inducing_points("scan", x, args.inducing, 0)
    models = {}
    for k in args.neighbors:
        models[k] = LOO(x, y, kernel, Gaussian(), num_neighbors=k, mean=lambda x: torch.zeros_like(x[:, 0]))
        models[k].refresh_neighbors()

    def objectives(noise, variance):
        kernel.variance = variance
        values = {"MLL": marginal_likelihood(kernel(x, x), y, noise)}
        for k, gp in models.items():
            gp.likelihood.variance = noise
            values[f"LOO-{k}"] = -TraceMeanField_ELBO().loss(gp.model, gp.guide) / len(y)
        return values | {f"SVGP, M = {args.inducing}": evidence_bound(kernel, x, y, z, noise)}

    factors = torch.logspace(-1.5, 3, args.grid, dtype=x.dtype)
    found = {"noise": [objectives(noise * factor, trained) for factor in factors]}
    found["variance"] = [objectives(noise, trained * factor) for factor in factors]
    print(f"| {name}, {len(x)} rows | trained by MLL | 1 ({float(noise):.2g}) | 1 ({float(trained):.2g}) | |")
    for label in found["noise"][0]:
        cells = [name, label]
        for values in found.values():
            best = int(torch.tensor([float(value[label]) for value in values]).argmax())
            edge = " (end of the grid)" if best in (0, args.grid - 1) else ""
            cells.append(f"{float(factors[best]):.2g}{edge}")
        print(f"| {' | '.join(cells)} | {time.process_time() - start:.0f} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="+")
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--neighbors", type=int, nargs="+", default=[64])
    parser.add_argument("--inducing", type=int, default=100)
    parser.add_argument("--steps", type=int, default=80, help="of training by the marginal likelihood")
    parser.add_argument("--grid", type=int, default=19)
    args = parser.parse_args()
    print("| data | objective | noise / that of MLL | kernel variance / that of MLL | seconds |\n|---|---|---|---|---|")
    for name in args.data:
        scan(name, args)


if __name__ == "__main__":
    main()
