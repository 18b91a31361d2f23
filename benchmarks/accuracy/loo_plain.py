"""Tables 5, 6 and 8 and figure 3 of the LOO-k paper (Jankowiak and Pleiss 2021) by plain calls, with nothing tuned.

- degenerate (table 5): 4,000 training rows as they are; "twins", every row once more with noise of variance 1e-4 on
  inputs and target, as in section 5.5 of the paper; and "copies", every row twice without noise.
- splits (tables 6 and 8): means and standard errors over ten splits, K = 32 or 128 inducing points.
- neighbors (figure 3): scores against the number of neighbors, of training and predictions alike; 5,000 training rows.

Inputs and real targets in units of their standard deviations on the training rows, Matern-5/2 with a lengthscale per
input. Rows are appended to a CSV file; one that is there is not run again.

Usage: python benchmarks/accuracy/loo_plain.py [--parts degenerate splits neighbors]
           [--csv benchmarks/results/loo_plain.csv] [--out benchmarks/results/loo_plain.md]
           [--figure docs/_static/loo_neighbors.svg], a picture of neighbors
The data come from the folder that PYRO_NNGP_DATA names.
"""

import time
from functools import partial

import torch
from papers import TASKS  # beside this file
from sweeps import Sweep, main
from tasks import evaluate, likelihood, standardized

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.models import LOO, SVGP, VNNGP, Vecchia

ROWS, NOISE, SPLITS = 4000, 0.01, 10
DEGENERATE = {
    "LOO-64": (LOO, {"num_neighbors": 64}),
    "Vecchia-64": (Vecchia, {"num_neighbors": 64}),
    "VNNGP-32": (VNNGP, {"num_neighbors": 32}),
    "SVGP-512": (SVGP, {"inducing": 512}),
}
EVERY = {"LOO-32": (LOO, {"num_neighbors": 32})}
CHEAP = EVERY | {"SVGP": (SVGP, {"inducing": 128})}
COMPARED = ("bike, 15 columns", "elevators", "kin40k", "pol", "protein, RMSD")


def measure(kind, method, options, x, y, x_test, y_test, predict_from=None):
    """Scores on the test rows of a plain call, with the learned noise variance as the value."""
    begin = time.process_time()
    gp = method(x, y, Matern52(x.shape[1]), likelihood(kind, y), **options)
    fit(gp, progress=False)
    facts = {"seconds": time.process_time() - begin}
    found = evaluate(partial(gp.predict, num_neighbors=predict_from), x_test, y_test, kind)
    if kind == "real":
        facts["value"] = gp.likelihood.variance.item()
    return facts | {name: found[name] for name in ("nll", "rmse", "error") if name in found}


def doubled(x, y, scale):
    """Every row once more, with noise of this standard deviation."""
    generator = torch.Generator().manual_seed(0)
    return [torch.cat([v, v + scale * torch.randn(v.shape, generator=generator)]) for v in (x, y)]


def degenerate():
    """Rows of scores with and without twins."""
    for label, (method, options) in DEGENERATE.items():
        for name in ("elevators", "pol", "bike", "kin40k"):
            x, y, *test = standardized(TASKS[name], most=ROWS)
            settings = {"original": (x, y), "twins": doubled(x, y, NOISE)}
            if method is not SVGP:  # for its time
                settings["copies"] = doubled(x, y, 0)
            for setting, train in settings.items():

                def run(method=method, options=options, train=train, test=test):
                    return measure("real", method, options, *train, *test)

                yield {"data": name, "method": label, "setting": setting}, run


def splits():
    """Rows of scores of each split."""
    methods_of = {"elevators": EVERY, "pol": EVERY, "titanic": CHEAP, "banana": CHEAP, "cardiotocography10": EVERY}
    for name, methods in methods_of.items():
        task = TASKS[name]
        for label, (method, options) in methods.items():
            for seed in range(SPLITS):

                def run(task=task, method=method, options=options, seed=seed):
                    data = standardized(task, seed)
                    if "inducing" in options:
                        options = {"inducing": min(options["inducing"], len(data[0].unique(dim=0)))}
                    return measure(task.kind, method, options, *data)

                yield {"data": name, "method": label, "setting": seed}, run


def neighbors():
    """Rows of scores against k."""
    for name in COMPARED:
        for k in (8, 16, 32, 64, 128):

            def run(name=name, k=k):
                data = standardized(TASKS[name], most=5000)
                return measure("real", LOO, {"num_neighbors": k}, *data, predict_from=k)

            yield {"data": name, "method": "LOO-k", "setting": k}, run


SWEEPS = {
    "degenerate": Sweep(
        "Scores with and without twins (table 5); 4,000 training rows, twice that with them",
        degenerate,
        ("nll", "rmse", "value", "seconds"),
        score="nll",
        label="test NLL",
        axis="rows",
        value="noise variance",
    ),
    "splits": Sweep(
        "Means over splits, and their standard errors (tables 6 and 8)",
        splits,
        ("nll", "rmse", "error", "seconds"),
        score="nll",
        label="test NLL",
        axis="splits",
        averaged=True,
    ),
    "neighbors": Sweep(
        "Scores of LOO-k against the number of neighbors (figure 3), 5,000 training rows",
        neighbors,
        ("nll", "rmse", "seconds"),
        score="nll",
        label="test NLL",
        axis="k",
    ),
}

if __name__ == "__main__":
    main("loo_plain", __doc__, SWEEPS)
