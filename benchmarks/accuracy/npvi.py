"""NPVI and NPVI-NN against SVGP and VNNGP on the kinds of data of the paper: bird counts, rasters, flight delays.

- `birds`: 5,807 Christmas counts of the American robin in 302 circles over 30 years, given place, year and effort;
  negative binomial.
- `raster`: a grid of 10,920 elevations off Washington; `dem`: 138,632 elevations of a mountain range.
- `precipitation`: standardized anomalies at the 5,906 stations in the United States that observed in April 1948;
  Gaussian noise, learned.
- `flights`: arrival delays of flights out of New York City in 2013, eight features, the delays clipped at -60 and 300
  minutes; `--rows` of the 273,853 that have them all, drawn at random.

Elevations and delays are scaled to [0.05, 1.05] with a log-normal of variance 0.01, as in the paper. Splits are
70/10/20, inputs standardized. All kernels are Matern-3/2 with one lengthscale per input, learned with a linear mean by
`fit`: Adam, lr 0.02 divided by ten at three quarters and nine tenths of the steps, B = 256, and 64 with an encoder,
which computes the neighbors' rows of q(u) too, with four times the steps. Seconds are CPU seconds of training. Scores
are of test rows: mean negative log density of y, and median absolute error of the predictive mean in units of y.

Each run is one row of a CSV file; a row that is there is not run again, so the command can be stopped and repeated.

Usage: python benchmarks/accuracy/npvi.py birds precipitation [--steps 400] [--seeds 2] [--nugget 1e-5] [--only TEXT ..]
           [--csv benchmarks/results/npvi.csv]
Data are read from the folder that PYRO_NNGP_DATA names, or from installed packages where they have them; `birds` and
`precipitation` need `robins_cbc.npz` and `us_precip_194804.npz` in that folder, see `pyro_nngp.data.datasets`.
"""

import argparse
import itertools
import time
from pathlib import Path

import torch
from rows import append, read

from pyro_nngp.data import Standardizer, bathymetry, flights, load, random_split, terrain
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Gaussian, LogNormal, NegativeBinomial
from pyro_nngp.models import NPVI, SVGP, VNNGP
from pyro_nngp.variational import Amortized
from pyro_nngp.variational.encoders import ConditionalEncoder, GraphConvolutionEncoder, SiteEncoder

BATCH, ENCODER_BATCH = 256, 64
FIELDS = ("data", "rows", "method", "seed", "steps", "nugget", "nll", "error", "seconds", "parameters")


def methods(dim):
    """Name to (class, settings, settings of fit)."""
    solved = {"solve_every": 100, "refresh_every": 100}
    table = {f"NPVI, K = {k}": (NPVI, {"num_neighbors": k}, solved) for k in (10, 20, 40)}
    table["VNNGP, mean-field, K = 20"] = VNNGP, {"num_neighbors": 20}, solved
    for k in (10, 20):
        networks = GraphConvolutionEncoder(response=log_response)
        table[f"NPVI-NN, the paper's networks, K = {k}"] = NPVI, {"num_neighbors": k, "guide": Amortized(networks)}, {}
        networks = WithoutBiases(response=log_response)
        name = f"NPVI-NN, networks without biases, K = {k}"
        table[name] = NPVI, {"num_neighbors": k, "guide": Amortized(networks)}, {}
        conditional = ConditionalEncoder()
        table[f"NPVI-NN, conditional, K = {k}"] = (
            NPVI,
            {"num_neighbors": k, "guide": Amortized(conditional)},
            {"refresh_every": 400},
        )
        table[f"NPVI-NN, sites, K = {k}"] = NPVI, {"num_neighbors": k, "guide": Amortized(SiteEncoder(dim))}, {}
    for m in (200, 1000):
        table[f"SVGP, M = {m}"] = SVGP, {"inducing": m}, {}
    return table


class WithoutBiases(GraphConvolutionEncoder):
    """As printed in the paper."""

    def __init__(self, **settings):
        super().__init__(**settings)
        for layer in (*self.loc, *self.row):
            layer.register_parameter("bias", None)


def log_response(likelihood, y):
    """log(1 + y) for counts, log y for the log-normal: raw counts to 69,520 would be no fair input."""
    if isinstance(likelihood, LogNormal):
        return y.log()
    return y.log1p() if isinstance(likelihood, NegativeBinomial) else y


def fixed_noise():
    return LogNormal(0.01).requires_grad_(False)


def birds(rows):
    data = load("robins_cbc")
    return data.x, data.y, NegativeBinomial


def raster(rows):
    data = bathymetry()
    return data.x, unit(data.y), fixed_noise


def dem(rows):
    data = terrain()
    return data.x, unit(data.y), fixed_noise


def precipitation(rows):
    data = load("us_precip_194804")
    seen = torch.as_tensor(data.extras["observed"]).bool()
    y = data.y[seen, 1]
    return data.x[seen], (y - y.mean()) / y.std(), lambda: Gaussian(0.1)


def delays(rows):
    data = flights()
    chosen = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:rows]
    return data.x[chosen], unit(data.y[chosen, 0].clamp(-60, 300)), fixed_noise


DATA = {"birds": birds, "raster": raster, "dem": dem, "precipitation": precipitation, "flights": delays}


def unit(y):
    return (y - y.min()) / (y.max() - y.min()) + 0.05


def prepared(data, name, rows=20_000, seed=0, nugget=1e-5, part=1, lengthscale=0.5):
    """A method at its start on training rows, the rows of another part (1: validation, 2: test), settings of `fit`."""
    x, y, likelihood = DATA[data](rows)
    parts = random_split(len(x), (0.7, 0.1, 0.2), seed)
    train, other = parts[0], parts[part]
    to_x = Standardizer(x[train])
    dim = x.shape[1]
    torch.manual_seed(seed)  # before the weights of the networks are drawn
    make, settings, how = methods(dim)[name]
    kernel = Matern32(dim, variance=torch.tensor(1.0), lengthscale=torch.full((dim,), lengthscale))
    mean = torch.nn.Linear(dim, 1)
    torch.nn.init.zeros_(mean.weight)
    mean.bias.data.fill_(float(log_response(likelihood(), y[train]).mean()))
    gp = make(to_x.transform(x[train]), y[train], kernel, likelihood(), mean=mean, jitter=nugget, seed=seed, **settings)
    return gp, (to_x.transform(x[other]), y[other]), how


def run(data, rows, name, steps, seed, nugget):
    gp, (x, y), how = prepared(data, name, rows, seed, nugget, part=2)
    begin = time.process_time()
    if "NPVI-NN" in name:
        fit(gp, 4 * steps, batch_size=ENCODER_BATCH, lr=0.02, seed=seed, progress=False, **how)
    else:
        fit(gp, steps, batch_size=BATCH, lr=0.02, seed=seed, progress=False, **how)
    seconds = time.process_time() - begin
    with torch.no_grad():
        parts = [(gp.predict(a), b) for a, b in zip(x.split(5000), y.split(5000), strict=True)]
        nll = torch.cat([-p.log_prob(values) for p, values in parts]).mean()
        error = torch.cat([(p.mean - values).abs() for p, values in parts]).median()
    size = sum(p.numel() for p in gp.parameters())
    values = len(DATA[data](rows)[0]), name, seed, steps, nugget, float(nll), float(error), seconds, size
    return dict(zip(FIELDS, (data, *values), strict=True))


def table(rows):
    """Means over seeds of all runs, one table per data set and setting."""
    lines = []
    for setting in dict.fromkeys((row["data"], row["rows"], row["nugget"]) for row in rows):
        here = [row for row in rows if (row["data"], row["rows"], row["nugget"]) == setting]
        lines += [f"**{setting[0]}**, {int(setting[1]):,} rows, relative nugget {float(setting[2]):g}:", ""]
        lines += ["| method | test NLL | median error | CPU seconds | parameters | steps | splits |", "|---" * 7 + "|"]
        for name, steps in dict.fromkeys((row["method"], row["steps"]) for row in here):
            group = [row for row in here if (row["method"], row["steps"]) == (name, steps)]
            nll, error, seconds, size = (
                sum(float(row[key]) for row in group) / len(group) for key in ("nll", "error", "seconds", "parameters")
            )
            cells = f"{nll:.3f} | {error:.4g} | {seconds:.0f} | {size:,.0f} | {steps} | {len(group)}"
            lines.append(f"| {name} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="+", choices=DATA)
    parser.add_argument("--rows", type=int, default=20_000, help="of the flights")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--nugget", type=float, default=1e-5, help="of the process, relative to its variance")
    parser.add_argument("--only", nargs="+", default=[""], help="methods whose name contains one of these")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/npvi.csv"))
    args = parser.parse_args()
    names = [name for name in methods(1) if any(text in name for text in args.only)]
    for data, seed, name in itertools.product(args.data, range(args.seeds), names):
        asked = {"data": data, "method": name, "seed": seed, "steps": args.steps, "nugget": f"{args.nugget:.6g}"}
        asked |= {"rows": args.rows} if data == "flights" else {}
        if not any(all(row[key] == str(value) for key, value in asked.items()) for row in read(args.csv)):
            row = run(data, args.rows, name, args.steps, seed, args.nugget)
            append(args.csv, FIELDS, row)
            print(row, flush=True)
    print(table(read(args.csv)))


if __name__ == "__main__":
    main()
