"""The nearest-neighbor conditional on a GPU: launches of :mod:`pyro_nngp.gpu.kernels`.

The host waits for nothing. Covariances that need an extra nugget get it on the device and are counted there;
:func:`pyro_nngp.linalg.report_nuggets` warns or raises when it is called.

Cost: O(S B K^3) time; memory for one factor per program, or where gradients are recorded O(S B K^2), if that is at most
1 GiB; beyond it the backward pass factorizes again.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nngp import gpu
from pyro_nngp.kernels.matern_table import layout, tables
from pyro_nngp.kernels.radial import MATERN, MATERN12, MATERN32, MATERN52, RBF, Combination, Profile
from pyro_nngp.linalg.nuggets import nugget_flags
from pyro_nngp.native.conditional import Gradients, Problem, Wanted

MAX_NEIGHBORS = 512
FEWEST_TARGETS = 512
"""Problems of fewer targets are not worth the seconds in which a kernel is compiled."""
FACTORS_BYTES = 2**30
_KERNELS: dict[Profile | Combination, int] = {RBF: 0, MATERN12: 1, MATERN32: 2, MATERN52: 3, MATERN: 4}


class Tiles(NamedTuple):
    """Division of a kernel into programs."""

    columns: int  # T, of a panel
    rows: int  # R, of a tile
    warps: int  # of a program
    programs: int  # per multiprocessor, each of which works on one target after the other
    registers: int | None = None  # most per thread; None leaves it to the compiler


def tiles(num_neighbors: int) -> Tiles:
    """Tiles with the fewest registers and no or few spills when compiled for compute capability 9.0."""
    if num_neighbors <= 32:
        return Tiles(16, 32, 1, 12)
    if num_neighbors <= 128:
        return Tiles(16, 64, 2, 8, 128)
    return Tiles(16, 128, 4, 4, 128)


def supported(problem: Problem) -> bool:
    """Whether the kernels cover this device, profile, dtype and K, and Triton is installed."""
    x, (num_targets, num_neighbors) = problem.x, problem.neighbors.shape
    return (
        x.device.type == "cuda"
        and problem.profile in _KERNELS
        and x.dtype in (torch.float32, torch.float64)
        and problem.points.dtype == x.dtype
        and problem.num_sets * num_targets >= FEWEST_TARGETS
        and 0 < num_neighbors <= MAX_NEIGHBORS
        and gpu.enabled()
    )


def forward(problem: Problem, wanted: Wanted | None = None) -> tuple[Tensor, Tensor, None, tuple[Tensor, ...]]:
    """Weights (B, K), variances (B,), None and tensors for `backward`; S sets lead.

    None means that no target is left for the caller to repair. The tensors serve all gradients.
    """
    from pyro_nngp.gpu import kernels

    b, k = problem.neighbors.shape
    lead, new = (*problem.sets, b), problem.x.new_empty
    w, var, extra = new((*lead, k)), new(lead), new(lead)
    size, programs = _factor_size(k), _programs(problem)
    keeps = wanted is not None and problem.num_sets * b * size * w.element_size() <= FACTORS_BYTES
    factors = new(size * (problem.num_sets * b if keeps else programs))
    outputs, table = (w, var, extra, nugget_flags(w.device, w.dtype, k), factors), _table(problem)
    _launch(kernels.conditional, problem, table, programs, outputs, {"keep": int(keeps)})
    return w, var, None, (extra, table, factors) if keeps else (extra, table)


def backward(problem: Problem, kept: tuple[Tensor, ...], grad_w: Tensor, grad_var: Tensor, wanted: Wanted) -> Gradients:
    """The wanted gradients."""
    from pyro_nngp.gpu import kernels

    (b, k), d, new = problem.neighbors.shape, problem.x.shape[1], problem.x.new_empty
    lead, programs = (*problem.sets, b), _programs(problem)
    grad_noise, sums = new((*lead, k)), new((*lead, d + 2))
    grad_x, grad_z = (new((*lead, d)), new((*lead, k, d))) if wanted.inputs else (None, None)
    extra, table, *factors = kept
    keeps = bool(factors)
    unused = sums
    outputs = (
        grad_w.contiguous(),
        grad_var.contiguous(),
        extra,
        grad_noise,
        unused if grad_x is None else grad_x,
        unused if grad_z is None else grad_z,
        sums,
        factors[0] if keeps else new(_factor_size(k) * programs),
    )
    flags = {"KEEP": keeps, "pull_wanted": int(wanted.kernel or wanted.inputs), "inputs_wanted": int(wanted.inputs)}
    _launch(kernels.gradient, problem, table, programs, outputs, flags)
    total = sums.sum(-2)
    return Gradients(
        total[..., :d] if wanted.kernel else None,
        total[..., d] if wanted.kernel else None,
        grad_noise if wanted.noise else None,
        grad_x,
        grad_z,
        total[..., d + 1] if wanted.smoothness else None,
    )


def _padded(num_neighbors: int) -> int:
    """K rounded up to whole panels."""
    columns = tiles(num_neighbors).columns
    return -(-num_neighbors // columns) * columns


def _factor_size(num_neighbors: int) -> int:
    """Number of values of a factor, two right-hand sides and the reciprocal diagonal."""
    return _padded(num_neighbors) * (_padded(num_neighbors) + 3)


def _programs(problem: Problem) -> int:
    most = tiles(problem.neighbors.shape[1]).programs * _multiprocessors(problem.x.device)
    return min(problem.num_sets * len(problem.x), most)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors; 2 without a device, so that interpreted programs work on several targets, too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def constants(problem: Problem) -> dict[str, Any]:
    """Compile-time constants of the kernels."""
    k = problem.neighbors.shape[1]
    return {
        "D": problem.x.shape[1],
        "KERNEL": _KERNELS[problem.profile],
        "TABLE": math.prod(layout(problem.x.dtype).shape[1:]),
        "TERMS": layout(problem.x.dtype).terms,
        "JITTER": problem.jitter,
        "TINY": torch.finfo(problem.x.dtype).tiny,
        "T": tiles(k).columns,
        "R": tiles(k).rows,
    }


def _table(problem: Problem) -> Tensor:
    """The table of the smoothness, of each set; any tensor where the profile has none."""
    return problem.x if problem.smoothness is None else tables(problem.smoothness, problem.x.dtype)


def _launch(
    kernel: Any,
    problem: Problem,
    table: Tensor,
    programs: int,
    tensors: tuple[Tensor, ...],
    flags: dict[str, int],
) -> None:
    (b, k), d, x = problem.neighbors.shape, problem.x.shape[1], problem.x.contiguous()
    options: dict[str, Any] = {"num_warps": tiles(k).warps, "num_stages": 1}  # no loads ahead: scratch is read back
    if tiles(k).registers is not None:
        options["maxnreg"] = tiles(k).registers
    with torch.cuda.device_of(x):  # Triton launches on the current device
        kernel[(programs,)](
            x,
            problem.points.contiguous(),
            problem.scale.contiguous(),
            problem.variance.contiguous(),
            table.contiguous(),
            x if problem.noise is None else problem.noise.contiguous(),
            problem.neighbors.contiguous(),
            *tensors,
            x.new_empty(programs * (2 * d + 3) * _padded(k)),
            problem.num_sets * b,
            b,
            k,
            _padded(k),
            0 if problem.noise is None else problem.noise.dim() - 1,
            **constants(problem),
            **flags,
            **options,
        )
