"""Whose hyperparameters suit the exact process: its own, or those that K = 32 neighbors like best.

On elevators, 3,000 training rows, in float64. Hyperparameters are those of `fit(Vecchia(...))` and `fit(LOO(...))`, and
the maximizer of the exact marginal likelihood by L-BFGS, from Vecchia's. With each the test rows are predicted from all
training rows and from the nearest 32. "evidence" is the exact log marginal likelihood per datum. "full-scale" adds 200
inducing points to the 32 neighbors (`FullScaleNNGP`), in training, from Vecchia's hyperparameters, and in predictions.
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
from exact_gp import Exact, problem  # beside this file
from sweeps import Sweep, main
from torch.distributions import MultivariateNormal, Normal

from pyro_nngp.distributions import FullScaleNNGP
from pyro_nngp.inference import fit
from pyro_nngp.models import LOO, Vecchia
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.neighbors.ordering import maximin_ordering

ROWS, K, M, ITERATIONS = 3000, 32, 200, 30
SOURCES = {"Vecchia": Vecchia, "LOO-k": LOO, "exact evidence": Vecchia, "full-scale": Vecchia}


@cache
def trained(source):
    """A method with hyperparameters from a source, and seconds."""
    x, y, *_ = problem("elevators", ROWS)
    begin = time.process_time()
    gp = SOURCES[source](x, y, num_neighbors=K)
    fit(gp, progress=False)
    if source == "exact evidence":
        maximize(gp, lambda: evidence(gp, x, y))
        gp.refresh_neighbors()
    if source == "full-scale":
        places = full_scale_places(gp, x)
        maximize(gp, lambda: full_scale(gp, *places).log_prob(y - gp.mean(x)) / len(x))
    return gp, time.process_time() - begin


def maximize(gp, objective):
    """Put the hyperparameters at the maximum of a log marginal likelihood per datum."""
    optimizer = torch.optim.LBFGS(gp.parameters(), max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = -objective()
        loss.backward()
        return loss

    optimizer.step(closure)


def full_scale_places(gp, x):
    """A graph of K neighbors, and the first M points of a maximin ordering, both in units of the lengthscales."""
    metric = gp.kernel.lengthscale.detach()
    return NeighborGraph(x, K, metric=metric), x[maximin_ordering(x / metric)[:M]]


def full_scale(gp, graph, inducing):
    """The full-scale process of the observations, less their mean."""
    return FullScaleNNGP(gp.kernel, graph, inducing, gp.likelihood.variance)


def evidence(gp, x, y):
    """The exact log marginal likelihood per datum."""
    cov = gp.kernel(x)
    cov = cov + torch.diag(1e-6 * cov.diagonal() + gp.likelihood.variance)
    return MultivariateNormal(gp.mean(x).reshape(-1), cov).log_prob(y) / len(x)


@torch.no_grad()
def measure(gp, seconds, neighbors):
    """Scores on the test rows."""
    x, y, x_test, y_test = problem("elevators", ROWS)
    if neighbors == "all":
        loc, var = Exact(gp, x, y).predict(x_test)
    elif neighbors == K:
        loc, var = gp(x_test, num_neighbors=K)
    else:
        f = full_scale(gp, *full_scale_places(gp, x)).predict(x_test, y - gp.mean(x))
        loc, var = gp.mean(x_test) + f.mean, f.variance
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
