"""Leave-one-out scores beside scores on fresh data: is `gp.loo()` what `az.compare` may rank methods by?

400 points to train on and 400 fresh ones from a Matern-3/2 process (variance 1, lengthscale .3, noise variance .09),
for each seed; each method is trained by `fit(gp)` with nothing set but the family of the kernel. A score is the sum
of the log densities of y; its standard error is that over points, of both sums for their difference.

Usage: python benchmarks/accuracy/elpd.py [--seeds 2] [--out benchmarks/results/elpd.md]
"""

import argparse
import warnings
from pathlib import Path

import pyro
import torch
from rows import commit  # beside this file

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.models import LOO, SVGP, VNNGP, Vecchia

METHODS = {
    "VNNGP": lambda x, y: VNNGP(x, y, Matern32(2), num_neighbors=15),
    "LOO": lambda x, y: LOO(x, y, Matern32(2), num_neighbors=15),
    "Vecchia": lambda x, y: Vecchia(x, y, Matern32(2), num_neighbors=15),
    "SVGP": lambda x, y: SVGP(x, y, Matern32(2), inducing=20),
}


def problem(seed):
    """x and y of 800 points."""
    torch.manual_seed(seed)
    x = torch.rand(800, 2, dtype=torch.float64)
    with torch.no_grad():
        cov = Matern32(2, variance=1.0, lengthscale=0.3).double()(x) + 1e-6 * torch.eye(800)
    return x, torch.linalg.cholesky(cov) @ torch.randn(800).double() + 0.3 * torch.randn(800).double()


@torch.no_grad()
def scores(gp, x, y):
    """Log densities by leaving each datum out, and on fresh data."""
    return gp.loo(), gp.predict(x).log_prob(y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    lines = [
        f"`python benchmarks/accuracy/elpd.py --seeds {args.seeds}`, commit {commit()}, torch {torch.__version__}.",
        "",
        "| seed | method | leave-one-out | fresh data | difference in standard errors |",
        "|---" * 5 + "|",
    ]
    print("\n".join(lines))
    differences = {name: [] for name in METHODS}
    for seed in range(args.seeds):
        x, y = problem(seed)
        for name, method in METHODS.items():
            pyro.set_rng_seed(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gp = method(x[:400], y[:400])
                fit(gp, progress=False)
                left_out, fresh = scores(gp, x[400:], y[400:])
            error = (400 * (left_out.var() + fresh.var())).sqrt()
            difference = (left_out.sum() - fresh.sum()) / error
            lines.append(f"| {seed} | {name} | {left_out.sum():.1f} | {fresh.sum():.1f} | {difference:+.1f} |")
            print(lines[-1], flush=True)
            differences[name].append(difference.item())
    for name, values in differences.items():
        lines.append(f"| mean | {name} | | | {sum(values) / len(values):+.1f} |")
        print(lines[-1])
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
