"""Coverage of 95 % intervals of f: functions drawn from the process itself, N points in the unit square.

f is a draw from a Matern-3/2 process (variance 1.5, lengthscale .15, level .5) at training and new points, y one draw
given f. Each method has nothing set but the family of the kernel, and is trained by `fit(gp)`. Coverage at the data and
at new sites is averaged over seeds, with the root mean square of the errors of f beside the mean standard deviation:
intervals are honest if the coverage is near .95 and the two numbers agree.

Usage: python benchmarks/accuracy/coverage.py [--points 2000] [--seeds 2] [--families Gaussian Poisson]
           [--methods VNNGP "VNNGP, mean-field"] [--out benchmarks/results/coverage.md]
"""

import argparse
import time
import warnings
from pathlib import Path

import torch
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import MultivariateNormal, Normal
from torch.distributions import NegativeBinomial as NegativeBinomialDistribution
from torch.distributions import Poisson as PoissonDistribution

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Gaussian, NegativeBinomial, Poisson
from pyro_nngp.models import LOO, NPVI, SVGP, VNNGP, Vecchia

FAMILIES = {
    "Gaussian": (Gaussian, lambda f: Normal(f, 0.3).sample()),
    "Bernoulli": (Bernoulli, lambda f: BernoulliDistribution(logits=f).sample()),
    "Poisson": (Poisson, lambda f: PoissonDistribution(f.exp()).sample()),
    "NegativeBinomial": (
        lambda: NegativeBinomial(5.0),
        lambda f: NegativeBinomialDistribution(5.0, logits=f).sample(),
    ),
}
METHODS = {
    "VNNGP": lambda x, y, k, lik: VNNGP(x, y, k, lik, num_neighbors=20),
    "VNNGP, mean-field": lambda x, y, k, lik: VNNGP(x, y, k, lik, num_neighbors=20, posterior="mean-field"),
    "NPVI": lambda x, y, k, lik: NPVI(x, y, k, lik, num_neighbors=20),
    "SVGP": lambda x, y, k, lik: SVGP(x, y, k, lik, inducing=200),
    "LOO": lambda x, y, k, lik: LOO(x, y, k, lik, num_neighbors=20),
    "Vecchia": lambda x, y, k, lik: Vecchia(x, y, k, lik, num_neighbors=20),
}
APPLIES = {"LOO": ("Gaussian", "Bernoulli", "NegativeBinomial"), "Vecchia": ("Gaussian",)}


def problem(num_points, family, seed):
    """x and y to train on, f there, new points and f there."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_points + 500, 2, generator=generator, dtype=torch.float64)
    cov = Matern32(2, variance=1.5, lengthscale=0.15)(x).detach()
    torch.manual_seed(seed)
    f = 0.5 + MultivariateNormal(torch.zeros(len(x)).double(), cov + 1e-8 * torch.eye(len(x))).sample()
    return x[:num_points], FAMILIES[family][1](f[:num_points]), f[:num_points], x[num_points:], f[num_points:]


def intervals(gp, x, f):
    """Coverage of f, mean standard deviation, root mean square error."""
    with torch.no_grad():
        loc, var = gp(x)
    return ((f - loc).abs() < 1.96 * var.sqrt()).double().mean(), var.sqrt().mean(), (f - loc).square().mean().sqrt()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    lines = [
        f"`python benchmarks/accuracy/coverage.py --points {args.points} --seeds {args.seeds}`, torch "
        f"{torch.__version__}, {torch.get_num_threads()} thread(s): 95 % intervals of f, trained from defaults.",
        "",
        "| data | method | cover, data | sd (error), data | cover, new | sd (error), new | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for family in args.families:
        for method in args.methods:
            if family not in APPLIES.get(method, (family,)):
                continue
            found, seconds = [], 0.0
            for seed in range(args.seeds):
                x, y, f, x_new, f_new = problem(args.points, family, seed)
                start = time.process_time()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    gp = METHODS[method](x, y, Matern32(2), FAMILIES[family][0]())
                    fit(gp, progress=False)
                    found.append(torch.stack([*intervals(gp, x, f), *intervals(gp, x_new, f_new)]))
                seconds += time.process_time() - start
            a, b, c, d, e, g = torch.stack(found).mean(0).tolist()
            row = f"{a:.3f} | {b:.3f} ({c:.3f}) | {d:.3f} | {e:.3f} ({g:.3f}) | {seconds / args.seeds:.1f}"
            lines.append(f"| {family} | {method} | {row} |")
            print(lines[-1], flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
