"""What else peers do, beside ours: the neighbor graph, a leave-one-out step, a leave-one-out fit to equal accuracy.

graph: exact nearest predecessors of uniform points in random order; GPyTorch's loop over FAISS (`NNUtil`), and here the
compiled k-d tree (`auto` in these dimensions), and blocked FAISS; and whether GPyTorch's neighbors are the same, ties
and rounding apart.
loo: value and gradient of the leave-one-out density of 128 points given their K neighbors (Matern-5/2, a lengthscale
per input, D = 8, noise and variance learned), differentiated by torch through distances, kernel and Cholesky factor as
one would write it by hand, and by `graph_conditional` with and without compiled code; alternating, medians.
muygps: MuyGPyS's fit on elevators (leave-one-out loss, a lengthscale per input, L-BFGS on 200 points) and its scores,
then the legs of ours until the mean score is at most as large. Splits, inputs and held-out points are the same.

Usage: python benchmarks/speed/peers_other.py graph|loo|muygps [--clock process_time]; needs the `bench` extra, and
muygps the data in the folder that PYRO_NNGP_DATA names.
"""

import argparse
import os
import statistics
import time
from functools import partial

import numpy as np
import torch

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.data import Standardizer, load, nll, random_split, rmse
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import LOO
from pyro_nngp.neighbors import nearest_predecessors


def timed(clock, work):
    start = clock()
    result = work()
    return clock() - start, result


def graph(args, clock):
    from gpytorch.utils.nearest_neighbors import NNUtil

    print(
        "| N | D | K | GPyTorch [s] | compiled k-d tree [s] | FAISS [s] | GPyTorch / compiled | same neighbors |\n"
        + "|---" * 8
        + "|"
    )
    ways = {"compiled": "kdtree", "FAISS": "faiss"}
    for size, dim in ((139_000, 2), (100_000, 8)):
        x, k = torch.rand(size, dim, generator=torch.Generator().manual_seed(0)), 32
        times, found = {}, {}
        for way, backend in ways.items():
            search = partial(nearest_predecessors, x, k, backend=backend, progress=False)
            times[way], found[way] = timed(clock, search)
        peer, theirs = timed(clock, partial(NNUtil(k, dim).build_sequential_nn_idx, x))
        assert all(torch.equal(each, found["compiled"]) for each in found.values())
        same = float((found["compiled"][k:].sort(-1)[0] == theirs.sort(-1)[0]).float().mean())
        cells = (f"{size:,}", dim, k, f"{peer:.1f}", *(f"{t:.2f}" for t in times.values()))
        print(f"| {' | '.join(map(str, cells))} | {peer / times['compiled']:.1f} | {same:.5f} |", flush=True)


def by_hand(lengthscale, variance, noise, x, points, neighbors):
    """Weights and variances, with the distances that a batched product gives: the fastest that autograd has."""

    def kernel(a, b):
        squared = a.square().sum(-1)[..., None] + b.square().sum(-1)[..., None, :] - 2 * a @ b.mT
        s = (5 * squared.clamp(min=1e-12)).sqrt()
        return variance * (1 + s + s.square() / 3) * torch.exp(-s)

    z = (points[neighbors] - x[:, None]) / lengthscale
    system = kernel(z, z) + noise * torch.eye(z.shape[1])
    tril = torch.linalg.cholesky(system)
    half = torch.linalg.solve_triangular(tril, kernel(z, torch.zeros_like(z[:, :1])), upper=False)
    w = torch.linalg.solve_triangular(tril.mT, half, upper=True)[..., 0]
    return w, variance - half[..., 0].square().sum(-1)


class Step:
    """A leave-one-out step for K neighbors."""

    def __init__(self, k, size=5000, batch=128, dim=8):
        generator = torch.Generator().manual_seed(0)
        self.points = torch.rand(size, dim, generator=generator)
        self.y = torch.sin(6 * self.points[:, 0]) + 0.1 * torch.randn(size, generator=generator)
        self.rows = torch.arange(batch)
        self.neighbors = torch.cdist(self.points[:batch], self.points).topk(k + 1, largest=False)[1][:, 1:]
        self.parameters = [torch.full((dim,), 0.5), torch.tensor(1.0), torch.tensor(0.05)]

    def __call__(self, way):
        os.environ["PYRO_NNGP_NATIVE"] = str(int(way == "compiled"))
        lengthscale, variance, noise = (p.clone().requires_grad_() for p in self.parameters)
        x, y = self.points[self.rows], self.y[self.rows]
        if way == "by hand":
            w, var = by_hand(lengthscale, variance, noise, x, self.points, self.neighbors)
        else:
            kernel = Matern52(x.shape[1])
            del kernel.lengthscale, kernel.variance
            kernel.lengthscale, kernel.variance = lengthscale, variance
            w, var = graph_conditional(kernel, x, self.points, self.neighbors, noise.expand(len(self.y)))
        density = torch.distributions.Normal((w * self.y[self.neighbors]).sum(-1), (var + noise).sqrt()).log_prob(y)
        return torch.autograd.grad(density.sum(), (lengthscale, variance, noise))


def loo(args, clock):
    print("| K | by hand [ms] | torch [ms] | compiled [ms] | by hand / torch, compiled |\n" + "|---" * 5 + "|")
    for k in args.neighbors:
        step, times = Step(k), {way: [] for way in ("by hand", "torch", "compiled")}
        grads = {way: torch.cat([g.flatten() for g in step(way)]) for way in times}
        for way in ("torch", "compiled"):
            torch.testing.assert_close(
                grads[way], grads["by hand"], rtol=0.02, atol=0.02 * float(grads[way].abs().max())
            )
        for _ in range(args.rounds):
            for way in times:
                times[way].append(timed(clock, lambda: step(way))[0])  # noqa: B023
        ms = {way: 1e3 * statistics.median(t) for way, t in times.items()}
        ratios = ", ".join(f"{ms['by hand'] / ms[way]:.1f}" for way in ("torch", "compiled"))
        print(f"| {k} | {' | '.join(f'{t:.2f}' for t in ms.values())} | {ratios} |", flush=True)


def muygps(args, clock):
    from MuyGPyS.examples.regress import do_regress
    from MuyGPyS.gp.deformation import Anisotropy, l2
    from MuyGPyS.gp.hyperparameter import AnalyticScale, Parameter, VectorParam
    from MuyGPyS.gp.kernels import Matern
    from MuyGPyS.gp.noise import HomoscedasticNoise
    from MuyGPyS.optimize import L_BFGS_B_optimize

    data = load("elevators")
    train, _, test = random_split(len(data.x), (0.64, 0.16, 0.2), 1)
    x, y = Standardizer(data.x[train]).transform(data.x), Standardizer(data.y[train]).transform(data.y)
    dim = x.shape[1]
    arrays = [part.double().numpy() for part in (x[test], x[train], y[train])]
    lengthscales = VectorParam(*[Parameter(dim**0.5, (0.1, 100.0)) for _ in range(dim)])
    options = {
        "kernel": Matern(smoothness=Parameter(2.5), deformation=Anisotropy(metric=l2, length_scale=lengthscales)),
        "noise": HomoscedasticNoise(0.1, (1e-3, 1.0)),
        "scale": AnalyticScale(),
    }

    def peer():
        return do_regress(
            *arrays[:2],
            arrays[2],
            nn_count=32,
            batch_count=args.batch_count,
            opt_fn=L_BFGS_B_optimize,
            k_kwargs=options,
            nn_kwargs={"nn_method": "exact", "algorithm": "ball_tree"},
        )

    print("| system | seconds of fit and prediction | NLL | RMSE |\n|---|---|---|---|")
    seconds, (model, _, loc, var) = timed(clock, peer)
    loc, var = np.asarray(loc).reshape(-1), np.asarray(var).reshape(-1)
    var = var + float(model.noise()) * float(np.asarray(model.scale()).reshape(-1)[0])
    target = torch.distributions.Normal(torch.from_numpy(loc), torch.from_numpy(np.sqrt(var)))
    mark = float(nll(y[test].double(), target))
    print(f"| MuyGPyS | {seconds:.1f} | {mark:.3f} | {float(rmse(y[test].double(), target.mean)):.3f} |", flush=True)
    start, score, leg, gp = clock(), float("inf"), 0, None
    gp = LOO(
        x[train], y[train], Matern52(dim, lengthscale=torch.full((dim,), dim**0.5)), Gaussian(0.1), num_neighbors=32
    )
    while score > mark and leg < 20:
        fit(gp, 10, batch_size=args.batch_count, lr=0.1, seed=leg, progress=False)
        with torch.no_grad():
            predictive = gp.predict(x[test])
        score, leg = float(nll(y[test], predictive)), leg + 1
        cells = f"{clock() - start:.1f} | {score:.3f} | {float(rmse(y[test], predictive.mean)):.3f}"
        print(f"| LOO, {10 * leg} steps | {cells} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["graph", "loo", "muygps"])
    parser.add_argument("--neighbors", type=int, nargs="+", default=[32, 64, 128, 256], help="of loo")
    parser.add_argument("--rounds", type=int, default=15, help="of loo")
    parser.add_argument(
        "--batch-count", type=int, default=200, help="of muygps, points of the loss; MuyGPyS's own default"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["perf_counter", "process_time"], default="perf_counter")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.what}: {args.threads} threads, {args.clock}; torch {torch.__version__}.\n")
    {"graph": graph, "loo": loo, "muygps": muygps}[args.what](args, getattr(time, args.clock))


if __name__ == "__main__":
    main()
