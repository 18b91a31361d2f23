"""The experiments behind figures 1 (b) and 4 of the NPVI paper (Liu and Liu 2019), and its recipe, on data at hand.

- lengthscale (figure 1 b): validation NLL of NPVI with K = 10 and 20 neighbors, of NPVI-NN with the paper's networks,
  and of SVGP with 200 inducing points, as a lengthscale that is held fixed grows from .02 to .64 standard deviations of
  the places. Variance, mean and likelihood are learned.
- training (figure 4): validation NLL against processor seconds of training with everything learned; a run is looked
  at after 10, 20, ..., 640 steps, which its clock leaves out.

- recipe: validation NLL and loss per training point as training by the paper's recipe goes on: AdaGrad with rate .2 for
  NPVI and .1 for the others, batches of 50, K = 20, everything but q held fixed, at what NPVI learns in 400 steps of
  its own recipe; beside it the optimal q of `solve()`.
- networks: what the graph convolutions lose by their means and by their rows of R: the loss after 640 steps of that
  recipe, and with the optimal rows or means in place of their own, on precipitation. "As printed" has outputs and
  inputs in the units of y, the diagonal of R made positive by softplus; the conditional encoder reads the point and its
  parents alone, as the networks do.
- prior (equations 9 and 11): for each prior in the bound the divergence of its optimal q from the exact posterior, and
  the error of an estimate of the cross-entropy from 50 points, in nats per point (`npvi_prior.py`), with everything
  held fixed as in "recipe"; 1,500 points.

Precipitation anomalies of 5,906 stations, counts of robins, and a raster of elevations; models as in `npvi.py` beside
this file, first split; in "lengthscale" and "networks" the stations alone, whose inputs are places alone.

Rows are appended to a CSV file; one that is there is not run again.

Usage: python benchmarks/accuracy/npvi_figures.py [--parts lengthscale training ...]
           [--csv benchmarks/results/npvi_figures.csv] [--out benchmarks/results/npvi_figures.md]
           [--figure docs/_static/npvi.svg]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import time
from dataclasses import replace
from functools import cache, partial

import pyro
import torch
import torch.nn.functional as F
from npvi import BATCH, ENCODER_BATCH, WithoutBiases, prepared  # beside this file
from npvi_prior import NUGGET, of_neighbors, of_rank, problem
from pyro.infer import SVI
from pyro.optim import Adagrad
from sweeps import Sweep, looks, main, watch

from pyro_nngp.distributions import SparseCholeskyNormal
from pyro_nngp.inference import IntegratedELBO, fit
from pyro_nngp.variational.encoders import ConditionalEncoder, GraphConvolutionEncoder

LENGTHSCALES = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
LOOKS = (10, 20, 40, 80, 160, 320, 640)
LEARNED = ("NPVI, K = 10", "NPVI-NN, conditional, K = 10", "SVGP, M = 200")
TABLE, NETWORKS = "NPVI, K = 20", "NPVI-NN, the paper's networks, K = 20"
FIXED = ("NPVI, K = 10", TABLE, "SVGP, M = 200", NETWORKS)
RECIPE = (TABLE, NETWORKS, "NPVI-NN, conditional, K = 20", "SVGP, M = 200")
RATE, OF_TABLE, ROWS = 0.1, 0.2, 50  # of AdaGrad, of a batch


@torch.no_grad()
def nll(gp, x, y):
    return -gp.predict(x).log_prob(y).mean().item()


def at_lengthscale(name, value):
    """Validation NLL at a lengthscale that is not learned, and processor seconds."""
    nugget, size = (NUGGET, ENCODER_BATCH) if "NN" in name else (1e-5, BATCH)
    gp, (x, y), how = prepared("precipitation", name, nugget=nugget, lengthscale=value)
    gp.kernel.lengthscale_unconstrained.requires_grad_(False)
    begin = time.process_time()
    fit(gp, 400, batch_size=size, lr=0.02, progress=False, **how)
    return {"nll": nll(gp, x, y), "seconds": time.process_time() - begin}


@torch.no_grad()
def loss(gp):
    """Negative bound per training point."""
    return IntegratedELBO().loss(gp.model, gp.guide) / gp.num_data


@cache
def course(data, name):
    """Validation NLL and processor seconds after each number of steps of one run."""
    gp, (x, y), how = prepared(data, name)
    how["batch_size"] = ENCODER_BATCH if "NN" in name else BATCH
    return looks(gp, LOOKS, lambda: {"nll": nll(gp, x, y)}, lr=0.02, **how)


@cache
def learned(data, nugget):
    """State of kernel, mean and likelihood after NPVI's own recipe."""
    gp, _, how = prepared(data, TABLE, nugget=nugget)
    fit(gp, 400, batch_size=BATCH, lr=0.02, progress=False, **how)
    return {part: getattr(gp, part).state_dict() for part in ("kernel", "mean", "likelihood")}


def fixed(data, name, nugget=NUGGET):
    """A method with everything but q held fixed there, and validation rows."""
    gp, other, _ = prepared(data, name, nugget=nugget)
    for part, state in learned(data, nugget).items():
        module = getattr(gp, part).requires_grad_(False)
        module.load_state_dict(state)
    if hasattr(gp, "graph"):
        gp.refresh_neighbors()
    return gp, other


def scored(gp, x, y):
    return {"nll": nll(gp, x, y), "value": loss(gp)}


@cache
def of_recipe(data, name, encoder=None, nugget=NUGGET):
    """Scores as the paper's recipe goes on, by number of steps, and the trained method."""
    gp, (x, y) = fixed(data, name, nugget)
    if encoder is not None:
        gp.q.encoder = encoder
    rate = OF_TABLE if name == TABLE else RATE
    pyro.clear_param_store()
    svi = SVI(gp.model, gp.guide, Adagrad({"lr": rate, "initial_accumulator_value": 0.1}), IntegratedELBO())
    found, look = watch(LOOKS, lambda: scored(gp, x, y))
    for step in range(1, LOOKS[-1] + 1):
        svi.step(torch.randperm(gp.num_data)[:ROWS])
        look(step, 0.0)
    return found, gp


def solved(data, nugget=NUGGET):
    gp, other = fixed(data, TABLE, nugget)
    begin = time.process_time()
    gp.solve()
    return scored(gp, *other) | {"seconds": time.process_time() - begin}, gp


class AsPrinted(WithoutBiases):
    """The paper's networks without biases in the units of y, of one whose prior has mean zero."""

    def forward(self, near):
        spread, own = near.covariance.diag(near.x).sqrt(), near.var.sqrt()
        loc, scale, row = super().forward(replace(near, response=near.response * spread + near.mean))
        return loc / spread[:, 0] - near.mean[:, 0], F.softplus((scale / own).log()), row / own[:, None]


ENCODERS = {
    "as printed": (AsPrinted, NUGGET),
    "in units of the prior": (GraphConvolutionEncoder, NUGGET),
    "one layer": (partial(GraphConvolutionEncoder, ()), NUGGET),
    "six layers": (partial(GraphConvolutionEncoder, (20, 20, 20, 20, 10)), NUGGET),
    "nugget .0001": (GraphConvolutionEncoder, 1e-4),
    "nugget .1": (GraphConvolutionEncoder, 0.1),
    "conditional encoder, the same nodes": (partial(ConditionalEncoder, num_context=0), NUGGET),
}


@cache
@torch.no_grad()
def exchanged(name):
    """Scores of networks, with their own q and with its means or rows of R exchanged for the optimal ones."""
    make, nugget = ENCODERS[name]
    torch.manual_seed(0)
    with torch.enable_grad():
        found, gp = of_recipe("precipitation", NETWORKS, make(), nugget)
    best, table = solved("precipitation", nugget)
    q, p = (each.q.at_rows(each.posterior(each.bound())) for each in (gp, table))
    other = fixed("precipitation", TABLE, nugget)[1]
    scores = {"both": found[LOOKS[-1]], "neither": best}
    for part, mean, rows in (("rows", p, q), ("means", q, p)):
        table.q.assign(SparseCholeskyNormal(mean.loc, rows.scale, rows.weights, p.pattern))
        scores[part] = scored(table, *other)
    return scores


def lengthscales():
    """Rows of scores against the lengthscale."""
    for value in LENGTHSCALES:
        for name in FIXED:
            yield {"data": "precipitation", "method": name, "setting": value}, partial(at_lengthscale, name, value)


def training():
    """Rows of scores after numbers of steps."""
    for data in ("precipitation", "birds"):
        for name in LEARNED:
            for step in LOOKS:
                yield {"data": data, "method": name, "setting": step}, lambda d=data, n=name, s=step: course(d, n)[s]


def recipe():
    """Rows of scores after numbers of steps of the paper's recipe."""
    for data in ("precipitation", "birds", "raster"):
        yield {"data": data, "method": "NPVI, K = 20, solve()", "setting": 0}, lambda d=data: solved(d)[0]
        for name in RECIPE:
            for step in LOOKS:
                key = {"data": data, "method": name, "setting": step}
                yield key, lambda d=data, n=name, s=step: of_recipe(d, n)[0][s]


def networks():
    """Rows of scores of networks, by what is theirs in q."""
    for name in ENCODERS:
        for part in ("both", "means", "rows", "neither"):
            key = {"data": "precipitation", "method": name, "setting": part}
            yield key, lambda n=name, p=part: exchanged(n)[p]


@cache
def prior_problem(data):
    return problem(fixed(data, TABLE)[0].double())


def priors():
    """Rows of scores by prior and the number of its neighbors or inducing points."""
    for data in ("precipitation", "raster"):
        for k in (5, 10, 20, 40):
            key = {"data": data, "method": "nearest neighbors, eq. 11", "setting": k}
            yield key, lambda d=data, k=k: of_neighbors(prior_problem(d), k)
        for name in ("FITC", "Nystrom"):
            for m in (50, 100, 200, 400, 800):
                key = {"data": data, "method": f"{name}, eq. 9", "setting": m}
                yield key, lambda d=data, n=name, m=m: of_rank(prior_problem(d), n, m)


SWEEPS = {
    "lengthscale": Sweep(
        "Validation NLL against a fixed lengthscale (figure 1 b)",
        lengthscales,
        ("nll", "seconds"),
        score="nll",
        label="validation NLL",
        axis="lengthscale",
    ),
    "training": Sweep(
        "Validation NLL as training goes on (figure 4)",
        training,
        ("nll", "seconds"),
        score="nll",
        label="validation NLL",
        axis="steps",
        x="seconds",
    ),
    "recipe": Sweep(
        "Validation NLL and loss as training by the paper's recipe goes on, everything but q held fixed",
        recipe,
        ("nll", "value", "seconds"),
        score="nll",
        label="validation NLL",
        axis="steps",
        value="loss",
        x="seconds",
    ),
    "networks": Sweep(
        "What the graph convolutions lose: the part of q that they compute, the rest being solve()'s",
        networks,
        ("nll", "value"),
        score="value",
        label="loss",
        axis="theirs",
        value="loss",
    ),
    "prior": Sweep(
        "Approximations of the prior in the bound, by neighbors or inducing points",
        priors,
        ("value", "error"),
        score="value",
        label="KL from the exact posterior, nats per point",
        axis="K or M",
        value="KL",
    ),
}

if __name__ == "__main__":
    main("npvi_figures", __doc__, SWEEPS)
