"""The scikit-learn estimators: raw units in, calibrated answers out, and scikit-learn's own checks."""

import pickle

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample
from sklearn.base import clone
from sklearn.ensemble import BaggingRegressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from pyro_nngp.adapters.sklearn import NNGPClassifier, NNGPCountRegressor, NNGPRegressor
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Categorical, Gaussian, Poisson, StudentT

QUICK = {"num_steps": 3}
NO_COUNTS = "its targets are no counts"
COPIES = "copies of a row take the places of other neighbors, a weight does not"


def field(n, seed=0):
    """Stations in UTM meters, a smooth function of the place, and standard normal noise."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 1, (n, 2))
    frame = pd.DataFrame({"easting": 5e5 + 4e4 * x[:, 0], "northing": 5e6 + 4e4 * x[:, 1]})
    return frame, np.sin(7 * x[:, 0]) + np.cos(5 * x[:, 1]), rng.standard_normal(n)


def test_a_frame_in_raw_units_gives_calibrated_predictions():
    X, f, noise = field(700)
    y = pd.Series(3e5 + 1e5 * (f + 0.2 * noise))
    model = NNGPRegressor().fit(X[:500], y[:500])
    mean, std = model.predict(X[500:], return_std=True)
    assert model.score(X[500:], y[500:]) > 0.93
    assert abs(std.mean() / 2e4 - 1) < 0.25
    interval = model.predict_interval(X[500:], 0.9)
    inside = (interval[:, 0] < y[500:]) & (y[500:] < interval[:, 1])
    assert 0.83 < inside.mean() < 0.96
    np.testing.assert_allclose(interval.mean(1), mean)
    assert 0.5 < model.noise_ / 4e8 < 2
    assert list(model.feature_names_in_) == ["easting", "northing"]
    assert repr(model.kernel_).startswith("Matern(2, variance=")


def test_draws_have_the_moments_of_predictions():
    X, f, noise = field(200)
    model = NNGPRegressor(fit_options=QUICK).fit(X, np.stack([f, 9 + f + noise], 1))
    mean, std = model.predict(X[:5], return_std=True)
    assert mean.shape == std.shape == (5, 2)
    draws = model.sample_y(X[:5], 3000, random_state=1)
    assert draws.shape == (5, 2, 3000)
    np.testing.assert_allclose(draws.mean(-1), mean, atol=5 * std.max() / 3000**0.5)
    np.testing.assert_allclose(draws.std(-1), std, rtol=0.1)
    assert model.predict_interval(X[:5]).shape == (5, 2, 2)
    np.testing.assert_array_equal(draws, model.sample_y(X[:5], 3000, random_state=1))


@pytest.mark.parametrize(
    ("labels", "options"),
    [pytest.param(["no", "yes"], {}, marks=pytest.mark.slow), ([3, 7, 11], {"fit_options": QUICK})],
)
def test_labels_of_any_kind_are_classified(labels, options):
    X, f, noise = field(200)
    cut = np.digitize(f + 0.1 * noise, [0.0] if len(labels) == 2 else [-0.5, 0.7])
    y = np.array(labels)[cut]
    model = NNGPClassifier(num_neighbors=10, **options).fit(X[:120], y[:120])
    assert list(model.classes_) == labels
    assert model.score(X[120:], y[120:]) > 0.85
    probs = model.predict_proba(X[120:])
    np.testing.assert_allclose(probs.sum(1), 1)
    assert set(model.predict(X[120:])) <= set(labels)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"likelihood": Poisson(), "fit_options": QUICK}]
)
def test_counts_have_means_and_intervals_of_counts(options):
    X, f, _ = field(400)
    rate = np.exp(1 + f)
    y = np.random.default_rng(1).poisson(rate)
    model = NNGPCountRegressor(num_neighbors=10, **options).fit(X[:300], y[:300])
    assert np.corrcoef(np.log(model.predict(X[300:])), np.log(rate[300:]))[0, 1] > 0.95
    lower, upper = model.predict_interval(X[300:], 0.9).T
    assert ((lower <= y[300:]) & (y[300:] <= upper)).mean() > 0.85


@pytest.mark.slow
def test_rows_can_be_appended():
    X, f, noise = field(300)
    y = f + 0.1 * noise
    model = NNGPRegressor().partial_fit(X[:40], y[:40])
    before = model.score(X[200:], y[200:])
    model.partial_fit(X[40:200], y[40:200])
    assert model.gp_.num_data == 200
    assert model.score(X[200:], y[200:]) > max(before, 0.9)
    labels = np.where(y > 0, "a", "b")
    classifier = NNGPClassifier(fit_options=QUICK, num_neighbors=5).partial_fit(X[:50], labels[:50])
    assert classifier.partial_fit(X[50:80], labels[50:80]).gp_.num_data == 80
    with pytest.raises(ValueError, match=r"of the classes \['a', 'b'\], got \['c'\]"):
        classifier.partial_fit(X[:2], ["a", "c"])
    with pytest.raises(ValueError, match=r"classes to be those of the first call, \['a', 'b'\], got \['a', 'c'\]"):
        classifier.partial_fit(X[:2], ["a", "b"], classes=["a", "c"])
    assert set(classifier.sample_y(X[:5], 3).flatten()) <= {"a", "b"}


@pytest.mark.slow
def test_one_row_can_be_appended_and_a_class_may_be_named_before_it_occurs():
    X, f, _ = field(26)
    model = NNGPRegressor(fit_options={"num_steps": 1}, num_neighbors=5).fit(X[:25], f[:25])
    assert model.partial_fit(X[25:], f[25:]).gp_.num_data == 26
    labels = np.where(f[:25] > 0, 7, 3)
    classifier = NNGPClassifier(fit_options={"num_steps": 1}, num_neighbors=5)
    with pytest.warns(UserWarning, match=r"level of f of functions \[2\]"):
        classifier.partial_fit(X[:25], labels, classes=[11, 7, 3])
    assert classifier.predict_proba(X[:2]).shape == (2, 3)


def test_two_classes_may_have_a_function_each():
    X, f, _ = field(40)
    labels = np.where(f > 0, "a", "b")
    model = NNGPClassifier(likelihood=Categorical(2), fit_options=QUICK, num_neighbors=5).fit(X, labels)
    probs = model.predict_proba(X)
    np.testing.assert_allclose(probs.sum(-1), np.ones(40), rtol=1e-6)
    np.testing.assert_array_equal(model.predict(X), np.where(probs[:, 0] > 0.5, "a", "b"))
    assert model.score(X, labels) > 0.8


def test_pipelines_searches_clones_and_pickles():
    X, f, noise = field(120)
    y = f + 0.1 * noise
    pipeline = make_pipeline(StandardScaler(), NNGPRegressor(kernel=Matern32(2), fit_options=QUICK))
    search = GridSearchCV(pipeline, {"nngpregressor__num_neighbors": [3, 10]}, cv=2).fit(X, y)
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(again.predict(X), search.predict(X))
    model = search.best_estimator_[-1]
    assert type(model.kernel_) is Matern32
    assert model.kernel_ is not model.kernel  # that of the user stays as it was
    with pytest.raises(NotFittedError):
        clone(model).predict(X)


@pytest.mark.slow
def test_other_methods_and_likelihoods():
    X, f, noise = field(100)
    for settings in ({"method": "loo"}, {"method": "svgp"}, {"likelihood": StudentT(4.0)}):
        model = NNGPRegressor(fit_options=QUICK, **settings).fit(X, f + 0.1 * noise)
        assert type(model.gp_).__name__.lower() == settings.get("method", "vnngp")
        assert np.isfinite(model.predict(X[:3], return_std=True)).all()
    with pytest.raises(AttributeError, match="a StudentT likelihood has no noise variance"):
        model.noise_  # noqa: B018


def test_noise_is_the_fitted_one_of_each_output():
    X, f, noise = field(60)
    both = np.stack([f + 0.1 * noise, 9 + f + noise], 1)
    two = NNGPRegressor(likelihood=Gaussian(torch.tensor([[0.01], [1.0]])), fit_options=QUICK).fit(X, both)
    np.testing.assert_allclose(two.noise_, two.gp_.likelihood.variance.detach()[:, 0])
    prior = Gaussian(PyroSample(dist.LogNormal(-4.0, 2.0)))
    model = NNGPRegressor(likelihood=prior, fit_options=QUICK).fit(X, both[:, 0])
    estimate = model.gp_.summary().loc["likelihood.variance", "estimate"]
    assert model.noise_ == pytest.approx(estimate)
    draws = model.sample_y(X[:20], 50)
    np.testing.assert_allclose(draws.std(1).mean(), model.predict(X[:20], return_std=True)[1].mean(), rtol=0.2)


def test_errors_name_the_cure():
    X, f, noise = field(60)
    with pytest.raises(ValueError, match="NNGPRegressor: expected method to be 'vecchia' or"):
        NNGPRegressor(method="kriging").fit(X, f)
    with pytest.raises(ValueError, match="NNGPClassifier: expected y of two classes or more"):
        NNGPClassifier().fit(X, np.ones(60))
    model = NNGPRegressor(fit_options=QUICK).fit(X, f + noise)
    with pytest.raises(ValueError, match="predict_interval: expected coverage in \\(0, 1\\), got 95"):
        model.predict_interval(X, 95)


def weighted(**settings):
    """Twelve rows, of which one counts three times and four are left out."""
    X, f, noise = field(12)
    weights = np.array([3.0, *[1.0] * 7, *[0.0] * 4])
    settings = {"fit_options": {"num_steps": 1}, "num_neighbors": 7, **settings}
    return X, f + 0.1 * noise, weights, settings


def test_masked_entries_are_refused():
    X, f, _ = field(30)
    X, gone = X.to_numpy(), np.arange(30) == 4
    y, labels = np.ma.array(np.where(gone, 1e20, f), mask=gone), np.ma.array(np.where(gone, "a", "b"), mask=gone)
    model, classifier = NNGPRegressor(fit_options=QUICK), NNGPClassifier(fit_options=QUICK)
    with pytest.raises(ValueError, match="Input y contains NaN"):
        model.fit(X, y)
    with pytest.raises(ValueError, match="Input contains NaN"):
        classifier.fit(X, labels)
    with pytest.raises(ValueError, match="Input sample_weight contains NaN"):
        model.fit(X, f, y)
    hidden = np.ma.array(X, mask=np.stack([gone, gone], 1))
    trained = NNGPRegressor(fit_options=QUICK).fit(X, f)
    for call in (lambda: model.fit(hidden, f), lambda: classifier.fit(hidden, f > 0), lambda: trained.predict(hidden)):
        with pytest.raises(ValueError, match="Input X contains NaN"):
            call()
    for given, name in (((f, y), "sample_weight"), ((y, None), "y")):
        with pytest.raises(ValueError, match=f"Input {name} contains NaN"):
            trained.score(X, *given)
    told = NNGPClassifier(fit_options=QUICK).fit(X, f > 0)
    with pytest.raises(ValueError, match="Input y contains NaN"):
        told.score(X, np.ma.array(f > 0, mask=gone))
    assert told.score(X, f > 0) > 0.5


def test_weights_go_to_the_method_and_rows_of_weight_0_are_left_out():
    X, y, weights, settings = weighted()
    model = NNGPRegressor(**settings).fit(X, y, sample_weight=weights)
    np.testing.assert_array_equal(model.gp_.x.numpy(), X[:8])
    np.testing.assert_array_equal(model.gp_.weights.numpy(), weights[:8])
    plain = NNGPRegressor(**settings).fit(X[:8], y[:8])
    assert plain.gp_.weights is None
    near, far = (abs(each.predict(X[:1]) - y[0]).item() for each in (model, plain))
    assert near < far
    model.partial_fit(X[8:], y[8:])
    np.testing.assert_array_equal(model.gp_.weights.numpy(), [*weights[:8], 1, 1, 1, 1])
    labels = np.where(y > y.mean(), "a", "b")
    classifier = NNGPClassifier(**settings).fit(X, labels, sample_weight=pd.Series(weights))
    np.testing.assert_array_equal(classifier.gp_.weights.numpy(), weights[:8])
    sparse = NNGPRegressor(method="svgp", fit_options={"num_steps": 1}).fit(X, y, sample_weight=weights)
    np.testing.assert_array_equal(sparse.partial_fit(X[8:], y[8:]).gp_.weights.numpy()[[0, 8]], [3, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: -w, r"NNGPRegressor.fit: expected sample_weight >= 0, got -3.0. A weight of 2 counts a row twice"),
        (lambda w: w[:3], r"expected sample_weight of shape \(12,\), got \(3,\)"),
        (lambda w: np.where(w == 3, np.nan, w), "Input sample_weight contains NaN"),
        (lambda w: np.where(w == 3, np.inf, w), "Input sample_weight contains infinity"),
        (lambda w: np.where(w == 3, w, 0), "expected sample_weight not zero for two rows or more, got 1 of them"),
    ],
)
def test_wrong_weights_are_refused(change, message):
    X, y, weights, settings = weighted()
    with pytest.raises(ValueError, match=message):
        NNGPRegressor(**settings).fit(X, y, sample_weight=change(weights))


def test_a_method_that_takes_no_weights_says_so():
    X, y, weights, settings = weighted(method="loo")
    with pytest.raises(ValueError, match="expected weights None unless noise is Gaussian, got Bernoulli. Use VNNGP"):
        NNGPClassifier(**settings).fit(X, y > y.mean(), sample_weight=weights)


def test_bagging_passes_weights_in_place_of_copies():
    X, y, _, settings = weighted(num_neighbors=3)
    bag = BaggingRegressor(NNGPRegressor(**settings), n_estimators=2, random_state=0).fit(X, y)
    for model, rows in zip(bag.estimators_, bag.estimators_samples_, strict=True):
        drawn, counts = np.unique(rows, return_counts=True)
        np.testing.assert_array_equal(model.gp_.x.numpy(), X.iloc[drawn])
        np.testing.assert_array_equal(model.gp_.weights.numpy(), counts)
    assert np.isfinite(bag.predict(X)).all()


def expected_failures(estimator):
    """One check takes a weight for copies to the last digit; others have targets that are real numbers."""
    copies = {"check_sample_weight_equivalence_on_dense_data": COPIES}
    if not isinstance(estimator, NNGPCountRegressor):
        return copies
    names = (
        "check_fit_check_is_fitted",
        "check_fit_idempotent",
        "check_n_features_in",
        "check_n_features_in_after_fitting",
        "check_regressor_data_not_an_array",
        "check_regressor_multioutput",
        "check_regressors_no_decision_function",
        "check_regressors_train",
    )
    return dict.fromkeys(names, NO_COUNTS) | copies


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@parametrize_with_checks(
    [NNGPRegressor(fit_options=QUICK), NNGPClassifier(fit_options=QUICK), NNGPCountRegressor(fit_options=QUICK)],
    expected_failed_checks=expected_failures,
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
def test_an_offset_is_a_column_of_the_inputs():
    X, f, _ = field(80)
    hours = np.random.default_rng(0).uniform(0.5, 30, 80)
    frame = pd.DataFrame(np.asarray(X), columns=["a", "b"]).assign(log_hours=np.log(hours))
    counts = np.random.default_rng(1).poisson(np.exp(f) * hours)
    model = NNGPCountRegressor(offset="log_hours", fit_options=QUICK, num_neighbors=5).fit(frame[:60], counts[:60])
    assert model.gp_.x.shape == (60, 2)
    more = frame[60:].assign(log_hours=frame["log_hours"][60:] + np.log(10))
    np.testing.assert_allclose(model.predict(more), 10 * model.predict(frame[60:]), rtol=1e-6)
    assert model.predict_interval(more)[:, 1].sum() > model.predict_interval(frame[60:])[:, 1].sum()
    assert model.sample_y(more, 3).shape == (20, 3)
    model.partial_fit(frame[60:], counts[60:])
    np.testing.assert_allclose(model.gp_.offset.numpy(), np.log(hours))
    by_number = NNGPRegressor(method="svgp", offset=1, fit_options=QUICK).fit(frame.to_numpy()[:60], f[:60])
    by_number.partial_fit(frame.to_numpy()[60:], f[60:])
    np.testing.assert_allclose(by_number.gp_.offset.numpy(), frame["b"])
    with pytest.raises(ValueError, match="expected offset to be the name or number of one of 3 columns"):
        NNGPRegressor(offset="hours").fit(frame, f)
