"""Maps: predictions at every cell of a raster or another grid as an xarray Dataset, tile after tile.

Cost: the predictions; memory independent of the number of cells, except for the results: 4 bytes per cell and
variable, on the disk if a path is given. Draws are joint and take O(P K) memory for P cells. Symbols: D inputs, P
cells, T outputs.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Normal
from tqdm.auto import tqdm

from pyro_nngp._checks import check_choice, check_int, check_number, check_seed, fail, import_extra
from pyro_nngp._files import disk_errors
from pyro_nngp._kinds import check_flags, check_kind, check_sequence
from pyro_nngp._memory import memory_errors
from pyro_nngp._random import seeded
from pyro_nngp.adapters.maps.cells import Cells, Tile
from pyro_nngp.adapters.maps.formats import check_format, read, write
from pyro_nngp.adapters.maps.parts import Parts
from pyro_nngp.adapters.maps.shared_store import SharedStore
from pyro_nngp.adapters.maps.systems import mapped
from pyro_nngp.distributed import World
from pyro_nngp.distributed.training_state import training_state
from pyro_nngp.distributions.quantiles import exceedance, quantiles
from pyro_nngp.inference.checkpoint import exclusive_checkpoint
from pyro_nngp.inference.identity import described, identity
from pyro_nngp.inference.protocols import shard_of
from pyro_nngp.likelihoods import Categorical, IntervalCensored, Ordinal
from pyro_nngp.models.base import Method
from pyro_nngp.storage import digest

if TYPE_CHECKING:
    from xarray import Dataset

Values: TypeAlias = dict[str, Tensor]


@memory_errors("predict_grid", "Give path= for a map on the disk, or a smaller num_neighbors.")
def predict_grid(
    gp: Any,
    template: Any,
    *,
    columns: Sequence[str] | None = None,
    mask: Any = None,
    of: Literal["y", "f"] = "y",
    quantile_levels: float | Sequence[float] = (),
    thresholds: float | Sequence[float] = (),
    num_draws: int = 0,
    path: str | os.PathLike[str] | None = None,
    samples: Mapping[str, Tensor] | None = None,
    num_neighbors: int | None = None,
    offset: float = 0.0,
    trials: int | None = None,
    crs: Any = None,
    seed: int = 0,
    progress: bool = True,
) -> "Dataset":
    """Posterior mean, standard deviation and more at every cell of a grid.

    Args:
        gp: a trained method. One on several processes needs a `path` that ends in ``.zarr``; all of them must call the
            function, and each writes its tiles to the one store.
        template: the grid: an xarray DataArray or Dataset whose coordinates or variables hold the inputs, such as a
            raster opened by rioxarray with covariates as further variables; or a mapping of names to 1-D arrays.
        columns: names in `template` of the D inputs, in order; None takes the columns of the frame that the method was
            built from, or ``("x", "y")``. Places on the globe are read from ``x`` and ``y`` [degrees].
        mask: True at the cells to predict, a DataArray on dimensions of the grid; None is all cells without NaN inputs.
        of: "y" for the predictive distribution of data, "f" for the latent function.
        quantile_levels: probabilities in (0, 1) of the variable ``quantiles``, or one.
        thresholds: values for the variable ``exceedance``, the probability of exceeding them, or one.
        num_draws: joint draws for the variable ``draws``.
        path: a file to write, by its extension NetCDF (.nc), Zarr (.zarr) or GeoTIFF (.tif); None keeps the map in
            memory. The same call resumes an interrupted map, whose tiles are in the folder ``path`` + ".part".
        samples: as in ``gp.predict``.
        num_neighbors: as in ``gp.predict``.
        offset: offset at all cells, such as the logarithm of an exposure.
        trials: number of trials at all cells, of ``Binomial()``.
        crs: coordinate reference system of the grid, such as "EPSG:32632"; None takes the system of the template, or of
            the points that the method was built from. The Dataset and files of any format have it.
        seed: seed of draws, and of quantiles without a closed form.
        progress: whether a run of more than three seconds shows a progress bar.

    Returns:
        A Dataset on the grid in float32: ``mean`` and ``sd``, or ``probability`` of each class, and the requested
        variables, with dimensions ``quantile``, ``threshold``, ``draw``, ``category`` and ``output`` in front of the
        grid's. NaN outside the mask. With `path` it reads lazily from the file.

    Raises:
        ValueError, TypeError: for inputs that `template` does not have, malformed arguments, parts of another map, or a
            folder with other things.
        CheckpointError: if a tile in the folder is damaged, or another process writes the map.
        OSError: if the disk is full or cannot be written; the same call goes on.
        ImportError: if xarray, or what the format needs, is not installed.
    """
    where = "predict_grid"
    xarray = import_extra(where, "xarray", "maps")
    check_choice(where, "of", of, ("y", "f"))
    check_int(where, "num_draws", num_draws, 0)
    check_seed(where, seed)
    check_flags(where, progress=progress)
    check_kind(where, "gp", gp, Method, "a method", "Pass a trained one, such as Vecchia.")
    levels, limits = _listed(where, "quantile_levels", quantile_levels), _listed(where, "thresholds", thresholds)
    for level in levels:
        if not 0 < level < 1:
            fail(where, "quantile_levels", "in (0, 1)", level, "Give probabilities such as 0.05 and 0.95.")
    cells = Cells(template, columns, gp.columns, mask, gp.x, crs)
    target = None if path is None else check_format(where, path, cells.dims)
    results = _Results(gp, of, levels, limits, num_draws, samples, num_neighbors, offset, trials)
    folder = None if target is None else Path(f"{target}.part")
    parts_of = f"{results.digest()} {cells.digest()} {seed}"
    shard = shard_of(gp)
    world = None if shard is None or shard.world.size == 1 else shard.world
    if world is not None and num_draws:
        cure = "Take gp.sample at fewer places, or the rows of one region on one process, by start=gp."
        fail(where, "num_draws", "0 on several processes", num_draws, cure)
    locked = target if world is None or world.rank == 0 else None
    with exclusive_checkpoint(where, locked, "path"), disk_errors(where, target):
        if world is not None:
            outline = results.outline(cells)
            store = SharedStore(world, target, parts_of, outline, cells.tiles)
            _compute(store, cells, results, world, seed, progress)
            store.publish()
            return read(cast(Path, target), outline)
        parts = Parts(folder, parts_of, [*cells.tiles, cells.everything], cells.shape)
        _compute(parts, cells, results, None, seed, progress)
        if not parts.done[-1]:
            parts.finish(len(cells.tiles), _values(cells, cells.everything, results.draws, seed) if num_draws else {})
        parts.assemble()
        if not parts.arrays:  # no cell is inside; a row of the data has the shapes
            with torch.no_grad(), seeded(seed, gp.x):
                row = gp.x[:1].detach()
                like = results.moments(row) | (results.draws(row) if num_draws else {})
            for name, values in like.items():
                parts.array(name, values.shape[:-1])
        further = {name: results.dims(name, array.ndim - len(cells.dims)) for name, array in parts.arrays.items()}
        variables = {name: ((*further[name], *cells.dims), array) for name, array in parts.arrays.items()}
        dataset = results.label(xarray.Dataset(variables, cells.coords))
        if target is None:
            return dataset
        write(dataset, target)
        parts.remove()
        return read(target, dataset)


def _compute(
    parts: Parts | SharedStore, cells: Cells, results: "_Results", world: World | None, seed: int, progress: bool
) -> None:
    """Finish all tiles, together with the other processes."""
    row = results.gp.x[:1].detach()
    sizes = [math.prod(part.stop - part.start for part in tile) for tile in cells.tiles]
    done = sum(size for size, is_done in zip(sizes, parts.done, strict=False) if is_done)
    options: Any = {"desc": "map", "unit": "cell", "unit_scale": True, "delay": 3, "disable": not progress}
    with tqdm(total=sum(sizes), initial=done, **options) as bar:
        for number in _turns(np.flatnonzero(~parts.done[: len(cells.tiles)]), world):
            values = {} if number is None else _values(cells, cells.tiles[number], results.moments, seed + number)
            if not values and world is not None:
                results.moments(row)  # other processes have cells to predict, and all search for neighbors together
            if number is not None:
                parts.finish(number, values)
                bar.update(sizes[number])


def _values(cells: Cells, tile: Tile, compute: Callable[[Tensor], Values], seed: int) -> Values:
    """Variables at all cells of a tile, (..., *tile) each, NaN outside the mask; none if no cell is inside."""
    inside, x_new = cells.at(tile)
    if not len(x_new):
        return {}
    with torch.no_grad(), seeded(seed, x_new):
        computed = compute(x_new)
    placed = {name: torch.full((*values.shape[:-1], *inside.shape), torch.nan) for name, values in computed.items()}
    for name, values in computed.items():
        placed[name][..., torch.from_numpy(inside)] = values.float()
    return placed


def _listed(where: str, arg: str, values: float | Sequence[float]) -> Sequence[float]:
    """The numbers as a sequence; a single number becomes a list."""
    listed = [float(values)] if isinstance(values, Real) else cast(Sequence[float], values)
    check_sequence(where, arg, listed, "Give a number or a list of numbers.")
    for value in listed:
        check_kind(where, arg, value, Real, "numbers", "Give a number or a list of numbers.")
    return listed


def _turns(todo: np.ndarray, world: World | None) -> Iterator[int | None]:
    """Numbers of the tiles of this process, in rounds; None in a round in which only other processes have a tile."""
    if world is None:
        yield from todo.tolist()
        return
    for start in range(0, len(todo), world.size):
        mine = start + world.rank
        yield int(todo[mine]) if mine < len(todo) else None


class _Results:
    """Computes the requested variables; arguments as in :func:`predict_grid`."""

    def __init__(
        self,
        gp: Any,
        of: str,
        quantile_levels: Sequence[float],
        thresholds: Sequence[float],
        num_draws: int,
        samples: Mapping[str, Tensor] | None,
        num_neighbors: int | None,
        offset: float,
        trials: int | None,
    ) -> None:
        self.gp, self.of, self.num_draws = gp, of, num_draws
        self.levels = torch.tensor(list(quantile_levels), dtype=gp.x.dtype, device=gp.x.device)
        self.thresholds = torch.tensor(list(thresholds), dtype=gp.x.dtype, device=gp.x.device)
        options = {"samples": samples, "num_neighbors": num_neighbors}
        self.options = {name: value for name, value in options.items() if value is not None}
        check_number("predict_grid", "offset", offset, -math.inf)
        if trials is not None:
            check_int("predict_grid", "trials", trials, 1)
            check_number("predict_grid", "trials", trials, 1)
        self.offset, self.trials = offset, trials
        self.has_classes = of == "y" and isinstance(gp.likelihood, Categorical | IntervalCensored | Ordinal)

    def moments(self, x_new: Tensor) -> Values:
        """Variables at new points, (..., P) each, computed point by point."""
        if self.of == "y":
            predictive = self.gp.predict(x_new, trials=self._trials(x_new), **self._options(x_new))
        else:
            mean, variance = self.gp(x_new, **self._options(x_new))
            predictive = Normal(mean, variance.sqrt())
        if self.has_classes:
            labels = range(self.gp.likelihood.support.upper_bound + 1)
            result = {"probability": torch.stack([predictive.log_prob(x_new.new_tensor(k)).exp() for k in labels])}
        else:
            result = {"mean": predictive.mean, "sd": predictive.variance.sqrt()}
        if len(self.levels):
            result["quantiles"] = quantiles(predictive, self.levels)
        if len(self.thresholds):
            result["exceedance"] = exceedance(predictive, self.thresholds)
        if predictive.event_shape:  # the outputs of a point
            result = {name: values.mT for name, values in result.items()}
        return {name: values.cpu() for name, values in result.items()}

    def outline(self, cells: Cells) -> "Dataset":
        """The map with its coordinates, and variables without memory in place of values."""
        import xarray

        nothing, variables = np.float32(np.nan), {}
        for name, values in self.moments(self.gp.x[:1].detach()).items():
            lead = tuple(values.shape[:-1])
            dims = *self.dims(name, len(lead)), *cells.dims
            variables[name] = dims, np.broadcast_to(nothing, (*lead, *cells.shape))
        return self.label(xarray.Dataset(variables, cells.coords))

    def draws(self, x_new: Tensor) -> Values:
        """Joint draws at new points, (S, ..., P)."""
        draw = self.gp.sample if self.of == "f" else partial(self.gp.sample_y, trials=self._trials(x_new))
        try:
            return {"draws": draw(x_new, self.num_draws, **self._options(x_new)).cpu()}
        except MemoryError as error:
            wanted, cure = f"{self.num_draws} at {len(x_new)} cells", "Lower num_draws, or take a coarser grid."
            fail("predict_grid", "draws", "to fit into memory", wanted, cure, MemoryError, error)

    def _trials(self, x_new: Tensor) -> Tensor | None:
        return None if self.trials is None else torch.full_like(x_new[:, 0], self.trials)

    def _options(self, x_new: Tensor) -> dict[str, Any]:
        return self.options | ({"offset": torch.full_like(x_new[:, 0], self.offset)} if self.offset else {})

    def dims(self, name: str, number: int) -> tuple[str, ...]:
        """Names of the dimensions of a variable in front of the dimensions of the grid."""
        added = {"quantiles": "quantile", "exceedance": "threshold", "draws": "draw", "probability": "category"}
        first = (added[name],) if name in added else ()
        return (*first, "output")[:number]

    def label(self, dataset: "Dataset") -> "Dataset":
        """The map with coordinates of the further dimensions."""
        outputs = self.gp.outputs or range(dataset.sizes.get("output", 0))
        labels = {"quantile": self.levels.tolist(), "threshold": self.thresholds.tolist(), "output": list(outputs)}
        if self.gp.classes is not None:
            labels["category"] = list(self.gp.classes)
        return mapped(dataset.assign_coords({dim: values for dim, values in labels.items() if dim in dataset.dims}))

    def digest(self) -> str:
        """Digest of everything that determines the values, except the cells and the seed."""
        settings = (self.of, self.offset, self.trials, self.levels.tolist(), self.thresholds.tolist(), self.num_draws)
        shard, descriptions = shard_of(self.gp), identity(gp=self.gp, options=self.options)
        if shard is None:
            values = self.gp.state_dict()
        else:
            descriptions = described(descriptions, shard)
            values = training_state(self.gp)["shared"]
        tensors = {name: value.detach().cpu().contiguous() for name, value in values.items()}
        return digest({"settings": repr((settings, descriptions))}, tensors)
