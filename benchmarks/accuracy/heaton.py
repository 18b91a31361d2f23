"""The two data sets of the competition of Heaton et al. (2019), one simulated anew, one from its file.

    Heaton et al., A case study competition among methods for analyzing large spatial data, Journal of Agricultural,
    Biological and Environmental Statistics 24 (2019), 398-425

A grid of 500 x 300 cells of 1 km, 150,000 temperatures, of which clouds hide a third; what is below them is predicted.

- simulated: the competition's law, an exponential covariance of variance 16.40771 and range 1 / .75 degrees about the
  mean 44.49 plus noise of variance .05, drawn exactly by circulant embedding. Clouds are where a smooth field is high;
  the competition's own clouds are in its file alone, so scores are not to be held beside its own. They are beside
  "truth", which predicts with the hyperparameters of the law from 100 neighbors, and is as good as can be.
- satellite: --file names AllSatelliteTemps.RData of the competition's repository (github.com/finnlindgren/
  heatoncomparison, folder Data), which `pyreadr` reads, or the same table as a CSV file, with columns Lon, Lat,
  MaskTemp and TrueTemp.

Methods are plain calls in degrees, with nothing set but the kernel, Matern12, whose covariance is exponential, or with
"(default)" not even that. Scores are the competition's: mean absolute error, root mean squared error, CRPS, interval
score and coverage of 95 % intervals of y; seconds are those of the processor for building, training and predictions.

Usage: python benchmarks/accuracy/heaton.py [--file AllSatelliteTemps.RData] [--methods Vecchia LOO VNNGP ...]
           [--csv benchmarks/results/heaton.csv] [--out benchmarks/results/heaton.md] [--figure docs/_static/heaton.png]
"""

import argparse
import csv
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from rows import append, commit, read  # beside this file

from pyro_nngp.data import coverage, crps_gaussian, gaussian_interval, interval_score, rmse
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern12
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.means import ConstantMean
from pyro_nngp.models import LOO, NPVI, SVGP, VNNGP, MLLk, Vecchia

COLUMNS, ROWS = 500, 300
WEST, EAST, SOUTH, NORTH = -95.91153, -91.28381, 34.29519, 37.06811
MEAN, VARIANCE, RANGE, NOISE = 44.49105, 16.40771, 1 / 0.75, 0.05
HIDDEN = 44_431 / 150_000
FIELDS = ("data", "method", "mae", "rmse", "crps", "interval", "coverage", "seconds", "num_train", "num_test")
FIELDS += ("threads", "torch", "commit")


def stationary(covariance, steps, generator):
    """A draw of a stationary process on the grid, (ROWS, COLUMNS), by circulant embedding (Dietrich and Newsam 1993).

    The torus has 2,500 cells each way, five times the longer side; its spectrum must not be negative.
    """
    shape = 5 * COLUMNS, 5 * COLUMNS
    lags = [step * np.minimum(np.arange(n), n - np.arange(n)) for step, n in zip(steps, shape, strict=True)]
    spectrum = np.fft.fft2(covariance(np.hypot(lags[0][:, None], lags[1]))).real
    if spectrum.min() < 0:
        raise ValueError(f"the torus is too small: its least eigenvalue is {spectrum.min():g}")
    white = generator.standard_normal(shape) + 1j * generator.standard_normal(shape)
    draw = np.fft.fft2(np.sqrt(spectrum / spectrum.size) * white)
    return draw.real[:ROWS, :COLUMNS]


def simulated():
    """Places, (150,000, 2) in degrees, observations, and which of them are hidden."""
    lon, lat = np.linspace(WEST, EAST, COLUMNS), np.linspace(NORTH, SOUTH, ROWS)
    steps = lat[0] - lat[1], lon[1] - lon[0]
    generator = np.random.default_rng(0)
    field = stationary(lambda r: VARIANCE * np.exp(-r / RANGE), steps, generator)
    y = MEAN + field + NOISE**0.5 * generator.standard_normal(field.shape)
    clouds = stationary(lambda r: 0.8 * np.exp(-r / 0.3) + 0.2 * np.exp(-r / 0.02), steps, generator)
    hidden = clouds > np.quantile(clouds, 1 - HIDDEN)
    places = np.stack([np.broadcast_to(lon, y.shape), np.broadcast_to(lat[:, None], y.shape)], -1)
    return places.reshape(-1, 2), y.ravel(), hidden.ravel()


def satellite(path):
    """The same of the competition's file; cells that nobody has seen are left out."""
    if path.suffix.lower() == ".rdata":
        import pyreadr

        table = next(iter(pyreadr.read_r(str(path)).values()))
        names = {name: table[name].to_numpy(float) for name in ("Lon", "Lat", "MaskTemp", "TrueTemp")}
    else:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        number = {"": "nan", "NA": "nan"}
        names = {
            name: np.array([float(number.get(row[name], row[name])) for row in rows])
            for name in ("Lon", "Lat", "MaskTemp", "TrueTemp")
        }
    seen = ~np.isnan(names["TrueTemp"])
    places = np.stack([names["Lon"], names["Lat"]], -1)[seen]
    return places, names["TrueTemp"][seen], np.isnan(names["MaskTemp"])[seen]


def truth(x, y):
    kernel = Matern12(2, variance=torch.tensor(VARIANCE), lengthscale=torch.tensor(RANGE))
    return Vecchia(x, y, kernel, Gaussian(NOISE), mean=ConstantMean(MEAN), num_neighbors=100)


def trained(build):
    def method(x, y):
        gp = build(x, y)
        fit(gp, progress=False)
        return gp

    return method


METHODS = {
    "truth": truth,
    "Vecchia": trained(lambda x, y: Vecchia(x, y, Matern12(2))),
    "LOO": trained(lambda x, y: LOO(x, y, Matern12(2))),
    "MLL-k": trained(lambda x, y: MLLk(x, y, Matern12(2))),
    "VNNGP": trained(lambda x, y: VNNGP(x, y, Matern12(2))),
    "NPVI": trained(lambda x, y: NPVI(x, y, Matern12(2))),
    "SVGP, M = 512": trained(lambda x, y: SVGP(x, y, Matern12(2), inducing=512)),
    "Vecchia (default)": trained(lambda x, y: Vecchia(x, y)),
    "LOO (default)": trained(lambda x, y: LOO(x, y)),
}


@torch.no_grad()
def run(data, method, problem):
    """One row, and the means of the predictions."""
    places, y, hidden = problem
    x, y = torch.from_numpy(places), torch.from_numpy(y)
    hidden = torch.from_numpy(hidden)
    begin = time.process_time()
    with torch.enable_grad():
        gp = METHODS[method](x[~hidden].float(), y[~hidden].float())
    blocks = [gp.predict(block) for block in x[hidden].float().split(5000)]
    loc, scale = (torch.cat([getattr(block, name).double() for block in blocks]) for name in ("mean", "stddev"))
    seconds = time.process_time() - begin
    target, ends = y[hidden], gaussian_interval(loc, scale)
    row = {"data": data, "method": method, "seconds": seconds, "num_train": int((~hidden).sum())}
    row |= {"num_test": int(hidden.sum()), "threads": torch.get_num_threads(), "torch": torch.__version__}
    row |= {"mae": (target - loc).abs().mean(), "rmse": rmse(target, loc), "crps": crps_gaussian(target, loc, scale)}
    row |= {"interval": interval_score(target, *ends), "coverage": coverage(target, *ends), "commit": commit()}
    row = {name: float(value) if isinstance(value, torch.Tensor) else value for name, value in row.items()}
    return row, loc.numpy()


def table(rows):
    lines = [
        f"`python benchmarks/accuracy/heaton.py`, commit {', '.join(sorted({row['commit'] for row in rows}))}, "
        f"torch {rows[0]['torch']}, {rows[0]['threads']} thread(s), other jobs on the machine.",
        "",
    ]
    for data in dict.fromkeys(row["data"] for row in rows):
        here = sorted((row for row in rows if row["data"] == data), key=lambda row: float(row["crps"]))
        lines += [f"**{data}**: {int(here[0]['num_train']):,} cells seen, {int(here[0]['num_test']):,} hidden.", ""]
        lines += ["| method | MAE | RMSE | CRPS | interval score | coverage | seconds |", "|---" * 7 + "|"]
        for row in here:
            scores = (f"{float(row[name]):.3f}" for name in ("mae", "rmse", "crps", "interval", "coverage"))
            lines.append(f"| {row['method']} | {' | '.join(scores)} | {float(row['seconds']):.0f} |")
        lines.append("")
    return "\n".join(lines)


def draw(problem, loc, path):
    """What is seen, what is there, and what a method makes of it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places, y, hidden = problem
    predicted = y.copy()
    predicted[hidden] = loc
    panels = {"seen": np.where(hidden, np.nan, y), "predicted below the clouds": predicted, "there": y}
    shape = len(np.unique(places[:, 1])), len(np.unique(places[:, 0]))
    figure, axes = plt.subplots(1, 3, figsize=(13, 3), layout="constrained", sharey=True)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(
            values.reshape(shape), extent=(WEST, EAST, SOUTH, NORTH), vmin=y.min(), vmax=y.max(), interpolation="none"
        )
        axis.set(title=title, xlabel="longitude")
    axes[0].set(ylabel="latitude")
    figure.colorbar(image, ax=axes, label="temperature")
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=None, help="of the competition; simulated without it")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/heaton.csv"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/heaton.md"))
    parser.add_argument("--figure", type=Path, default=None, help="of the first method, of simulated data")
    args = parser.parse_args()
    if args.file is not None and "truth" in args.methods:
        args.methods.remove("truth")  # nobody knows it
    warnings.simplefilter("ignore")
    data, problem = ("simulated", simulated()) if args.file is None else ("satellite", satellite(args.file))
    done = {(row["data"], row["method"]) for row in read(args.csv)}
    for method in args.methods:
        if (data, method) in done:
            continue
        row, loc = run(data, method, problem)
        append(args.csv, FIELDS, row)
        print(", ".join(f"{row[k]:.4g}" if isinstance(row[k], float) else str(row[k]) for k in FIELDS), flush=True)
        if args.figure is not None and data == "simulated" and method == args.methods[0]:
            draw(problem, loc, args.figure)
    args.out.write_text(table(read(args.csv)), encoding="utf-8")


if __name__ == "__main__":
    main()
