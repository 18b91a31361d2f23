"""How many neighbors a function under noise needs: the plain call beside K = 256 in training and prediction.

Draws of a Matern-3/2 process with variance 1 on 600 uniform points of the unit cube, with normal noise, for several
lengthscales, noises and dimensions. The root mean square error of the posterior mean of f at 200 other points, with the
default numbers of neighbors and with 256 in training and prediction alike, over the draws of a cell; processor seconds
of building, training and predicting. The numbers of neighbors are those of the first draw. A row that is in the CSV
file is not computed again, so the command can be stopped and repeated.

Usage: python benchmarks/accuracy/neighbors_under_noise.py [--methods Vecchia LOO] [--draws 1]
           [--noises .1 .3 1 3] [--lengths .1 .3 1 2] [--dims 1 2 5]
           [--csv benchmarks/results/neighbors_under_noise.csv] [--out benchmarks/results/neighbors_under_noise.md]
"""

import argparse
import itertools
import time
import warnings
from pathlib import Path

import torch
from rows import append, commit, read  # beside this file

from pyro_nngp.inference import ConvergenceWarning, fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.models import LOO, VNNGP, Vecchia

METHODS = {"Vecchia": Vecchia, "LOO": LOO, "VNNGP": VNNGP}
ROWS, NEW, MANY = 600, 200, 256
KEY = ("method", "D", "lengthscale", "noise", "draws")
FIELDS = (*KEY, "training", "prediction", "rmse default", "rmse many", "seconds default", "seconds many")
FIELDS += ("threads", "torch", "commit")


def draw(dim, length, noise, seed):
    """Points, noisy values, and new points with the values of f there."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(ROWS + NEW, dim, generator=generator, dtype=torch.float64)
    kernel = Matern32(dim, torch.tensor(1.0).double(), torch.tensor(length).double())
    cov = kernel(x, x).detach() + 1e-9 * torch.eye(len(x), dtype=x.dtype)
    f = torch.linalg.cholesky(cov) @ torch.randn(len(x), generator=generator, dtype=x.dtype)
    y = f + noise * torch.randn(len(x), generator=generator, dtype=x.dtype)
    x, y, f = x.float(), y.float(), f.float()
    return (x[:ROWS], y[:ROWS]), (x[ROWS:], f[ROWS:])


def trained(method, data, new, **options):
    """Mean square error of f, processor seconds, and the numbers of neighbors in training and prediction."""
    start = time.process_time()
    gp = METHODS[method](*data, **options)
    fit(gp, progress=False)
    with torch.no_grad():
        mean, _ = gp(new[0])
    seconds = time.process_time() - start
    return float((mean - new[1]).square().mean()), seconds, (gp.graph.num_neighbors, gp.prediction_neighbors())


def cell(method, dim, length, noise, draws):
    """One row."""
    row = {"method": method, "D": dim, "lengthscale": length, "noise": noise, "draws": draws}
    for variant, options in (("default", {}), ("many", {"num_neighbors": MANY})):
        found = [trained(method, *draw(dim, length, noise, seed), **options) for seed in range(draws)]
        row[f"rmse {variant}"] = (sum(each[0] for each in found) / draws) ** 0.5
        row[f"seconds {variant}"] = sum(each[1] for each in found) / draws
        if variant == "default":
            row["training"], row["prediction"] = found[0][2]
    return row | {"threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit()}


def ratio(row):
    """Error with the default numbers relative to that with many neighbors."""
    return float(row["rmse default"]) / float(row["rmse many"])


def table(rows, command):
    """One line per cell, and a summary for each method."""
    first, commits = rows[0], ", ".join(sorted({row["commit"] for row in rows}))
    lines = [
        f"`{command}`, commit {commits}, torch {first['torch']}, {first['threads']} thread(s), other jobs on the "
        f"machine. N = {ROWS}, {first['draws']} draw(s) per cell; root mean square errors of f at {NEW} new points, "
        "and processor seconds of building, training and predicting.",
        "",
        f"| method | D | lengthscale | noise sd | K in training, prediction | RMSE default | K = {MANY} | ratio "
        f"| seconds default | K = {MANY} |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        cells = [row[name] for name in ("method", "D", "lengthscale", "noise")]
        cells += [f"{row['training']}, {row['prediction']}"]
        cells += [f"{float(row[f'rmse {variant}']):.4f}" for variant in ("default", "many")] + [f"{ratio(row):.3f}"]
        cells += [f"{float(row[f'seconds {variant}']):.1f}" for variant in ("default", "many")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for method in dict.fromkeys(row["method"] for row in rows):
        some = [row for row in rows if row["method"] == method]
        ratios = torch.tensor([ratio(row) for row in some])
        seconds = {}
        for row in some:
            seconds.setdefault(int(row["training"]), []).append(float(row["seconds default"]))
        times = [f"{sum(each) / len(each):.2f} with K = {k}" for k, each in sorted(seconds.items())]
        lines += [
            "",
            f"{method}: errors are at most 5 % above errors with K = {MANY} in {int((ratios <= 1.05).sum())} of "
            f"{len(some)} cells; the geometric mean of the ratio is {float(ratios.log().mean().exp()):.3f}, "
            f"the largest {float(ratios.max()):.3f}. Mean seconds by K in training: {', '.join(times)}.",
        ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=["Vecchia", "LOO"], choices=list(METHODS))
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--noises", type=float, nargs="+", default=[0.1, 0.3, 1.0, 3.0])
    parser.add_argument("--lengths", type=float, nargs="+", default=[0.1, 0.3, 1.0, 2.0])
    parser.add_argument("--dims", type=int, nargs="+", default=[1, 2, 5])
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/neighbors_under_noise.csv"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/neighbors_under_noise.md"))
    args = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    done = {tuple(row[name] for name in KEY) for row in read(args.csv)}
    for one in itertools.product(args.methods, args.dims, args.lengths, args.noises):
        if tuple(map(str, (*one, args.draws))) not in done:
            append(args.csv, FIELDS, cell(*one, args.draws))
    text = table(read(args.csv), "python benchmarks/accuracy/neighbors_under_noise.py")
    args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
