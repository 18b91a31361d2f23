"""Prediction tasks on real data: what is predicted from what, rows of training and test, and scores on test rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributions import Normal

from pyro_nngp.data import (
    Standardizer,
    brier,
    coverage,
    crps_gaussian,
    crps_sample,
    error_rate,
    flights,
    load,
    nll,
    random_split,
    rmse,
    terrain,
)
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, NegativeBinomial, Poisson, StudentT

LOADERS = {"flights": flights, "terrain": terrain}  # in installed packages; all others are files


@dataclass(frozen=True)
class Task:
    """What is predicted of a data set: input columns (None: all), rows, target column, transformation and kind."""

    file: str
    kind: str = "real"
    columns: tuple[int, ...] | None = None
    target: int = 0
    transform: Callable | None = None
    rows: Callable | None = None


def split(task, seed=0, most=None):
    """Training and test rows in raw units: published split `seed` where there are some, else 80/20 at random.

    At most `most` training rows and a third as many test rows, drawn at random.
    """
    data = LOADERS[task.file]() if task.file in LOADERS else load(task.file)
    y = data.y if data.y.dim() == 1 else data.y[:, task.target]
    x = data.x if task.columns is None else data.x[:, list(task.columns)]
    kept = torch.arange(len(x)) if task.rows is None else task.rows(data).nonzero()[:, 0]
    x, y = x[kept], y[kept] if task.transform is None else task.transform(y[kept])
    if data.test_mask is None:
        train, test = random_split(len(x), (0.8, 0.2), seed=seed)
    else:
        mask = (data.test_mask if data.test_mask.dim() == 1 else data.test_mask[:, seed])[kept]
        train, test = (~mask).nonzero()[:, 0], mask.nonzero()[:, 0]
    if most is not None:
        train, test = some(train, most), some(test, most // 3)
    return (x[train], y[train]), (x[test], y[test])


def standardized(task, seed=0, most=None):
    """Inputs and targets of training rows, then of test rows; inputs and real targets in standard deviations."""
    (x, y), (x_test, y_test) = split(task, seed, most)
    scale = Standardizer(x)
    x, x_test = scale.transform(x), scale.transform(x_test)
    if task.kind in ("real", "heavy tails"):
        scale = Standardizer(y)
        y, y_test = scale.transform(y), scale.transform(y_test)
    return x, y, x_test, y_test


def some(rows, count):
    """At most that many of some rows, drawn at random."""
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]]


def likelihood(kind, y, noise=None):
    """The likelihood of a kind of data, from its defaults but for the noise variance of real data."""
    if kind == "real":
        return Gaussian() if noise is None else Gaussian(noise)
    if kind == "classes":
        return Categorical(int(y.max()) + 1)
    kinds = {"binary": Bernoulli, "counts": Poisson, "overdispersed": NegativeBinomial, "heavy tails": StudentT}
    return kinds[kind]()


@torch.no_grad()
def evaluate(predict, x, y, kind, block=500):
    """Mean scores over the test rows by name, block by block: NLL and those that suit the kind of data.

    Coverage is that of central 95 % intervals, by quantiles of 500 draws except for normal distributions.
    """
    totals = {}
    torch.manual_seed(0)
    for rows in torch.arange(len(x)).split(block):
        predictive, target = predict(x[rows]), y[rows]
        if kind != "classes":
            target = target.to(predictive.mean.dtype)
        for name, value in _scores(predictive, target, kind).items():
            totals[name] = totals.get(name, 0.0) + float(value) * len(rows)
    means = {name: total / len(x) for name, total in totals.items()}
    return means | ({"rmse": math.sqrt(means["rmse"])} if "rmse" in means else {})


def _scores(predictive, target, kind):
    """Scores of a block; in place of the RMSE its square."""
    found = {"nll": nll(target, predictive)}
    if kind == "classes":
        return found | {"error": error_rate(target, predictive.probs.argmax(-1).to(target.dtype))}
    if isinstance(predictive, Normal):
        low, high = predictive.icdf(torch.tensor(0.025)), predictive.icdf(torch.tensor(0.975))
        crps = crps_gaussian(target, predictive.mean, predictive.stddev)
    else:
        draws = predictive.sample((500,)).to(target.dtype)
        low, high, crps = draws.quantile(0.025, 0), draws.quantile(0.975, 0), crps_sample(target, draws)
    found["coverage"] = coverage(target, low, high)
    if kind == "binary":
        mean = predictive.mean
        return found | {"error": error_rate(target, (mean > 0.5).to(target.dtype)), "brier": brier(target, mean)}
    return found | {"rmse": rmse(target, predictive.mean.to(target.dtype)).square(), "crps": crps}
