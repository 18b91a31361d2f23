"""Rounds of exchanges that a solve with the triangle of all rows takes, by rows and processes.

The round of a row is how often the longest chain of its dependencies crosses a border of cells; see
pyro_nngp/distributed/triangle.py. One process suffices: it has the graph of all rows and cuts it into cells.

Run from the project root: ``python benchmarks/speed/shards_rounds.py``.
"""

import argparse

import torch

from pyro_nngp.distributed.cells import Cells
from pyro_nngp.linalg.level_scheduling import dependency_levels
from pyro_nngp.neighbors import NeighborGraph


def count_rounds(graph, levels, cell):
    """Rounds, and rows and owners of the halos of all cells together."""
    number = torch.zeros(len(cell), dtype=torch.int64)
    for rows in levels:
        near = graph.neighbors[rows]
        crossed = cell[near.clamp(min=0)] != cell[rows][:, None]
        number[rows] = torch.where(near < 0, 0, number[near.clamp(min=0)] + crossed).amax(-1)
    away = graph.neighbors.clamp(min=0)
    is_away = (graph.neighbors >= 0) & (cell[away] != cell[:, None])
    rows, owners = ((cell[:, None] * len(cell) + part)[is_away].unique() for part in (away, cell[away]))
    return int(number.max()) + 1, len(rows), len(owners)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10**4, 10**5, 10**6])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 8, 64, 512])
    parser.add_argument("--neighbors", type=int, default=16)
    args = parser.parse_args()
    print("| rows | levels | processes | rounds | halo rows per process | processes that own them |")
    print("|---|---|---|---|---|---|")
    for rows in args.rows:
        x = torch.rand(rows, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        graph = NeighborGraph(x, args.neighbors, progress=False)
        levels = dependency_levels(graph.neighbors)
        for size in args.processes:
            rounds, halo, owners = count_rounds(graph, levels, Cells(x[: 2**16], size)(x))
            print(
                f"| {rows} | {len(levels)} | {size} | {rounds} | {halo / size:.0f} | {owners / size:.1f} |", flush=True
            )


if __name__ == "__main__":
    main()
