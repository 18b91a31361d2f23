"""The plain call beside a tuned recipe: what somebody gets who types `fit(Method(x, y, kernel, likelihood))`.

Raw units, raw columns: nothing is standardized for the plain call. One line per data set and method. "plain" is the
constructor with the likelihood of the data and nothing else, trained by `fit` without a number of steps, predicting
without a number of neighbors; "Matern-5/2" the same with that kernel in place of a learned smoothness, where the plain
call has one. "tuned" is a recipe by hand for a Matern-5/2 kernel: columns and real targets standardized, Adam with
falling rates, neighbors found again every 50 steps, and a grid of eight settings (start lengthscale .5 or 1.5 sqrt(D),
learning rate .03 or .1, 24 or 64 neighbors; SVGP: 128 or 256 inducing points). Successive halving on a tenth of the
training rows: all eight at a sixth of the steps, the best three at half of them, predictions of those from the
neighbors of training or from 256; the best is trained on all training rows. Test rows choose nothing.

At most 3,000 training and 1,000 test rows of each set. Scores are on the test rows: NLL in nats per row, of real
targets in units of their training standard deviation; coverage of y by central 95 % intervals (of counts and labels
by quantiles of 500 draws, which cover more than 95 %); processor seconds of building and training, for the tuned
recipe those of the whole search. A row that is in the CSV file is not computed again, so the command can be stopped
and repeated.

Usage: python benchmarks/accuracy/defaults.py [--data elevators pol] [--methods Vecchia] [--variants plain tuned]
           [--rows 3000] [--csv benchmarks/results/defaults.csv] [--out benchmarks/results/defaults.md]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import argparse
import itertools
import math
import time
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyro
import torch
from rows import append, commit, read  # beside this file
from tasks import Task, evaluate, likelihood, split
from torch.distributions import Normal

from pyro_nngp.data import Standardizer
from pyro_nngp.inference import ConvergenceWarning, DivergenceError, Schedule, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.models import LOO, NPVI, SVGP, SWSGP, VNNGP, Vecchia

TASKS = {
    "elevators": Task("elevators"),
    "pol": Task("pol"),
    "kin40k": Task("kin40k"),
    "protein": Task("protein"),
    "california_housing": Task("california_housing"),
    "concrete": Task("concrete"),
    "airfoil": Task("airfoil"),
    "elevation, space": Task("prism_elevation"),
    "house prices, space": Task("uk_house_postcode", transform=torch.log),
    "rainfall, space": Task("na_rainfall"),
    "temperature, space and time": Task(
        "co_monthly_met", target=1, rows=lambda data: ~data.y[:, 1].isnan() & (data.x[:, 3] > 1990)
    ),
    "banana, labels": Task("banana", "binary"),
    "malaria, labels in space": Task("gambia_malaria", "binary"),
    "pendigits, classes": Task("pendigits", "classes"),
    "trees, counts in space": Task("bei_trees", "counts", columns=(0, 1)),
    "robins, counts in space and time": Task("robins_cbc", "overdispersed"),
}
KINDS = {
    "Vecchia": ("real",),
    "LOO": ("real", "binary", "classes", "overdispersed"),
    "VNNGP": ("real", "binary", "counts", "overdispersed"),
    "SVGP": ("real", "binary", "counts", "overdispersed"),
    "NPVI": ("real", "binary", "counts", "overdispersed"),
    "SWSGP": ("real", "binary", "counts", "overdispersed"),
}
SMOOTH = ("SVGP", "SWSGP")  # their plain call has this kernel
METHODS = {"Vecchia": Vecchia, "LOO": LOO, "VNNGP": VNNGP, "SVGP": SVGP, "NPVI": NPVI, "SWSGP": SWSGP}
FIELDS = ("data", "kind", "method", "variant", "status", "nll", "coverage", "seconds", "steps", "converged", "setting")
FIELDS += ("num_train", "num_test", "input_dim", "threads", "torch", "commit")
ROWS = 3_000  # of training
LENGTHS, RATES, SIZES = (0.5, 1.5), (0.03, 0.1), {"SVGP": (128, 256)}
NEIGHBORS, MANY = (24, 64), 256  # in training, in prediction
STEPS = {"SVGP": 200}
STEPS_OF_OTHERS, BATCH, BATCH_SVGP = 300, 256, 512


class Setting(NamedTuple):
    """Of the tuned recipe: start lengthscale over sqrt(D), learning rate, neighbors or inducing points."""

    length: float
    rate: float
    size: int


def plain(method, x, y, kind, kernel=None):
    """What a first user types; returns the predictions and facts about the run."""
    gp = METHODS[method](x, y, kernel, likelihood(kind, y))
    result = fit(gp, progress=False)
    return gp.predict, {"steps": result.steps, "converged": result.converged, "setting": result.optimizer}


def smooth(method, x, y, kind):
    """The plain call with a kernel of fixed smoothness."""
    return plain(method, x, y, kind, Matern52(x.shape[1]))


def tuned(method, x, y, kind):
    """The best of a grid of settings by hand, chosen by successive halving on held-out training rows."""
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    held, rest = rows[: len(x) // 10], rows[len(x) // 10 :]
    steps = STEPS.get(method, STEPS_OF_OTHERS)
    settings = list(itertools.starmap(Setting, itertools.product(LENGTHS, RATES, SIZES.get(method, NEIGHBORS))))
    predictions = (None,)
    for share, keep in ((6, 3), (2, 1)):
        if share == 2 and method not in ("SVGP", "SWSGP"):
            predictions = (None, MANY)
        scores = {}
        for setting in settings:
            predict = by_hand(method, x[rest], y[rest], kind, setting, steps // share)
            for many in predictions:
                score = math.inf if predict is None else evaluate(partial(predict, many), x[held], y[held], kind)["nll"]
                scores[setting, many] = score if math.isfinite(score) else math.inf
        best = sorted(scores, key=scores.get)[:keep]
        settings, many = list(dict.fromkeys(setting for setting, _ in best)), best[0][1]
    predict = by_hand(method, x, y, kind, settings[0], steps)
    if predict is None:
        raise DivergenceError("the best setting diverges on all training rows")
    setting = f"length {settings[0].length} lr {settings[0].rate} size {settings[0].size} prediction {many or 'same'}"
    return partial(predict, many), {"steps": steps, "converged": "", "setting": setting}


def by_hand(method, x, y, kind, setting, steps):
    """A method trained with a setting, as a function of neighbors for prediction and inputs; None if it diverges."""
    inputs, scale = Standardizer(x), Standardizer(y) if kind == "real" else None
    z, dim = inputs.transform(x), x.shape[1]
    kernel = Matern52(dim, variance=torch.tensor(0.7), lengthscale=torch.full((dim,), dim**0.5 * setting.length))
    targets = y if scale is None else scale.transform(y)
    if method == "SVGP":
        options, batch, refresh_every = {"inducing": setting.size, "jitter": 1e-5}, BATCH_SVGP, None
    else:
        options, batch, refresh_every = {"num_neighbors": setting.size}, BATCH, 50
    recipe = {"lr": setting.rate, "schedule": Schedule((0.5, 0.75, 0.9), 0.3), "refresh_every": refresh_every}
    try:
        gp = METHODS[method](z, targets, kernel, likelihood(kind, y, 0.05), **options)
        fit(gp, steps, batch_size=min(batch, len(x)), progress=False, **recipe)
    except (DivergenceError, NotPositiveDefiniteError):
        return None

    def predict(many, x_new):
        more = {} if many is None else {"num_neighbors": min(many, len(x) - 1)}
        found = gp.predict(inputs.transform(x_new), **more)
        return found if scale is None else Normal(scale.inverse(found.mean), found.stddev * spread(scale))

    return predict


def spread(standardizer):
    """Standard deviation that a standardizer divides by."""
    return standardizer.inverse(torch.ones(1)) - standardizer.inverse(torch.zeros(1))


def run(name, method, variant, most):
    """One row."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    task = TASKS[name]
    (x, y), (x_test, y_test) = split(task, most=most)
    row = {"data": name, "kind": task.kind, "method": method, "variant": variant, "status": "ok"}
    row |= {"num_train": len(x), "num_test": len(x_test), "input_dim": x.shape[1]}
    row |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit()}
    start = time.process_time()
    try:
        predict, facts = VARIANTS[variant](method, x, y, task.kind)
        row |= facts | {"seconds": time.process_time() - start}
        found = evaluate(predict, x_test, y_test, task.kind)
        unit = math.log(y.std().item()) if task.kind == "real" else 0.0
        return row | {"nll": found["nll"] - unit, "coverage": found.get("coverage", math.nan)}
    except (DivergenceError, NotPositiveDefiniteError, ValueError) as error:
        return row | {"status": f"failed: {type(error).__name__}: {error}"[:200]}


VARIANTS = {"plain": plain, "Matern-5/2": smooth, "tuned": tuned}


def table(rows, command):
    """One line per data set and method: plain beside the fixed smoothness and tuned."""
    first, commits = rows[0], ", ".join(sorted({row["commit"] for row in rows}))
    lines = [
        f"`{command}`, commit {commits}, torch {first['torch']}, {first['threads']} thread(s), other jobs on the "
        "machine. Raw units, at most 3,000 training rows. NLL in nats per test row (real targets in units of their "
        "standard deviation), coverage of y by 95 % intervals, processor seconds of building and training; those of "
        "the tuned recipe are of its whole search of eight settings on validation rows.",
        "",
        "| data | N, D | method | NLL plain | Matern-5/2 | tuned | plain less tuned | coverage plain | tuned | seconds "
        "plain | Matern-5/2 | tuned |",
        "|---" * 12 + "|",
    ]
    worse, gains = [], []
    ordered = sorted(rows, key=lambda row: list(TASKS).index(row["data"]))
    for name, method in dict.fromkeys((row["data"], row["method"]) for row in ordered):
        found = {row["variant"]: row for row in rows if (row["data"], row["method"]) == (name, method)}

        def cell(variant, key, digits, found=found):
            row = found.get(variant, {})
            return f"{float(row[key]):.{digits}f}" if row.get(key) else row.get("status", "").partition(":")[0]

        def gap_to(variant, found=found):
            nll = [found.get(one, {}).get("nll") for one in ("plain", variant)]
            return float(nll[0]) - float(nll[1]) if all(nll) else math.nan

        gap = gap_to("tuned")
        worse += [gap] if gap == gap else []
        gains += [gap_to("Matern-5/2")] if gap_to("Matern-5/2") == gap_to("Matern-5/2") else []
        some_row = next(iter(found.values()))
        cells = [name, f"{int(some_row['num_train']):,}, {some_row['input_dim']}", method]
        cells += [cell(variant, "nll", 3) for variant in VARIANTS] + [f"{gap:+.3f}" if gap == gap else ""]
        cells += [cell(variant, "coverage", 3) for variant in ("plain", "tuned")]
        cells += [cell(variant, "seconds", 1) for variant in VARIANTS]
        lines.append("| " + " | ".join(cells) + " |")
    if worse:
        near = sum(gap <= 0.1 for gap in worse)
        lines += [
            "",
            f"The plain call is within 0.1 nats of the tuned recipe, or better, in {near} of {len(worse)} rows.",
        ]
    if gains:
        lines += [
            "",
            f"With a learned smoothness the NLL changes by {sum(gains) / len(gains):+.3f} on average over {len(gains)} "
            f"rows, by {min(gains):+.3f} to {max(gains):+.3f}.",
        ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--rows", type=int, default=ROWS, help="training rows at most")
    parser.add_argument("--retry", action="store_true", help="run failed rows again")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/defaults.csv"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/defaults.md"))
    args = parser.parse_args()
    csv, out = args.csv, args.out
    warnings.simplefilter("ignore", ConvergenceWarning)  # the column `converged` says it
    done = {
        (row["data"], row["method"], row["variant"])
        for row in read(csv)
        if not (args.retry and row["status"].startswith("failed"))
    }
    for variant, name, method in itertools.product(args.variants, args.data, args.methods):
        if (name, method, variant) in done or TASKS[name].kind not in KINDS[method]:
            continue
        if variant == "Matern-5/2" and (method in SMOOTH or TASKS[name].kind in ("binary", "classes")):
            continue
        row = run(name, method, variant, args.rows)
        append(csv, FIELDS, row)
        print(
            ", ".join(f"{row[k]:.4g}" if isinstance(row[k], float) else str(row[k]) for k in FIELDS if k in row),
            flush=True,
        )
    latest = {(row["data"], row["method"], row["variant"]): row for row in read(csv)}
    text = table(list(latest.values()), "python benchmarks/accuracy/defaults.py")
    out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
