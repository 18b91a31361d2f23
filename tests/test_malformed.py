"""Malformed arguments at every entrance end in an error of the package: no silence, no crash, no hang, few others.

Each argument of each entrance is replaced by each value of a table, in a forked process of limited memory and time.
"""

import contextlib
import os
import re
import resource
import select
import signal
import time
import warnings
from collections import Counter

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from pyro_nngp import kernels, likelihoods, models
from pyro_nngp.data import datasets, metrics
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import SGHMC, SGMCMC, fit, to_arviz
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.neighbors import NeighborGraph

X = torch.rand(12, 2, generator=torch.Generator().manual_seed(0))
Y = torch.sin(5 * X[:, 0])
LABELS = (Y > 0.5).float()
NAN, INF = float("nan"), float("inf")

MALFORMED = {
    "None": None,
    "False": False,
    "-1": -1,
    "0": 0,
    "2.5": 2.5,
    "10**12": 10**12,
    "nan": NAN,
    "inf": INF,
    "1e-30": 1e-30,
    "complex": 1j,
    "text": "text",
    "bytes": b"x",
    "list": [],
    "list of text": ["a"],
    "dict": {},
    "object": object(),
    "class": torch.nn.Linear,
    "function of nothing": lambda: 0,
    "function": lambda *args: args[0],
    "scalar": torch.tensor(0.3),
    "no entries": torch.zeros(0),
    "no rows": torch.zeros(0, 2),
    "a vector": torch.ones(12),
    "too many columns": torch.ones(12, 3),
    "three dimensions": torch.ones(2, 12, 2),
    "integers": torch.ones(12, 2, dtype=torch.int64),
    "row numbers": torch.arange(12),
    "booleans": torch.ones(12, dtype=torch.bool),
    "complex tensor": torch.ones(12, 2, dtype=torch.complex64),
    "float16": X.half(),
    "bfloat16": X.bfloat16(),
    "float64": X.double(),
    "sparse": X.to_sparse(),
    "meta": X.to("meta"),
    "NaN tensor": torch.full((12, 2), NAN),
    "infinite tensor": torch.full((12, 2), INF),
    "NaN vector": torch.full((12,), NAN),
    "huge": torch.full((12, 2), 1e38),
    "array": np.ones((12, 2)),
}


def vecchia(**options):
    arguments = {"x": X, "y": Y, "kernel": kernels.Matern52(2), "likelihood": likelihoods.Gaussian(0.1)}
    return models.Vecchia(**(arguments | {"num_neighbors": 3} | options))


def method(cls, **given):
    def build(**options):
        arguments = {"x": X, "y": Y, "kernel": kernels.Matern52(2), "likelihood": likelihoods.Gaussian(0.1)}
        gp = cls(**(arguments | given | options))
        gp.model()
        return gp

    return build, ["x", "y", "kernel", "likelihood", *given]


def kernel(cls):
    def build(**options):
        return cls(**({"input_dim": 2} | options))(X)

    return build, ["input_dim", "variance", "lengthscale", "active_dims"]


def likelihood(cls, *names):
    def build(**options):
        return cls(**options)(Y.abs())

    return build, list(names)


def call(function, **arguments):
    return lambda **options: function(**(arguments | options)), list(arguments)


GP = vecchia()
VNNGP = models.VNNGP(X, LABELS, kernels.Matern52(2), likelihoods.Bernoulli(), num_neighbors=3)
SAMPLES = {"kernel.variance": torch.ones(3)}


def train(**options):
    return fit(**({"method": vecchia(), "num_steps": 1, "progress": False} | options))


def sgmcmc(**options):
    mcmc = SGMCMC(**({"kernel": SGHMC(GP.model, 0.01), "num_samples": 1, "disable_progbar": True} | options))
    mcmc.run()


PREDICTION = ["x_new", "num_neighbors", "samples"]
ENTRANCES = {
    "RBF": kernel(kernels.RBF),
    "Matern52": kernel(kernels.Matern52),
    "Periodic": call(lambda **o: kernels.Periodic(**o)(X), input_dim=2, period=1.0, lengthscale=1.0, variance=1.0),
    "Constant": (lambda **o: kernels.Constant(**({"input_dim": 2} | o))(X), ["input_dim", "variance"]),
    "kernel()": call(kernels.Matern52(2), x=X, z=X),
    "Gaussian": likelihood(likelihoods.Gaussian, "variance"),
    "Bernoulli": likelihood(likelihoods.Bernoulli, "link"),
    "Poisson": likelihood(likelihoods.Poisson, "link"),
    "StudentT": likelihood(likelihoods.StudentT, "df", "scale"),
    "NeighborGraph": call(
        lambda **o: NeighborGraph(**o).neighbors, x=X, num_neighbors=3, ordering="random", metric=torch.ones(2)
    ),
    "NNGP": call(lambda **o: NNGP(**o).log_prob(Y), kernel=kernels.Matern52(2), graph=NeighborGraph(X, 3), jitter=1e-6),
    "NNGP.log_prob": call(lambda value: NNGP(kernels.Matern52(2), NeighborGraph(X, 3)).log_prob(value), value=Y),
    "Vecchia": method(models.Vecchia, num_neighbors=3, mean=None, jitter=None),
    "LOO": method(models.LOO, num_neighbors=3, mean=None),
    "VNNGP": method(models.VNNGP, num_neighbors=3, mean=None, inducing=None),
    "NPVI": method(models.NPVI, num_neighbors=3),
    "SWSGP": method(models.SWSGP, inducing=5, num_neighbors=3),
    "SVGP": method(models.SVGP, inducing=5),
    "forward": (lambda **o: GP(**({"x_new": X} | o)), PREDICTION),
    "VNNGP.forward": (lambda **o: VNNGP(**({"x_new": X} | o)), PREDICTION),
    "predict": (lambda **o: GP.predict(**({"x_new": X} | o)).mean, PREDICTION),
    "sample": (lambda **o: GP.sample(**({"x_new": X, "num_samples": 2} | o)), [*PREDICTION, "num_samples", "seed"]),
    "VNNGP.sample": (lambda **o: VNNGP.sample(**({"x_new": X, "num_samples": 2} | o)), ["x_new", "num_samples"]),
    "model": call(lambda idx: GP.model(idx), idx=None),
    "fit": (
        train,
        ["method", "num_steps", "batch_size", "lr", "refresh_every", "solve_every", "num_data", "checkpoint", "seed"],
    ),
    "SGHMC": call(lambda **o: SGHMC(**o), model=GP.model, step_size=0.01, friction=0.1),
    "SGMCMC": (sgmcmc, ["kernel", "num_samples", "warmup_steps", "num_chains", "checkpoint", "checkpoint_every"]),
    "to_arviz": call(lambda method, **o: to_arviz(method, **o), method=VNNGP, num_samples=2, seed=0),
    "load": call(datasets.load, name="none"),
    "nll": call(metrics.nll, predictive=dist.Normal(Y, 1.0), y=Y),
}
CASES = [(entrance, arg, name) for entrance, (_, args) in ENTRANCES.items() for arg in args for name in MALFORMED]
OURS = re.compile(r"[\w.\[\]() ]+: expected .+, got .+", re.DOTALL)
PROPAGATE = {"kernel()", "NNGP.log_prob", "nll"}  # NaN for NaN
SECONDS, BYTES = 20, 2**32


def outcome(entrance, arg, name):
    """What comes of one call: "fine", "ours", "silent", or the type and the message of a foreign error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = ENTRANCES[entrance][0](**{arg: MALFORMED[name]})
    except (NotPositiveDefiniteError, ImportError):
        return "ours"
    except Exception as error:
        return "ours" if OURS.match(str(error)) else f"{type(error).__name__}: {error!s:.150}"
    if entrance in PROPAGATE:
        return "fine"
    leaves = result if isinstance(result, tuple) else (result,)
    values = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return "fine" if all(bool(value.isfinite().all()) for value in values if not value.is_meta) else "silent"


def forked(*case):
    """The outcome of a case in a process of its own, or how that ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(read)
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
            resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os.write(write, outcome(*case).encode()[:4000])
        os._exit(0)
    os.close(write)
    deadline, found = time.monotonic() + SECONDS, b""
    while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(read, 4096)
        found += part
        if not part:
            break
    else:
        os.kill(child, signal.SIGKILL)
        found = b"hang"
    os.close(read)
    _, status = os.waitpid(child, 0)
    if found:
        return found.decode()
    return f"crash by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "crash"


@pytest.mark.slow
def test_malformed_arguments_end_in_errors_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {case: forked(*case) for case in CASES}
    kinds = Counter(result.split(":")[0] for result in found.values())
    bad = {case: result for case, result in found.items() if result == "silent" or result.startswith(("crash", "hang"))}
    foreign = {case: result for case, result in found.items() if result not in ("fine", "ours")}
    assert not bad, f"{kinds}: {bad}"
    assert len(foreign) <= 0.01 * len(CASES), f"{kinds}: {foreign}"
