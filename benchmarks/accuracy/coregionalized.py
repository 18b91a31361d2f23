"""LOO-k of a linear model of coregionalization against LOO-k, SVGP and PPGPR per output, on data with several outputs.

Splits are 15:3:2 into training, test and validation rows, inputs and outputs standardized on the training rows (the
concentrations of jura as logarithms), Matern-5/2 ARD. K is chosen by validation NLL, and so is the number of latent
functions. NLL is that of all outputs together divided by their number, RMSE the mean over outputs of each one's.

SVGP and PPGPR have M inducing points, or as many as training rows. PPGPR, whose q(u) takes gradients too where that of
SVGP is solved for, has four times as many steps. Each training run is a row of a CSV file; one that is there is not run
again, and the table is made of all of them, with standard errors over seeds.

Usage: python benchmarks/accuracy/coregionalized.py jura sarcos_test4449 [--methods SVGP] [--neighbors 16 32]
           [--latents 3 7] [--inducing 300] [--seeds 3] [--steps 300] [--batch-size 128] [--lr 0.05]
           [--csv benchmarks/results/coregionalized.csv] [--out benchmarks/results/coregionalized.md]
The data come from the folder that PYRO_NNGP_DATA names. Seconds are processor time; use one thread.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from rows import append, commit, read  # beside this file

from pyro_nngp.data import Standardizer, load, random_split
from pyro_nngp.inference import PredictiveLogLikelihood, Schedule, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import LOO, SVGP, CoregionalizedLOO

NOISE = 0.1
METHODS = ("LOO-k, independent", "LOO-k, coregionalized", "SVGP, independent", "PPGPR, independent")
FIELDS = ("data", "method", "seed", "choice", "batch_size", "lr", "steps", "validation", "nll", "rmse", "seconds")
FIELDS += ("threads", "torch", "commit")


def split(name, seed):
    """Training, test and validation rows, standardized."""
    data = load(name)
    x, y = data.x, data.y.log() if name == "jura" else data.y
    parts = random_split(len(x), (0.75, 0.15, 0.1), seed)
    to_x, to_y = Standardizer(x[parts[0]]), Standardizer(y[parts[0]])
    return [(to_x.transform(x[rows]), to_y.transform(y[rows])) for rows in parts]


def kernel(dim, stretch=1.0):
    return Matern52(dim, variance=torch.tensor(1.0), lengthscale=torch.full((dim,), stretch * dim**0.5))


class Independent:
    """One LOO per output."""

    def __init__(self, x, y, seed, neighbors):
        settings = {"num_neighbors": neighbors, "seed": seed}
        self.parts = [LOO(x, t, kernel(x.shape[1]), Gaussian(NOISE), **settings) for t in y.unbind(-1)]

    def train(self, steps, **recipe):
        for part in self.parts:
            fit(part, steps, refresh_every=max(1, steps // 5), **recipe)
            part.refresh_neighbors()

    def density(self, x, y):
        """Log densities of the rows, and means."""
        each = [part.predict(x) for part in self.parts]
        log_prob = sum(one.log_prob(t) for one, t in zip(each, y.unbind(-1), strict=True))
        return log_prob, torch.stack([one.mean for one in each], -1)


class Sparse(Independent):
    """One SVGP per output, trained on the evidence bound, or on predictive densities as PPGPR."""

    def __init__(self, x, y, seed, inducing, predictive):
        settings = {"inducing": min(inducing, len(x)), "seed": seed}
        self.parts = [SVGP(x, t, kernel(x.shape[1]), Gaussian(NOISE), **settings) for t in y.unbind(-1)]
        self.predictive = predictive

    def train(self, steps, **recipe):
        if self.predictive:
            steps, recipe = 4 * steps, recipe | {"elbo": PredictiveLogLikelihood(0.05)}
        for part in self.parts:
            fit(part, steps, **recipe)


class Coregionalized:
    """Correlated outputs; lengthscales start apart, so that the latent functions can."""

    def __init__(self, x, y, seed, neighbors, latents):
        kernels = [kernel(x.shape[1], stretch) for stretch in torch.linspace(0.5, 1.5, latents).tolist()]
        noise = Gaussian(torch.full((y.shape[1], 1), NOISE))
        self.gp = CoregionalizedLOO(x, y, kernels, noise, num_neighbors=neighbors, seed=seed)

    def train(self, steps, **recipe):
        fit(self.gp, steps, refresh_every=max(1, steps // 5), **recipe)
        self.gp.refresh_neighbors()

    def density(self, x, y):
        """Log densities of the rows, and means."""
        predictive = self.gp.predict(x)
        return predictive.log_prob(y), predictive.mean


@torch.no_grad()
def scores(gp, x, y, block=500):
    """NLL and RMSE."""
    parts = [gp.density(x[rows], y[rows]) for rows in torch.arange(len(x)).split(block)]
    log_prob, loc = (torch.cat(values) for values in zip(*parts, strict=True))
    return -float(log_prob.mean()) / y.shape[1], float((y - loc).square().mean(0).sqrt().mean())


def choices(args):
    """The models to choose from by validation NLL: (method, label, constructor)."""
    loo, coregionalized, svgp, ppgpr = METHODS
    for k in args.neighbors:
        yield loo, f"K {k}", partial(Independent, neighbors=k)
        for q in args.latents:
            yield coregionalized, f"K {k}, Q {q}", partial(Coregionalized, neighbors=k, latents=q)
    for m in args.inducing:
        yield svgp, f"M {m}", partial(Sparse, inducing=m, predictive=False)
        yield ppgpr, f"M {m}", partial(Sparse, inducing=m, predictive=True)


def run(name, make, seed, args):
    """Validation NLL, test NLL and RMSE, seconds of building and training."""
    (x, y), test, validation = split(name, seed)
    start = time.process_time()
    gp = make(x, y, seed)
    schedule = Schedule((0.5, 0.75), 0.2)
    gp.train(args.steps, batch_size=args.batch_size, lr=args.lr, schedule=schedule, seed=seed, progress=False)
    seconds = time.process_time() - start
    nll, rmse = scores(gp, *test)
    return {"validation": scores(gp, *validation)[0], "nll": nll, "rmse": rmse, "seconds": seconds}


def table(rows):
    """The choice of least validation NLL for each data set, method and seed: means over seeds and standard errors."""
    lines = [
        "| data | method | validation NLL | NLL | RMSE | chosen | steps | training [s] | seeds |",
        "|---" * 9 + "|",
    ]
    for name, method in dict.fromkeys((row["data"], row["method"]) for row in rows):
        best = {}
        for row in (row for row in rows if (row["data"], row["method"]) == (name, method)):
            best[row["seed"]] = min(row, best.get(row["seed"], row), key=lambda row: float(row["validation"]))
        cells = [name, method]
        for column in ("validation", "nll", "rmse"):
            values = [float(row[column]) for row in best.values()]
            error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.3f}{error}")
        cells += ["; ".join(dict.fromkeys(row[column] for row in best.values())) for column in ("choice", "steps")]
        cells.append(f"{statistics.fmean(float(row['seconds']) for row in best.values()):.0f}")
        lines.append("| " + " | ".join([*cells, str(len(best))]) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="+")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--neighbors", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--latents", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--inducing", type=int, nargs="+", default=[300])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/coregionalized.csv"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/coregionalized.md"))
    args = parser.parse_args()
    settings = {"batch_size": args.batch_size, "lr": args.lr, "steps": args.steps}
    done = {tuple(row[name] for name in FIELDS[:7]) for row in read(args.csv)}
    for seed in range(args.seeds):
        for name in args.data:
            for method, choice, make in choices(args):
                row = {"data": name, "method": method, "seed": seed, "choice": choice} | settings
                if method in args.methods and tuple(map(str, row.values())) not in done:
                    row |= run(name, make, seed, args)
                    row |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit()}
                    append(args.csv, FIELDS, row)
                    print(row, flush=True)
    rows = read(args.csv)
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    head = f"`python benchmarks/accuracy/coregionalized.py`, commit {commits}, torch {rows[0]['torch']}, "
    head += f"{rows[0]['threads']} thread(s), other jobs on the machine; processor seconds.\n\n"
    head += "[LOO-k](loo.md) discusses the table.\n\n"
    args.out.write_text(head + table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
