"""Inducing points beside neighbors: the exact process at the same hyperparameters, and training from scratch.

Rows "exact" compare predictions of f + noise at held-out points with the exact process's, at the hyperparameters of
`fit(Vecchia(x, y))`, as in `exact_gp.py`: NLL beyond that of the exact process. Rows "trained" are of Matern-5/2 with
one lengthscale per column, K neighbors and M inducing points at k-means centers: NLL of held-out y, and processor
seconds of training and predictions. Inputs and targets are in units of their standard deviations, in float64. Rows are
appended to a CSV file; one that is there is not run again.

Usage: python benchmarks/accuracy/full_scale.py [--csv benchmarks/results/full_scale.csv]
           [--out benchmarks/results/full_scale.md]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import time
from functools import cache

import torch
from exact_gp import Exact, problem  # beside this file
from papers import TASKS
from sweeps import Sweep, main
from tasks import Task
from torch.distributions import Normal

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.models import Vecchia

K, ROWS, POINTS, MOST_TEST = 32, 3000, 5000, 4000
TASKS["kin8nm"] = Task("kin8nm")


@cache
def trained(name):
    """A method from plain arguments, and the exact process at its hyperparameters."""
    x, y, *_ = problem(name, POINTS)
    gp = Vecchia(x, y)
    fit(gp, progress=False)
    return gp, Exact(gp, x, y)


def beside_exact(name, num_neighbors, inducing):
    """NLL beyond that of the exact process."""
    x, y, x_test, y_test = problem(name, POINTS)
    gp, exact = trained(name)
    start = time.process_time()
    both = Vecchia(x, y, start=gp, num_neighbors=num_neighbors, inducing=inducing)
    with torch.no_grad():
        near = both(x_test[:MOST_TEST], num_neighbors=num_neighbors)
    seconds = time.process_time() - start
    every = exact.predict(x_test[:MOST_TEST])
    scores = [score(loc, var + exact.noise, y_test[:MOST_TEST]) for loc, var in (near, every)]
    return {"nll": scores[0], "value": scores[0] - scores[1], "seconds": seconds}


def score(loc, var, y):
    """Mean negative log density."""
    return float(-Normal(loc, var.sqrt()).log_prob(y).mean())


def from_scratch(name, inducing):
    """Scores on the test rows."""
    x, y, x_test, y_test = problem(name, ROWS)
    start = time.process_time()
    gp = Vecchia(x, y, Matern52(x.shape[1]), num_neighbors=K, inducing=inducing)
    fit(gp, progress=False)
    with torch.no_grad():
        loc, var = gp(x_test, num_neighbors=K)
    seconds = time.process_time() - start
    rmse = float((y_test - loc).square().mean().sqrt())
    return {"nll": score(loc, var + gp.bound().likelihood.variance, y_test), "rmse": rmse, "seconds": seconds}


def exact():
    """Rows of numbers of neighbors and inducing points."""
    for name in ("kin40k",):
        for k, m in ((K, 0), (K, 200), (K, 500), (160, 0)):
            key = {"data": name, "method": "Vecchia", "setting": f"{k}, {m}"}
            yield key, lambda name=name, k=k, m=m: beside_exact(name, k, m)


def training():
    """Rows with and without inducing points."""
    for name in ("kin8nm", "elevators"):
        for m in (0, 200):
            key = {"data": name, "method": "Vecchia", "setting": f"{K}, {m}"}
            yield key, lambda name=name, m=m: from_scratch(name, m)


SWEEPS = {
    "exact": Sweep(
        "Predictions beside the exact process with the same hyperparameters, 5,000 training rows",
        exact,
        ("nll", "value", "seconds"),
        score="nll",
        label="test NLL",
        axis="K, M",
        value="beyond exact",
    ),
    "trained": Sweep(
        "Trained from scratch, 3,000 training rows",
        training,
        ("nll", "rmse", "seconds"),
        score="nll",
        label="test NLL",
        axis="K, M",
    ),
}

if __name__ == "__main__":
    main("full_scale", __doc__, SWEEPS)
