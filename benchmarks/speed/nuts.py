"""NUTS on counts in space: effective draws per processor second, beside NumPyro and PyMC.

Counts at N uniform points of the unit square, log rate 1 + f; f from a Matern-3/2 nearest-neighbor process of variance
1 and lengthscale 0.2. The model is the same with a prior on each of the three: N(0, 2) on the intercept, logN(0, 1) on
the variance, logN(-1.5, 0.5) on the lengthscale; K = 15. White values and the defaults of NUTS (acceptance 0.8, depths
up to 10; PyMC's own warm-up) everywhere, float64, one chain, one thread:

    QuickNUTS, NUTS    Pyro, this package
    with AutoNNGP      QuickNUTS(model, guide=AutoNNGP(model)), half as many steps of warm-up
    NNGP               NumPyro: weights by batched Cholesky factors, f row by row in a scan (nuts_other.py)
    dense              NumPyro: a dense Cholesky factor
    HSGP               PyMC: a Hilbert-space approximation with 25 basis functions per column and c = 1.5

Effective draws are ArviZ's bulk ESS: the least of the three hyperparameters, and the median of f at 20 points. Seconds
are processor seconds, so that other work on the machine does not count: of everything, compilation included, and of the
draws after the warm-up, without it. A line in front of a row has the gradients per draw after the warm-up.

    gradients          milliseconds of a potential and its gradient instead: QuickNUTS beside NUTS, alternating, and
                       NumPyro's, compiled; least of --draws
    fixed              the same with all hyperparameters fixed
    two                two NNGP sites at 60 places, 300 iterations, QuickNUTS beside NUTS

Usage: python benchmarks/speed/nuts.py [gradients|fixed|two|beside] [--points 500 5000] [--draws 300] [--warmup 300]
           [--numpyro PYTHON] [--pymc PYTHON] [--dense] [--plain] [--pyro] [--cap SECONDS] [--only-others]; the
           interpreters are of environments that have them, and end after --cap processor seconds.
"""

import argparse
import resource
import signal
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, Predictive
from pyro.infer.mcmc.util import initialize_model

from pyro_nngp.distributions import NNGP, NNGPReparam
from pyro_nngp.inference import AutoNNGP, QuickNUTS, Recorder, to_arviz
from pyro_nngp.inference.mcmc.quick_nuts import RecordedPotential
from pyro_nngp.kernels import Matern32
from pyro_nngp.neighbors import NeighborGraph

F64, K, SHOWN = torch.float64, 15, 20
OTHERS = Path(__file__).with_name("nuts_other.py")


def number(value):
    return torch.tensor(value, dtype=F64)


def problem(num_points, seed=0):
    pyro.set_rng_seed(seed)
    graph = NeighborGraph(torch.rand(num_points, 2, dtype=F64), K)
    f = NNGP(Matern32(2, variance=number(1.0), lengthscale=number(0.2)), graph).sample()
    return graph, torch.poisson((1 + f).exp()).detach()


def model(graph, y):
    variance = pyro.sample("variance", dist.LogNormal(number(0.0), 1.0))
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(number(-1.5), 0.5))
    intercept = pyro.sample("intercept", dist.Normal(number(0.0), 2.0))
    f = pyro.sample("f", NNGP(Matern32(2, variance=variance, lengthscale=lengthscale), graph))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((intercept + f).exp()), obs=y)


def fixed(graph, y):
    """The same with all hyperparameters fixed, so that the weights of the prior are, too."""
    f = pyro.sample("f", NNGP(Matern32(2, variance=number(1.0), lengthscale=number(0.2)), graph))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((1.0 + f).exp()), obs=y)


def two_sites(graph, y):
    scales = pyro.sample("scales", dist.LogNormal(number(-1.0), 0.5).expand([2]).to_event(1))
    f = pyro.sample("f", NNGP(Matern32(2, lengthscale=scales[0]), graph))
    g = pyro.sample("g", NNGP(Matern32(2, lengthscale=scales[1]), graph))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(f, (0.5 * g).exp()), obs=y)


def whitened(program, *names):
    return pyro.poutine.reparam(program, config=dict.fromkeys(names, NNGPReparam()))


def chain(kernel, args, warmup, draws):
    """Draws, and the processor seconds of all and of those after the warm-up."""
    marks, recorder = [], Recorder()

    def hook(*state):
        recorder(*state)
        marks.append(time.process_time())

    mcmc = MCMC(kernel, draws, warmup, disable_progbar=True, hook_fn=hook)
    pyro.set_rng_seed(1)
    start = time.process_time()
    mcmc.run(*args)
    steps = to_arviz(mcmc, posterior_predictive=False, log_likelihood=False, progress=False).sample_stats["n_steps"]
    print(f"{float(steps.mean()):.0f} gradients per draw", flush=True)
    return mcmc.get_samples(), marks[-1] - start, marks[-1] - marks[warmup - 1]


def ours(name, kernel, args, options, warmup, parallel=True):
    draws, total, sampling = chain(kernel, args, warmup, options.draws)
    names = ("variance", "lengthscale", "intercept", "f")
    with torch.no_grad():
        found = draws | Predictive(kernel.model, draws, return_sites=names, parallel=parallel)(*args)
    kept = {site: found[site].reshape(options.draws).numpy() for site in names[:3]}
    report(name, len(args[1]), kept | {"f": found["f"].reshape(options.draws, -1)[:, :SHOWN].numpy()}, total, sampling)


def run_other(python, name, args, place, warmup, draws, cap=None):
    graph, y = args
    order = torch.cat(graph.levels()).numpy()
    np.savez(place, x=graph.x.numpy(), y=y.numpy(), neighbors=graph.neighbors.numpy(), order=order)
    command = [python, str(OTHERS), name, str(place), str(warmup), str(draws), str(SHOWN)]
    limit = None if cap is None else partial(resource.setrlimit, resource.RLIMIT_CPU, (cap, cap))
    subprocess.run(command, check=True, preexec_fn=limit)


def others(python, name, args, options):
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run.npz"
        try:
            run_other(python, name, args, place, options.warmup, options.draws, options.cap)
        except subprocess.CalledProcessError as error:
            if error.returncode not in (-signal.SIGXCPU, -signal.SIGKILL):
                raise
            print(f"| {name} | {len(args[1]):,} | no draws in {options.cap} |" + " |" * 7, flush=True)
            return
        with np.load(place) as found:
            kept = {site: found[site] for site in ("variance", "lengthscale", "intercept", "f")}
            report(name, len(args[1]), kept, float(found["total"]), float(found["sampling"]))


def report(name, num_points, draws, total, sampling):
    data = az.convert_to_dataset({site: values[None] for site, values in draws.items()})
    ess = az.ess(data)
    least = min(float(ess[site]) for site in ("variance", "lengthscale", "intercept"))
    middle = float(np.median(ess["f"]))
    means = [f"{draws[site].mean():.2f}" for site in ("variance", "lengthscale", "intercept")]
    cells = [name, f"{num_points:,}", f"{total:.0f}", f"{sampling:.0f}", f"{least:.0f}", f"{middle:.0f}"]
    cells += [f"{least / sampling:.2f}", f"{middle / sampling:.2f}", f"{middle / total:.2f}", ", ".join(means)]
    print(f"| {' | '.join(cells)} |", flush=True)


def beside(options):
    print(
        "| sampler | N | seconds | of these after warm-up | ESS, least hyperparameter | ESS, median f "
        "| ESS / s, hyperparameter | ESS / s, f | ESS / s of all, f | variance, lengthscale, intercept |\n"
        + "|---" * 10
        + "|"
    )
    for num_points in options.points:
        args = problem(num_points)
        if not options.only_others:
            guided = QuickNUTS(model, guide=AutoNNGP(model))
            ours("QuickNUTS with AutoNNGP", guided, args, options, options.warmup // 2, parallel=False)
        if options.plain:
            ours("QuickNUTS", QuickNUTS(model), args, options, options.warmup)
        if options.pyro:
            ours("NUTS", NUTS(whitened(model, "f")), args, options, options.warmup)
        if options.numpyro:
            others(options.numpyro, "NumPyro, NNGP", args, options)
        if options.numpyro and options.dense:
            others(options.numpyro, "NumPyro, dense", args, options)
        if options.pymc:
            others(options.pymc, "PyMC, HSGP", args, options)


def gradients(options, program=model):
    print("| N | NUTS [ms] | QuickNUTS [ms] | ratio | recording [ms] |\n|---|---|---|---|---|")
    for num_points in options.points:
        args = problem(num_points)
        start, potential, _, _ = initialize_model(whitened(program, "f"), args)
        begin = time.process_time()
        recorded = RecordedPotential(potential, start)
        recording = time.process_time() - begin
        times = {potential: [], recorded: []}
        for _ in range(options.draws):
            for each, seconds in times.items():
                leaves = [z.detach().requires_grad_() for z in start.values()]
                begin = time.process_time()
                torch.autograd.grad(each(dict(zip(start, leaves, strict=True))), leaves)
                seconds.append(time.process_time() - begin)
        plain, quick = (1e3 * min(seconds) for seconds in times.values())
        print(
            f"| {num_points:,} | {plain:.2f} | {quick:.2f} | {plain / quick:.1f} | {1e3 * recording:.0f} |", flush=True
        )
        for name in ("NumPyro, NNGP", *(["NumPyro, dense"] if options.dense else [])) if options.numpyro else ():
            with tempfile.TemporaryDirectory() as folder:
                run_other(options.numpyro, name, args, Path(folder) / "run.npz", 0, options.draws)


def two(options):
    pyro.set_rng_seed(0)
    graph = NeighborGraph(torch.rand(60, 2, dtype=F64), K)
    y = (6 * graph.x[:, 0]).sin() + 0.3 * torch.randn(60, dtype=F64)
    print("| sampler | processor seconds of 300 iterations | ESS, median of f |\n|---|---|---|")
    for name, kernel in (("QuickNUTS", QuickNUTS(two_sites)), ("NUTS", NUTS(whitened(two_sites, "f", "g")))):
        draws, total, _ = chain(kernel, (graph, y), 150, 150)
        f = Predictive(kernel.model, draws, return_sites=("f",), parallel=True)(graph, y)["f"].reshape(1, 150, 60)
        ess = float(np.median(az.ess(az.convert_to_dataset({"f": f.numpy()}))["f"]))
        print(f"| {name} | {total:.0f} | {ess:.0f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="beside", choices=["beside", "gradients", "fixed", "two"])
    parser.add_argument("--points", type=int, nargs="+", default=[500, 5000])
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--numpyro")
    parser.add_argument("--pymc")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--plain", action="store_true", help="QuickNUTS without a guide, too")
    parser.add_argument("--pyro", action="store_true")
    parser.add_argument("--cap", type=int, help="processor seconds of a run of another library")
    parser.add_argument("--only-others", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = {"beside": beside, "gradients": gradients, "fixed": partial(gradients, program=fixed), "two": two}
    runs[options.what](options)
