"""Figure 3 of Jankowiak and Pleiss (2021): scores of LOO-k against the number of neighbors k, on data at hand.

Each run is a plain call that ends by itself, and predicts from k neighbors too. 5,000 rows train, of the first split;
inputs and targets are standardized. Rows are appended to a CSV file; one that is there is not run again.

Usage: python benchmarks/accuracy/loo_neighbors.py [--csv benchmarks/results/loo_neighbors.csv]
           [--out benchmarks/results/loo_neighbors.md] [--figure docs/_static/loo_neighbors.svg]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import time
from functools import partial

from papers import TASKS  # beside this file
from sweeps import Sweep, main
from tasks import evaluate, standardized

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.models import LOO

DATA, NEIGHBORS = ("bike, 15 columns", "elevators", "kin40k", "pol", "protein, RMSD"), (8, 16, 32, 64, 128)


def scores(name, k):
    """Of a plain call with k neighbors."""
    x, y, x_test, y_test = standardized(TASKS[name], most=5000)
    begin = time.process_time()
    gp = LOO(x, y, Matern52(x.shape[1]), num_neighbors=k)
    fit(gp, max_seconds=600, progress=False)
    seconds = time.process_time() - begin
    found = evaluate(lambda x: gp.predict(x, num_neighbors=k), x_test, y_test, "real")
    return {"nll": found["nll"], "rmse": found["rmse"], "seconds": seconds}


def neighbors():
    """Rows of scores against k."""
    for name in DATA:
        for k in NEIGHBORS:
            yield {"data": name, "method": "LOO-k", "setting": k}, partial(scores, name, k)


SWEEPS = {
    "neighbors": Sweep(
        "Scores of LOO-k against the number of neighbors",
        neighbors,
        ("nll", "rmse", "seconds"),
        score="nll",
        label="test NLL",
        axis="k",
    ),
}

if __name__ == "__main__":
    main("loo_neighbors", __doc__, SWEEPS)
