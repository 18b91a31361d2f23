"""scikit-learn estimators: regression, classification and counts by nearest-neighbor Gaussian processes.

They take arrays and frames (NumPy, pandas, polars) in raw units, return NumPy arrays, and train until convergence. The
method behind them is at ``gp_`` once they are fitted. Computation is in float64.

Cost: that of the method, and O(N) copies of the data.
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from pyro_nngp import models
from pyro_nngp._checks import check_choice, check_device, fail
from pyro_nngp._random import seeded
from pyro_nngp.distributions.quantiles import quantiles
from pyro_nngp.inference import fit
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, NegativeBinomial

_METHODS = {"vecchia": "Vecchia", "loo": "LOO", "mllk": "MLLk", "vnngp": "VNNGP", "npvi": "NPVI", "svgp": "SVGP"}
_BLOCK = 4_096  # new points per block of draws, for quantiles without a closed form

Method = Literal["vecchia", "loo", "mllk", "vnngp", "npvi", "svgp"]


class _NearestNeighborGP(BaseEstimator):
    """The base of all estimators: conversion to tensors, training, draws and quantiles."""

    gp_: Any

    def __init__(
        self,
        *,
        method: Method = "vnngp",
        kernel: Any = None,
        likelihood: Likelihood | None = None,
        num_neighbors: int | None = None,
        method_options: Mapping[str, Any] | None = None,
        fit_options: Mapping[str, Any] | None = None,
        device: Any = None,
        random_state: Any = 0,
        offset: int | str | None = None,
    ) -> None:
        self.offset = offset
        self.method = method
        self.kernel = kernel
        self.likelihood = likelihood
        self.num_neighbors = num_neighbors
        self.method_options = method_options
        self.fit_options = fit_options
        self.device = device
        self.random_state = random_state

    def _build(self, x: Tensor, y: Tensor, start: Any = None, weights: Tensor | None = None) -> None:
        """Build the method on the data and train it until convergence."""
        where = type(self).__name__
        check_choice(where, "method", self.method, _METHODS)
        options = dict(self.method_options or {})
        if self.method == "svgp":
            options = {"inducing": min(500, len(x))} | options
        elif self.num_neighbors is not None:
            options["num_neighbors"] = self.num_neighbors
        parts = (self.kernel, self._likelihood()) if start is None else (None, None)
        kernel, likelihood = copy.deepcopy(parts)
        method, seed = getattr(models, _METHODS[self.method]), self._seed()
        inputs, offset = self._split(x)
        if weights is not None:
            options["weights"] = weights
        self.gp_ = method(inputs, y, kernel, likelihood, start=start, seed=seed, offset=offset, **options)
        self._train(seed)

    def _likelihood(self) -> Likelihood | None:
        """The likelihood of the method: the user's, or one that suits the targets."""
        return self.likelihood

    def _extend(self, x: NDArray, y: NDArray) -> None:
        """Append rows and train further, starting from the present hyperparameters."""
        before, new = self.gp_, self._tensors(x, y)
        weights = None if before.weights is None else torch.ones_like(new[0][:, 0])
        if self.method == "svgp":  # more data may have more inducing points
            weights = None if weights is None else torch.cat([before.weights, weights])
            self._build(torch.cat([self._joined(before), new[0]]), torch.cat([before.y, new[1]]), before, weights)
            return
        inputs, offset = self._split(new[0])
        before.extend(inputs, new[1], offset=offset, weights=weights)
        self._train(self._seed())

    def _train(self, seed: int) -> None:
        """Train until convergence."""
        self.result_ = fit(self.gp_, **{"progress": False, "seed": seed, **(self.fit_options or {})})

    def _column(self) -> int | None:
        """The number of the column of offsets."""
        if self.offset is None:
            return None
        names, count = list(getattr(self, "feature_names_in_", ())), self.n_features_in_
        found = names.index(self.offset) if self.offset in names else self.offset
        if not isinstance(found, int) or not 0 <= found < count or count < 2:
            expectation = f"to be the name or number of one of {count} columns, not the only one"
            fail(type(self).__name__, "offset", expectation, repr(self.offset), "Name a column of X.")
        return found

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Inputs and offsets."""
        column = self._column()
        if column is None:
            return x, None
        return torch.cat([x[:, :column], x[:, column + 1 :]], 1), x[:, column]

    def _joined(self, gp: Any) -> Tensor:
        """The columns of X that a method was built from."""
        column = self._column()
        return gp.x if column is None else torch.cat([gp.x[:, :column], gp.offset[:, None], gp.x[:, column:]], 1)

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31))

    def _tensors(self, *arrays: NDArray) -> list[Tensor]:
        if self.device is not None:
            check_device(type(self).__name__, self.device)
        return [torch.tensor(part, dtype=torch.float64, device=self.device) for part in arrays]

    def _weighted(self, x: NDArray, y: NDArray, sample_weight: ArrayLike | None) -> tuple[NDArray, ...]:
        """The rows of positive weight, and their weights if there are any."""
        if sample_weight is None:
            return x, y
        where = f"{type(self).__name__}.fit"
        weights = check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
        if weights.shape != (len(x),):
            fail(where, "sample_weight", f"of shape ({len(x)},)", weights.shape, "Give one weight per row of X.")
        if (weights < 0).any():
            fail(where, "sample_weight", ">= 0", weights.min(), "A weight of 2 counts a row twice, 0 leaves it out.")
        keep = weights > 0
        if keep.sum() < 2:
            fail(where, "sample_weight", "not zero for two rows or more", f"{keep.sum()} of them", "Weigh more rows.")
        return x[keep], y[keep], weights[keep]

    def _inputs(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, dtype=np.float64)
        return torch.tensor(x, device=self.gp_.x.device)

    def _predictive(self, X: ArrayLike) -> Any:
        inputs, offset = self._split(self._inputs(X))
        with torch.no_grad():
            return self.gp_.predict(inputs, offset=offset)

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> NDArray:
        """Draws of y from the joint posterior predictive distribution.

        Args:
            X: inputs (P, D).
            n_samples: number of draws.
            random_state: seed or generator.

        Returns:
            Draws, (P, n_samples), or (P, T, n_samples) for T outputs.
        """
        seed = int(check_random_state(random_state).randint(2**31))
        inputs, offset = self._split(self._inputs(X))
        drawn = self.gp_.sample_y(inputs, n_samples, seed=seed, offset=offset)
        return drawn.movedim(-1, 0).movedim(1, -1).cpu().numpy()


class _Regressor(RegressorMixin, _NearestNeighborGP):
    """The base of the estimators of numbers and of counts."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @property
    def kernel_(self) -> Any:
        """The trained kernel."""
        check_is_fitted(self)
        return self.gp_.kernel

    @property
    def noise_(self) -> float | NDArray:
        """Variance of the noise, or of that of each output, (T,); with a prior the median of its guide."""
        check_is_fitted(self)
        if not isinstance(self.gp_.likelihood, Gaussian):
            raise AttributeError(f"a {type(self.gp_.likelihood).__name__} likelihood has no noise variance")
        variance = self.gp_.at_medians()[1].variance.detach().cpu().numpy()
        return variance.flatten() if variance.size > 1 else variance.item()

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> "_Regressor":
        """Train on data, which may be weighted.

        Args:
            X: inputs (N, D).
            y: targets (N,) or (N, T).
            sample_weight: weights >= 0 that multiply the log density of each row, (N,): 2 counts a row twice, 0 leaves
                it out. They are not normalized. None is 1.

        Raises:
            ValueError, TypeError: for malformed data, or weights that the method and likelihood do not take.
        """
        x, targets, *weights = self._tensors(*self._weighted(*self._data(X, y, reset=True), sample_weight))
        self._build(x, targets, None, *weights)
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> "_Regressor":
        """Append rows, of weight 1, and train further, starting from the present hyperparameters."""
        if not hasattr(self, "gp_"):
            return self.fit(X, y)
        self._extend(*self._data(X, y, reset=False))
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> NDArray | tuple[NDArray, NDArray]:
        """Predictive mean of y at X, (P,) or (P, T); with `return_std` also its standard deviation, noise included."""
        found = self._predictive(X)
        mean = found.mean.movedim(-1, 0).cpu().numpy()
        return (mean, found.variance.sqrt().movedim(-1, 0).cpu().numpy()) if return_std else mean

    def predict_interval(self, X: ArrayLike, coverage: float = 0.95) -> NDArray:
        """Central predictive intervals of y.

        Args:
            X: inputs (P, D).
            coverage: probability of the interval.

        Returns:
            Lower and upper ends, (P, 2), or (P, T, 2) for T outputs.

        Raises:
            ValueError: unless `coverage` is in (0, 1).
        """
        if not 0 < coverage < 1:
            where = f"{type(self).__name__}.predict_interval"
            fail(where, "coverage", "in (0, 1)", coverage, "Pass a probability such as 0.95.")
        return self._quantiles(X, [(1 - coverage) / 2, (1 + coverage) / 2])

    def _quantiles(self, X: ArrayLike, levels: list[float]) -> NDArray:
        """Quantiles of y, (P, len(levels)) or (P, T, len(levels))."""
        inputs, blocks = self._inputs(X), []
        levels_of = torch.tensor(levels, dtype=torch.float64, device=inputs.device)
        for rows in inputs.split(_BLOCK):
            with torch.no_grad(), seeded(0, rows):
                at, offset = self._split(rows)
                blocks.append(quantiles(self.gp_.predict(at, offset=offset), levels_of).movedim(0, -1).movedim(-2, 0))
        return torch.cat(blocks).cpu().numpy()

    def _data(self, X: ArrayLike, y: ArrayLike, reset: bool) -> tuple[NDArray, NDArray]:
        x, targets = validate_data(
            self,
            X,
            y,
            reset=reset,
            dtype=np.float64,
            multi_output=True,
            y_numeric=True,
            ensure_min_samples=2 if reset else 1,
        )
        return x, np.asarray(targets, dtype=np.float64)


class NNGPRegressor(_Regressor):
    """Regression with a nearest-neighbor Gaussian process, one output or several.

    Args:
        method: "vecchia", "loo", "mllk", "vnngp", "npvi" or "svgp", a class of :mod:`pyro_nngp.models`.
        kernel: a kernel of :mod:`pyro_nngp.kernels`, copied; None is Matern52 with one lengthscale per column.
        likelihood: likelihood of the noise, copied; None is Gaussian. Others, such as StudentT, need "vnngp" or "loo".
        num_neighbors: K; None is the method's choice.
        method_options: further arguments of the method, such as ``{"mean": LinearMean(2)}``.
        fit_options: arguments of :func:`pyro_nngp.fit`, such as ``{"max_seconds": 60}``.
        device: where to compute, such as "cuda"; None is the CPU.
        random_state: seed of orderings and minibatches.
        offset: name or number of a column of X that is added to the latent function, such as log hours for counts; the
            process does not depend on it. None is no offset.

    Attributes:
        gp_: the trained method.
        result_: the :class:`~pyro_nngp.inference.FitResult`.
        kernel_: the trained kernel.
        noise_: variance of the noise, or of that of each output; only with a Gaussian likelihood.
        n_features_in_, feature_names_in_: as in scikit-learn.

    Raises:
        ValueError, TypeError: for malformed data or arguments.
    """

    def __init__(
        self,
        *,
        method: Method = "vecchia",
        kernel: Any = None,
        likelihood: Likelihood | None = None,
        num_neighbors: int | None = None,
        method_options: Mapping[str, Any] | None = None,
        fit_options: Mapping[str, Any] | None = None,
        device: Any = None,
        random_state: Any = 0,
        offset: int | str | None = None,
    ) -> None:
        super().__init__(
            method=method,
            kernel=kernel,
            likelihood=likelihood,
            num_neighbors=num_neighbors,
            method_options=method_options,
            fit_options=fit_options,
            device=device,
            random_state=random_state,
            offset=offset,
        )


class NNGPCountRegressor(_Regressor):
    """Regression of counts on a nearest-neighbor Gaussian process by a log link.

    Args:
        method: as in :class:`NNGPRegressor`, of those that take counts: "vnngp", "loo", "npvi" or "svgp".
        kernel, num_neighbors, method_options, fit_options, device, random_state, offset: as in :class:`NNGPRegressor`.
        likelihood: copied; None is NegativeBinomial.

    Attributes:
        gp_, result_, kernel_, n_features_in_, feature_names_in_: as in :class:`NNGPRegressor`.

    Raises:
        ValueError, TypeError: for malformed data or arguments, and for what are not counts.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def _likelihood(self) -> Likelihood:
        return NegativeBinomial() if self.likelihood is None else self.likelihood


class NNGPClassifier(ClassifierMixin, _NearestNeighborGP):
    """Classification by nearest-neighbor Gaussian processes: one for two classes, else one for each class.

    Args:
        method: as in :class:`NNGPRegressor`, of those that take classes: "vnngp", "loo", "npvi" or "svgp".
        kernel, num_neighbors, method_options, fit_options, device, random_state, offset: as in :class:`NNGPRegressor`.
        likelihood: copied; None is Bernoulli for two classes and Categorical for more.

    Attributes:
        classes_: the labels.
        gp_, result_, n_features_in_, feature_names_in_: as in :class:`NNGPRegressor`.

    Raises:
        ValueError, TypeError: for malformed data or arguments, and for data of one class.
    """

    classes_: NDArray

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> "NNGPClassifier":
        """Train on data, which may be weighted.

        Args:
            X: inputs (N, D).
            y: labels (N,) of any kind.
            sample_weight: as in :meth:`NNGPRegressor.fit`; the classes are those of the rows of positive weight.

        Raises:
            ValueError, TypeError: for malformed data, or weights that the method and likelihood do not take.
        """
        return self._fit(X, y, None, sample_weight)

    def _fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None, sample_weight: ArrayLike | None = None
    ) -> "NNGPClassifier":
        x, labels = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(labels)
        x, labels, *given = self._weighted(x, labels, sample_weight)
        self.classes_ = np.unique(labels if classes is None else classes)
        if len(self.classes_) < 2:
            fail(type(self).__name__, "y", "of two classes or more", "one class", "Give rows of another class too.")
        inputs, numbers, *weights = self._tensors(x, self._numbers(labels), *given)
        self._build(inputs, numbers, None, *weights)
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> "NNGPClassifier":
        """Append rows of known classes, of weight 1, and train further from the present hyperparameters.

        Args:
            X: inputs (N, D).
            y: labels (N,).
            classes: all labels, in the first call; None is those of its rows. Later calls may repeat them.
        """
        if not hasattr(self, "gp_"):
            return self._fit(X, y, classes)
        if classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            where, cure = f"{type(self).__name__}.partial_fit", "Call fit on all data."
            expectation = f"to be those of the first call, {self.classes_.tolist()}"
            fail(where, "classes", expectation, np.unique(classes).tolist(), cure)
        x, labels = validate_data(self, X, y, reset=False, dtype=np.float64)
        self._extend(x, self._numbers(labels))
        return self

    def _numbers(self, labels: NDArray) -> NDArray:
        """Numbers of the classes of labels."""
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            where, cure = f"{type(self).__name__}.partial_fit", "Call fit on all data."
            fail(where, "y", f"of the classes {self.classes_.tolist()}", unknown.tolist(), cure)
        return np.searchsorted(self.classes_, labels)

    def predict_proba(self, X: ArrayLike) -> NDArray:
        """Predictive probabilities of the classes, (P, number of classes)."""
        probs = self._predictive(X).probs
        both = torch.stack([1 - probs, probs], -1) if probs.dim() == 1 else probs  # Bernoulli has that of the second
        return both.cpu().numpy()

    def predict(self, X: ArrayLike) -> NDArray:
        """The most probable class at each row of X, (P,)."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(-1)]

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> NDArray:
        """Draws of labels from the joint posterior predictive distribution, (P, n_samples)."""
        return self.classes_[super().sample_y(X, n_samples, random_state).astype(int)]

    def _likelihood(self) -> Likelihood:
        if self.likelihood is not None:
            return self.likelihood
        return Bernoulli() if len(self.classes_) == 2 else Categorical(len(self.classes_))


__all__ = ["NNGPClassifier", "NNGPCountRegressor", "NNGPRegressor"]
