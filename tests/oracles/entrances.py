"""Every public function, class and method, and how to call it validly: one description for tests and scripts.

Entrances are the functions and classes of `__all__` of every room, and the methods of these classes named in CALLED.
:func:`call` calls one with the values of :mod:`oracles.valid_values`, of which one may be changed; a class is then used
once, as USES says, since what it was given may fail only there.
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pyro
import torch
from oracles.valid_values import EVEN_IF_OPTIONAL, VALID, K, gp, kernel, labels, x, y
from pyro.infer import MCMC

import pyro_nngp as nngp
from pyro_nngp import inference, likelihoods
from pyro_nngp.adapters import sklearn

ROOT = Path(__file__).resolve().parents[2]
# fmt: off
CALLED = (
    *("predict", "predict_proba", "predict_interval", "sample", "sample_y", "sample_new", "loo", "loo_by_draw"),
    *("predictions_by_draw", "joint", "joint_outputs", "latent_functions", "loading", "output_covariance"),
    *("log_evidence", "extend", "condition_on", "subset", "summary", "save", "solve", "query", "others", "batch"),
    *("log_density",),
    *("refresh", "resize", "nearest", "predecessors", "forward", "log_prob", "check", "fit", "partial_fit", "score"),
    *("posterior", "condition_on_observations", "rsample", "difference", "get_samples", "transform", "inverse"),
    *("predict_given", "new_conditionals", "refresh_neighbors", "quantiles", "to_frame", "run"),
)
# fmt: on
LEFT_OUT = {
    "models.base": "parts of methods, for authors of methods",
    "variational.encoders": "parts of q(u), for authors of q(u)",
    "distributed": "needs several processes",
    "linalg": "parts of methods, which check their arguments before",
    "data.load": "downloads",
    "data.uci": "downloads",
}
HOOKS = (
    *("Kernel", "Wrapper", "Covariance", "KernelMetric", "Likelihood", "Stationary", "GPModule", "Unset"),
    *("BinomialSplit", "Marginal", "PolyaGammaBound", "between", "positive", "check_same_sites", "bound_copy"),
    *("bind", "neighbor_metric", "AmortizedGaussian", "DenseGaussian", "GivenGaussian", "InducingLeaveOneOut"),
    *("LatentLeaveOneOut", "LocalConjugate", "LocalGaussian", "LocalLogNormal", "LocalTables", "ObservedGaussian"),
    *("PseudoObservations", "Conjugate", "LogNormal", "combined", "combined_variance", "conjugate_posterior"),
    *("factor", "neighbor_variance", "prior_factor", "scattered", "variational_optimum", "SparseLayer", "Batch"),
    *("IntegratedELBO", "PredictiveLogLikelihood", "FitResult", "CrossValidation", "Reliability", "Score"),
    *("NNReport", "Dataset", "DrawnPosterior", "Recorder", "binomial_splits", "log_shares", "in_blocks", "freeze"),
    *("release", "NeighborTable", "unset_hyperparameters", "Scaled", "scaled", "assign", "in_plate", "Program"),
)


def with_mcmc(kind: Any) -> None:
    MCMC(kind, num_samples=1, warmup_steps=1, disable_progbar=True).run()


def with_chain(kind: Any) -> None:
    inference.SGMCMC(kind, 2, 2, num_chains=1, disable_progbar=True).run()


def with_fit(method: Any) -> None:
    inference.fit(method, 1, progress=False)
    method.predict(x()[:2])


def with_guide(guide: Any) -> None:
    with_fit(nngp.VNNGP(x(), labels(), kernel(), likelihoods.Bernoulli(), num_neighbors=K, guide=guide))


def with_schedule(schedule: Any) -> None:
    inference.fit(gp(), 2, schedule=schedule, progress=False)


# fmt: off
USES = {
    "QuickNUTS": with_mcmc, "PolyaGammaGibbs": with_mcmc, "SGLD": with_chain, "SGHMC": with_chain,
    "SGNHT": with_chain, "SGMCMC": lambda it: it.run(), "AutoNNGP": lambda it: it(), "Schedule": with_schedule,
    "Validation": lambda it: inference.fit(gp(), 2, validation=it, progress=False), "Cyclical": lambda it: it(1),
    "PolynomialDecay": lambda it: it(1), "MeanField": with_guide,
    "FullRank": lambda it: with_fit(nngp.SVGP(x(), y(), kernel(), inducing=8, guide=it)),
    "SparseCholesky": with_guide,
    "Amortized": lambda it: with_fit(
        nngp.NPVI(x(), y(), kernel(), likelihoods.Gaussian(0.1), num_neighbors=K, guide=it)
    ),
    "Checkpoint": lambda it: inference.fit(gp(), 2, checkpoint=it, progress=False), "Minibatch": lambda it: it.draw(),
    "NearestNeighborModel": lambda it: it.posterior(x()[None, :2]), "NNGPRegressor": lambda it: it.fit(x(), y()),
    "NNGPClassifier": lambda it: it.fit(x(), labels()), "NNGPCountRegressor": lambda it: it.fit(x(), labels()),
    "NNGP": lambda it: it.log_prob(it.sample()), "FullScaleNNGP": lambda it: it.log_prob(it.sample()),
}
# fmt: on
USES |= {name: with_fit for name in nngp.models.__all__ if name != "BSGP"}
FIRST = ("Vecchia", "VNNGP", "Matern52", "Gaussian", "NNGPRegressor", "NeighborGraph")  # whose methods are tried
NO_METHODS = {  # unnormalized, or called by others
    "Determinantal": ["sample"],
    "Strauss": ["sample"],
    **{each: ["sample"] for each in ("SGLD", "SGHMC", "SGNHT", "PolyaGammaGibbs", "QuickNUTS")},
    "PerOutput": ["check"],
    "VNNGP": ["joint"],
    "BSGP": CALLED,
    "LMC": ["joint", "extend", "condition_on", "refresh_neighbors"],
}
FITTED = {sklearn.NNGPRegressor: y, sklearn.NNGPClassifier: labels, sklearn.NNGPCountRegressor: labels}


def valid_for(where: str, parameter: inspect.Parameter) -> Any:
    """Factory of a valid value of a parameter, by the longest name that has one; None if its default will do."""
    parts = where.split(".")
    for start in range(len(parts) + 1):
        name = ".".join([*parts[start:], parameter.name])
        found = VALID.get(name)
        if name in VALID and found is None:
            return None
        if found and (start < len(parts) or parameter.default is parameter.empty or parameter.name in EVEN_IF_OPTIONAL):
            return found
    return None


def entrances() -> list[tuple[str, Any, Any]]:
    """Name, what is called, and the class whose valid instance it is a method of, or None."""
    found, seen = [], set()
    files = [file for folder in ("pyro_nngp", "models", "inference") for file in (ROOT / folder).rglob("__init__.py")]
    folders = [str(file.parent.relative_to(ROOT)).removeprefix("pyro_nngp/") for file in files]
    rooms = {folder.replace("/", ".") for folder in folders} | {"means", "storage", "adapters.botorch"}
    for short in sorted(rooms - {"pyro_nngp"} - LEFT_OUT.keys()):
        module = importlib.import_module(f"pyro_nngp.{short}")
        for name in sorted(getattr(module, "__all__", []), key=lambda name: (name not in FIRST, name)):
            value = getattr(module, name)
            if id(value) in seen or name in HOOKS or f"{short}.{name}" in LEFT_OUT or not callable(value):
                continue
            seen.add(id(value))
            if inspect.isclass(value) and issubclass(value, Exception | Warning):
                continue
            name = f"{short}.{name}"
            found.append((name, value, None))
            if inspect.isclass(value):
                called = [each for each in CALLED if each != "forward" or short == "kernels"]
                called = [each for each in called if each != "posterior" or short == "adapters.botorch"]
                called = [each for each in called if each not in NO_METHODS.get(name.split(".")[-1], ())]
                methods = [(each, getattr(value, each, None)) for each in called]
                for each, method in methods:
                    plain = inspect.unwrap(method) if method else None
                    if not inspect.isfunction(plain) or not plain.__module__.startswith("pyro_nngp") or plain in seen:
                        continue
                    if "self" in inspect.signature(plain).parameters:
                        seen.add(plain)  # a method that several classes inherit is tried on the first of them
                        found.append((f"{name}.{each}", method, value))
    return found


def arguments(where: str, function: Any, changed: str = "", value: Any = None) -> tuple[list[Any], dict[str, Any]]:
    """Valid arguments, one of them changed."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for each in inspect.signature(function).parameters.values():
        if each.name == "self":
            continue
        factory = valid_for(where, each)
        if each.kind is each.VAR_POSITIONAL:
            if each.name == changed:  # arguments before it are positional, too
                args, kwargs = [*kwargs.values(), value], {}
            else:
                args += [factory()] if factory else []
        elif each.kind is each.VAR_KEYWORD:
            kwargs |= {"no_such_option": value} if each.name == changed else {}
        elif each.name == changed or factory or each.default is each.empty:
            if each.name != changed and factory is None:
                raise LookupError(f"{where}: no valid value for {each.name}")
            kwargs[each.name] = value if each.name == changed else factory()
    return args, kwargs


def instance(owner: Any) -> Any:
    """A valid instance of a class, run or trained if its methods need that."""
    args, kwargs = arguments(f"{owner.__module__}.{owner.__name__}", owner)
    made = owner(*args, **kwargs)
    if owner is inference.SGMCMC:
        made.run()
    return made.fit(x(), FITTED[owner]()) if owner in FITTED else made


def call(where: str, function: Any, owner: Any, changed: str = "", value: Any = None) -> Any:
    """Call an entrance with valid arguments, one of them changed, and use a class once; returns the result."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    args, kwargs = arguments(where, function, changed, value)
    if owner is None:
        result = function(*args, **kwargs)
        room, _, name = where.rpartition(".")
        if name in USES:
            USES[name](result)
        elif room == "kernels":
            result(x())
        elif room == "likelihoods" and name not in ("Multinomial", "PerOutput"):
            result(y())
    else:
        result = getattr(instance(owner), where.rpartition(".")[2])(*args, **kwargs)
    plt.close("all")
    return result
