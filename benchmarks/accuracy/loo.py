"""LOO-k, MLL-k and Vecchia on the data sets of Jankowiak and Pleiss (2021): regression, binary, multi-class.

Splits are 15:3:2 into training, test and validation rows, inputs (and real targets) standardized on the training rows,
Matern-5/2 ARD, Adam whose rate is divided by 5 after 25, 50 and 75 % of the steps, neighbors found again under the
learned lengthscales. SVGP and PG-VI (binary data) are the baselines with inducing points.

Every combination of --neighbors (of --inducing for the baselines), --lr, --variance, --guide, --loo-divergence and
--coupling is trained for each seed, and the number of neighbors of predictions is the best of --predict by validation
NLL. Each run is one row of a CSV file; a row that is there is not run again, so the command can be stopped, repeated
and extended. The table takes for each data set, method and seed the row of least validation NLL, all rows of the file
together, and shows mean and standard deviation over seeds. Test rows are used for nothing else. Seconds are processor
time: of the chosen runs (building and training), and of all rows that were there to choose from; use one thread.

Usage: python benchmarks/accuracy/loo.py elevators [--neighbors 32 64] [--predict 64 128] [--seeds 3] [--methods LOO-k
           SVGP] [--steps 240] [--batch-size 512] [--lr 0.1] [--csv benchmarks/results/loo.csv]
       python benchmarks/accuracy/loo.py --table [titanic spambase]
A data set written as name:10000 is trained on 10,000 of its rows, drawn by the seed. --degenerate adds noisy duplicates
(section 5.5). The data come from the folder that PYRO_NNGP_DATA names.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch
from rows import append, read

from pyro_nngp.data import Standardizer, crps_gaussian, error_rate, load, nll, random_split, rmse
from pyro_nngp.inference import Schedule, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, PolyaGammaBound
from pyro_nngp.models import LOO, SVGP, MLLk, Vecchia
from pyro_nngp.variational import Conjugate, LogNormal

RINGS = (8.5, 10.5)  # abalone in three classes
BINARY = ("titanic", "spambase", "musk2", "bank_marketing", "adult", "banana", "breast_cancer")
CLASSES = ("abalone", "page_blocks", "optdigits", "pendigits", "shuttle", "cardiotocography10")
FAMILIES = {"lognormal": LogNormal(), "conjugate": Conjugate()}
METHODS = ("LOO-k", "MLL-k", "Vecchia", "SVGP", "PG-VI")
INDUCING = ("SVGP", "PG-VI")
SETTINGS = ("data", "method", "seed", "size", "guide", "loo_divergence", "variance", "lr", "batch_size", "steps")
SETTINGS += ("refresh_every", "solve_every", "local_lr", "coupling")
SCORES = ("nll", "rmse", "crps", "error")
FIELDS = (
    *SETTINGS[:-1],
    "predict",
    "validation",
    *SCORES,
    "noise",
    "seconds",
    "num_train",
    "num_test",
    "torch",
    "coupling",
)


def split(label, seed):
    """Training, test and validation rows, inputs standardized, and a likelihood; name:n takes n training rows."""
    name, _, limit = label.partition(":")
    data = load(name)
    x, y = data.x, data.y
    if name == "abalone":
        y = torch.bucketize(y, torch.tensor(RINGS))
    elif name in CLASSES:
        y = y.unique(return_inverse=True)[1]
    parts = list(random_split(len(x), (0.75, 0.15, 0.1), seed))
    if limit:
        parts[0] = parts[0][torch.randperm(len(parts[0]), generator=torch.Generator().manual_seed(seed))[: int(limit)]]
    to_x = Standardizer(x[parts[0]])
    if name in BINARY:
        likelihood = Bernoulli()
    elif name in CLASSES:
        likelihood = Categorical(len(y.unique()))
        likelihood.num_quadrature = 64
    else:
        y = Standardizer(y[parts[0]]).transform(y)
        likelihood = Gaussian(0.25)
    return [(to_x.transform(x[rows]), y[rows]) for rows in parts], likelihood


@torch.no_grad()
def scores(gp, x, y, k=None, block=2000):
    """NLL, and RMSE and CRPS, or the error rate, from k neighbors (None: a method without them)."""
    names = SCORES[:3] if isinstance(gp.likelihood, Gaussian) else ("nll", "error")
    total = torch.zeros(len(names))
    for rows in torch.arange(len(x)).split(block):
        predictive = gp.predict(x[rows]) if k is None else gp.predict(x[rows], num_neighbors=k)
        values = [nll(y[rows], predictive)]
        if isinstance(gp.likelihood, Gaussian):
            loc, scale = predictive.mean, predictive.stddev
            values += [rmse(y[rows], loc).square(), crps_gaussian(y[rows], loc, scale)]
        else:
            probs = predictive.probs
            best = (probs > 0.5).to(y.dtype) if probs.dim() == 1 else probs.argmax(-1)
            values.append(error_rate(y[rows], best))
        total += torch.stack(values) * len(rows) / len(x)
    found = dict(zip(names, total.tolist(), strict=True))
    return found | ({"rmse": found["rmse"] ** 0.5} if "rmse" in found else {})


def build(settings, x, y, likelihood):
    """The untrained model of a row."""
    method, size, seed, dim = settings["method"], settings["size"], settings["seed"], x.shape[1]
    kernel = Matern52(dim, variance=torch.tensor(settings["variance"]), lengthscale=torch.full((dim,), dim**0.5))
    if method in INDUCING:
        likelihood = PolyaGammaBound(likelihood) if method == "PG-VI" else likelihood
        size = min(size, len(x) // 2, len(x.unique(dim=0)))
        return SVGP(x, y, kernel, likelihood, inducing=size, jitter=1e-5, seed=seed)
    if method == "LOO-k":
        family = {
            "guide": FAMILIES.get(settings["guide"]),
            "divergence": settings["loo_divergence"],
            "coupling": settings["coupling"],
        }
        family = {name: value for name, value in family.items() if value}
        return LOO(x, y, kernel, likelihood, num_neighbors=size, seed=seed, **family)
    return (MLLk if method == "MLL-k" else Vecchia)(x, y, kernel, likelihood, num_neighbors=size, seed=seed)


def run(settings, predict, degenerate):
    """Train once, choose the number of neighbors of predictions, score the test rows."""
    seed, nearest = settings["seed"], settings["method"] not in INDUCING
    ((x, y), test, validation), likelihood = split(settings["data"].removesuffix(", degenerate"), seed)
    if degenerate:
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.cat([v, v + 0.01 * torch.randn(v.shape, generator=generator)]) for v in (x, y))
    start = time.process_time()
    gp = build(settings, x, y, likelihood)
    recipe = {name: settings[name] for name in ("batch_size", "lr", "solve_every") if settings[name] != ""}
    if nearest:
        recipe["refresh_every"] = settings["refresh_every"]
    recipe["schedule"] = Schedule((0.25, 0.5, 0.75), 0.2, settings["local_lr"] or None)
    fit(gp, settings["steps"], seed=seed, progress=False, **recipe)
    if nearest:
        gp.refresh_neighbors()
    facts = {"seconds": time.process_time() - start, "num_train": len(x), "num_test": len(test[0])}
    facts["noise"] = float(gp.likelihood.variance.detach()) if isinstance(likelihood, Gaussian) else ""
    choice = [k for k in predict or [settings["size"]] if k <= len(x)] if nearest else [""]
    values = {k: scores(gp, *validation, k or None)["nll"] for k in choice}
    facts["predict"] = min(values, key=values.get)
    facts["validation"] = values[facts["predict"]]
    return settings | facts | scores(gp, *test, facts["predict"] or None) | {"torch": torch.__version__}


def grid(args):
    """All combinations of settings that the arguments name."""
    for seed, name, method in itertools.product(range(args.seeds), args.data, args.methods):
        base = {"data": name + ", degenerate" * args.degenerate, "method": method, "seed": seed}
        binary, classes = (name.partition(":")[0] in names for names in (BINARY, CLASSES))
        if (method == "PG-VI" and not binary) or (method in ("MLL-k", "Vecchia") and (binary or classes)):
            continue
        augmented = method == "LOO-k" and (binary or classes)
        sizes = args.inducing if method in INDUCING else args.neighbors
        families = (args.guide, args.loo_divergence) if augmented else ([""], [""])
        couplings = args.coupling if augmented and classes else [""]
        choices = itertools.product(sizes, *families, couplings, args.variance, args.lr)
        for size, guide, divergence, coupling, variance, lr in choices:
            yield base | {
                "size": size,
                "guide": guide,
                "loo_divergence": divergence,
                "coupling": coupling,
                "variance": variance,
                "lr": lr,
                "batch_size": args.batch_size,
                "steps": args.steps,
                "refresh_every": "" if method in INDUCING else args.refresh_every,
                "solve_every": "" if args.solve_every is None else args.solve_every,
                "local_lr": "" if args.local_lr is None else args.local_lr,
            }


def key(row):
    return tuple(str(row[name]) for name in SETTINGS)


def table(rows):
    """One Markdown table for data of each kind; the best row by validation NLL for each data set, method and seed."""
    lines = []
    for real in (True, False):
        here = [row for row in rows if (row["rmse"] != "") == real]
        names = SCORES[:3] if real else ("nll", "error")
        heads = ["data", "method", "validation NLL", *(n if n == "error" else n.upper() for n in names)]
        heads += (["noise"] if real else []) + ["chosen", "steps", "training [s]", "all runs [s]", "seeds"]
        if here:
            lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for name, method in sorted({(row["data"], row["method"]) for row in here}):
            group = [row for row in here if (row["data"], row["method"]) == (name, method)]
            seeds = sorted({row["seed"] for row in group})
            best = [min((r for r in group if r["seed"] == s), key=lambda r: float(r["validation"])) for s in seeds]
            cells = [name, method]
            for column in ("validation", *names, *(["noise"] if real else [])):
                values, digits = [float(row[column]) for row in best], 4 if column == "noise" else 3
                spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
                cells.append(f"{statistics.fmean(values):.{digits}f}{spread}")
            cells.append("; ".join(dict.fromkeys(chosen(row, group) for row in best)))
            cells.append(", ".join(dict.fromkeys(row["steps"] for row in best)))
            cells.append(f"{statistics.fmean(float(row['seconds']) for row in best):.0f}")
            cells.append(f"{sum(float(row['seconds']) for row in group):.0f} ({len(group)})")
            lines.append("| " + " | ".join([*cells, str(len(seeds))]) + " |")
        lines.append("")
    return "\n".join(lines)


def chosen(row, group):
    """K, or M, and the settings that were tuned."""
    size = f"M {row['size']}" if row["method"] in INDUCING else f"K {row['size']}, {row['predict']}"
    tuned = [n for n in ("guide", "loo_divergence", "coupling", "variance", "lr") if len({r[n] for r in group}) > 1]
    return ", ".join([size, *(f"{n.replace('loo_', '')} {row[n] or 'default'}" for n in tuned)])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="*")
    parser.add_argument("--methods", nargs="+", default=["LOO-k"], choices=METHODS)
    parser.add_argument("--neighbors", type=int, nargs="+", default=[32, 64, 128], help="K of training")
    parser.add_argument("--predict", type=int, nargs="+", help="numbers of neighbors for predictions; default K")
    parser.add_argument("--inducing", type=int, nargs="+", default=[512], help="M; N/2 and distinct inputs at most")
    parser.add_argument("--guide", nargs="+", default=["lognormal"], choices=FAMILIES)
    parser.add_argument(
        "--loo-divergence", nargs="+", default=[""], choices=["posterior", "prior", ""], help="of LOO-k"
    )
    parser.add_argument("--coupling", nargs="+", default=["odds", "probabilities"], help="of classes")
    parser.add_argument("--variance", type=float, nargs="+", default=[1.0], help="of the kernel, to start from")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.1])
    parser.add_argument("--local-lr", type=float)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--refresh-every", type=int, default=60)
    parser.add_argument("--solve-every", type=int, help="of fit; 0 takes gradients in q(omega), or q(u)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--degenerate", action="store_true", help="train on noisy duplicates too (section 5.5)")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/loo.csv"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    done = {key(row) for row in read(args.csv)}
    for settings in () if args.table else grid(args):
        if key(settings) not in done:
            row = run(settings, args.predict, args.degenerate)
            append(args.csv, FIELDS, row | {name: str(row[name]) for name in SETTINGS})
            print(", ".join(f"{name} {cell}" for name, cell in read(args.csv)[-1].items() if cell), flush=True)
    rows = [row for row in read(args.csv) if not args.data or row["data"].partition(", degenerate")[0] in args.data]
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
