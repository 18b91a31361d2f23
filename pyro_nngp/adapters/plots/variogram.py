r"""The variogram of a model's residuals, with the curve and an envelope of the model.

With residuals r, y less mean function and offset,

.. math:: \gamma_{ij} = \tfrac12 E (r_i - r_j)^2 = \tfrac12 (k_{ii} + k_{jj}) - k_{ij}
   + \tfrac12 (\sigma^2 / w_i + \sigma^2 / w_j)

Cost: O(pairs + S R K), for S draws at R rows. Symbols: N rows, R rows at most, D columns, K neighbors, S draws.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._checks import check_int, check_positive, check_seed, fail
from pyro_nngp._kinds import check_kind, check_sequence
from pyro_nngp._matplotlib import axis
from pyro_nngp._memory import memory_errors
from pyro_nngp._random import seeded, shuffled
from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import bind, neighbor_metric
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models.base import Method
from pyro_nngp.neighbors import NeighborGraph

_ROWS, _PAIRS, _NEIGHBORS = 5_000, 200_000, 20
_FAR = 0.95  # quantile of distances, half of which is the largest lag
_ENDS = 0.025, 0.975


class _Pairs(NamedTuple):
    """Pairs of rows, and the bin of each."""

    first: Int[Tensor, " Q"]
    second: Int[Tensor, " Q"]
    bins: Int[Tensor, " Q"]
    sizes: Float[Tensor, " B"]

    def means(self, values: Float[Tensor, "*S Q"]) -> Float[Tensor, "*S B"]:
        """Mean in each bin."""
        total = values.new_zeros(*values.shape[:-1], len(self.sizes)).index_add(-1, self.bins, values)
        return total / self.sizes

    def semivariances(self, values: Float[Tensor, "*S R"]) -> Float[Tensor, "*S B"]:
        """Half the mean squared difference in each bin."""
        return self.means((values[..., self.first] - values[..., self.second]).square() / 2)


@torch.no_grad()
@memory_errors("plot_variogram", "Lower num_lags or num_draws.")
def plot_variogram(
    gp: Any,
    num_lags: int = 20,
    max_distance: float | None = None,
    ax: Any = None,
    seed: int = 0,
    *,
    columns: Sequence[int | str] | None = None,
    num_draws: int = 99,
) -> Any:
    """Semivariances of the residuals of pairs of data, and the model's for them, with an envelope.

    Pairs are binned by their Euclidean distance over `columns`; the model's curve is an average over the pairs in each
    bin. Draws from the model at the same rows give the envelope, with 95 % of draws in each bin: points outside of it,
    at short distances above all, indicate a wrong kernel or noise. At long distances semivariances of few correlated
    data scatter widely, which the envelope shows.

    Args:
        gp: a trained method with one kernel and a Gaussian likelihood.
        num_lags: number of bins, 2 to 200,000.
        max_distance: largest distance, in the unit of `columns`; None is half of the 95 % quantile of the distances of
            pairs.
        ax: axis to draw on; None makes one.
        seed: seed of the choice of rows, at most 5,000, and of pairs, at most 200,000 beside near ones.
        columns: columns of x, by number or name, whose distance is on the axis, such as all columns of one unit; pairs
            are then those that are nearest in the other columns. None is all columns.
        num_draws: draws for the envelope; 0 leaves it out.

    Returns:
        The axis, with the data's semivariances as points, the model's as a curve, the mean noise variance, and the
        envelope.

    Raises:
        ValueError, TypeError: for other likelihoods, several outputs, or columns that x does not have.
        ImportError: without matplotlib.
    """
    where = "plot_variogram"
    check_kind(where, "gp", gp, Method, "a method", "Pass a trained one, such as Vecchia.")
    check_int(where, "num_lags", num_lags, 2)
    if num_lags > _PAIRS:
        fail(where, "num_lags", f"<= {_PAIRS}, the number of pairs", num_lags, "Ask for some twenty bins.")
    check_int(where, "num_draws", num_draws, 0)
    check_seed(where, seed)
    if max_distance is not None:
        check_positive(where, "max_distance", max_distance, "It is in the unit of the columns.")
    if not isinstance(gp.likelihood, Gaussian) or gp.y.dim() != 1 or gp.kernel is None:
        actual = f"{type(gp).__name__} with {type(gp.likelihood).__name__} and y of shape {tuple(gp.y.shape)}"
        fail(where, "gp", "to have one kernel, one output and a Gaussian likelihood", actual, "Plot its residuals.")
    chosen, bound = _numbers(where, gp, columns), gp.bound()
    rows = shuffled(gp.num_data, seed, gp.x.device)[:_ROWS]
    x, noise = gp.x[rows], bound.likelihood.variance.expand(gp.y.shape)[rows]
    residual = gp.y[rows] - gp.rows.mean(bound, rows)
    if gp.weights is not None:
        noise = noise / gp.weights[rows]
    k = min(_NEIGHBORS, len(x) - 1)
    graph = NeighborGraph(x, k, seed=seed, metric=neighbor_metric(bound.kernel, x), progress=False)
    pairs, lags = _binned(where, x, chosen, graph, num_lags, max_distance, seed)
    places = torch.stack([x[pairs.first], x[pairs.second]], 1)  # (pairs, 2, D)
    cov = bound.kernel(places, places)
    model = (cov[:, 0, 0] + cov[:, 1, 1]) / 2 - cov[:, 0, 1] + (noise[pairs.first] + noise[pairs.second]) / 2
    full = (pairs.sizes > 0).cpu()
    ax = axis(where, ax)
    lag = lags.cpu()[full].numpy()
    ax.plot(lag, pairs.semivariances(residual).cpu()[full].numpy(), "o", label="data", zorder=3)
    ax.plot(lag, pairs.means(model).cpu()[full].numpy(), color="C1", label="model")
    ax.axhline(noise.mean().item(), color="0.6", linewidth=1, linestyle=":", label="noise")
    if num_draws:
        with seeded(seed, x):
            draws = NNGP(bind(bound.kernel), graph, jitter=bound.jitter).sample(torch.Size((num_draws,)))
            draws = draws + noise.sqrt() * torch.randn_like(draws)
        ends = torch.stack([pairs.semivariances(draw) for draw in draws]).quantile(x.new_tensor(_ENDS), 0)
        ax.fill_between(lag, *ends.cpu()[:, full].numpy(), color="C1", alpha=0.2, lw=0, label="95 % of draws")
    names = [gp.columns[each] if gp.columns else f"x[{each}]" for each in chosen]
    label = "distance" if columns is None else f"distance in {', '.join(names)}"
    ax.set(xlabel=label, ylabel="semivariance", xlim=(0, None), ylim=(0, None))
    ax.legend()
    return ax


def _numbers(where: str, gp: Any, columns: Sequence[int | str] | None) -> list[int]:
    """Numbers of the columns of the distance."""
    names, size = list(gp.columns or ()), gp.x.shape[1]
    if columns is None:
        return list(range(size))
    if not isinstance(columns, str | int):
        check_sequence(where, "columns", columns, "Give columns of x.")
    listed = [columns] if isinstance(columns, str | int) else list(columns)
    listed = [names.index(each) if each in names else each for each in listed]
    numbers = [each if isinstance(each, int) and not isinstance(each, bool) else -1 for each in listed]
    if not numbers or not all(0 <= each < size for each in numbers):
        have = names or f"0..{size - 1}"
        fail(where, "columns", f"to be among {have}", repr(columns), "Give columns of x.")
    return numbers


def _binned(
    where: str,
    x: Float[Tensor, "R D"],
    chosen: list[int],
    graph: NeighborGraph,
    num_lags: int,
    max_distance: float | None,
    seed: int,
) -> tuple[_Pairs, Float[Tensor, " B"]]:
    """Pairs of rows within the largest distance, random ones and near ones, and the mean distance in each bin."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randint(len(x), (2, _PAIRS), generator=generator, device="cpu").to(x.device)
    others = [column for column in range(x.shape[1]) if column not in chosen]
    if others:  # the tenth of the pairs that is nearest in the other columns
        apart = ((x[first] - x[second])[:, others] / x[:, others].std(0).clamp(min=1e-30)).norm(dim=1)
        close = apart <= apart.quantile(0.1)
        first, second = first[close], second[close]
    if max_distance is None:
        max_distance = 0.5 * (x[first] - x[second])[:, chosen].norm(dim=1).quantile(_FAR).item()
    if not others:
        real = graph.neighbors >= 0
        rows = torch.arange(len(x), device=x.device)[:, None].expand_as(real)
        first, second = torch.cat([first, rows[real]]), torch.cat([second, graph.neighbors[real]])
    distance = (x[first] - x[second])[:, chosen].norm(dim=1)
    within = (first != second) & (distance <= max_distance)
    if not bool(within.any()):
        fail(where, "max_distance", "to have pairs within it", max_distance, "Raise it.")
    first, second, distance = first[within], second[within], distance[within]
    edges = torch.linspace(0, distance.max().item(), num_lags + 1, dtype=x.dtype, device=x.device)
    bins = torch.bucketize(distance, edges[1:-1])
    pairs = _Pairs(first, second, bins, bins.bincount(minlength=num_lags).to(x.dtype))
    return pairs, pairs.means(distance)
