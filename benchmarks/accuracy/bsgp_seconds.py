"""Figures 8 and 9 of the BSGP paper (Rossi et al. 2021): scores on protein against seconds of training and prediction.

- training (figure 8): test NLL against processor seconds of training. "BSGP" has one or two layers, and "SGHMC-DGP" one
  whose inducing inputs and hyperparameters are optimized and u sampled; each setting is a chain of its own, with so
  many updates of burn-in and 256 draws at the end of it, `bsgp.py --first-step 0.02 --step-size 0.005`. `SVGP` has 100
  inducing points; its settings are steps of one run on batches of 1,024.
- predictions (figure 9): test NLL against processor seconds of predictions at all test points, of BSGP with numbers of
  draws from its longest chain, and of SVGP with numbers of inducing points, trained until the loss has converged or
  900 s have passed.

Fold 0 of `bsgp.py`: 36,584 training rows, inputs and target standardized, NLL in the units of RMSD. RBF kernels with a
lengthscale per column; M = 100 for the methods that sample. float64.

Rows are appended to a CSV file; one that is there is not run again.

Usage: python benchmarks/accuracy/bsgp_seconds.py [--parts training predictions]
           [--csv benchmarks/results/bsgp_seconds.csv] [--out benchmarks/results/bsgp_seconds.md]
           [--figure docs/_static/bsgp_seconds.svg]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import time
from functools import cache, partial

import pyro
from bsgp import build, sample, split  # beside this file
from bsgp import scores as scores_of
from sweeps import Sweep, looks, main

from pyro_nngp.inference import fit
from pyro_nngp.kernels import RBF
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import SVGP

CASE = {"data": "protein", "objective": "fitc", "prior": "normal", "starts": "own", "inducing": 100}
CASE |= {"batch_size": 1000, "svi": 1000, "samples": 256, "first_step": 0.02, "step_size": 0.005}
CASE |= {"hyperpriors": "medians", "run_temperature": 1.0}
SCHEDULES = {500: 1, 2000: 3, 4000: 6, 10_000: 40}  # updates of burn-in: updates per draw
CHAINS = {
    "BSGP, one layer": {"layers": 1, "sampled": "all"},
    "SGHMC-DGP, one layer": {"layers": 1, "sampled": "u"},
    "BSGP, two layers": {"layers": 2, "sampled": "all"},
}
STEPS, DRAWS, INDUCING = tuple(50 * 2**i for i in range(7)), (4, 16, 64, 256), (100, 200, 500, 1000)
protein = cache(partial(split, "protein", 0))


def tested(predictive):
    """Scores on test rows."""
    _, (_, y), scale, binary = protein()
    found = scores_of(predictive, y, scale, binary)
    return {"nll": float(found["nll"]), "rmse": float(found["rmse"])}


@cache
def chain(method, burn_in):
    """A sampled method, its draws, and the processor seconds of guide and chain."""
    case = CASE | CHAINS[method] | {"burn_in": burn_in, "thin": SCHEDULES[burn_in]}
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    begin = time.process_time()
    gp = build(*protein()[0], False, case, 0)
    samples, _ = sample(gp, case, 0, False)
    return gp, samples, time.process_time() - begin


def by_chain(method, burn_in):
    gp, samples, seconds = chain(method, burn_in)
    return tested(gp.predict(protein()[1][0], samples=samples)) | {"seconds": seconds}


def svgp(inducing):
    x, y = protein()[0]
    return SVGP(x, y, RBF(x.shape[1]), Gaussian(), inducing=inducing)


@cache
def course():
    """Scores of SVGP after numbers of steps."""
    gp = svgp(100)
    return looks(gp, STEPS, lambda: tested(gp.predict(protein()[1][0])), batch_size=1024)


def training():
    """Rows of scores against seconds of training."""
    for burn_in in SCHEDULES:
        for method in CHAINS:
            yield {"data": "protein", "method": method, "setting": burn_in}, partial(by_chain, method, burn_in)
    for step in STEPS:
        yield {"data": "protein", "method": "SVGP, M = 100", "setting": step}, lambda step=step: course()[step]


@cache
def converged(inducing):
    gp = svgp(inducing)
    fit(gp, max_seconds=900, progress=False)
    return gp


def timed(predict):
    """Scores, and the processor seconds of predictions at all test points."""
    begin = time.process_time()
    predictive = predict(protein()[1][0])
    float(predictive.variance.sum())  # what is computed when it is asked for belongs to the time
    seconds = time.process_time() - begin
    return tested(predictive) | {"seconds": seconds}


def by_draws(count):
    gp, samples, _ = chain("BSGP, one layer", max(SCHEDULES))
    some = {name: values[:: CASE["samples"] // count] for name, values in samples.items()}
    return timed(partial(gp.predict, samples=some))


def predictions():
    """Rows of scores against seconds of predictions."""
    for count in DRAWS:
        yield {"data": "protein", "method": "BSGP, one layer", "setting": count}, partial(by_draws, count)
    for inducing in INDUCING:
        key = {"data": "protein", "method": "SVGP", "setting": inducing}
        yield key, lambda inducing=inducing: timed(converged(inducing).predict)


COLUMNS = ("nll", "rmse", "seconds")
NLL = {"score": "nll", "label": "test NLL", "x": "seconds"}
SWEEPS = {
    "training": Sweep(
        "Scores against seconds of training (figure 8), by updates of burn-in or steps",
        training,
        COLUMNS,
        axis="updates",
        **NLL,
    ),
    "predictions": Sweep(
        "Scores against seconds of predictions at 9,146 points (figure 9), by draws or inducing points",
        predictions,
        COLUMNS,
        axis="draws or M",
        **NLL,
    ),
}

if __name__ == "__main__":
    main("bsgp_seconds", __doc__, SWEEPS)
