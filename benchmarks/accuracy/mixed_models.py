"""Intervals of coefficients in spatial mixed models: coverage on simulated data, beside other guides and NUTS.

    y_i ~ p(y | intercept + slope_1 a_i + slope_2 b_i + group_{g(i)} + f(x_i)),  i = 1..N

at random points in the unit square. The covariates a and b are draws of smooth processes in space, so that they are
nearly collinear with f; groups are regions (the cells of Voronoi's diagram of 20 points, or of ``--groups``).
Coefficients, group effects and all hyperparameters are drawn from the priors of the program anew for each data set, f
from the exact process, of more than 3,000 points from the program's own nearest-neighbor process: the intervals of an
exact posterior then cover at their nominal rate. `--sampled-with K` draws f with K neighbors where the program has 15.
Data sets with a count beyond 2,500 are left out: rates end at exp(8). Gaussian data have a noise of unknown scale.

``coverage``: 95 % intervals of ``guide.quantiles``; each guide is trained by plain SVI. ``nuts``: one data set of each
kind beside QuickNUTS on the same program. ``gpboost``: coefficients and standard errors beside GPBoost, which maximizes
the likelihood of the same model with an exact process and flat priors (``pip install gpboost``). ``vecchia``: its
Vecchia approximation with groups. ``seconds``: two Poisson data sets of 10,000 points, one of them with
groups. ``glmmtmb``: coefficients and standard errors beside glmmTMB. ``labels``: hyperparameters of single labels by
VNNGP and by glmmTMB, and the exact likelihood at both. ``meuse``: Vecchia beside fields. The last three need R.

Usage: python benchmarks/accuracy/mixed_models.py
    [coverage|nuts|gpboost|vecchia|seconds|glmmtmb|labels|meuse ...] [--sets 50] [--guides ...]
    [--sampled-with 30] [--rows FILE.csv] [--out FILE.md]
"""

import argparse
import time
import warnings
from pathlib import Path

import peers_in_r  # beside this file
import pyro
import pyro.distributions as dist
import torch
from exact_likelihood import log_likelihood
from pyro import poutine
from pyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoNormal, init_to_median
from pyro.optim import ClippedAdam
from rows import append, commit, read  # beside this file

from pyro_nngp import NNGP, VNNGP, AutoNNGP, NeighborGraph, NNGPReparam, Vecchia, fit
from pyro_nngp.inference import QuickNUTS
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli

GROUPS, NEIGHBORS = 20, 15
LARGEST = 2500  # count; rates end at exp(8) = 2981, which the program does not know
KINDS = ("Poisson", "Bernoulli", "Gaussian")
SITES = ("intercept", "slope", "group_scale", "variance", "lengthscale", "noise")
NUMBERS = ("intercept", "slope 1", "slope 2", "group_scale", "variance", "lengthscale", "noise")
PRIORS = {
    "intercept": lambda: dist.Normal(number(0.5), 1.0),
    "slope": lambda: dist.Normal(torch.zeros(2), 1.0).to_event(1),
    "group_scale": lambda: dist.LogNormal(number(0.5).log(), 0.5),
    "variance": lambda: dist.LogNormal(number(0.5).log(), 0.5),
    "lengthscale": lambda: dist.LogNormal(number(0.2).log(), 0.4),
    "noise": lambda: dist.LogNormal(number(0.5).log(), 0.5),
}


def number(value):
    return torch.tensor(float(value))


def observation(kind, predictor, noise):
    if kind == "Poisson":
        return dist.Poisson(predictor.exp())
    return dist.Bernoulli(logits=predictor) if kind == "Bernoulli" else dist.Normal(predictor, noise)


class Problem:
    """A data set of one kind, its truth and its program."""

    def __init__(self, kind, num_points, seed, groups=GROUPS, neighbors=NEIGHBORS):
        pyro.set_rng_seed(seed)
        self.kind, self.x, self.groups = kind, torch.rand(num_points, 2), groups
        self.graph = NeighborGraph(self.x, NEIGHBORS)
        names = [name for name in SITES if name != "noise" or kind == "Gaussian"]
        names = [name for name in names if name != "group_scale" or groups]
        self.truth = {name: PRIORS[name]().sample() for name in names}
        centers = torch.rand(max(groups, GROUPS), 2)
        self.group = torch.cdist(self.x, centers).argmin(-1) if groups else None
        self.covariates = torch.stack([_smooth(self.x, 0.4), _smooth(self.x, 0.4)], -1)
        f = _smooth(self.x, self.truth["lengthscale"], self.truth["variance"], neighbors)
        predictor = self.truth["intercept"] + self.covariates @ self.truth["slope"] + f
        if groups:
            predictor = predictor + (self.truth["group_scale"] * torch.randn(groups))[self.group]
        self.y = observation(kind, predictor.clamp(max=8), self.truth.get("noise")).sample()

    def model(self):
        values = {name: pyro.sample(name, PRIORS[name]()) for name in self.truth}
        kernel = Matern32(2, variance=values["variance"], lengthscale=values["lengthscale"])
        predictor = values["intercept"] + (self.covariates * values["slope"]).sum(-1)
        if self.group is not None:
            with pyro.plate("groups", self.groups):
                effect = pyro.sample("group", dist.Normal(number(0.0), values["group_scale"]))
            predictor = predictor + effect[self.group]
        predictor = predictor + pyro.sample("f", NNGP(kernel, self.graph))
        with pyro.plate("points", len(self.x)):
            pyro.sample("y", observation(self.kind, predictor, values.get("noise")), obs=self.y)

    def white(self):
        return poutine.reparam(self.model, config={"f": NNGPReparam()})


def _smooth(x, lengthscale, variance=1.0, neighbors=30):
    """A draw of an exact Matérn-3/2 process, or of a nearest-neighbor process of many points."""
    kernel = Matern32(2, variance=torch.as_tensor(variance), lengthscale=torch.as_tensor(lengthscale))
    if len(x) > 3000:
        return NNGP(kernel, NeighborGraph(x, neighbors)).sample()
    cov = kernel(x).detach() + 1e-8 * torch.eye(len(x))
    return torch.linalg.cholesky(cov) @ torch.randn(len(x))


GUIDES = {  # program, guide, learning rate, steps
    "AutoNNGP": (Problem.model.__get__, AutoNNGP, 0.02, 50),
    "AutoNormal": (Problem.model.__get__, AutoNormal, 0.02, 1500),
    "AutoLowRankMultivariateNormal": (Problem.model.__get__, AutoLowRankMultivariateNormal, 0.02, 1500),
    "AutoNormal, whitened": (Problem.white, AutoNormal, 0.02, 1500),
}


def train(problem, name):
    """The program, the trained guide, minus its ELBO and processor seconds."""
    pyro.clear_param_store()
    program, guide_type, rate, steps = GUIDES[name]
    program = program(problem)
    guide, start = guide_type(program, init_loc_fn=init_to_median(num_samples=50)), time.process_time()
    svi = SVI(program, guide, ClippedAdam({"lr": rate, "lrd": 0.1 ** (1 / steps)}), Trace_ELBO())
    for _ in range(steps):
        svi.step()
    seconds = time.process_time() - start
    loss = sum(svi.evaluate_loss() for _ in range(30)) / 30
    return program, guide, loss, seconds


def quantities(draws):
    """Draws of numbers by name, (S,)."""
    found = {}
    for name in SITES:
        if name in draws:
            table = draws[name].reshape(len(draws[name]), -1)
            found |= {name if table.shape[1] == 1 else f"{name} {i + 1}": col for i, col in enumerate(table.T)}
    return found


def draws_of(program, guide, count):
    with torch.no_grad():
        return quantities(Predictive(program, guide=guide, num_samples=count)())


def intervals(problem, guide):
    """95 % intervals of numbers by name, (2,); the tables are (2, ...)."""
    found = guide.quantiles([0.025, 0.975])
    return quantities({name: found[name] for name in problem.truth})


def coverage(args):
    """Coverage of 95 % intervals: a row for each kind and guide. Data sets that are in the rows are not repeated."""
    rows = read(args.rows)
    size = {"points": str(args.points), "groups": str(args.groups)}
    done = {(row["kind"], row["guide"], row["seed"]) for row in rows if size.items() <= row.items()}
    for seed in range(args.sets):
        for kind in args.kinds:
            for guide in args.guides:
                if (kind, guide, str(seed)) in done:
                    continue
                problem = Problem(kind, args.points, seed, args.groups, args.sampled_with)
                if kind == "Poisson" and problem.y.max() > LARGEST:
                    continue
                _, trained, loss, seconds = train(problem, guide)
                row = {"kind": kind, "guide": guide, "seed": seed, **size, "loss": loss, "seconds": seconds}
                truth = quantities({name: value[None] for name, value in problem.truth.items()})
                for name, ends in intervals(problem, trained).items():
                    row[name] = int(ends[0] <= truth[name].item() <= ends[1])
                append(args.rows, ["kind", "guide", "seed", *size, "loss", "seconds", *NUMBERS], row)
    return table([row for row in read(args.rows) if size.items() <= row.items()], args)


def table(rows, args):
    """Shares of intervals that cover, and averages of minus the ELBO and of processor seconds."""
    header = ["data", "guide", "sets", "- ELBO", *NUMBERS, "seconds"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for kind in args.kinds:
        for guide in args.guides:
            own = [row for row in rows if (row["kind"], row["guide"]) == (kind, guide)]
            if not own:
                continue
            hits = [[int(row[name]) for row in own if row[name]] for name in NUMBERS]
            share = [f"{100 * sum(each) / len(each):.0f} %" if each else "" for each in hits]
            loss, seconds = (sum(float(row[name]) for row in own) / len(own) for name in ("loss", "seconds"))
            lines.append(f"| {kind} | {guide} | {len(own)} | {loss:.1f} | {' | '.join(share)} | {seconds:.1f} |")
    print("\n".join(lines), flush=True)
    return lines


def beside_nuts(args):
    """95 % intervals beside those of NUTS, for one data set of each kind."""
    lines = ["| data | | truth | AutoNNGP | NUTS | n_eff of NUTS |", "|---" * 6 + "|"]
    print("\n".join(lines))
    for kind in args.kinds:
        problem = Problem(kind, args.nuts_points, args.nuts_seed)
        _, guide, _, _ = train(problem, "AutoNNGP")
        ours, truth = intervals(problem, guide), quantities({n: v[None] for n, v in problem.truth.items()})
        pyro.set_rng_seed(1)
        start = init_to_median(num_samples=50)
        mcmc = MCMC(QuickNUTS(problem.model, init_strategy=start), args.nuts_draws, 300, disable_progbar=True)
        mcmc.run()
        for name, draws in quantities(mcmc.get_samples()).items():
            ends = [ours[name].tolist(), draws.quantile(torch.tensor([0.025, 0.975])).tolist()]
            shown = " | ".join(f"[{low:.2f}, {high:.2f}]" for low, high in ends)
            lines.append(f"| {kind} | {name} | {truth[name].item():.2f} | {shown} | {dist_effective(draws):.0f} |")
            print(lines[-1], flush=True)
    return lines


def dist_effective(draws):
    return float(pyro.ops.stats.effective_sample_size(draws[None]))


def beside_gpboost(args):
    """Means and standard deviations of coefficients beside GPBoost's estimates and standard errors."""
    import gpboost as gpb

    lines = ["| data | | AutoNNGP | GPBoost | truth | s | s, GPBoost |", "|---" * 7 + "|"]
    print("\n".join(lines))
    kinds = {"Poisson": "poisson", "Bernoulli": "bernoulli_logit", "Gaussian": "gaussian"}
    for kind in args.kinds:
        problem = Problem(kind, args.nuts_points, 100)
        program, guide, _, seconds = train(problem, "AutoNNGP")
        ours, start = draws_of(program, guide, 1000), time.process_time()
        design = torch.cat([torch.ones(len(problem.x), 1), problem.covariates], 1)
        model = gpb.GPModel(
            group_data=problem.group.numpy(),
            gp_coords=problem.x.numpy(),
            cov_function="matern",
            cov_fct_shape=1.5,
            likelihood=kinds[kind],
            num_parallel_threads=1,
        )
        model.fit(y=problem.y.numpy(), X=design.numpy())
        table, theirs = model.get_coef(std_err=True).to_numpy(), time.process_time() - start
        truth = quantities({name: value[None] for name, value in problem.truth.items()})
        for i, name in enumerate(NUMBERS[:3]):
            shown = f"{ours[name].mean():.2f} ± {ours[name].std():.2f} | {table[0, i]:.2f} ± {table[1, i]:.2f}"
            lines.append(f"| {kind} | {name} | {shown} | {truth[name].item():.2f} | {seconds:.1f} | {theirs:.1f} |")
            print(lines[-1], flush=True)
    return lines


def many_points(args):
    """Processor seconds at many points, and coefficients after the first call beside the truth."""
    lines = ["| N | groups | first call | step | draw | | truth | AutoNNGP |", "|---" * 8 + "|"]
    print("\n".join(lines), flush=True)
    for size in args.many:
        points, groups = (int(part) for part in size.split(":"))
        pyro.clear_param_store()
        problem = Problem("Poisson", points, 0, groups)
        guide, start = AutoNNGP(problem.model), time.process_time()
        guide()
        first, start = time.process_time() - start, time.process_time()
        draws = draws_of(problem.model, guide, 30)
        draw, start = (time.process_time() - start) / 30, time.process_time()
        svi = SVI(problem.model, guide, ClippedAdam({"lr": 0.02}), Trace_ELBO())
        for _ in range(10):
            svi.step()
        step = (time.process_time() - start) / 10
        truth = quantities({name: value[None] for name, value in problem.truth.items()})
        seconds = f"{points:,} | {groups} | {first:.0f} s | {step:.2f} s | {draw:.2f} s"
        for name, values in draws.items():
            lines.append(
                f"| {seconds} | {name} | {truth[name].item():.2f} | {values.mean():.2f} ± {values.std():.2f} |"
            )
            seconds = " | | | | "
            print(lines[-1], flush=True)
    return lines


def process_for_each_group(args):
    """QuickNUTS on 20 independent processes of 40 points: as one site, and as a site for each."""
    pyro.set_rng_seed(0)
    places = torch.rand(GROUPS, 40, 2)
    far = 1e3 * torch.arange(GROUPS)[:, None, None].expand(GROUPS, 40, 1)
    whole = NeighborGraph(torch.cat([places, far], -1).flatten(0, 1), 10)
    graphs = [NeighborGraph(part, 10) for part in places]
    y = torch.stack([_smooth(part, 0.3) for part in places]) + 0.3 * torch.randn(GROUPS, 40)
    names = "variance", "lengthscale", "noise"

    def program(each):
        values = {name: pyro.sample(name, PRIORS[name]()) for name in names}
        kernel = Matern32(3 - each, variance=values["variance"], lengthscale=values["lengthscale"])
        for i, (graph, seen) in enumerate(zip(graphs, y, strict=True) if each else [(whole, y.flatten())]):
            f = pyro.sample(f"f_{i}", NNGP(kernel, graph))
            pyro.sample(f"y_{i}", dist.Normal(f, values["noise"]).to_event(1), obs=seen)

    lines = ["| sites | seconds | | mean and sd | n_eff |", "|---" * 5 + "|"]
    for each in args.sites:
        pyro.clear_param_store()
        start = time.process_time()
        nuts = QuickNUTS(program, guide=AutoNNGP(program))
        mcmc = MCMC(nuts, num_samples=100, warmup_steps=100, disable_progbar=True)
        mcmc.run(each == GROUPS)
        seconds = f"{time.process_time() - start:.0f}"
        draws = Predictive(nuts.model, mcmc.get_samples())(each == GROUPS)
        for name in names:
            values = draws[name].flatten()
            effective = dist_effective(values)
            lines.append(
                f"| {each} | {seconds} | {name} | {values.mean():.2f} ± {values.std():.2f} | {effective:.0f} |"
            )
            seconds = ""
            print(lines[-1], flush=True)
    return lines


def gpboost_with_vecchia(args):
    """GPBoost with groups and a Vecchia approximation, on many Poisson counts."""
    import gpboost as gpb

    lines = ["| N | s | | truth | GPBoost |", "|---" * 5 + "|"]
    problem = Problem("Poisson", args.vecchia_points, 0)
    design = torch.cat([torch.ones(len(problem.x), 1), problem.covariates], 1)
    start = time.process_time()
    data = {"group_data": problem.group.numpy(), "gp_coords": problem.x.numpy()}
    kernel = {"cov_function": "matern", "cov_fct_shape": 1.5, "likelihood": "poisson"}
    approximation = {"gp_approx": "vecchia", "num_neighbors": NEIGHBORS, "num_parallel_threads": 1}
    model = gpb.GPModel(**data, **kernel, **approximation)
    model.fit(y=problem.y.numpy(), X=design.numpy())
    table, seconds = model.get_coef(std_err=True).to_numpy(), f"{time.process_time() - start:.0f}"
    truth = quantities({name: value[None] for name, value in problem.truth.items()})
    for i, name in enumerate(NUMBERS[:3]):
        shown = f"{truth[name].item():.2f} | {table[0, i]:.2f} ± {table[1, i]:.2f}"
        lines.append(f"| {args.vecchia_points} | {seconds} | {name} | {shown} |")
    print("\n".join(lines), flush=True)
    return lines


def beside_glmmtmb(args):
    """Means and standard deviations of coefficients beside glmmTMB's estimates and standard errors."""
    if not peers_in_r.has_r():
        return [peers_in_r.SKIPPED]
    lines = ["| data | | AutoNNGP | glmmTMB | truth | s | s, glmmTMB | its log likelihood |", "|---" * 8 + "|"]
    for kind in args.kinds:
        problem = Problem(kind, args.nuts_points, 100)
        program, guide, _, seconds = train(problem, "AutoNNGP")
        ours, theirs = draws_of(program, guide, 1000), peers_in_r.glmmtmb(columns(problem), kind)
        truth = quantities({name: value[None] for name, value in problem.truth.items()})
        for name in ours:
            shown = f"{ours[name].mean():.2f} ± {ours[name].std():.2f} | {theirs[name]:.2f}"
            shown += f" ± {theirs['se ' + name]:.2f}" if f"se {name}" in theirs else ""
            rest = f"{seconds:.1f} | {theirs['seconds']:.1f} | {theirs['log likelihood']:.2f}"
            lines.append(f"| {kind} | {name} | {shown} | {truth[name].item():.2f} | {rest} |")
            print(lines[-1], flush=True)
    return lines


def columns(problem):
    """The columns of a data set, for R."""
    found = {"x1": problem.x[:, 0], "x2": problem.x[:, 1], "y": problem.y}
    found |= {"a": problem.covariates[:, 0], "b": problem.covariates[:, 1]}
    return found if problem.group is None else found | {"group": problem.group}


def single_labels(args):
    """Hyperparameters of labels with a process alone, and the exact log likelihood at them, by importance sampling."""
    if not peers_in_r.has_r():
        return [peers_in_r.SKIPPED]
    header = ["set", "", "intercept", "variance", "lengthscale", "log likelihood", "Laplace", "its own"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for seed in range(args.sets):
        problem = Problem("Bernoulli", args.points, seed, groups=0)
        y = torch.bernoulli(torch.sigmoid(problem.truth["intercept"] + _smooth(problem.x, 0.2)))
        gp = VNNGP(problem.x, y, Matern32(2, lengthscale=torch.tensor(0.2)), Bernoulli(), num_neighbors=30)
        fit(gp, progress=False)
        kernel, own = gp.bound().kernel, peers_in_r.labels({"x1": problem.x[:, 0], "x2": problem.x[:, 1], "y": y})
        mean = gp.bound().mean(problem.x[:1])
        points = {
            "VNNGP": (mean.item(), kernel.variance.item(), kernel.lengthscale.item(), ""),
            "glmmTMB": (own["intercept"], own["variance"], own["lengthscale"], f"{own['log likelihood']:.2f}"),
            "no process": (torch.logit(y.mean()).item(), 1e-6, 0.2, ""),
        }
        for name, (intercept, variance, lengthscale, reported) in points.items():
            cov = Matern32(2, variance=number(variance), lengthscale=number(lengthscale))(problem.x).detach()
            offset = torch.full_like(y, intercept)
            value, error, laplace = log_likelihood(
                lambda p, y=y: -torch.nn.functional.softplus((1 - 2 * y) * p), cov, offset
            )
            numbers = (
                f"{intercept:.2f} | {variance:.3g} | {lengthscale:.3g} | {value:.2f} ± {error:.2f} | {laplace:.2f}"
            )
            lines.append(f"| {seed} | {name} | {numbers} | {reported} |")
            print(lines[-1], flush=True)
    return lines


def zinc_of_meuse(args):
    """Maximum-likelihood estimates of Vecchia, with all neighbors and with 30, beside those of fields."""
    if not peers_in_r.has_r():
        return [peers_in_r.SKIPPED]
    theirs, rows = peers_in_r.meuse()
    rows = torch.tensor(rows)
    x, y = rows[:, :2], rows[:, 2]
    numbers = " | ".join(f"{theirs[name]:.4g}" for name in ("variance", "lengthscale", "noise"))
    lines = ["| | variance | lengthscale, km | noise | log likelihood | s |", "|---" * 6 + "|"]
    lines.append(f"| fields | {numbers} | {theirs['log likelihood']:.3f} | {theirs['seconds']:.1f} |")
    for k in (len(y) - 1, 30):
        start = time.process_time()
        gp = Vecchia(x, y, Matern32(2, lengthscale=torch.tensor(0.5)), num_neighbors=k)
        fit(gp, progress=False)
        seconds, bound = time.process_time() - start, gp.bound()
        found = bound.kernel.variance, bound.kernel.lengthscale, bound.likelihood.variance.sqrt()
        numbers = " | ".join(f"{value.item():.4g}" for value in found)
        lines.append(f"| Vecchia, K = {k} | {numbers} | {gp.log_prob().item():.3f} | {seconds:.1f} |")
    print("\n".join(lines), flush=True)
    return lines


def main():
    parser = argparse.ArgumentParser()
    parts = {"coverage": coverage, "nuts": beside_nuts, "gpboost": beside_gpboost, "seconds": many_points}
    parts |= {"vecchia": gpboost_with_vecchia, "glmmtmb": beside_glmmtmb, "labels": single_labels}
    parts |= {"meuse": zinc_of_meuse, "groups": process_for_each_group}
    parser.add_argument("parts", nargs="*", default=["coverage", "nuts", "seconds"])
    parser.add_argument("--sets", type=int, default=50)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--sampled-with", type=int, default=NEIGHBORS)
    parser.add_argument("--nuts-points", type=int, default=200)
    parser.add_argument("--vecchia-points", type=int, default=10_000)
    parser.add_argument("--sites", type=int, nargs="+", choices=[1, GROUPS], default=[1, GROUPS])
    parser.add_argument("--many", nargs="+", default=["10000:0", "10000:20"], help="points:groups")
    parser.add_argument("--nuts-seed", type=int, default=100)
    parser.add_argument("--nuts-draws", type=int, default=800)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--guides", nargs="+", choices=GUIDES, default=["AutoNNGP"])
    parser.add_argument("--rows", type=Path, default=Path("mixed_models.csv"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = [f"Commit {commit()}, torch {torch.__version__}, one thread."]
    for part in args.parts:
        lines += ["", *parts[part](args)]
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
