"""The base of the estimators: conversion to tensors, training, weights, offsets and joint draws."""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from pyro_nngp._checks import check_choice, check_device, check_tensor, fail
from pyro_nngp._kinds import check_kind
from pyro_nngp._masks import with_nan
from pyro_nngp.inference import fit
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.models import LOO, NPVI, SVGP, VNNGP, MLLk, Vecchia

_METHODS = {method.__name__.lower(): method for method in (Vecchia, LOO, MLLk, VNNGP, NPVI, SVGP)}

Method = Literal["vecchia", "loo", "mllk", "vnngp", "npvi", "svgp"]


class NearestNeighborEstimator(BaseEstimator):
    """The base of all estimators; arguments as in :class:`~pyro_nngp.adapters.sklearn.NNGPRegressor`."""

    gp_: Any

    def __init__(
        self,
        *,
        method: Method | None = None,
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
        likelihood = self._likelihood()
        name = self.method
        if name is None:
            name = "vecchia" if likelihood is None or isinstance(likelihood, Gaussian) else "vnngp"
        check_choice(type(self).__name__, "method", name, _METHODS)
        options = self._options("method_options", 'Write {"ordering": "maximin"}.')
        if name == "svgp":
            options = {"inducing": min(500, len(x))} | options
        elif self.num_neighbors is not None:
            options["num_neighbors"] = self.num_neighbors
        if weights is not None:
            options["weights"] = weights
        kernel, likelihood = copy.deepcopy((self.kernel, likelihood)) if start is None else (None, None)
        seed = self._seed()
        inputs, offset = self._split(x)
        self.gp_ = _METHODS[name](inputs, y, kernel, likelihood, start=start, seed=seed, offset=offset, **options)
        self._train(seed)

    def _likelihood(self) -> Likelihood | None:
        """The user's likelihood, or one that suits the targets."""
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
        options = self._options("fit_options", 'Write {"num_steps": 500}.')
        self.result_ = fit(self.gp_, **({"progress": False, "seed": seed} | options))

    def _options(self, name: str, cure: str) -> dict[str, Any]:
        """The options of a parameter of the estimator, none if it is None."""
        options = getattr(self, name)
        if options is None:
            return {}
        check_kind(type(self).__name__, name, options, Mapping, "a dictionary", cure)
        if not all(isinstance(key, str) for key in options):
            fail(type(self).__name__, name, "to have names as keys", list(options), cure, TypeError)
        return dict(options)

    def _array(self, name: str, values: Any) -> Any:
        """An argument for the checks of scikit-learn, NaN where an array of another library has no value."""
        if isinstance(values, Tensor):
            check_tensor(type(self).__name__, name, values)
            return values.detach().cpu().numpy()
        return with_nan(values)

    def _column(self) -> int | None:
        """Number of the column of X that holds offsets."""
        if self.offset is None:
            return None
        names, count = list(getattr(self, "feature_names_in_", ())), self.n_features_in_
        number = names.index(self.offset) if self.offset in names else self.offset
        if not isinstance(number, int) or not 0 <= number < count or count < 2:
            expectation = f"to be the name or number of one of {count} columns, not the only one"
            fail(type(self).__name__, "offset", expectation, repr(self.offset), "Name a column of X.")
        return number

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Inputs and offsets among the columns of X."""
        column = self._column()
        if column is None:
            return x, None
        return torch.cat([x[:, :column], x[:, column + 1 :]], 1), x[:, column]

    def _joined(self, gp: Any) -> Tensor:
        """The columns of X from which a method was built."""
        column = self._column()
        return gp.x if column is None else torch.cat([gp.x[:, :column], gp.offset[:, None], gp.x[:, column:]], 1)

    def _seed(self) -> int:
        try:
            return int(check_random_state(self.random_state).randint(2**31))
        except (TypeError, ValueError) as error:
            expectation, cure = "to seed a generator of NumPy", "Pass an integer in 0..2**32-1, or None."
            where, actual = type(self).__name__, f"{self.random_state!r:.40}"
            fail(where, "random_state", expectation, actual, cure, type(error), error)

    def _tensors(self, *arrays: NDArray) -> list[Tensor]:
        if self.device is not None:
            check_device(type(self).__name__, self.device)
        return [torch.tensor(part, dtype=torch.float64, device=self.device) for part in arrays]

    def _weighted(self, x: NDArray, y: NDArray, sample_weight: ArrayLike | None) -> tuple[NDArray, ...]:
        """The rows of positive weight, and their weights if there are any."""
        if sample_weight is None:
            return x, y
        where = f"{type(self).__name__}.fit"
        weights = check_array(
            self._array("sample_weight", sample_weight), ensure_2d=False, dtype=np.float64, input_name="sample_weight"
        )
        if weights.shape != (len(x),):
            fail(where, "sample_weight", f"of shape ({len(x)},)", weights.shape, "Give one weight per row of X.")
        if (weights < 0).any():
            fail(where, "sample_weight", ">= 0", weights.min(), "A weight of 2 counts a row twice, 0 leaves it out.")
        keep = weights > 0
        if keep.sum() < 2:
            fail(where, "sample_weight", "not zero for two rows or more", f"{keep.sum()} of them", "Weigh more rows.")
        return x[keep], y[keep], weights[keep]

    def _scored(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None) -> tuple[Any, Any, Any]:
        """Arguments of ``score``, of which scikit-learn does not see the masks; missing values are errors."""
        options: dict[str, Any] = {"ensure_2d": False, "dtype": None}
        if sample_weight is not None:
            sample_weight = check_array(
                self._array("sample_weight", sample_weight), input_name="sample_weight", **options
            )
        return self._array("X", X), check_array(self._array("y", y), input_name="y", **options), sample_weight

    def _inputs(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        x = validate_data(self, self._array("X", X), reset=False, dtype=np.float64)
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
