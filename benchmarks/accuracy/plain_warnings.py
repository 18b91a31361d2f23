"""Warnings of the plain call on each data set, and whether the cure that a warning names improves held-out data.

Each set is given as it is, in raw units, to the plain call for its kind: `Vecchia(x, y)` and `LOO(x, y)` for real
targets, `LOO` with `Bernoulli` or `Categorical` for labels, `VNNGP` with `Poisson` for counts; constructor, `fit` and
`predict`, without names of columns. All warnings are recorded. Where a warning of the data or of `fit` names another
call as its cure, this is tried on the same rows, and the scores of both are in the table: NLL in nats per test row,
of real targets in units of their standard deviation.

At most 1,500 training and 500 test rows of each set, published splits where there are some. A row that is in the CSV
file under a label, "before" or "after", is not computed again.

Usage: python benchmarks/accuracy/plain_warnings.py --label after [--data wine pol] [--csv plain_warnings.csv]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import argparse
import math
import time
import warnings
from functools import partial
from pathlib import Path

import pyro
import torch
from rows import append, commit, read  # beside this file
from tasks import Task, evaluate, likelihood, split

from pyro_nngp.inference import DivergenceError, fit
from pyro_nngp.likelihoods import NegativeBinomial, StudentT
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.means import LinearMean
from pyro_nngp.models import LOO, VNNGP, Vecchia

SPATIAL = """
bcef california_housing co_monthly_met jura na_rainfall prism_elevation sarcos_test4449 sic97_rain
us_precip_194804 walker_lake uk_house_postcode
"""
TABLES = """
nyc_flights13 abalone airfoil bike boston concrete elevators energy keggdirected keggundirected kin40k kin8nm
naval pol powerplant protein snelson1d wine yacht
"""
REAL = [*SPATIAL.split(), *TABLES.split()]  # targets
LABELS = ["adult", "banana", "bank_marketing", "gambia_malaria", "musk2", "spambase", "swiss_trees", "titanic"]
CLASSES = ["cardiotocography10", "optdigits", "page_blocks", "pendigits", "shuttle", "wine_recognition"]
COUNTS = ["bbs_pa", "bei_trees", "robins_cbc"]
PART = {  # rows and columns that make a task of the set
    "co_monthly_met": {"target": 1, "rows": lambda data: ~data.y[:, 1].isnan() & (data.x[:, 3] > 1990)},
    "bei_trees": {"columns": (0, 1)},
}
METHODS = {"Vecchia": Vecchia, "LOO": LOO, "VNNGP": VNNGP}


def student_t(x, y, method):
    return VNNGP(x, y, likelihood=StudentT())


def negative_binomial(x, y, method):
    return VNNGP(x, y, likelihood=NegativeBinomial())


def linear_mean(x, y, method):
    return method(x, y, mean=LinearMean(x.shape[1]))


def without_copies(x, y, method):
    _, inverse = torch.unique(torch.cat([x, y.to(x)[:, None]], 1), dim=0, return_inverse=True)
    first = torch.full((len(inverse),), len(x)).scatter_reduce(0, inverse, torch.arange(len(x)), "amin")
    rows = first[first < len(x)].sort().values
    return method(x[rows], y[rows])


NAMES = {  # words of a warning: its name in the table
    "look like degrees": "degrees",
    "share a lengthscale with": "units",
    "exact copies": "exact copies",
    "near copies": "near copies",
    "correlated with the nearest": "no correlation",
    "neighbors to agree": "neighbors",
    "mean function to lie": "mean",
    "two optima": "two optima",
    "loss of less": "loss",
    "know the label": "leak",
    "standard deviations away from all others": "codes",
    "lie so far": "far points",
    "tails of a normal": "heavy tails",
    "as Poisson counts do": "overdispersed",
    "a trend beyond": "trend",
    "errors of the size": "overconfident",
    "loss to stop falling": "not converged",
    "same in all rows": "constant",
}
CURES = {  # of warnings, where a call alone is the cure
    "heavy tails": student_t,
    "trend": linear_mean,
    "overdispersed": negative_binomial,
    "exact copies": without_copies,
}
FIELDS = ("label", "data", "kind", "method", "warnings", "nll", "cure", "nll_cured", "seconds", "texts", "commit")


def task_of(name):
    kinds = ((REAL, "real"), (LABELS, "binary"), (CLASSES, "classes"), (COUNTS, "counts"))
    kind = next(kind for names, kind in kinds if name in names)
    return Task(name, kind, **PART.get(name, {}))


def named(text):
    return next((short for words, short in NAMES.items() if words in text), "other")


def scored(build, x, y, x_test, y_test, kind):
    """NLL of test rows, and the texts of all warnings on the way."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gp = build(x, y)
        fit(gp, progress=False)
        found = evaluate(gp.predict, x_test, y_test, kind)
    unit = math.log(y.double().std().item()) if kind == "real" else 0.0
    return found["nll"] - unit, [str(one.message) for one in caught]


def run(label, name, method, most):
    """A row: the plain call, and the cure of the first warning that has one in `CURES`."""
    task = task_of(name)
    (x, y), (x_test, y_test) = split(task, most=most)
    row = {"label": label, "data": name, "kind": task.kind, "method": method, "commit": commit()}
    start = time.process_time()

    def plain(x, y):
        return METHODS[method](x, y, likelihood=likelihood(task.kind, y))

    try:
        nll, texts = scored(plain, x, y, x_test, y_test, task.kind)
    except (DivergenceError, NotPositiveDefiniteError, ValueError) as error:
        return row | {"warnings": "failed", "texts": f"{type(error).__name__}: {error}"[:300]}
    names = list(dict.fromkeys(map(named, texts)))
    row |= {"nll": nll, "warnings": "; ".join(names), "texts": " | ".join(texts)}
    row |= {"seconds": time.process_time() - start}
    for cure in (CURES[one] for one in names if one in CURES):
        cured = partial(cure, method=METHODS[method])
        row |= {"cure": cure.__name__, "nll_cured": scored(cured, x, y, x_test, y_test, task.kind)[0]}
        break
    return row


def successes(rows):
    """How often each cure lowers the NLL."""
    gains = {}
    for row in rows:
        if row["label"] == "after" and row["cure"]:
            gains.setdefault(row["cure"], []).append(float(row["nll"]) - float(row["nll_cured"]))
    counts = [f"`{cure}` {sum(gain > 0 for gain in each)} of {len(each)}" for cure, each in gains.items()]
    return f"Times that a cure lowers the NLL: {', '.join(counts)}."


def table(rows):
    """One line per data set and method."""
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    lines = [
        f"`python benchmarks/accuracy/plain_warnings.py`, commits {commits}. At most 1,500 training rows; NLL in nats "
        f"per test row, of real targets in units of their standard deviation. {successes(rows)}",
        "",
        "| data | method | warnings before | after | NLL plain | NLL with the cure | cure |",
        "|---" * 7 + "|",
    ]
    found = {(row["label"], row["data"], row["method"]): row for row in rows}
    for name, method in dict.fromkeys((row["data"], row["method"]) for row in rows):
        before, after = (found.get((label, name, method), {}) for label in ("before", "after"))
        cells = [name, method, *(each.get("warnings", "not run") for each in (before, after))]
        cells += [
            f"{float(value):.3f}" if (value := (after or before).get(key)) else "" for key in ("nll", "nll_cured")
        ]
        lines.append("| " + " | ".join([*cells, after.get("cure", "")]) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--label", default="after", choices=("before", "after"))
    parser.add_argument("--data", nargs="+", default=REAL + LABELS + CLASSES + COUNTS)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plain_warnings.md"))
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/plain_warnings.csv"))
    args = parser.parse_args()
    done = {(row["label"], row["data"], row["method"]) for row in read(args.csv)}
    for name in args.data:
        kind = task_of(name).kind
        for method in {"real": ("Vecchia", "LOO"), "counts": ("VNNGP",)}.get(kind, ("LOO",)):
            if (args.label, name, method) not in done:
                row = run(args.label, name, method, args.rows)
                append(args.csv, FIELDS, row)
                print(name, method, row.get("nll"), row["warnings"], row.get("nll_cured"), flush=True)
    args.out.write_text(table(read(args.csv)), encoding="utf-8")


if __name__ == "__main__":
    main()
