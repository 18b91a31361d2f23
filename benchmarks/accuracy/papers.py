"""The methods of the five papers side by side on real data, in one table, beside the papers' own figures.

Each run of a method on a data set and split is one row of a CSV file; a row that is there is not run again, so the
command can be stopped and repeated, and methods, data sets and splits added. The table is made of all rows in the file.

A run is a plain call, `fit(Method(x, y, Matern52(D), likelihood))` with K = 32 neighbors (NPVI 20) or as many inducing
points as its paper has, "own K" with none given, which ends by itself; column `converged` says where --seconds of
wall-clock time ended it first. Nothing is tuned, so that nothing is chosen by test rows or validation rows. BSGP has a
number of steps, and the exact process the hyperparameters of Vecchia. Published splits where the data have them, else
80/20 at random; seed s takes split s. Inputs and real targets are standardized on the training rows, and scores are in
these units. Seconds in the table are those of the processor, for building and training.

Data: bike's target is the logarithm of the sum of its last two columns, which "bike, 15 columns" leaves out; targets
of protein are logarithms, those of "protein, RMSD" the papers'. Precipitation has Student-t noise, as in [1], on the
5,906 stations that were observed.

Usage: python benchmarks/accuracy/papers.py [--data elevators pol] [--methods LOO-k VNNGP] [--seeds 3] [--seconds 600]
           [--csv benchmarks/results/papers.csv] [--out benchmarks/results/papers.md]
The data come from the folder that PYRO_NNGP_DATA names; terrain and flights also from the `datasets` extra.
"""

import argparse
import itertools
import math
import warnings
from functools import cache
from pathlib import Path

import pyro
import torch
from recipes import METHODS, NotApplicable  # beside this file
from rows import append, commit, read
from tasks import Task, evaluate, standardized

from pyro_nngp.inference import ConvergenceWarning, DivergenceError
from pyro_nngp.linalg import NotPositiveDefiniteError


def observed(data):
    """Stations that were not filled in by their source."""
    return torch.from_numpy(data.extras["observed"])


TASKS = {
    "elevators": Task("elevators"),
    "pol": Task("pol"),
    "bike": Task("bike"),
    "bike, 15 columns": Task("bike", columns=tuple(range(15))),
    "kin40k": Task("kin40k"),
    "protein": Task("protein"),
    "protein, RMSD": Task("protein", transform=torch.exp),
    "keggdirected": Task("keggdirected"),
    "keggundirected": Task("keggundirected"),
    "california_housing": Task("california_housing"),
    "house prices": Task("uk_house_postcode", transform=torch.log),
    "precipitation": Task("us_precip_194804", "heavy tails", rows=observed),
    "terrain": Task("terrain"),
    "prism_elevation": Task("prism_elevation"),
    "banana": Task("banana", "binary"),
    "titanic": Task("titanic", "binary"),
    "spambase": Task("spambase", "binary"),
    "musk2": Task("musk2", "binary"),
    "bank_marketing": Task("bank_marketing", "binary"),
    "adult": Task("adult", "binary"),
    "flights": Task("flights", "binary", transform=lambda y: (y > 0).to(y.dtype)),
    "cardiotocography10": Task("cardiotocography10", "classes"),
    "page_blocks": Task("page_blocks", "classes"),
    "optdigits": Task("optdigits", "classes"),
    "pendigits": Task("pendigits", "classes"),
    "shuttle": Task("shuttle", "classes"),
}
MORE = {name: Task(name) for name in ("kin8nm", "powerplant")}  # of other scripts, and not in the table
SCORES = {
    "real": ("nll", "rmse", "crps", "coverage"),
    "heavy tails": ("nll", "rmse", "crps", "coverage"),
    "binary": ("nll", "error", "brier"),
    "classes": ("nll", "error"),
}
FIELDS = ("data", "seed", "method", "status", "nll", "rmse", "crps", "coverage", "error", "brier", "noise", "steps")
FIELDS += ("converged", "seconds", "num_train", "num_test", "input_dim", "threads", "torch", "commit")


def run(name, method, seed, seconds):
    """One row."""
    pyro.clear_param_store()  # where Pyro's own guides keep their parameters by name
    pyro.set_rng_seed(seed)
    task = TASKS[name]
    x, y, x_test, y_test = standardized(task, seed)
    row = {"data": name, "seed": seed, "method": method, "status": "ok", "num_train": len(x), "num_test": len(x_test)}
    row |= {"input_dim": x.shape[1], "threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit()}
    try:
        predict, facts = METHODS[method](x, y, task.kind, seed, seconds)
        found = evaluate(predict, x_test, y_test, task.kind)
        return row | facts | {key: value for key, value in found.items() if key in FIELDS}
    except NotApplicable as reason:
        return row | {"status": f"not applicable: {reason}"}
    except (DivergenceError, NotPositiveDefiniteError) as error:
        return row | {"status": f"failed: {type(error).__name__}"}


@cache
def published():
    """NLL in the papers: {(data, method): {source: value}}, values as text."""
    found = {}
    for row in read(Path(__file__).with_name("published.csv")):
        if row["score"] == "nll":
            found.setdefault((row["data"], row["method"]), {})[row["source"]] = row["value"]
    return found


def theirs(data, method):
    """Pairs of source and NLL in the papers, of a method with whatever settings."""
    return published().get((data, method.partition(",")[0]), {}).items()


def differences(rows):
    """Tables of the mean NLL over splits less that of the papers, of real targets and of labels."""
    found = {}
    for name, method in dict.fromkeys((row["data"], row["method"]) for row in rows if row["status"] == "ok"):
        losses = [float(row["nll"]) for row in rows if (row["data"], row["method"]) == (name, method) and row["nll"]]
        mean = sum(losses) / len(losses)
        found[name, method] = "; ".join(f"{mean - float(nll):+.3f} [{source}]" for source, nll in theirs(name, method))
    lines = []
    for is_real in (True, False):
        here = {key: cell for key, cell in found.items() if cell and (TASKS[key[0]].kind == "real") == is_real}
        names = [name for name in TASKS if any(name == key[0] for key in here)]
        lines += [f"| method | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for method in [method for method in METHODS if any(method == key[1] for key in here)]:
            lines.append(f"| {method} | {' | '.join(here.get((name, method), '') for name in names)} |")
        lines.append("")
    return "\n".join(lines)


def table(rows):
    """Means over splits, one table per data set, best NLL on the first split first."""
    lines = []
    for name in dict.fromkeys(row["data"] for row in rows):
        here = [row for row in rows if row["data"] == name]
        names, first = SCORES[TASKS[name].kind], here[0]
        lines += [
            f"**{name}**: {int(first['num_train']):,} training and {int(first['num_test']):,} test rows, "
            f"D = {first['input_dim']}.",
            "",
            f"| method | {' | '.join(label if label == 'coverage' else label.upper() for label in names)} "
            "| noise | steps | seconds | splits | NLL, first split | papers: NLL |",
            "|---" * (len(names) + 7) + "|",
        ]
        entries = []
        for method in dict.fromkeys(row["method"] for row in here):
            group = [row for row in here if row["method"] == method]
            done = [row for row in group if row["status"] == "ok"]
            in_papers = "; ".join(f"{nll} [{source}]" for source, nll in theirs(name, method))
            if not done:
                cells = [group[0]["status"], *[""] * (len(names) + 4), in_papers]
                entries.append((math.inf, cells, method))
                continue

            def mean(key, rows=done):
                values = [float(row[key]) for row in rows if row[key] != ""]
                return sum(values) / len(values) if values else math.nan

            noise = "" if math.isnan(mean("noise")) else f"{mean('noise'):.3g}"
            cut = "" if all(row["converged"] in ("True", "") for row in done) else " (cut)"
            failed = f", {len(group) - len(done)} failed" if len(done) < len(group) else ""
            cells = [f"{mean(key):.3f}" for key in names]
            first_nll = next((float(row["nll"]) for row in done if int(row["seed"]) == 0), math.inf)
            cells += [noise, f"{mean('steps'):.0f}{cut}", f"{mean('seconds'):.0f}", f"{len(done)}{failed}"]
            entries.append((first_nll, [*cells, f"{first_nll:.3f}", in_papers], method))
        entries.sort(key=lambda entry: entry[0])
        lines += [f"| {method} | {' | '.join(cells)} |" for _, cells, method in entries] + [""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3600, help="of training, at most, by the wall clock")
    parser.add_argument("--retry", action="store_true", help="run failed rows again")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/papers.csv"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/papers.md"))
    args = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)  # the column `converged` says it
    done = {
        (row["data"], row["method"], int(row["seed"]))
        for row in read(args.csv)
        if not (args.retry and row["status"].startswith("failed"))
    }
    for seed, name, method in itertools.product(range(args.seeds), args.data, args.methods):
        if (name, method, seed) in done or TASKS[name].kind not in METHODS[method].kinds:
            continue
        row = run(name, method, seed, args.seconds)
        append(args.csv, FIELDS, row)
        print(
            ", ".join(f"{row[k]:.4g}" if isinstance(row[k], float) else str(row[k]) for k in FIELDS if k in row),
            flush=True,
        )
    latest = {(row["data"], row["method"], row["seed"]): row for row in read(args.csv)}
    rows = sorted(latest.values(), key=lambda row: list(TASKS).index(row["data"]))
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    heading = f"`python benchmarks/accuracy/papers.py`, commit {commits}, torch {rows[0]['torch']}, "
    heading += f"{rows[0]['threads']} thread(s), other jobs on the machine.\n\n"
    note = Path(__file__).with_name("papers_note.md").read_text(encoding="utf-8")
    summary = "Mean NLL over splits less the papers': negative is ahead.\n\n" + differences(rows)
    args.out.write_text("\n".join([heading + note, summary, table(rows)]), encoding="utf-8")


if __name__ == "__main__":
    main()
