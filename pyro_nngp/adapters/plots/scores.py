"""Plots of cross-validation: scores of several models, and where the residuals of one are."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pyro_nngp._checks import check_choice, fail
from pyro_nngp._kinds import check_sequence
from pyro_nngp._matplotlib import axis
from pyro_nngp.adapters.plots.axes import aspect, set_ticks
from pyro_nngp.inference import CrossValidation


def plot_scores(results: Mapping[str, CrossValidation] | CrossValidation, score: str = "nll", ax: Any = None) -> Any:
    """One score of several models, with two standard errors, and the scores of their folds.

    Where all have the same folds, a second bar shows the difference from the best model, which is the one to look
    at: models err at the same rows.

    Args:
        results: what :func:`~pyro_nngp.inference.cross_validate` returned, by name of the model; or of one model.
        score: "nll", "crps", "rmse" or "coverage"; of labels "nll", "brier" or "error". Outputs are averaged.
        ax: axis to draw on; None makes one.

    Returns:
        The axis.

    Raises:
        ValueError, TypeError: for results without the score, or of another type.
        ImportError: without matplotlib.
    """
    where = "plot_scores"
    models = {"": results} if isinstance(results, CrossValidation) else results
    cure = "Pass {name: cross_validate(gp, ...)}."
    if not isinstance(models, Mapping) or not models:
        fail(where, "results", "to be results by name", type(results).__name__, cure, TypeError)
    for name, each in models.items():
        if not isinstance(each, CrossValidation):
            fail(where, f"results[{name!r}]", "to be a CrossValidation", type(each).__name__, cure, TypeError)
        check_choice(where, "score", score, tuple(each.scores), "Choose one that all models have.")
    values = {name: each.scores[score].value.mean().item() for name, each in models.items()}
    target = 0.95 if score == "coverage" else min(values.values())
    best = min(values, key=lambda name: abs(values[name] - target))
    ax = axis(where, ax)
    for place, (name, each) in enumerate(models.items()):
        folds = each.by_fold()[score].to_numpy()
        spread = np.linspace(-0.15, 0.15, len(folds)) if len(folds) > 1 else np.zeros(1)
        ax.plot(folds, place + spread, ".", color="0.7", zorder=1, label="folds" if place == 0 else None)
        for row, (error, color, label) in enumerate(_errors(models, name, best, score)):
            line = {"color": color, "capsize": 4, "label": label if _is_first(models, name, best, row) else None}
            ax.errorbar(values[name], place + 0.06 * row, xerr=2 * error, fmt="o" if row == 0 else "none", **line)
    if score == "coverage":
        ax.axvline(target, color="0.5", linewidth=1, linestyle=":")
    ax.set(yticks=range(len(models)), yticklabels=list(models), xlabel=_LABELS.get(score, score))
    ax.invert_yaxis()
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize="small", frameon=False)
    return ax


_LABELS = {"nll": "negative log density of a row", "crps": "CRPS", "rmse": "RMSE", "coverage": "coverage of 95 %"}


def _errors(models: Mapping[str, CrossValidation], name: str, best: str, score: str) -> list[tuple[float, str, str]]:
    """Standard errors of a model's score, and of its difference from the best: with colors and labels."""
    errors = [(models[name].scores[score].standard_error.mean().item(), "C0", "2 standard errors")]
    if name != best and models[name].fold.equal(models[best].fold):
        paired = models[name].difference(models[best])[score].standard_error.mean().item()
        errors.append((paired, "C1", f"2 of the difference from {best}"))
    return errors


def _is_first(models: Mapping[str, CrossValidation], name: str, best: str, row: int) -> bool:
    """Whether a kind of bar is drawn first for this model."""
    return name == next(each for each in models if row == 0 or each != best)


def plot_residuals(result: CrossValidation, columns: tuple[int, int] = (0, 1), output: int = 0, ax: Any = None) -> Any:
    """Standardized residuals of cross-validation at the places of the data: y less its prediction, over its sd.

    Places that are far from 0 together have a cause that the model lacks, such as a trend, a covariate or a boundary.

    Args:
        result: what :func:`~pyro_nngp.inference.cross_validate` returned, of values.
        columns: the two columns of x on the axes.
        output: the output to show.
        ax: axis to draw on; None makes one.

    Returns:
        The axis.

    Raises:
        ValueError, TypeError: for labels, or columns and outputs that are not there.
        ImportError: without matplotlib.
    """
    where = "plot_residuals"
    if not isinstance(result, CrossValidation):
        fail(where, "result", "to be a CrossValidation", type(result).__name__, "Pass cross_validate(gp).", TypeError)
    if result.mean is None or result.sd is None:
        fail(where, "result", "of values", "labels, which have no residuals", "See diagnostics for reliability.")
    number = result.x.shape[1]
    check_sequence(where, "columns", columns, "Give two columns of x.")
    if len(columns) != 2 or not all(isinstance(column, int) and 0 <= column < number for column in columns):
        fail(where, "columns", f"to be two in 0..{number - 1}", columns, "Give two columns of x.")
    y, mean, sd = (each.detach().cpu().reshape(len(result.fold), -1) for each in (result.y, result.mean, result.sd))
    if not (isinstance(output, int) and 0 <= output < y.shape[1]):
        fail(where, "output", f"in 0..{y.shape[1] - 1}", output, "It is the number of an output.")
    residual = ((y - mean) / sd)[:, output].numpy()
    across, up = result.x.detach().cpu().double()[:, list(columns)].numpy().T
    names = [result.columns[column] if result.columns else f"x[{column}]" for column in columns]
    ax = axis(where, ax)
    order = np.argsort(np.abs(np.nan_to_num(residual)))  # the largest on top
    points = ax.scatter(across[order], up[order], c=residual[order], s=9, cmap="RdBu_r", vmin=-4, vmax=4)
    ax.figure.colorbar(points, ax=ax, label="residual / sd", extend="both")
    ax.set(xlabel=names[0], ylabel=names[1])
    ax.set_aspect(aspect(names, (across, up)))
    set_ticks(ax)
    return ax
