"""What more rows say about the lengthscale: `fit(Vecchia)` on one field, on ever denser rows.

With more rows in the same region, variance and lengthscale are not identified one by one; the ratio variance /
lengthscale^(2 nu) is (Zhang 2004, "Inconsistent estimation and asymptotically equal interpolations in model-based
geostatistics", JASA), and predictions depend on it. For nu = 3/2 the script prints it at the start and at the end of
training, and by how much the loss rises, in nats per row, where the lengthscales are halved or doubled at the same
ratio. `--side .31623` takes a tenth of the square, so that 10^6 rows lie as densely as 10^7 on all of it.

Usage: python benchmarks/accuracy/ridge.py --rows 100000 [--side 1] [--neighbors 16]
"""

import argparse
import warnings

import numpy as np
import torch

import pyro_nngp as nngp
from pyro_nngp.inference import IntegratedELBO
from pyro_nngp.kernels import Matern32

ROWS = 20_000  # at which losses are compared


def field(num_rows, side):
    """The data of benchmarks/speed/shards.py, on a square of some side."""
    rng = np.random.default_rng(0)
    x = (side * rng.random((num_rows, 2))).astype(np.float32)
    f = np.sin(20 * x[:, 0]) * np.cos(15 * x[:, 1]) + 0.5 * np.sin(60 * x[:, 0] + 40 * x[:, 1])
    y = f + 0.1 * rng.standard_normal(num_rows, np.float32)
    return torch.from_numpy(x), torch.from_numpy(y.astype(np.float32))


def described(gp):
    """Geometric mean of the lengthscales, variance, and their ratio."""
    lengthscale, variance = gp.kernel.lengthscale.detach().log().mean().exp().item(), gp.kernel.variance.item()
    return f"{lengthscale:.4f} | {variance:.3f} | {variance / lengthscale**3:.0f}"


@torch.no_grad()
def rises(gp, factors):
    """Losses along the ridge less that at the estimate, on the same rows."""
    rows = torch.randperm(gp.num_data, generator=torch.Generator().manual_seed(7))[:ROWS]
    lengthscale, variance, found = gp.kernel.lengthscale.clone(), gp.kernel.variance.clone(), []
    for factor in (1.0, *factors):
        gp.kernel.lengthscale, gp.kernel.variance = factor * lengthscale, factor**3 * variance
        found.append(IntegratedELBO().loss(gp.model, gp.guide, rows) / gp.num_data)
    return [loss - found[0] for loss in found[1:]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--side", type=float, default=1.0)
    parser.add_argument("--neighbors", type=int, default=16)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    x, y = field(args.rows, args.side)
    gp = nngp.Vecchia(x, y, kernel=Matern32(2), num_neighbors=args.neighbors)
    start = described(gp)
    steps = nngp.fit(gp, progress=False).steps
    end, (half, double) = described(gp), rises(gp, (0.5, 2.0))
    density = args.rows / args.side**2
    print(f"| {density:.1e} | {args.rows} | {start} | {steps} | {end} | {half:+.1e} | {double:+.1e} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
