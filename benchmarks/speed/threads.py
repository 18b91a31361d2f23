"""What a second thread brings: search, conditional, step, solve and prediction on one thread and on several, in turns.

Each work runs on one thread and on several in alternation, for `--seconds` and three rounds at least. Wall times are
the least of the rounds, which other jobs disturb least; processor times are medians and grow with the threads by
spinning and by contention for caches. The last columns are ratios of wall times, 1 thread to n (2 would be ideal for 2
threads): of the least, and the median over the rounds. Where the two differ, or the load exceeds the threads in use,
the machine had other work and the row decides nothing; run it on an idle one.

Usage: python benchmarks/speed/threads.py [--threads 1 2] [--seconds 20] [--out FILE]
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import LOO, VNNGP, Vecchia
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational import MeanField


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
    rates = {"lr": 1e-6, "progress": False}  # many rounds of one method: parameters stay where they are
    return lambda: fit(gp, 20, batch_size=1024, refresh_every=0, solve_every=0, **rates)


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
    "20 steps of VNNGP, mean-field, K = 32": lambda: steps(VNNGP, guide=MeanField()),
    "20 steps of LOO, K = 32": lambda: steps(LOO),
    "solve for q(u), Gaussian, N = 20,000": lambda: solve(Gaussian(0.1), 20_000),
    "solve for q(u), labels, N = 5,000": lambda: solve(Bernoulli(), 5_000),
    "prediction at 10,000 points, K = 32": predict,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=20, help="of each work, all thread counts together")
    parser.add_argument("--works", nargs="+", default=list(WORK), help="rows that contain one of these words")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = [f"{n} thread{'s' * (n > 1)}: wall, processor [ms]" for n in args.threads]
    lines = [
        "# Two threads",
        "",
        f"{os.cpu_count()} cores; {args.seconds:g} s of alternating rounds each; torch {torch.__version__}.",
        "Wall times are the least of the rounds, processor times medians. The last ratios are wall times on one thread",
        "to those on n: more than 1 where threads help.",
        "`python benchmarks/speed/threads.py`.",
        "",
        f"| work | {' | '.join(names)} | least: 1 / n | median: 1 / n | rounds, load |",
        "|---" * (len(args.threads) + 4) + "|",
    ]
    print("\n".join(lines), flush=True)
    for name, prepare in WORK.items():
        if not any(word in name for word in args.works):
            continue
        torch.set_num_threads(1)
        work = prepare()
        work()
        wall, processor, begin = {n: [] for n in args.threads}, {n: [] for n in args.threads}, time.perf_counter()
        while len(wall[args.threads[-1]]) < 3 or time.perf_counter() - begin < args.seconds:
            for count in args.threads:
                torch.set_num_threads(count)
                start = time.perf_counter(), time.process_time()
                work()
                wall[count].append(time.perf_counter() - start[0])
                processor[count].append(time.process_time() - start[1])
        one = args.threads[0]
        cells = [f"{1e3 * min(wall[n]):.1f}, {1e3 * statistics.median(processor[n]):.1f}" for n in args.threads]
        cells.append(", ".join(f"{min(wall[one]) / min(wall[n]):.2f}" for n in args.threads[1:]))
        paired = [[a / b for a, b in zip(wall[one], wall[n], strict=True)] for n in args.threads[1:]]
        cells.append(", ".join(f"{statistics.median(ratios):.2f}" for ratios in paired))
        lines.append(f"| {name} | {' | '.join(cells)} | {len(wall[one])}, {os.getloadavg()[0]:.1f} |")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
