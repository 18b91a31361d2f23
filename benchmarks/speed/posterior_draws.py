"""Processor seconds of predictions, joint draws and leave-one-out densities at posterior draws of all sites.

Several draws in one call, as methods do, beside one after the other, in turn; least of some repetitions.
Usage: python benchmarks/speed/posterior_draws.py [--draws 500] [--points 1000] [--repeat 3] [--out FILE]
"""

import argparse
import time
import warnings
from pathlib import Path
from unittest import mock

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroSample

from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import BSGP, LMC, LOO, SVGP, VNNGP, CoregionalizedLOO, Vecchia
from pyro_nngp.models.base import method
from pyro_nngp.models.base.draws import at_each_draw

N, K, M = 2_000, 15, 30


def prior(*shape):
    return PyroSample(dist.LogNormal(torch.full(shape, -1.0), 0.2).to_event(len(shape)))


def kernel():
    return Matern52(2, variance=prior(), lengthscale=prior(2))


def methods(x, y):
    yield "Vecchia", Vecchia(x, y, kernel(), Gaussian(prior()), num_neighbors=K)
    yield "LOO, labels", LOO(x, (y > 1).to(y), kernel(), Bernoulli(), num_neighbors=K)
    yield "VNNGP", VNNGP(x, y, kernel(), Gaussian(prior()), num_neighbors=K)
    two = torch.stack([y, -y], 1)
    yield "LMC, two outputs", LMC(x, two, [kernel(), kernel()], num_neighbors=K)
    yield "SVGP", SVGP(x, y, kernel(), Gaussian(prior()), inducing=M)
    yield "BSGP", BSGP(x, y, kernel(), Gaussian(prior()), inducing=M)
    yield "BSGP, two layers", BSGP(x, y, kernel(), Gaussian(prior()), inducing=M, num_layers=2)
    yield "CoregionalizedLOO, two outputs", CoregionalizedLOO(x, two, [kernel(), kernel()], num_neighbors=K)


def draws_of(gp, count):
    """Draws around one from the model: hyperparameters vary, latent values are the same."""
    found = {}
    for name, site in pyro.poutine.trace(gp.model).get_trace().nodes.items():
        latent = site["type"] == "sample" and not site["is_observed"] and name not in ("f", "omega_halo")
        if latent and isinstance(site["value"], torch.Tensor) and site["value"].is_floating_point():
            value = site["value"].detach()
            scale = torch.randn(count, *value.shape).mul(0.1 * ("kernel" in name or "likelihood" in name)).exp()
            found[name] = (gp.layers[int(name.split(".")[1])].start if name.endswith(".z") else value) * scale
    return found


def one_by_one(where, owner, samples, compute, entries):
    """Results at each posterior draw, without ``torch.vmap``."""
    return at_each_draw(where, owner, samples, compute, None)


def seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def main(draws, points, repeat, out):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # q(u) has not been solved for
    x, new = torch.rand(N, 2), torch.rand(points, 2)
    y = torch.sin(6 * x[:, 0]) + x[:, 1] + 0.1 * torch.randn(N)
    lines = [
        f"{draws} posterior draws of all sites, N = {N:,}, {points:,} new points (rows, for `loo`), K = {K}, M = {M}, "
        f"float32, one thread: processor seconds, least of {repeat}; together / one after the other.",
        "",
        "| method | `gp(x_new, samples=)` | `gp.sample` | `gp.loo` |",
        "|---|---|---|---|",
    ]
    for name, gp in methods(x, y):
        samples, rows = draws_of(gp, draws), torch.arange(points)
        calls = {
            "moments": lambda gp=gp, samples=samples: gp(new, samples=samples),
            "sample": lambda gp=gp, samples=samples: gp.sample(new, draws, samples=samples, seed=0),
        }
        posterior = gp.posterior(gp.bound())
        if posterior.loo_entries(posterior.others(rows, None)) is not None:
            calls["loo"] = lambda gp=gp, samples=samples, rows=rows: gp.loo(rows, samples=samples)
        cells = []
        for call in calls.values():
            times = {True: [], False: []}
            for _ in range(repeat):
                for together, each in zip(times, (at_each_draw, one_by_one), strict=True):
                    with mock.patch.object(method, "at_each_draw", each):
                        times[together].append(seconds(call))
            cells.append(" / ".join(f"{min(found):.2f}" for found in times.values()))
        lines.append(f"| {' | '.join([name, *cells, *[''] * (3 - len(cells))])} |")
        print(lines[-1], flush=True)
    command = f"`python benchmarks/speed/posterior_draws.py --draws {draws} --points {points} --repeat {repeat}`"
    text = "\n".join([*lines, "", f"{command}, torch {torch.__version__}, a shared machine of two cores.", ""])
    if out:
        Path(out).write_text(text)
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--points", type=int, default=1_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out")
    main(**vars(parser.parse_args()))
