"""Why intervals of y under `LOO` with Student-t noise are short on rain: its hyperparameters, or its q(omega)?

Rain of April 1948 at 1,000 of the 5,906 observed stations (us_precip_194804), scored at 1,000 others, raw units.
`VNNGP` and `LOO` are trained from nothing set. "LOO, from df = 1.5" starts near the optimum of `VNNGP`. "LOO at
VNNGP's" keeps the hyperparameters of `VNNGP` and solves for q(omega) alone. "its own LOO" is the mean leave-one-out
density on the training rows, to be compared with the density at new stations.

Usage: python benchmarks/accuracy/student_t.py [--rows 1000]
The data come from the folder that PYRO_NNGP_DATA names; use one thread.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from pyro_nngp.inference import fit
from pyro_nngp.likelihoods import StudentT
from pyro_nngp.models import LOO, VNNGP


def trained(method, *data, **settings):
    gp = method(*data, **settings)
    fit(gp, progress=False)
    return gp


@torch.no_grad()
def row(name, gp, x, y):
    torch.manual_seed(0)
    predictive, own = gp.predict(x), ""
    draws, shares = predictive.sample((1000,)), []
    for level in (0.5, 0.8, 0.95):
        low, high = draws.quantile((1 - level) / 2, 0), draws.quantile((1 + level) / 2, 0)
        shares.append(f"{((y >= low) & (y <= high)).double().mean():.3f}")
    if isinstance(gp, LOO):
        own = f"{gp.loo().mean():.3f}"
    values = gp.likelihood.df.item(), gp.likelihood.scale.item(), *gp.kernel.lengthscale.tolist()
    shown = [name, *shares, f"{predictive.log_prob(y).mean():.3f}", own, *(f"{v:.2f}" for v in values)]
    print(f"| {' | '.join(shown)} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1000)
    count = parser.parse_args().rows
    file = np.load(Path(os.environ["PYRO_NNGP_DATA"]) / "spatial/us_precip_194804.npz")
    seen = file["observed"].astype(bool)
    x, y = torch.tensor(file["X"][seen]).double(), torch.tensor(file["y"][seen]).double()[:, 0]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    rows, new = order[:count], order[2000:3000]
    data, held_out = (x[rows], y[rows]), (x[new], y[new])
    print("| method | within 50 % | 80 % | 95 % | density | its own LOO | df | scale | lengthscales | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    row("LOO", trained(LOO, *data, likelihood=StudentT()), *held_out)
    row("LOO, from df = 1.5", trained(LOO, *data, likelihood=StudentT(df=1.5, scale=8.0)), *held_out)
    row('LOO, divergence="prior"', trained(LOO, *data, likelihood=StudentT(), divergence="prior"), *held_out)
    vnngp = trained(VNNGP, *data, likelihood=StudentT())
    row("VNNGP", vnngp, *held_out)
    loo = LOO(*data, start=vnngp)
    loo.solve()
    row("LOO at VNNGP's", loo, *held_out)


if __name__ == "__main__":
    main()
