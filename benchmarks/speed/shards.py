"""Sharded data: seconds, memory and bytes per process, with 1 and 2 processes on this machine.

Run from the project root: ``python benchmarks/speed/shards.py`` for the tables of
benchmarks/results/shards.md, or one row of it by
``python -m torch.distributed.run --nproc-per-node 2 benchmarks/speed/shards.py --rows 1000000``.

The data are a smooth function on the unit square with noise, written to ``.npy`` files in blocks and read as memory
maps. Memory is the largest resident size of a process; pages of the maps count as far as they are resident.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import pyro_nngp as nngp
from pyro_nngp.distributed import ShardedData, factor, join_group
from pyro_nngp.distributed.factor import ShardedFactor
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.variational import MeanField, SparseCholesky

BLOCK = 2**20
SIZES = ((10**5, (1, 2)), (10**6, (1, 2)), (2 * 10**6, (2,)))


def write_data(folder, num_rows):
    """x.npy and y.npy, written block by block."""
    shape = {"x": (num_rows, 2), "y": (num_rows,)}
    files = {n: np.lib.format.open_memmap(folder / f"{n}.npy", "w+", np.float32, s) for n, s in shape.items()}
    rng = np.random.default_rng(0)
    for start in range(0, num_rows, BLOCK):
        stop = min(num_rows, start + BLOCK)
        x = rng.random((stop - start, 2), np.float32)
        f = np.sin(20 * x[:, 0]) * np.cos(15 * x[:, 1]) + 0.5 * np.sin(60 * x[:, 0] + 40 * x[:, 1])
        files["x"][start:stop] = x
        files["y"][start:stop] = f + 0.1 * rng.standard_normal(stop - start, np.float32)


def megabytes():
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Clock:
    """Wall and processor seconds since the last look, the latter of the slowest process."""

    def __init__(self):
        self.begin = time.perf_counter(), time.process_time()

    def look(self, name, world):
        now = time.perf_counter(), time.process_time()
        wall, processor = (after - before for after, before in zip(now, self.begin, strict=True))
        self.begin = now
        return {f"{name} s": wall, f"{name} processor s": world.max(int(1e3 * processor)) / 1e3}


def measure(folder, neighbors, cells):
    """One row of the table."""
    warnings.simplefilter("ignore")
    join_group()
    base, clock = megabytes(), Clock()
    data = ShardedData(folder / "x.npy", folder / "y.npy")
    world, row = data.world, {"rows": data.num_rows, "processes": data.world.size}
    row |= clock.look("load", world)
    gp = nngp.Vecchia(data, kernel=Matern32(2), num_neighbors=neighbors)
    row |= clock.look("build", world) | {"halo rows": world.max(len(gp.graph.halo))}
    row["build MB sent"] = world.max(sum(world.traffic.values())) / 1e6
    world.traffic.clear()
    result = nngp.fit(gp, progress=False)
    row |= clock.look("fit", world) | {"fit steps": result.steps, "lengthscale": gp.kernel.lengthscale[0].item()}
    row["fit MB sent"] = world.max(sum(world.traffic.values())) / 1e6
    world.traffic.clear()
    times = [time.process_time()]
    options = {"refresh_every": 0, "solve_every": 0, "progress": False}
    nngp.fit(gp, 20, batch_size=4096, callback=lambda step, loss: times.append(time.process_time()), **options)
    row["step processor ms"] = 1e3 * float(np.median(np.diff(times)))
    row["step bytes sent"] = world.max(world.traffic["sum"]) / 20
    row["training MB"] = world.max(int(megabytes() - base))
    side = int(cells**0.5)
    axis = np.linspace(0, 1, side, dtype=np.float32)
    clock = Clock()
    nngp.predict_grid(gp, {"x": axis, "y": axis}, path=folder / "map.zarr", num_neighbors=neighbors, progress=False)
    row |= {"cells": side**2, "MB": world.max(int(megabytes() - base))} | clock.look("map", world)
    if world.rank == 0:
        print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


class CountedProducts:
    """Counts the products of conjugate gradients with the precision while it is active."""

    def __enter__(self):
        self.count, self._product = 0, ShardedFactor.product

        def product(factor, m):
            self.count += 1
            return self._product(factor, m)

        ShardedFactor.product = product
        return self

    def __exit__(self, *exception):
        ShardedFactor.product = self._product


def measure_solve(folder, neighbors, noise, prior, has_factor):
    """One row of the table of solutions for q(u): mean-field, or with a factor on the neighbors."""
    warnings.simplefilter("ignore")
    factor.ROWS_PER_ROUND = {"own": 10**9, "all": 0, None: factor.ROWS_PER_ROUND}[prior]
    join_group()
    data = ShardedData(folder / "x.npy", folder / "y.npy")
    world, likelihood = data.world, Gaussian(noise)
    family = {"guide": SparseCholesky(neighbors)} if has_factor else {"guide": MeanField()}
    options = {"likelihood": likelihood, "num_neighbors": neighbors, **family}
    gp = nngp.VNNGP(data, kernel=Matern32(2, 0.25, 0.05), **options)
    row = {"rows": data.num_rows, "processes": world.size, "halo rows": world.max(len(gp.graph.halo))}
    world.traffic.clear()
    clock = Clock()
    with CountedProducts() as products:
        gp.solve()
    row |= clock.look("solve", world) | {"noise": noise, "products": products.count, "rounds": len(gp.graph.rounds())}
    row |= {f"{name} MB": world.max(size) / 1e6 for name, size in dict(world.traffic).items()}
    row["MB of one exchange"] = 8 * row["halo rows"] / 1e6
    if world.rank == 0:
        print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, help="rows of one run; without it, all rows of the tables")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--neighbors", type=int, default=16)
    parser.add_argument("--cells", type=int, default=10**6)
    parser.add_argument("--solve", action="store_true", help="the solution of VNNGP for q(u) in place of training")
    parser.add_argument("--factor", action="store_true", help="that solution for a factor in place of mean-field")
    parser.add_argument("--noise", type=float, default=0.01, help="variance of the noise of that model")
    parser.add_argument("--prior", choices=["own", "all"], help="rows of the preconditioner; the default chooses")
    parser.add_argument("--data", type=Path, help="folder of x.npy and y.npy")
    args = parser.parse_args()
    if args.data is not None:
        if args.solve:
            measure_solve(args.data, args.neighbors, args.noise, args.prior, args.factor)
        else:
            measure(args.data, args.neighbors, args.cells)
        return
    for num_rows, counts in SIZES if args.rows is None else ((args.rows, args.processes),):
        with tempfile.TemporaryDirectory() as folder:
            write_data(Path(folder), num_rows)
            for count in counts:
                launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
                own = [__file__, "--data", folder, "--neighbors", str(args.neighbors), "--cells", str(args.cells)]
                own += ["--noise", str(args.noise)] + ["--solve"] * args.solve + ["--factor"] * args.factor
                own += [] if args.prior is None else ["--prior", args.prior]
                subprocess.run([sys.executable, *launch, *own], check=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
