"""Coverage of the 95 % intervals of hyperparameters in ``gp.summary()``, on draws from the process.

N places on the unit square: a level, a slope of 2 in the first column, a Matern-3/2 process of variance 1 and
lengthscale .2; the data are Gaussian with a noise variance of .1, Poisson counts whose logarithmic mean is that sum, or
labels whose logit it is. Each method starts from the data and is trained by `fit(gp)`, with K = 16. Intervals that are
"not identified" count apart. Seconds are of the processor, per draw: of training, and of the summary.

"NLL" is the mean negative log density of the sum at 500 new places, less that of the same method trained with the
true hyperparameters held: what is lost since hyperparameters are estimated. "slope, known" is the coverage of the slope
by the intervals of that method.

Usage: python benchmarks/accuracy/hyperparameter_intervals.py [--draws 200] [--cases Vecchia LOO MLLk counts labels]
           [--out benchmarks/results/hyperparameter_intervals.md]
"""

import argparse
import time
import warnings
from pathlib import Path
from statistics import fmean, median

import torch
from rows import commit  # beside this file
from torch.distributions import Normal

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Gaussian, Poisson
from pyro_nngp.linalg import cholesky
from pyro_nngp.means import LinearMean
from pyro_nngp.models import LOO, VNNGP, MLLk, Vecchia
from pyro_nngp.models.base.intervals import UNKNOWN

CASES = {  # method, likelihood, points
    "Vecchia": (Vecchia, Gaussian, 300),
    "LOO": (LOO, Gaussian, 300),
    "MLLk": (MLLk, Gaussian, 300),
    "counts": (VNNGP, Poisson, 2000),
    "labels": (VNNGP, Bernoulli, 2000),
}
TRUTH = {"kernel.variance": 1.0, "kernel.lengthscale": 0.2, "likelihood.variance": 0.1, "mean.slope[0]": 2.0}
LEVEL, NEW, K = {Gaussian: 1.0, Poisson: 0.0, Bernoulli: -1.0}, 500, 16


def draw(likelihood, num_points, seed):
    """Places and data, new places and the sum of mean and process there."""
    torch.manual_seed(seed)
    x = torch.rand(num_points + NEW, 2, dtype=torch.float64)
    root = cholesky(Matern32(2, 1.0, 0.2).double()(x, x).detach(), 1e-8)
    f = LEVEL[likelihood] + 2 * x[:, 0] + root @ torch.randn(len(x), dtype=torch.float64)
    data = f[:num_points]
    if likelihood is Gaussian:
        y = data + 0.1**0.5 * torch.randn(num_points, dtype=torch.float64)
    else:
        y = torch.poisson(data.exp()) if likelihood is Poisson else torch.bernoulli(data.sigmoid())
    return x[:num_points], y, x[num_points:], f[num_points:]


@torch.no_grad()
def loss(gp, x, f):
    """Mean negative log density of f at new places."""
    loc, variance = gp(x)
    return -float(Normal(loc, variance.sqrt()).log_prob(f).mean())


def run(case, seed):
    """Summaries of one fit and of one at the true hyperparameters, its loss beyond that one's, seconds of the first."""
    method, likelihood, num_points = CASES[case]
    x, y, *new = draw(likelihood, num_points, seed)
    known = likelihood(TRUTH["likelihood.variance"]) if likelihood is Gaussian else likelihood()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.process_time()
        kernel = Matern32(2, None, torch.tensor(0.3, dtype=torch.float64))
        gp = method(x, y, kernel, likelihood(), num_neighbors=K, mean=LinearMean(2))
        fit(gp, progress=False)
        middle = time.process_time()
        table = gp.summary()
        end = time.process_time()
        true = method(x, y, Matern32(2, 1.0, 0.2).double(), known, num_neighbors=K, mean=LinearMean(2))
        for held in (true.kernel, true.likelihood):
            held.requires_grad_(False)
        fit(true, progress=False)
        return table, true.summary(), loss(gp, *new) - loss(true, *new), middle - start, end - middle


def covers(table, name):
    """Whether the interval has the true value."""
    row = table.loc[name]
    return row["lower"] <= TRUTH[name] <= row["upper"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hyperparameter_intervals.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"`python benchmarks/accuracy/hyperparameter_intervals.py --draws {args.draws}`, commit {commit()}, torch "
        f"{torch.__version__}, one thread, other jobs on the machine: coverage of 95 % intervals of {args.draws} draws "
        f"where they are identified (standard error {(0.95 * 0.05 / args.draws) ** 0.5:.3f} at .95). NLL is of f at "
        "new places, beyond that of the true hyperparameters; seconds are medians.",
        "",
        f"| case | method | points | {' | '.join(TRUTH)} | slope, known | not identified | NLL | s, fit | s, summary |",
        "|---" * (len(TRUTH) + 8) + "|",
    ]
    for case in args.cases:
        covered, known = dict.fromkeys(TRUTH, 0), dict.fromkeys(TRUTH, 0)
        tables, at_truth, losses, fits, summaries = zip(*(run(case, seed) for seed in range(args.draws)), strict=True)
        for table in tables:
            for name in set(TRUTH) & set(table.index):
                if table.loc[name, "note"] != UNKNOWN:
                    known[name] += 1
                    covered[name] += int(covers(table, name))
        own = [name for name in TRUTH if name in tables[0].index]
        cells = [f"{covered[name] / max(1, known[name]):.2f}" if name in own else "" for name in TRUTH]
        missing = ", ".join(f"{args.draws - known[name]} of {name}" for name in own if known[name] < args.draws)
        method, _, points = CASES[case]
        cells.append(f"{fmean(covers(table, 'mean.slope[0]') for table in at_truth):.2f}")
        ends = f"{missing or 'none'} | {fmean(losses):+.3f} | {median(fits):.1f} | {median(summaries):.1f}"
        lines.append(f"| {case} | {method.__name__} | {points:,} | {' | '.join(cells)} | {ends} |")
        print(lines[-1], flush=True)
    note = Path(__file__).with_name("hyperparameter_intervals_note.md").read_text(encoding="utf-8")
    args.out.write_text("\n".join([*lines, "", note]), encoding="utf-8")


if __name__ == "__main__":
    main()
