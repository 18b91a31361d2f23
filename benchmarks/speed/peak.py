"""The compiled conditional as a fraction of the processor's peak, by K: forward and backward pass, one thread.

The peak is that of torch's product of two 1,024 x 1,024 matrices, measured in turns. Operations are counted: K^3 / 3
for the factor, 4 K^2 for each right-hand side, and for each of the K^2 / 2 pairs 3 D for the distance, some 30 for
root, exponential and polynomial, and in the gradient 6 D + 10 more. Gradients of inputs and hyperparameters, so that
the backward pass takes factors (from K = 96 on those of the forward pass) instead of derivatives that the forward pass
has left.

Usage: python benchmarks/speed/peak.py [--neighbors 8 16 32 64 96 128 256] [--dims 2] [--dtype float32] [--out FILE]
"""

import argparse
import time
from pathlib import Path

import torch

from pyro_nngp.conditionals import nn_conditional
from pyro_nngp.kernels import Matern52
from pyro_nngp.native.conditional import FACTORS_FROM

SIZE = 1024


def operations(k, d):
    """Floating-point operations per target: forward, backward."""
    factor, pairs = k**3 / 3, k * k / 2
    kernel = pairs * (3 * d + 30)
    forward = factor + kernel + 4 * k * k
    backward = (factor + kernel) * (k < FACTORS_FROM) + 8 * k * k + pairs * (9 * d + 40)
    return forward, backward


def timed(work):
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--neighbors", type=int, nargs="+", default=[8, 16, 32, 64, 96, 128, 256])
    parser.add_argument("--targets", type=int, default=4096)
    parser.add_argument("--dims", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype, generator = getattr(torch, args.dtype), torch.Generator().manual_seed(0)
    square = torch.rand(SIZE, SIZE, generator=generator, dtype=dtype)
    lines = [
        f"B = {args.targets:,}, D = {args.dims}, {args.dtype}, least processor time of {args.rounds} rounds; torch "
        f"{torch.__version__}.",
        "",
        "| K | peak [GFlop/s] | forward [us per target] | of peak | backward [us per target] | of peak |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for k in args.neighbors:
        targets = args.targets if k < 200 else args.targets // 4
        x = torch.rand(targets, args.dims, generator=generator, dtype=dtype, requires_grad=True)
        z = torch.rand(targets, k, args.dims, generator=generator, dtype=dtype)
        kernel = Matern52(args.dims, lengthscale=torch.full((args.dims,), 0.5)).to(dtype)
        times = []
        for _ in range(args.rounds + 1):
            matrices, _ = timed(lambda: square @ square)
            forward, (w, var) = timed(lambda x=x, z=z, kernel=kernel: nn_conditional(kernel, x, z, jitter=1e-3))
            backward, _ = timed(lambda w=w, var=var: torch.autograd.backward((w.sum(), var.sum())))
            times.append((matrices, forward, backward))
        matrices, forward, backward = (min(column) for column in zip(*times[1:], strict=True))
        peak, counts = 2 * SIZE**3 / matrices, operations(k, args.dims)
        cells = [f"{k}", f"{peak / 1e9:.0f}"]
        for seconds, count in ((forward, counts[0]), (backward, counts[1])):
            cells += [f"{1e6 * seconds / targets:.2f}", f"{100 * targets * count / seconds / peak:.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
