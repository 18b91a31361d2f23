"""The plain call where f changes over a small part of the data: cycles of a series, seasons of a century, stations.

* series: y = sin(2 pi c t) + sin(2.6 pi t) / 2 + noise of standard deviation .3, t on a grid of [0, 1), c cycles.
* stations: 50 places with a daily cycle in hours and a level of each place; times at random, noise .3 or .7.
* weather: monthly maximum and minimum temperatures of 376 stations, 1895 - 1997 (co_monthly_met): longitude,
  latitude, elevation, and time in years; random subsets.

`fit(Vecchia(x, y))` with nothing set, a quarter of the rows held out. Scores: root mean square error, of f where it is
known, of y in its standard deviations otherwise; the fitted lengthscale of time; processor seconds.

Usage: PYRO_NNGP_DATA=... python benchmarks/accuracy/cycles.py [--parts series stations weather] [--out FILE.md]
"""

import argparse
import math
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pyro
import torch
from rows import commit  # beside this file

import pyro_nngp as nngp

F64 = torch.float64


def series():
    for count, cycles in ((300, 30), (5000, 250), (20000, 1000), (20000, 30)):
        t = torch.arange(count, dtype=F64) / count
        f = torch.sin(2 * math.pi * cycles * t) + torch.sin(2.6 * math.pi * t) / 2
        yield f"{count} times, {cycles} cycles", t[:, None], f, 0.3


def stations():
    for count, days, noise in (
        (8000, 30, 0.3),
        (8000, 365, 0.3),
        (60000, 365, 0.3),
        (60000, 365, 0.7),
        (60000, 1500, 0.3),
    ):
        generator = torch.Generator().manual_seed(count + days)
        places, at = torch.rand(50, 2, generator=generator, dtype=F64), torch.randint(50, (count,), generator=generator)
        hours = torch.randint(24 * days, (count,), generator=generator).double()
        f = torch.sin(2 * math.pi * hours / 24) + torch.sin(5 * places[at, 0])
        yield f"{count} values, {days} days, noise {noise}", torch.cat([places[at], hours[:, None]], 1), f, noise


def weather():
    raw = np.load(Path(os.environ["PYRO_NNGP_DATA"]) / "spatial" / "co_monthly_met.npz")
    for column, name in ((1, "minima"), (2, "maxima")):
        kept = np.flatnonzero(~np.isnan(raw["y"][:, column]))
        for count in (1500, 6000, len(kept)):
            rows = np.random.default_rng(0).permutation(kept)[:count]
            y = torch.from_numpy(raw["y"][rows, column]).double()
            yield f"{name}, {count} rows", torch.from_numpy(raw["X"][rows]).double(), y, 0.0


def row(name, x, f, noise):
    """A row of the table."""
    generator = torch.Generator().manual_seed(0)
    y, test = f + noise * torch.randn(len(f), generator=generator, dtype=F64), torch.arange(len(f)) % 4 == 0
    if x.shape[1] == 1:
        test = test[torch.randperm(len(f), generator=generator)]
    pyro.set_rng_seed(0)
    start = time.process_time()
    gp = nngp.Vecchia(x[~test], y[~test])
    nngp.fit(gp, progress=False)
    with torch.no_grad():
        mean, _ = gp(x[test])
    error = float((mean - f[test]).square().mean().sqrt() / (1.0 if noise else y.std()))
    length, seconds = float(gp.kernel.lengthscale[-1]), time.process_time() - start
    return f"| {name} | {error:.3f} | {length:.3g} | {seconds:.1f} |"


def main():
    parts = {"series": series, "stations": stations, "weather": weather}
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = [f"Commit {commit()}, torch {torch.__version__}, one thread.", ""]
    lines += ["| data | RMSE | lengthscale of time | s |", "|---" * 4 + "|"]
    print(*lines, sep="\n", flush=True)
    for part in args.parts:
        for problem in parts[part]():
            lines.append(row(*problem))
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
