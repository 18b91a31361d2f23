"""Forest height and tree cover: coefficients beside a process at thousands of rows, by AutoNNGP and by NUTS.

    height_i ~ N(intercept + slope cover_i + f(x_i), noise^2),  i = 1..N places of the Bonanza Creek Experimental Forest

with a Matérn-3/2 process of the place and weak priors. `AutoNNGP` takes 100 steps of SVI; `QuickNUTS` has the same
program, and its draws are the reference. Numbers are posterior means and standard deviations.

``all``: all 105,504 training rows by `Vecchia`, in meters and percent, with an exponential kernel, and predictions of
the 83,213 places that are held out, in blocks.

Usage: PYRO_NNGP_DATA=... python benchmarks/accuracy/forest_height.py [sample|all] [--rows 5000] [--draws 600]
    [--neighbors 15] [--out FILE.md]
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

from pyro_nngp import NNGP, AutoNNGP, NeighborGraph, Vecchia, fit
from pyro_nngp.data.metrics import crps_gaussian
from pyro_nngp.inference import QuickNUTS
from pyro_nngp.kernels import Matern12, Matern32
from pyro_nngp.means import LinearMean

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


def beside_nuts(args):
    """Coefficients and hyperparameters of some rows, by AutoNNGP and QuickNUTS."""
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
    return lines


def all_rows(args):
    """Coefficients without a prior and with one, hyperparameters, and predictions of the blocks that are held out."""
    raw = np.load(Path(os.environ["PYRO_NNGP_DATA"]) / "spatial" / "bcef.npz")
    x, y, test = torch.from_numpy(raw["X"]).double(), torch.from_numpy(raw["y"]).double(), raw["test_mask"]
    lines = ["| prior | | estimate | 95 % interval |", "|---" * 4 + "|"]
    for prior in None, "weak":
        start, mean = time.process_time(), LinearMean(1, prior=prior, active_dims=[2])
        gp = Vecchia(x[~test], y[~test], Matern12(2, active_dims=[0, 1]), mean=mean, num_neighbors=args.neighbors)
        fit(gp, progress=False)
        predictions = gp.predict(x[test])
        seconds = time.process_time() - start
        for name, row in gp.summary().iterrows():
            lines.append(f"| {prior} | {name} | {row.estimate:.4g} | [{row.lower:.4g}, {row.upper:.4g}] |")
        error = y[test] - predictions.mean
        scores = {
            "RMSE": error.square().mean().sqrt(),
            "CRPS": crps_gaussian(y[test], predictions.mean, predictions.stddev),
            "95 % cover": (error.abs() < 1.96 * predictions.stddev).double().mean(),
            "processor seconds": seconds,
        }
        lines += [f"| {prior} | {name} | {float(value):.3g} | |" for name, value in scores.items()]
    return lines


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="?", choices=["sample", "all"], default="sample")
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--draws", type=int, default=600)
    parser.add_argument("--neighbors", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = all_rows(args) if args.part == "all" else beside_nuts(args)
    print(f"Commit {commit()}, torch {torch.__version__}, one thread.", *lines, sep="\n", flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
