"""The experiments of the SWSGP paper (Tran, Milios, Michiardi, Filippone 2021), on data at hand.

- neighbors (figures 3 and 4): test scores of SWSGP with M = 64 inducing points as their number H per datum grows;
  beside it SVGP with M inducing points, SVGP with H, and the SVGP with M that predicts from the H nearest of them.
- inducing (figures 5 and 6): test scores as M grows from 8 to 64, with H = 4 and 8, beside SVGP with M.
- many (section 4.4): test scores on flights as training goes on, of SWSGP with 100,000 of the 219,082 training inputs
  as inducing points that stay there, H = 32 and 100, and of SVGP with 512, all by gradient steps on batches of 256.
  Neighbors are found again every 200 steps, in the metric of the kernel; seconds are those of training, without the
  start and its first search.
- steps, predictions (table 1): processor milliseconds of a training step on a batch of 64, and of predictions at 1,000
  points, medians of alternating rounds in one process.
- local (table 3): 64 local GPs, each trained on the 100 training points nearest to a k-means center. Inductive ones
  predict what is nearest to their center; transductive ones lend their hyperparameters to the exact GP of the 100
  training points nearest to a test point. Beside them the latter with the hyperparameters of Vecchia on all data, and
  SWSGP on the paper's two sets.
- evidence: how far the loss, which is to be a bound, is above the log evidence at the hyperparameters found, in nats
  per data point, up to 32 neighbors, and test scores. All training rows, H = 32; then with the hyperparameters of
  a trained Vecchia, held fixed.

Each run of neighbors, inducing, local and evidence trains on all rows until its loss has converged (validation=False).
It takes the first split, inputs and real targets standardized. Of kin40k and elevators 5,000 rows train, but for
evidence; other sets are whole.

Rows are appended to a CSV file; one that is there is not run again.

Usage: python benchmarks/accuracy/swsgp.py [--parts neighbors inducing many steps predictions local
           evidence] [--csv benchmarks/results/swsgp.csv] [--out benchmarks/results/swsgp.md]
           [--figure docs/_static/swsgp.svg], a picture of neighbors and inducing
The data come from the folder that PYRO_NNGP_DATA names.
"""

import time
from functools import cache, partial
from itertools import pairwise, product
from statistics import median

import torch
from papers import MORE, TASKS  # beside this file
from sweeps import Sweep, looks, main
from tasks import evaluate, likelihood, some, standardized
from torch.distributions import Normal

from pyro_nngp.inducing import kmeans
from pyro_nngp.inference import fit
from pyro_nngp.inference.svi.family_check import family_gap
from pyro_nngp.kernels import Matern52
from pyro_nngp.models import SVGP, SWSGP, Vecchia
from pyro_nngp.neighbors import nearest
from pyro_nngp.variational import FullRank

TASKS |= MORE
DATA = {"banana": None, "spambase": None, "kin40k": 5000, "elevators": 5000}  # most training rows
M, NEIGHBORS, INDUCING = 64, (4, 8, 16, 32, 64), (8, 16, 32, 64)
MANY, LOOKS = 100_000, tuple(125 * 2**i for i in range(8))
COURSES = {"SVGP-512": (None, 2000), "SWSGP-100,000-32": (32, 16_000), "SWSGP-100,000-100": (100, 2000)}  # H, steps
TIMED, ROUNDS = {"kin40k": 256, "flights": 1024}, 5  # inducing points
EXPERTS, LOCAL = 64, 100
AT_EVIDENCE = ("elevators", "house prices", "california_housing", "kin40k")


@cache
def problem(name):
    return standardized(TASKS[name], most=DATA.get(name))


def build(method, name, **settings):
    """A method on training rows."""
    x, y, _, _ = problem(name)
    return method(x, y, Matern52(x.shape[1]), likelihood(TASKS[name].kind, y), seed=0, **settings)


@cache
def trained(method, name, **settings):
    """A trained method, and its processor seconds."""
    begin = time.process_time()
    gp = build(method, name, **settings)
    fit(gp, max_seconds=7200, validation=False, progress=False)
    return gp, time.process_time() - begin


def on_test_rows(name, predict):
    _, _, x, y = problem(name)
    found = evaluate(predict, x, y, TASKS[name].kind)
    return {key: found[key] for key in ("nll", "rmse", "error") if key in found}


def scores(name, method, predict_from=None, **settings):
    """Of a trained method that predicts from that many neighbors."""
    gp, seconds = trained(method, name, **settings)
    return on_test_rows(name, lambda x: gp.predict(x, num_neighbors=predict_from)) | {"seconds": seconds}


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


@cache
def course(method):
    """Scores on flights and processor seconds after each number of steps of one run."""
    x, (h, most) = problem("flights")[0], COURSES[method]
    if h is None:
        gp, how = build(SVGP, "flights", inducing=512), {"solve_every": 0}
    else:
        z = x[some(torch.arange(len(x)), MANY)]
        gp = build(SWSGP, "flights", inducing=z, learn_inducing=False, num_neighbors=h)
        how = {"refresh_every": 200}
    steps = [step for step in LOOKS if step <= most]
    return looks(gp, steps, lambda: on_test_rows("flights", gp.predict), batch_size=256, **how)


def many():
    """Rows of scores after numbers of steps."""
    for method, (_, most) in COURSES.items():
        for step in LOOKS:
            if step <= most:
                key = {"data": "flights", "method": method, "setting": step}
                yield key, lambda method=method, step=step: course(method)[step]


@cache
def times(name):
    """Processor milliseconds of a training step, and of predictions at 1,000 points, by method."""
    x, _, x_test, _ = problem(name)
    z = kmeans(x, TIMED[name])
    gps = {
        "SVGP-M": build(SVGP, name, inducing=z),
        "SWSGP-M-4": build(SWSGP, name, inducing=z, num_neighbors=4),
        "SWSGP-M-4, full covariance": build(SWSGP, name, inducing=z, num_neighbors=4, guide=FullRank()),
    }
    steps, predictions = {method: [] for method in gps}, {method: [] for method in gps}
    for seed in range(ROUNDS):  # alternating, so that all methods meet the same disturbances
        for method, gp in gps.items():
            steps[method] += step_times(gp, seed)
            begin = time.process_time()
            gp.predict(x_test[:1000])
            predictions[method].append(time.process_time() - begin)
    return [{method: 1e3 * median(values) for method, values in found.items()} for found in (steps, predictions)]


def step_times(gp, seed):
    """Processor seconds of ten gradient steps as in the paper, after three others."""
    ticks = []
    how = {"batch_size": 64, "lr": 0.001, "refresh_every": 0, "solve_every": 0, "seed": seed, "progress": False}
    fit(gp, 14, callback=lambda *_: ticks.append(time.process_time()), **how)
    return [after - before for before, after in pairwise(ticks[3:])]


def timed(which):
    """Rows of medians, of steps (0) or predictions (1)."""
    for name, m in TIMED.items():
        for method in ("SVGP-M", "SWSGP-M-4", "SWSGP-M-4, full covariance"):
            key = {"data": name, "method": method, "setting": m}
            yield key, lambda name=name, method=method: {"value": times(name)[which][method]}


@cache
def experts(name):
    """Centers, the GP trained on the training points nearest to each, and the processor seconds of it all."""
    x, y, _, _ = problem(name)
    begin, gps = time.process_time(), []
    centers = kmeans(x, EXPERTS)
    for rows in nearest(centers, x, LOCAL, progress=False):
        gps.append(Vecchia(x[rows], y[rows], Matern52(x.shape[1]), num_neighbors=LOCAL - 1))  # all others: exact
        fit(gps[-1], validation=False, progress=False)
    return centers, gps, time.process_time() - begin


def local(name, transductive):
    """Scores where the expert of the nearest center predicts."""
    x, y, _, _ = problem(name)
    centers, gps, seconds = experts(name)
    if transductive:
        gps = [Vecchia(x, y, start=gp, num_neighbors=2, metric=torch.ones(x.shape[1])) for gp in gps]

    def predict(x_new):
        center = nearest(x_new, centers, 1, progress=False)[:, 0]
        loc, scale = torch.empty(len(x_new)), torch.empty(len(x_new))
        for i in center.unique():
            mine = center == i
            found = gps[i].predict(x_new[mine], num_neighbors=LOCAL)
            loc[mine], scale[mine] = found.mean, found.stddev
        return Normal(loc, scale)

    return on_test_rows(name, predict) | {"seconds": seconds}


def locals_():
    """Rows of scores of local GPs."""
    for name in ("powerplant", "kin8nm", "kin40k", "elevators"):
        measures = {
            "inductive GPs": (EXPERTS, partial(local, name, False)),
            "transductive GPs": (EXPERTS, partial(local, name, True)),
            "100 nearest, kernel of Vecchia": (1, partial(scores, name, Vecchia, predict_from=LOCAL)),
        }
        for h in () if name in DATA else (4, 8):
            measures[f"SWSGP-64-{h}"] = 1, partial(scores, name, SWSGP, inducing=M, num_neighbors=h)
        for method, (kernels, measure) in measures.items():
            yield {"data": name, "method": method, "setting": kernels}, measure


@cache
def first(name):
    """A trained Vecchia."""
    x, y, _, _ = standardized(TASKS[name])
    gp = Vecchia(x, y, Matern52(x.shape[1]), seed=0)
    fit(gp, progress=False)
    return gp


def evidence():
    """Rows of the loss less the log evidence, and scores, against M."""
    for name, m, fixed in product(AT_EVIDENCE, (64, 256, 1024), (False, True)):

        def measure(name=name, m=m, fixed=fixed):
            x, y, x_test, y_test = standardized(TASKS[name])
            kernel = None if fixed else Matern52(x.shape[1])
            gp = SWSGP(x, y, kernel, seed=0, inducing=m, start=first(name) if fixed else None)
            gp.kernel.requires_grad_(not fixed)
            gp.likelihood.requires_grad_(not fixed)
            begin = time.process_time()
            fit(gp, validation=False, progress=False)
            facts = {"value": -family_gap(gp), "seconds": time.process_time() - begin}
            found = evaluate(gp.predict, x_test, y_test, "real")
            return facts | {key: found[key] for key in ("nll", "rmse")}

        method = "SWSGP, hyperparameters of Vecchia" if fixed else "SWSGP"
        yield {"data": name, "method": method, "setting": m}, measure


COLUMNS = ("nll", "rmse", "error", "seconds")
NLL = {"score": "nll", "label": "test NLL"}
MILLISECONDS = {"score": "value", "label": "milliseconds", "axis": "M"}


SWEEPS = {
    "neighbors": Sweep(
        "Scores against the inducing points of each datum, H, with M = 64 (figures 3, 4)",
        neighbors,
        COLUMNS,
        axis="H",
        **NLL,
    ),
    "inducing": Sweep(
        "Scores against the number of inducing points, M (figures 5, 6)", inducing, COLUMNS, axis="M", **NLL
    ),
    "many": Sweep(
        "Scores as training goes on with 100,000 inducing points (section 4.4)",
        many,
        ("nll", "error", "seconds"),
        axis="steps",
        x="seconds",
        **NLL,
    ),
    "steps": Sweep(
        "Processor milliseconds of a training step (table 1)",
        partial(timed, 0),
        ("value",),
        **MILLISECONDS,
    ),
    "predictions": Sweep(
        "Processor milliseconds of predictions at 1,000 points (table 1)",
        partial(timed, 1),
        ("value",),
        **MILLISECONDS,
    ),
    "local": Sweep("Scores of local GPs (table 3)", locals_, ("nll", "rmse", "seconds"), axis="kernels", **NLL),
    "evidence": Sweep(
        "Nats per data point by which the loss is above the log evidence, and test scores",
        evidence,
        ("value", "nll", "rmse", "seconds"),
        axis="M",
        value="above the evidence",
        **NLL,
    ),
}

if __name__ == "__main__":
    main("swsgp", __doc__, SWEEPS)
