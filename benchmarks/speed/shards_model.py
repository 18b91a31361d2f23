"""Modelled step times and memory of sharded data on 8, 64 and 512 processes.

A step is the computation of a process, plus a reduction of 48 bytes (six numbers in two dimensions):

    NCCL, tree over InfiniBand    base + 2 log2(R) hops + bytes / bandwidth
    Gloo, ring over Ethernet      2 (R - 1) hops + bytes / bandwidth

with R processes. An iteration of conjugate gradients for q(u) at the data exchanges the halo twice, 8 bytes per row,
and takes two such reductions; a cell on the unit square has a perimeter of 4 / sqrt(R), with 3 rows of the halo per
distance of N^(-1/2) (1.7 and 2.9 were counted at 10^6 and 10^7 rows on two processes). With the preconditioner of all
rows it exchanges parts of the halo twice in each round besides. An exchange is a message to each process that owns a
row, and one back: up to 19 owners of a whole halo, some 8 of that of a round. Rounds at 10^6 rows and their growth with
rows are those that benchmarks/speed/shards_rounds.py counts.

Latencies of NCCL are those of its own cost model (src/graph/tuning.cc of NCCL 2.2x, trees with the LL
protocol: 6.8 us, and 5.0 us per hop over a network); 50 GB/s is a port of 400 Gb/s. One way through the TCP stack of a
kernel takes 10 to 30 us; 25 us and 10 Gb/s are taken. A message of Gloo costs .1 ms of the processor (measured: 190 us
for two processes, .9 ms for sixteen with two neighbors each, with everything around it). Computation and memory are
those measured with benchmarks/speed/shards.py, given here as arguments.

Run from the project root: ``python benchmarks/speed/shards_model.py``.
"""

import argparse
import math

BYTES = 48
NCCL_BASE, NCCL_HOP, NCCL_BANDWIDTH = 6.8e-6, 5.0e-6, 50e9
TCP_HOP, TCP_BANDWIDTH, TCP_MESSAGE = 25e-6, 1.25e9, 1e-4
OWNERS, OWNERS_PER_ROUND = 19, 8
ROUNDS = {8: (131, 20), 64: (166, 20), 512: (206, 26)}  # at 10^6 rows, and for each further factor of ten


def nccl(size):
    """Seconds of a reduction on that many processes."""
    return NCCL_BASE + 2 * math.log2(size) * NCCL_HOP + 2 * BYTES / NCCL_BANDWIDTH


def gloo(size):
    """Seconds of a reduction on that many processes."""
    return 2 * (size - 1) * TCP_HOP + 2 * BYTES / TCP_BANDWIDTH


def exchange(owners, halo, message, bandwidth):
    """Seconds of the two exchanges of a halo, one message after the other."""
    return 2 * (owners * message + 8 * halo / bandwidth)


def iteration(halo, size, rounds, message, bandwidth, reduction):
    """Seconds of communication in an iteration: with the preconditioner of own rows, and with that of all rows."""
    own = exchange(min(size - 1, OWNERS), halo, message, bandwidth) + 2 * reduction
    return own, own + rounds * exchange(min(size - 1, OWNERS_PER_ROUND), halo / rounds, message, bandwidth)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--step-ms", type=float, default=12.3, help="milliseconds of a step without rows")
    parser.add_argument("--row-us", type=float, default=1.07, help="microseconds of a step per row of the batch")
    parser.add_argument("--row-bytes", type=float, default=340.0, help="largest memory per own row")
    parser.add_argument("--base-mb", type=float, default=310.0, help="memory of training without rows")
    parser.add_argument("--iteration-us", type=float, default=0.33, help="microseconds of an iteration per own row")
    parser.add_argument("--cell-us", type=float, default=6.9, help="microseconds of a map per cell of the process")
    args = parser.parse_args()
    print("| processes | rows per step of each | computation ms | reduction, NCCL ms | reduction, Gloo ms |")
    print("|---|---|---|---|---|")
    for rows in (4096, 131_072):
        for size in (8, 64, 512):
            compute = args.step_ms + 1e3 * rows * args.row_us * 1e-6
            print(f"| {size} | {rows} | {compute:.2f} | {1e3 * nccl(size):.3f} | {1e3 * gloo(size):.2f} |")
    print("\n| rows of all | processes | rows, neighbors and search | random ordering, for a moment |")
    print("|---|---|---|---|")
    for rows in (10**7, 10**8, 10**9):
        for size in (8, 64, 512):
            own = args.base_mb / 1e3 + rows / size * args.row_bytes / 1e9
            print(f"| 10^{round(math.log10(rows))} | {size} | {own:.2f} GB | {7 * rows / 1e9:.2f} GB |")
    names = "NCCL ms: own rows", "all rows", "Gloo ms: own rows", "all rows"
    print(f"\n| rows of all | processes | halo rows | rounds | computation ms | {' | '.join(names)} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for rows in (10**7, 10**8, 10**9):
        for size in (8, 64, 512):
            halo, compute = 3 * 4 * math.sqrt(rows / size), 1e-3 * args.iteration_us * rows / size
            decades = round(math.log10(rows))
            rounds = ROUNDS[size][0] + (decades - 6) * ROUNDS[size][1]
            fast = iteration(halo, size, rounds, NCCL_HOP, NCCL_BANDWIDTH, nccl(size))
            slow = iteration(halo, size, rounds, TCP_MESSAGE, TCP_BANDWIDTH, gloo(size))
            times = " | ".join(f"{1e3 * part:.1f}" for part in (*fast, *slow))
            print(f"| 10^{decades} | {size} | {halo:.0f} | {rounds} | {compute:.1f} | {times} |")
    print("\n| cells | processes | s per process |")
    print("|---|---|---|")
    for size in (2, 8, 64, 512):
        print(f"| 10^8 | {size} | {1e8 / size * args.cell_us * 1e-6:.1f} |")


if __name__ == "__main__":
    main()
