"""The compiled nearest-neighbor conditional for CPUs, of stationary kernels, sums and products: `conditional.cpp`.

Cost: O(S B K^3) time; per thread, memory for K^2 / 2 values of one block of points (16 in float32 and 8 in float64 with
AVX-512). Where only gradients by a few scales and the variance of one kernel are wanted, the forward pass keeps the
derivatives by them, B (K + 1) (P + 1) values, and the backward pass is a sum of products. For other gradients it keeps
B K^2 / 2 values of Cholesky factors, in memory that later calls get again; beyond 256 MB the backward pass factorizes
again.
"""

import ctypes
import functools
import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nngp import _memory as memory
from pyro_nngp._checks import fail
from pyro_nngp._tape import operation
from pyro_nngp.kernels.combination import MAX_PARTS
from pyro_nngp.kernels.matern_table import layout as table_layout
from pyro_nngp.kernels.matern_table import tables
from pyro_nngp.kernels.radial import (
    CONSTANT,
    MATERN,
    MATERN12,
    MATERN32,
    MATERN52,
    RBF,
    WAVE,
    WENDLAND,
    Combination,
    Profile,
)
from pyro_nngp.native import best_level, enabled, loaded
from pyro_nngp.native.boundary import address, contiguous
from pyro_nngp.native.structures import Arguments

MAX_NEIGHBORS = 1024
"""Beyond it a block of points would take more than 34 MB per thread."""

_KERNELS = {RBF: 0, MATERN12: 1, MATERN32: 2, MATERN52: 3, WENDLAND: 4, CONSTANT: 5, WAVE: 6, MATERN: 7}
_NO_MEMORY, _NO_SUCH_POINT = 1, 2
KEPT_BYTES = 2**28
TANGENTS_UP_TO = 8  # columns; the derivatives by more of them take longer than a backward pass that factorizes again
_WORK_PER_THREAD = 2**24  # multiplications: about 0.1 ms, enough to be worth starting a thread


class Problem(NamedTuple):
    """The arguments of a nearest-neighbor conditional with a stationary kernel, or a combination of F; tensors first.

    S sets of hyperparameters share the points and their neighbors; without that dimension there is one set.
    """

    x: Tensor  # (B, D)
    points: Tensor  # (N, D)
    lengthscale: Tensor  # (D,) or (S, D)
    variance: Tensor  # () or (S,), with F at the end for a combination
    noise: Tensor | None  # (B, K), or (S, B, K) with S sets
    neighbors: Tensor  # (B, K), rows of points, -1 for none
    profile: Profile | Combination
    jitter: float
    smoothness: Tensor | None = None  # () or (S,), for profiles with a table; of T in a combination (T,) or (S, T)

    def one(self, i: int) -> "Problem":
        """The problem of one of several sets."""
        noise = self.noise if self.noise is None or self.noise.dim() == 2 else self.noise[i]
        smoothness = None if self.smoothness is None else self.smoothness[i]
        scale, variance = self.lengthscale[i], self.variance[i]
        return self._replace(lengthscale=scale, variance=variance, noise=noise, smoothness=smoothness)

    @property
    def sets(self) -> tuple[int, ...]:
        """(S,), or () for one set."""
        return tuple(self.variance.shape[: self.variance.dim() - self.profile.rank])

    @property
    def num_sets(self) -> int:
        """S."""
        return math.prod(self.sets)

    @property
    def prior_variance(self) -> Tensor:
        """The variance k(x, x), () or (S,)."""
        return self.profile.total(self.variance)

    @property
    def scale(self) -> Tensor:
        """Lengthscales times the stretch of the profile, as `lengthscale`."""
        return self.profile.scaled(self.lengthscale)

    @property
    def num_tables(self) -> int:
        """Number of parts whose smoothness is a parameter."""
        return 0 if self.smoothness is None else self.smoothness.shape[-1] if self.profile.rank else 1


class Gradients(NamedTuple):
    """Its gradients, with S in front where the problem has it; noise and inputs only if asked for."""

    log_lengthscale: Tensor | None  # (D,)
    log_variance: Tensor | None  # (), or (F,) of a combination
    noise: Tensor | None  # (B, K)
    x: Tensor | None  # (B, D)
    z: Tensor | None  # (B, K, D), of each neighbor of each target
    smoothness: Tensor | None = None  # (), or (T,)
    left: Tensor | None = None  # (B, K), minus that of k_n, where the problem has covariances to subtract


class Wanted(NamedTuple):
    """Gradients that a backward pass computes."""

    kernel: bool = True  # by lengthscale and variance
    noise: bool = True
    inputs: bool = True  # by x and points
    smoothness: bool = False  # together with the kernel's


def supported(problem: Problem) -> bool:
    """Whether compiled code is available, switched on, and covers this kernel, device, dtype and K."""
    x, (num_targets, num_neighbors) = problem.x, problem.neighbors.shape
    return (
        all(part in _KERNELS for part in problem.profile.parts)
        and len(problem.profile.parts) <= MAX_PARTS
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and problem.points.dtype == x.dtype
        and num_targets > 0
        and problem.num_sets > 0
        and 0 < num_neighbors <= MAX_NEIGHBORS
        and enabled()
    )


@operation
def forward(
    problem: Problem, wanted: Wanted | None = None, level: int | None = None, explained: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Weights (B, K), variances (B,), flags (B,) of indefinite covariances, and tensors for `backward`.

    Each of them has S in front for S sets of hyperparameters.

    Args:
        problem: points, neighbors and hyperparameters.
        wanted: gradients that the backward pass may be asked for; None if there will be none.
        level: an instruction set below ``library().nn_levels()``; None is the widest.
        explained: covariances to subtract, of the neighbors and, last, the target, (B, K + 1, K + 1); for one set.
    """
    b, k, d, _ = _sizes(problem)
    lead, new = (*problem.sets, b), problem.x.new_empty
    w, var, failed = new(*lead, k), new(lead), new(lead, dtype=torch.bool)
    by_smoothness = wanted is not None and wanted.smoothness
    p = d + by_smoothness * problem.num_tables
    numbers = w.nelement() // k * (p + 1) * (k + 1) * w.element_size()
    few = wanted is not None and not problem.profile.rank and not wanted.inputs and problem.noise is explained is None
    if few and d <= TANGENTS_UP_TO and numbers <= KEPT_BYTES:
        tangents = w.new_empty(*lead, p, k), w.new_empty(*lead, p + 1)
        kept = {"tangent_w": tangents[0], "tangent_v": tangents[1]}
        _run(problem, level, by_smoothness, None, failed=failed, w=w, v=var, **kept)
        return w, var, failed, (failed, w, var, *tangents)
    size = _factors_size(problem, best_level(level))
    keeps = wanted is not None and size <= KEPT_BYTES
    factors = memory.reused(size) if keeps else None
    _run(problem, level, False, explained, failed=failed, factors=factors, w=w, v=var)
    return w, var, failed, (failed, w, var) if factors is None else (failed, w, var, factors)


@operation
def backward(
    problem: Problem,
    kept: tuple[Tensor, ...],
    grad_w: Tensor,
    grad_var: Tensor,
    wanted: Wanted,
    level: int | None = None,
    explained: Tensor | None = None,
) -> Gradients:
    """The wanted gradients; targets that failed contribute 0. `explained` as in :func:`forward`."""
    (b, k, d, _), new = _sizes(problem), problem.x.new_empty
    level = best_level(level)
    width = loaded().nn_conditional_width(level, _is_double(problem))
    sets = problem.sets
    kernel, noise, inputs, smoothness = wanted
    smoothness = smoothness and kernel
    p = d + smoothness * problem.num_tables
    sums = new(*sets, -(-b // width), p + len(problem.profile.parts), dtype=torch.float64) if kernel else None
    grad_noise = new(*sets, b, k) if noise else None
    left = None if explained is None else new(b, k)
    grad_x, grad_z = (new(*sets, b, d), new(*sets, b, k, d)) if inputs else (None, None)
    (failed, w, var), more = kept[:3], kept[3:]
    serve = len(more) == 2 and kernel and not noise and not inputs and more[0].shape[-2:-1] == (p,)
    tangents = more if serve else (None, None)
    _run(
        problem,
        level,
        smoothness,
        explained,
        failed=failed,
        factors=more[0] if len(more) == 1 else None,
        w=w,
        v=var,
        tangent_w=tangents[0],
        tangent_v=tangents[1],
        grad_w=grad_w,
        grad_v=grad_var,
        grad_noise=grad_noise,
        left=left,
        grad_x=grad_x,
        grad_z=grad_z,
        sums=sums,
    )
    if sums is None:
        return Gradients(None, None, grad_noise, grad_x, grad_z, left=left)
    scales, of_smoothness, of_variance = sums.sum(-2).to(problem.x.dtype).tensor_split((d, p), -1)
    if not problem.profile.rank:
        of_smoothness, of_variance = of_smoothness.squeeze(-1), of_variance.squeeze(-1)
    return Gradients(scales, of_variance, grad_noise, grad_x, grad_z, of_smoothness if smoothness else None, left)


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    """B, K, D and N."""
    for arg in ("x", "points", "neighbors"):
        if (rank := getattr(problem, arg).dim()) != 2:
            fail("nn_conditional", arg, "with 2 dimensions", rank, "Give rows of coordinates, or of numbers.")
    (b, d), k = problem.x.shape, problem.neighbors.shape[1]
    columns = sum(problem.profile.combined(d).dims)
    if problem.profile.rank and not d == problem.lengthscale.shape[-1:].numel() == columns:
        found, cure = (d, tuple(problem.lengthscale.shape)), "Give the columns side by side, and a scale for each."
        fail("nn_conditional", "x, lengthscale", f"with the {columns} columns of all parts", found, cure)
    if not 1 <= k <= MAX_NEIGHBORS or problem.x.dtype not in (torch.float32, torch.float64):
        expectation, actual = f"float32 or float64, K in 1..{MAX_NEIGHBORS}", f"{problem.x.dtype}, {k}"
        fail("nn_conditional", "x, K", expectation, actual, "Ask `supported` first.")
    return b, k, d, len(problem.points)


@functools.lru_cache(maxsize=64)
def _form(profile: Combination) -> dict[str, Any]:
    """Numbers, first columns and terms of the parts, as arrays that stay where they are."""
    parts, dims, terms = profile
    if len(parts) > MAX_PARTS:  # compiled code has room for as many
        fail("nn_conditional", "a kernel", f"of at most {MAX_PARTS} parts", len(parts), "Ask `supported` first.")
    arrays = {
        "kernels": [_KERNELS[part] for part in parts],
        "columns": [0, *itertools.accumulate(dims)],
        "terms": [sum(1 << part for part in term) for term in terms],
    }
    return {name: (ctypes.c_int64 * len(values))(*values) for name, values in arrays.items()}


def _is_double(problem: Problem) -> bool:
    return problem.x.dtype == torch.float64


def _factors_size(problem: Problem, level: int) -> int:
    """Bytes of the factors of all sets."""
    b, k, _, _ = _sizes(problem)
    return problem.num_sets * loaded().nn_conditional_factors(b, k, level, _is_double(problem))


def _run(
    problem: Problem, level: int | None, by_smoothness: bool, explained: Tensor | None, **buffers: Tensor | None
) -> None:
    b, k, d, num_points = _sizes(problem)
    level, is_double, dtype = best_level(level), _is_double(problem), problem.x.dtype
    sets, parts = problem.sets, len(problem.profile.parts)
    work = problem.num_sets * b * k * k * (k + 20 * d + 50 * parts)
    threads = max(1, min(torch.get_num_threads(), work // _WORK_PER_THREAD))
    blocks = -(-b // loaded().nn_conditional_width(level, is_double))
    num_tables, form = problem.num_tables, _form(problem.profile.combined(d))
    p = d + by_smoothness * num_tables
    table = None if problem.smoothness is None else tables(problem.smoothness, dtype)
    layout = {
        "x": ((b, d), dtype),
        "points": ((num_points, d), dtype),
        "neighbors": ((b, k), torch.int64),
        "scale": ((*sets, d), dtype),
        "variance": ((*sets, *[parts] * problem.profile.rank), dtype),
        "table": ((*sets, *[num_tables] * problem.profile.rank, *table_layout(dtype).shape), dtype),
        "noise": ((b, k) if problem.noise is not None and problem.noise.dim() == 2 else (*sets, b, k), dtype),
        "explained": ((b, k + 1, k + 1), dtype),
        "failed": ((*sets, b), torch.bool),
        "factors": ((_factors_size(problem, level),), torch.uint8),
        "w": ((*sets, b, k), dtype),
        "tangent_w": ((*sets, b, p, k), dtype),
        "tangent_v": ((*sets, b, p + 1), dtype),
        "v": ((*sets, b), dtype),
        "grad_w": ((*sets, b, k), dtype),
        "grad_v": ((*sets, b), dtype),
        "grad_noise": ((*sets, b, k), dtype),
        "left": ((b, k), dtype),
        "grad_x": ((*sets, b, d), dtype),
        "grad_z": ((*sets, b, k, d), dtype),
        "sums": ((*sets, blocks, p + parts), torch.float64),
    }
    inputs = {
        "x": problem.x,
        "points": problem.points,
        "neighbors": problem.neighbors,
        "scale": problem.scale,
        "variance": problem.variance,
        "table": table,
        "noise": problem.noise,
        "explained": explained,
        "grad_w": buffers.pop("grad_w", None),
        "grad_v": buffers.pop("grad_v", None),
    }
    where, given = "nn_conditional", {name: tensor for name, tensor in inputs.items() if tensor is not None}
    read = {name: contiguous(where, name, tensor) for name, tensor in given.items()}
    written = {name: tensor for name, tensor in buffers.items() if tensor is not None}
    pointers = {
        name: address(where, name, tensor, *layout[name], 64 if name == "factors" else 1)
        for name, tensor in (read | written).items()
    }
    arguments = Arguments(
        num_sets=problem.num_sets,
        num_targets=b,
        num_neighbors=k,
        num_dims=d,
        num_points=num_points,
        num_parts=parts,
        num_terms=len(form["terms"]),
        noise_of_sets=problem.noise is not None and problem.noise.dim() > 2,
        num_threads=threads,
        by_nu=by_smoothness * num_tables,
        jitter=problem.jitter,
        **{name: ctypes.addressof(array) for name, array in form.items()},
        **pointers,
    )
    status = loaded().nn_conditional_run(ctypes.byref(arguments), level, is_double)
    if status == _NO_MEMORY:
        raise MemoryError(f"nn_conditional: no memory for blocks of points with {k} neighbors")
    if status == _NO_SUCH_POINT:
        raise IndexError(f"nn_conditional: expected neighbors below the number of points, {num_points}")
