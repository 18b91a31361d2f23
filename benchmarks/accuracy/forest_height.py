"""Forest height and tree cover: coefficients beside a process at thousands of rows, by AutoNNGP and by NUTS.

    height_i ~ N(intercept + slope cover_i + f(x_i), noise^2),  i = 1..N places of the Bonanza Creek Experimental Forest

with a Matérn-3/2 process of the place and weak priors. `AutoNNGP` takes 100 steps of SVI; `QuickNUTS` has the same
program, and its draws are the reference. Numbers are posterior means and standard deviations.

Usage: PYRO_NNGP_DATA=... python benchmarks/accuracy/forest_height.py [--rows 5000] [--draws 600] [--neighbors 15]
    [--out FILE.md]
The data set is BCEF of the R package spNNGP; rows are drawn from its training rows.
"""

import argparse
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from pyro.optim import ClippedAdam
from rows import commit  # beside this file

from pyro_nngp import NNGP, AutoNNGP, NeighborGraph
from pyro_nngp.inference import QuickNUTS
from pyro_nngp.kernels import Matern32

STEPS, WARMUP = 100, 300


def data(count):
    """Places in km, cover and height in standard deviations."""
    raw = np.load(Path(os.environ["PYRO_NNGP_DATA"]) / "spatial" / "bcef.npz")
    rows = np.random.default_rng(0).permutation(np.flatnonzero(~raw["test_mask"]))[:count]
    x, y = (torch.from_numpy(raw[name][rows]).double() for name in ("X", "y"))
    return x[:, :2] - x[:, :2].mean(0), (x[:, 2] - x[:, 2].mean()) / x[:, 2].std(), (y - y.mean()) / y.std()


def number(value):
    return torch.tensor(float(value), dtype=torch.float64)


def program(x, cover, y, neighbors):
    graph = NeighborGraph(x, neighbors)

    def model():
        intercept, slope = (pyro.sample(name, dist.Normal(number(0), 1.0)) for name in ("intercept", "slope"))
        variance = pyro.sample("variance", dist.LogNormal(number(0.5).log(), 1.0))
        lengthscale = pyro.sample("lengthscale", dist.LogNormal(number(1.0).log(), 1.0))
        noise = pyro.sample("noise", dist.LogNormal(number(0.3).log(), 1.0))
        f = pyro.sample("f", NNGP(Matern32(2, variance, lengthscale), graph))
        with pyro.plate("places", len(x)):
            pyro.sample("y", dist.Normal(intercept + slope * cover + f, noise), obs=y)

    return model


SITES = ["intercept", "slope", "variance", "lengthscale", "noise"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--draws", type=int, default=600)
    parser.add_argument("--neighbors", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model, start = program(*data(args.rows), args.neighbors), time.process_time()
    guide = AutoNNGP(model)
    svi = SVI(model, guide, ClippedAdam({"lr": 0.02, "lrd": 0.1 ** (1 / STEPS)}), Trace_ELBO())
    for _ in range(STEPS):
        svi.step()
    ours = Predictive(model, guide=guide, num_samples=args.draws, return_sites=SITES)()
    middle = time.process_time()
    kernel = QuickNUTS(model, guide=guide)
    mcmc = MCMC(kernel, num_samples=args.draws, warmup_steps=WARMUP, disable_progbar=True)
    mcmc.run()
    theirs = Predictive(kernel.model, posterior_samples=mcmc.get_samples(), return_sites=SITES)()
    seconds = middle - start, time.process_time() - middle
    lines = [f"{args.rows} rows, {args.neighbors} neighbors; {seconds[0]:.0f} s and {seconds[1]:.0f} s.", ""]
    lines += ["| | AutoNNGP | NUTS | ratio of sds | n_eff of NUTS |", "|---" * 5 + "|"]
    for name in SITES:
        a, b = (draws[name].reshape(-1).double() for draws in (ours, theirs))
        shown = " | ".join(f"{each.mean():.4f} ± {each.std():.4f}" for each in (a, b))
        effective = float(pyro.ops.stats.effective_sample_size(b[None]))
        lines.append(f"| {name} | {shown} | {a.std() / b.std():.2f} | {effective:.0f} |")
    print(f"Commit {commit()}, torch {torch.__version__}, one thread.", *lines, sep="\n", flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
