"""Missing values of other libraries as NaN: masks of NumPy, fill values of NetCDF and rasters.

Cost: O(entries).
"""

from typing import Any

import numpy as np

_CODES = ("_FillValue", "missing_value")  # attributes of variables that xarray has not decoded


def with_nan(values: Any) -> Any:
    """The array of a masked array, or of a DataArray with a fill value, NaN where missing; others are left alone.

    A DataArray that was read without decoding has the attributes of its file: fill values, and scale and offset of
    packed values, which are unpacked.
    """
    if isinstance(values, np.ma.MaskedArray):
        if not np.ma.is_masked(values):
            return np.asarray(values)
        kind = values.dtype.kind
        floats: Any = values.astype(values.dtype if kind == "f" else float if kind in "iub" else object)
        return floats.filled(np.nan)
    attributes = values.attrs if hasattr(values, "dims") and hasattr(values, "attrs") else {}
    codes = [np.atleast_1d(attributes[name]) for name in _CODES if name in attributes]
    scale, offset = attributes.get("scale_factor", 1), attributes.get("add_offset", 0)
    if not (codes or scale != 1 or offset != 0) or values.dtype.kind not in "fiu":
        return values
    array = values.to_numpy()
    if codes:
        code = np.concatenate(codes)
        missing = np.isin(array, code.astype(array.dtype) if array.dtype.kind == "f" else code)
        array = np.where(missing, array.dtype.type(np.nan) if array.dtype.kind == "f" else np.nan, array)
    return array if scale == 1 and offset == 0 else array * scale + offset
