"""Methods here beside what a practitioner would take instead: seconds and scores on each set, one page for all.

At most 3,000 training rows of one split, standardized; one thread; processor seconds of training and prediction.
Methods here are plain calls, `fit(Method(x, y))`. Beside them:

- GPBoost, Vecchia: its defaults, Matern-5/2 with a lengthscale for each input, a constant mean, 20 neighbors.
- GPyTorch, SVGP with 512 inducing points from the data, VNNGP with 32 neighbors: Matern-5/2, Adam at .01, batches of
  1,024, as many epochs as --seconds allow, 100 at most.
- scikit-learn: gradient boosting (HistGradientBoosting, defaults). Real targets: a second one learns the logarithm of
  the squared residual of five folds, and the standard deviation is scaled so that residuals have unit variance in five
  folds; the density is normal. Counts: Poisson loss and density. Labels: its probabilities.

A run that takes more than --limit processor seconds is stopped, and a row says so. Rows are appended to a CSV file;
one that is there is not run again.

Usage: python benchmarks/accuracy/overview.py [--sets elevators pol] [--methods Vecchia "GPBoost, Vecchia"]
           [--seconds 25] [--limit 120] [--csv benchmarks/results/overview.csv] [--out benchmarks/results/overview.md]
           [--figure docs/_static/overview.svg]
It needs the `bench` extra, and data in the folder that PYRO_NNGP_DATA names.
"""

import argparse
import itertools
import math
import multiprocessing
import resource
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from papers import TASKS  # beside this file
from rows import append, commit, read
from tasks import Task, evaluate, likelihood, standardized
from torch.distributions import Bernoulli, Normal, Poisson

from pyro_nngp.inference import fit
from pyro_nngp.models import LOO, SVGP, SWSGP, VNNGP, Vecchia

MOST, K, INDUCING, BATCH = 3000, 32, 512, 1024
REGRESSION = ("elevators", "pol", "kin40k", "protein, RMSD", "bike, 15 columns", "california_housing", "house prices")
SETS = {name: TASKS[name] for name in (*REGRESSION, "banana")}
SETS["bei_trees"] = Task("bei_trees", "counts")
FIELDS = ("data", "method", "nll", "rmse", "coverage", "error", "seconds", "num_train", "note", "commit")
REAL = ("real",)


def plain(method):
    """A plain call of a method."""

    def run(x, y, kind, seconds):
        gp = method(x, y, likelihood=likelihood(kind, y))
        fit(gp, progress=False)
        return gp.predict

    return run


def gpboost(x, y, kind, seconds):
    import gpboost as gpb

    families = {"real": "gaussian", "binary": "bernoulli_logit", "counts": "poisson"}
    model = gpb.GPModel(
        gp_coords=x.double().numpy(), cov_function="matern_ard", cov_fct_shape=2.5, likelihood=families[kind],
        gp_approx="vecchia", num_parallel_threads=1,
    )  # fmt: skip
    model.fit(y=y.double().numpy(), X=np.ones((len(x), 1)))

    def predict(x_new):
        places = {"gp_coords_pred": x_new.double().numpy(), "X_pred": np.ones((len(x_new), 1))}
        found = model.predict(**places, predict_var=True, predict_response=kind == "real")
        loc, var = (torch.from_numpy(np.asarray(found[name])) for name in ("mu", "var"))
        return Normal(loc, var.sqrt()) if kind == "real" else likelihood(kind, y).bind().marginal(loc, var)

    return predict


def gpytorch_svgp(x, y, kind, seconds):
    import gpytorch
    from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self, z):
            super().__init__(VariationalStrategy(self, z, CholeskyVariationalDistribution(len(z))))
            self.mean_module = gpytorch.means.ConstantMean()
            kernel = gpytorch.kernels.MaternKernel(2.5, ard_num_dims=x.shape[1])
            self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model, noise = Model(x[:INDUCING].clone()), gpytorch.likelihoods.GaussianLikelihood()
    loss = gpytorch.mlls.VariationalELBO(noise, model, num_data=len(x))
    optimizer = torch.optim.Adam([*model.parameters(), *noise.parameters()], lr=0.01)
    end = time.process_time() + seconds
    for _ in range(100):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            (-loss(model(x[rows]), y[rows])).backward()
            optimizer.step()
        if time.process_time() > end:
            break
    model.eval()

    def predict(x_new):
        found = noise(model(x_new))
        return Normal(found.mean, found.stddev)

    return predict


def gpytorch_vnngp(x, y, kind, seconds):
    import sys

    sys.path.append(str(Path(__file__).parents[1] / "speed"))
    import peers

    peer = peers.GPyTorch(x, y, K)
    end, epoch = time.process_time() + seconds, max(1, len(x) // BATCH)
    for _ in range(100):
        peer.steps(epoch)
        if time.process_time() > end:
            break
    return lambda x_new: Normal(*peer.predict(x_new))


def boosting(x, y, kind, seconds):
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.model_selection import cross_val_predict

    x, y = x.double().numpy(), y.double().numpy()
    if kind == "binary":
        model = HistGradientBoostingClassifier(random_state=0).fit(x, y)
        return lambda x_new: Bernoulli(torch.from_numpy(model.predict_proba(x_new.double().numpy())[:, 1]))
    if kind == "counts":
        model = HistGradientBoostingRegressor(loss="poisson", random_state=0).fit(x, y)
        return lambda x_new: Poisson(torch.from_numpy(model.predict(x_new.double().numpy())))
    made = lambda: HistGradientBoostingRegressor(random_state=0)  # noqa: E731
    mean, square = made().fit(x, y), np.square(y - cross_val_predict(made(), x, y, cv=5))
    logarithm = np.log(square + 1e-6 * square.mean())
    spread = made().fit(x, logarithm)
    scale = math.sqrt(np.mean(square / np.exp(cross_val_predict(made(), x, logarithm, cv=5))))

    def predict(x_new):
        x_new = x_new.double().numpy()
        sd = scale * np.exp(spread.predict(x_new) / 2)
        return Normal(torch.from_numpy(mean.predict(x_new)), torch.from_numpy(sd))

    return predict


ALL = ("real", "binary", "counts")
METHODS = {
    "Vecchia": (plain(Vecchia), REAL),
    "LOO": (plain(LOO), ("real", "binary")),
    "VNNGP": (plain(VNNGP), ALL),
    "SVGP": (plain(SVGP), ALL),
    "SWSGP": (plain(SWSGP), REAL),
    "GPBoost, Vecchia": (gpboost, ALL),
    "GPyTorch, SVGP": (gpytorch_svgp, REAL),
    "GPyTorch, VNNGP": (gpytorch_vnngp, REAL),
    "scikit-learn, boosting": (boosting, ALL),
}


def measure(name, method, seconds, limit, answers):
    """Scores of one run, put into a queue."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    task = SETS[name]
    x, y, x_test, y_test = standardized(task, most=MOST)
    begin = time.process_time()
    predict = METHODS[method][0](x, y, task.kind, seconds)
    with torch.no_grad():
        found = evaluate(predict, x_test, y_test, task.kind)
    answers.put(found | {"seconds": time.process_time() - begin, "num_train": len(x)})


def run(name, method, seconds, limit):
    """One row, from a process of its own, which is stopped after a number of processor seconds."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=measure, args=(name, method, seconds, limit, answers))
    process.start()
    process.join()
    row = {"data": name, "method": method, "note": "", "commit": commit()}
    if process.exitcode:
        stopped = -process.exitcode in (signal.SIGXCPU, signal.SIGKILL)
        return row | {"note": f"stopped after {limit} s" if stopped else "failed"}
    return row | {name: value for name, value in answers.get().items() if name in FIELDS}


def front(rows):
    """Rows that no other one is both faster and better than."""
    done = [row for row in rows if row["nll"]]
    better = lambda a, b: float(a["seconds"]) <= float(b["seconds"]) and float(a["nll"]) < float(b["nll"])  # noqa: E731
    return [row for row in done if not any(better(other, row) for other in done)]


def table(rows):
    lines = ["| data | N | method | NLL | RMSE | error | coverage | seconds | front |", "|---" * 9 + "|"]
    for name in SETS:
        same = [row for row in rows if row["data"] == name]
        best = front(same)
        for row in sorted(same, key=lambda row: float(row["nll"] or math.inf)):
            scores = [f"{float(row[key]):.3f}" if row[key] else "" for key in ("nll", "rmse", "error", "coverage")]
            seconds = f"{float(row['seconds']):.1f}" if row["seconds"] else row["note"]
            cells = [name, row["num_train"], row["method"], *scores, seconds, "yes" if row in best else ""]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows, path):
    """A panel for each set: NLL against seconds; what is far behind is above the panel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in SETS if any(row["data"] == name and row["nll"] for row in rows)]
    figure, axes = plt.subplots(2, -(-len(names) // 2), figsize=(2.6 * -(-len(names) // 2), 5.2), layout="constrained")
    for axis, name in zip(axes.flat, names, strict=False):
        done = [row for row in rows if row["data"] == name and row["nll"]]
        values = sorted(float(row["nll"]) for row in done)
        for i, method in enumerate(METHODS):
            for row in (row for row in done if row["method"] == method):
                marker = "o" if i < 5 else "s"
                axis.plot(float(row["seconds"]), float(row["nll"]), marker, color=f"C{i}", label=method)
        ends = front(done)
        ends.sort(key=lambda row: float(row["seconds"]))
        steps = [(float(row["seconds"]), float(row["nll"])) for row in ends]
        axis.step(*zip(*steps, strict=True), "k-", lw=0.6, where="post")
        spread = values[len(values) // 2] - values[0]
        axis.set(
            xscale="log",
            xlim=(0.7, 150),
            title=name,
            ylim=(values[0] - 0.1 * spread - 0.01, values[0] + 4 * spread + 0.05),
        )
        axis.set_xticks([1, 10, 100], ["1", "10", "100"])
        axis.set_xticks([], minor=True)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    figure.supxlabel("processor seconds", fontsize=9)
    figure.supylabel("test NLL, nats per row", fontsize=9)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--limit", type=int, default=120)
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/overview.csv"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overview.md"))
    parser.add_argument("--figure", type=Path, default=None)
    args = parser.parse_args()
    done = {(row["data"], row["method"]) for row in read(args.csv)}
    for name, method in itertools.product(args.sets, args.methods):
        if (name, method) not in done and SETS[name].kind in METHODS[method][1]:
            append(args.csv, FIELDS, run(name, method, args.seconds, args.limit))
    rows, note = read(args.csv), Path(__file__).with_name("overview_note.md").read_text(encoding="utf-8")
    command = "`python benchmarks/accuracy/overview.py`, one thread, other jobs on the machine."
    args.out.write_text(f"# Overview\n\n{note}\n{command}\n\n{table(rows)}\n", encoding="utf-8")
    if args.figure is not None:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
