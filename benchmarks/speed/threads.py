"""What a second thread brings: search, conditional, step, solve and prediction on one thread and on several, in turns.

Wall and processor milliseconds, the least of the rounds, and the ratio of wall times: 2 would be ideal for two threads.
Processor times that grow with the threads are spinning or contention for caches. On a machine with other work the wall
times of several threads say little; run it on an idle one.

Usage: python benchmarks/speed/threads.py [--threads 1 2] [--rounds 7] [--out benchmarks/results/threads.md]
"""

import argparse
import os
import time
from pathlib import Path

import torch

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import LOO, VNNGP, Vecchia
from pyro_nngp.neighbors import NeighborGraph


def data(num_points, dims):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_points, dims, generator=generator) * (num_points**0.5 / 10 if dims == 2 else 1)
    return x, torch.sin(x[:, 0]) + 0.1 * torch.randn(num_points, generator=generator)


def kernel(dims):
    return Matern52(dims, variance=torch.tensor(1.0), lengthscale=torch.ones(dims))


def conditional(k):
    x, _ = data(139_000, 2)
    graph, rows, cov = NeighborGraph(x, k, progress=False), torch.arange(1024) * 100 + 2000, kernel(2)

    def work():
        w, var = graph_conditional(cov, x[rows], x, graph.neighbors[rows])
        (w.sum() + var.sum()).backward()

    return work


def steps(method, **options):
    x, y = data(139_000, 2)
    gp = method(x, y, kernel(2), Gaussian(0.1), num_neighbors=32, **options)
    return lambda: fit(gp, 20, batch_size=1024, refresh_every=0, solve_every=0, progress=False)


def solve(likelihood, size):
    x, y = data(size, 2)
    y = y if isinstance(likelihood, Gaussian) else (y > 0).to(x)
    gp = VNNGP(x, y, kernel(2), likelihood, num_neighbors=20)
    return gp.solve


def predict():
    x, y = data(139_000, 2)
    gp, new = Vecchia(x, y, kernel(2), Gaussian(0.1), num_neighbors=32), x[:10_000] + 1e-3
    return torch.no_grad()(lambda: gp.predict(new))


WORK = {
    "graph, N = 139,000, D = 2, K = 32": lambda: lambda: NeighborGraph(data(139_000, 2)[0], 32, progress=False),
    "graph, N = 100,000, D = 8, K = 32": lambda: lambda: NeighborGraph(data(100_000, 8)[0], 32, progress=False),
    "conditional and gradient, B = 1,024, K = 32": lambda: conditional(32),
    "conditional and gradient, B = 1,024, K = 128": lambda: conditional(128),
    "20 steps of VNNGP, mean-field, K = 32": lambda: steps(VNNGP, posterior="mean-field"),
    "20 steps of LOO, K = 32": lambda: steps(LOO),
    "solve for q(u), Gaussian, N = 20,000": lambda: solve(Gaussian(0.1), 20_000),
    "solve for q(u), labels, N = 5,000": lambda: solve(Bernoulli(), 5_000),
    "prediction at 10,000 points, K = 32": predict,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = [f"{n} thread{'s' * (n > 1)}: wall, processor [ms]" for n in args.threads]
    load = f"{os.cpu_count()} cores, load at the start {os.getloadavg()[0]:.1f}"
    lines = [
        f"{load}; least of {args.rounds} alternating rounds; torch {torch.__version__}.",
        "",
        f"| work | {' | '.join(names)} | wall: 1 / n |",
        "|---" * (len(args.threads) + 2) + "|",
    ]
    print("\n".join(lines), flush=True)
    for name, prepare in WORK.items():
        torch.set_num_threads(1)
        work, wall, processor = prepare(), {}, {}
        work()
        for _ in range(args.rounds):
            for count in args.threads:
                torch.set_num_threads(count)
                start = time.perf_counter(), time.process_time()
                work()
                wall.setdefault(count, []).append(time.perf_counter() - start[0])
                processor.setdefault(count, []).append(time.process_time() - start[1])
        cells = [f"{1e3 * min(wall[n]):.1f}, {1e3 * min(processor[n]):.1f}" for n in args.threads]
        ratios = ", ".join(f"{min(wall[args.threads[0]]) / min(wall[n]):.2f}" for n in args.threads[1:])
        lines.append(f"| {name} | {' | '.join(cells)} | {ratios} |")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
