"""The main job of the command line: from a table of measurements to a map with its uncertainty.

``given`` are the arguments of :mod:`pyro_nngp.adapters.command_line`.
"""

import argparse
import math

import numpy as np
import torch

from pyro_nngp import fit, likelihoods, models
from pyro_nngp._matplotlib import pyplot
from pyro_nngp.adapters.krige_tables import (
    UsageError,
    is_globe,
    make_template,
    placed,
    predict_table,
    read_inputs,
    read_numbers,
    read_table,
    read_targets,
)
from pyro_nngp.adapters.maps import predict_grid
from pyro_nngp.adapters.maps.cells import Cells
from pyro_nngp.adapters.maps.formats import check_format
from pyro_nngp.adapters.plots import plot_map

LIKELIHOODS = {
    "gaussian": likelihoods.Gaussian,
    "student-t": likelihoods.StudentT,
    "poisson": likelihoods.Poisson,
    "negative-binomial": likelihoods.NegativeBinomial,
    "bernoulli": likelihoods.Bernoulli,
    "classes": likelihoods.Categorical,
}
METHODS = {"vecchia": models.Vecchia, "loo": models.LOO, "vnngp": models.VNNGP}


def krige(given: argparse.Namespace) -> None:
    """Run the command: from the table to the file."""
    _refuse_unused(given)
    _check_files(given)
    table = read_table(given.table)
    x, names = read_inputs(table, given, given.table)
    y, classes = read_targets(table, given)
    measured = np.isfinite(y)
    if not measured.all():
        print(f"{(~measured).sum()} of {len(y)} rows have no {given.y!r} and are left out.")
    if not measured.any():
        raise UsageError(f"no row of {given.table} has a value in the column {given.y!r}.")
    on_globe = is_globe(names) and not given.flat
    likelihood = LIKELIHOODS[given.likelihood](*([len(classes)] if classes else []))
    offset = None
    if given.offset is not None:
        offset = read_numbers(table, given.offset, given.table, "--offset")[measured]
        if missing := int((~np.isfinite(offset)).sum()):
            raise UsageError(f"{given.table}: {missing} rows have no {given.offset!r}; remove them.")
    if given.at is not None:
        places = read_table(given.at)
        x_new = placed(read_inputs(places, given, given.at)[0], on_globe)
    else:
        template = make_template(given, x[measured], names, on_globe)
    method = METHODS[given.method or ("vecchia" if given.likelihood == "gaussian" else "vnngp")]
    targets, options = torch.from_numpy(y[measured]), {"offset": offset, "seed": given.seed}
    gp = method(placed(x[measured], on_globe), targets, None, likelihood, **options)
    gp.classes = classes
    gp.columns = ("x (EPSG:4326)", "y (EPSG:4326)", "z (EPSG:4326)") if on_globe else tuple(names)
    kind = "places on the globe" if on_globe else "points"
    print(f"{type(gp).__name__} on {gp.num_data} {kind} ({', '.join(names)})")
    if given.at is None:
        _check_map(given, Cells(template, None, gp.columns, None, gp.x))
    print(fit(gp, max_seconds=given.max_seconds, seed=given.seed))
    print(gp.kernel, gp.likelihood, sep="\n")
    if given.save is not None:
        gp.save(given.save)
        print(f"wrote {given.save}")
    if given.at is not None:
        predict_table(gp, given, places, x_new)
        return
    to_file = given.out.suffix != ".csv"
    grid = predict_grid(
        gp,
        template,
        quantile_levels=given.quantiles,
        thresholds=given.above,
        path=given.out if to_file else None,
        seed=given.seed,
    )
    if not to_file:
        grid.to_dataframe().reset_index().to_csv(given.out, index=False)
    print(f"wrote {given.out}: {', '.join(f'{size} {dim}' for dim, size in grid.sizes.items())}")
    if given.plot is not None:
        places = x[measured] if x.shape[1] == 2 else None
        axes = np.atleast_1d(plot_map(grid, places))
        for axis in axes if len(names) == 2 else ():
            axis.set(xlabel=names[0], ylabel=names[1])
        axes[0].figure.savefig(given.plot, dpi=150)
        print(f"wrote {given.plot}")


def _check_files(given: argparse.Namespace) -> None:
    """Raise unless all files can be written and the quantiles are probabilities."""
    for option, path in {"--out": given.out, "--plot": given.plot, "--save": given.save}.items():
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it first.")
    if given.at is not None and given.out.suffix not in (".csv", ".parquet"):
        raise UsageError(f"--out {given.out}: predictions at places of a table go to .csv or .parquet.")
    if given.plot is not None:
        formats = pyplot("krige").FigureCanvasBase.filetypes
        if given.plot.suffix[1:] not in formats:
            raise UsageError(f"--plot {given.plot}: expected a name that ends in .{', .'.join(sorted(formats))}.")
    for level in given.quantiles:
        if not 0 < level < 1:
            raise UsageError(
                f"--quantiles: expected probabilities between 0 and 1, such as 0.05 and 0.95, got {level:g}."
            )


def _check_map(given: argparse.Namespace, cells: Cells) -> None:
    """Raise unless the file and the picture can hold the map; print the number of its cells."""
    if given.out.suffix != ".csv":
        check_format("krige", given.out, cells.dims)
    if given.plot is not None and len(cells.dims) > 2:
        raise UsageError(f"--plot: a picture has one or two dimensions; the grid has {', '.join(cells.dims)}.")
    sizes = ", ".join(f"{size} {dim}" for dim, size in zip(cells.dims, cells.shape, strict=True))
    print(f"{math.prod(cells.shape)} cells to predict ({sizes})")


def _refuse_unused(given: argparse.Namespace) -> None:
    """Raise for an option that has no effect beside the others."""
    if given.at is not None and given.plot is not None:
        raise UsageError(
            "--plot: there is no picture of predictions at places of a table; leave it out, or predict a map."
        )
    if given.grid is None and given.bounds is not None:
        raise UsageError("--bounds: they are of --grid; leave them out.")
    if given.likelihood == "classes" and (given.quantiles or given.above):
        raise UsageError("--quantiles, --above: labels have neither; the results are probabilities of the classes.")


__all__ = ["LIKELIHOODS", "METHODS", "krige"]
