"""Forward and backward pass of the nearest-neighbor conditional, computed in four ways.

Targets and neighbors are uniform in the unit cube, Matern-5/2 with one lengthscale per input; gradients of lengthscales
and variance. The ways take turns, so that all meet the same disturbances; times are medians over the rounds, ratios are
medians of the ratios within a round. On a busy machine, `--clock process_time` with one thread leaves out the time that
others had. Memory, at the largest K, is the highest of a process of its own above what it had before the pass.

Usage: python benchmarks/speed/conditional.py [--neighbors 32 64 128 256] [--threads 2] [--out FILE]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from pyro_nngp import native
from pyro_nngp.conditionals import nn_conditional
from pyro_nngp.kernels import Matern52


def autograd(kernel, x, z):
    """Torch differentiates the factorization and the solves; the kernel blocks have our own gradient."""
    cov = kernel.bind()
    nugget = 1e-4 * kernel.variance * torch.eye(z.shape[1], dtype=z.dtype)
    tril = torch.linalg.cholesky(cov(z, z) + nugget)
    half = torch.linalg.solve_triangular(tril, cov(z, x[:, None]), upper=False)
    w = torch.linalg.solve_triangular(tril.mT, half, upper=True)[..., 0]
    return w, kernel.variance * (1 + 1e-4) - half[..., 0].square().sum(-1)


def blocks(kernel, x, z):
    """What any covariance function gets: hand-written gradients of the conditional, kernel blocks by autograd."""
    return nn_conditional(lambda a, b: kernel(a, b), x, z, jitter=1e-4)


def fused(kernel, x, z):
    """One stationary kernel, in torch operations."""
    os.environ["PYRO_NNGP_NATIVE"] = "0"
    return nn_conditional(kernel, x, z, jitter=1e-4)


def compiled(kernel, x, z):
    """One stationary kernel, in compiled code."""
    os.environ["PYRO_NNGP_NATIVE"] = "1"
    return nn_conditional(kernel, x, z, jitter=1e-4)


WAYS = {"autograd": autograd, "blocks": blocks, "fused": fused, "compiled": compiled}


class Problem:
    """Inputs of one size; `times` are seconds of forward and backward pass, per way."""

    def __init__(self, num_targets, num_neighbors, dims, dtype):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(num_targets, dims, generator=generator, dtype=dtype)
        self.z = torch.rand(num_targets, num_neighbors, dims, generator=generator, dtype=dtype)
        self.grad = torch.randn(num_targets, num_neighbors, generator=generator, dtype=dtype)
        self.kernel = Matern52(dims, lengthscale=torch.linspace(0.5, 1.5, dims)).to(dtype)
        self.times = {}

    def step(self, way, clock=time.perf_counter):
        self.kernel.zero_grad()
        start = clock()
        w, var = WAYS[way](self.kernel, self.x, self.z)
        torch.autograd.backward((w, var), (self.grad, torch.ones_like(var)))
        self.times.setdefault(way, []).append(clock() - start)


def peak_memory():
    """Highest resident memory of this process so far, in MB; getrusage would count what the parent had."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure_memory(args):
    """Peak megabytes of each way at the largest size, in processes of their own."""
    options = [f"--{name}={getattr(args, name)}" for name in ("targets", "dims", "threads", "dtype")]
    command = [sys.executable, __file__, *options, f"--neighbors={max(args.neighbors)}"]
    for way in args.ways:
        done = subprocess.run([*command, f"--memory={way}"], check=True, capture_output=True, text=True)
        yield f"{way} {float(done.stdout):.0f} MB"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", type=int, default=1024)
    parser.add_argument("--neighbors", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--dims", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--clock", choices=["perf_counter", "process_time"], default="perf_counter")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    if args.memory:
        Problem(8, args.neighbors[0], args.dims, dtype).step(args.memory)
        problem = Problem(args.targets, args.neighbors[0], args.dims, dtype)
        before = peak_memory()
        problem.step(args.memory)
        print(peak_memory() - before)
        return
    if native.library() is None and "compiled" in args.ways:
        args.ways.remove("compiled")
    sizes = f"B = {args.targets}, D = {args.dims}, {args.dtype}, {args.threads} threads, {args.clock}"
    lines = [f"Forward and backward, {sizes}; torch {torch.__version__}.", ""]
    lines += ["| K | " + " | ".join(f"{way} [ms]" for way in args.ways) + f" | {args.ways[0]} / each |"]
    lines += ["|---" * (len(args.ways) + 2) + "|"]
    print("\n".join(lines), flush=True)
    for k in args.neighbors:
        problem = Problem(args.targets, k, args.dims, dtype)
        for _ in range(1 + (args.rounds if k < 200 else max(3, args.rounds // 4))):
            for way in args.ways:
                problem.step(way, getattr(time, args.clock))
        times = {way: seconds[1:] for way, seconds in problem.times.items()}  # the first round warms up
        medians = " | ".join(f"{1e3 * statistics.median(seconds):.1f}" for seconds in times.values())
        first = times[args.ways[0]]
        ratios = [statistics.median(a / b for a, b in zip(first, t, strict=True)) for t in times.values()]
        lines.append(f"| {k} | {medians} | {' / '.join(f'{ratio:.1f}' for ratio in ratios)} |")
        print(lines[-1], flush=True)
    lines.append(f"\nPeak memory at K = {max(args.neighbors)}: {', '.join(measure_memory(args))}.")
    print(lines[-1])
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
