"""Several outputs in raw units with nothing set: LMC beside a process for each output and CoregionalizedLOO.

jura: cadmium at 100 validation sites, where nickel and zinc are known, as at the 259 others (Goovaerts 1997).
walker: U at 1,000 places of the exhaustive grid from the 470 samples of V and 275 of U (Isaaks and Srivastava 1989).
sarcos: three torques at 500 of 1,500 rows, each torque seen in a random half of the other 1,000.
bbs: counts of six birds on 95 routes, a fifth of the cells held out at random.
mixed: counts and a measurement in other units, drawn from two processes; the counts at a third of 600 sites.

Scores are of the held-out targets: RMSE, mean log density, and the share within the central 95 % of the prediction.
Usage: python benchmarks/accuracy/outputs.py jura walker sarcos bbs mixed [--seeds 1]
The data come from the folder that PYRO_NNGP_DATA names. Seconds are processor time; use one thread.
"""

import argparse
import math
import os
import time
from pathlib import Path

import numpy as np
import torch

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.models import LMC, VNNGP, CoregionalizedLOO

F64 = torch.float64


def read(path):
    return np.load(Path(os.environ["PYRO_NNGP_DATA"]) / path)


def tensor(values):
    return torch.tensor(np.asarray(values), dtype=F64)


def jura(seed):
    file = read("multi/jura.npz")
    y = tensor(file["y"])[:, [0, 4, 6]]  # Cd, Ni, Zn
    given = y.clone()
    given[torch.as_tensor(file["test_mask"]), 0] = torch.nan
    return tensor(file["X"]), given, y, None


def walker(seed):
    file = read("spatial/walker_lake.npz")
    sample = tensor(file["walker_sample"])
    rows = torch.randperm(len(file["X"]), generator=torch.Generator().manual_seed(seed))[:1000]
    truth = tensor(file["y"])[rows]
    truth[:, 0] = torch.nan
    return sample[:, :2], sample[:, 2:], (tensor(file["X"])[rows], truth), None


def sarcos(seed):
    file = read("multi/sarcos_test4449.npz")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(file["X"]), generator=generator)[:1500]
    x, y = tensor(file["X"])[rows], tensor(file["y"])[rows, :3]
    given = y[:1000].masked_fill(torch.rand(1000, 3, generator=generator) < 0.5, torch.nan)
    kept = ~given.isnan().all(-1)
    return x[:1000][kept], given[kept], (x[1000:], y[1000:]), None


def bbs(seed):
    file = read("counts/bbs_pa.npz")
    y = tensor(file["y"])
    given = y.masked_fill(torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)) < 0.2, torch.nan)
    kept = ~given.isnan().all(-1)
    return tensor(file["X"])[kept, :2], given[kept], y[kept], [Poisson() for _ in range(6)]


def mixed(seed):
    torch.manual_seed(seed)
    x = 1000 * torch.rand(1000, 2, dtype=F64)
    kernels = [Matern52(2, variance=1.0, lengthscale=scale) for scale in (400.0, 150.0)]
    jitter = 1e-8 * torch.eye(1000)
    u = torch.stack([torch.linalg.cholesky(k(x, x).detach() + jitter) @ torch.randn(1000, dtype=F64) for k in kernels])
    f = tensor([[1.0], [5000.0]]) + tensor([[0.8, 0.3], [300.0, -150.0]]) @ u
    y = torch.stack([torch.poisson(f[0].exp()), f[1] + 100 * torch.randn(1000, dtype=F64)], -1)
    given = y[:600].clone()
    given[200:, 0] = torch.nan
    return x[:600], given, (x[600:], y[600:]), [Poisson(), Gaussian()]


def independent(x, y, likelihoods):
    parts = []
    for number in range(y.shape[1]):
        seen = ~y[:, number].isnan()
        likelihood = None if likelihoods is None else type(likelihoods[number])()
        parts.append(VNNGP(x[seen], y[seen, number], likelihood=likelihood))
        fit(parts[-1], progress=False)
    return lambda x_new: [part.predict(x_new) for part in parts]


def coregionalized_loo(x, y, likelihoods):
    gp = CoregionalizedLOO(x, y, y.shape[1])
    fit(gp, progress=False)

    def predictions(x_new):
        joint = gp.predict(x_new)
        sd = joint.covariance_matrix.diagonal(dim1=-2, dim2=-1).sqrt()
        return [torch.distributions.Normal(joint.mean[:, t], sd[:, t]) for t in range(y.shape[1])]

    return predictions


def lmc(num_latents=None, each=False):
    def build(x, y, likelihoods):
        gp = LMC(x, y, y.shape[1] if each else None, likelihoods, num_latents=num_latents)
        fit(gp, progress=False)
        return lambda x_new: gp.predict(x_new).parts

    return build


METHODS = {
    "a process per output": independent,
    "CoregionalizedLOO": coregionalized_loo,
    "LMC": lmc(),
    "LMC, three functions": lmc(3),
    "LMC, a kernel for each function": lmc(each=True),
}


@torch.no_grad()
def scores(predictions, x, given, held_out):
    """Per output with held-out targets: RMSE, mean log density, coverage."""
    if isinstance(held_out, tuple):
        x, truth = held_out
    else:
        truth = held_out.masked_fill(~given.isnan(), torch.nan)
    found = {}
    for number, predictive in enumerate(predictions(x)):
        seen = ~truth[:, number].isnan()
        if not seen.any():
            continue
        y = torch.where(seen, truth[:, number], 0.0)
        density = predictive.log_prob(y)[seen]
        draws = predictive.sample((1000,))[:, seen]
        low, high = draws.quantile(0.025, 0), draws.quantile(0.975, 0)
        inside = ((y[seen] >= low) & (y[seen] <= high)).double().mean()
        rmse = (predictive.mean - y)[seen].square().mean().sqrt()
        mae = (draws.median(0).values - y[seen]).abs().mean()
        found[number] = tuple(float(v) for v in (rmse, mae, density.mean(), inside))
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="+", choices=["jura", "walker", "sarcos", "bbs", "mixed"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()
    print("| data | method | output | RMSE | MAE | log density | within 95 % | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for name in args.data:
        for method in args.methods:
            total, seconds = {}, 0.0
            for seed in range(args.seeds):
                x, given, held_out, likelihoods = globals()[name](seed)
                if likelihoods is not None and method == "CoregionalizedLOO":
                    continue
                torch.manual_seed(seed)
                begin = time.process_time()
                predictions = METHODS[method](x, given, likelihoods)
                seconds += time.process_time() - begin
                for number, values in scores(predictions, x, given, held_out).items():
                    total.setdefault(number, []).append(values)
            for number, values in total.items():
                mean = [math.fsum(column) / len(column) for column in zip(*values, strict=True)]
                row = f"{mean[0]:.4g} | {mean[1]:.4g} | {mean[2]:.3f} | {mean[3]:.3f} | {seconds / args.seeds:.0f}"
                print(f"| {name} | {method} | {number} | {row} |", flush=True)


if __name__ == "__main__":
    main()
