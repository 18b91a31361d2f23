"""Everything that is worth knowing about the package on a GPU, in one command of at most ten minutes.

    python benchmarks/speed/gpu.py [--sections tests step ...] [--out benchmarks/results/gpu]

It runs the tests marked `gpu`, then measures, each section within its own seconds: plain calls beside the CPU of the
same machine, the conditional beside torch, as a part of the peak that a product of matrices reaches and of what memory
allows, shapes of its tiles, a training step beside GPyTorch's VNNGP (if GPyTorch is installed) at the same K, batch and
dtype, the graph of 10^7 points, VNNGP and LOO on 10^7 points with a refresh of their neighbors in steps, and five
methods at settings of their papers on real data (if PYRO_NNGP_DATA names them). After each row it writes OUT.md and
OUT.json, with the device and all versions; sections that are not run again stay. What fails, or has no time left, is a
row that says so.

`--smoke` measures nothing: it runs every section on tiny problems, on a CPU too. `pack_wheels.py` beside this file
packs what a machine without a network needs.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from pyro.infer import MCMC

import pyro_nngp
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.gpu import conditional as on_gpu
from pyro_nngp.gpu import installed
from pyro_nngp.hyperparameters import lognormal_priors
from pyro_nngp.inference import SGHMC, Minibatch, fit
from pyro_nngp.kernels import RBF, Matern, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, Poisson
from pyro_nngp.models import BSGP, LOO, NPVI, SWSGP, VNNGP, Vecchia
from pyro_nngp.neighbors import NeighborGraph, nearest_predecessors
from pyro_nngp.variational import MeanField

STEPS = [(1024, 32), (8192, 128), (65536, 32), (1024, 256), (65536, 256), (8192, 32), (1024, 128), (8192, 256)]
STEPS += [(65536, 128)]
ROOT = Path(__file__).parents[2]
SECONDS = {"tests": 150, "plain": 70, "conditional": 60, "tiles": 25, "step": 80, "graph": 20, "large": 100}
SECONDS["papers"] = 110


class Section:
    """The rows of a table, and the time that is left for more."""

    def __init__(self, name, seconds, smoke, keep):
        self.name, self.smoke, self.keep, self.rows = name, smoke, keep, []
        self.end = time.perf_counter() + seconds
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def add(self, row):
        """Add a row, and keep all so far."""
        self.rows.append(row)
        self.keep(self)

    def row(self, given, measure):
        """Add what `measure` returns, or why there is nothing."""
        if time.perf_counter() > self.end:
            self.add(given | {"note": "no time left"})
            return
        try:
            self.add(given | measure())
        except Exception as error:
            self.add(given | {"note": f"{type(error).__name__}: {error}"[:200]})
            if self.smoke and not isinstance(error, ImportError):
                raise
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def median(self, work, repeats=10):
        """Median milliseconds of some work, after a first time that compiles."""
        work()
        times = []
        for _ in range(1 if self.smoke else repeats):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
            if time.perf_counter() > self.end:
                break
        return statistics.median(times)

    def once(self, work):
        """Seconds of some work, and its result."""
        self.synchronize()
        start = time.perf_counter()
        result = work()
        self.synchronize()
        return time.perf_counter() - start, result


def plane(num_points, device, dtype=torch.float32):
    """Uniform points in a square with one unit of area each, and a response."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_points, 2, generator=generator, dtype=dtype) * num_points**0.5
    y = torch.sin(x[:, 0] / 10) + 0.1 * torch.randn(num_points, generator=generator, dtype=dtype)
    return x.to(device), y.to(device)


def tests(section):
    """The tests marked `gpu`, in processes side by side where pytest-xdist is installed."""
    if section.smoke or section.device.type == "cpu":
        section.add({"note": "need a GPU"})
        return
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    side_by_side = ["-n", str(min(12, os.cpu_count()))] if find_spec("xdist") else []
    command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += [*side_by_side, *files]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS["tests"])
    lines = found.stdout.strip().splitlines()
    section.add({"exit": found.returncode, "tests": lines[-1] if lines else found.stderr[-200:]})
    for line in lines:
        if line.startswith("FAILED"):
            section.add({"exit": found.returncode, "tests": line})


def plain(section):
    """`fit(gp)` without settings, float32, then 10,000 predictions, on the CPU of the machine and on its GPU.

    Seconds of both together the first time, which compiles kernels, then of each the second time.
    """
    places = 50 if section.smoke else 10_000
    methods = {"Vecchia": (Vecchia, {}), "VNNGP": (VNNGP, {}), "LOO": (LOO, {})}
    methods |= {"VNNGP, labels": (VNNGP, {"likelihood": Bernoulli}), "VNNGP, counts": (VNNGP, {"likelihood": Poisson})}
    sizes = [(name, 100 if section.smoke else 10_000) for name in methods]
    sizes += [] if section.smoke else [("Vecchia", 100_000)]
    devices = ["cpu"] if section.device.type == "cpu" else ["cuda", "cpu"]
    for (name, count), device in itertools.product(sizes, devices):
        given = {"method": name, "N": count, "device": device}
        section.row(given, lambda n=name, c=count, d=device: plain_row(section, *methods[n], c, places, d))


def plain_row(section, method, options, count, places, device):
    x, y = plane(count + places, "cpu")
    f = torch.sin(x[:, 0] / 10)
    likelihood = options.get("likelihood")
    torch.manual_seed(0)
    if likelihood is not None:
        y = torch.bernoulli((2 * f).sigmoid()) if likelihood is Bernoulli else torch.poisson((1 + f).exp())
    x, y, limit = x.to(device), y.to(device), 1 if section.smoke else 15

    def once():
        gp = method(x[:count], y[:count], **{name: made() for name, made in options.items()})
        fitted, result = section.once(lambda: fit(gp, progress=False, max_seconds=limit))
        with torch.no_grad():
            predicted, predictive = section.once(lambda: gp.predict(x[count:]))
            score = -predictive.log_prob(y[count:]).mean().item()
        row = {"fit s": round(fitted, 2), "steps": len(result.losses), "predict s": round(predicted, 2)}
        return row | {"NLL": round(score, 4)}

    first, row = section.once(once)
    return {"first s": round(first, 2)} | (once() if first < limit else row)


def problem(b, k, dtype, device, learned=False):
    """Inputs of a conditional on nearest neighbors, and a function that runs it with its gradient."""
    x, _ = plane(max(2 * b, 4 * k), device, dtype)
    rows = nearest_predecessors(x, k, start=len(x) - b, progress=False)
    made = Matern(2, lengthscale=10.0, smoothness=1.7) if learned else Matern52(2, lengthscale=10.0)
    kernel = made.to(device, dtype)
    noise = torch.full((len(x),), 0.01, dtype=dtype, device=device)

    def run():
        w, v = graph_conditional(kernel, x[-b:], x, rows, noise)
        (w.sum() + v.sum()).backward()

    return run


def peak(dtype, section):
    """Floating-point operations per second of a large product of matrices, without tensor cores for float32."""
    size = 64 if section.smoke else 8192
    a = torch.randn(size, size, dtype=dtype, device=section.device)
    return 2 * size**3 / (section.median(lambda: a @ a) / 1e3)


def bandwidth(section):
    """Bytes per second of a large copy, which reads and writes."""
    size = 2**10 if section.smoke else 2**28
    a = torch.empty(size, dtype=torch.float32, device=section.device)
    b = torch.empty_like(a)
    return 2 * 4 * size / (section.median(lambda: b.copy_(a)) / 1e3)


def conditional(section):
    """Forward and backward pass, Matern-5/2 or a Matern kernel whose smoothness is learned. Operations are those of one
    factorization, four substitutions and both covariance blocks. The bound is the largest share of the peak that memory
    allows: each neighbor is read, and each factor, if it is kept, written and read.
    """
    sizes = [(4, 4)] if section.smoke else list(itertools.product((1024, 8192, 65536), (32, 64, 128, 256)))
    for dtype in (torch.float32, torch.float64):
        most = peak(dtype, section), bandwidth(section)
        for b, k in sizes:
            learned_too = b == sizes[len(sizes) // 2][0]
            for learned, engine in itertools.product((False, True)[: 1 + learned_too], ("Triton", "torch")):
                kernel = "learned" if learned else "5/2"
                given = {"dtype": str(dtype)[6:], "B": b, "K": k, "smoothness": kernel, "engine": engine}
                section.row(
                    given,
                    lambda b=b, k=k, dtype=dtype, most=most, e=engine, learned=learned: engine_row(
                        section, e, b, k, dtype, learned, most
                    ),
                )


def engine_row(section, engine, b, k, dtype, learned, most):
    os.environ["PYRO_NNGP_TRITON"] = "1" if engine == "Triton" else "0"
    try:
        milliseconds = section.median(problem(b, k, dtype, section.device, learned), 5)
    finally:
        os.environ.pop("PYRO_NNGP_TRITON")
    operations = b * (k**3 / 3 + 2 * 2 * k**2 + 2 * k**2 / 2 * 20)  # factor, four substitutions, 20 per covariance
    size = dtype.itemsize
    kept = b * k * k * size if b * k * k * size <= on_gpu.FACTORS_BYTES else 0
    moved = 2 * b * k * (8 + 2 * size) + 2 * kept + 4 * b * k * size  # coordinates, factors, weights
    share = operations / (milliseconds / 1e3) / most[0]
    bound = min(1.0, operations / moved * most[1] / most[0])
    return {"ms": round(milliseconds, 3), "share of peak": round(share, 4), "bound": round(bound, 4)}


def tiles(section):
    """Other shapes of tiles than the ones in use."""
    if section.device.type == "cpu":
        section.add({"note": "need a GPU"})
        return
    usual = on_gpu.tiles
    for k, b in ((32, 65536), (64, 16384), (128, 8192), (256, 2048)):
        for rows, warps, registers in itertools.product((32, 64, 128), (1, 2, 4), (None, 128)):
            if not 32 <= 4 * rows // warps <= 256:
                continue
            shape = on_gpu.Tiles(16, rows, warps, 32 // warps, registers)
            given = {"K": k, "B": b, "rows": rows, "warps": warps, "registers": registers or "free"}
            given["in use"] = "yes" if usual(k)[1:3] == shape[1:3] and usual(k).registers == registers else ""
            on_gpu.tiles = lambda k, shape=shape: shape
            try:
                section.row(
                    given,
                    lambda b=b, k=k: {"ms": round(section.median(problem(b, k, torch.float32, section.device), 5), 3)},
                )
            finally:
                on_gpu.tiles = usual


def step(section):
    """A training step of VNNGP, mean-field, everything included, at D = 2 and one point per unit of area."""
    sizes = [(8, 4)] if section.smoke else STEPS
    for b, k in sizes:
        for system in ("ours", "GPyTorch"):
            section.row(
                {"B": b, "K": k, "system": system}, lambda b=b, k=k, system=system: step_row(section, b, k, system)
            )


def step_row(section, b, k, system):
    x, y = plane(2 * b if section.smoke else max(2 * b, 100_000), section.device)
    count = 2 if section.smoke else 20
    if system == "ours":
        gp = VNNGP(x, y, Matern52(2, lengthscale=10.0).to(x), Gaussian(0.1).to(x), num_neighbors=k, guide=MeanField())
        ticks = []
        follow = lambda *_: ticks.append(time.perf_counter())  # noqa: E731
        fit(gp, count + 5, batch_size=b, solve_every=0, lr=0.01, refresh_every=0, progress=False, callback=follow)
        times = [later - earlier for earlier, later in itertools.pairwise(ticks[4:])]
    else:
        times = gpytorch_steps(section, x, y, b, k, count)
    return {"ms": round(1e3 * statistics.median(times), 2)}


def gpytorch_steps(section, x, y, b, k, count):
    """GPyTorch's VNNGP with our graph: its own search is not what this table compares."""
    import peers  # beside this file
    from gpytorch.utils.nearest_neighbors import NNUtil

    def clock():
        section.synchronize()
        return time.perf_counter()

    peers.BATCH, peers.clock = b, clock
    NNUtil.build_sequential_nn_idx = lambda self, x: nearest_predecessors(x, k, start=k, progress=False)
    peer = peers.GPyTorch(x, y, k)
    peer.model.to(x.device)
    peer.likelihood.to(x.device)
    return peer.steps(count + 3)[3:]


def graph(section):
    """The neighbor graph of points in 2 and in 8 dimensions."""
    sizes = [(2, 500, 4), (8, 300, 4)] if section.smoke else [(2, 10**6, 32), (2, 10**7, 32), (8, 10**5, 32)]
    for dim, count, k in sizes:
        given = {"D": dim, "N": count, "K": k}
        section.row(given, lambda dim=dim, count=count, k=k: graph_row(section, dim, count, k))


def graph_row(section, dim, count, k):
    x = torch.rand(count, dim, device=section.device)
    seconds, found = section.once(lambda: NeighborGraph(x, k, progress=False))
    rows = torch.arange(count - 200, count, device=section.device)
    near = found.neighbors[found.order[rows]]
    want = nearest_predecessors(x[found.order].cpu(), k, start=count - 200, progress=False, backend="kdtree")
    same = torch.equal(found.order[want.to(x.device)], near)
    return {"s": round(seconds, 2), "200 rows as on the CPU": "yes" if same else "NO"}


def large(section):
    """Methods on many points: building, 300 steps of 8,192 rows, prediction at 10^6 places, a refresh in steps."""
    count, steps, batch, places = (400, 3, 64, 20) if section.smoke else (10**7, 300, 8192, 10**6)
    for method in (VNNGP, LOO):
        given = {"method": method.__name__, "N": count}
        section.row(given, lambda method=method: large_row(section, method, count, steps, batch, places))


def large_row(section, method, count, steps, batch, places):
    x, y = plane(count, section.device)
    k = 4 if section.smoke else 32
    build, gp = section.once(
        lambda: method(x, y, Matern52(2, lengthscale=10.0).to(x), Gaussian(0.1).to(x), num_neighbors=k)
    )
    train, _ = section.once(
        lambda: fit(gp, steps, batch_size=batch, lr=0.01, solve_every=0, refresh_every=0, progress=False)
    )
    x_new = x[:places] + 0.3
    with torch.no_grad():
        predict, (mean, _) = section.once(lambda: gp(x_new))
    refresh, _ = section.once(lambda: (gp.refresh_neighbors(), gp.graph.batch(None)))
    error = (mean - torch.sin(x_new[:, 0] / 10)).square().mean().sqrt().item()
    return {
        "build s": round(build, 1),
        "train s": round(train, 1),
        "predict s": round(predict, 1),
        "refresh s": round(refresh, 2),
        "refresh in steps": round(refresh / train * steps),
        "RMSE of f": round(error, 4),
    }


def papers(section):
    """The methods of the five papers on real data, standardized: K = 256 (NPVI 20, SWSGP 32 of 1,024 inducing points),
    300 epochs of 1,024 rows, or as far as time allows; BSGP, of one layer, SGHMC for as long. Vecchia in addition.
    """
    from pyro_nngp.data import Standardizer, load, random_split, rmse

    if section.smoke:
        sets = {"synthetic": (*plane(120, "cpu"), None)}
    elif "PYRO_NNGP_DATA" in os.environ:
        sets = dict.fromkeys(("elevators", "protein", "keggdirected", "kin40k"))
    else:
        section.add({"note": "PYRO_NNGP_DATA names no data"})
        return
    k = 4 if section.smoke else 256
    near, inducing = {"num_neighbors": k}, {"inducing": 40 if section.smoke else 1024}
    methods = {VNNGP: near, LOO: near, NPVI: {"num_neighbors": min(k, 20)}, BSGP: {}}
    methods |= {SWSGP: {"num_neighbors": min(k, 32)} | inducing, Vecchia: near}
    share = (section.end - time.perf_counter()) / (len(methods) * len(sets))
    for (name, given), (method, options) in itertools.product(sets.items(), methods.items()):

        def run(name=name, given=given, method=method, options=options):
            if given is None:
                data = load(name)
                x, y, mask = data.x.float(), data.y.float().reshape(len(data.x), -1)[:, 0], data.test_mask
            else:
                x, y, mask = given
            if mask is None:
                train, test = random_split(len(x), (0.8, 0.2), 0)
            else:
                inside = mask if mask.dim() == 1 else mask[:, 0]
                train, test = (~inside).nonzero()[:, 0], inside.nonzero()[:, 0]
            x, y = Standardizer(x[train]).transform(x), Standardizer(y[train]).transform(y)
            x, y = x.to(section.device), y.to(section.device)
            if method is BSGP:
                (x, y), seconds = (x.double(), y.double()), 1 if section.smoke else share
                seconds, (gp, done, draws) = section.once(lambda: bsgp_draws(section, x[train], y[train], seconds))
            else:
                gp = method(x[train], y[train], **options)
                draws, steps = None, (1 if section.smoke else 300) * max(1, len(train) // 1024)
                seconds, result = section.once(
                    lambda: fit(gp, steps, lr=0.03, batch_size=1024, max_seconds=share, progress=False)
                )
                done = f"{len(result.losses)} of {steps}"
            with torch.no_grad():
                predictive = gp.predict(x[test], samples=draws)
            score = -predictive.log_prob(y[test]).mean().item()
            error = rmse(y[test], predictive.mean).item()
            return {"steps": done, "s": round(seconds, 1), "RMSE": round(error, 4), "NLL": round(score, 4)}

        section.row({"data": name, "method": method.__name__}, run)


def bsgp_draws(section, x, y, seconds):
    """BSGP, the number of updates that some seconds allow, and 16 draws of SGHMC after as much burn-in."""
    prior = lognormal_priors(RBF(x.shape[1], lengthscale=torch.ones_like(x[0])), like=x)
    gp = BSGP(x, y, prior, num_layers=1, inducing=20 if section.smoke else 100)

    def sample(count, thin):
        kernel = SGHMC(gp.model, num_steps=thin, optim={"lr": 0.01}, init_strategy=gp.init_strategy)
        mcmc = MCMC(kernel, count, count, disable_progbar=True)
        mcmc.run(Minibatch(len(x), min(1000, len(x)), device=x.device))
        return mcmc.get_samples()

    of_forty, _ = section.once(lambda: sample(4, 5))
    thin = max(1, int(40 / 32 * seconds / of_forty)) if not section.smoke else 1
    return gp, f"{32 * thin} updates", sample(16, thin)


def versions():
    """The device, and versions of everything."""
    found = {"device": platform.processor() or platform.machine(), "python": platform.python_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
        found["CUDA"] = torch.version.cuda
    found |= {"torch": torch.__version__, "pyro_nngp": pyro_nngp.__version__}
    for name in ("pyro", "triton", "gpytorch"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = "not installed"
    return found | {"Triton in use": installed() and torch.cuda.is_available()}


def markdown(result, command):
    """All tables."""
    lines = ["# On a GPU", "", f"`{command}`. " + "; ".join(f"{k} {v}" for k, v in result["versions"].items()) + "."]
    for name, rows in result["sections"].items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        heading = ["", f"## {name}"] if name != next(iter(result["sections"])) else []  # none above the first table
        lines += [*heading, "", " ".join(SECTIONS[name].__doc__.split()), ""]
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(str(row.get(key, "")) for key in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


SECTIONS = {each.__name__: each for each in (tests, plain, conditional, tiles, step, graph, large, papers)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--smoke", action="store_true", help="tiny problems, nothing written")
    args = parser.parse_args()
    if not (args.smoke or torch.cuda.is_available()):
        parser.error("no CUDA device; --smoke runs without one")
    torch.backends.cuda.matmul.allow_tf32 = False
    command = "python benchmarks/speed/gpu.py" + (
        "" if len(args.sections) == len(SECTIONS) else " --sections " + " ".join(args.sections)
    )
    result, written = {"versions": versions(), "sections": {}}, args.out.with_suffix(".json")
    if written.exists() and not args.smoke:
        before = json.loads(written.read_text())
        result["sections"] = before["sections"] if before["versions"] == result["versions"] else {}

    def keep(section):
        found = result["sections"] | {section.name: section.rows}
        result["sections"] = {name: found[name] for name in SECTIONS if name in found}
        if not args.smoke:
            written.write_text(json.dumps(result, indent=1) + "\n")
            args.out.with_suffix(".md").write_text(markdown(result, command))

    for name in args.sections:
        section = Section(name, SECONDS[name], args.smoke, keep)
        start = time.perf_counter()
        try:
            SECTIONS[name](section)
        except Exception as error:
            section.add({"note": f"{type(error).__name__}: {error}"[:200]})
            if args.smoke:
                raise
        print(f"{name}: {time.perf_counter() - start:.0f} s, {len(section.rows)} rows", flush=True)
    print(markdown(result, command))


if __name__ == "__main__":
    main()
