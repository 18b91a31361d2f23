"""LOO-k of a linear model of coregionalization against one LOO-k per output, on data with several outputs.

Splits are 15:3:2 into training, test and validation rows, inputs and outputs standardized on the training rows (the
concentrations of jura as logarithms), Matern-5/2 ARD. K is chosen by validation NLL, and so is the number of latent
functions. NLL is that of all outputs together divided by their number, RMSE the mean over outputs of each one's.

Usage: python benchmarks/accuracy/coregionalized.py jura sarcos_test4449 [--neighbors 16 32] [--latents 3 7] [--seeds 3]
           [--steps 300] [--batch-size 128] [--lr 0.05]
The data come from the folder that PYRO_NNGP_DATA names. Seconds are processor time; use one thread.
"""

import argparse
import statistics
import time

import torch

from pyro_nngp.data import Standardizer, load, random_split
from pyro_nngp.inference import Schedule, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import LOO, CoregionalizedLOO

NOISE = 0.1


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

    def __init__(self, x, y, neighbors, seed):
        dim = x.shape[1]
        self.parts = [LOO(x, t, kernel(dim), Gaussian(NOISE), num_neighbors=neighbors, seed=seed) for t in y.unbind(-1)]

    def train(self, *args, **recipe):
        for part in self.parts:
            fit(part, *args, **recipe)
            part.refresh_neighbors()

    def density(self, x, y):
        """Log densities of the rows, and means."""
        each = [part.predict(x) for part in self.parts]
        log_prob = sum(one.log_prob(t) for one, t in zip(each, y.unbind(-1), strict=True))
        return log_prob, torch.stack([one.mean for one in each], -1)


class Coregionalized:
    """Correlated outputs; lengthscales start apart, so that the latent functions can."""

    def __init__(self, x, y, neighbors, seed, latents):
        kernels = [kernel(x.shape[1], stretch) for stretch in torch.linspace(0.5, 1.5, latents).tolist()]
        noise = Gaussian(torch.full((y.shape[1], 1), NOISE))
        self.gp = CoregionalizedLOO(x, y, kernels, noise, num_neighbors=neighbors, seed=seed)

    def train(self, *args, **recipe):
        fit(self.gp, *args, **recipe)
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


def run(name, make, seed, args):
    """Validation NLL, test NLL and RMSE, seconds of building and training."""
    (x, y), test, validation = split(name, seed)
    start = time.process_time()
    gp = make(x, y, seed)
    recipe = {"batch_size": args.batch_size, "lr": args.lr, "schedule": Schedule((0.5, 0.75), 0.2)}
    recipe["seed"] = seed
    gp.train(args.steps, refresh_every=max(1, args.steps // 5), progress=False, **recipe)
    return scores(gp, *validation)[0], *scores(gp, *test), time.process_time() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="+")
    parser.add_argument("--neighbors", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--latents", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    print("| data | method | validation NLL | NLL | RMSE | chosen | training [s] | seeds |\n" + "|---" * 8 + "|")
    for name in args.data:
        choices = {"independent": {}, "coregionalized": {}}
        for k in args.neighbors:
            choices["independent"][f"K {k}"] = lambda x, y, seed, k=k: Independent(x, y, k, seed)
            for q in args.latents:
                choices["coregionalized"][f"K {k}, Q {q}"] = lambda *a, k=k, q=q: Coregionalized(*a[:2], k, a[2], q)
        for method, makes in choices.items():
            best = []
            for seed in range(args.seeds):
                rows = {label: run(name, make, seed, args) for label, make in makes.items()}
                label = min(rows, key=lambda label: rows[label][0])
                best.append((label, *rows[label]))
            cells = [name, method]
            for column, digits in ((1, 3), (2, 3), (3, 3)):
                values = [row[column] for row in best]
                spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
                cells.append(f"{statistics.fmean(values):.{digits}f}{spread}")
            cells += ["; ".join(dict.fromkeys(row[0] for row in best)), f"{statistics.fmean(r[4] for r in best):.0f}"]
            print("| " + " | ".join([*cells, str(args.seeds)]) + " |", flush=True)


if __name__ == "__main__":
    main()
