"""Log densities of single observations at draws held by ArviZ, computed for requested rows only.

A ``log_likelihood`` group holds draws x rows numbers, 8 GB for 1,000 draws and 10^6 rows in double precision.
``az.loo_subsample`` needs some rows at all draws, and all rows at the mean of the draws (Magnusson, Riis Andersen,
Jonasson and Vehtari 2019).
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.inference._traces import log_prob, run_at
from pyro_nngp.inference.arviz.arrays import check_mappings
from pyro_nngp.inference.arviz.draws import MCMCDraws, draws_of, method_of
from pyro_nngp.inference.arviz.libraries import library

_WHERE = "PointwiseLogLikelihood"
_DRAWS = ("chain", "draw")


class PointwiseLogLikelihood:
    """The ``log_lik_fn(observed, data)`` of ArviZ 1.x for a method, an MCMC run, or a pair (model, guide).

    The densities are as in :func:`to_arviz`: leave-one-out with latent values integrated out for a method, and given
    all latent sites for any other program. They are computed at the draws in the ``posterior`` group of `data`, so this
    has to hold the hyperparameters of a method, or every latent site of another program::

        log_lik = PointwiseLogLikelihood(gp)
        idata = to_arviz(gp, var_names=["~u"], log_likelihood=False, posterior_predictive=False)
        idata["log_likelihood"] = log_lik.group(idata)  # nothing is computed yet
        az.loo_subsample(idata, 1_000, method="plpd", log_lik_fn=log_lik)

    Args:
        source: as of :func:`to_arviz`.
        *args: arguments of model and guide; an MCMC run without any takes the ones it had. If there are none and the
            model takes an argument, it is run on the rows alone, as ``model(rows)``.
        model_kwargs: keyword arguments of model and guide.
        coords: the labels of rows that :func:`to_arviz` was given.

    Raises:
        ValueError, TypeError: as :func:`to_arviz`.

    Cost: for B rows and S draws S runs of the model on B rows, or S times ``gp.loo`` of B rows; memory O(S B).

    Reference: Magnusson, Riis Andersen, Jonasson, Vehtari (2019), "Bayesian leave-one-out cross-validation for large
    data", ICML.
    """

    def __init__(
        self,
        source: Any,
        *args: Any,
        model_kwargs: Mapping[str, Any] | None = None,
        coords: Mapping[str, Sequence] | None = None,
    ) -> None:
        check_mappings(_WHERE, model_kwargs=model_kwargs, coords=coords)
        draws, kwargs = draws_of(_WHERE, source, 1), dict(model_kwargs or {})
        if isinstance(draws, MCMCDraws) and not args and not kwargs:
            args, kwargs = draws.arguments()
        method = method_of(draws.model)
        self._method: Any = method if method is not None and method.loo_kind else None
        self._from_guide = draws.are_of(method)
        self._model, self._args, self._kwargs, self._coords = draws.model, args, kwargs, dict(coords or {})
        with torch.no_grad():
            self._like, _ = draws.at(0, 0, args, kwargs)

    @torch.no_grad()
    def __call__(self, observed: Any, data: Any) -> Any:
        """Log densities of some of the observed data.

        Args:
            observed: a DataArray of the ``observed_data`` group, or a part of one.
            data: the InferenceData or DataTree, whose posterior group has the dimensions ``chain`` and ``draw``, or
                neither: one value of each site.

        Returns:
            A DataArray (chain, draw, ...) with the dimensions of `observed`, or without the first two.
        """
        posterior = getattr(data.posterior, "dataset", data.posterior)
        sampled = all(dim in posterior.dims for dim in _DRAWS)
        lead = tuple(posterior.sizes[dim] for dim in _DRAWS) if sampled else ()
        values = {name: self._tensor(name, posterior[name], sampled) for name in posterior.data_vars}
        rows, densities = [self._rows(observed, dim) for dim in observed.dims], None
        at = self._of_method(rows) if self._method is not None else self._of_program(str(observed.name), rows)
        for place in np.ndindex(*lead):
            density = at({name: value[place] for name, value in values.items()}).cpu().numpy()
            densities = np.empty((*lead, *density.shape), density.dtype) if densities is None else densities
            densities[place] = density
        dims = (*(_DRAWS if sampled else ()), *observed.dims)
        coords = {dim: part.coords[dim] for part in (posterior, observed) for dim in dims if dim in part.coords}
        return library(_WHERE, "xarray").DataArray(densities, coords, dims, name=observed.name)

    def group(self, data: Any) -> Any:
        """A ``log_likelihood`` group whose entries are computed when they are read, and not kept.

        Args:
            data: the InferenceData or DataTree, with ``posterior`` and ``observed_data``.

        Returns:
            A Dataset.
        """
        xr = library(_WHERE, "xarray")
        posterior = getattr(data.posterior, "dataset", data.posterior)
        variables = {}
        for name, observed in data.observed_data.data_vars.items():
            dims = (*_DRAWS, *observed.dims)
            lazy = xr.core.indexing.LazilyIndexedArray(_rows_on_demand(self, observed, posterior))
            variables[name] = xr.DataArray(xr.Variable(dims, lazy), {**_of(posterior, dims), **_of(observed, dims)})
        return xr.Dataset(variables, attrs={"sample_dims": list(_DRAWS)})

    def _tensor(self, name: str, value: Any, sampled: bool) -> Tensor:
        like = self._like.get(name, torch.empty(()))
        array = value.transpose(*(_DRAWS if sampled else ()), ...).values
        dtype = like.dtype if name in self._like else None
        return torch.as_tensor(array.copy(), dtype=dtype, device=like.device)

    def _rows(self, observed: Any, dim: str) -> Tensor:
        """Row numbers of the labels of a dimension; labels that are whole numbers are row numbers."""
        labels = observed.coords[dim].values if dim in observed.coords else np.arange(observed.sizes[dim])
        if dim in self._coords:
            place = {label: i for i, label in enumerate(np.asarray(self._coords[dim]).tolist())}
            labels = np.array([place.get(label, -1) for label in labels.tolist()], dtype=int)
        if labels.dtype.kind not in "iu" or (labels < 0).any():
            cure = f"Pass the labels as coords={{{dim!r}: ...}}, as to to_arviz."
            fail(_WHERE, f"coordinates of {dim!r}", "to be row numbers", f"{observed.coords[dim].values[:3]}", cure)
        return torch.tensor(labels, dtype=torch.int64)

    def _of_method(self, rows: list[Tensor]) -> Any:
        densities = self._method.loo_by_draw(rows[-1].to(self._method.x.device), from_guide=self._from_guide)
        return lambda values: _taken(densities(values), [*rows[:-1], None])

    def _of_program(self, name: str, rows: list[Tensor]) -> Any:
        by_rows = not self._args and not self._kwargs and len(rows) == 1 and _takes_rows(self._model)

        def at(values: dict[str, Tensor]) -> Tensor:
            part = rows[0] if by_rows else None
            trace = run_at(_WHERE, self._model, self._args, self._kwargs, values, part)
            density = log_prob(trace.nodes[name], torch.nan)
            return density if by_rows else _taken(density, rows)

        return at


def _takes_rows(model: Any) -> bool:
    import inspect

    return bool(inspect.signature(model).parameters)


def _taken(value: Tensor, rows: Sequence[Tensor | None]) -> Tensor:
    for axis, part in enumerate(rows):
        if part is not None:
            value = value.index_select(axis, part.to(value.device))
    return value


def _of(part: Any, dims: Sequence[str]) -> dict[str, Any]:
    return {dim: part.coords[dim] for dim in dims if dim in part.coords}


def _rows_on_demand(log_lik: PointwiseLogLikelihood, observed: Any, posterior: Any) -> Any:
    """An xarray array for one observed site, (chain, draw, ...), that computes entries as they are read."""
    from xarray.backends import BackendArray
    from xarray.core import indexing

    class Rows(BackendArray):
        shape = (*(posterior.sizes[dim] for dim in _DRAWS), *observed.shape)
        dtype = np.dtype(float)

        def __getitem__(self, key: Any) -> Any:
            return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

        def _read(self, key: tuple) -> np.ndarray:
            kept = tuple([part] if isinstance(part, int | np.integer) else part for part in key)
            draws = posterior.isel(dict(zip(_DRAWS, kept, strict=False)))
            rows = observed.isel(dict(zip(observed.dims, kept[2:], strict=True)))
            values = log_lik(rows, SimpleNamespace(posterior=draws)).values.astype(float)
            return values[tuple(0 if isinstance(part, int | np.integer) else slice(None) for part in key)]

    return Rows()
