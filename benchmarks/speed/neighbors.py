"""Time of orderings and of exact neighbor graphs over sizes, dimensions, orderings and backends.

Points are uniform in the unit cube, or those of a square grid in the plane, where most distances are ties.
Usage: python benchmarks/speed/neighbors.py [--sizes 139000] [--dims 2] [--neighbors 32] [--orderings random maximin]
[--backends auto] [--points uniform|grid] [--repeats 3] [--threads 2] [--out FILE]
"""

import argparse
import itertools
import time
from pathlib import Path

import torch

from pyro_nngp.neighbors import SearchIndex, make_ordering
from pyro_nngp.neighbors.ordering import ORDERINGS
from pyro_nngp.neighbors.search.index import BACKENDS


def make_points(kind, size, dim):
    if kind == "uniform":
        return torch.rand(size, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    side = torch.arange(round(size**0.5), dtype=torch.float64)
    return torch.cartesian_prod(side, side)


def timed(call, repeats):
    """Least wall and processor seconds of several runs, and the last result."""
    wall, processor = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        result = call()
        wall.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    return min(wall), min(processor), result


def row(args, size, dim, k, ordering, backend):
    x = make_points(args.points, size, dim)
    ordering_seconds, _, order = timed(lambda: make_ordering(x, ordering), args.repeats)
    x = x[order]

    def search():
        index = SearchIndex(x, backend=backend, progress=False)
        index.predecessors(k)
        return index.backend

    wall, processor, used = timed(search, args.repeats)
    cells = (f"{len(x):,}", x.shape[1], k, ordering, used)
    return (*cells, f"{ordering_seconds:.2f}", f"{wall:.2f}", f"{processor:.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[139_000])
    parser.add_argument("--dims", type=int, nargs="+", default=[2])
    parser.add_argument("--neighbors", type=int, nargs="+", default=[32])
    parser.add_argument("--orderings", nargs="+", choices=ORDERINGS, default=["random", "maximin", "coordinate"])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["auto"])
    parser.add_argument("--points", choices=("uniform", "grid"), default="uniform")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = [
        f"{args.points.capitalize()} points, {args.threads} threads, least of {args.repeats} runs; "
        f"torch {torch.__version__}.",
        "",
        "| N | D | K | ordering | backend | ordering [s] | search [s] | processor [s] |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for setting in itertools.product(args.sizes, args.dims, args.neighbors, args.orderings, args.backends):
        lines.append(f"| {' | '.join(map(str, row(args, *setting)))} |")
        print(lines[-1], flush=True)
    table = "\n".join(lines) + "\n"
    print("\n" + table)
    if args.out is not None:
        args.out.write_text(table)


if __name__ == "__main__":
    main()
