"""The main job of the command line: from a table of measurements to a map with its uncertainty.

``given`` are the arguments of :mod:`pyro_nngp.adapters.command_line`.
"""

import argparse
import math
import time
import warnings
from typing import Any

import numpy as np
import torch

from pyro_nngp import cross_validate, fit, likelihoods, models
from pyro_nngp._matplotlib import pyplot
from pyro_nngp.adapters.krige_tables import (
    UsageError,
    is_globe,
    make_template,
    name_of,
    placed,
    predict_table,
    read_inputs,
    read_numbers,
    read_system,
    read_table,
    read_targets,
)
from pyro_nngp.adapters.maps import predict_grid
from pyro_nngp.adapters.maps.cells import Cells
from pyro_nngp.adapters.maps.formats import ENDINGS, check_format
from pyro_nngp.adapters.maps.systems import MAPPING
from pyro_nngp.adapters.plots import plot_map

LIKELIHOODS = {
    "gaussian": likelihoods.Gaussian,
    "student-t": likelihoods.StudentT,
    "lognormal": likelihoods.LogNormal,
    "gamma": likelihoods.Gamma,
    "poisson": likelihoods.Poisson,
    "negative-binomial": likelihoods.NegativeBinomial,
    "bernoulli": likelihoods.Bernoulli,
    "classes": likelihoods.Categorical,
}
METHODS = {"vecchia": models.Vecchia, "loo": models.LOO, "vnngp": models.VNNGP}


_STEPS_OF_GRACE, _SECONDS_OF_GRACE = 50, 30  # before a loss that is finite can end training
_RUNAWAY, _ABSURD = 1e4, 5.0  # nats per row: during training, and at its end above a model without places
_OFF_SCALE = "offset has values"  # of the warning of an offset that is not on the scale of the process
_FEW, _SKEWED = 30, 1.5
_CURE = (
    "There is no map. Look at the data: is an offset on the scale of the process, such as the logarithm of an "
    "exposure? Are missing values coded as numbers? Does the likelihood suit the measurements?"
)


class TrainingError(Exception):
    """Training has failed, with a message of one line."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a message of what was written."""


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
    system = read_system(table, given)
    on_globe = not given.flat and (is_globe(names) if system is None else system.is_geographic)
    if on_globe and len(names) != 2:
        raise UsageError(f"--crs {given.crs}: places on the globe have two inputs, longitude and latitude.")
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
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{_OFF_SCALE}")  # training would take minutes to get nowhere
        try:
            gp = method(placed(x[measured], on_globe), targets, None, likelihood, **options)
        except UserWarning as warning:
            if _OFF_SCALE not in str(warning):
                raise
            raise UsageError(f"--offset {given.offset}: {warning} Give a column of logarithms.") from warning
    gp.classes = classes
    code = name_of(system)
    gp.columns = tuple(f"{axis} ({code})" for axis in "xyz") if on_globe else tuple(names)
    kind = "places on the globe" if on_globe else "points"
    print(f"{type(gp).__name__} on {gp.num_data} {kind} ({', '.join(names)})")
    if given.at is None:
        _check_map(given, Cells(template, None, gp.columns, None, gp.x, system))
    _hint(given, y[measured])
    _train(gp, given)
    print(gp.kernel, gp.likelihood, sep="\n")
    if given.scores is not None:
        print(cross_validate(gp, given.scores or None, blocks=given.blocks, seed=given.seed))
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
        crs=system,
        seed=given.seed,
    )
    if not to_file:
        grid.drop_vars(MAPPING, errors="ignore").to_dataframe().reset_index().to_csv(given.out, index=False)
    print(f"wrote {given.out}: {', '.join(f'{size} {dim}' for dim, size in grid.sizes.items())}")
    if given.plot is not None:
        places = x[measured] if x.shape[1] == 2 else None
        axes = np.atleast_1d(plot_map(grid, places))
        for axis in axes if len(names) == 2 else ():
            axis.set(xlabel=names[0], ylabel=names[1])
        axes[0].figure.savefig(given.plot, dpi=150)
        print(f"wrote {given.plot}")


def _train(gp: Any, given: argparse.Namespace) -> None:
    """Train, and raise unless the result is worth a map.

    Raises:
        TrainingError: if the loss is not finite, or far above the loss of a model without places, or no step was made.
        Interrupted: on Ctrl-C, once the model has been saved under another name, if it was to be saved.
    """
    started = time.monotonic()

    def watch(step: int, loss: float) -> None:
        late = step >= _STEPS_OF_GRACE or time.monotonic() - started > _SECONDS_OF_GRACE
        if not math.isfinite(loss) or (late and loss > _RUNAWAY):
            raise TrainingError(f"after {step} steps of training the loss is {loss:.3g} nats per row. {_CURE}")

    try:
        result = fit(gp, max_seconds=given.max_seconds, callback=watch, seed=given.seed)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted in training; nothing was written.") from None
    print(result)
    if result.ended_by == "Ctrl-C":
        written = "nothing was written"
        if given.save is not None:
            marked = given.save.with_name(f"{given.save.name}.interrupted")
            gp.save(marked)
            written = f"no map was written; the model as it is now is in {marked}"
        raise Interrupted(f"Interrupted after {result.steps} steps of training; {written}.")
    if not result.steps:
        limit = f"--max-seconds {given.max_seconds:g}"
        raise TrainingError(f"{limit}: training made no step in that time, so there is no map. Give it more, or none.")
    plain = _loss_without_places(gp)
    if not result.loss < plain + _ABSURD:
        loss = f"{result.loss:.3g} nats per row, where a model without places has about {plain:.3g}"
        raise TrainingError(f"training ended at a loss of {loss}. {_CURE}")


def _loss_without_places(gp: Any) -> float:
    """Loss per row of equal chances of all classes, or of a normal distribution with the moments of y."""
    if gp.classes is not None:
        return math.log(len(gp.classes))
    return 0.5 * math.log(2 * math.pi * math.e * max(float(gp.y.double().var()), 1e-300))


def _hint(given: argparse.Namespace, y: np.ndarray) -> None:
    """Name other likelihoods where measurements are positive and skewed."""
    if given.likelihood not in ("gaussian", "student-t") or len(y) < _FEW or not (y > 0).all():
        return
    skew, of_logarithm = skewness(y), skewness(np.log(y))
    if skew > _SKEWED and abs(of_logarithm) < skew / 2:
        print(
            f"hint: {given.y!r} is positive and skewed (skewness {skew:.1f}, of its logarithm {of_logarithm:.1f}): "
            "--likelihood lognormal or gamma may suit it better; compare by --scores."
        )


def skewness(y: np.ndarray) -> float:
    """The third standardized moment; 0 for a constant."""
    deviation = y - y.mean()
    spread = np.sqrt(np.mean(deviation**2))
    return float(np.mean(deviation**3) / spread**3) if spread > 0 else 0.0


def _check_files(given: argparse.Namespace) -> None:
    """Raise unless all files can be written and the quantiles are probabilities."""
    for option, path in {"--out": given.out, "--plot": given.plot, "--save": given.save}.items():
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it first.")
    if given.at is not None and given.out.suffix not in (".csv", ".parquet"):
        raise UsageError(f"--out {given.out}: predictions at places of a table go to .csv or .parquet.")
    if given.at is None and given.out.suffix not in (*ENDINGS, ".csv"):
        raise UsageError(f"--out {given.out}: a map goes to {', '.join(ENDINGS)} or .csv.")
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
    if given.blocks is not None and given.scores is None:
        raise UsageError("--blocks: they are the folds of --scores; add it, or leave them out.")
    if given.at is not None and given.crs is not None and given.flat:
        raise UsageError("--crs: it has no effect on a table of predictions with --flat; leave it out.")
    if given.grid is None and given.bounds is not None:
        raise UsageError("--bounds: they are of --grid; leave them out.")
    if given.likelihood == "classes" and (given.quantiles or given.above):
        raise UsageError("--quantiles, --above: labels have neither; the results are probabilities of the classes.")


__all__ = ["LIKELIHOODS", "METHODS", "Interrupted", "TrainingError", "krige"]
