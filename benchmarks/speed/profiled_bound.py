"""Training on the largest bound over all q, by a sparse factor, beside training on minibatches between solutions.

Usage: python benchmarks/speed/profiled_bound.py [--sets banana bei_trees 2d-10000] [--repeats 1] [--out OUT.md]

``fit(gp)`` as it is, and with no sparse factor allowed (``MOST_OPERATIONS = 0``): Adam on minibatches, with solutions
by conjugate gradients and variances given near pseudo-observations. Processor seconds of construction, training and
predictions, one thread, alternating in one run, medians over the repeats; NLL of held-out rows. Simulated sets are
named by dimensions, rows and, for labels, an L: "2dL-25600". K = 20 unless --neighbors says otherwise.
"""

import argparse
import re
import sys
import time
from pathlib import Path
from statistics import median

import torch

import pyro_nngp as nngp
from pyro_nngp.kernels import Matern32, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.variational import factored_posterior

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))
SIMULATED = re.compile(r"(\d+)d(L?)-(\d+)")


def simulated(num_columns, labels, n):
    """Waves at a constant density of points, with noise of a tenth of their amplitude, or labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n + 2000, num_columns, generator=generator, dtype=torch.float64) * (n / 1000) ** (1 / num_columns)
    f = torch.sin(3 * x[:, 0]) + torch.cos(4 * x[:, 1])
    if labels:
        y = (torch.rand(len(x), generator=generator) < (2 * f).sigmoid()).double()
    else:
        y = f + 0.1 * torch.randn(len(x), generator=generator, dtype=torch.float64)
    likelihood, kernel = (Bernoulli, Matern32) if labels else (Gaussian, Matern52)
    return x[:n], y[:n], x[n:], y[n:], likelihood, kernel


def data(name):
    """Rows, held-out rows, likelihood and kernel."""
    found = SIMULATED.fullmatch(name)
    if found:
        return simulated(int(found[1]), bool(found[2]), int(found[3]))
    from beside_gpboost import SETS, split

    return *split(name, 0), SETS[name][0], Matern32


def run(parts, num_neighbors, most):
    """Seconds, NLL, and the training's result."""
    x, y, x_new, y_new, likelihood, kernel = parts
    factored_posterior.MOST_OPERATIONS = most
    start = time.process_time()
    gp = nngp.VNNGP(x, y, kernel(x.shape[1]), likelihood(), num_neighbors=num_neighbors)
    result = nngp.fit(gp, progress=False)
    with torch.no_grad():
        q = gp.predict(x_new)
    seconds = time.process_time() - start
    hyper = [gp.bound().kernel.variance.item(), *gp.bound().kernel.lengthscale.tolist()]
    return seconds, -float(q.log_prob(y_new).mean()), result, hyper


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", nargs="+", default=["banana", "bei_trees", "2d-1000", "2d-10000", "2dL-25600"])
    parser.add_argument("--neighbors", type=int, default=20)
    parser.add_argument("--most", type=float, default=factored_posterior.MOST_OPERATIONS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--skip-before", action="store_true", help="leave out runs without a sparse factor")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run(simulated(2, False, 200), 10, args.most)  # imports
    lines = [
        "| set | N | K | way | s | steps | NLL | variance | lengthscales |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print(*lines, sep="\n", flush=True)
    for name in args.sets:
        parts, runs = data(name), {"factor": [], "minibatches": []}
        for _ in range(args.repeats):
            for way, most in (("factor", args.most), ("minibatches", 0.0)):
                if way == "factor" or not args.skip_before:
                    runs[way].append(run(parts, args.neighbors, most))
        for way, found in runs.items():
            if found:
                seconds, (_, nll, result, (variance, *scales)) = median(one[0] for one in found), found[0]
                steps = f"{result.optimizer} {len(result.losses)}"
                shown = " ".join(f"{scale:.3g}" for scale in scales)
                row = f"{name} | {len(parts[0])} | {args.neighbors} | {way} | {seconds:.2f} | {steps} | {nll:.4f}"
                lines.append(f"| {row} | {variance:.4g} | {shown} |")
                print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
