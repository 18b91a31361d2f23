"""Regression of numbers and of counts."""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from pyro_nngp._checks import check_fraction
from pyro_nngp._kinds import check_flags
from pyro_nngp._random import seeded
from pyro_nngp.adapters.sklearn.base import NearestNeighborEstimator
from pyro_nngp.distributions.quantiles import quantiles
from pyro_nngp.likelihoods import Gaussian, Likelihood, NegativeBinomial

_BLOCK = 4_096  # new points per block of draws, for quantiles without a closed form


class _Regressor(RegressorMixin, NearestNeighborEstimator):
    """The base of the two estimators of numbers."""

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
        """Variance of the noise, of one output or of each, (T,); under a prior it is the median of the guide."""
        check_is_fitted(self)
        if not isinstance(self.gp_.likelihood, Gaussian):
            raise AttributeError(f"a {type(self.gp_.likelihood).__name__} likelihood has no noise variance")
        variance = self.gp_.bound().likelihood.variance.detach().cpu().numpy()
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
        check_flags(f"{type(self).__name__}.predict", return_std=return_std)
        predictive = self._predictive(X)
        mean = predictive.mean.movedim(-1, 0).cpu().numpy()
        return (mean, predictive.variance.sqrt().movedim(-1, 0).cpu().numpy()) if return_std else mean

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Coefficient of determination, R2, of the predictive means."""
        return super().score(*self._scored(X, y, sample_weight))

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
        where = f"{type(self).__name__}.predict_interval"
        check_fraction(where, "coverage", coverage, "Pass a probability such as 0.95.")
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
            self._array("X", X),
            self._array("y", y),
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
        method: "vecchia", "loo", "mllk", "vnngp", "npvi" or "svgp", a class of :mod:`pyro_nngp.models`; None is
            "vecchia" for Gaussian noise and "vnngp" for other likelihoods.
        kernel: a kernel of :mod:`pyro_nngp.kernels`, copied; None leaves it to the method.
        likelihood: likelihood of the noise, copied; None is Gaussian. Others, such as StudentT, go with "vnngp", "loo",
            "npvi" or "svgp".
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
        noise_: variance of the noise, one for each output; only with a Gaussian likelihood.
        n_features_in_, feature_names_in_: as in scikit-learn.

    Raises:
        ValueError, TypeError: for malformed data or arguments.
    """


class NNGPCountRegressor(_Regressor):
    """Regression of counts on a nearest-neighbor Gaussian process by a log link.

    Args:
        method: "vnngp", "loo", "npvi" or "svgp", a class of :mod:`pyro_nngp.models`; None is "vnngp".
        kernel, num_neighbors, method_options, fit_options, device, random_state, offset: as in :class:`NNGPRegressor`.
        likelihood: copied; None is NegativeBinomial.

    Attributes:
        gp_, result_, kernel_, n_features_in_, feature_names_in_: as in :class:`NNGPRegressor`.

    Raises:
        ValueError, TypeError: for malformed data or arguments, and for targets that are not counts.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def _likelihood(self) -> Likelihood:
        return NegativeBinomial() if self.likelihood is None else self.likelihood
