"""The experiments behind figures 3 - 6 of the SWSGP paper (Tran, Milios, Michiardi, Filippone 2021), on data at hand.

- neighbors (figures 3 and 4): test scores of SWSGP with M = 64 inducing points as their number H per datum grows;
  beside it SVGP with M inducing points, SVGP with H, and the SVGP with M that predicts from the H nearest of them.
- inducing (figures 5 and 6): test scores as M grows from 8 to 64, with H = 4 and 8, beside SVGP with M.

Each run is a plain call that ends by itself, on the first split, inputs and real targets standardized. Banana and
spambase are whole; of kin40k and elevators 5,000 rows train.

Rows are appended to a CSV file; one that is there is not run again.

Usage: python benchmarks/accuracy/swsgp.py [--parts neighbors inducing] [--csv benchmarks/results/swsgp.csv]
           [--out benchmarks/results/swsgp.md] [--figure docs/_static/swsgp.svg]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import time
from functools import cache, partial
from itertools import product

from papers import TASKS  # beside this file
from sweeps import Sweep, main
from tasks import evaluate, likelihood, standardized

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.models import SVGP, SWSGP

DATA = {"banana": None, "spambase": None, "kin40k": 5000, "elevators": 5000}  # most training rows
M, NEIGHBORS, INDUCING = 64, (4, 8, 16, 32, 64), (8, 16, 32, 64)


@cache
def problem(name):
    return standardized(TASKS[name], most=DATA[name])


@cache
def trained(method, name, **settings):
    """A trained method, and its processor seconds."""
    x, y, _, _ = problem(name)
    begin = time.process_time()
    gp = method(x, y, Matern52(x.shape[1]), likelihood(TASKS[name].kind, y), seed=0, **settings)
    fit(gp, max_seconds=7200, progress=False)
    return gp, time.process_time() - begin


def scores(name, method, predict_from=None, **settings):
    """Of a trained method that predicts from that many neighbors."""
    gp, seconds = trained(method, name, **settings)
    _, _, x, y = problem(name)
    found = evaluate(lambda x: gp.predict(x, num_neighbors=predict_from), x, y, TASKS[name].kind)
    return {key: found[key] for key in ("nll", "rmse", "error") if key in found} | {"seconds": seconds}


def neighbors():
    """Rows of scores against H."""
    for name in DATA:
        yield {"data": name, "method": "SVGP-M", "setting": M}, partial(scores, name, SVGP, inducing=M)
        for h in NEIGHBORS:
            measures = {
                "SWSGP-M-H": partial(scores, name, SWSGP, inducing=M, num_neighbors=h),
                "SVGP-H": partial(scores, name, SVGP, inducing=h),
                "SVGP-M-H": partial(scores, name, SVGP, predict_from=h, inducing=M),
            }
            for method, measure in measures.items():
                yield {"data": name, "method": method, "setting": h}, measure


def inducing():
    """Rows of scores against M."""
    for name, m in product(DATA, INDUCING):
        yield {"data": name, "method": "SVGP", "setting": m}, partial(scores, name, SVGP, inducing=m)
        for h in (4, 8):
            key = {"data": name, "method": f"SWSGP, H = {h}", "setting": m}
            yield key, partial(scores, name, SWSGP, inducing=m, num_neighbors=h)


COLUMNS = ("nll", "rmse", "error", "seconds")
SWEEPS = {
    "neighbors": Sweep(
        "Scores against the inducing points of each datum, H, with M = 64 (figures 3, 4)",
        neighbors,
        COLUMNS,
        score="nll",
        label="test NLL",
        axis="H",
    ),
    "inducing": Sweep(
        "Scores against the number of inducing points, M (figures 5, 6)",
        inducing,
        COLUMNS,
        score="nll",
        label="test NLL",
        axis="M",
    ),
}

if __name__ == "__main__":
    main("swsgp", __doc__, SWEEPS)
