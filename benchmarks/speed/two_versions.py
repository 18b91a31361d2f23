"""Time of a training step in two checkouts of the project, alternating in one run: the ratio of medians.

Usage: python benchmarks/speed/two_versions.py OLD NEW [--points 20000] [--neighbors 32] [--first 2]
       [--out FILE.md]. The first steps of each round are left out; `fit` replays from the 24th step on.
Times are those of the processor, which other processes disturb less.
Each checkout must have its compiled library (``python setup.py build_ext --inplace``). Every hyperparameter is set, so
that only steps are timed; arguments that one of the versions does not have are left out there.
"""

import argparse
import inspect
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pyro_nngp.variational import MeanField

METHODS = {
    "VNNGP": {"guide": MeanField()},  # the only guide of older versions
    "Vecchia": {},
    "LOO": {},
    "NPVI": {},
    "SVGP": {"inducing": 256},
    "SWSGP": {"inducing": 1024},
}


def worker(points, neighbors, first):
    """Read names of methods from the standard input; answer each with the milliseconds of some steps."""
    import torch

    from pyro_nngp import models
    from pyro_nngp.inference import fit
    from pyro_nngp.kernels import Matern52
    from pyro_nngp.likelihoods import Gaussian

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(points, 2, generator=generator) * points**0.5 / 10
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(points, generator=generator)
    # newer versions search neighbors anew as the kernel moves, unless told otherwise; older ones never do
    settings = {"refresh_every": 0} if "optimizer" in inspect.signature(fit).parameters else {}
    built = {}
    for line in sys.stdin:
        name, steps = line.split()
        if name not in built:
            method = getattr(models, name)
            wanted = METHODS[name] | {"num_neighbors": neighbors, "mean": lambda x: torch.zeros_like(x[:, 0])}
            known = inspect.signature(method.__init__).parameters
            kernel = Matern52(2, variance=torch.tensor(1.0), lengthscale=torch.tensor([1.0, 1.0]))
            arguments = {arg: value for arg, value in wanted.items() if arg in known}
            built[name] = method(x, y, kernel, Gaussian(0.1), **arguments)
        ticks = []
        fit(
            built[name],
            first + int(steps),
            batch_size=1024,
            solve_every=0,
            **settings,
            progress=False,
            callback=lambda *_, ticks=ticks: ticks.append(time.process_time()),
        )
        print(*(f"{1e3 * (b - a):.4f}" for a, b in itertools.pairwise(ticks[first:])), flush=True)


def start(checkout, folder, args):
    """A worker that imports a checkout, laid out as in the wheel."""
    package = folder / "pyro_nngp"
    package.mkdir(parents=True)
    for part in [*(checkout / "pyro_nngp").iterdir(), checkout / "models", checkout / "inference"]:
        (package / part.name).symlink_to(part)
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--worker", "--points", str(args.points), "--neighbors", str(args.neighbors)]
    command += ["--first", str(args.first)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def steps_of(process, name, steps):
    process.stdin.write(f"{name} {steps}\n")
    process.stdin.flush()
    return [float(value) for value in process.stdout.readline().split()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", type=Path, nargs="*")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--neighbors", type=int, default=32)
    parser.add_argument("--first", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.worker:
        worker(args.points, args.neighbors, args.first)
        return
    lines = ["| method | old step [ms] | new step [ms] | new / old |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        versions = [start(c.resolve(), Path(folder, str(i)), args) for i, c in enumerate(args.checkouts)]
        for name in args.methods:
            times = [[], []]
            for round_ in range(args.rounds + 1):
                for version, found in zip(versions, times, strict=True):
                    steps = steps_of(version, name, args.steps)
                    found += steps if round_ else []  # the first one warms up
            old, new = map(statistics.median, times)
            lines.append(f"| {name} | {old:.1f} | {new:.1f} | {new / old:.2f} |")
            print(lines[-1], flush=True)
        for version in versions:
            version.stdin.close()
            version.wait()
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
