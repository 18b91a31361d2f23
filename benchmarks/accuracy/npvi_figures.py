"""The experiments behind figures 1 (b) and 4 of the NPVI paper (Liu and Liu 2019), on data at hand.

- lengthscale (figure 1 b): validation NLL of NPVI with K = 10 and 20 neighbors, and of SVGP with 200 inducing points,
  as a lengthscale that is held fixed grows from .02 to .64 standard deviations of the places. Variance, mean and
  likelihood are learned.
- training (figure 4): validation NLL against processor seconds of training with everything learned; a run is looked
  at after 10, 20, ..., 640 steps, which its clock leaves out.

Precipitation anomalies of 5,906 stations and counts of robins; models and recipe as in `npvi.py` beside this file,
first split; in "lengthscale" the stations alone, whose inputs are places alone.

Rows are appended to a CSV file; one that is there is not run again.

Usage: python benchmarks/accuracy/npvi_figures.py [--parts lengthscale training]
           [--csv benchmarks/results/npvi_figures.csv] [--out benchmarks/results/npvi_figures.md]
           [--figure docs/_static/npvi.svg]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import time
from functools import cache, partial

import torch
from npvi import BATCH, ENCODER_BATCH, prepared  # beside this file
from sweeps import Sweep, looks, main

from pyro_nngp.inference import fit

LENGTHSCALES = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
LOOKS = (10, 20, 40, 80, 160, 320, 640)
FIXED = ("NPVI, K = 10", "NPVI, K = 20", "SVGP, M = 200")
LEARNED = ("NPVI, K = 10", "NPVI-NN, conditional, K = 10", "SVGP, M = 200")


@torch.no_grad()
def nll(gp, x, y):
    return -gp.predict(x).log_prob(y).mean().item()


def at_lengthscale(name, value):
    """Validation NLL at a lengthscale that is not learned, and processor seconds."""
    gp, (x, y), how = prepared("precipitation", name, lengthscale=value)
    gp.kernel.lengthscale_unconstrained.requires_grad_(False)
    begin = time.process_time()
    fit(gp, 400, batch_size=BATCH, lr=0.02, progress=False, **how)
    return {"nll": nll(gp, x, y), "seconds": time.process_time() - begin}


@cache
def course(data, name):
    """Validation NLL and processor seconds after each number of steps of one run."""
    gp, (x, y), how = prepared(data, name)
    how["batch_size"] = ENCODER_BATCH if "NN" in name else BATCH
    return looks(gp, LOOKS, lambda: {"nll": nll(gp, x, y)}, lr=0.02, **how)


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
}

if __name__ == "__main__":
    main("npvi_figures", __doc__, SWEEPS)
