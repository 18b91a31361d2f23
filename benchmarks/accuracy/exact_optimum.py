"""Whose hyperparameters suit the exact process: its own, or those that K = 32 neighbors like best.

On elevators, 3,000 training rows, in float64. Hyperparameters are those of `fit(Vecchia(...))` and `fit(LOO(...))`, and
the maximizer of the exact marginal likelihood by L-BFGS, from Vecchia's. With each the test rows are predicted from all
training rows and from the nearest 32. "evidence" is the exact log marginal likelihood per datum. "full-scale" adds 200
inducing points to the 32 neighbors, in training and predictions: `fit(Vecchia(..., inducing=200))`.
Inputs and targets are in units of their standard deviations. Rows are appended to a CSV file; one that is there is not
run again.

Usage: python benchmarks/accuracy/exact_optimum.py [--csv benchmarks/results/exact_optimum.csv]
           [--out benchmarks/results/exact_optimum.md]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import math
import time
from functools import cache

import torch
from exact_evidence import evidence, maximize  # beside this file
from exact_gp import Exact, problem
from sweeps import Sweep, main
from torch.distributions import Normal

from pyro_nngp.inference import fit
from pyro_nngp.models import LOO, Vecchia

ROWS, K, M = 3000, 32, 200
SOURCES = {"Vecchia": Vecchia, "LOO-k": LOO, "exact evidence": Vecchia, "full-scale": Vecchia}


@cache
def trained(source):
    """A method with hyperparameters from a source, and seconds."""
    x, y, *_ = problem("elevators", ROWS)
    begin = time.process_time()
    settings = {"inducing": M} if source == "full-scale" else {}
    gp = SOURCES[source](x, y, num_neighbors=K, **settings)
    fit(gp, progress=False)
    if source == "exact evidence":
        maximize(gp, lambda: evidence(gp, x, y))
        gp.refresh_neighbors()
    return gp, time.process_time() - begin


@torch.no_grad()
def measure(gp, seconds, neighbors):
    """Scores on the test rows."""
    x, y, x_test, y_test = problem("elevators", ROWS)
    if neighbors == "all":
        loc, var = Exact(gp, x, y).predict(x_test)
    else:
        loc, var = gp(x_test, num_neighbors=K)
    log_prob = Normal(loc, (var + gp.likelihood.variance).sqrt()).log_prob(y_test)
    error = (y_test - loc).square().mean()
    facts = {"value": evidence(gp, x, y), "nll": -log_prob.mean(), "rmse": math.sqrt(error)}
    return {name: float(value) for name, value in facts.items()} | {"seconds": seconds}


def optimum():
    """Rows of scores of each source of hyperparameters."""
    for source in SOURCES:
        for neighbors in ("all", K) if source != "full-scale" else (f"{K}, M = {M}",):
            key = {"data": "elevators", "method": source, "setting": neighbors}
            yield key, lambda source=source, neighbors=neighbors: measure(*trained(source), neighbors)


SWEEPS = {
    "optimum": Sweep(
        "Predictions with hyperparameters of each source",
        optimum,
        ("nll", "rmse", "value", "seconds"),
        score="nll",
        label="test NLL",
        axis="neighbors",
        value="evidence",
    )
}

if __name__ == "__main__":
    main("exact_optimum", __doc__, SWEEPS)
