"""Forecasts and hindcasts in space and time beside GPBoost's ``matern_space_time``, scored by CRPS and PIT.

* weather (co_monthly_met): monthly mean maximum temperatures at 60 stations of Colorado, 1988 - 1994; elevation and two
  harmonics of the year as covariates.
* birds (robins_cbc): counts of American robins at 100 circles, 2002 - 2016, with the logarithm of hours as an offset;
  negative binomial.

A forecast is of the last part of the time (6 months; 2 years) given all before. A hindcast is of a block in the middle
(6 months; 2 years) at half of the places, given everything else. Both programs get coordinates in hundreds of
kilometers, years and K neighbors. Kernels: a product of Matérn-3/2 in space and 1/2 in time, `Gneiting`, and GPBoost's
Matérn-3/2 of one distance in space and time. Ours is ordered by time. "naive" is the last earlier value at the same
place in the same month, with the spread of the differences between such pairs in the data times the square root of the
years between; of counts the last rate per hour, with differences of its square root drawn from those in the data.

CRPS is the mean over rows: exact for normal predictions, from 1,000 draws for counts. PIT values are uniform if
predictions are calibrated (randomized for counts): the table has the share in the central 90 %, and their
Kolmogorov-Smirnov distance from uniform.

Usage: PYRO_NNGP_DATA=... python benchmarks/accuracy/space_time.py [--sets weather birds] [--tasks forecast hindcast]
    [--methods ...] [--out FILE.md]
`pip install gpboost` for its rows. Processor time, one thread.
"""

import argparse
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from rows import commit  # beside this file
from scipy import stats

import pyro_nngp as nngp
from pyro_nngp.data import datasets
from pyro_nngp.kernels import Gneiting, Matern12, Matern32
from pyro_nngp.likelihoods import Gaussian, NegativeBinomial
from pyro_nngp.means import LinearMean
from pyro_nngp.neighbors import time_ordering

K, DRAWS = 20, 1000
TIME, ELEVATION = 2, 3


def places(lon, lat):
    """East and north in hundreds of kilometers, around the middle: one degree of latitude is 111.2 km."""
    middle = lat.mean()
    return 1.112 * (lon - lon.mean()) * torch.cos(torch.deg2rad(middle)), 1.112 * (lat - middle)


def weather():
    """x (N, 8): east, north, years, elevation [km], two harmonics; y; offset."""
    data = datasets.load("co_monthly_met", torch.float64)
    x, y = data.x, data.y[:, 2]
    kept = y.isfinite() & (x[:, 3] >= 1988) & (x[:, 3] < 1995)
    x, y = x[kept], y[kept]
    key = (x[:, :2] * 1e4).round()
    stations, station = key.unique(dim=0, return_inverse=True)
    chosen = torch.randperm(len(stations), generator=torch.Generator().manual_seed(0))[:60]
    kept = torch.isin(station, chosen)
    x, y = x[kept], y[kept]
    east, north = places(x[:, 0], x[:, 1])
    year = x[:, 3] - 1988
    wave = 2 * np.pi * year
    columns = [east, north, year, x[:, 2] / 1000, wave.sin(), wave.cos(), (2 * wave).sin(), (2 * wave).cos()]
    return torch.stack(columns, 1), y, None, station[kept]


def birds():
    """x (N, 3): east, north, years; counts; offset."""
    data = datasets.load("robins_cbc", torch.float64)
    x, y = data.x, data.y.flatten()
    _, circle = x[:, :2].unique(dim=0, return_inverse=True)
    recent = x[:, 2] >= 2002
    many = torch.bincount(circle[recent])
    often = (many >= 12).nonzero()[:, 0]
    chosen = often[torch.randperm(len(often), generator=torch.Generator().manual_seed(0))[:100]]
    kept = recent & torch.isin(circle, chosen)
    x, y = x[kept], y[kept]
    east, north = places(x[:, 0], x[:, 1])
    return torch.stack([east, north, x[:, 2] - 2002], 1), y, x[:, 3], circle[kept]


SETS = {"weather": (weather, 0.5), "birds": (birds, 2.0)}


def held_out(task, x, place, length):
    """Rows to predict."""
    year = x[:, TIME]
    if task == "forecast":
        return year > year.max() - length + 1e-6
    middle = (year.max() + year.min()) / 2
    known = torch.unique(place)
    half = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(1))[: len(known) // 2]]
    return (year >= middle) & (year < middle + length) & torch.isin(place, half)


def kernel(kind):
    space, since = Matern32(2, active_dims=[0, 1], isotropic=True), Matern12(1, variance=1.0, active_dims=[TIME])
    return Gneiting(Matern32(2, active_dims=[0, 1]), time_dim=TIME) if kind == "Gneiting" else space * since


def ours(kind, x, y, offset, x_new, offset_new, counts):
    """Draws or moments of y at new rows."""
    mean = None if counts else LinearMean(1, prior="weak", active_dims=[ELEVATION], periods={TIME: [1, 1 / 2]})
    settings = {"num_neighbors": K, "ordering": time_ordering(x, TIME)}
    if counts:
        gp = nngp.VNNGP(x, y, kernel(kind), NegativeBinomial(), offset=offset, **settings)
    else:
        gp = nngp.Vecchia(x, y, kernel(kind), Gaussian(), mean=mean, **settings)
    nngp.fit(gp, progress=False)
    with torch.no_grad():
        if not counts:
            return gp.predict(x_new)
        torch.manual_seed(0)
        return gp.predict(x_new, offset=offset_new).sample((DRAWS,)).double()


def gpboost(_, x, y, offset, x_new, offset_new, counts):
    import gpboost as gpb

    def coordinates(x):
        return x[:, [TIME, 0, 1]].numpy()

    def design(x):
        return torch.cat([torch.ones(len(x), 1).double(), x[:, 3:]], 1).numpy()

    model = gpb.GPModel(
        gp_coords=coordinates(x),
        cov_function="matern_space_time",
        cov_fct_shape=1.5,
        likelihood="negative_binomial" if counts else "gaussian",
        gp_approx="vecchia",
        num_neighbors=K,
        num_parallel_threads=1,
    )
    known = {} if offset is None else {"offset": offset.numpy()}
    model.fit(y=y.numpy(), X=design(x), **known)
    known = {} if offset is None else {"offset_pred": offset_new.numpy()}
    found = model.predict(
        gp_coords_pred=coordinates(x_new),
        X_pred=design(x_new),
        predict_var=True,
        predict_response=not counts,
        **known,
    )
    loc, var = torch.from_numpy(found["mu"]), torch.from_numpy(found["var"])
    if not counts:
        return torch.distributions.Normal(loc, var.sqrt())
    shape = float(np.ravel(model.get_aux_pars())[0])
    torch.manual_seed(0)
    log_mean = loc + var.sqrt() * torch.randn(DRAWS, len(loc)).double()
    return torch.poisson(torch.distributions.Gamma(shape, shape / log_mean.exp()).sample())


def naive(_, x, y, offset, x_new, offset_new, counts):
    """The last value at the place in the same month, with the spread of the differences to it in the data."""
    level = (y / offset.exp()).sqrt() if counts else y
    rows = np.concatenate([x[:, : TIME + 1].numpy(), level[:, None].numpy()], 1)
    table = pd.DataFrame(rows, columns=["east", "north", "year", "y"])
    table["month"] = (table.year * 12).round().astype(int)
    known = table.set_index([table.east, table.north, table.month]).y.groupby(level=[0, 1, 2]).last()

    def earlier(inputs, east_north_month):
        values, years = np.full(len(inputs), np.nan), np.zeros(len(inputs))
        for i, (east, north, month) in enumerate(east_north_month):
            for lag in range(1, 16):
                if (east, north, month - 12 * lag) in known.index:
                    values[i], years[i] = known[east, north, month - 12 * lag], lag
                    break
        return values, years

    keys = list(zip(table.east, table.north, table.month, strict=True))
    before, lags = earlier(rows, keys)
    scaled = ((rows[:, -1] - before) / np.sqrt(np.maximum(lags, 1)))[np.isfinite(before)]
    months = (x_new[:, TIME].numpy() * 12).round().astype(int)
    found, lags = earlier(x_new, list(zip(*x_new[:, :2].T.tolist(), months, strict=True)))
    is_new = ~np.isfinite(found)  # places without an earlier value: any of the same month
    same = [rows[(table.month - month) % 12 == 0, -1] for month in months]
    found[is_new] = [np.mean(same[i]) for i in is_new.nonzero()[0]]
    loc, lags = torch.from_numpy(found), torch.from_numpy(np.maximum(lags, 1.0))
    if not counts:
        sd = np.sqrt(np.mean(scaled**2)) * lags.sqrt()
        sd[torch.from_numpy(is_new)] = torch.tensor([np.std(same[i]) for i in is_new.nonzero()[0]]).double()
        return torch.distributions.Normal(loc, sd)
    random = torch.from_numpy(np.random.default_rng(0).choice(scaled, (DRAWS, len(loc))))
    return (offset_new.exp() * (loc + random * lags.sqrt()).clamp(min=0).square()).round()


METHODS = {"separable": ours, "Gneiting": ours, "GPBoost": gpboost, "naive": naive}


def scores(predictive, y):
    """RMSE, CRPS, PIT values."""
    if isinstance(predictive, torch.Tensor):
        draws = predictive.sort(0).values
        weights = (2 * torch.arange(1, DRAWS + 1) - DRAWS - 1).double()[:, None]
        crps = (draws - y).abs().mean(0) - (weights * draws).sum(0) / DRAWS**2
        below, at = (draws < y).double().mean(0), (draws == y).double().mean(0)
        return draws.mean(0), crps, below + at * torch.rand(len(y), generator=torch.Generator().manual_seed(0)).double()
    loc, sd = predictive.mean, predictive.stddev
    z = ((y - loc) / sd).numpy()
    crps = sd.numpy() * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
    return loc, torch.from_numpy(crps), torch.from_numpy(stats.norm.cdf(z))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--tasks", nargs="+", choices=("forecast", "hindcast"), default=["forecast", "hindcast"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = ["| data | task | rows | held out | method | RMSE | CRPS | in 90 % | KS | s |", "|---" * 10 + "|"]
    print("\n".join(lines), flush=True)
    for name in args.sets:
        make, length = SETS[name]
        x, y, offset, place = make()
        for task in args.tasks:
            test = held_out(task, x, place, length)
            known = (None, None) if offset is None else (offset[~test], offset[test])
            for method in args.methods:
                start = time.process_time()
                found = METHODS[method](method, x[~test], y[~test], known[0], x[test], known[1], name == "birds")
                seconds = time.process_time() - start
                loc, crps, pit = scores(found, y[test])
                rmse, inside = (loc - y[test]).square().mean().sqrt(), ((pit > 0.05) & (pit < 0.95)).double().mean()
                ks = stats.kstest(pit.numpy(), "uniform").statistic
                numbers = f"{rmse:.3g} | {crps.mean():.4g} | {100 * inside:.0f} % | {ks:.3f} | {seconds:.0f}"
                lines.append(f"| {name} | {task} | {len(x)} | {int(test.sum())} | {method} | {numbers} |")
                print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join([f"Commit {commit()}, one thread.", "", *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
