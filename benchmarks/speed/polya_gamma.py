"""Polya-Gamma draws beside the package `polyagamma`, and Gibbs sweeps at 100,000 points, on one thread.

Millions of draws per processor second, one draw for each of 200,000 tilts from N(0, 4), float64; the systems take turns
in processes of their own, and the best round counts. polyagamma chooses its method by itself: exact ones for b = 1 and
b < 1, a normal approximation for large b.

Usage: python benchmarks/speed/polya_gamma.py [gibbs] [--peer PYTHON] [--rounds 3]; PYTHON is of an environment that has
polyagamma (default: this one).
"""

import argparse
import subprocess
import sys
import time

import numpy as np

SIZE, CONCENTRATIONS = 200_000, (0.5, 1.0, 2.0, 3.0, 3.5, 20.0, 200.0)
TILTS = np.random.default_rng(0).normal(size=SIZE) * 2


def ours(b):
    import torch

    from pyro_nngp.distributions import PolyaGamma

    torch.set_num_threads(1)
    pg = PolyaGamma(torch.tensor(b, dtype=torch.float64), torch.as_tensor(TILTS))
    return pg.sample


def polyagamma(b):
    from polyagamma import random_polyagamma

    return lambda: random_polyagamma(b, TILTS)


SYSTEMS = {"ours": ours, "polyagamma": polyagamma}


def serve(system):
    for b in CONCENTRATIONS:
        draw, times = SYSTEMS[system](b), []
        draw()
        for _ in range(3):
            start = time.process_time()
            draw()
            times.append(time.process_time() - start)
        print(SIZE / min(times) / 1e6)


def beside(args):
    best = {system: np.zeros(len(CONCENTRATIONS)) for system in SYSTEMS}
    for _ in range(args.rounds):
        for system, found in best.items():
            python = args.peer if system == "polyagamma" else sys.executable
            done = subprocess.run([python, __file__, "--serve", system], check=True, capture_output=True, text=True)
            np.maximum(found, [float(line) for line in done.stdout.split()], out=found)
    print("| b | ours | polyagamma | ratio |\n|---|---|---|---|")
    for b, own, other in zip(CONCENTRATIONS, *best.values(), strict=True):
        print(f"| {b:g} | {own:.2f} | {other:.2f} | {own / other:.2f} |")


def gibbs(args):
    import pyro
    import pyro.distributions as dist
    import torch
    from pyro.infer import MCMC

    from pyro_nngp.distributions import NNGP
    from pyro_nngp.inference import PolyaGammaGibbs
    from pyro_nngp.kernels import Matern32
    from pyro_nngp.neighbors import NeighborGraph

    torch.set_num_threads(1)
    generator, count = torch.Generator().manual_seed(0), 100_000
    x = torch.rand(count, 2, generator=generator) * 30
    y = (torch.sin(x[:, 0]) + torch.cos(x[:, 1]) > torch.randn(count, generator=generator)).float()
    graph, kernel = NeighborGraph(x, 10), Matern32(2, variance=torch.tensor(1.0), lengthscale=torch.tensor(1.0))

    def model():
        f = pyro.sample("f", NNGP(kernel, graph, jitter=1e-3))
        with pyro.plate("data", count):
            pyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    ticks = []
    hook = lambda *_: ticks.append(time.process_time())  # noqa: E731
    MCMC(PolyaGammaGibbs(model), 10, 3, disable_progbar=True, hook_fn=hook).run()
    sweeps = np.diff(ticks)[2:]
    print(f"labels, N = {count:,}, K = 10: {np.median(sweeps):.2f} s a sweep, least {sweeps.min():.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="beside", choices=["beside", "gibbs"])
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    else:
        {"beside": beside, "gibbs": gibbs}[options.what](options)
