"""The base class of all methods: data, likelihood, mean function, hyperparameters and their starts.

Symbols: N data points, D inputs, T outputs, L latent functions, I a batch of data points, P new points.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from jaxtyping import Float, Int
from pyro import poutine
from torch import Tensor, nn

from pyro_nngp._checks import (
    check_callable,
    check_finite,
    check_int,
    check_memory,
    check_metric,
    check_new_inputs,
    check_number,
    check_seed,
    check_tensor,
    fail,
    undefined,
    warn,
    warn_if_coarse,
)
from pyro_nngp._random import seeded
from pyro_nngp.hyperparameters import (
    HyperparameterGuide,
    freeze,
    pyro_entry,
    release,
    scaled,
    unset_hyperparameters,
)
from pyro_nngp.hyperparameters.description import show_kind
from pyro_nngp.kernels import Matern52, neighbor_metric
from pyro_nngp.kernels.base import check_covariance
from pyro_nngp.kernels.metric import column_scale
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.linalg import DEFAULT_JITTER
from pyro_nngp.means import BasisMean, ConstantMean, LinearMean
from pyro_nngp.models.base.arguments import (
    as_stored,
    check_by_row,
    check_data,
    check_kernel_place,
    check_unshared,
    copied_parts,
)
from pyro_nngp.models.base.summary import summarize
from pyro_nngp.models.tower.new_data import GrowingData
from pyro_nngp.models.tower.sites import ByRow
from pyro_nngp.plausibility.data import (
    constant_outputs,
    warn_of_codes,
    warn_of_constants,
    warn_of_copies,
    warn_of_offset,
    warn_of_prior_variance,
    warn_of_spreads,
)
from pyro_nngp.plausibility.units import warn_of_units
from pyro_nngp.starts.from_data import Start, start_from_data
from pyro_nngp.storage import save

if TYPE_CHECKING:
    from pandas import DataFrame


class GPMethod(GrowingData):
    """A Gaussian-process method on data: base of the classes in ``pyro_nngp.models``.

    A subclass builds its parts after ``super().__init__`` and calls :meth:`finish` last. It defines ``model`` and
    ``guide``, which begin with :meth:`start_model` and :meth:`start_guide` and name their sites by :meth:`site`;
    predictions are in :mod:`pyro_nngp.models.tower.predictive`.

    Args:
        x: inputs (N, D): a tensor, or a NumPy array, a frame, or points of geopandas (:mod:`pyro_nngp.data.tables`).
        y: targets (N,), or (N, T) for T outputs of similar spread, of any of these kinds: they have independent
            latent functions of one kernel, and one noise. None where the model returns f for use in a larger program.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern52 with one
            lengthscale per column. Hyperparameters that were left unset start from the data
            (:mod:`pyro_nngp.starts.from_data`).
        likelihood: p(y | f); None is Gaussian, or without y makes ``model`` return f at the batch.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``; None is a learnable constant for each latent function,
            which starts at a robust level of the data. Parameters that it makes by ``pyro.param`` are trained, but
            ``state_dict()`` does not hold them and ``to()`` does not move them: give a module, or a ``PyroModule`` with
            ``PyroParam`` attributes, for that.
        jitter: relative nugget; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function as in
            :class:`~pyro_nngp.neighbors.NeighborGraph`; None is the metric of the kernel, which
            :meth:`refresh_neighbors` updates.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset: known part of f at each row, (N,), or (N, L) for L latent functions, such as the logarithm of an
            exposure under a log link; added to the mean function. Predictions take that of new rows, 0 without.
        weights: positive weights that multiply the log density of each row, (N,): a weight of 2 counts a row twice.
        trials: numbers of trials of each row, (N,), for ``Binomial()`` or ``BetaBinomial()``. Predictions take
            those of new rows, 1 without.
        limits: limits of detection of each row, (N,), for ``Censored(lower="limits")``; infinite where there is none.
            Predictions take those of new rows; without, they are of values that nothing limits.

    Attributes:
        x, y, offset, weights, trials, limits: the data, as buffers.
        columns, outputs: names of the columns of x and y where they came in frames; columns of new frames are compared.
        classes: names of the classes, for maps, if they have been set.
        latent_shape: () for one latent function, (L,) for several.
        generative: whether draws of y from ``model`` are from the prior predictive distribution; otherwise they are
            conditioned on the data of the neighbors.
        unit: spread of the latent functions in the data, 1 on the scale of a link; the scale of gradient steps.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, targets outside the support
            of the likelihood, a kernel for other columns, a mean function that does not give one value per row.
    """

    generative: bool = True
    has_own_kernels = False  # whether parts of the method hold the kernels
    shares_scale = True  # whether all outputs have the variance of one kernel, and one noise
    solves_coefficients = False  # whether solve() sets the joint posterior of coefficients with normal priors
    latents: tuple[str, ...] = ()  # attributes with priors that are latent variables, not hyperparameters
    own_hyperparameters: tuple[str, ...] = ()  # attributes that are hyperparameters, beside those of the parts
    columns: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    _first_values: Mapping[str, Tensor] = {}  # of hyperparameters that were left unset
    classes: tuple[str, ...] | None = None

    def __init__(
        self,
        x: Float[Tensor, "N D"],
        y: Float[Tensor, "N *T"] | Int[Tensor, "N *T"] | None,
        kernel: Any,
        likelihood: Likelihood | None,
        mean: Callable | None = None,
        jitter: float | None = None,
        metric: Any = None,
        start: Any = None,
        **by_row: Tensor | None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        if torch.is_inference_mode_enabled():
            cure = "Its tensors could not be trained: build it outside, and predict inside."
            fail(where, "gradients", "to be possible", "torch.inference_mode()", cure, RuntimeError)
        given = {"kernel": kernel, "likelihood": likelihood, "mean": mean}
        if start is not None:
            kernel, likelihood, mean = copied_parts(where, start, kernel, likelihood, mean, y is not None)
        if likelihood is None and y is not None:
            likelihood = Gaussian()
        self.latent_shape = check_data(where, x, y, likelihood, self.takes_missing)
        for name, value in check_by_row(where, x, y, likelihood, self.latent_shape, by_row).items():
            self.register_buffer(name, value)
        warn_if_coarse(where, x)
        for arg, part in given.items():
            check_unshared(where, arg, part, x)
        if kernel is None and not self.has_own_kernels:
            kernel = Matern52(x.shape[1])
        if kernel is not None:
            check_kernel_place(where, kernel)
            check_covariance(where, kernel, x)
        warn_of_units(where, x, self.columns, kernel)
        if mean is not None:
            check_callable(where, "mean", mean, "Pass a function (B, D) -> (B,) or a module.")
        check_metric(where, "metric", metric, x.shape[1])
        if jitter is not None:
            check_number(where, "jitter", jitter, cure="It is a relative nugget; the default is 1e-6.")
        self.kernel, self.likelihood = kernel, likelihood
        self.jitter = DEFAULT_JITTER if jitter is None else jitter
        self.mean = ConstantMean(num_latents=self.num_latents) if mean is None else mean
        for part in (kernel, likelihood, self.mean):
            if isinstance(part, nn.Module):
                part.to(x)
        self.register_buffer("x", x.detach().clone())
        self.register_buffer("y", as_stored(y, likelihood, x))
        self._try_mean(x[:2])
        self._try_likelihood()
        self.metric, self._origin = metric, [] if start is None else [start]
        if not self.has_own_kernels:
            self.begin()

    def begin(self) -> None:
        """Start unset hyperparameters from the data; a method with several kernels calls it after building them."""
        self.hyper_guide = HyperparameterGuide(self, latents=self.latents)
        unset = unset_hyperparameters(self)
        found = self.start_hyperparameters()
        self.unit = found.unit
        modules = {module: path for path, module in self.named_modules()}
        self._first_values = {
            f"{modules[part]}.{name}": part._parameters[f"{name}_unconstrained"].detach().clone()
            for part, name in unset
            if name in part._pyro_params
        }
        if isinstance(self.mean, BasisMean):
            self.mean.start(found.level, found.spread, self.x)
        if self.y is not None and self.likelihood is not None:
            self._warn_of_data(self.y, self.likelihood, found.spread)
            self._warn_of_priors(found.spread)

    def _warn_of_data(self, y: Tensor, likelihood: Likelihood, spread: Tensor) -> None:
        """Warn of targets and offsets that are hardly meant."""
        where, constant = type(self).__name__, constant_outputs(y)
        if self.offset is not None:
            warn_of_offset(where, self.offset, y, likelihood, self.latent_shape)
        if all(value is None for value in (self.offset, self.trials, self.limits)):
            warn_of_constants(where, y, constant)
        if self.shares_scale and y.dim() == 2 and likelihood.num_latents is None:
            warn_of_spreads(where, spread.masked_fill(torch.tensor(constant, device=spread.device), 0.0))
        if likelihood.is_gaussian:
            warn_of_copies(where, self.x, y)
            warn_of_codes(where, y)

    @pyro_entry
    @torch.no_grad()
    def _warn_of_priors(self, spread: Tensor) -> None:
        """Warn of priors for data in other units."""
        self.hyper_guide.median()
        warn_of_prior_variance(type(self).__name__, self.modules(), spread)

    @property
    def started_hyperparameters(self) -> list[str]:
        """Names of parameters that were left unset, and started from the data."""
        return list(self._first_values)

    @property
    def untrained_hyperparameters(self) -> list[str]:
        """Names of parameters that were left unset and still have the values that they started with."""
        found = []
        for name, first in self._first_values.items():
            path, _, attribute = name.rpartition(".")
            now = self.get_submodule(path)._parameters.get(f"{attribute}_unconstrained")
            if now is not None and torch.equal(now.detach().cpu(), first.cpu()):
                found.append(name)
        return found

    @pyro_entry
    @torch.no_grad()
    def start_hyperparameters(self) -> Start:
        """Start the unset hyperparameters of kernel and likelihood from the data."""
        self.hyper_guide.median()
        rest = self.known_trend(), self.jitter, self.offset, self.trials
        return start_from_data(self.kernel, self.likelihood, self.x, self._targets(None), *rest)

    def known_trend(self) -> Callable[[Tensor], Tensor] | None:
        """The mean function at rows of the data; None if it is to be started from them."""
        is_started = isinstance(self.mean, BasisMean) and not self.mean.is_set
        return None if is_started else lambda rows: self._mean_at(self.x[rows])

    @pyro_entry
    @torch.no_grad()
    def neighbor_metric(self) -> Any:
        """The metric of neighbors: the user's, or that of the kernel, or kernels, at the present hyperparameters."""
        if self.metric is not None:
            return self.metric
        self.hyper_guide.median()
        return neighbor_metric(self.kernel, self.x)

    def refresh_table(self) -> None:
        """Find the neighbors of a method with a table of them again, in its present metric."""
        self._place_medians()
        self.graph.refresh(self.neighbor_metric() if self.metric is None else None)

    @pyro_entry
    @torch.no_grad()
    def at_medians(self) -> tuple[Any, Any, Any]:
        """Copies of kernel, likelihood and mean function whose hyperparameters are numbers; those with priors, medians.

        They serve outside of Pyro, to plot a covariance function for instance.
        """
        self.hyper_guide.median()
        return freeze(self.kernel), freeze(self.likelihood), freeze(self.mean)

    def finish(self, first: Callable[[], None] | None = None) -> None:
        """Build the guide of all hyperparameters that have priors, and do `first` at their initial values."""
        self.build_guide()
        if isinstance(self.mean, LinearMean) and self.mean.is_sampled_alone and hasattr(self, "guide"):
            warn(
                f"{type(self).__name__}: its guide holds the coefficients of the mean independent of f, so that their "
                "intervals are too narrow. Take Vecchia, LOO or VNNGP with sites, or NUTS."
            )
        for origin in self._origin:
            self.hyper_guide.take(origin.hyper_guide)
        self._origin = []
        if first is not None:
            first()
        release(self)  # parts that ran in the constructors

    def build_guide(self) -> None:
        """Build the guide of hyperparameters; coefficients whose posterior the method solves for are not in it."""
        if isinstance(self.mean, LinearMean):
            self.mean.has_posterior = self.solves_coefficients and self.mean.is_normal
        self.hyper_guide = HyperparameterGuide(self, latents=self.latents)

    def extra_repr(self) -> str:
        """Sizes, dtype and device, then the method's parameters, as ``print`` shows them."""
        sizes = f"N={self.num_data}, D={self.x.shape[1]}{self.show_functions()}, {show_kind(self.x)}"
        return ", ".join(part for part in (sizes, super().extra_repr()) if part)

    def show_functions(self) -> str:
        """The numbers of outputs and latent functions among the sizes."""
        return f", L={self.num_latents}" if self.latent_shape else ""

    def summary(self, probability: float = 0.95) -> "DataFrame":
        """Table of the hyperparameters of kernel, likelihood and mean function, and of the method itself.

        Args:
            probability: probability of the intervals.

        Returns:
            A pandas DataFrame with one row for each number, such as ``kernel.lengthscale[0]``, and the columns
            ``estimate`` (the value, or the median of the guide where there is a prior), ``lower`` and ``upper`` (ends
            of the guide's central interval; NaN for a point estimate) and ``prior`` (its class; empty without one).

        Raises:
            ValueError, TypeError: unless `probability` is a number in (0, 1).
        """
        return summarize(self, self.hyper_guide, probability)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the method with its data, neighbors and parameters to a file that ``pyro_nngp.load`` reads.

        Args:
            path: the file, in the safetensors format; its folder must exist.

        Raises:
            ModelFileError: if a part cannot be named in a file, such as a lambda as the mean function.
        """
        self.check_whole("save")
        save(self, path)

    def _place_inducing(self, z: Float[Tensor, "M D"], learn: bool) -> None:
        """Inducing points, as a parameter or as a buffer."""
        self.learn_inducing = learn
        if learn:
            self.z = scaled(z, column_scale(self.x))
        else:
            self.register_buffer("z", z.detach().clone())

    def undefined(self, hook: str) -> NoReturn:
        """Raise ``NotImplementedError`` for a method that a subclass has to define."""
        undefined(self, hook, "method")

    @torch.no_grad()
    def _try_mean(self, x: Tensor) -> None:
        """Raise unless the mean function can be evaluated at x and returns one value per row."""
        with poutine.block(), seeded(0, x):
            try:
                self._mean_at(x)
            except (RuntimeError, TypeError, IndexError) as error:
                where, expectation = type(self).__name__, f"to take inputs of shape {tuple(x.shape)}"
                cure = "It is called with rows of x, (B, D)."
                fail(where, "mean", expectation, f"{type(error).__name__} ({error})", cure, type(error))

    def _try_likelihood(self) -> None:
        """Raise if hyperparameters of the likelihood do not broadcast against the data."""
        if self.likelihood is None:
            return
        f = self.x.new_zeros(*self.latent_shape, len(self.x))
        want = f.shape if self.likelihood.num_latents is None else f.shape[1:]
        with poutine.block(), seeded(0, f), torch.no_grad():
            try:
                found: Any = self.likelihood(f).batch_shape
            except (RuntimeError, ValueError, IndexError) as error:
                found = f"{type(error).__name__} ({error!s:.120})"
        if found != want:
            where, cure = type(self).__name__, "Give scalars; or (T, 1), one value for each of T outputs."
            fail(where, "likelihood", f"with hyperparameters that broadcast to {tuple(want)}", found, cure)

    def _check_new(self, method: str, x_new: Any) -> None:
        """Raise unless `x_new` has the columns, dtype and device of the data."""
        check_new_inputs(f"{type(self).__name__}.{method}", x_new, self.x)
        self.warn_of_intervals()

    def new_offset(self, method: str, x_new: Tensor, offset: Tensor | None) -> Tensor:
        """The offset at new points, (P,) or (L, P); 0 without one."""
        if offset is None:
            return self.x.new_zeros(())
        where, shapes = f"{type(self).__name__}.{method}", [(len(x_new),), (len(x_new), *self.latent_shape)]
        check_tensor(where, "offset", offset)
        if tuple(offset.shape) not in shapes:
            fail(where, "offset", f"of shape {shapes[-1]}", tuple(offset.shape), "Give one value per row of x_new.")
        check_finite(where, "offset", offset)
        return offset.to(self.x).movedim(0, -1)

    def new_by_row(self, x_new: Tensor, trials: Tensor | None, limits: Tensor | None) -> ByRow:
        """Numbers of trials and limits at new points, for likelihoods that have them."""
        where, likelihood = f"{type(self).__name__}.predict", self.likelihood
        takes = likelihood is not None and likelihood.takes_trials, likelihood is not None and likelihood.takes_limits
        found, each = {}, likelihood is not None and likelihood.takes_missing
        cures = "They are for Binomial().", 'They are for Censored(lower="limits").'
        for name, value, is_taken, cure in zip(("trials", "limits"), (trials, limits), takes, cures, strict=True):
            if value is None:
                continue
            if not is_taken:
                fail(where, name, "None for this likelihood", "numbers", cure)
            check_tensor(where, name, value)
            bad = value.isnan() if name == "limits" else value < 1
            shapes = [(len(x_new),), (len(x_new), *self.latent_shape)][: 1 + each]
            if value.shape not in shapes or bool(bad.any()):
                expectation = f"to be numbers{'' if name == 'limits' else ' >= 1'}, ({len(x_new)},)"
                actual = f"others of shape {tuple(value.shape)}"
                fail(where, name, expectation, actual, "Give one per row of x_new.")
            found[name] = value.to(self.x).movedim(0, -1)
        if takes[0] and trials is None:
            found["trials"] = torch.ones_like(x_new[:, 0])
        return found

    def warn_of_intervals(self) -> None:
        """Warn if intervals of f are known to be wrong; most methods have nothing to warn of."""

    def _check_sample(self, x_new: Any, num_samples: Any, seed: Any) -> None:
        """Raise unless ``sample`` can make that many draws at `x_new`."""
        self._check_new("sample", x_new)
        where = f"{type(self).__name__}.sample"
        check_int(where, "num_samples", num_samples, 1, "It is a number of draws.")
        if seed is not None:
            check_seed(where, seed)
        check_memory(where, "draws", num_samples * len(x_new) * math.prod(self.latent_shape), x_new.dtype)
