"""Seconds for a map: ``predict_grid`` beside PyKrige's moving window and GPBoost, with the same hyperparameters.

Usage: python benchmarks/speed/maps.py [--stations 20000] [--cells 100000] [--large 10000000] [--neighbors 32]
    [--rounds 3] [--out maps.md]

Simulated stations in the plane and a square grid of cells; an exponential covariance whose parameters all three are
given, so nothing is trained; mean and standard deviation of f at each cell from K neighbors. Processor time, one
thread, alternating. The large map is ours alone: written to NetCDF, with the memory that the process took.
"""

import argparse
import math
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

VARIANCE, NOISE, LENGTHSCALE = 2.0, 0.1, 0.05


def stations(number):
    rng = np.random.default_rng(0)
    x = rng.random((number, 2))
    waves = rng.normal(0, 1 / LENGTHSCALE, (200, 2)) / 2
    f = np.sqrt(VARIANCE / 100) * np.cos(x @ waves.T + rng.uniform(0, 2 * np.pi, 200)).sum(1)
    return x, f + np.sqrt(NOISE) * rng.standard_normal(number)


def axis(cells):
    side = math.isqrt(cells)
    return (np.arange(side) + 0.5) / side


def process(x, y, neighbors):
    import torch

    import pyro_nngp as nngp
    from pyro_nngp.kernels import Matern12
    from pyro_nngp.likelihoods import Gaussian
    from pyro_nngp.means import ConstantMean

    torch.set_num_threads(1)
    kernel, mean = Matern12(2, VARIANCE, LENGTHSCALE), ConstantMean(0.0)
    return nngp.Vecchia(x, y, kernel, Gaussian(NOISE), mean=mean, num_neighbors=neighbors)


def ours(x, y, places, neighbors):
    import pyro_nngp as nngp

    gp = process(x, y, neighbors)
    nngp.predict_grid(gp, {"x": places[:2], "y": places[:2]})  # imports and the search index, which the others have too
    start = time.process_time()
    found = nngp.predict_grid(gp, {"x": places, "y": places}, of="f", num_neighbors=neighbors, progress=False)
    return time.process_time() - start, found["mean"].values, found["sd"].values


def pykrige(x, y, places, neighbors):
    from pykrige.ok import OrdinaryKriging

    parameters = {"sill": VARIANCE + NOISE, "range": 3 * LENGTHSCALE, "nugget": NOISE}
    model = OrdinaryKriging(*x.T, y, "exponential", parameters, exact_values=False)
    start = time.process_time()
    mean, variance = model.execute("grid", places, places, backend="C", n_closest_points=neighbors)
    return time.process_time() - start, np.asarray(mean), np.sqrt(np.maximum(np.asarray(variance) - NOISE, 0))


def gpboost(x, y, places, neighbors):
    import gpboost as gpb

    model = gpb.GPModel(
        gp_coords=x,
        cov_function="exponential",
        likelihood="gaussian",
        gp_approx="vecchia",
        num_neighbors=neighbors,
        num_parallel_threads=1,
    )
    model.set_prediction_data(num_neighbors_pred=neighbors, vecchia_pred_type="order_obs_first_cond_obs_only")
    north, east = np.meshgrid(places, places, indexing="ij")
    cells = np.stack([east.ravel(), north.ravel()], 1)
    parameters = np.array([NOISE, VARIANCE, LENGTHSCALE])
    start = time.process_time()
    found = model.predict(gp_coords_pred=cells, y=y, cov_pars=parameters, predict_var=True, predict_response=False)
    seconds = time.process_time() - start
    return seconds, found["mu"].reshape(north.shape), np.sqrt(found["var"]).reshape(north.shape)


def large(stations_number, cells, neighbors):
    import pyro_nngp as nngp

    gp = process(*stations(stations_number), neighbors)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    with tempfile.TemporaryDirectory() as folder:
        start, wall = time.process_time(), time.perf_counter()
        places = axis(cells)
        path = Path(folder, "map.nc")
        nngp.predict_grid(gp, {"x": places, "y": places}, of="f", num_neighbors=neighbors, path=path).close()
        seconds, wall = time.process_time() - start, time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    times = f"{seconds:.0f} s of the processor, {wall:.0f} s of wall time"
    return f"{len(places) ** 2:,} cells in {times} and {after - before:.2f} GiB"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stations", type=int, default=20_000)
    parser.add_argument("--cells", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=10_000_000)
    parser.add_argument("--neighbors", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    x, y = stations(args.stations)
    places, seconds, found = axis(args.cells), {}, {}
    for _ in range(args.rounds):
        for run in (ours, pykrige, gpboost):
            with multiprocessing.get_context("spawn").Pool(1) as pool:  # allocators and threads of their own
                taken, *found[run.__name__] = pool.apply(run, (x, y, places, args.neighbors))
            seconds.setdefault(run.__name__, []).append(taken)
            print(run.__name__, round(taken, 2), flush=True)
    lines = ["| | s per million cells | mean: rms difference / sd | sd: median ratio |", "|---|---|---|---|"]
    for name, times in seconds.items():
        mean, sd = found[name]
        error = np.sqrt(np.mean((mean - found["ours"][0]) ** 2)) / np.median(found["ours"][1])
        per_million = 1e6 * statistics.median(times) / len(places) ** 2
        lines.append(f"| {name} | {per_million:.1f} | {error:.4f} | {np.median(sd / found['ours'][1]):.4f} |")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        lines += [
            "",
            f"`ours`, to NetCDF: {pool.apply(large, (args.stations, args.large, args.neighbors))} above the model.",
        ]
    text = "\n".join(lines)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
