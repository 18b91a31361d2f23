"""Held-out scores against seconds of training, of methods here and in GPyTorch and GPBoost, on the same splits.

Each system is a process of its own with one thread; they take turns, one whole run after the other, `--rounds` times,
and seconds are processor seconds of construction (with the neighbor graph) and training; those of scoring are left out.
Inputs and targets are standardized on the training rows, so RMSE and NLL are in standard deviations. Every system has
one lengthscale per input, Matern-5/2, a constant mean, Gaussian noise,
float32 (GPBoost: float64), and 32 neighbors.

Starts. "default": what each library takes when nothing is set. "same": variance 1, lengthscales 1, noise variance 0.1
in all. The first row of each run is the start itself, without training. `--rows` trains everybody on that many random
training rows: one iteration of the slowest takes minutes on all.

    vecchia, vnngp, loo, svgp   methods here, trained by `fit` with nothing set (svgp: M = 512)
    gpytorch-vnngp-RATE         GPyTorch's VNNGP, batches of 1,024, Adam at RATE
    gpytorch-svgp-RATE          GPyTorch's SVGP, M = 512 random rows, batches of 1,024, Adam at RATE
    gpboost                     Vecchia approximation; the parameters after each iteration, scored by predictions here
                                from as many nearest training rows, since its own take minutes

Usage: python benchmarks/speed/curves.py terrain|elevators|protein [--start default|same] [--seconds 60] [--rounds 1]
           [--rows 20000] [--systems ...] [--peer-python PYTHON] [--out FILE]. GPyTorch needs the `bench` extra;
           GPBoost runs in --peer-python where it is given. Data as in pyro_nngp.data.datasets.
       python benchmarks/speed/curves.py --figure docs/_static/curves.svg draws the tables of results/curves.md.
"""

import argparse
import json
import math
import os
import pty
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

SYSTEMS = [
    "vecchia",
    "vnngp",
    "loo",
    "svgp",
    "gpytorch-svgp-0.1",
    "gpytorch-vnngp-0.01",
    "gpytorch-vnngp-0.1",
    "gpboost",
]
K, BATCH, INDUCING = 32, 1024, 512
SAME = {"variance": 1.0, "lengthscale": 1.0, "noise": 0.1}


def split(name, most):
    """Standardized training rows, `most` at random if given, and held-out rows, as arrays."""
    import torch

    from pyro_nngp.data import Standardizer, load, random_split, terrain

    if name == "terrain":
        data = terrain()
        test = torch.rand(len(data.x), generator=torch.Generator().manual_seed(0)) < 0.2
        rows = (~test).nonzero()[:, 0], test.nonzero()[:, 0]
    else:
        data = load(name)
        train, _, test = random_split(len(data.x), (0.64, 0.16, 0.2), 1)
        rows = train, test
    if most:
        rows = rows[0][torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(0))[:most]], rows[1]
    to_x, to_y = Standardizer(data.x[rows[0]]), Standardizer(data.y[rows[0]])
    return [(to_x.transform(data.x[part]).numpy(), to_y.transform(data.y[part]).numpy()) for part in rows]


class Report:
    """Prints the scores of a system at growing numbers of seconds; the time that this takes is left out."""

    def __init__(self, y, predict, limit):
        self.y, self.predict, self.limit = y, predict, limit
        self.begin, self.spent, self.due = time.process_time(), 0.0, 0.0

    def seconds(self):
        return time.process_time() - self.begin - self.spent

    def __call__(self, step, force=False):
        """Score if it is time; returns whether the limit is reached."""
        now = self.seconds()
        if force or now >= self.due:
            start = time.process_time()
            loc, sd = self.predict()
            print(
                json.dumps(scores(self.y, np.asarray(loc), np.asarray(sd)) | {"seconds": now, "steps": step}),
                flush=True,
            )
            self.spent += time.process_time() - start
            self.due = max(1.4 * now, now + 0.2)
        return now > self.limit


def scores(y, loc, sd):
    error = y - loc
    nll = 0.5 * np.mean(np.square(error / sd) + np.log(2 * math.pi * np.square(sd)))
    return {"rmse": float(np.sqrt(np.mean(np.square(error)))), "nll": float(nll)}


class Enough(Exception):
    """The limit on seconds is reached."""


def run_ours(name, start, train, test, limit):
    import torch

    from pyro_nngp import models
    from pyro_nngp.inference import fit
    from pyro_nngp.kernels import Matern52
    from pyro_nngp.likelihoods import Gaussian

    torch.set_num_threads(1)
    (x, y), (x_new, _) = ([torch.as_tensor(part) for part in parts] for parts in (train, test))
    options = {"inducing": INDUCING} if name == "svgp" else {"num_neighbors": K}
    fit(models.LOO(x[:100], y[:100], num_neighbors=5), 1, progress=False)  # imports
    report = Report(test[1], None, limit)
    kernel = likelihood = None
    if start == "same":
        scale = torch.full((x.shape[1],), SAME["lengthscale"])
        kernel = Matern52(x.shape[1], variance=torch.tensor(SAME["variance"]), lengthscale=scale)
        likelihood = Gaussian(SAME["noise"])
    gp = getattr(models, {"vecchia": "Vecchia"}.get(name, name.upper()))(x, y, kernel, likelihood, **options)

    @torch.no_grad()
    def predict():
        predictive = gp.predict(x_new)
        return predictive.mean, predictive.stddev

    report.predict = predict
    report(0, force=True)

    def follow(step, loss):
        if report(step):
            raise Enough

    try:
        result = fit(gp, progress=False, callback=follow)
        steps = len(result.losses)
    except Enough:
        steps = -1
    report(steps, force=True)


def run_gpytorch(name, start, train, test, limit):
    import gpytorch
    import torch
    from gpytorch.variational import (
        CholeskyVariationalDistribution,
        MeanFieldVariationalDistribution,
        NNVariationalStrategy,
        VariationalStrategy,
    )

    torch.set_num_threads(1)
    _, kind, rate = name.split("-")
    (x, y), (x_new, _) = ([torch.as_tensor(part) for part in parts] for parts in (train, test))
    generator = torch.Generator().manual_seed(0)
    report = Report(test[1], None, limit)

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            if kind == "vnngp":
                q = MeanFieldVariationalDistribution(len(x))
                super().__init__(NNVariationalStrategy(self, x, q, k=K, training_batch_size=BATCH))
            else:
                z = x[torch.randperm(len(x), generator=generator)[:INDUCING]].clone()
                q = CholeskyVariationalDistribution(INDUCING)
                super().__init__(VariationalStrategy(self, z, q, learn_inducing_locations=True))
            self.mean_module = gpytorch.means.ConstantMean()
            base = gpytorch.kernels.MaternKernel(2.5, ard_num_dims=x.shape[1])
            self.covar_module = gpytorch.kernels.ScaleKernel(base)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

        def __call__(self, x, prior=False, **kwargs):
            if kind == "svgp":
                return super().__call__(x, prior=prior, **kwargs)
            return self.variational_strategy(x=x, prior=prior, **kwargs)

    model, likelihood = Model(), gpytorch.likelihoods.GaussianLikelihood()
    if start == "same":
        model.covar_module.outputscale = SAME["variance"]
        model.covar_module.base_kernel.lengthscale = SAME["lengthscale"]
        likelihood.noise = SAME["noise"]
    strategy = model.variational_strategy
    if kind == "vnngp":
        strategy.variational_params_initialized.fill_(1)  # the first call would build the prior over all points
    loss = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=float(rate))

    @torch.no_grad()
    def predict():
        model.eval()
        found = [likelihood(model(rows)) for rows in x_new.split(1000)]
        model.train()
        return torch.cat([each.mean for each in found]), torch.cat([each.stddev for each in found])

    report.predict = predict
    report(0, force=True)
    model.train()
    step, rows = 0, iter(())
    while True:
        optimizer.zero_grad()
        if kind == "vnngp":
            output = model(x=None)
            idx = strategy.current_training_indices
        else:
            idx = next(rows, None)
            if idx is None or len(idx) < BATCH:
                rows = iter(torch.randperm(len(x), generator=generator).split(BATCH))
                idx = next(rows)
            output = model(x[idx])
        (-loss(output, y[idx])).backward()
        optimizer.step()
        step += 1
        if report(step):
            break
    report(step, force=True)


def run_gpboost(_, start, train, test, limit):
    """Parameters after each iteration of one fit, read off its trace; whoever started this process scores them."""
    import gpboost as gpb

    x, y = (np.asarray(part, np.float64) for part in train)
    out, (ours, its) = os.fdopen(os.dup(1), "w"), pty.openpty()  # a terminal gets each line at once
    os.dup2(its, 1)
    begin = time.process_time()

    def report(step, values):
        seconds = time.process_time() - begin
        print(json.dumps({"seconds": seconds, "steps": step, "parameters": values}), file=out, flush=True)
        if seconds > limit:
            os._exit(0)

    def follow():
        step, values = None, []
        for line in os.fdopen(ours):
            header = re.search(r"initial parameters|parameters after optimization iteration number (\d+)", line)
            value = re.search(r"(cov_pars|beta)\[\d+\]: (\S+)", line)
            if header:
                step, values = int(header[1] or 0), []
            elif value and step is not None:
                values.append(float(value[2]))
                if value[1] == "beta":
                    report(step, values)
                    step = None

    threading.Thread(target=follow, daemon=True).start()
    model = gpb.GPModel(
        gp_coords=x,
        cov_function="matern_ard",
        cov_fct_shape=2.5,
        gp_approx="vecchia",
        num_neighbors=K,
        likelihood="gaussian",
        num_parallel_threads=1,
    )
    given = np.array([SAME["noise"], SAME["variance"], *[SAME["lengthscale"]] * x.shape[1]])
    params = {"trace": True} | ({"init_cov_pars": given} if start == "same" else {})
    model.fit(y=y, X=np.ones((len(x), 1)), params=params)
    report(model._get_num_optim_iter(), [*model.get_cov_pars().values[0], float(model.get_coef().values[0, 0])])


def scored(row, train, test):
    """A row of :func:`run_gpboost` with its scores: predictions from the same neighbors and parameters."""
    import torch

    from pyro_nngp.kernels import Matern52
    from pyro_nngp.likelihoods import Gaussian
    from pyro_nngp.models import Vecchia

    (noise, variance, *scale), level = row["parameters"][:-1], row["parameters"][-1]
    (x, y), (x_new, _) = ([torch.as_tensor(part, dtype=torch.float64) for part in parts] for parts in (train, test))
    kernel = Matern52(x.shape[1], variance=torch.tensor(variance).to(x), lengthscale=torch.tensor(scale).to(x))
    gp = Vecchia(x, y - level, kernel, Gaussian(noise), num_neighbors=K, mean=lambda x: torch.zeros_like(x[:, 0]))
    with torch.no_grad():
        predictive = gp.predict(x_new)
    return row | scores(test[1], level + predictive.mean.numpy(), predictive.stddev.numpy())


def serve(args):
    """One run of one system; the arrays come from a file, so that a system needs no other package."""
    with np.load(args.data) as data:
        train, test = (data["x"], data["y"]), (data["x_new"], data["y_new"])
    runs = {"gpytorch": run_gpytorch, "gpboost": run_gpboost}
    run = runs.get(args.serve.partition("-")[0], run_ours)
    run(args.serve, args.start, train, test, args.seconds)


def run_of(system, args, place):
    python = args.peer_python if system == "gpboost" and args.peer_python else sys.executable
    options = [f"--start={args.start}", f"--seconds={args.seconds}", f"--data={place}", f"--serve={system}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    answer = subprocess.run([python, __file__, args.name, *options], env=environment, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]


def draw(tables, path):
    """NLL against seconds, a panel for each table; a point at .1 s stands for less."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = re.findall(r"^(\w+), [\d,]+ training.*?start: (\w+),(.*?)(?=^\w+, [\d,]+ training|\Z)", tables, re.M | re.S)
    count = math.ceil(len(parts) / 2)
    figure, axes = plt.subplots(count, 2, figsize=(9, 3.6 * count), layout="constrained", squeeze=False)
    colors = {system: f"C{i}" for i, system in enumerate(SYSTEMS)}
    for axis, (name, start, text) in zip(axes.flat, sorted(parts), strict=False):
        curves = {}
        for system, seconds, nll in re.findall(r"^\| (\S+) \| [^|]+ \| ([\d.]+) \| [\d.]+ \| (\S+) \|$", text, re.M):
            curves.setdefault(system, []).append((max(float(seconds), 0.1), float(nll)))
        for system, points in curves.items():
            axis.plot(*zip(*points, strict=True), color=colors[system], marker="o", markersize=3, label=system)
        axis.set(xscale="log", xlabel="processor seconds", ylabel="test NLL", title=f"{name}, {start} start")
        axis.legend(fontsize=7)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=["terrain", "elevators", "protein"], nargs="?")
    parser.add_argument("--start", choices=["default", "same"], default="default")
    parser.add_argument("--seconds", type=float, default=60, help="of training, for each system")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=0, help="training rows, at random; 0: all")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--peer-python")
    parser.add_argument("--out", type=Path, help="file that the table is added to")
    parser.add_argument("--figure", type=Path, help="picture of the recorded tables, in place of a run")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    if args.figure:
        results = Path(__file__).parents[1] / "results" / "curves.md"
        draw(results.read_text(encoding="utf-8"), args.figure)
        return
    if args.name is None:
        parser.error("name a data set")
    train, test = split(args.name, args.rows)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "rows.npz")
        np.savez(place, x=train[0], y=train[1], x_new=test[0], y_new=test[1])
        runs = {system: [] for system in args.systems}
        for _ in range(args.rounds):
            for system in args.systems:
                found = run_of(system, args, place)
                runs[system].append([scored(row, train, test) if "parameters" in row else row for row in found])
                print(system, "done", flush=True)
    lines = [
        f"{args.name}, {len(train[0]):,} training and {len(test[0]):,} held-out rows, start: {args.start}, one thread, "
        f"processor seconds, {args.rounds} rounds.",
        "",
        "| system | steps | seconds | RMSE | NLL |",
        "|---|---|---|---|---|",
    ]
    for system, found in runs.items():
        found = [run for run in found if run] or [[]]
        middle = statistics.median_low([run[-1]["seconds"] if run else 0 for run in found])
        shown = next(run for run in found if not run or run[-1]["seconds"] == middle)
        for row in shown:
            steps = "at the limit" if row["steps"] < 0 else f"{row['steps']:,}"
            lines.append(f"| {system} | {steps} | {row['seconds']:.1f} | {row['rmse']:.4f} | {row['nll']:.4f} |")
    print("\n".join(lines))
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
