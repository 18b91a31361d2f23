"""NumPy arrays and frames where the methods take tensors: pandas, polars and others, xarray, geopandas.

Constructors are decorated with :func:`from_tables` and predictions with :func:`at_tables`; both leave tensors alone.
Floats keep float32 or float64, all other numbers become float64, and data go to the dtype and device of the method.
Missing values are NaN: nulls, masks of NumPy, fill values of xarray. Rows without y are left out, others are refused.

Points of geopandas become columns of coordinates: a projected coordinate reference system as it is, a geographic one
as chordal coordinates in kilometers (:mod:`pyro_nngp.data.globe`). The names of columns, which hold the reference
system, are compared with the data's at each prediction; names that are no strings count as their text.

Rows are paired by position. Where two arguments have an index of rows, as in pandas, geopandas and xarray, it has to be
the same.

Cost: O(N) copies.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pyro_nngp._checks import fail, warn
from pyro_nngp._keywords import check_keywords
from pyro_nngp._masks import with_nan
from pyro_nngp.data.globe import lon_lat
from pyro_nngp.distributed import ShardedData

Call = TypeVar("Call", bound=Callable)
BY_ROW = ("offset", "weights", "trials", "limits")  # data beside x and y

Names: TypeAlias = tuple[str, ...] | None


@runtime_checkable
class Frame(Protocol):
    """A table of another library, such as a pandas DataFrame or an xarray DataArray."""

    def to_numpy(self) -> Any:
        """The values as an array."""


if TYPE_CHECKING:
    Table: TypeAlias = Any  # the decorated functions themselves get tensors, and are checked with them
else:
    Table = np.ndarray | Frame
    """A table that methods accept in place of a tensor of shape (N, D), or (N,)."""


def from_tables(construct: Call) -> Call:
    """Let a constructor ``(self, x, y, ...)`` take tables; it notes names as ``self.columns`` and ``self.outputs``.

    In place of x and y it takes :class:`~pyro_nngp.distributed.ShardedData`: the method is built on the sample, then
    ``self.distribute`` gives it the rows of this process.
    """

    @wraps(construct)
    def construct_from_tables(self: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        check_keywords(type(self).__name__, construct, kwargs)
        if isinstance(x, ShardedData):
            _check_sharded(self, x, args, kwargs)
            sample = {name: x.sample[name] for name in BY_ROW if name in x.sample}
            construct_from_tables(self, x.sample["x"], x.sample["y"], **kwargs, **sample)
            self._distribute(x, kwargs.get("num_neighbors") is None)
        elif args or "y" in kwargs:
            construct_from_two(self, x, *args, **kwargs)
        else:
            construct(self, x)  # raises, since y is missing

    def construct_from_two(self: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> None:
        where = type(self).__name__
        _check_index(where, {"x": x, "y": y} | kwargs)
        inputs, input_names = _read(where, "x", x, None, as_column=True)
        like = inputs if isinstance(inputs, Tensor) else None
        targets, target_names = _read(where, "y", y, like, as_column=False)
        inputs = _as_floats(where, inputs, targets)
        like = inputs if isinstance(inputs, Tensor) else None
        kwargs |= _columns_by_row(where, kwargs, like)
        inputs, targets, by_row = without_missing(where, inputs, targets, kwargs)
        _check_columns(where, "x", inputs, input_names)
        names = {"columns": input_names, "outputs": target_names}
        self.__dict__.update({key: value for key, value in names.items() if value})  # for the constructor to read
        construct(self, inputs, targets, *args, **kwargs | by_row)

    return cast(Call, construct_from_tables)


def _check_sharded(method: Any, data: ShardedData, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise for a method, or arguments of its constructor, that do not go with sharded data."""
    where = type(method).__name__
    if not hasattr(method, "_distribute"):
        cure = "Take a method of docs/howto/cluster.md, or pass tensors on one process."
        fail(where, "x", "to be a tensor or a table for this method", "ShardedData", cure, TypeError)
    if args or {"y", *BY_ROW} & kwargs.keys():
        cure = "ShardedData has y, offset, weights, trials and limits; give all other arguments by name."
        fail(where, "ShardedData", "without y and other positional arguments", "more", cure, TypeError)
    if kwargs.get("seed", data.seed) != data.seed:
        fail(where, "seed", f"to be {data.seed}, that of the data", kwargs["seed"], "Give it to ShardedData.")
    if not isinstance(kwargs.get("ordering", "random"), str) or kwargs.get("ordering", "random") != "random":
        fail(where, "ordering", "to be 'random' with ShardedData", "another one", "Leave it out.")


def at_tables(predict: Call) -> Call:
    """Let a prediction ``(self, x_new, ...)`` take a table; its results come back as the caller's kind.

    Moments become arrays, columns of a frame, or frames of one column per latent function; draws become arrays; a
    predictive distribution stays one of torch.
    """

    @wraps(predict)
    def predict_at_tables(self: Any, x_new: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x_new, Tensor):
            integers = not (x_new.is_floating_point() or x_new.is_complex() or x_new.dtype == torch.bool)
            return predict(self, x_new.to(self.x.dtype) if integers else x_new, *args, **kwargs)
        where = f"{type(self).__name__}.{predict.__name__}"
        _check_index(where, {"x_new": x_new} | kwargs)
        inputs, names = _read(where, "x_new", x_new, self.x, as_column=True)
        _check_names(where, "x_new", names, self.columns)
        _check_columns(where, "x_new", inputs, names)
        kwargs |= _columns_by_row(where, kwargs, self.x)
        result = predict(self, inputs, *args, **kwargs)
        if isinstance(result, tuple):
            return tuple(_like(x_new, _array(values), self.outputs) for values in result)
        return _array(result) if isinstance(result, Tensor) else result

    return cast(Call, predict_at_tables)


def _as_floats(where: str, x: Any, y: Any) -> Any:
    """A tensor of integers as floats, of the dtype of y if that has floats, with a note; anything else unchanged."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        return x
    dtype = y.dtype if isinstance(y, Tensor) and y.is_floating_point() else torch.float64
    warn(f"{where}: x holds integers, which become {dtype}.")
    return x.to(dtype)


def without_missing(where: str, x: Any, y: Any, by_row: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The rows whose targets are not all NaN, with a warning that counts the others.

    Args:
        where: name of the caller.
        x: inputs; anything malformed is returned unchanged.
        y: targets, (N,) or (N, T).
        by_row: further arguments, of which those in ``BY_ROW`` follow.

    Raises:
        ValueError: if all targets are missing.
    """
    kept = {name: by_row[name] for name in BY_ROW if isinstance(by_row.get(name), Tensor)}
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and y.is_floating_point() and y.dim() in (1, 2)):
        return x, y, kept
    if y.is_meta:
        return x, y, kept
    missing = y.isnan()
    if x.dim() == 0 or len(x) != len(y) or not bool(missing.any()):
        return x, y, kept
    gone = missing if y.dim() == 1 else missing.all(-1)
    count = int(gone.sum())
    if count == len(y):
        fail(where, "y", "with values", "NaN in all rows", "Give some targets.")
    if count:
        warn(f"{where}: y is missing in {count} of {len(y)} rows, which are left out. Predict there by gp(x).")
    return x[~gone], y[~gone], {name: value[~gone] for name, value in kept.items()}


def _columns_by_row(where: str, kwargs: dict[str, Any], like: Tensor | None) -> dict[str, Any]:
    """Offset, weights, trials and limits among some arguments as tensors."""
    return {name: _read(where, name, kwargs[name], like, as_column=False)[0] for name in BY_ROW if name in kwargs}


def read_rows(where: str, method: Any, x: Any, y: Any, by_row: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Tensors of new rows of a method, which may be tables, in its dtype and on its device."""
    _check_index(where, {"x": x, "y": y} | by_row)
    inputs, names = _read(where, "x", x, method.x, as_column=True)
    _check_names(where, "x", names, method.columns)
    targets, names = _read(where, "y", y, method.x, as_column=False)
    _check_names(where, "y", names, method.outputs)
    return inputs, targets, _columns_by_row(where, by_row, method.x)


def _check_names(where: str, arg: str, names: Names, known: Names) -> None:
    if names and known and names != known:
        cure = "Give the same columns in the same order."
        fail(where, arg, f"with the columns {list(known)}", list(names), cure)


def _check_columns(where: str, arg: str, values: Any, names: Names) -> None:
    """Raise if a column of a frame holds NaN or infinity; the message names the first."""
    bad = (~values.isfinite()).sum(0).tolist() if names and isinstance(values, Tensor) else []
    for name, count in zip(names or (), bad, strict=False):
        if count:
            expectation, cure = f"with finite values in column {name!r}", "Drop these rows, or impute them first."
            fail(where, arg, expectation, f"{count} NaN or infinite ones", cure)


def _check_index(where: str, given: dict[str, Any]) -> None:
    """Raise if x, x_new, y and the arguments in ``BY_ROW`` have different indexes for the same number of rows."""
    first = None
    for name in ("x", "x_new", "y", *BY_ROW):
        index = _index(given.get(name))
        if index is None:
            continue
        if first is None:
            first, known = name, index
        elif len(index) == len(known) and not index.equals(known):
            cure = f"Take {name}.loc[{first}.index], or {name}.to_numpy() to pair rows by position."
            if hasattr(given[name], "dims"):
                cure = f"Take {name}.reindex_like({first}), or {name}.to_numpy() to pair rows by position."
            actual = "it in another order" if index.isin(known).all() else "another one"
            fail(where, name, f"with the index of {first}", actual, cure)


def _index(table: Any) -> Any:
    """The labels of the rows of a table, an index of pandas or a library like it; None if there are none."""
    if isinstance(getattr(table, "dims", None), tuple):  # a DataArray; a Dataset is refused later
        return getattr(table, "indexes", {}).get(table.dims[0]) if table.dims else None
    index = getattr(table, "index", None)
    return index if hasattr(index, "equals") else None


def _read(where: str, arg: str, value: Any, like: Tensor | None, as_column: bool) -> tuple[Any, Names]:
    """Tensor of a table and names of its columns; a tensor is detached, and anything else returned unchanged."""
    if isinstance(value, Tensor):
        return value.detach(), None
    if hasattr(value, "data_vars"):
        cure = f"Take a variable, as {arg}[name], or {arg}.to_dataframe()[names] for several as columns."
        fail(where, arg, "to be an array or a frame", f"a Dataset of {list(value.data_vars)}", cure, TypeError)
    if not isinstance(value, np.ndarray | Frame):
        return value, None
    if isinstance(value, np.ndarray):
        array, names = with_nan(value), None
    elif hasattr(value, "geom_type"):
        array, names = _points(where, arg, value)
    else:
        array, names = _columns(where, arg, value)
    if names and len(set(names)) < len(names):
        _refuse_duplicates(where, arg, sorted({name for name in names if names.count(name) > 1}))
    if array.dtype.kind not in "fiub":
        fail(where, arg, "to hold numbers", array.dtype, "Encode it as numbers.", TypeError)
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float64)
    if isinstance(value, Frame) and array.ndim == 1 and as_column:
        array = array[:, None]
    tensor = torch.from_numpy(np.array(array))  # a copy, since arrays may be read-only or have negative strides
    return tensor if like is None else tensor.to(like), names


def _columns(where: str, arg: str, value: Any) -> tuple[np.ndarray, Names]:
    """Values and names of the columns of a frame, a series, or anything else with ``to_numpy``."""
    import narwhals as nw  # only those who pass frames need it

    try:
        frame = nw.from_native(value, eager_only=True, allow_series=True, pass_through=True)
    except nw.exceptions.DuplicateError as error:
        _refuse_duplicates(where, arg, list(map(str, value.columns)), error)
    if isinstance(frame, nw.Series):
        return _numbers(where, arg, frame), None
    if isinstance(frame, nw.DataFrame):
        names = tuple(map(str, frame.columns))
        columns = zip(names, frame.iter_columns(), strict=True)
        parts = [_numbers(where, f"{arg}[{name!r}]", column) for name, column in columns]
        return np.stack(parts, 1) if parts else np.empty((len(frame), 0)), names
    if hasattr(value, "__arrow_c_array__"):
        return np.asarray(value), None  # as to_numpy, which refuses nulls
    value = with_nan(value)
    return value if isinstance(value, np.ndarray) else value.to_numpy(), None


def _refuse_duplicates(where: str, arg: str, names: list[str], cause: Exception | None = None) -> NoReturn:
    cure = f'Rename them, as by {arg}.columns = ["a", "b"]; coordinates of points are x, y and z.'
    fail(where, arg, "with a name of its own for each column", names, cure, cause=cause)


def _numbers(where: str, arg: str, series: Any) -> np.ndarray:
    """Values of a column; missing ones are NaN."""
    import narwhals as nw

    dtype = series.dtype
    if not (dtype.is_numeric() or dtype == nw.Boolean):
        cure = "Leave it out, or encode it as numbers."
        if dtype.is_temporal():
            cure = "Give the time since a date as a number, in days or hours."
        fail(where, arg, "to hold numbers", dtype, cure, TypeError)
    return (series if dtype == nw.Float32 else series.cast(nw.Float64)).to_numpy()


def _points(where: str, arg: str, value: Any) -> tuple[np.ndarray, Names]:
    """Coordinates of a GeoSeries, or those and the other columns of a GeoDataFrame."""
    geometry = value.geometry
    if not (geometry.geom_type == "Point").all():
        fail(where, arg, "to hold points", sorted(set(geometry.geom_type.map(str))), "Take centroids first.", TypeError)
    places, axes = np.stack([geometry.x.to_numpy(), geometry.y.to_numpy()], 1), ["x", "y"]
    system = "" if geometry.crs is None else f" ({geometry.crs.to_string()})"
    if geometry.crs is not None and geometry.crs.is_geographic:
        places, axes = lon_lat(torch.from_numpy(places)).numpy(), ["x", "y", "z"]
    names = tuple(f"{axis}{system}" for axis in axes)
    if value.ndim == 1:
        return places, names
    others, other_names = _columns(where, arg, value.drop(columns=geometry.name))
    return np.concatenate([places, others], 1), (*names, *(other_names or ()))


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()


def _like(table: Table, values: np.ndarray, names: Names) -> Any:
    """Values (P,) or (L, P) at the rows of a table as the table's kind."""
    if isinstance(table, np.ndarray):
        return values
    import narwhals as nw

    frame = nw.from_native(table, eager_only=True, allow_series=True, pass_through=True)
    if not isinstance(frame, nw.Series | nw.DataFrame):
        return _like_xarray(table, values)
    index = nw.maybe_get_index(frame)

    def column(name: str | None, each: np.ndarray) -> Any:
        series = nw.new_series(cast(str, name), each, backend=frame.implementation)
        return series if index is None else nw.maybe_set_index(series, index=index)

    if values.ndim == 1:
        return nw.to_native(column(None, values))
    names = names or tuple(str(number) for number in range(len(values)))
    columns = [column(name, each).to_frame() for name, each in zip(names, values, strict=True)]
    return nw.to_native(nw.concat(columns, how="horizontal"))


def _like_xarray(table: Any, values: np.ndarray) -> Any:
    """Values (P,) at the first dimension of a DataArray, with its coordinates; others stay an array."""
    if not hasattr(table, "dims") or values.ndim > 1:
        return values
    rows = table if table.ndim == 1 else table.isel({table.dims[1]: 0}, drop=True)
    return rows.copy(data=values)


__all__ = ["Frame", "Table", "at_tables", "from_tables", "read_rows"]
