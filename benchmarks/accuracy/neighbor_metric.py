r"""What the metric of the neighbor search is worth: divergence of nearest-neighbor priors from the exact process.

For N random points, one random ordering and K preceding neighbors, the divergence of the prior at the true kernel from
the exact process is

.. math:: KL = \tfrac12 \sum_j \log(v_j / v_j^*),

v the conditional variances given the neighbors and v* those given all that precede, from a dense Cholesky factor in
float64. Neighbors are nearest by

- columns in units of their spread, as a search that knows nothing of the kernel,
- the kernel's own metric, as methods use it: lengthscales, or for kernels without one per column features (of periodic
  parts sine and cosine) and then correlation,
- features alone: what the ranking of twice as many candidates by correlation replaces,
- correlation, by a search of all pairs: what no search for candidates can beat.

Usage: python benchmarks/accuracy/neighbor_metric.py [--points 2000] [--out benchmarks/results/neighbor_metric.md]
"""

import argparse
from pathlib import Path

import torch
from rows import commit  # beside this file

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.kernels import KernelMetric, Matern12, Matern32, Periodic, bind, neighbor_metric
from pyro_nngp.kernels.metric import column_scale
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
SIZES = (8, 16, 32)


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def kernels():
    """Kernels by the words of the table; inputs are columns in [0, 1]."""
    space = {"active_dims": [0, 1]}
    place, day = (
        Matern32(2, lengthscale=tensor(0.3, 0.3), **space),
        Matern12(1, lengthscale=tensor(0.02), active_dims=[2]),
    )
    seasonal = Periodic(1, lengthscale=tensor(0.7), period=tensor(0.1), active_dims=[2])
    slow = Matern32(1, lengthscale=tensor(0.8), active_dims=[2])
    return {
        "anisotropic, lengthscales .05 and 1": (2, Matern32(2, lengthscale=tensor(0.05, 1.0))),
        "space and time, product": (3, place * day),
        "space and time, sum": (3, place + slow),
        "space and time, sum, variances 1 and .05": (3, place + Matern12(1, 0.05, tensor(0.02), [2])),
        "place times season": (3, place * seasonal),
        "place times season times trend": (3, place * seasonal * slow),
        "two directions, sum": (
            2,
            Matern32(2, lengthscale=tensor(0.05, 1.0)) + Matern32(2, lengthscale=tensor(1.0, 0.05)),
        ),
    }


class Features:
    """The first feature space of a kernel's metric as points, in which distance is Euclidean."""

    def __init__(self, kernel, x):
        self.metric = KernelMetric(kernel, x)

    def __call__(self, x, z):
        x, z = self.metric.features(x)[0], self.metric.features(z)[0]
        return torch.cdist(x, z)


class Correlation:
    """One minus the correlation of all pairs."""

    def __init__(self, kernel, x):
        self.cov = bind(kernel)

    def __call__(self, x, z):
        return 1 - self.cov(x, z).abs() / (self.cov.diag(x)[:, None] * self.cov.diag(z)).sqrt()


def metrics(kernel, x):
    """Metrics by the words of the table."""
    return {
        "spread of columns": column_scale(x),
        "the kernel's": neighbor_metric(kernel, x),
        "features alone": Features(kernel, x),
        "all pairs by correlation": Correlation(kernel, x),
    }


@torch.no_grad()
def divergences(columns, kernel, num_points):
    """Nats per point by metric, for each number of neighbors."""
    x = torch.rand(num_points, columns, dtype=F64, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(num_points, generator=torch.Generator().manual_seed(1))
    covariance = bind(kernel)(x[order], x[order])
    nugget = 1e-6 * covariance.diagonal().mean()
    exact = torch.linalg.cholesky(covariance + nugget * torch.eye(num_points, dtype=F64)).diagonal().log().sum()
    found = {}
    for name, metric in metrics(kernel, x).items():
        found[name] = []
        for k in SIZES:
            graph = NeighborGraph(x, k, order, metric=metric, progress=False)
            _, var = graph_conditional(kernel, x, x, graph.neighbors, jitter=1e-6)
            found[name].append(float(var.log().sum() / 2 - exact) / num_points)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/neighbor_metric.md"))
    args = parser.parse_args()
    head = f"`python benchmarks/accuracy/neighbor_metric.py`, commit {commit()}, torch {torch.__version__}: "
    head += (
        f"divergence of the nearest-neighbor prior from the exact process at {args.points:,} points, nats per point."
    )
    lines = [head, "", f"| kernel | neighbors by | {' | '.join(f'K = {k}' for k in SIZES)} |", "|---" * 5 + "|"]
    for kind, (columns, kernel) in kernels().items():
        for name, values in divergences(columns, kernel, args.points).items():
            lines.append(f"| {kind} | {name} | {' | '.join(f'{value:.4f}' for value in values)} |")
            print(lines[-1], flush=True)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
