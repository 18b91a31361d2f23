r"""The Matérn correlation of any smoothness as a table of polynomials.

A Matérn process is a scale mixture of processes with RBF kernels: for squared scaled distances :math:`q = r^2`,

.. math:: \rho_\nu(q) = \frac{2^{1-\nu}}{\Gamma(\nu)} z^\nu K_\nu(z) = \mathbb{E}_\tau\, e^{-q / (2 \tau)}, \qquad
   z = \sqrt{2 \nu q}, \quad \tau \sim \mathrm{Gamma}(\nu, \nu)

(Gradshteyn and Ryzhik 2007, 3.471.9). With :math:`\tau = e^s` the trapezoidal rule converges geometrically, and all its
terms are positive. Its nodes divide an octave, so that one row of exponentials serves all octaves of q.

The table has one polynomial per cell, a sixteenth of an octave of q (a thirty-second in float32). The bits of q give
the cell and the place in it: no logarithm, root or exponential is evaluated. Coefficients are Chebyshev series in
log nu over eighths of an octave of nu, which are computed once and kept, and give the derivative by nu. For a
smoothness of 0.01 and more, errors of correlations are below 1e-13 in float64, and 1e-7 in float32.

Cost: about 50 ms for the first nu in each eighth of an octave, .2 ms for the table of one nu.
Symbols: C coefficients of a cell, P terms in log nu, S batch of smoothnesses.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.polynomial.chebyshev import cheb2poly
from numpy.typing import NDArray
from torch import Tensor

from pyro_nngp._autograd import apply, mapped_first
from pyro_nngp._checks import fail
from pyro_nngp._tape import operation

LEAST, MOST = -80, 20
"""Exponents of two between which q has cells; the correlation is 1 in the octave below them, 0 in the one above."""

_TERMS, _PANELS = 11, 8  # P; panels per octave of nu
_MOST_OCTAVES = 20  # of nu: time and memory grow with its root


class Layout(NamedTuple):
    """Size of a table."""

    cells: int  # per octave of q
    terms: int  # C

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the table of one smoothness and of its derivative."""
        return 2, (MOST - LEAST + 2) * self.cells, self.terms


def layout(dtype: torch.dtype) -> Layout:
    """Cells and coefficients with which errors are at the rounding of the dtype."""
    return Layout(32, 4) if dtype == torch.float32 else Layout(16, 8)


def coefficients(nu: Float[Tensor, "*S"], dtype: torch.dtype) -> Float[Tensor, "*S 2 cells C"]:
    """Correlations, and their derivatives by the smoothness, as polynomials in the place t in [-1/2, 1/2] in a cell.

    Args:
        nu: the smoothness; gradients flow to it.
        dtype: dtype of the result, which determines C.
    """
    flat, form = nu.double().reshape(-1), layout(dtype)
    octaves = flat.log2() * _PANELS
    panels = octaves.detach().floor()
    place, rate = 2 * (octaves - panels) - 1, 2 * _PANELS / (flat * math.log(2))
    weights = _chebyshev(place, rate)
    tables = [one @ _panel(int(panel), form).to(nu.device) for one, panel in zip(weights, panels.long(), strict=True)]
    return torch.stack(tables).to(dtype).reshape(*nu.shape, *form.shape)


@operation
@torch.no_grad()
def tables(nu: Float[Tensor, "*S"], dtype: torch.dtype) -> Float[Tensor, "*S 2 cells C"]:
    """Correlations and derivatives as :func:`coefficients` gives them, without gradients; the latest are cached."""
    each = [_table(one, dtype, nu.device) for one in nu.detach().reshape(-1).tolist()]
    return each[0] if not nu.dim() else torch.stack(each).reshape(*nu.shape, *each[0].shape)


@functools.lru_cache(maxsize=8)
def _table(nu: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return coefficients(torch.tensor(nu, dtype=torch.float64, device="cpu"), dtype).to(device)


def correlation(q: Float[Tensor, "..."], nu: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Correlations at squared distances q for a smoothness nu, of shapes that broadcast; differentiable in both."""
    return apply(_Correlation, q, nu)[0]


class _Correlation(torch.autograd.Function):
    """(q, nu) -> (correlation, its slopes by q and by nu); only the correlation is differentiable."""

    @staticmethod
    def forward(q: Tensor, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _evaluate(q, nu)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None]:
        q, nu, slope, by_nu = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative may be wanted
            slope, by_nu = _evaluate(q, nu)[1:]
        needs_q, needs_nu = ctx.needs_input_grad
        grad_q = (grad * slope).sum_to_size(q.shape) if needs_q else None
        return grad_q, (grad * by_nu).sum_to_size(nu.shape).to(nu.dtype) if needs_nu else None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, q: Tensor, nu: Tensor) -> tuple:
        """Move the mapped dimension to the front of both arguments."""
        return _Correlation.apply(*mapped_first((q, nu), in_dims, (0, 0))), (0, 0, 0)


def _evaluate(q: Tensor, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Correlations and their slopes by q and nu, by operations that can be differentiated."""
    q, nu, cells = q.expand(torch.broadcast_shapes(q.shape, nu.shape)), nu.to(q.device), layout(q.dtype).cells
    table = coefficients(nu.reshape(-1), q.dtype) if torch.is_grad_enabled() else tables(nu.reshape(-1), q.dtype)
    mantissa, exponent = torch.frexp(q.detach().nan_to_num().clamp(2.0 ** (LEAST - 1), 2.0**MOST))  # in [1/2, 1)
    cell = ((2 * mantissa - 1) * cells).floor()
    width = torch.ldexp(torch.full_like(mantissa, 0.5 / cells), exponent)
    place = ((q - (cell + cells + 0.5) * width) / width).clamp(-0.5, 0.5)
    row = (exponent - LEAST) * cells + cell.long()
    own = torch.arange(nu.numel(), device=q.device).reshape(nu.shape) * table.shape[2]
    of_value, of_slope = table.movedim(3, 0).transpose(1, 2).flatten(2).unbind(1)  # (C, S cells)
    value, slope, by_nu = torch.zeros_like(place), torch.zeros_like(place), torch.zeros_like(place)
    for coefficient, change in zip(of_value.flip(0), of_slope.flip(0), strict=True):
        slope = slope * place + value
        value = value * place + coefficient.take(row + own)
        by_nu = by_nu * place + change.take(row + own)
    return value, slope / width, by_nu


def _chebyshev(x: Tensor, rate: Tensor) -> Tensor:
    """Chebyshev polynomials of x (S,), and their derivatives times `rate`, of shape (S, 2, P)."""
    values, slopes = [torch.ones_like(x), x], [torch.zeros_like(x), rate]
    for _ in range(2, _TERMS):
        values.append(2 * x * values[-1] - values[-2])
        slopes.append(2 * rate * values[-2] + 2 * x * slopes[-1] - slopes[-2])
    return torch.stack([torch.stack(values, -1), torch.stack(slopes, -1)], -2)


@functools.lru_cache(maxsize=64)
def _panel(number: int, form: Layout) -> Tensor:
    """Chebyshev coefficients in log nu, from `number` eighths of octaves to the next, of all cells: (P, cells * C)."""
    if number >= _MOST_OCTAVES * _PANELS:
        nu, cure = 2.0 ** (number / _PANELS), "Use RBF, the limit, from which correlations there differ by 1e-6."
        fail("Matern", "smoothness", f"below {2**_MOST_OCTAVES}", f"{nu:g} or more", cure)
    count = form.terms
    nodes, to_series = _chebyshev_nodes(_TERMS)
    nu = 2.0 ** ((number + (nodes[:, None] + 1) / 2) / _PANELS)
    per_octave = max(3, math.ceil(0.9 * math.sqrt(nu.max())))  # nodes of the integral
    first, last = (LEAST - 8) * per_octave, math.ceil(max(2.0, math.log2(45 / nu.min()) + 2) * per_octave)
    step = math.log(2) / per_octave
    s = step * np.arange(first, last + 1)
    log_gamma = np.array([[math.lgamma(one)] for one in nu[:, 0]])
    density = step * np.exp(nu * (s - np.exp(s) + np.log(nu)) - log_gamma)
    inside, to_powers = _chebyshev_nodes(count)
    octave = 1 + (np.arange(form.cells)[:, None] + (inside + 1) / 2) / form.cells
    all_s = step * np.arange(first - (MOST - 1) * per_octave, last - LEAST * per_octave + 1)
    rows = np.exp(-octave.reshape(-1, 1) / 2 * np.exp(np.minimum(-all_s, 80.0)))
    starts = ((MOST - 1 - exponent) * per_octave for exponent in range(LEAST, MOST))
    values = np.stack([density @ rows[:, start : start + len(s)].T for start in starts], 1)
    powers = np.stack([np.pad(cheb2poly(row), (0, count))[:count] for row in np.eye(count)], 1)
    powers *= 2.0 ** np.arange(count)[:, None]  # of t in [-1/2, 1/2]
    cells = np.zeros((_TERMS, (MOST - LEAST + 2) * form.cells, count))
    cells[:, : form.cells, 0] = 1
    cells[:, form.cells : -form.cells] = values.reshape(_TERMS, -1, count) @ (powers @ to_powers).T
    return torch.from_numpy(to_series @ cells.reshape(_TERMS, -1))


def _chebyshev_nodes(count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nodes in (-1, 1), and the matrix from values there to coefficients of Chebyshev polynomials."""
    angle, order = math.pi * (np.arange(count) + 0.5) / count, np.arange(count)[:, None]
    return np.cos(angle), np.cos(order * angle) * np.where(order, 2, 1) / count
