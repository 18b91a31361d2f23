"""Triton kernels of the nearest-neighbor conditional and its gradient: one program per target.

A program gathers the neighbors of a target, takes the covariance matrix of neighbors and target apart column panel by
column panel, and solves. The matrix has K' rows of neighbors, K rounded up to whole panels of T columns, and below them
the right-hand sides as further rows: k_n, which needs no further code because the target is a point at the origin,
and in the backward pass grad_w. Factorizing the panels solves for them. A panel is worked on in tiles (T, R) of its T
columns and R of its rows. Panels to the left are subtracted as products of tiles; then the T steps of an elimination,
unrolled, select a column and subtract a tile of rank one. Triangles are solved by substitution, not by inverses, which
lose positive definiteness in float32 where near neighbors are almost collinear.

A covariance that is not positive definite is factorized again with an extra nugget, in the same program, without the
host. If it remains indefinite the results are NaN. Both are counted in `flags`, which the host reads later.

Scratch memory of a program, in values: factor (K' + 3, K'), its diagonal tiles transposed, with two right-hand sides
and the reciprocal diagonal as last rows; places (D, K'), scaled neighbors relative to the target; pull (D, K'),
the gradient of the places; vectors (3, K'): w, a and the slope of k_n. Between a store and the load of another thread
is a barrier.

Formulas are in :mod:`pyro_nngp.conditionals.stationary_kernel`. Symbols: B targets, K neighbors, S sets of
hyperparameters, D dimensions, P right-hand sides, q squared scaled distances.
"""

import triton
import triton.language as tl

from pyro_nngp.gpu.factorization import (
    by_smoothness,
    distances,
    factorize,
    gather,
    slope,
    solve_transposed,
    variance_left,
)

# Nothing is compiled again for other sizes of a batch, nor for inputs that begin elsewhere in memory; for other K, only
# where the tiles differ. K' is a multiple of 16, which the compiler uses.
SIZES = ["total", "B", "K"]
FLAGS = ["noise_kind", "keep", "pull_wanted", "inputs_wanted"]  # numbers, since the interpreter takes no truth values
INPUTS = ["x", "points", "scale", "variances", "tables", "noise", "neighbors"]


@triton.jit(do_not_specialize=[*SIZES, *FLAGS], do_not_specialize_on_alignment=INPUTS)
def conditional(
    x,  # (B, D)
    points,  # (N, D)
    scale,  # (S, D), lengthscales times the stretch of the profile
    variances,  # (S,)
    tables,  # (S, 2, cells, C), of the smoothness, or anything
    noise,  # (B, K) or (S, B, K), or anything
    neighbors,  # (B, K), -1 for none
    weights,  # (S, B, K), written
    left,  # (S, B), v, written
    extras,  # (S, B), extra nuggets, written
    flags,  # (2,), the largest number of the nugget that was needed, and how many needed one
    factors,  # scratch
    scratch,
    total,  # S B
    B,
    K,
    ROWS,  # K'
    noise_kind,  # 0 none, 1 of all sets, 2 of each set
    keep,  # whether the factor of each target is kept for the backward pass
    D: tl.constexpr,
    KERNEL: tl.constexpr,
    TABLE: tl.constexpr,  # cells C
    TERMS: tl.constexpr,  # C
    JITTER: tl.constexpr,
    TINY: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
):
    """Weights and variances."""
    program = tl.program_id(0).to(tl.int64)
    places = scratch + program * (2 * D + 3) * ROWS
    vectors = places + 2 * D * ROWS
    noisy = noise_kind > 0
    unit = program
    while unit < total:
        target, group = unit % B, unit // B
        near, target_noise = neighbors + target * K, noise + tl.where(noise_kind == 2, unit, target) * K
        factor = factors + tl.where(keep > 0, unit, program) * (ROWS + 3) * ROWS
        inverse = factor + (ROWS + 2) * ROWS
        gather(x + target * D, points, scale + group * D, near, places, D, K, ROWS, R)
        variance, table = tl.load(variances + group), tables + group * 2 * TABLE
        size = tl.zeros((T,), factor.dtype.element_ty)  # the diagonal, whose mean the nuggets are relative to
        for start in range(0, ROWS, T):
            rows = start + tl.arange(0, T)
            real = tl.load(near + rows, rows < K, -1) >= 0
            diagonal = variance + tl.where(real, variance * JITTER, 0.0)
            diagonal += tl.load(target_noise + rows, real & noisy, 0.0)
            size += tl.where(rows < K, diagonal, 0.0)
        mean = tl.sum(size, 0) / K
        step = mean * 0
        extra = mean * 0
        level = 0
        trying = 1
        while trying > 0:
            bad = factorize(
                near, target_noise, weights, places, factor, inverse, variance, table, extra, D,
                K, ROWS, KERNEL, TERMS, JITTER, noisy, 1, False, T, R,
            )  # fmt: skip
            level += bad
            trying = tl.where(level < 6, bad, 0)
            step = tl.where(step > 0, step * 10, 1e-6)
            extra = tl.where(trying > 0, mean * step, extra)
        if level > 0:
            tl.atomic_max(flags, level)
            tl.atomic_add(flags + 1, 1)
        solve_transposed(factor, inverse, factor + ROWS * ROWS, vectors, ROWS, T)
        v, floor = variance_left(factor, variance, JITTER, TINY, ROWS, T)
        hopeless = level > 5
        tl.store(left + unit, tl.where(hopeless, float("nan"), tl.where(v < floor, floor, v)))
        tl.store(extras + unit, extra)
        for start in range(0, ROWS, T):
            rows = start + tl.arange(0, T)
            w = tl.where(hopeless, float("nan"), tl.load(vectors + rows))
            tl.store(weights + unit * K + rows, w, rows < K)
        tl.debug_barrier()
        unit += tl.num_programs(0)


@triton.jit(do_not_specialize=[*SIZES, *FLAGS], do_not_specialize_on_alignment=[*INPUTS, "grad_w", "grad_v"])
def gradient(
    x,
    points,
    scale,
    variances,
    tables,
    noise,
    neighbors,
    grad_w,  # (S, B, K)
    grad_v,  # (S, B)
    extras,
    grad_noise,  # (S, B, K), written
    grad_x,  # (S, B, D), written if wanted
    grad_z,  # (S, B, K, D), written if wanted
    sums,  # (S, B, D + 2), written: of the logarithms of lengthscales and variance, and of the smoothness
    factors,
    scratch,
    total,
    B,
    K,
    ROWS,
    noise_kind,
    pull_wanted,  # whether gradients of kernel or inputs are wanted
    inputs_wanted,  # whether those of inputs are
    D: tl.constexpr,
    KERNEL: tl.constexpr,
    TABLE: tl.constexpr,
    TERMS: tl.constexpr,
    JITTER: tl.constexpr,
    KEEP: tl.constexpr,
    TINY: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
):
    """Gradients; arguments as in :func:`conditional`."""
    program = tl.program_id(0).to(tl.int64)
    places = scratch + program * (2 * D + 3) * ROWS
    pull = places + D * ROWS
    w = pull + D * ROWS
    a = w + ROWS
    far = a + ROWS
    noisy = noise_kind > 0
    unit = program
    while unit < total:
        target, group = unit % B, unit // B
        near, target_noise = neighbors + target * K, noise + tl.where(noise_kind == 2, unit, target) * K
        factor = factors + (unit if KEEP else program) * (ROWS + 3) * ROWS
        inverse = factor + (ROWS + 2) * ROWS
        gather(x + target * D, points, scale + group * D, near, places, D, K, ROWS, R)
        variance, table = tl.load(variances + group), tables + group * 2 * TABLE
        extra = tl.load(extras + unit)
        factorize(
            near, target_noise, grad_w + unit * K, places, factor, inverse, variance, table, extra, D,
            K, ROWS, KERNEL, TERMS, JITTER, noisy, 2, KEEP, T, R,
        )  # fmt: skip
        solve_transposed(factor, inverse, factor + ROWS * ROWS, w, ROWS, T)
        solve_transposed(factor, inverse, factor + (ROWS + 1) * ROWS, a, ROWS, T)
        v, floor = variance_left(factor, variance, JITTER, TINY, ROWS, T)
        bar = tl.where(v < floor, 0.0, tl.load(grad_v + unit))
        log_variance = bar * v
        for start in range(0, ROWS, T):
            rows = start + tl.arange(0, T)
            weight = tl.load(w + rows)
            change = (bar * weight - tl.load(a + rows)) * weight
            tl.store(grad_noise + unit * K + rows, change, rows < K)
            added = tl.zeros((T,), change.dtype) + extra
            real = tl.load(near + rows, rows < K, -1) >= 0
            added += tl.load(target_noise + rows, real & noisy, 0.0)
            log_variance -= tl.sum(change * added, 0)
        if pull_wanted > 0:
            tl.store(sums + unit * (D + 2) + D, log_variance)
            smoothness = log_variance * 0
            for start in range(0, ROWS, R):
                rows = start + tl.arange(0, R)
                inside = rows < ROWS
                here, side = tl.load(w + rows, inside, 0.0), tl.load(a + rows, inside, 0.0)
                here_left = bar * here - side
                q = tl.zeros((R,), here.dtype)
                for d in range(D):
                    s = tl.load(places + d * ROWS + rows, inside, 0.0)
                    q += s * s
                tug = -2 * (here_left + bar * here) * slope(q, variance, table, KERNEL, TERMS)
                if KERNEL == 4:
                    rate = by_smoothness(q, variance, table, TABLE, TERMS)
                    smoothness -= tl.sum((here_left + bar * here) * rate, 0)
                tl.store(far + rows, tug, inside)
                for d in range(D):
                    s = tl.load(places + d * ROWS + rows, inside, 0.0)
                    tl.store(pull + d * ROWS + rows, tug * s, inside)
                tl.debug_barrier()
                for panel in range(0, ROWS, T):
                    columns = panel + tl.arange(0, T)
                    there = tl.load(w + columns)
                    there_left = bar * there - tl.load(a + columns)
                    between = distances(places, columns, rows, D, ROWS, T, R)
                    pairs = there_left[:, None] * here[None, :] + there[:, None] * here_left[None, :]
                    if KERNEL == 4:
                        rates = by_smoothness(between, variance, table, TABLE, TERMS)
                        smoothness += 0.5 * tl.sum(tl.sum(pairs * rates, 0), 0)
                    force = 2 * pairs * slope(between, variance, table, KERNEL, TERMS)
                    for d in range(D):
                        s = tl.load(places + d * ROWS + rows, inside, 0.0)
                        r = tl.load(places + d * ROWS + columns)
                        moved = tl.load(pull + d * ROWS + rows, inside, 0.0)
                        moved += tl.sum(force * (s[None, :] - r[:, None]), 0)
                        tl.store(pull + d * ROWS + rows, moved, inside)
                    tl.debug_barrier()
            tl.store(sums + unit * (D + 2) + D + 1, smoothness)
            for d in range(D):
                inward, outward = tl.zeros((T,), bar.dtype), tl.zeros((T,), bar.dtype)
                length = tl.load(scale + group * D + d)
                for start in range(0, ROWS, T):
                    rows = start + tl.arange(0, T)
                    s = tl.load(places + d * ROWS + rows)
                    moved = tl.load(pull + d * ROWS + rows)
                    inward -= moved * s
                    outward -= tl.load(far + rows) * s
                    if inputs_wanted > 0:
                        tl.store(grad_z + (unit * K + rows) * D + d, moved / length, rows < K)
                tl.store(sums + unit * (D + 2) + d, tl.sum(inward, 0))
                if inputs_wanted > 0:
                    tl.store(grad_x + unit * D + d, tl.sum(outward, 0) / length)
        tl.debug_barrier()
        unit += tl.num_programs(0)
