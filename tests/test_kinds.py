"""Checks of what an argument is, and the entrances that use them."""

from functools import partial

import numpy as np
import pytest
import torch
from pyro.distributions import Normal

from pyro_nngp import distributions as dist
from pyro_nngp._kinds import (
    broadcast,
    check_flags,
    check_kind,
    check_sequence,
    check_steps,
    draws_shape,
    takes,
    validation,
)
from pyro_nngp.adapters import plots
from pyro_nngp.adapters.maps import predict_grid
from pyro_nngp.adapters.sklearn import NNGPRegressor
from pyro_nngp.conditionals import nn_conditional, whitened_conditional
from pyro_nngp.data import Standardizer
from pyro_nngp.hyperparameters import HyperparameterGuide, lognormal_priors
from pyro_nngp.inducing import Strauss, kmeans
from pyro_nngp.inference import SGLD, RowAdam, plot_coverage, plot_pit, plot_reliability, psis_khat, sbc_ranks
from pyro_nngp.kernels import RBF, Rotation
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.means import ConstantMean, LinearMean
from pyro_nngp.neighbors import NeighborGraph, SearchIndex, nearest_predecessors, time_ordering
from pyro_nngp.storage import load
from pyro_nngp.variational import Amortized
from tests.builders import build, uniform


@pytest.mark.parametrize("value", [None, 1, "yes", torch.ones(2)])
def test_a_flag_is_true_or_false(value):
    check_flags("f", flag=np.bool_(True))
    with pytest.raises(TypeError, match=r"f: expected flag to be True or False, got \w+\. Pass one of them\."):
        check_flags("f", flag=value)


def test_validation_is_a_flag_or_none():
    assert [validation("D", value) for value in (None, True, False)] == [None, True, False]
    with pytest.raises(TypeError, match="D: expected validate_args to be True or False, got Tensor"):
        validation("D", torch.ones(2))


@pytest.mark.parametrize(
    ("function", "num_args", "known"),
    [
        (lambda x: x, 1, True),
        (lambda x: x, 2, False),
        (RBF(2), 2, True),
        (torch.nn.Linear(2, 2), 2, False),
        (partial(max, 1), 1, True),
        (torch.distributions.Normal(0.0, 1.0).sample, 2, False),
        (dist.PolyaGamma(torch.ones(3)), 2, False),  # an instance has the signature of its class
        (torch.add, 2, True),  # has no signature
    ],
)
def test_numbers_of_arguments_are_known(function, num_args, known):
    assert takes(function, num_args) == known


def test_solvers_take_steps_and_a_tolerance():
    check_steps("s", 0, 0.0)
    with pytest.raises(TypeError, match="s: expected max_steps to be an int, got 'a'"):
        check_steps("s", "a", 0.1)
    with pytest.raises(ValueError, match="s: expected tolerance to be finite and >= 0, got -1"):
        check_steps("s", 1, -1)


def test_kinds_and_sequences_are_named():
    check_sequence("f", "columns", np.arange(2), "List them.")
    with pytest.raises(TypeError, match=r"f: expected columns to be a list or tuple, got str\. List them\."):
        check_sequence("f", "columns", "ab", "List them.")
    with pytest.raises(TypeError, match=r"f: expected gp to be a method, got int\. Pass one\."):
        check_kind("f", "gp", 3, torch.nn.Module, "a method", "Pass one.")


@pytest.mark.parametrize("value", [3, 2.5, "ab", [-1], [0.5], [2**70], torch.ones(2)])
def test_a_shape_of_draws_is_a_tuple_of_sizes(value):
    assert draws_shape("d", [2, np.int64(3)]) == torch.Size([2, 3])
    with pytest.raises(TypeError, match="d: expected sample_shape to be a tuple of integers >= 0, got"):
        draws_shape("d", value)


def test_parameters_of_distributions_broadcast():
    loc, scale = broadcast("D", loc=torch.zeros(3), scale=2.0)
    assert loc.shape == scale.shape == (3,)
    with pytest.raises(ValueError, match=r"D: expected loc, scale of shapes that broadcast, got \(\(3,\), \(2,\)\)"):
        broadcast("D", loc=torch.zeros(3), scale=torch.ones(2))
    with pytest.raises(TypeError, match="D: expected scale to be a torch.Tensor, got str"):
        broadcast("D", loc=torch.zeros(3), scale="wide")


ONE = torch.ones(3)
DISTRIBUTIONS = [
    dist.InverseGaussian(ONE, ONE),
    dist.GeneralizedPareto(ONE, ONE),
    dist.Tweedie(ONE, torch.tensor(1.0), torch.tensor(1.5)),
    dist.NormalLaplace(ONE, ONE, 0.5 * ONE, ONE),
    dist.PolyaGamma(ONE),
    dist.SparseCholeskyNormal(ONE, ONE),
    dist.Mixture([torch.distributions.Normal(ONE, ONE)]),
]


@pytest.mark.parametrize("each", DISTRIBUTIONS, ids=lambda each: type(each).__name__)
def test_distributions_name_a_malformed_shape_of_draws(each):
    with pytest.raises(TypeError, match=rf"{type(each).__name__}.r?sample: expected sample_shape to be a tuple"):
        each.sample(5)


X = uniform(12, seed=0)
WRONG = {  # what is called, and the beginning of its error
    "whitened": (lambda: whitened_conditional(RBF(2), X, [1], 1e-6), "whitened_conditional: expected z to be a torch"),
    "targets": (lambda: whitened_conditional(RBF(2), None, X), "whitened_conditional: expected x to be a torch.Tensor"),
    "jitter": (
        lambda: nn_conditional(RBF(2), X, X[:, None], jitter="a"),
        "nn_conditional: expected jitter to be a num",
    ),
    "isotropic": (lambda: RBF(2, isotropic=X), "RBF: expected isotropic to be True or False"),
    "diag": (lambda: RBF(2)(X, diag=X), "RBF: expected diag to be True or False"),
    "angle": (lambda: Rotation("north"), "Rotation: expected angle to be a number"),
    "rotated": (lambda: Rotation()([1.0]), "Rotation: expected x to be a torch.Tensor"),
    "level": (lambda: ConstantMean({}), "ConstantMean: expected value to be a number"),
    "levels": (lambda: ConstantMean(0.0, "two"), "ConstantMean: expected num_latents to be an int"),
    "slopes": (lambda: LinearMean(2, active_dims=3), "LinearMean: expected active_dims to be a list or tuple"),
    "units": (lambda: Standardizer(X).transform(X[:, :1]), r"Standardizer.transform: expected values with 2 columns"),
    "units back": (lambda: Standardizer(X).inverse("a"), "Standardizer.inverse: expected values to be a torch.Tensor"),
    "guide": (lambda: HyperparameterGuide(3), "HyperparameterGuide: expected owner to be a module"),
    "quantile": (lambda: HyperparameterGuide(RBF(2)).quantiles(1.0), r"expected probability in \(0, 1\), got 1.0"),
    "priors": (lambda: lognormal_priors("RBF"), "lognormal_priors: expected module to be a module"),
    "medians": (
        lambda: lognormal_priors(RBF(2), {"variance": -1}),
        r"expected medians\['variance'\] to be finite and > 0",
    ),
    "centers": (lambda: kmeans(X, 2, seed=X), "kmeans: expected seed to be an int"),
    "base": (lambda: Strauss(X), "Strauss: expected base to be a distribution over"),
    "graph": (lambda: SearchIndex(X, progress=X), "SearchIndex: expected progress to be True or False"),
    "part": (lambda: NeighborGraph(X, 2).subset(X), "NeighborGraph.subset: expected rows of dtype torch.int64"),
    "too few": (
        lambda: NeighborGraph(X, 2).subset(torch.tensor([3])),
        "subset: expected rows to be two or more, got 1",
    ),
    "programs": (lambda: psis_khat(3, ONE.sum), "psis_khat: expected model to be callable, got int"),
    "transforms": (lambda: plot_pit([0.1]), "plot_pit: expected values to be a torch.Tensor, got list"),
    "covered": (lambda: plot_coverage(0.1), "plot_coverage: expected values to be a torch.Tensor, got float"),
    "labels": (lambda: plot_reliability(ONE), "plot_reliability: expected reliability to be a Reliability, got Tensor"),
    "truth": (
        lambda: sbc_ranks(lambda: 1, lambda _: {}, 1, progress=False),
        r"sbc_ranks: expected simulate\(\) to return \(\{site: value\}, data\), got int",
    ),
    "inferred": (
        lambda: sbc_ranks(lambda: ({"a": ONE}, 1), lambda _: 1, 1, progress=False),
        r"sbc_ranks: expected infer\(data\) to be \{site: draws\}, got int",
    ),
    "simulator": (
        lambda: sbc_ranks(lambda x: x, dict, 1),
        "expected simulate to be callable with 0 arguments, got fun",
    ),
    "tables": (lambda: RowAdam([1.0], 0.1), "RowAdam: expected params to be tables, got float"),
    "no tables": (lambda: RowAdam([], 0.1), "RowAdam: expected params to hold a table or more, got none"),
    "schedule": (
        lambda: SGLD(lambda: None, lambda _: -1),
        r"SGLD: expected step_size\(0\) to be finite and >= 0, got -1",
    ),
    "no covariance": (
        lambda: whitened_conditional(Normal(0.0, 1.0), X, X, 1e-6),
        "bind: expected kernel to be a covariance function of x and z, got Normal",
    ),
    "huge": (lambda: Rotation(2**70), "Rotation: expected angle in the range of 64-bit integers"),
    "batch": (
        lambda: Gaussian(ONE)(X[:, 0]),
        r"Gaussian: expected variance, f of shapes that broadcast, got \(\(3,\), ",
    ),
    "whole numbers": (lambda: nn_conditional(RBF(2), X.long(), X[:, None]), "expected x of a floating-point dtype"),
    "extra": (lambda: NeighborGraph(X, 2).batch(extra=3), "NeighborGraph.batch: expected extra to be a torch.Tensor"),
    "start": (lambda: nearest_predecessors(X, 2, start={}), "nearest_predecessors: expected start to be an int"),
    "time": (lambda: time_ordering(X, X), "time_ordering: expected time_dim to be an int"),
    "encoder": (lambda: Amortized(None, -1), "Amortized: expected num_columns >= 0, got -1"),
    "mixture": (lambda: dist.Mixture([X]), "Mixture: expected components to be distributions, got Tensor"),
    "factor": (
        lambda: dist.SparseCholeskyNormal(ONE, [1]),
        "SparseCholeskyNormal: expected scale to be a torch.Tensor",
    ),
    "map of": (lambda: predict_grid(3, {"a": [1.0]}), "predict_grid: expected gp to be a method, got int"),
    "plot": (lambda: plots.plot_fit(3), "plot_fit: expected result to be what fit returned, got int"),
    "picture": (lambda: plots.plot_map(3), "plot_map: expected grid to be a Dataset of xarray, got int"),
    "relevance": (lambda: plots.plot_relevance(3), "plot_relevance: expected gp to be a method, got int"),
    "variogram": (lambda: plots.plot_variogram(3), "plot_variogram: expected gp to be a method, got int"),
    "dependence": (lambda: plots.plot_dependence(3, 0), "plot_dependence: expected gp to be a method, got int"),
    "lines": (lambda: plots.plot_neighbors(3), "plot_neighbors: expected graph to be a neighbor graph, got int"),
    "axis": (
        lambda: plots.plot_band(ONE, ONE, ONE, ax=3),
        "plot_band: expected ax to be an axis of matplotlib, got int",
    ),
    "band": (lambda: plots.plot_band(ONE, ONE[:2], ONE), r"expected x, mean, variance of one length, got \(3, 2, 3\)"),
    "bands": (lambda: plots.plot_band(ONE, X, ONE), r"plot_band: expected mean of shape \(P,\), got \(12, 2\)"),
    "text": (lambda: plots.plot_band("a", ONE, ONE), "plot_band: expected x to hold numbers, got str"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case):
    call, message = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_map_names_its_arguments():
    gp = build("Vecchia")
    axes = {"a": [0.1, 0.2], "b": [0.3, 0.5]}
    with pytest.raises(TypeError, match="predict_grid: expected columns to be a list or tuple, got int"):
        predict_grid(gp, axes, columns=3)
    with pytest.raises(TypeError, match="predict_grid: expected columns to be names, got int"):
        predict_grid(gp, axes, columns=[0, 1])
    with pytest.raises(TypeError, match="predict_grid: expected quantile_levels to be a list or tuple, got object"):
        predict_grid(gp, axes, columns=["a", "b"], quantile_levels=object())
    with pytest.raises(TypeError, match="predict_grid: expected thresholds to be numbers, got str"):
        predict_grid(gp, axes, columns=["a", "b"], thresholds=["high"])
    grid = predict_grid(gp, axes, columns=["a", "b"], progress=False)
    with pytest.raises(ValueError, match=r"plot_map: expected grid with mean and sd, or probability, got \['sd'\]"):
        plots.plot_map(grid.drop_vars("mean"))
    with pytest.raises(ValueError, match=r"plot_map: expected places of shape \(N, 2\), got \(3,\)"):
        plots.plot_map(grid, places=ONE)
    with pytest.raises(TypeError, match="plot_map: expected places to hold numbers, got str"):
        plots.plot_map(grid, places="here")


@pytest.mark.parametrize(("custom", "message"), [(3, "to be a list, got int"), ([3], "to hold classes and functions")])
def test_custom_classes_of_a_file_are_listed(tmp_path, custom, message):
    build("Vecchia").save(tmp_path / "model.pt")
    with pytest.raises(TypeError, match=f"load: expected custom {message}"):
        load(tmp_path / "model.pt", custom=custom)


@pytest.mark.parametrize("options", ["method_options", "fit_options"])
def test_options_of_estimators_are_dictionaries(options):
    x, y = X.numpy(), X.sum(1).numpy()
    with pytest.raises(TypeError, match=f"NNGPRegressor: expected {options} to be a dictionary, got list"):
        NNGPRegressor(num_neighbors=3, **{options: ["a"]}).fit(x, y)


def test_predictions_of_estimators_name_their_arguments():
    regressor = NNGPRegressor(num_neighbors=3, fit_options={"num_steps": 1}).fit(X.numpy(), X.sum(1).numpy())
    with pytest.raises(TypeError, match="NNGPRegressor.predict: expected return_std to be True or False, got str"):
        regressor.predict(X.numpy(), return_std="yes")
    with pytest.raises(TypeError, match="NNGPRegressor.predict_interval: expected coverage to be a number"):
        regressor.predict_interval(X.numpy(), coverage="wide")
    with pytest.raises(TypeError, match="Vecchia.joint: expected fantasies to be Fantasies, got int"):
        regressor.gp_.joint(X, fantasies=3)
