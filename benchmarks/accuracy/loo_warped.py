"""Figure 1 of Jankowiak and Pleiss (2021): LOO-k against the marginal likelihood, where no stationary kernel fits.

Data are drawn from a stationary GP (RBF kernel, lengthscale 1/2, noise 0.1) on the cube [-1, 1]^4; then inputs below 0
are stretched by 1 + gamma, so no stationary kernel is right for gamma > 0. One data set, warped to different degrees;
half of it is for testing. The paper has 8096 points and the exact marginal likelihood; here are fewer points, and
Vecchia and MLL-k on the same neighbors represent it.

Usage: python benchmarks/accuracy/loo_warped.py [--points 4000] [--neighbors 64] [--steps 1500] [--gammas 0 1 2 4]
[--seed 0]
"""

import argparse
import math

import torch

from pyro_nngp.data import nll, rmse
from pyro_nngp.inference import Schedule, fit
from pyro_nngp.kernels import RBF
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import LOO, MLLk, Vecchia

NOISE = 0.1  # standard deviation


def simulate(num_points, seed):
    """Inputs in the cube, and a draw of the process with noise at them."""
    torch.manual_seed(seed)
    x = 2 * torch.rand(num_points, 4, dtype=torch.float64) - 1
    square = (x[:, None] - x).square().sum(-1)
    cov = torch.exp(-square / (2 * 0.5**2)) + NOISE**2 * torch.eye(num_points, dtype=torch.float64)
    y = torch.linalg.cholesky(cov) @ torch.randn(num_points, dtype=torch.float64)
    return x.float(), y.float()


def run(method, x, y, neighbors, steps, seed):
    """Test NLL and RMSE, learned noise."""
    half = len(x) // 2
    kernel = RBF(4, variance=torch.tensor(1.0), lengthscale=torch.full((4,), 0.7))
    settings = {"num_neighbors": neighbors, "seed": seed}
    if method == "LOO-k":
        gp = LOO(x[:half], y[:half], kernel, Gaussian(0.1), **settings)
    else:
        gp = (MLLk if method == "MLL-k" else Vecchia)(x[:half], y[:half], kernel, Gaussian(0.1), **settings)
    recipe = {"lr": 0.03, "schedule": Schedule((0.25, 0.5, 0.75), 0.2), "refresh_every": 100}
    fit(gp, steps, batch_size=128, seed=seed, progress=False, **recipe)
    gp.refresh_neighbors()
    with torch.no_grad():
        predictive = gp.predict(x[half:])
    noise = math.sqrt(float(gp.likelihood.variance.detach()))
    return float(nll(y[half:], predictive)), float(rmse(y[half:], predictive.mean)), noise


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=4000)
    parser.add_argument("--neighbors", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--gammas", type=float, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--methods", nargs="+", default=["LOO-k", "MLL-k", "Vecchia"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    x, y = simulate(args.points, args.seed)
    print("| gamma | method | test NLL | RMSE | learned noise |\n|---|---|---|---|---|", flush=True)
    for gamma in args.gammas:
        warped = torch.where(x < 0, (1 + gamma) * x, x)
        for method in args.methods:
            cells = run(method, warped, y, args.neighbors, args.steps, args.seed)
            print(f"| {gamma:g} | {method} | " + " | ".join(f"{value:.3f}" for value in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
