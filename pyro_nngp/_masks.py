"""Missing values of other libraries as NaN: masks of NumPy, fill values of NetCDF and rasters.

Cost: O(entries).
"""

from typing import Any

import numpy as np

_CODES = ("_FillValue", "missing_value")  # attributes of variables that xarray has not decoded


def with_nan(values: Any) -> Any:
    """The array of a masked array, or of a DataArray with a fill value, NaN where missing; others are left alone."""
    if isinstance(values, np.ma.MaskedArray):
        if not np.ma.is_masked(values):
            return np.asarray(values)
        kind = values.dtype.kind
        floats: Any = values.astype(values.dtype if kind == "f" else float if kind in "iub" else object)
        return floats.filled(np.nan)
    attributes = values.attrs if hasattr(values, "dims") and hasattr(values, "attrs") else {}
    codes = [attributes[name] for name in _CODES if name in attributes]
    if not codes or values.dtype.kind not in "fiu":
        return values
    array = values.to_numpy()
    missing = np.isin(array, np.concatenate([np.atleast_1d(code) for code in codes]).astype(array.dtype))
    return np.where(missing, array.dtype.type(np.nan) if array.dtype.kind == "f" else np.nan, array)
