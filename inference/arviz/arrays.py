"""Arrays of an ArviZ export with named dimensions, filled run by run of a model."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np
import pyro
import torch
from pyro.poutine import Trace
from torch import Tensor
from torch.distributions import biject_to, identity_transform

from pyro_nngp._checks import fail
from pyro_nngp.inference._traces import (
    is_data,
    is_delta,
    is_variable,
    log_prob,
    plate_dims,
    plate_rows,
    sample_sites,
)
from pyro_nngp.inference.arviz.libraries import library

Place = tuple[int, int]  # chain and draw
Variable = tuple[tuple[str, ...], np.ndarray]  # names of the dimensions, and the array

_PRIOR_GROUPS = ("prior", "prior_predictive")
_DATA_GROUPS = ("observed_data", "posterior_predictive", "prior_predictive")
_SAMPLE_DIMS = ("chain", "draw")


class Arrays:
    """Arrays of each group, {group: {name: (dims, array)}}, allocated at the first draw.

    Args:
        where: name of the caller, for messages.
        shape: numbers of chains and draws.
        num_prior: number of prior draws.
        var_names, dims, coords: as in :func:`~pyro_nngp.inference.arviz.export.to_arviz`.
    """

    def __init__(
        self,
        where: str,
        shape: tuple[int, int],
        num_prior: int,
        var_names: Collection[str],
        dims: Mapping[str, Any],
        coords: Mapping[str, Any],
    ) -> None:
        self.groups: defaultdict[str, dict[str, Variable]] = defaultdict(dict)
        self.attrs: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        self._where, self._shape, self._dims, self._coords = where, shape, dims, coords
        self._prior_shape = (1, num_prior)
        self._left_out = {name[1:] for name in var_names if name.startswith("~")}
        self._wanted = {name for name in var_names if not name.startswith("~")}
        self._plates: dict[str, tuple[np.ndarray, int]] = {}  # rows used, and size
        self._variables: set[str] = set()
        self._discrete: set[str] = set()
        self._integral: defaultdict[str, dict[str, np.dtype]] = defaultdict(dict)  # types of draws held as floats

    def add(
        self,
        place: Place,
        trace: Trace,
        values: Mapping[str, Tensor],
        rows: Tensor | None,
        log_likelihood: str | None,
        log_prior: bool,
        unconstrained: bool,
    ) -> None:
        """Add a run conditioned on the data.

        Args:
            place: chain and draw.
            trace: trace of the run.
            values: values of the latent sites.
            rows: rows of the run, among all rows of the values; None is all.
            log_likelihood: group for the densities of the data given the latent sites; None omits them.
            log_prior: whether to keep the densities of latent sites.
            unconstrained: whether to keep latent values that are constrained in unconstrained space too.

        Raises:
            ValueError: if a plate used other rows than at the first draw.
        """
        self._add_plates(trace, rows)
        for name, site in sample_sites(trace).items():
            if is_data(site):
                dims = self._name_dims(name, site["value"], site)
                if place == (0, 0):
                    self._discrete.update([name] if _is_discrete(site) else [])
                    self._put("observed_data", name, site["value"], dims, (), rows)
                if log_likelihood is not None:
                    pointwise = log_prob(site, torch.nan)
                    self._put(log_likelihood, name, pointwise, dims[: pointwise.dim()], place, rows)
            elif is_variable(site):
                self._variables.add(name)
                if self._is_kept(name):
                    value = values.get(name, site["value"])
                    dims = self._name_dims(name, value, site)
                    self._put("posterior", name, value, dims, place, rows)
                    if unconstrained and not site["is_observed"]:
                        self._put_unconstrained(name, site, value, dims, place, rows)
                    if log_prior and not is_delta(site):
                        density = log_prob(site, 0.0)
                        self._put("log_prior", name, density, dims[: density.dim()], place, rows)

    def add_prior(self, draw: int, trace: Trace) -> None:
        """Add a run that drew latent sites and data from the model; no data that it draws given others."""
        for name, site in sample_sites(trace).items():
            observed = name in self.groups["observed_data"]
            predictive = observed and not site["infer"].get("given_data")
            if predictive or (not observed and is_variable(site) and self._is_kept(name)):
                dims = self._name_dims(name, site["value"], site)
                self._put("prior_predictive" if observed else "prior", name, site["value"], dims, (0, draw))

    def add_leave_one_out(self, place: Place, trace: Trace, name: str, densities: Tensor) -> None:
        """Add the leave-one-out densities of an observed site, instead of its densities given the latent sites."""
        site = trace.nodes[name]
        dims = self._name_dims(name, site["value"], site)
        self._put("log_likelihood", name, densities, dims[: densities.dim()], place)

    def add_predictions(self, place: Place, f: Tensor, y: Tensor | None) -> None:
        """Add draws at new points, latent dimensions first."""
        for name, value in (("f", f), ("y", y)):
            if value is not None:
                self._put("predictions", name, value, ("latents", "prediction")[2 - value.dim() :], place)

    @property
    def has_latents(self) -> bool:
        """Whether the runs have a latent or deterministic site, kept or not."""
        return bool(self._variables)

    def add_fields(self, name: str, f: Tensor, dims: tuple[str, ...]) -> None:
        """Add joint draws of f at the data, (draws, ...), to a posterior that has no sites."""
        self._variables.add(name)
        if self._is_kept(name):
            draws = _array(f).reshape(*self._shape, *f.shape[1:])
            self.groups["posterior"][name] = ((*_SAMPLE_DIMS, *dims), draws)

    def add_replicates(self, place: Place, trace: Trace, again: Trace, rows: Tensor | None) -> None:
        """Add the data that a run drew from the model."""
        for name in (name for name, site in sample_sites(trace).items() if is_data(site)):
            value = again.nodes[name]["value"]
            self._put("posterior_predictive", name, value, self._name_dims(name, value, again.nodes[name]), place, rows)

    def add_warmup(self, trace: Trace, values: Mapping[str, Tensor], statistics: Mapping[str, Variable]) -> None:
        """Add the draws of the warm-up of all chains, (chains, draws, ...), and their statistics."""
        for name, value in values.items():
            if self._is_kept(name):
                dims = self._name_dims(name, value[0, 0], trace.nodes[name])
                self.groups["warmup_posterior"][name] = ((*_SAMPLE_DIMS, *dims), _array(value))
        self.groups["warmup_sample_stats"].update(statistics)

    def add_densities(self, place: Place, **totals: Tensor) -> None:
        """Add log densities, one number each."""
        for name, value in totals.items():
            self._put("sample_stats", name, value, (), place)

    def add_constants(
        self, trace: Trace, by_row: Mapping[str, Any], x_new: Tensor | None, given: Mapping[str, Any]
    ) -> None:
        """Add parameters of a run, inputs and other values by row, inputs of predictions, and further arrays."""
        for name, site in trace.nodes.items():
            if site["type"] == "param" and hasattr(site["value"], "unconstrained"):  # otherwise it is a view of one
                self._put("params", name, site["value"], self._name_dims(name, site["value"]))
        for name, value in by_row.items():
            if isinstance(value, Tensor) and value.dim() == 1 + (name == "x"):
                self._put_whole(name, _array(value), ("data", "input_dim")[: value.dim()])
        if x_new is not None:
            self._put("predictions_constant_data", "x", x_new, ("prediction", "input_dim"))
        for name, value in given.items():
            self._put_whole(name, _array(value), self._name_dims(name, _array(value)))

    def check_names(self) -> None:
        """Check the user's names and labels; to be called after the first draw.

        Raises:
            ValueError: if one of them does not match.
        """
        sizes = _sizes(variable for variables in self.groups.values() for variable in variables.values())
        for arg, given, known in (
            ("var_names", self._left_out | self._wanted, self._variables),
            ("dims", set(self._dims), self._variables.union(*self.groups.values())),
            ("coords", set(self._coords), set(sizes)),
        ):
            if given - known:
                fail(self._where, arg, f"among {sorted(known)}", sorted(given - known), "Check the spelling.")
        for dim, size in sizes.items():
            self._labels(dim, size)

    def datasets(self, num_draws: int) -> dict[str, Any]:
        """All groups that are not empty, with their first draws, as Datasets."""
        attrs, xr = creation_attrs(), library(self._where, "xarray")
        made = {}
        for group, variables in ((group, held) for group, held in self.groups.items() if held):
            last = None if group in _PRIOR_GROUPS or group.startswith("warmup") else num_draws
            kept = {n: (dims, a[:, :last] if "draw" in dims else a) for n, (dims, a) in variables.items()}
            for n, dtype in self._integral[group].items():
                kept[n] = kept[n][0], _integers(kept[n][1], dtype)
            if group in _DATA_GROUPS:  # ArviZ draws counts by their type
                kept |= {n: (dims, _integers(a)) for n, (dims, a) in kept.items() if n in self._discrete}
            labels = {dim: self._labels(dim, size) for dim, size in _sizes(kept.values()).items()}
            sample_dims = [dim for dim in _SAMPLE_DIMS if dim in labels]
            drawn = {"sample_dims": sample_dims} if sample_dims else {}
            made[group] = xr.Dataset(kept, labels, attrs | drawn | self.attrs[group])
        return made

    def _is_kept(self, name: str) -> bool:
        return name not in self._left_out and (not self._wanted or name in self._wanted)

    def _add_plates(self, trace: Trace, rows: Tensor | None) -> None:
        for name, (taken, size) in plate_rows(trace).items():
            now = np.arange(size) if rows is not None else _array(taken)
            before, _ = self._plates.setdefault(name, (now, size))
            if not np.array_equal(before, now):
                cure = "Pass the row numbers as an argument of the model, or run it on all rows."
                fail(self._where, f"plate {name!r}", "to take the same rows at each draw", "others", cure)

    def _put(
        self,
        group: str,
        name: str,
        value: Any,
        dims: tuple[str, ...],
        place: Place | tuple[()] = (),
        rows: Tensor | None = None,
    ) -> None:
        """Write a value to the array of its group, at a chain and draw, and at some rows of its plates."""
        value, group_of = _array(value), self.groups[group]
        plates = {dim: len(taken) for dim, (taken, _) in self._plates.items()}
        lengths = [plates.get(dim, n) for dim, n in zip(dims, value.shape, strict=True)]
        if name not in group_of:
            draws = self._prior_shape if group in _PRIOR_GROUPS else self._shape
            lead, shape = (_SAMPLE_DIMS, draws) if place else ((), ())
            dtype, empty = value.dtype, np.nan if place else 0  # NaN where a run has no such site
            if place and dtype.kind in "biu":
                self._integral[group][name], dtype = dtype, np.dtype(np.float64)
            group_of[name] = ((*lead, *dims), np.full((*shape, *lengths), empty, dtype))
        part = [slice(None) if n == length else _array(rows) for n, length in zip(value.shape, lengths, strict=True)]
        group_of[name][1][(*place, ...)][tuple(part)] = value

    def _put_unconstrained(
        self, name: str, site: Any, value: Tensor, dims: tuple[str, ...], place: Place, rows: Tensor | None
    ) -> None:
        """Write a value, mapped to unconstrained space; real and discrete values are left out."""
        support = site["fn"].support
        if support.is_discrete:
            return
        transform = biject_to(support)
        if transform == identity_transform or getattr(transform, "base_transform", None) == identity_transform:
            return
        moved = transform.inv(value)
        if moved.shape != value.shape:
            shared = value.dim() - transform.codomain.event_dim
            dims = (*dims[:shared], *(f"{name}_unconstrained_dim_{k}" for k in range(moved.dim() - shared)))
        self._put("unconstrained_posterior", name, moved, dims, place, rows)

    def _put_whole(self, name: str, value: np.ndarray, dims: tuple[str, ...]) -> None:
        """Write a constant at the rows that the plates used."""
        for axis, dim in enumerate(dims):
            if dim in self._plates and value.shape[axis] == self._plates[dim][1]:
                value = value.take(self._plates[dim][0], axis)
        self._put("constant_data", name, value, dims)

    def _name_dims(self, name: str, value: Any, site: Any = None) -> tuple[str, ...]:
        plates = [None] * value.ndim if site is None else plate_dims(site, value)
        given = self._dims.get(name, None if site is None else site["infer"].get("event_dims"))
        if given is None:
            return tuple(plate or f"{name}_dim_{k}" for k, plate in enumerate(plates))
        if len(given) != plates.count(None):
            expectation = f"to name the {plates.count(None)} dimensions of {name!r} that are no plates"
            fail(self._where, "dims", expectation, list(given), f"Its shape is {tuple(value.shape)}.")
        names = iter(given)
        return tuple(plate or next(names) for plate in plates)

    def _labels(self, dim: str, size: int) -> np.ndarray:
        taken, full = self._plates.get(dim, (np.arange(size), size))
        labels = np.asarray(self._coords.get(dim, np.arange(full)))
        if len(labels) != full:
            fail(self._where, f"coords[{dim!r}]", f"to have {full} labels", len(labels), "Give one for each row.")
        return labels[taken]


def check_mappings(where: str, **arguments: Any) -> None:
    """Raise ``TypeError`` for an argument that is neither None nor a dict whose keys are names."""
    for arg, value in arguments.items():
        if value is not None and not isinstance(value, Mapping):
            fail(where, arg, "to be a dict", type(value).__name__, "Pass names and values.", TypeError)
        if value is not None and not all(isinstance(name, str) for name in value):
            fail(where, arg, "to have names as keys", list(value), "Pass names and values.", TypeError)


def creation_attrs() -> dict[str, str]:
    """Attributes that ArviZ's schema requires of each group."""
    return {
        "created_at": datetime.now(UTC).isoformat(),
        "creation_library": "pyro_nngp",
        "creation_library_version": version("pyro_nngp"),
        "creation_library_language": "Python",
        "inference_library": "pyro",
        "inference_library_version": pyro.__version__,
    }


def _is_discrete(site: Any) -> bool:
    try:
        return bool(site["fn"].support.is_discrete)
    except NotImplementedError:  # of a mixture, for instance
        return False


def _integers(values: np.ndarray, dtype: Any = np.int64) -> np.ndarray:
    """Values as integers, unless some are missing or have a fraction."""
    return values.astype(dtype) if np.array_equal(values, np.round(values)) else values


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _sizes(variables: Iterable[Variable]) -> dict[str, int]:
    return {dim: n for dims, array in variables for dim, n in zip(dims, array.shape, strict=True)}
