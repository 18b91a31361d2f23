"""Each argument of each entrance of the package with each malformed value, in forked processes."""

import contextlib
import os
import re
import resource
import select
import signal
import warnings
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC

import pyro_nngp as nngp
from pyro_nngp import kernels, likelihoods, models
from pyro_nngp.conditionals import graph_conditional, nn_conditional
from pyro_nngp.data import datasets, metrics, preprocessing
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import (
    SGHMC,
    SGLD,
    SGMCMC,
    SGNHT,
    Cyclical,
    Minibatch,
    PointwiseLogLikelihood,
    PolyaGammaGibbs,
    compare_to_exact,
    coverage_curve,
    elpd,
    fit,
    pit,
    psis_khat,
    reliability,
    sbc_ranks,
    sbc_to_arviz,
    symmetry,
    to_arviz,
    uniformity,
)
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


KERNEL, GAUSSIAN = kernels.Matern52(2), likelihoods.Gaussian(0.1)


def call(function, *names, **arguments):
    """A function of its arguments, and their names; those that have a default are named alone."""
    return lambda **options: function(**(arguments | options)), [*arguments, *names]


def method(cls, *names, **given):
    def build(**options):
        gp = cls(**options)
        gp.model()
        return gp

    return call(build, *names, **({"x": X, "y": Y, "kernel": KERNEL, "likelihood": GAUSSIAN} | given))


def kernel(cls, *names):
    return call(lambda **o: cls(**o)(X), *names, "active_dims", input_dim=2)


def likelihood(cls, *names, y=LABELS):
    """A likelihood at work in a model, where the shapes of its hyperparameters meet those of f."""
    return call(lambda **o: models.VNNGP(X, y, KERNEL, cls(**o), num_neighbors=3).model(), *names)


def latent_model():
    f = pyro.sample("f", NNGP(KERNEL, GRAPH))
    return pyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=LABELS)


def level_model(idx=None):
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 12, subsample=idx):
        pyro.sample("y", dist.Normal(level, 1.0), obs=Y if idx is None else Y[idx])


def level_guide(idx=None):
    pyro.sample("level", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))


def train(**options):
    limits = {"max_seconds": 0.2, "progress": False}
    return fit(**({"method": VNNGP, "num_steps": 1} | limits | options)).losses


def sample_chain(**options):
    SGMCMC(**({"disable_progbar": True} | options)).run()


def sample_exactly(**options):
    MCMC(PolyaGammaGibbs(**options), num_samples=1, warmup_steps=0, disable_progbar=True).run()


def bsgp(**options):
    return models.BSGP(X, Y, KERNEL, GAUSSIAN, inducing=4, inducing_prior=None, **options)


GRAPH = NeighborGraph(X, 3)
GP = models.Vecchia(X, Y, KERNEL, GAUSSIAN, num_neighbors=3)
VNNGP = models.VNNGP(X, LABELS, KERNEL, likelihoods.Bernoulli(), num_neighbors=3)
BSGP = bsgp()
DRAWS = {"layers.0.nu": torch.zeros(2, 4)}
TRANSFORMS = torch.linspace(0.01, 0.99, 12)
STATIONARY = ("variance", "lengthscale")
NEIGHBORS = {"num_neighbors": 3}
ENTRANCES = {
    "RBF": kernel(kernels.RBF, *STATIONARY),
    "Matern12": kernel(kernels.Matern12, *STATIONARY),
    "RationalQuadratic": kernel(kernels.RationalQuadratic, "scale_mixture"),
    "Periodic": kernel(kernels.Periodic, *STATIONARY, "period"),
    "Constant": kernel(kernels.Constant, "variance"),
    "Linear": kernel(kernels.Linear, "variance"),
    "VerticalScaling": call(kernels.VerticalScaling, kern=KERNEL, vscaling_fn=lambda x: x[..., 0]),
    "Sum": call(kernels.Sum, kern0=KERNEL, kern1=KERNEL),
    "kernel()": call(KERNEL, x=X, z=X),
    "Gaussian": likelihood(likelihoods.Gaussian, "variance"),
    "StudentT": likelihood(likelihoods.StudentT, "df", "scale"),
    "Gamma": likelihood(likelihoods.Gamma, "concentration", y=Y.abs() + 1),
    "LogNormal": likelihood(likelihoods.LogNormal, "variance", y=Y.abs() + 1),
    "Bernoulli": likelihood(likelihoods.Bernoulli, "link"),
    "Poisson": likelihood(likelihoods.Poisson, "link"),
    "Binomial": likelihood(likelihoods.Binomial, "total_count"),
    "NegativeBinomial": likelihood(likelihoods.NegativeBinomial, "total_count"),
    "Categorical": likelihood(likelihoods.Categorical, "num_classes"),
    "Ordinal": likelihood(likelihoods.Ordinal, "cutpoints"),
    "NeighborGraph": call(
        lambda **o: NeighborGraph(**o).neighbors,
        *("metric", "seed", "neighbors", "backend"),
        **{"x": X, "num_neighbors": 3, "ordering": "random"},
    ),
    "NNGP": call(lambda **o: NNGP(**o).log_prob(Y), "batch", "points", "jitter", kernel=KERNEL, graph=GRAPH),
    "NNGP.log_prob": call(NNGP(KERNEL, GRAPH).log_prob, value=Y),
    "NNGP.predict": call(lambda **o: NNGP(KERNEL, GRAPH).predict(**o).mean, "num_neighbors", x_new=X, f=Y),
    "NNGP.sample_new": call(NNGP(KERNEL, GRAPH).sample_new, "num_neighbors", "seed", "neighbors", x_new=X, f=Y),
    "nn_conditional": call(nn_conditional, "mask", "noise", "jitter", kernel=KERNEL, x=X, z=X[None].expand(12, 12, 2)),
    "graph_conditional": call(
        graph_conditional, "noise", "jitter", kernel=KERNEL, x=X, points=X, neighbors=GRAPH.neighbors
    ),
    "Vecchia": method(models.Vecchia, "mean", "jitter", "metric", "start", "seed", **NEIGHBORS),
    "LOO": method(models.LOO, "mean", **NEIGHBORS),
    "MLLk": method(models.MLLk, **NEIGHBORS),
    "VNNGP": method(models.VNNGP, "mean", "inducing", "guide_neighbors", **NEIGHBORS),
    "NPVI": method(models.NPVI, **NEIGHBORS),
    "SWSGP": method(models.SWSGP, inducing=5, **NEIGHBORS),
    "SVGP": method(models.SVGP, "mean", inducing=5),
    "BSGP": method(models.BSGP, "objective", "inducing_prior", "num_layers", "hidden_dim", inducing=5),
    "LMC": call(
        lambda **o: models.LMC(**o).model(),
        "mixing",
        "num_latents",
        x=X,
        y=torch.stack([Y, -Y], 1),
        kernels=2,
        **NEIGHBORS,
    ),
    "CoregionalizedLOO": call(
        lambda **o: models.CoregionalizedLOO(**o).model(),
        "mixing",
        x=X,
        y=torch.stack([Y, -Y], 1),
        kernels=2,
        **NEIGHBORS,
    ),
    "forward": call(GP, "num_neighbors", "samples", x_new=X),
    "VNNGP.forward": call(VNNGP, "num_neighbors", "samples", x_new=X),
    "predict": call(lambda **o: GP.predict(**o).mean, "num_neighbors", "samples", x_new=X),
    "sample": call(GP.sample, "num_neighbors", "samples", "seed", x_new=X, num_samples=2),
    "VNNGP.sample": call(VNNGP.sample, "samples", x_new=X, num_samples=2),
    "BSGP.sample": call(BSGP.sample, "seed", x_new=X, num_samples=2, samples=DRAWS),
    "BSGP.predict": call(lambda **o: BSGP.predict(**o).mean, x_new=X, samples=DRAWS),
    "loo": call(GP.loo, "idx", "samples"),
    "model": call(GP.model, "idx"),
    "fit": call(
        train,
        *("method", "num_steps", "batch_size", "optimizer", "lr", "schedule", "refresh_every", "solve_every", "elbo"),
        *("num_data", "tolerance", "max_seconds", "validation", "checkpoint", "callback", "device", "seed"),
    ),
    "SGHMC": call(
        SGHMC,
        *("num_steps", "temperature", "gradient_noise", "adapt", "optim", "init_strategy"),
        **{"model": level_model, "step_size": 0.01, "friction": 0.1},
    ),
    "SGLD": call(SGLD, model=level_model, step_size=0.01),
    "SGNHT": call(SGNHT, model=level_model, step_size=0.01, diffusion=1.0),
    "Cyclical": call(Cyclical, "explore", initial=0.1, period=10),
    "Minibatch": call(Minibatch, "device", size=12, batch_size=4),
    "SGMCMC": call(
        sample_chain,
        *("warmup_steps", "num_chains", "vectorize", "initial_params", "checkpoint", "checkpoint_every"),
        **{"kernel": SGHMC(level_model, 0.01), "num_samples": 1},
    ),
    "PolyaGammaGibbs": call(sample_exactly, "latent", "init_strategy", model=latent_model),
    "to_arviz": call(
        lambda **o: to_arviz(**({"progress": False, "posterior_predictive": False} | o)),
        *("model_kwargs", "var_names", "num_prior_samples", "predictions", "batch_size", "num_data", "losses"),
        *("constant_data", "coords", "dims"),
        **{"source": VNNGP, "num_samples": 1},
    ),
    "elpd": call(lambda **o: elpd(**o), log_densities=-Y.abs()),
    "psis_khat": call(lambda **o: psis_khat(progress=False, **o), model=level_model, guide=level_guide, num_samples=25),
    "sbc_ranks": call(
        lambda **o: sbc_ranks(progress=False, **o),
        **{"simulate": lambda: ({"a": Y}, Y), "infer": lambda y: {"a": y[None]}, "num_simulations": 1},
    ),
    "sbc_to_arviz": call(sbc_to_arviz, "dims", "coords", ranks={"a": TRANSFORMS}),
    "PointwiseLogLikelihood": call(PointwiseLogLikelihood, "model_kwargs", "coords", source=VNNGP),
    "save": call(GP.save, path="gp"),
    "nngp.load": call(lambda **o: [nngp.load(**o)], path="gp"),
    "pit": call(pit, "num_draws", predictive=dist.Normal(Y, 1.0), y=Y),
    "uniformity": call(uniformity, values=TRANSFORMS, num_bins=2),
    "symmetry": call(symmetry, values=TRANSFORMS),
    "coverage_curve": call(coverage_curve, values=TRANSFORMS, levels=TRANSFORMS),
    "reliability": call(lambda **o: reliability(**o).predicted, "num_bins", prob=TRANSFORMS, y=LABELS),
    "compare_to_exact": call(
        lambda **o: compare_to_exact(**o).kl, kernel=KERNEL, x=X, y=Y, num_neighbors=[3], noise_var=0.1
    ),
    "load": call(datasets.load, name="none"),
    "uci": call(datasets.uci, name="none"),
    "nll": call(metrics.nll, predictive=dist.Normal(Y, 1.0), y=Y),
    "rmse": call(metrics.rmse, y=Y, loc=Y),
    "crps_sample": call(metrics.crps_sample, y=Y, draws=torch.stack([Y, -Y])),
    "interval_score": call(metrics.interval_score, y=Y, lower=Y - 1, upper=Y + 1, alpha=0.1),
    "auc": call(metrics.auc, y=LABELS, score=Y),
    "brier": call(metrics.brier, y=LABELS, prob=TRANSFORMS),
    "Standardizer": call(preprocessing.Standardizer, train=X),
    "random_split": call(preprocessing.random_split, num_points=12, fractions=[0.5, 0.5], seed=0),
    "block_split": call(preprocessing.block_split, x=X, cell_size=0.3, fraction=0.3, seed=0),
}
SLOW = {("SGMCMC", "warmup_steps", "10**12"), ("to_arviz", "num_samples", "None")}  # they do what was asked for
CASES = [(entrance, arg, name) for entrance, (_, args) in ENTRANCES.items() for arg in args for name in MALFORMED]
CASES = [case for case in CASES if case not in SLOW]
OURS = re.compile(r"[\w.\[\]() ]+: expected .+, got .+", re.DOTALL)
PROPAGATE = {"kernel()", "NNGP.log_prob", "nll", "rmse", "crps_sample", "interval_score"}  # NaN for NaN
SECONDS, BYTES = 20, 2**32


def outcome(entrance, arg, name):
    """The outcome of one call: "fine", "ours", "silent", or the type and the message of a foreign error."""
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


def run(cases, write):
    """Write a line with the outcome of each case, in a process that may die of one."""
    with contextlib.suppress(BaseException):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        for case in cases:
            os.write(write, outcome(*case).replace("\n", " ").encode() + b"\n")
    os._exit(0)


def outcomes(cases):
    """The outcomes of cases in a forked process, and in another one for the rest where a case ends or stops it."""
    found = []
    while len(found) < len(cases):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            run(cases[len(found) :], write)
        os.close(write)
        lines, end = b"", "crash"
        while True:
            if not select.select([read], [], [], SECONDS)[0]:
                os.kill(child, signal.SIGKILL)
                end = "hang"
                break
            part = os.read(read, 65536)
            if not part:
                break
            lines += part
        os.close(read)
        status = os.waitpid(child, 0)[1]
        found += lines.decode(errors="replace").split("\n")[:-1]
        if len(found) < len(cases):
            died = end == "crash" and os.WIFSIGNALED(status)
            found.append(f"crash by signal {os.WTERMSIG(status)}" if died else end)
    return found
