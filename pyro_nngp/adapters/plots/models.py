r"""Plots of a trained method: its curve, its variogram, and the effect of each input.

Cost: O(pairs) for the variogram; joint draws for the dependence.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_int, fail
from pyro_nngp._masks import with_nan
from pyro_nngp._matplotlib import axis
from pyro_nngp.kernels import Kernel
from pyro_nngp.likelihoods import Gaussian

_TWO_SD = 2.0
_PAIRS = 200_000
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
        ImportError: without matplotlib.
    """
    ax = axis("plot_band", ax)
    places, center, spread = (
        np.asarray(torch.as_tensor(with_nan(each)).detach().cpu()) for each in (x, mean, variance)
    )
    order, spread = np.argsort(places), _TWO_SD * np.sqrt(spread)
    (line,) = ax.plot(places[order], center[order], **style)
    ax.fill_between(
        places[order], (center - spread)[order], (center + spread)[order], color=line.get_color(), alpha=0.25
    )
    return ax


@torch.no_grad()
def plot_variogram(
    gp: Any, num_lags: int = 20, max_distance: float | None = None, ax: Any = None, seed: int = 0
) -> Any:
    r"""Semivariances of the residuals, y less mean function and offset, of pairs of data, and the model's for them.

    .. math:: \gamma_{ij} = \tfrac12 E (r_i - r_j)^2 = \tfrac12 (k_{ii} + k_{jj}) - k_{ij}
       + \tfrac12 (\sigma^2 / w_i + \sigma^2 / w_j)

    Pairs are binned by their Euclidean distance; where lengthscales differ between columns, the model's curve is that
    of the pairs in each bin. Curves that differ at short distances indicate a wrong kernel or noise.

    Args:
        gp: a trained method with one kernel and a Gaussian likelihood.
        num_lags: number of bins.
        max_distance: largest distance, in the unit of x; None is half of the 95 % quantile of the distances of pairs.
        ax: axis to draw on; None makes one.
        seed: seed of the choice of pairs, at most 200,000.

    Returns:
        The axis, with the data's semivariances as points, the model's as a curve, and the mean noise variance.

    Raises:
        ValueError, TypeError: for other likelihoods, or several outputs.
        ImportError: without matplotlib.
    """
    where = "plot_variogram"
    check_int(where, "num_lags", num_lags, 2)
    if not isinstance(gp.likelihood, Gaussian) or gp.y.dim() != 1 or gp.kernel is None:
        actual = f"{type(gp).__name__} with {type(gp.likelihood).__name__} and y of shape {tuple(gp.y.shape)}"
        fail(where, "gp", "to have one kernel, one output and a Gaussian likelihood", actual, "Plot its residuals.")
    bound = gp.bound()
    first, second = _pairs(gp, seed, max_distance)
    x, residual, noise = gp.x, gp.y - bound.mean(gp.x).reshape(gp.y.shape), bound.likelihood.variance.expand(gp.y.shape)
    if gp.offset is not None:
        residual = residual - gp.offset
    if gp.weights is not None:
        noise = noise / gp.weights
    distance = (x[first] - x[second]).norm(dim=1)
    places = torch.stack([x[first], x[second]], 1)  # (pairs, 2, D)
    cov = bound.kernel(places, places)
    model = (cov[:, 0, 0] + cov[:, 1, 1]) / 2 - cov[:, 0, 1] + (noise[first] + noise[second]) / 2
    seen = (residual[first] - residual[second]).square() / 2
    edges = torch.linspace(0, distance.max().item(), num_lags + 1, dtype=x.dtype)
    bins = torch.bucketize(distance.cpu(), edges[1:-1])
    counts = bins.bincount(minlength=num_lags).to(x.dtype)
    means = [
        torch.zeros(num_lags, dtype=x.dtype).index_add(0, bins, each.cpu()) / counts for each in (distance, seen, model)
    ]
    lag, empirical, fitted = (each[counts > 0].numpy() for each in means)
    ax = axis(where, ax)
    ax.plot(lag, empirical, "o", label="data")
    ax.plot(lag, fitted, label="model")
    ax.axhline(noise.mean().item(), color="0.6", linewidth=1, linestyle=":", label="noise")
    ax.set(xlabel="distance", ylabel="semivariance", xlim=(0, None), ylim=(0, None))
    ax.legend()
    return ax


def _pairs(gp: Any, seed: int, max_distance: float | None) -> tuple[Tensor, Tensor]:
    """Pairs of rows within the largest distance: random ones, and near ones, which are rare among random pairs."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randint(gp.num_data, (2, _PAIRS), generator=generator).to(gp.x.device)
    if max_distance is None:
        max_distance = 0.5 * (gp.x[first] - gp.x[second]).norm(dim=1).quantile(0.95).item()
    if hasattr(gp, "graph") and gp.graph.neighbors.shape[0] == gp.num_data:
        rows = torch.randperm(gp.num_data, generator=generator)[: _PAIRS // 10].to(gp.x.device)
        near = gp.graph.neighbors[rows]
        rows = rows[:, None].expand_as(near)[near >= 0]
        first, second = torch.cat([first, rows]), torch.cat([second, near[near >= 0]])
    chosen = (first != second) & ((gp.x[first] - gp.x[second]).norm(dim=1) <= max_distance)
    return first[chosen], second[chosen]


@torch.no_grad()
def plot_relevance(gp: Any, ax: Any = None) -> Any:
    """The relevance of each input: its standard deviation over its lengthscale.

    An input far below the others hardly matters. For a kernel that is a sum or a product, each part has separate bars.
    Parts whose lengthscales are not those of the columns, such as what is in a ``Warped``, have none.

    Args:
        gp: a trained method.
        ax: axis to draw on; None makes one.

    Returns:
        The axis.

    Raises:
        ValueError: if no part of the kernel has lengthscales of columns.
        ImportError: without matplotlib.
    """
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

    The band is that of the averaged curve, from joint draws.

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
    check_int(where, "num_values", num_values, 2)
    check_int(where, "num_rows", num_rows, 1)
    names = list(gp.columns or ())
    number = names.index(column) if column in names else column
    if not isinstance(number, int) or not 0 <= number < gp.x.shape[1]:
        have = names or f"0..{gp.x.shape[1] - 1}"
        fail(where, "column", f"to be one of {have}", repr(column), "Give a column of x.")
    if gp.latent_shape:
        fail(where, "gp", "to have one latent function", gp.latent_shape, "Average draws of gp.sample yourself.")
    low, high = gp.x[:, number].quantile(gp.x.new_tensor([0.02, 0.98]))
    values = torch.linspace(low.item(), high.item(), num_values).to(gp.x)
    rows = torch.randperm(gp.num_data, generator=torch.Generator().manual_seed(seed))[:num_rows].to(gp.x.device)
    points = gp.x[rows].repeat(num_values, 1)
    points[:, number] = values.repeat_interleave(len(rows))
    curves = gp.sample(points, _DRAWS, seed=seed).reshape(_DRAWS, num_values, len(rows)).mean(-1)
    ax = plot_band(values, curves.mean(0), curves.var(0), axis(where, ax))
    ax.set(xlabel=column if isinstance(column, str) else f"x[{column}]", ylabel="f, averaged over the data")
    return ax
