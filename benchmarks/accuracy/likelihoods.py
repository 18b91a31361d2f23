"""Which likelihood describes the data: counts of birds, amounts of rain, metals below a limit of detection.

Usage: python benchmarks/accuracy/likelihoods.py [--parts birds rain metals] [--folds 5] [--out likelihoods.md]

``VNNGP`` from its defaults with ``fit(gp)``, on two coordinates, for each likelihood; scores are the mean negative log
densities of held-out data, with their standard error. Folds are random, the same for every likelihood.

* birds (bbs_pa): counts of six species on 95 routes; the mean over species.
* rain (sic97_rain): 467 stations on one day, no zeros.
* metals (jura): cadmium at 359 sites. Values of the rows for training are recorded as the limit where they lie below
  it, a quarter of them; held-out values are not.

Processor time, one thread. The data come from the folder that PYRO_NNGP_DATA names.
"""

import argparse
import time
from pathlib import Path

import torch
from rows import commit  # beside this file

import pyro_nngp as nngp
from pyro_nngp.data import datasets
from pyro_nngp.likelihoods import (
    Censored,
    Gamma,
    Gaussian,
    InverseGaussian,
    LogNormal,
    NegativeBinomial,
    Poisson,
    StudentT,
    Tweedie,
    ZeroInflated,
)

COUNTS = {
    "Poisson": Poisson,
    "NegativeBinomial": NegativeBinomial,
    "ZeroInflated(Poisson)": lambda: ZeroInflated(Poisson()),
    "ZeroInflated(NegativeBinomial)": lambda: ZeroInflated(NegativeBinomial()),
}
AMOUNTS = {c.__name__: c for c in (Gaussian, StudentT, LogNormal, Gamma, InverseGaussian, Tweedie)}


def folds(size, number):
    return torch.randperm(size, generator=torch.Generator().manual_seed(0)).chunk(number)


def densities(x, y, x_new, y_new, likelihood):
    """Log densities of held-out data."""
    gp = nngp.VNNGP(x, y, likelihood=likelihood, num_neighbors=min(15, len(x) - 1))
    nngp.fit(gp, progress=False)
    with torch.no_grad():
        return gp.predict(x_new).log_prob(y_new)


def birds(number):
    data = datasets.load("bbs_pa", torch.float64)
    x = data.x[:, :2]
    for name, make in COUNTS.items():
        found = []
        for species in range(data.y.shape[1]):
            y, parts = data.y[:, species], []
            for out in folds(len(x), number):
                seen = torch.ones(len(x), dtype=torch.bool).index_fill(0, out, False)
                parts.append(densities(x[seen], y[seen], x[out], y[out], make()))
            found.append(torch.cat(parts))
        yield name, torch.stack(found).mean(0)


def rain(number):
    data = datasets.load("sic97_rain", torch.float64)
    x, y = data.x[:, :2], data.y.flatten()
    for name, make in AMOUNTS.items():
        parts = []
        for out in folds(len(x), number):
            seen = torch.ones(len(x), dtype=torch.bool).index_fill(0, out, False)
            parts.append(densities(x[seen], y[seen], x[out], y[out], make()))
        yield name, torch.cat(parts)


def metals(number):
    data = datasets.load("jura", torch.float64)
    x, y = data.x[:, :2], data.y[:, list(data.target_names).index("Cd")]
    ways = {
        "nothing censored (for reference)": lambda y, limit: (y, None),
        "Censored(LogNormal)": lambda y, limit: (y.clamp(min=limit), limit),
        "the limit in their place": lambda y, limit: (y.clamp(min=limit), None),
        "half the limit in their place": lambda y, limit: (torch.where(y < limit, limit / 2, y), None),
        "left out": lambda y, limit: (torch.where(y < limit, torch.nan, y), None),
    }
    for name, way in ways.items():
        parts = []
        for out in folds(len(x), number):
            seen = torch.ones(len(x), dtype=torch.bool).index_fill(0, out, False)
            limit = float(y[seen].quantile(0.25))
            used, lower = way(y[seen], limit)
            rows = used.isfinite()
            gp = nngp.VNNGP(
                x[seen][rows],
                used[rows],
                likelihood=LogNormal() if lower is None else Censored(LogNormal(), lower=lower),
                num_neighbors=15,
            )
            nngp.fit(gp, progress=False)
            values = gp.likelihood if lower is None else gp.likelihood.values
            with torch.no_grad():
                parts.append(values.marginal(*gp(x[out])).log_prob(y[out]))
        yield name, torch.cat(parts)


def main():
    parser = argparse.ArgumentParser()
    parts = {"birds": birds, "rain": rain, "metals": metals}
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| data | likelihood | NLL | standard error | s |", "|---|---|---|---|---|"]
    for part in args.parts:
        start = time.process_time()
        for name, log_densities in parts[part](args.folds):
            error = float(log_densities.std() / len(log_densities) ** 0.5)
            seconds = time.process_time() - start
            lines.append(f"| {part} | {name} | {-log_densities.mean():.3f} | {error:.3f} | {seconds:.0f} |")
            print(lines[-1], flush=True)
            start = time.process_time()
    if args.out:
        command = f"python benchmarks/accuracy/likelihoods.py --folds {args.folds}"
        about = __doc__.split("\n\n", 2)[2].strip()
        args.out.write_text(
            f"# Likelihoods\n\n`{command}` at commit {commit()}.\n\n{about}\n\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
