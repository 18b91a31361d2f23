"""Presence of 30 tree species at 10,013 plots: factors for all species together beside a model for each.

A fifth of the plots is held out at random. All get the same columns: the place, and 13 covariates with the squares of
those that have more than two values, standardized. `LMC` has a linear mean of the covariates for each species and
FactorLoadings of nearest-neighbor factors of the place; `VNNGP` the same mean and a process of the place for each
species; scikit-learn's logistic regression splines of all columns, with its penalty chosen by cross-validation; its
gradient boosting all columns, with early stopping. "half known" are the same predictions of
every second species where the others are known at the held-out plots: `LMC` by `predict_given`, boosting with the known
species as further columns. NLL in nats, AUC; means over species.

Usage: python benchmarks/accuracy/species.py [--splits 0 1 2] [--methods LMC VNNGP logistic boosting] [--factors 5]
           [--rows N] [--csv benchmarks/results/species.csv] [--out benchmarks/results/species.md]

The data come from the folder that PYRO_NNGP_DATA names. Seconds are processor time; use one thread.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from rows import append, commit, read  # beside this file
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import SplineTransformer, StandardScaler

import pyro_nngp as nngp
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.means import LinearMean
from pyro_nngp.models import LMC

FIELDS = ("method", "split", "rows", "nll", "auc", "nll_given", "auc_given", "seconds", "threads", "commit")
SCORES = FIELDS[3:8]


def data(split, rows):
    """Columns and presence of training and held-out plots; places in units of 100 km."""
    raw = np.load(Path(os.environ["PYRO_NNGP_DATA"]) / "species" / "swiss_trees.npz")
    x, y = raw["X"].astype(float), raw["y"].astype(float)
    order = np.random.default_rng(split).permutation(len(x))
    held_out, train = order[: len(x) // 5], order[len(x) // 5 :][:rows]
    covariates = StandardScaler().fit(x[train][:, 2:]).transform(x[:, 2:])
    many = [i for i in range(covariates.shape[1]) if len(np.unique(x[:, 2 + i])) > 2]
    z = StandardScaler().fit_transform(np.hstack([covariates, covariates[:, many] ** 2]))
    columns = np.hstack([(x[:, :2] - x[:, :2].mean(0)) / 1e5, z])
    return columns[train], y[train], columns[held_out], y[held_out]


def factors(x, y, x_new, y_given, count):
    """Probabilities at new plots by LMC, and where some outputs are known."""
    x, y, x_new, y_given = (torch.from_numpy(part) for part in (x, y, x_new, y_given))
    places, covariates = [0, 1], list(range(2, x.shape[1]))
    gp = LMC(
        x,
        y,
        [Matern32(2, active_dims=places) for _ in range(count)],
        Bernoulli(),
        mean=LinearMean(len(covariates), num_latents=y.shape[1], active_dims=covariates).double(),
        mixing=FactorLoadings(y.shape[1], count),
    )
    nngp.fit(gp, progress=False)
    with torch.no_grad():
        return gp.predict(x_new).mean.mT.numpy(), gp.predict_given(x_new, y_given).mean.mT.numpy()


def processes(x, y, x_new, y_given, count):
    """Probabilities by one VNNGP for each species."""
    x, x_new = torch.from_numpy(x), torch.from_numpy(x_new)
    covariates, found = list(range(2, x.shape[1])), []
    for column in torch.from_numpy(y).T:
        mean = LinearMean(len(covariates), active_dims=covariates).double()
        gp = nngp.VNNGP(x, column, Matern32(2, active_dims=[0, 1]), Bernoulli(), mean=mean)
        nngp.fit(gp, progress=False)
        with torch.no_grad():
            found.append(gp.predict(x_new).mean.numpy())
    return np.stack(found, -1), None


def each(build, x, y, x_new):
    return np.stack([build().fit(x, column).predict_proba(x_new)[:, 1] for column in y.T], -1)


def logistic(x, y, x_new, y_given, count):
    def build():
        penalized = LogisticRegressionCV(Cs=np.logspace(-3, 1, 5), cv=5, scoring="neg_log_loss", max_iter=2000)
        return make_pipeline(SplineTransformer(n_knots=8), StandardScaler(), penalized)

    return each(build, x, y, x_new), None


def boosting(x, y, x_new, y_given, count):
    def build():
        return HistGradientBoostingClassifier(learning_rate=0.05, early_stopping=True, random_state=0)

    known = ~np.isnan(y_given[0])
    more, more_new = np.hstack([x, y[:, known]]), np.hstack([x_new, y_given[:, known]])
    given = np.full((len(x_new), y.shape[1]), np.nan)
    given[:, ~known] = each(build, more, y[:, ~known], more_new)
    return each(build, x, y, x_new), given


METHODS = {"LMC": factors, "VNNGP": processes, "logistic": logistic, "boosting": boosting}


def scores(y, probability):
    """Mean NLL and AUC over the species that are predicted; the AUC over the ones with presences and absences."""
    if probability is None:
        return float("nan"), float("nan")
    clipped = probability.clip(1e-9, 1 - 1e-9)
    pairs = [(y[:, t], clipped[:, t]) for t in range(y.shape[1]) if not np.isnan(clipped[0, t])]
    nll = np.mean([log_loss(true, found, labels=[0, 1]) for true, found in pairs])
    return nll, np.mean([roc_auc_score(true, found) for true, found in pairs if 0 < true.mean() < 1])


TITLE = """# Presence of 30 tree species

`PYRO_NNGP_DATA=... OMP_NUM_THREADS=1 python benchmarks/accuracy/species.py [--factors 3]`, one thread; seconds are
processor time of fit and predictions for all species. {rows} plots of Swiss forests to learn from, a fifth of all plots
held out at random; 13 covariates with the squares of 12 of them, and the place. `LMC` has a linear mean and shared
factors of the place, `VNNGP` the same mean and a process of its own for each species; logistic regression has splines
of all columns, boosting the columns. "half known": every second species where the others are known at the plot, by
`predict_given`, or as further columns. Means over species in nats; a species that no held-out plot has counts in the
NLL only.
"""


def table(rows):
    """Means over the splits, and each split."""
    header = "| method | split | NLL | AUC | NLL, half known | AUC, half known | seconds | commit |"
    lines = [TITLE.format(rows=rows[0]["rows"]), header, "|---" * 8 + "|"]
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        means = {key: [float(row[key]) for row in own if row[key] != ""] for key in SCORES}
        mean = {key: str(np.mean(values)) if values else "" for key, values in means.items()}
        lines += [line(name, f"all {len(own)}", mean, "")] + [
            line(name, row["split"], row, row["commit"]) for row in own
        ]
    return "\n".join(lines) + "\n"


def line(name, split, values, commit_of):
    cells = [f"{float(values[key]):.4f}" if values[key] != "" else "" for key in SCORES[:-1]]
    return "| " + " | ".join([name, split, *cells, f"{float(values['seconds']):.0f}", commit_of]) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--factors", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/species.csv"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/species.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for split in args.splits:
        x, y, x_new, y_new = data(split, args.rows)
        given = y_new.copy()
        given[:, ::2] = np.nan
        for name in args.methods:
            label = f"LMC, {args.factors} factors" if name == "LMC" else name
            if (label, str(split), str(len(x))) in {tuple(row[key] for key in FIELDS[:3]) for row in read(args.csv)}:
                continue
            start = time.process_time()
            found, where_known = METHODS[name](x, y, x_new, given, args.factors)
            seconds = time.process_time() - start
            if where_known is not None:
                where_known[:, 1::2] = np.nan
            half = scores(y_new, where_known)
            row = (label, split, len(x), *scores(y_new, found), *half, seconds, torch.get_num_threads(), commit())
            print(" | ".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row), flush=True)
            append(args.csv, FIELDS, dict(zip(FIELDS, row, strict=True)))
    args.out.write_text(table(read(args.csv)), encoding="utf-8")


if __name__ == "__main__":
    main()
