"""Coverage of 95 % intervals of f: functions drawn from the process itself, N points in the unit square.

f is a draw from a Matern-3/2 process (variance 1.5, lengthscale .15, level .5) at training and new points, y one draw
given f. Each method has nothing set but the family of the kernel and a number of neighbors or inducing points, and is
trained by `fit(gp)`; BSGP starts its chain from a fitted AutoNormal, which also finds the hyperparameters. Coverage at
the data and at new sites is averaged over seeds, with the root mean square of the errors of f beside the mean standard
deviation: intervals are honest if the coverage is near .95 and the two numbers agree. A row that is in the CSV file is
not computed again; a row of seeds "0-1" is an average from before there was that file.

Usage: python benchmarks/accuracy/coverage.py [--points 2000] [--seeds 2] [--families Gaussian Poisson]
           [--methods VNNGP "VNNGP, mean-field"] [--csv benchmarks/results/coverage.csv]
           [--out benchmarks/results/coverage.md]
"""

import argparse
import math
import time
import warnings
from pathlib import Path

import pyro
import torch
from pyro.infer import MCMC, Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value
from rows import append, commit, read  # beside this file
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import MultivariateNormal, Normal
from torch.distributions import NegativeBinomial as NegativeBinomialDistribution
from torch.distributions import Poisson as PoissonDistribution
from torch.distributions import StudentT as StudentTDistribution

from pyro_nngp.inference import SGHMC, Minibatch, fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Gaussian, NegativeBinomial, Poisson, StudentT
from pyro_nngp.models import BSGP, LOO, NPVI, SVGP, SWSGP, VNNGP, Vecchia
from pyro_nngp.variational import Amortized, MeanField
from pyro_nngp.variational.encoders import SiteEncoder

FAMILIES = {
    "Gaussian": (Gaussian, lambda f: Normal(f, 0.3).sample()),
    "Bernoulli": (Bernoulli, lambda f: BernoulliDistribution(logits=f).sample()),
    "Poisson": (Poisson, lambda f: PoissonDistribution(f.exp()).sample()),
    "NegativeBinomial": (
        lambda: NegativeBinomial(5.0),
        lambda f: NegativeBinomialDistribution(5.0, logits=f - math.log(5)).sample(),
    ),
    "StudentT": (StudentT, lambda f: StudentTDistribution(3.0, f, 0.2).sample()),
}
METHODS = {
    "VNNGP": lambda x, y, k, lik: VNNGP(x, y, k, lik, num_neighbors=20),
    "VNNGP, mean-field": lambda x, y, k, lik: VNNGP(x, y, k, lik, num_neighbors=20, guide=MeanField()),
    "NPVI": lambda x, y, k, lik: NPVI(x, y, k, lik, num_neighbors=20),
    "NPVI-NN": lambda x, y, k, lik: NPVI(
        x, y, k, lik, num_neighbors=20, guide=Amortized(SiteEncoder(2).double()), jitter=0.01
    ),
    "SWSGP": lambda x, y, k, lik: SWSGP(x, y, k, lik, inducing=200),
    "BSGP": lambda x, y, k, lik: BSGP(x, y, k, lik, inducing=200, inducing_prior=None),
    "SVGP": lambda x, y, k, lik: SVGP(x, y, k, lik, inducing=200),
    "LOO": lambda x, y, k, lik: LOO(x, y, k, lik, num_neighbors=20),
    "Vecchia": lambda x, y, k, lik: Vecchia(x, y, k, lik, num_neighbors=20),
}
FIELDS = ("data", "method", "num_points", "seed", "cover_data", "sd_data", "error_data", "cover_new", "sd_new")
FIELDS += ("error_new", "seconds", "threads", "torch", "commit")
APPLIES = {"LOO": ("Gaussian", "Bernoulli", "NegativeBinomial", "StudentT"), "Vecchia": ("Gaussian",)}


def problem(num_points, family, seed):
    """x and y to train on, f there, new points and f there."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_points + 500, 2, generator=generator, dtype=torch.float64)
    cov = Matern32(2, variance=1.5, lengthscale=0.15)(x).detach()
    torch.manual_seed(seed)
    f = 0.5 + MultivariateNormal(torch.zeros(len(x)).double(), cov + 1e-8 * torch.eye(len(x))).sample()
    return x[:num_points], FAMILIES[family][1](f[:num_points]), f[:num_points], x[num_points:], f[num_points:]


def posterior(gp):
    """Train a method; returns moments of f as a function of places."""
    if not isinstance(gp, BSGP):
        fit(gp, progress=False)
        return gp
    guide = AutoNormal(gp.model, init_loc_fn=gp.init_strategy, init_scale=0.05)
    fit((gp.model, guide), 600, lr=0.02, elbo=Trace_ELBO(), num_data=gp.num_data, progress=False)
    start = init_to_value(values={name: value.detach() for name, value in guide.median().items()})
    chain = MCMC(SGHMC(gp.model, num_steps=10, init_strategy=start), 100, warmup_steps=200, disable_progbar=True)
    chain.run(Minibatch(gp.num_data, gp.num_data))
    return lambda x: gp(x, samples=chain.get_samples())


def intervals(moments, x, f):
    """Coverage of f, mean standard deviation, root mean square error."""
    with torch.no_grad():
        loc, var = moments(x)
    return ((f - loc).abs() < 1.96 * var.sqrt()).double().mean(), var.sqrt().mean(), (f - loc).square().mean().sqrt()


def run(num_points, family, method, seed):
    """One row."""
    pyro.clear_param_store()
    x, y, f, x_new, f_new = problem(num_points, family, seed)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = posterior(METHODS[method](x, y, Matern32(2), FAMILIES[family][0]()))
        values = [float(value) for value in (*intervals(found, x, f), *intervals(found, x_new, f_new))]
    facts = time.process_time() - start, torch.get_num_threads(), torch.__version__, commit()
    return dict(zip(FIELDS, (family, method, num_points, seed, *values, *facts), strict=True))


def table(rows, command):
    """Averages over seeds."""
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    lines = [
        f"`{command}`, commit {commits}, torch {rows[0]['torch']}, {rows[0]['threads']} thread(s), other jobs on the "
        "machine: 95 % intervals of f, trained from defaults.",
        "",
        "| data | method | N | seeds | cover, data | sd (error), data | cover, new | sd (error), new | seconds |",
        "|---" * 9 + "|",
    ]
    for key in dict.fromkeys((row["data"], row["method"], row["num_points"]) for row in rows):
        same = [row for row in rows if (row["data"], row["method"], row["num_points"]) == key]
        a, b, c, d, e, g, seconds = (sum(float(row[name]) for row in same) / len(same) for name in FIELDS[4:11])
        seeds = ", ".join(row["seed"] for row in same)
        cells = f"{a:.3f} | {b:.3f} ({c:.3f}) | {d:.3f} | {e:.3f} ({g:.3f}) | {seconds:.1f}"
        lines.append(f"| {key[0]} | {key[1]} | {int(key[2]):,} | {seeds} | {cells} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/coverage.csv"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/coverage.md"))
    args = parser.parse_args()
    done = {(row["data"], row["method"], int(row["num_points"]), row["seed"]) for row in read(args.csv)}
    for family in args.families:
        for method in args.methods:
            for seed in range(args.seeds):
                key = family, method, args.points, str(seed)
                if key not in done and family in APPLIES.get(method, (family,)):
                    row = run(args.points, family, method, seed)
                    append(args.csv, FIELDS, row)
                    print(", ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
    text = table(read(args.csv), "python benchmarks/accuracy/coverage.py")
    args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
