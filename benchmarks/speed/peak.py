"""The compiled conditional as a fraction of the processor's peak, by K: forward and backward pass, one thread.

The peak is that of torch's product of two 1,024 x 1,024 matrices. Products, forward and backward passes take turns;
each turn repeats its call for some milliseconds, and medians of processor time per call count. Operations are those of
the formulas, whatever the code does to save some: K^3 / 3 for the factor, 4 K^2 for each right-hand side; for each of
the K^2 / 2 pairs 3 D for the distance, some 30 for root, exponential and polynomial, in the gradient 6 D + 10 more. The
backward pass gives gradients of inputs and hyperparameters; it takes the factors of the forward pass. Python's share of
a call is included; what Pyro and torch add around it (modules, checks, autograd) is in the last column, for forward and
backward together.

Usage: python benchmarks/speed/peak.py [--neighbors 8 16 32 64 96 128 256] [--dims 2] [--dtype float32] [--out FILE]
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from pyro_nngp.conditionals import nn_conditional
from pyro_nngp.kernels import Matern52
from pyro_nngp.native.conditional import Problem, backward, forward

SIZE, TURN = 1024, 0.02


def operations(k, d):
    """Floating-point operations per target: forward, backward."""
    pairs = k * k / 2
    return k**3 / 3 + pairs * (3 * d + 30) + 4 * k * k, 8 * k * k + pairs * (9 * d + 40)


def turn(work):
    """Processor time per call of one turn."""
    start, calls = time.process_time(), 0
    while time.process_time() - start < TURN:
        work()
        calls += 1
    return (time.process_time() - start) / calls


def works(k, targets, dims, dtype):
    """The calls that take turns: both compiled passes, and both through autograd."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(targets, dims, generator=generator, dtype=dtype)
    z = torch.rand(targets, k, dims, generator=generator, dtype=dtype)
    scale, rows = torch.full((dims,), 0.5, dtype=dtype), torch.arange(targets * k).reshape(targets, k)
    variance = torch.ones((), dtype=dtype)
    problem = Problem(x, z.flatten(0, 1), scale, variance, None, rows, Matern52.profile, 1e-3)
    kernel, own = Matern52(dims, lengthscale=scale).to(dtype), x.clone().requires_grad_()
    w, v, _, kept = forward(problem, recording=True)
    grads = torch.ones_like(w), torch.ones_like(v)

    def both():
        torch.autograd.backward(nn_conditional(kernel, own, z, jitter=1e-3), grads)

    yield lambda: forward(problem, recording=True)
    yield lambda: backward(problem, kept, *grads, kernel=True, noise=False, inputs=True)
    yield both


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--neighbors", type=int, nargs="+", default=[8, 16, 32, 64, 96, 128, 256])
    parser.add_argument("--targets", type=int, default=1024)
    parser.add_argument("--dims", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    square = torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=dtype)
    lines = [
        f"B = {args.targets:,}, D = {args.dims}, {args.dtype}, medians of {args.rounds} rounds, microseconds of "
        f"processor time per target; torch {torch.__version__}.",
        "",
        "| K | peak [GFlop/s] | forward [us] | of peak | backward [us] | of peak | both, through autograd [us] |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for k in args.neighbors:
        calls = [lambda: square @ square, *works(k, args.targets, args.dims, dtype)]
        times = [[turn(call) for call in calls] for _ in range(args.rounds + 1)][1:]
        matrices, *passes, both = (statistics.median(column) for column in zip(*times, strict=True))
        peak = 2 * SIZE**3 / matrices
        cells = [f"{k}", f"{peak / 1e9:.0f}"]
        for seconds, count in zip(passes, operations(k, args.dims), strict=True):
            cells += [f"{1e6 * seconds / args.targets:.2f}", f"{100 * args.targets * count / seconds / peak:.0f} %"]
        lines.append(f"| {' | '.join([*cells, f'{1e6 * both / args.targets:.2f}'])} |")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
