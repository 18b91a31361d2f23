"""A Gaussian-process method on data: its parts, and predictions from its posterior.

A subclass builds its parts after ``super().__init__``, calls :meth:`Method._start` once it has all kernels, and
defines ``model`` and ``guide``, which begin with :meth:`~pyro_nngp.models.base.program.Program.model` and
:meth:`~pyro_nngp.models.base.program.Program.guide`, and :meth:`Method.posterior`. Whatever is below these entries
takes a :class:`~pyro_nngp.bound.Bound` and has no Pyro effects.

Symbols: N data points, D inputs, T outputs, L latent functions, I a batch of data points, P new points, S draws.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pyro_nngp._autograd import is_transformed
from pyro_nngp._checks import check_new_inputs, fail, undefined, warn
from pyro_nngp._locks import exclusive, shared
from pyro_nngp._versions import Kept
from pyro_nngp.bound import Bound, read, versions_of
from pyro_nngp.data.tables import Table
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.rows import ShardedRows
from pyro_nngp.hyperparameters import GPModule, HyperparameterGuide, check_same_sites
from pyro_nngp.hyperparameters.description import show_kind
from pyro_nngp.hyperparameters.priors import modules_with_priors, sampled_attributes
from pyro_nngp.hyperparameters.values import Values
from pyro_nngp.kernels import neighbor_metric
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.models.base import construction, entries, extension, several_processes
from pyro_nngp.models.base.arguments import default_kernel, new_by_row, new_offset
from pyro_nngp.models.base.draws import Draw, can_be_mapped
from pyro_nngp.models.base.information import Information
from pyro_nngp.models.base.posterior import Posterior
from pyro_nngp.models.base.summary import summarize
from pyro_nngp.models.base.targets import Targets
from pyro_nngp.rows import VALUES, Part, Rows
from pyro_nngp.starts.from_data import Start, start_from_data
from pyro_nngp.storage import save

if TYPE_CHECKING:
    from pandas import DataFrame


class Method(GPModule):
    """Base of the classes in ``pyro_nngp.models``.

    Args:
        x: inputs (N, D): a tensor, or a NumPy array, a frame, or points of geopandas (:mod:`pyro_nngp.data.tables`).
        y: targets (N,), or (N, T) for T outputs of similar spread, of any of these kinds: they have independent
            latent functions of one kernel, and one noise. None where the model returns f for use in a larger program.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern of a
            learned smoothness, for labels and below 100 rows Matern52, with one lengthscale per column.
            Hyperparameters that were left unset start from the data (:mod:`pyro_nngp.starts`).
        likelihood: p(y | f); None is Gaussian, or without y makes ``model`` return f at the batch.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``; None is a learnable constant for each latent function,
            which starts at a robust level of the data. Parameters that it makes by ``pyro.param`` are in Pyro's store:
            they are trained, but ``state_dict()`` does not hold them and ``to()`` does not move them. Give a module,
            or a ``PyroModule`` with ``PyroParam`` attributes, for that.
        jitter: relative nugget; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function as in
            :class:`~pyro_nngp.neighbors.NeighborGraph`; None is the metric of the kernel, which
            ``refresh_neighbors`` updates.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset: known part of f at each row, (N,), or (N, L) for L latent functions, such as the logarithm of an
            exposure under a log link; added to the mean function. Predictions take the offset of new rows, 0 without.
        weights: positive weights that multiply the log density of each row, (N,): a weight of 2 counts a row twice.
        trials: numbers of trials of each row, (N,), for ``Binomial()`` or ``BetaBinomial()``. Predictions take
            numbers for new rows, 1 without.
        limits: limits of detection of each row, (N,), for ``Censored(lower="limits")``; infinite where there is none.
            Predictions take limits of new rows; without limits they predict values that nothing limits.

    Attributes:
        x, y, offset, weights, trials, limits: the data, as buffers.
        columns, outputs: names of the columns of x and y where they came in frames; columns of new frames are compared.
        classes: names of the classes, for maps, if they have been set.
        latent_shape: () for one latent function, (L,) for several.
        shard: the rows of all processes, if these are not all; else None.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, targets outside the support
            of the likelihood, a kernel for other columns, a mean function that does not give one value per row.
    """

    x: Tensor
    y: Any
    offset: Any
    weights: Any
    trials: Any
    limits: Any
    kernel: Any
    likelihood: Any
    mean: Any
    graph: Any
    q: Any
    latent_shape: tuple[int, ...]
    _unit: float  # spread of the latent functions in the data, 1 on the scale of a link: scale of gradient steps
    hyper_guide: HyperparameterGuide
    columns: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    shard: Any = None
    _default_kernel: Callable[..., Any] = staticmethod(default_kernel)  # of x and the likelihood, where none is given
    _hyperparameters: tuple[str, ...] = ()  # attributes that are hyperparameters, beside the parts' attributes
    _targets = Targets()
    _latents: tuple[str, ...] = ()  # attributes with priors that are latent variables, not hyperparameters
    _points: tuple[str, ...] = ()  # parameters or buffers that are inducing points
    _first_values: Mapping[str, Tensor] = {}  # of hyperparameters that were left unset
    _looks_for_far_points = True  # until a prediction has been the mean function

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
        parts = construction.checked_parts(self, x, y, kernel, likelihood, mean, jitter, metric, start, by_row)
        self.latent_shape, self.metric, self.jitter = parts.latent_shape, metric, parts.jitter
        self.kernel, self.likelihood, self.mean = parts.kernel, parts.likelihood, parts.mean
        for part in (self.kernel, self.likelihood, self._modules.get("mean")):
            if isinstance(part, nn.Module):
                part.to(x)
        for name, value in parts.values.items():
            self.register_buffer(name, value)
        self._origin = () if start is None else (start,)  # in a tuple: it is no part of this method

    def _start(self, start_from: construction.StartFrom | None = None, solves_coefficients: bool = False) -> None:
        """Start unset hyperparameters from the data, and build the guide of those that have priors.

        Args:
            start_from: starts unset hyperparameters of kernel and likelihood from the data, in place, given values of
                those with priors, and the mean function at rows of the data, None if it is to be started from them.
                None is :func:`~pyro_nngp.starts.from_data.start_from_data`.
            solves_coefficients: whether the method solves for the joint posterior of coefficients with normal priors.
        """
        construction.start(self, self._start_from if start_from is None else start_from, solves_coefficients)

    def _start_from(self, at: Values, trend: Callable[[Tensor], Tensor] | None) -> Start:
        """Start the unset hyperparameters of kernel and likelihood from x and y."""
        rest = self.jitter, self.offset, self.trials, at
        return start_from_data(self.kernel, self.likelihood, self.x, self.rows.targets(), trend, *rest)

    # What stands below the entries.

    @property
    def rows(self) -> Rows:
        """The data."""
        values: Any = {name: self._buffers[name] for name in VALUES}
        return Rows(**values) if self.shard is None else ShardedRows(**values, shard=self.shard)

    @property
    def num_data(self) -> int:
        """N; on several processes the number of local rows, which come first in x and y."""
        return self.rows.num_data

    @property
    def num_latents(self) -> int | None:
        """L; None for one latent function, without an extra dimension."""
        return self.latent_shape[0] if self.latent_shape else None

    @property
    def num_plates(self) -> int:
        """Number of plates of the model: of the data, and of latent functions."""
        return 1 + len(self.latent_shape)

    def site(self, name: str) -> str:
        """Full name of a site or plate: with the name of the method, if any, as prefix."""
        return f"{self._pyro_name}.{name}" if self._pyro_name else name

    def bound(self) -> Bound:
        """The present hyperparameters as values; those with priors at the median of their guide.

        They serve outside of Pyro: ``gp.bound().kernel`` plots a covariance function, for instance. Without gradients
        they stay from the last call while nothing has changed.
        """
        check_same_sites(type(self).__name__, self, self.hyper_guide)

        def at_medians() -> Bound:
            return read(self, self.hyper_guide.medians(), is_median=True)

        if torch.is_grad_enabled() or is_transformed():
            return at_medians()
        return self._kept("bound").get(versions_of(self), at_medians)

    def _kept(self, name: str) -> Kept:
        """A result that is kept until the method changes."""
        return self.__dict__.setdefault("_results", {}).setdefault(name, Kept())

    def _bound_of_plans(self) -> Bound:
        """Hyperparameters for what no posterior draw changes, such as neighbors.

        They equal :meth:`bound`; with priors that came after the guide was built, their medians.
        """
        if set(sampled_attributes(self)) <= set(self.hyper_guide._sites):
            return self.bound()
        return read(self, HyperparameterGuide(self, latents=self._latents).medians(), is_median=True)

    def posterior(self, bound: Bound, draw: Draw | None = None, part: Part | None = None) -> Posterior:
        """The posterior of f at some hyperparameters.

        Args:
            bound: the hyperparameters.
            draw: a posterior draw of all sites, at whose latent values f is; None integrates over the guide.
            part: some rows of all processes that take the place of the data.
        """
        undefined(self, "posterior", "method")

    def _posterior_in_guide(self, bound: Bound, draw: Draw, part: Part | None = None) -> Posterior:
        """The posterior of f at a draw of all sites from the guide; arguments as of :meth:`posterior`."""
        return self.posterior(bound, draw, part)

    @torch.no_grad()
    def _neighbor_metric(self) -> Any:
        """The metric of neighbors: the user's, or the kernel's, or kernels', at the present hyperparameters."""
        return neighbor_metric(self.bound().kernel, self.x) if self.metric is None else self.metric

    def _neighbors_changed(self) -> None:
        """Update what depends on the neighbors: on several processes the rows of the halo."""
        several_processes.fetch_halo(self)

    @property
    def loo_kind(self) -> str | None:
        """Description of the densities of :meth:`loo`, for exports; None without a likelihood, or such densities."""
        posterior = None if self.likelihood is None else self.posterior(self._bound_of_plans())
        return posterior.loo_kind if posterior is not None and posterior.has_leave_one_out else None

    @property
    def _maps_draws(self) -> bool:
        """Whether several posterior draws go through ``torch.vmap``, with the priors that the model has."""
        return self.rows.is_whole and can_be_mapped(modules_with_priors(self))

    @property
    def started_hyperparameters(self) -> dict[str, bool]:
        """Names of parameters that were left unset and started from the data, and whether they have changed since."""
        return construction.changed(self, self._first_values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(self, *args, **kwargs)  # without the context of a Pyro program

    def extra_repr(self) -> str:
        """Sizes, dtype and device, then the method's parameters, as ``print`` shows them."""
        sizes = f"N={self.num_data}, D={self.x.shape[1]}{self._show_functions()}, {show_kind(self.x)}"
        return ", ".join(part for part in (sizes, super().extra_repr()) if part)

    def _show_functions(self) -> str:
        """The numbers of outputs and latent functions among the sizes."""
        return f", L={self.num_latents}" if self.latent_shape else ""

    def summary(self, probability: float = 0.95) -> "DataFrame":
        """Table of the hyperparameters of kernel, likelihood and mean function, and of the method itself.

        Args:
            probability: probability of the intervals.

        Returns:
            A pandas DataFrame with one row for each number, such as ``kernel.lengthscale[0]``, or with the name of the
            column if x came in a frame, ``kernel.lengthscale[easting]``, and the columns

            * ``estimate``: the value, or the median of the guide where there is a prior;
            * ``lower``, ``upper``: ends of the guide's central interval; without a prior, of a normal interval on the
              unconstrained (for positive numbers, logarithmic) scale from the information of Gaussian data
              (:mod:`pyro_nngp.models.base.information`), for the mean from generalized least squares;
            * ``prior``: its class; empty without one;
            * ``unit``: in words, such as "y squared";
            * ``note``: "not identified" where data hardly narrow the value, with the ends of its range as ``lower`` and
              ``upper``; the reason where there is no interval, which is then NaN.

        Raises:
            ValueError, TypeError: unless `probability` is a number in (0, 1).

        Cost: O(p B K^3) for p hyperparameters and B = 2,048 rows at most, seconds for pseudo-likelihoods.
        """
        return summarize(self, probability)

    def _information(self) -> Information | str:
        """Covariance of the estimates of hyperparameters without priors, or the reason why there is none.

        This process has all rows; see :func:`~pyro_nngp.models.base.intervals.information_of`.
        """
        return f"no interval: {type(self).__name__} has none for this likelihood and guide"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the method with its data, neighbors and parameters to a file that ``pyro_nngp.load`` reads.

        Args:
            path: the file, in the safetensors format; its folder must exist.

        Raises:
            ModelFileError: if a part cannot be named in a file, such as a lambda as the mean function.
        """
        several_processes.check_whole(self, "save")
        save(self, path)

    # Predictions: each reads the hyperparameters once, and passes them down.

    forward = entries.forward
    predict = entries.predict
    sample = entries.sample
    sample_y = entries.sample_y
    predictions_by_draw = entries.predictions_by_draw
    joint = entries.joint
    loo = entries.loo
    loo_by_draw = entries.loo_by_draw

    # Helpers of the entries.

    def _warn_of_intervals(self) -> None:
        """Warn if intervals of f from the guide are known to be wrong; most methods have nothing to warn of."""

    def check_export(self, where: str, cure: str, from_guide: bool) -> None:
        """Raise ``TypeError`` on several processes; warn if intervals of f from the guide are known to be wrong."""
        if from_guide:
            self._warn_of_intervals()
        several_processes.check_whole(self, where, cure)

    def _check_new(self, method: str, x_new: Any, from_guide: bool = True) -> None:
        """Raise unless `x_new` has the columns, dtype and device of the data; warn as :meth:`check_export` does."""
        check_new_inputs(f"{type(self).__name__}.{method}", x_new, self.x)
        if from_guide:
            self._warn_of_intervals()

    def _new_offset(self, method: str, x_new: Tensor, offset: Tensor | None) -> Tensor:
        """The offset at new points, (P,) or (L, P); 0 without one."""
        return new_offset(f"{type(self).__name__}.{method}", self, x_new, offset)

    def _new_by_row(self, x_new: Tensor, trials: Tensor | None, limits: Tensor | None) -> Mapping[str, Tensor]:
        """Numbers of trials and limits at new points, for likelihoods that have them."""
        return new_by_row(f"{type(self).__name__}.predict", self, x_new, trials, limits)

    # New data.

    _own_state: tuple[str, ...] = ("q",)  # parts that copies for new data do not share

    @exclusive
    def extend(
        self,
        x: Float[Tensor, "P D"] | Table,
        y: Float[Tensor, "P *T"] | Int[Tensor, "P *T"] | Table | None = None,
        **by_row: Float[Tensor, "P ..."] | Int[Tensor, " P"] | Table | None,
    ) -> None:
        """Append rows to the data, in place, at the present hyperparameters.

        New rows come last in the ordering, with exact neighbors among all rows before them. Predictions use them at
        once; q of latent values is solved for, starting from the old one, where the method has ``solve``. Train
        further with ``fit``, which starts new optimizers; it refuses a change of the data while it runs.

        Args:
            x: new inputs, a tensor or any table that the method takes as data.
            y: their targets, as in the constructor; None where the method has none.
            by_row: ``offset``, ``weights``, ``trials`` and ``limits`` of the rows, if the method has them.

        Raises:
            ValueError, TypeError: for malformed rows, or targets outside the support of the likelihood.
            RuntimeError: under ``torch.inference_mode()``.

        Warns:
            UserWarning: if the rows bound a level of f that was held, so that the kernel wants training again.

        Whatever it raises, the method stays as it was. It waits for predictions of other threads, and these for it.

        Cost: the search for the neighbors, and ``solve`` where the method has latent values.
        """
        several_processes.check_whole(self, "extend")
        extension.extend(self, x, y, by_row)

    @shared
    def condition_on(
        self,
        x: Float[Tensor, "P D"] | Table,
        y: Float[Tensor, "P *T"] | Float[Tensor, "S P"] | Int[Tensor, "P *T"] | Table,
        **by_row: Float[Tensor, "P ..."] | Int[Tensor, " P"] | Table | None,
    ) -> Any:
        """A copy with more data, which shares all hyperparameters and the old data with this method.

        It is for fantasies: what would be predicted if y were observed at x. Training the copy would move the
        hyperparameters of both; to keep new data, use :meth:`extend`. With S fantasies the posterior of coefficients of
        the mean stays with this method, since the fantasies have it in common.

        Args:
            x: further inputs.
            y: their targets; or (S, P) for S fantasies at the same inputs, of one output with Gaussian noise.
            by_row: as in :meth:`extend`.

        Returns:
            A method of the same class; for S fantasies with S outputs.

        Raises:
            ValueError, TypeError: as in :meth:`extend`.

        Cost: as in :meth:`extend`.
        """
        several_processes.check_whole(self, "condition_on")
        return extension.condition_on(self, x, y, by_row)

    def subset(self, rows: Int[Tensor, " S"]) -> Any:
        """A copy on some of the rows, at copies of the present hyperparameters, that knows nothing of the other rows.

        It predicts the others from these, for cross-validation. The copy is independent of this method, and can be
        trained further. q, and coefficients of the mean that have a joint posterior, start anew from the rows, and are
        solved for where :attr:`follows_rows`; else ``fit`` must train q before predictions.

        Args:
            rows: distinct row numbers, two or more; the copy has them in this order.

        Raises:
            ValueError, TypeError: for malformed row numbers.

        Cost: a search for neighbors among the rows, and ``solve`` where it has been called.
        """
        several_processes.check_whole(self, "subset")
        return extension.subset(self, rows)

    @property
    def follows_rows(self) -> bool:
        """Whether a change of the rows needs no training: there is no q, or it has an optimum that is known."""
        return True

    def _keep_rows(self, rows: Int[Tensor, " S"]) -> None:
        """Keep some rows of the data, and start anew what is kept per datum; :meth:`subset` calls it."""
        for name in VALUES:
            value = self._buffers[name]
            setattr(self, name, None if value is None else value[rows])
        construction.hold_unbounded_levels(self)

    def _append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        """Append checked rows to the data and to everything that is kept per datum; :meth:`extend` calls it."""
        self.x = torch.cat([self.x, x])
        if y is not None and self.y is not None:
            self.y = torch.cat([self.y, y])
        for name, value in by_row.items():
            setattr(self, name, torch.cat([getattr(self, name), value]))
        if construction.free_bounded_levels(self):
            text = "the kernel to be trained on data that bound the level of f, which rows before these did not"
            warn(f"{type(self).__name__}.extend: expected {text}. Call fit again.")

    def _repeat_targets(self, where: str, y: Float[Tensor, "S P"]) -> Float[Tensor, "P S"]:
        """Repeat the targets for each of S fantasies, where they are independent outputs; returns the new ones."""
        cure = "Condition on one fantasy at a time."
        fail(where, "y", "of shape (P,) for this method and likelihood", tuple(y.shape), cure)

    def _coded(self, y: Tensor) -> Tensor:
        """Targets, coded as the method's."""
        return y

    # Several processes.

    def _sharded_table(self, data: ShardedData, choose: bool) -> Any:
        """The table of neighbors among the rows of all processes; None where the graph is not one of rows.

        Args:
            data: the rows.
            choose: whether the number of neighbors is chosen later; a first one serves until then.
        """
        return None

    def _distributed(self, choose: bool) -> None:
        """Start what is kept per datum, after the rows have been distributed."""

    def _row_tables(self) -> dict[str, Tensor]:
        """Tables of q with a row per datum, by their names in q."""
        return {}


__all__ = ["Method"]
