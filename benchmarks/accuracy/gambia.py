"""Malaria in 65 villages of the Gambia: coefficients of a spatial mixed model, beside GPBoost and logistic regression.

    infected_i ~ Bernoulli(logit = intercept + x_i' slope + village_{v(i)} + f(place_{v(i)})),  i = 1..2035 children

with age, bed net, treated bed net, greenness and a health center as covariates (standardized, but for the three
indicators), independent village effects, and a Matérn-3/2 process over the villages (places in 100 km). AutoNNGP and
NUTS are given the same program with weak priors. GPBoost maximizes the marginal likelihood of the same model, with an
exact process, since it does not combine Vecchia's approximation with groups; its hyperparameters have no standard
errors here. Intervals are 95 %.

Usage: PYRO_NNGP_DATA=... python benchmarks/accuracy/gambia.py [--draws 500] [--gpboost] [--out FILE.md]
    [--figure FILE.png]
The data set is gambia of the R package geoR; ``pip install gpboost`` for its rows.
"""

import argparse
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.optim import ClippedAdam
from rows import commit  # beside this file

from pyro_nngp import NNGP, AutoNNGP, NeighborGraph, NNGPReparam
from pyro_nngp.data import datasets
from pyro_nngp.kernels import Matern32

COVARIATES = ["age", "bed net", "treated net", "greenness", "health center"]
NAMES = ["intercept", *COVARIATES, "village scale", "variance", "lengthscale"]


def number(value):
    return torch.tensor(float(value))


def load():
    """Places of villages, the village of each child, covariates and labels."""
    data = datasets.load("gambia_malaria", torch.float64)
    places, village = data.x[:, :2].unique(dim=0, return_inverse=True)
    covariates = data.x[:, 2:].clone()
    for column in (0, 3):
        covariates[:, column] = (covariates[:, column] - covariates[:, column].mean()) / covariates[:, column].std()
    return (places - places.mean(0)) / 1e5, village, covariates, data.y.flatten()


class Program:
    def __init__(self, places, village, covariates, y):
        self.graph, self.village, self.covariates, self.y = NeighborGraph(places, 20), village, covariates, y

    def model(self):
        intercept = pyro.sample("intercept", dist.Normal(number(0.0), 3.0))
        slope = pyro.sample("slope", dist.Normal(torch.zeros(5), 2.0).to_event(1))
        scale = pyro.sample("village_scale", dist.LogNormal(number(0.5).log(), 1.0))
        variance = pyro.sample("variance", dist.LogNormal(number(0.5).log(), 1.0))
        lengthscale = pyro.sample("lengthscale", dist.LogNormal(number(0.2).log(), 1.0))
        with pyro.plate("villages", len(self.graph.x)):
            effect = pyro.sample("village", dist.Normal(number(0.0), scale))
        f = pyro.sample("f", NNGP(Matern32(2, variance=variance, lengthscale=lengthscale), self.graph))
        logit = intercept + (self.covariates * slope).sum(-1) + effect[..., self.village] + f[..., self.village]
        with pyro.plate("children", len(self.y)):
            pyro.sample("infected", dist.Bernoulli(logits=logit), obs=self.y)


def in_rows(values):
    """Draws or ends of intervals by name."""
    slopes = dict(zip(COVARIATES, values["slope"].mT, strict=True))
    rest = {"village scale": values["village_scale"], "variance": values["variance"]}
    return {"intercept": values["intercept"], **slopes, **rest, "lengthscale": values["lengthscale"]}


def by_guide(program):
    guide, start = AutoNNGP(program.model), time.process_time()
    svi = SVI(program.model, guide, ClippedAdam({"lr": 0.02, "lrd": 0.1**0.01}), Trace_ELBO())
    for _ in range(100):
        svi.step()
    ends = in_rows(guide.quantiles([0.5, 0.025, 0.975]))
    return ends, time.process_time() - start


def by_nuts(program, draws):
    start = time.process_time()
    mcmc = MCMC(
        NUTS(poutine.reparam(program.model, config={"f": NNGPReparam()})), draws, draws // 2, disable_progbar=True
    )
    mcmc.run()
    samples = in_rows(mcmc.get_samples())
    levels = torch.tensor([0.5, 0.025, 0.975])
    return {name: value.quantile(levels) for name, value in samples.items()}, time.process_time() - start


def by_gpboost(places, village, covariates, y):
    import gpboost as gpb

    start = time.process_time()
    design = torch.cat([torch.ones(len(y), 1), covariates], -1).numpy()
    model = gpb.GPModel(
        group_data=village.numpy(),
        gp_coords=places[village].numpy(),
        cov_function="matern",
        cov_fct_shape=1.5,
        likelihood="bernoulli_logit",
        num_parallel_threads=1,
    )
    model.fit(y=y.numpy(), X=design)
    table = torch.as_tensor(model.get_coef(std_err=True).to_numpy())
    found = {n: _interval(*table[:, i]) for i, n in enumerate(["intercept", *COVARIATES])}
    group, variance, lengthscale = torch.as_tensor(model.get_cov_pars().to_numpy(), dtype=torch.float64).flatten()[:3]
    found |= {"village scale": group.sqrt()[None], "variance": variance[None], "lengthscale": lengthscale[None]}
    return found, time.process_time() - start


def by_regression(covariates, y):
    """Logistic regression by Newton's method, without villages and places."""
    start, design = time.process_time(), torch.cat([torch.ones(len(y), 1), covariates], -1)
    coef = torch.zeros(6)
    for _ in range(20):
        p = (design @ coef).sigmoid()
        tril = torch.linalg.cholesky(design.mT @ ((p * (1 - p))[:, None] * design))
        coef = coef + torch.cholesky_solve((design.mT @ (y - p))[:, None], tril)[:, 0]
    error = torch.cholesky_inverse(tril).diagonal().sqrt()
    found = {n: _interval(coef[i], error[i]) for i, n in enumerate(["intercept", *COVARIATES])}
    return found, time.process_time() - start


def _interval(loc, error):
    return torch.stack([loc, loc - 1.96 * error, loc + 1.96 * error])


def draw(runs, path):
    """Intervals of the covariates, side by side."""
    figure, axis = plt.subplots(figsize=(8, 4), constrained_layout=True)
    for j, (label, (found, _)) in enumerate(runs.items()):
        middle, low, high = torch.stack([found[name] for name in COVARIATES], -1)
        at = torch.arange(5) + 0.16 * (j - (len(runs) - 1) / 2)
        axis.errorbar(middle, -at, xerr=torch.stack([middle - low, high - middle]), fmt="o", ms=4, label=label)
    axis.axvline(0, color="0.7", lw=1, zorder=0)
    axis.set(yticks=[-i for i in range(5)], yticklabels=COVARIATES, xlabel="log odds ratio, 95 % interval")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=0, help="of NUTS; 0 leaves it out")
    parser.add_argument("--gpboost", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pyro.set_rng_seed(0)
    places, village, covariates, y = load()
    program = Program(places, village, covariates, y)
    runs = {"AutoNNGP": by_guide(program)}
    if args.draws:
        runs["NUTS"] = by_nuts(program, args.draws)
    if args.gpboost:
        runs["GPBoost, exact"] = by_gpboost(places, village, covariates, y)
    runs["logistic regression"] = by_regression(covariates, y)
    lines = [f"| | {' | '.join(runs)} |", "|---" * (len(runs) + 1) + "|"]
    for name in NAMES:
        cells = []
        for found, _ in runs.values():
            ends = found.get(name)
            shown = "" if ends is None else f"{ends[0]:.2f}"
            cells.append(shown + (f" [{ends[1]:.2f}, {ends[2]:.2f}]" if ends is not None and len(ends) == 3 else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"| seconds | {' | '.join(f'{seconds:.1f}' for _, seconds in runs.values())} |")
    lines = [f"Commit {commit()}, one thread.", "", *lines]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if args.figure:
        draw(runs, args.figure)


if __name__ == "__main__":
    main()
