"""The argument structures of the compiled functions, field for field as in the C++ sources.

Their sizes are compared with the library's when it is loaded, and a library of another version is rejected.
"""

import ctypes

_INTEGER, _REAL, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Arguments(ctypes.Structure):
    """`struct Arguments` of conditional.cpp."""

    _fields_ = [
        *((name, _INTEGER) for name in ("num_sets", "num_targets", "num_neighbors", "num_dims", "num_points")),
        *((name, _INTEGER) for name in ("num_parts", "num_terms", "noise_of_sets", "num_threads", "by_nu")),
        ("jitter", _REAL),
        *((name, _POINTER) for name in ("kernels", "columns", "terms")),
        *((name, _POINTER) for name in ("x", "points", "neighbors", "scale", "variance", "table", "noise")),
        *((name, _POINTER) for name in ("explained", "failed")),
        *((name, _POINTER) for name in ("factors", "w", "v", "tangent_w", "tangent_v")),
        *((name, _POINTER) for name in ("grad_w", "grad_v", "grad_noise", "left", "grad_x", "grad_z", "sums")),
    ]


class Triangle(ctypes.Structure):
    """`struct Triangle` of triangular.cpp."""

    _fields_ = [
        *((name, _INTEGER) for name in ("num_sets", "num_rows", "num_neighbors", "num_right", "transposed")),
        *((name, _POINTER) for name in ("order", "neighbors", "w", "u")),
    ]


class Fronts(ctypes.Structure):
    """`struct Fronts` of fronts.cpp."""

    _fields_ = [
        *((name, _INTEGER) for name in ("num_fronts", "num_points", "num_right")),
        *((name, _POINTER) for name in ("sizes", "widths", "borders", "blocks", "z")),
    ]


class Queries(ctypes.Structure):
    """`struct Queries` of search.cpp."""

    _fields_ = [
        *((name, _INTEGER) for name in ("num_rows", "num_neighbors")),
        *((name, _POINTER) for name in ("rows", "places", "limit", "exclude", "index", "value")),
    ]


class PolyaGammaDraws(ctypes.Structure):
    """`struct PolyaGammaDraws` of polya_gamma.cpp."""

    _fields_ = [
        *((name, _INTEGER) for name in ("num_entries", "num_draws", "seed", "num_threads")),
        *((name, _POINTER) for name in ("concentration", "tilt", "draws")),
    ]


class AdamStep(ctypes.Structure):
    """`struct AdamStep` of rows.cpp."""

    _fields_ = [
        *((name, _INTEGER) for name in ("num_rows", "num_moved", "num_columns")),
        *((name, _REAL) for name in ("rate", "beta1", "beta2", "eps")),
        *((name, _POINTER) for name in ("rows", "grad", "table", "first", "second")),
    ]
