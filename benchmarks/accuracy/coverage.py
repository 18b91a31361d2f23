"""Coverage of 95 % intervals of f: functions drawn from a process, N points in the unit square.

f is a draw from a Matérn-3/2 process (variance 1.5, lengthscale .15, level .5) at training and new points, y one draw
given f. Each method is called plainly, with nothing set but a number of inducing points or a family of q, and trained
by `fit(gp)`; BSGP starts its chain from a fitted AutoNormal, which also finds the hyperparameters. `LMC` has two
outputs with a process each. Coverage at the data and at new points is averaged over seeds, with its standard error, and
with the root mean square of the errors of f beside the mean standard deviation: intervals are honest if the coverage is
near .95 and the two numbers agree. A fit warns if `fit`, the constructor or a prediction does. A row that is in the
CSV file is not computed again.

Usage: python benchmarks/accuracy/coverage.py [--points 500] [--seeds 20] [--families Gaussian Poisson]
           [--methods VNNGP "VNNGP, mean-field"] [--kernel plain | true] [--csv benchmarks/results/coverage.csv]
           [--out benchmarks/results/coverage.md]

With --kernel true the kernel is a Matérn-3/2 of unknown variance and lengthscales.
"""

import argparse
import math
import statistics
import time
import warnings
from pathlib import Path

import pyro
import torch
from pyro.infer import MCMC, Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value
from rows import append, commit, read  # beside this file
from torch.distributions import MultivariateNormal

from pyro_nngp import likelihoods
from pyro_nngp.inference import SGHMC, Minibatch, fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.models import BSGP, LMC, LOO, NPVI, SVGP, SWSGP, VNNGP, Vecchia
from pyro_nngp.variational import Amortized, MeanField
from pyro_nngp.variational.encoders import SiteEncoder

OUTPUTS = 2
NEW = 300  # new points
INDUCING = 200
BASIC = ("Gaussian", "StudentT", "Bernoulli", "Poisson", "NegativeBinomial")


def family(name, **truth):
    """The likelihood as a plain call has it, and with the values that data are drawn with."""
    kind = getattr(likelihoods, name)
    known = {arg: value for arg, value in truth.items() if arg == "total_count" and isinstance(value, int)}
    return lambda: kind(**known), lambda: kind(**truth)


def zeros(name):
    kind = getattr(likelihoods, name)
    return lambda: kind(likelihoods.Poisson()), lambda: kind(likelihoods.Poisson(), gate=0.3)


FAMILIES = {
    "Gaussian": family("Gaussian", variance=0.09),
    "StudentT": family("StudentT", df=3.0, scale=0.2),
    "Bernoulli": family("Bernoulli"),
    "Poisson": family("Poisson"),
    "NegativeBinomial": family("NegativeBinomial", total_count=5.0),
    "Binomial": family("Binomial", total_count=10),
    "BetaBinomial": family("BetaBinomial", total_count=10, concentration=10.0),
    "Beta": family("Beta", concentration=10.0),
    "Ordinal": (lambda: likelihoods.Ordinal(torch.tensor([-1.0, 0.0, 1.0]).double()),) * 2,
    "ZeroInflated": zeros("ZeroInflated"),
    "Hurdle": zeros("Hurdle"),
    "LogNormal": family("LogNormal", variance=0.09),
    "Gamma": family("Gamma", concentration=4.0),
    "InverseGaussian": family("InverseGaussian", concentration=4.0),
    "Tweedie": family("Tweedie", dispersion=0.5, power=1.5),
    "GeneralizedPareto": family("GeneralizedPareto", concentration=0.2),
    "AsymmetricLaplace": family("AsymmetricLaplace", scale=0.15),
}
METHODS = {
    "Vecchia": Vecchia,
    "LOO": LOO,
    "VNNGP": VNNGP,
    "LMC": lambda x, y, k, lik: LMC(x, y, k, likelihood=lik),
    "SVGP": lambda x, y, k, lik: SVGP(x, y, k, lik, inducing=INDUCING),
    "NPVI": NPVI,
    "BSGP": lambda x, y, k, lik: BSGP(x, y, k, lik, inducing=INDUCING, inducing_prior=None),
    "SWSGP": lambda x, y, k, lik: SWSGP(x, y, k, lik, inducing=INDUCING),
    "NPVI-NN": lambda x, y, k, lik: NPVI(x, y, k, lik, guide=Amortized(SiteEncoder(2).double()), jitter=0.01),
    "VNNGP, mean-field": lambda x, y, k, lik: VNNGP(x, y, k, lik, guide=MeanField()),
}
APPLIES = dict.fromkeys(METHODS, BASIC) | {
    "Vecchia": ("Gaussian",),
    "LOO": ("Gaussian", "StudentT", "Bernoulli", "NegativeBinomial", "Binomial"),
    "VNNGP": tuple(FAMILIES),
    "NPVI-NN": ("Gaussian",),
    "BSGP": ("Gaussian",),
}
FIELDS = ("data", "method", "kernel", "num_points", "seed", "cover_data", "sd_data", "error_data", "cover_new")
FIELDS += ("sd_new", "error_new", "seconds", "warning", "threads", "torch", "commit")


def problem(num_points, name, seed, outputs):
    """x and y to train on, f there, new points and f there."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_points + NEW, 2, generator=generator, dtype=torch.float64)
    cov = Matern32(2, variance=1.5, lengthscale=0.15)(x).detach()
    torch.manual_seed(seed)
    f = 0.5 + MultivariateNormal(torch.zeros(len(x)).double(), cov + 1e-8 * torch.eye(len(x))).sample((outputs,))
    with torch.no_grad():
        y = FAMILIES[name][1]()(f[:, :num_points]).sample()
    y, f = (y[0], f[0]) if outputs == 1 else (y.mT, f)
    return x[:num_points], y, f[..., :num_points], x[num_points:], f[..., num_points:]


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


def run(num_points, name, method, kernel, seed):
    """One row."""
    pyro.clear_param_store()
    x, y, f, x_new, f_new = problem(num_points, name, seed, OUTPUTS if method == "LMC" else 1)
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = posterior(METHODS[method](x, y, Matern32(2) if kernel == "true" else None, FAMILIES[name][0]()))
        values = [float(value) for value in (*intervals(found, x, f), *intervals(found, x_new, f_new))]
    seconds = time.process_time() - start
    told = " | ".join(dict.fromkeys(f"{each.message!s:.160}" for each in caught))
    facts = seconds, told, torch.get_num_threads(), torch.__version__, commit()
    return dict(zip(FIELDS, (name, method, kernel, num_points, seed, *values, *facts), strict=True))


def table(rows):
    """Averages over seeds."""
    head = "| data | method | kernel | N | draws | cover, data | sd (error), data | cover, new | sd (error), new "
    lines = [f"{head}| warn | seconds |", "|---" * 11 + "|"]
    for key in dict.fromkeys((row["data"], row["method"], row["kernel"], row["num_points"]) for row in rows):
        same = [row for row in rows if (row["data"], row["method"], row["kernel"], row["num_points"]) == key]
        cells = []
        for place in ("data", "new"):
            cover, sd, error = ([float(row[f"{name}_{place}"]) for row in same] for name in ("cover", "sd", "error"))
            spread = f" ± {statistics.stdev(cover) / math.sqrt(len(cover)):.3f}" if len(cover) > 1 else ""
            cells += [
                f"{statistics.mean(cover):.3f}{spread}",
                f"{statistics.mean(sd):.3f} ({statistics.mean(error):.3f})",
            ]
        cells += [str(sum(bool(row["warning"]) for row in same))]
        cells += [f"{statistics.mean(float(row['seconds']) for row in same):.1f}"]
        data, method, kernel, num_points = key
        lines.append(f"| {data} | {method} | {kernel} | {int(num_points):,} | {len(same)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--kernel", choices=("plain", "true"), default="plain")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/coverage.csv"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/coverage.md"))
    args = parser.parse_args()
    cell = "data", "method", "kernel", "num_points", "seed"
    done = {tuple(row[name] for name in cell) for row in read(args.csv)}
    for seed in range(args.seeds):
        for method in args.methods:
            for name in (each for each in args.families if each in APPLIES[method]):
                if (name, method, args.kernel, str(args.points), str(seed)) not in done:
                    row = run(args.points, name, method, args.kernel, seed)
                    append(args.csv, FIELDS, row)
                    print(", ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
    rows = read(args.csv)
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    said = f"`python benchmarks/accuracy/coverage.py`, commit {commits}, torch {torch.__version__}, one thread."
    args.out.write_text(f"{said}\n\n{table(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
