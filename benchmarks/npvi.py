"""NPVI and NPVI-NN against SVGP and VNNGP on the kinds of data of the paper: counts of birds, a raster, flight delays.

- `birds`: 5,807 Christmas counts of the American robin in 302 circles over 30 years, given place, year and effort;
  negative binomial, linear mean in the effort, inputs standardised. A fifth of the rows is held out.
- `raster`: a grid of 10,920 elevations off Washington, scaled to [0.05, 1.05]; log-normal of variance 0.01, as in the
  paper.
- `flights`: arrival delays of a subset of the flights out of New York City in 2013, eight standardised features, the
  delays clipped at -60 and 300 minutes and scaled to [0.05, 1.05]; log-normal of variance 0.01, as in the paper.

Splits are 70/10/20, inputs standardised. All kernels are Matern-3/2 with one lengthscale per input, learned with a
linear mean by `fit`: Adam, lr 0.02 divided by ten at three quarters and nine tenths of the steps, B = 256. Seconds are
CPU seconds of the training thread. Scores are of test rows: mean negative log density of y, and median absolute error
of the predictive mean in units of y.

Usage: python benchmarks/npvi.py birds [--steps 400] [--seeds 1] [--nugget 1e-5] [--only TEXT ..] [--out FILE]
Data are read from the folder that PYRO_NNGP_DATA names, or from installed packages where they have them;
`birds` needs `robins_cbc.npz` in that folder, see `pyro_nngp.datasets`.
"""

import argparse
import time
from pathlib import Path

import torch

from pyro_nngp.datasets import bathymetry, flights, load
from pyro_nngp.encoders import GraphConvolutionEncoder, SiteEncoder
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import LogNormal, NegativeBinomial
from pyro_nngp.models import NPVI, SVGP, VNNGP
from pyro_nngp.preprocessing import Standardizer, random_split

BATCH = 256


def methods(dim):
    """Name to (class, settings, settings of fit)."""
    solved = {"solve_every": 100, "refresh_every": 100}
    table = {f"NPVI, K = {k}": (NPVI, {"num_neighbors": k}, solved) for k in (10, 20, 40)}
    table["VNNGP, mean-field, K = 20"] = VNNGP, {"num_neighbors": 20}, solved
    for k in (10, 20):
        networks = GraphConvolutionEncoder(response=log_response)
        table[f"NPVI-NN, the paper's networks, K = {k}"] = NPVI, {"num_neighbors": k, "encoder": networks}, {}
        table[f"NPVI-NN, sites, K = {k}"] = NPVI, {"num_neighbors": k, "encoder": SiteEncoder(dim)}, {}
    for m in (200, 1000):
        table[f"SVGP, M = {m}"] = SVGP, {"inducing": m}, {}
    return table


def log_response(likelihood, y):
    """log(1 + y) for counts, log y for the log-normal: raw counts to 69,520 would be no fair input."""
    return y.log() if isinstance(likelihood, LogNormal) else y.log1p()


def birds():
    data = load("robins_cbc")
    return data.x, data.y, NegativeBinomial


def raster():
    data = bathymetry()
    return data.x, unit(data.y), lambda: LogNormal(0.01).requires_grad_(False)


def delays(rows=20_000):
    data = flights()
    chosen = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:rows]
    return data.x[chosen], unit(data.y[chosen, 0].clamp(-60, 300)), lambda: LogNormal(0.01).requires_grad_(False)


def unit(y):
    return (y - y.min()) / (y.max() - y.min()) + 0.05


def run(data, name, steps, seed, nugget):
    x, y, likelihood = data()
    train, _, test = random_split(len(x), (0.7, 0.1, 0.2), seed)
    to_x = Standardizer(x[train])
    dim = x.shape[1]
    make, settings, how = methods(dim)[name]
    torch.manual_seed(seed)
    kernel = Matern32(dim, variance=torch.tensor(1.0), lengthscale=torch.full((dim,), 0.5))
    mean = torch.nn.Linear(dim, 1)
    torch.nn.init.zeros_(mean.weight)
    mean.bias.data.fill_(float(log_response(likelihood(), y[train]).mean()))
    gp = make(to_x.transform(x[train]), y[train], kernel, likelihood(), mean=mean, jitter=nugget, seed=seed, **settings)
    begin = time.process_time()
    fit(gp, steps, batch_size=BATCH, lr=0.02, seed=seed, progress=False, **how)
    seconds = time.process_time() - begin
    with torch.no_grad():
        predictive = gp.predict(to_x.transform(x[test]))
        nll, error = -predictive.log_prob(y[test]).mean(), (predictive.mean - y[test]).abs().median()
    return float(nll), float(error), seconds, sum(p.numel() for p in gp.parameters())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", choices=("birds", "raster", "flights"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--nugget", type=float, default=1e-5, help="of the process, relative to its variance")
    parser.add_argument("--only", nargs="+", default=[""], help="methods whose name contains one of these")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = {"birds": birds, "raster": raster, "flights": delays}[args.data]
    lines = [
        f"{args.data}: {args.steps} steps, B = {BATCH}, float32, {torch.get_num_threads()} thread, "
        f"relative nugget {args.nugget:g}, mean of {args.seeds} splits; torch {torch.__version__}.",
        "",
        "| method | test NLL | median error | CPU seconds | parameters |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in methods(1):
        if any(text in name for text in args.only):
            runs = [run(data, name, args.steps, seed, args.nugget) for seed in range(args.seeds)]
            nll, error, seconds, size = torch.tensor(runs).mean(0).tolist()
            lines.append(f"| {name} | {nll:.3f} | {error:.4g} | {seconds:.0f} | {size:,.0f} |")
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
