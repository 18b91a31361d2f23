"""Triton functions below the kernels: gather neighbors, factorize their covariance with right-hand sides, and solve.

Algorithm, scratch memory and symbols: see :mod:`pyro_nngp.gpu.kernels`.
"""

import triton
import triton.language as tl

FIRST_Q, LAST_Q = tl.constexpr(2.0**-81), tl.constexpr(2.0**20)  # between them tables have cells, others are constant


@triton.jit
def place_in_table(q):
    """Cell of q in a table of :mod:`pyro_nngp.kernels.matern_table`, place in the cell, and one over its width.

    The cell, as the number of its first coefficient, is exponent and first bits of q; the place is its other bits.
    """
    known = tl.where(q < FIRST_Q, FIRST_Q, q)
    known = tl.where(known < LAST_Q, known, LAST_Q)
    if q.dtype == tl.float64:
        bits = known.to(tl.int64, bitcast=True)
        cell = ((bits >> 48) - (942 << 4)) * 8
        place = ((bits & 0xFFFFFFFFFFFF) | (1023 << 52)).to(tl.float64, bitcast=True) * 16 - 16.5
        width = ((2050 - (bits >> 52)) << 52).to(tl.float64, bitcast=True)
    else:
        bits = known.to(tl.int32, bitcast=True)
        cell = ((bits >> 18) - (46 << 5)) * 4
        place = ((bits & 0x3FFFF) | (127 << 23)).to(tl.float32, bitcast=True) * 32 - 32.5
        width = ((259 - (bits >> 23)) << 23).to(tl.float32, bitcast=True)
    return cell, place, width


@triton.jit
def covariance(q, variance, table, KERNEL: tl.constexpr, TERMS: tl.constexpr):
    """k(q) for squared distances on inputs divided by the stretch of the profile; NaN stays NaN."""
    if KERNEL == 4:
        cell, place, _ = place_in_table(q)
        value = tl.where(q > 1e30, 0.0, q * 0)
        for c in tl.static_range(TERMS):
            value = value * place + tl.load(table + cell + (TERMS - 1 - c))
        return variance * value
    if KERNEL == 0:
        return variance * tl.exp(-q)
    if KERNEL == 1:
        return variance * tl.exp(-tl.sqrt(q))
    q = tl.where(q > 1e30, 1e30, q)
    s = tl.sqrt(q)
    f = variance * tl.exp(-s)
    if KERNEL == 2:
        return f + s * f
    return f + s * f + q * f / 3


@triton.jit
def slope(q, variance, table, KERNEL: tl.constexpr, TERMS: tl.constexpr):
    """dk/dq."""
    if KERNEL == 4:
        cell, place, width = place_in_table(q)
        value = q * 0
        change = q * 0
        for c in tl.static_range(TERMS):
            change = change * place + value
            value = value * place + tl.load(table + cell + (TERMS - 1 - c))
        return variance * change * width
    if KERNEL == 0:
        return -variance * tl.exp(-q)
    if KERNEL == 1:
        s = tl.sqrt(q)
        return tl.where(q > 1e-24, -0.5 * variance * tl.exp(-s) / tl.where(q > 1e-24, s, 1.0), 0.0)
    s = tl.sqrt(tl.where(q > 1e30, 1e30, q))
    f = variance * tl.exp(-s)
    if KERNEL == 2:
        return -0.5 * f
    return (f + s * f) / -6


@triton.jit
def by_smoothness(q, variance, table, TABLE: tl.constexpr, TERMS: tl.constexpr):
    """dk/dnu, by the second half of a table."""
    cell, place, _ = place_in_table(q)
    value = q * 0
    for c in tl.static_range(TERMS):
        value = value * place + tl.load(table + TABLE + cell + (TERMS - 1 - c))
    return variance * value


@triton.jit
def distances(places, columns, rows, D: tl.constexpr, ROWS, T: tl.constexpr, R: tl.constexpr):
    """Squared distances (T, R) between two sets of rows; rows from ROWS on are the target, the origin."""
    q = tl.zeros((T, R), places.dtype.element_ty)
    for d in range(D):
        a = tl.load(places + d * ROWS + columns, columns < ROWS, 0.0)
        b = tl.load(places + d * ROWS + rows, rows < ROWS, 0.0)
        difference = a[:, None] - b[None, :]
        q += difference * difference
    return q


@triton.jit
def gather(x, points, scale, neighbors, places, D: tl.constexpr, K, ROWS, R: tl.constexpr):
    """Scaled neighbors relative to the target; zero where there is none."""
    for start in range(0, ROWS, R):
        rows = start + tl.arange(0, R)
        number = tl.load(neighbors + rows, rows < K, -1)
        for d in range(D):
            near = tl.load(points + number * D + d, number >= 0, 0.0)
            moved = tl.where(number >= 0, (near - tl.load(x + d)) / tl.load(scale + d), 0.0)
            tl.store(places + d * ROWS + rows, moved, rows < ROWS)
    tl.debug_barrier()


@triton.jit
def system(
    neighbors,
    noise,
    grad_w,
    places,
    columns,
    rows,
    variance,
    table,
    extra,
    D: tl.constexpr,
    K,
    ROWS,
    KERNEL: tl.constexpr,
    TERMS: tl.constexpr,
    JITTER: tl.constexpr,
    noisy,
    P: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
):
    """Tile (T, R) of the matrix; columns < ROWS. Rows and columns without a neighbor equal the identity's."""
    real = tl.load(neighbors + columns, columns < K, -1) >= 0
    beside = (tl.load(neighbors + rows, rows < K, -1) >= 0) | (rows == ROWS)
    tile = covariance(distances(places, columns, rows, D, ROWS, T, R), variance, table, KERNEL, TERMS)
    tile = tl.where(real[:, None] & beside[None, :], tile, 0.0)
    if P > 1:
        right = tl.load(grad_w + columns, real, 0.0)
        tile = tl.where(rows[None, :] == ROWS + 1, right[:, None], tile)
    added = variance * JITTER + extra + tl.load(noise + columns, real & noisy, 0.0)
    diagonal = tl.where(real, variance + added, 1.0)
    return tl.where(columns[:, None] == rows[None, :], diagonal[:, None], tile)


@triton.jit
def left_of(tile, factor, columns, rows, stop, height, ROWS, T: tl.constexpr):
    """A tile minus the contributions of the panels on its left: the left-looking step."""
    for start in range(0, stop, T):
        across = start + tl.arange(0, T)
        a = tl.load(factor + columns[:, None] * ROWS + across[None, :])
        b = tl.load(factor + rows[:, None] * ROWS + across[None, :], (rows < height)[:, None], 0.0)
        tile -= tl.dot(a, tl.trans(b), input_precision="ieee", out_dtype=tile.dtype)
    return tile


@triton.jit
def factorize(
    neighbors,
    noise,
    grad_w,
    places,
    factor,
    vectors,
    variance,
    table,
    extra,
    D: tl.constexpr,
    K,
    ROWS,
    KERNEL: tl.constexpr,
    TERMS: tl.constexpr,
    JITTER: tl.constexpr,
    noisy,
    P: tl.constexpr,
    KEPT: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
):
    """Fill `factor` and the reciprocal diagonal; 1 if some pivot is not positive. If KEPT, only right-hand sides."""
    bad = 0
    index = tl.arange(0, T)
    for panel in range(0, ROWS, T):
        columns = panel + index
        if not KEPT:
            corner = system(
                neighbors, noise, grad_w, places, columns, columns, variance, table, extra, D,
                K, ROWS, KERNEL, TERMS, JITTER, noisy, 1, T, T,
            )  # fmt: skip
            corner = left_of(corner, factor, columns, columns, panel, ROWS, ROWS, T)
            for c in tl.static_range(T):
                column = tl.sum(tl.where(index[:, None] == c, corner, 0.0), 0)
                pivot = tl.sum(tl.where(index == c, column, 0.0), 0)
                bad = tl.where(pivot > 0, bad, 1)
                inverse = 1 / tl.sqrt(tl.where(pivot > 0, pivot, 1.0))
                column = tl.where(index >= c, column * inverse, 0.0)
                corner -= column[:, None] * column[None, :]
                tl.store(factor + (panel + c) * ROWS + columns, column)
                tl.store(vectors + panel + c, inverse)
            tl.debug_barrier()
        height = ROWS + P
        for start in range(ROWS if KEPT else panel + T, height, R):
            rows = start + tl.arange(0, R)
            tile = system(
                neighbors, noise, grad_w, places, columns, rows, variance, table, extra, D,
                K, ROWS, KERNEL, TERMS, JITTER, noisy, P, T, R,
            )  # fmt: skip
            tile = left_of(tile, factor, columns, rows, panel, height, ROWS, T)
            for c in tl.static_range(T):
                below = tl.load(factor + (panel + c) * ROWS + columns, index > c, 0.0)
                solved = tl.sum(tl.where(index[:, None] == c, tile, 0.0), 0) * tl.load(vectors + panel + c)
                tile = tl.where(index[:, None] == c, solved[None, :], tile - below[:, None] * solved[None, :])
            tl.store(factor + rows[None, :] * ROWS + columns[:, None], tile, (rows < height)[None, :])
        tl.debug_barrier()
    return bad


@triton.jit
def solve_transposed(factor, vectors, right, out, ROWS, T: tl.constexpr):
    """out <- L^-T right, both of K' values; `right` is a row of `factor`."""
    index = tl.arange(0, T)
    for panel in range(ROWS - T, -1, -T):
        columns = panel + index
        value = tl.load(right + columns)
        for start in range(panel + T, ROWS, T):
            rows = start + tl.arange(0, T)
            tile = tl.load(factor + rows[:, None] * ROWS + columns[None, :])
            value -= tl.sum(tile * tl.load(out + rows)[:, None], 0)
        solved = tl.zeros((T,), value.dtype)
        for up in range(T):
            c = T - 1 - up
            below = tl.load(factor + (panel + c) * ROWS + columns, index > c, 0.0)
            residual = tl.sum(tl.where(index == c, value, 0.0) - below * solved, 0)
            solved = tl.where(index == c, residual * tl.load(vectors + panel + c), solved)
        tl.store(out + columns, solved)
        tl.debug_barrier()


@triton.jit
def variance_left(factor, variance, JITTER: tl.constexpr, TINY: tl.constexpr, ROWS, T: tl.constexpr):
    """v before its floor, and the floor."""
    squares = tl.zeros((T,), factor.dtype.element_ty)
    for start in range(0, ROWS, T):
        half = tl.load(factor + ROWS * ROWS + start + tl.arange(0, T))
        squares += half * half
    floor = variance * JITTER
    return variance * (1 + JITTER) - tl.sum(squares, 0), tl.where(floor < TINY, TINY, floor)
