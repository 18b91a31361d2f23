"""Experiments along one setting: their rows, tables and pictures, for the scripts that repeat figures of the papers.

Text that belongs beside the tables of NAME.md stands in NAME_note.md beside the script NAME.py, if there is some.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rows import append, cell, commit, read  # beside this file

from pyro_nngp.inference import fit

FIELDS = ("part", "data", "method", "setting", "value", "nll", "rmse", "error", "seconds", "threads", "torch", "commit")


@dataclass(frozen=True)
class Sweep:
    """Measurements of several methods along one setting.

    Args:
        caption: of the table.
        measurements: yields (key, measure), where `key` has the data, the method and its setting, and `measure()`
            returns scores by name of a column.
        columns: of the table.
        value: heading of the column "value", where it is not the only one.
        score: the column that the picture shows; its label is `label`, that of the setting `axis`.
        x: the column along the picture, "setting" or "seconds".
        averaged: the settings are splits, over which the table takes means and their standard errors.
    """

    caption: str
    measurements: Callable[[], Iterator[tuple[dict, Callable[[], dict]]]]
    columns: tuple[str, ...]
    score: str
    label: str
    axis: str
    value: str = "value"
    x: str = "setting"
    averaged: bool = False


def main(name: str, doc: str, sweeps: dict[str, Sweep]) -> None:
    """Run the sweeps that the command line asks for, and write the table and the picture of all rows in the file."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(sweeps), choices=list(sweeps))
    parser.add_argument("--csv", type=Path, default=Path(f"benchmarks/results/{name}.csv"))
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{name}.md"))
    parser.add_argument("--figure", type=Path, default=None, help="picture of these parts")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    done = {(row["part"], row["data"], row["method"], row["setting"]) for row in read(args.csv)}
    for part in args.parts:
        for key, measure in sweeps[part].measurements():
            if (part, key["data"], key["method"], str(cell(key["setting"]))) in done:
                continue
            row = {"part": part} | key | measure()
            row |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit()}
            append(args.csv, FIELDS, row)
            print({name: row[name] for name in FIELDS if name in row}, flush=True)
    rows = read(args.csv)
    text, note = Path(__file__).with_name(f"{name}_note.md"), ""
    if text.exists():
        note = text.read_text(encoding="utf-8")
    args.out.write_text(table(f"python benchmarks/accuracy/{name}.py", sweeps, rows, note), encoding="utf-8")
    if args.figure is not None:
        draw(sweeps, [row for row in rows if row["part"] in args.parts], args.figure)


def watch(steps: Sequence[int], scores: Callable[[], dict]) -> tuple[dict[int, dict], Callable[[int, float], None]]:
    """A dictionary, and the callback that fills it with scores after these numbers of steps, and processor seconds."""
    found, spent, begin = {}, 0.0, time.process_time()

    def look(step: int, loss: float) -> None:
        nonlocal spent
        if step in steps:
            here = time.process_time()
            found[step] = scores() | {"seconds": here - begin - spent}
            spent += time.process_time() - here

    return found, look


def looks(gp: Any, steps: Sequence[int], scores: Callable[[], dict], **how: Any) -> dict[int, dict]:
    """Scores after some numbers of steps of one training run, and its processor seconds, which leave the scores out."""
    found, look = watch(steps, scores)
    fit(gp, steps[-1], progress=False, callback=look, **how)
    return found


def table(command: str, sweeps: dict[str, Sweep], rows: list[dict], note: str) -> str:
    """The note, and a table per sweep that has rows: a line per data set, method and setting, of one column a line per
    data set and method."""
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    lines = [
        f"`{command}`, commit {commits}, torch {rows[0]['torch']}, {rows[0]['threads']} thread(s), other jobs on the "
        "machine; processor seconds.",
        "",
        *([note] if note else []),
    ]
    for part, sweep in sweeps.items():
        here = _together([row for row in rows if row["part"] == part])
        if not here:
            continue
        lines += [f"{sweep.caption}.", ""]
        groups = {}
        for row in here:
            key = row["data"], row["method"], "" if sweep.averaged else row["setting"]
            groups.setdefault(key, []).append(row)
        cells = {key: [_shown(name, [row[name] for row in of]) for name in sweep.columns] for key, of in groups.items()}
        if len(sweep.columns) == 1 and not sweep.averaged:
            lines += _across(sweep.axis, {key: found for key, (found,) in cells.items()})
        else:
            titles = (sweep.value if name == "value" else name for name in sweep.columns)
            lines += _head(["data", "method", sweep.axis, *titles])
            for (data, method, setting), found in cells.items():
                label = len(groups[data, method, setting]) if sweep.averaged else setting
                lines.append(f"| {data} | {method} | {label} | {' | '.join(found)} |")
        lines.append("")
    return "\n".join(lines)


def _together(rows: list[dict]) -> list[dict]:
    """Rows of the same data together, among them those of the same method."""
    data, methods = (list(dict.fromkeys(row[name] for row in rows)) for name in ("data", "method"))
    return sorted(rows, key=lambda row: (data.index(row["data"]), methods.index(row["method"])))


def _head(titles: list[str]) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def _across(axis: str, cells: dict[tuple[str, str, str], str]) -> list[str]:
    """A line per data set and method, a column per setting."""
    settings = sorted({setting for _, _, setting in cells}, key=float)
    lines = _head(["data", "method", *(f"{axis} = {setting}" for setting in settings)])
    for data, method in dict.fromkeys((data, method) for data, method, _ in cells):
        found = (cells.get((data, method, setting), "") for setting in settings)
        lines.append(f"| {data} | {method} | {' | '.join(found)} |")
    return lines


def _shown(column: str, texts: list[str]) -> str:
    """The mean, with its standard error if there are several values."""
    values = [float(text) for text in texts if text != ""]
    if not values:
        return ""
    mean = statistics.fmean(values)
    digits = (1 if mean < 10 else 0) if column == "seconds" else 3 if abs(mean) < 1e4 else 0
    if len(values) == 1 and 0 < abs(mean) < 5e-4:
        return f"{mean:.1e}"
    if column == "seconds" or len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}"


def draw(sweeps: dict[str, Sweep], rows: list[dict], path: Path) -> None:
    """A panel per part and data set, in a row per part if all have the same sets; one setting is a dashed line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["part"], row["data"]) for row in rows))
    parts, names = (len({panel[i] for panel in panels}) for i in (0, 1))
    shape = (parts, names) if parts * names == len(panels) else (1, len(panels))
    size = 3.6 * shape[1], 3.2 * shape[0]
    figure, axes = plt.subplots(*shape, figsize=size, layout="constrained", squeeze=False)
    for (part, data), axis in zip(panels, axes.flat, strict=True):
        here, sweep = [row for row in rows if (row["part"], row["data"]) == (part, data)], sweeps[part]
        for i, method in enumerate(dict.fromkeys(row["method"] for row in here)):
            points = sorted((float(row[sweep.x]), float(row[sweep.score])) for row in here if row["method"] == method)
            if len(points) == 1:
                axis.axhline(points[0][1], color=f"C{i}", linestyle="--", label=method)
            else:
                axis.plot(*zip(*points, strict=True), color=f"C{i}", marker="o", markersize=3, label=method)
        steps = sweep.x == "setting"
        axis.set(xscale="log", xlabel=sweep.axis if steps else sweep.x, ylabel=sweep.label, title=data)
        if steps:
            axis.set_xticks(sorted({float(row["setting"]) for row in here}), minor=False)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_locator(plt.NullLocator())
        axis.legend(fontsize=7)
    figure.savefig(path)
