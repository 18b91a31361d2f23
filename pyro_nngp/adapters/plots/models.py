"""Plots of a trained method: its curve, and the effect of each input.

Cost: joint draws for the dependence.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_int, check_memory, check_seed, fail
from pyro_nngp._kinds import check_kind
from pyro_nngp._masks import with_nan
from pyro_nngp._matplotlib import axis
from pyro_nngp._random import shuffled
from pyro_nngp.kernels import Kernel
from pyro_nngp.models.base import Method

_TWO_SD = 2.0
_DRAWS = 200


def plot_band(
    x: Float[Tensor, " P"], mean: Float[Tensor, " P"], variance: Float[Tensor, " P"], ax: Any = None, **style: Any
) -> Any:
    """A curve with its band of two standard deviations.

    Args:
        x: places on the horizontal axis, in any order.
        mean: means, as ``gp(x_new)`` returns them.
        variance: variances, as ``gp(x_new)`` returns them.
        ax: axis to draw on; None makes one.
        **style: arguments of matplotlib for the curve, such as ``color`` and ``label``.

    Returns:
        The axis.

    Raises:
        ValueError, TypeError: unless places, means and variances are vectors of numbers of one length.
        ImportError: without matplotlib.
    """
    where = "plot_band"
    places, center, spread = (
        _vector(where, arg, value) for arg, value in (("x", x), ("mean", mean), ("variance", variance))
    )
    if not len(places) == len(center) == len(spread):
        lengths = len(places), len(center), len(spread)
        fail(where, "x, mean, variance", "of one length", lengths, "Give one mean and one variance per place.")
    ax = axis(where, ax)
    order, spread = np.argsort(places), _TWO_SD * np.sqrt(spread)
    (line,) = ax.plot(places[order], center[order], **style)
    ax.fill_between(
        places[order], (center - spread)[order], (center + spread)[order], color=line.get_color(), alpha=0.25
    )
    return ax


def _vector(where: str, arg: str, value: Any) -> np.ndarray:
    """An array of shape (P,) from a tensor or what NumPy takes."""
    value = value.detach().cpu() if isinstance(value, Tensor) and not value.is_meta else with_nan(value)
    try:
        array = np.asarray(value, dtype=float)
    except (TypeError, ValueError, RuntimeError) as error:
        fail(where, arg, "to hold numbers", type(value).__name__, "Pass a tensor or an array.", TypeError, error)
    if array.ndim != 1:
        fail(where, arg, "of shape (P,)", array.shape, "Give one value per place.")
    return array


@torch.no_grad()
def plot_relevance(gp: Any, ax: Any = None) -> Any:
    """The relevance of each input: its standard deviation over its lengthscale.

    An input far below the others hardly matters. For a kernel that is a sum or a product, each part has separate bars.
    Parts whose lengthscales do not belong to columns, such as a part of a ``Warped``, have none.

    Args:
        gp: a trained method.
        ax: axis to draw on; None makes one.

    Returns:
        The axis.

    Raises:
        ValueError: if no part of the kernel has lengthscales of columns.
        ImportError: without matplotlib.
    """
    check_kind("plot_relevance", "gp", gp, Method, "a method", "Pass a trained one, such as Vecchia.")
    parts = _parts_with_lengthscales(gp.bound().kernel)
    if not parts:
        expectation = "to have a kernel with lengthscales of columns of x"
        fail("plot_relevance", "gp", expectation, gp.kernel, "See plot_dependence.")
    spread, names, values = gp.x.std(0), [], []
    for path, part in parts:
        columns = list(part.active_dims or range(part.input_dim))
        scales = part.lengthscale.expand(len(columns))
        for column, scale in zip(columns, scales, strict=True):
            label = gp.columns[column] if gp.columns else f"x[{column}]"
            names.append(f"{path}: {label}" if path and len(parts) > 1 else label)
            values.append((spread[column] / scale).item())
    ax = axis("plot_relevance", ax)
    ax.barh(names, values)
    ax.invert_yaxis()
    ax.set(xlabel="sd of the input / lengthscale")
    return ax


def _parts_with_lengthscales(kernel: Any) -> list[tuple[str, Any]]:
    """Parts of a kernel that have lengthscales of the columns, by path."""
    if not isinstance(kernel, Kernel):
        return []
    kernels = [(path, part) for path, part in kernel.named_modules() if isinstance(part, Kernel)]
    moved = tuple(f"{path}." if path else "" for path, part in kernels if part.moves_inputs)
    return [(path, part) for path, part in kernels if hasattr(part, "lengthscale") and not path.startswith(moved)]


def plot_dependence(
    gp: Any, column: int | str, num_values: int = 25, num_rows: int = 40, ax: Any = None, seed: int = 0
) -> Any:
    """Partial dependence: f averaged over rows of the data while one input varies, with a band of two posterior sd.

    The band belongs to the averaged curve, from joint draws.

    Args:
        gp: a trained method.
        column: column of x, by number or name.
        num_values: number of values of the input, between the 2nd and the 98th percentile of the data.
        num_rows: number of rows of the data in the average.
        ax: axis to draw on; None makes one.
        seed: seed of rows and draws.

    Returns:
        The axis.

    Raises:
        ValueError, TypeError: for an unknown column or several latent functions.
        ImportError: without matplotlib.
    """
    where = "plot_dependence"
    check_kind(where, "gp", gp, Method, "a method", "Pass a trained one, such as Vecchia.")
    check_seed(where, seed)
    check_int(where, "num_values", num_values, 2)
    check_int(where, "num_rows", num_rows, 1)
    names = list(gp.columns or ())
    number = names.index(column) if isinstance(column, str) and column in names else column
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < gp.x.shape[1]:
        have = names or f"0..{gp.x.shape[1] - 1}"
        fail(where, "column", f"to be one of {have}", repr(column), "Give a column of x.")
    if gp.latent_shape:
        fail(where, "gp", "to have one latent function", gp.latent_shape, "Average draws of gp.sample yourself.")
    cure = "Take fewer num_values or num_rows."
    check_memory(where, "draws", _DRAWS * num_values * min(num_rows, gp.num_data), gp.x.dtype, cure)
    low, high = gp.x[:, number].quantile(gp.x.new_tensor([0.02, 0.98]))
    values = torch.linspace(low.item(), high.item(), num_values).to(gp.x)
    rows = shuffled(gp.num_data, seed, gp.x.device)[:num_rows]
    points = gp.x[rows].repeat(num_values, 1)
    points[:, number] = values.repeat_interleave(len(rows))
    curves = gp.sample(points, _DRAWS, seed=seed).reshape(_DRAWS, num_values, len(rows)).mean(-1)
    ax = plot_band(values, curves.mean(0), curves.var(0), axis(where, ax))
    ax.set(xlabel=column if isinstance(column, str) else f"x[{column}]", ylabel="f, averaged over the data")
    return ax
