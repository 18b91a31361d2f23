"""Classification of labels."""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from pyro_nngp._checks import fail
from pyro_nngp.adapters.sklearn.base import NearestNeighborEstimator
from pyro_nngp.likelihoods import Bernoulli, Categorical, Likelihood


class NNGPClassifier(ClassifierMixin, NearestNeighborEstimator):
    """Classification by nearest-neighbor Gaussian processes: one for two classes, else one for each class.

    Args:
        method: "vnngp", "loo", "npvi" or "svgp", a class of :mod:`pyro_nngp.models`; None is "vnngp".
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
            sample_weight: as in :meth:`NNGPRegressor.fit`; classes are read from rows of positive weight.

        Raises:
            ValueError, TypeError: for malformed data, or weights that the method and likelihood do not take.
        """
        return self._fit(X, y, None, sample_weight)

    def _fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None, sample_weight: ArrayLike | None = None
    ) -> "NNGPClassifier":
        x, labels = validate_data(
            self, self._array("X", X), self._array("y", y), dtype=np.float64, ensure_min_samples=2
        )
        check_classification_targets(labels)
        x, labels, *given = self._weighted(x, labels, sample_weight)
        self.classes_ = np.unique(labels) if classes is None else self._listed(classes)
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
            classes: all labels, in the first call; None reads them from its rows. Later calls may repeat them.
        """
        if not hasattr(self, "gp_"):
            return self._fit(X, y, classes)
        if classes is not None and not np.array_equal(self._listed(classes), self.classes_):
            where, cure = f"{type(self).__name__}.partial_fit", "Call fit on all data."
            expectation = f"to be those of the first call, {self.classes_.tolist()}"
            fail(where, "classes", expectation, self._listed(classes).tolist(), cure)
        x, labels = validate_data(self, self._array("X", X), self._array("y", y), reset=False, dtype=np.float64)
        self._extend(x, self._numbers(labels))
        return self

    def _listed(self, classes: ArrayLike) -> NDArray:
        """Different classes, in order."""
        try:
            return np.unique(classes)
        except (TypeError, ValueError, RuntimeError) as error:
            where, actual = f"{type(self).__name__}.partial_fit", type(classes).__name__
            fail(where, "classes", "to be a list of labels", actual, "List all labels.", TypeError, error)

    def _numbers(self, labels: NDArray) -> NDArray:
        """Index of the class of each label."""
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            where, cure = f"{type(self).__name__}.partial_fit", "Call fit on all data."
            fail(where, "y", f"of the classes {self.classes_.tolist()}", unknown.tolist(), cure)
        return np.searchsorted(self.classes_, labels)

    def predict_proba(self, X: ArrayLike) -> NDArray:
        """Predictive probabilities of the classes, (P, number of classes)."""
        probs = self._predictive(X).probs
        both = torch.stack([1 - probs, probs], -1) if probs.dim() == 1 else probs  # Bernoulli: of the second class
        return both.cpu().numpy()

    def predict(self, X: ArrayLike) -> NDArray:
        """The most probable class at each row of X, (P,)."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(-1)]

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Fraction of rows whose most probable class is their label."""
        return super().score(*self._scored(X, y, sample_weight))

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> NDArray:
        """Draws of labels from the joint posterior predictive distribution, (P, n_samples)."""
        return self.classes_[super().sample_y(X, n_samples, random_state).astype(int)]

    def _likelihood(self) -> Likelihood:
        if self.likelihood is not None:
            return self.likelihood
        return Bernoulli() if len(self.classes_) == 2 else Categorical(len(self.classes_))
