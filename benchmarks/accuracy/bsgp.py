"""BSGP beside the paper: depth, objective, prior over inducing inputs, what is sampled, and flights with R-hat.

Splits are 80/20 at random, one per fold. Inputs and targets are standardized on the training rows; NLL is in the units
of y, RMSE and noise in its standard deviations, as in the paper's tables 5 and 6. Of several targets all are outputs of
one model (paper: energy has two), `energy:0` is the first alone. Protein is RMSD itself: where the data are its
centered log1p, that is undone, since its least value is 0. Flights is the binary task "arrives late"; `flights:10000`
trains on that many of the training rows, drawn by the fold.

RBF ARD with log-normal priors (`--hyperpriors` reads the paper's 1 and 0.05 as medians, as means, or as means of
variables of variance 1), M = 100, minibatches of 1000 (all rows where there are fewer). Chains start at the
median of a mean-field guide; the noise variance and the constant mean are optimized until burn-in ends, the rest is
sampled by SGHMC with the scale-adapted preconditioner. `--sampled` says what is: "all" (BSGP), "u theta" and "u" (the
rest is optimized), "u held" (the rest stays where the guide has left it), "gaussian" (SVGP for the objective vfe,
FITC-SVGP for fitc: as many steps of SVI as the others take before their first draw, and a Gaussian guide of u with full
covariance). "u theta" with the objective vfe is MCMC-SVGP, but for SGHMC in place of HMC and z that is optimized while
it burns in. "exact" is scikit-learn's dense GP with the same kernel, one for each target, at the best of four maxima of
its marginal likelihood: what the split itself allows.
Several chains are independent runs, each from its own k-means and its own guide (`--starts one`: all from one); R-hat
is rank-normalized, of the mean of y given a draw, at 1000 test points.

Each run is a row of a CSV file, which is not run again: the command can be stopped and repeated. The table is made of
the rows that the command asks for; `--ranks` adds mean ranks of what figures 3 to 7 of the paper compare, from all rows
of these data with this schedule. Seconds are processor time of building and training.

Usage: python benchmarks/accuracy/bsgp.py boston yacht [--layers 1 2] [--objectives fitc vfe] [--priors normal strauss]
           [--sampled all u] [--folds 4] [--svi 1000] [--burn-in 3000] [--samples 256] [--thin 6] [--step-size 0.05]
           [--first-step 0.2] [--part authors] [--chains 4] [--starts one] [--hyperpriors means]
           [--run-temperature 0.1]
           [--ranks] [--csv benchmarks/results/bsgp.csv] [--out FILE]
`--part validation` scores on a fifth of the training rows instead of the test rows, to choose a schedule by; `--part
authors` splits as the authors' code does, by scikit-learn with the fold as the seed (their order of rows is unknown).
The data come from `pyro_nngp.data.datasets`, or from the folder that PYRO_NNGP_DATA names.
"""

import argparse
import itertools
import math
import time
from pathlib import Path

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal, init_to_value
from rows import append, cell, commit, read
from scipy.stats import rankdata
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as DenseRBF
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from pyro_nngp.data import Standardizer, coverage, error_rate, flights, gaussian_interval, nll, random_split, rmse, uci
from pyro_nngp.distributions import Mixture
from pyro_nngp.hyperparameters import lognormal_priors
from pyro_nngp.inducing import Determinantal, Strauss
from pyro_nngp.inducing.priors import Flat
from pyro_nngp.inference import SGHMC, Minibatch, fit
from pyro_nngp.kernels import RBF
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import BSGP

PAPER = {  # test NLL (table 5) and normalized RMSE (table 6), for 1 to 5 layers
    "boston": ((2.47, 0.36), (2.47, 0.37), (2.47, 0.37), (2.48, 0.37), (2.48, 0.37)),
    "concrete": ((3.12, 0.40), (3.04, 0.36), (2.96, 0.32), (2.97, 0.33), (2.91, 0.32)),
    "energy": ((0.97, 0.13), (0.95, 0.13), (0.95, 0.13), (0.92, 0.13), (0.75, 0.12)),
    "kin8nm": ((-1.12, 0.31), (-1.40, 0.24), (-1.41, 0.24), (-1.43, 0.24), (-1.43, 0.23)),
    "naval": ((-8.22, 0.02), (-8.23, 0.01), (-8.02, 0.01), (-8.03, 0.01), (-8.09, 0.01)),
    "powerplant": ((2.71, 0.23), (2.67, 0.22), (2.66, 0.22), (2.65, 0.21), (2.65, 0.21)),
    "protein": ((2.78, 0.72), (2.63, 0.69), (2.57, 0.68), (2.50, 0.67), (2.43, 0.65)),
    "yacht": ((-0.23, 0.04), (-0.72, 0.03), (-0.83, 0.03), (-0.76, 0.03), (-0.74, 0.03)),
}
BASELINES = {  # NLL of one layer, table 5
    "SGHMC-DGP": {"boston": 2.82, "concrete": 3.13, "energy": 1.08, "protein": 2.81, "yacht": -0.11},
    "SVGP": {"boston": 2.53, "concrete": 3.18, "energy": 1.75, "protein": 2.92, "yacht": 0.78},
}
FIGURES = {  # what they compare, best first in the paper's words: objective, prior of z, what is sampled
    "3, left": {prior: ("fitc", prior, "all") for prior in ("normal", "uniform", "strauss", "determinantal")},
    "3, right": {
        "BSGP": ("fitc", "normal", "all"),
        "u theta": ("fitc", "normal", "u theta"),
        "u": ("fitc", "normal", "u"),
        "SVGP": ("vfe", "normal", "gaussian"),
    },
    "4": {
        "BSGP": ("fitc", "normal", "all"),
        "u theta": ("fitc", "normal", "u theta"),
        "MCMC-SVGP": ("vfe", "normal", "u theta"),
        "FITC-SVGP": ("fitc", "normal", "gaussian"),
        "SVGP": ("vfe", "normal", "gaussian"),
    },
    "5 and 6": {"fitc": ("fitc", "normal", "all"), "vfe": ("vfe", "normal", "all")},
    "7": {
        "BSGP": ("fitc", "normal", "all"),
        "SGHMC-DGP": ("fitc", "normal", "u"),
        "SVGP": ("vfe", "normal", "gaussian"),
    },
}
HYPERPRIORS = {  # median of each, and standard deviation of its logarithm
    "medians": {"lengthscale": (1.0, 1.0), "variance": (0.05, 1.0)},
    "means": {"lengthscale": (math.exp(-0.5), 1.0), "variance": (0.05 * math.exp(-0.5), 1.0)},
    "moments": {  # mean m and variance 1 of the variable: median m / sqrt(1 + 1 / m^2)
        "lengthscale": (1 / math.sqrt(2), math.sqrt(math.log(2))),
        "variance": (0.05 / math.sqrt(401), math.sqrt(math.log(401))),
    },
}
PRIORS = {  # beside the names that BSGP knows, of which "strauss" has a flat base
    "determinantal": lambda kernel, z: Determinantal(kernel, Flat(*z.shape), correlation=False),  # the paper's
    "determinantal*normal": lambda kernel, z: Determinantal(kernel, normal(z), correlation=False),
    "strauss*normal": lambda kernel, z: Strauss(normal(z)),
    "correlation*normal": lambda kernel, z: Determinantal(kernel, normal(z)),
    "fixed kernel*normal": lambda kernel, z: Determinantal(fixed_kernel, normal(z)),
}
RUN = ("data", "layers", "objective", "prior", "sampled", "chains", "starts", "part", "inducing", "batch_size")
RUN += ("svi", "burn_in", "samples", "thin", "first_step", "step_size", "hyperpriors", "run_temperature")
FIELDS = (*RUN, "fold", "nll", "nll_by_target", "rmse", "coverage", "noise", "error", "auc")
FIELDS += ("temperature", "noise_share", "rhat_median", "rhat_95", "rhat_max", "rhat_up_to_1.1", "seconds")
SAMPLED = ("all", "u theta", "u", "u held", "gaussian", "exact")
SITES = ("rms_z", "lengthscale", "variance")
FIELDS += ("num_train", "num_test", "torch", "commit", *SITES)


def normal(z):
    return dist.Normal(torch.zeros_like(z), 1.0).to_event(2)


def fixed_kernel(a, b):
    """RBF of variance 1 and lengthscale sqrt(D): two points of the normal base have a correlation of about exp(-1)."""
    return torch.exp(-(a[..., :, None, :] - b[..., None, :, :]).square().mean(-1) / 2)


def load(name):
    """Inputs, targets (N, T), and whether they are labels."""
    name, _, target = name.partition(":")
    data = flights(torch.float64) if name == "flights" else uci(name, torch.float64)
    y = data.y if data.y.dim() == 2 else data.y[:, None]
    if name == "flights":
        return data.x, (y[:, :1] > 0).double(), True
    if name == "protein" and y.min() < 0:
        y = torch.expm1(y - y.min())
    return data.x, y if target == "" else y[:, int(target), None], False


def split(name, fold, part="test"):
    """Training and test rows, standardized, the standard deviations of y (T,), and whether y are labels."""
    x, y, binary = load(name)
    train, test = random_split(len(x), (0.8, 0.2), fold)
    if part == "authors":
        train, test = map(torch.as_tensor, train_test_split(range(len(x)), test_size=0.2, random_state=fold))
    if part == "validation":
        train, test = (train[part] for part in random_split(len(train), (0.8, 0.2), fold))
    limit = name.partition(":")[2]
    if binary and limit:
        train = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(fold))[: int(limit)]]
    to_x, to_y = Standardizer(x[train]), Standardizer(y[train])
    scale = torch.ones(1).double() if binary else y[train].std(0, correction=0)
    y = (y if binary else to_y.transform(y)).squeeze(-1)
    return (to_x.transform(x[train]), y[train]), (to_x.transform(x[test]), y[test]), scale, binary


def build(x, y, binary, case, seed):
    dim = x.shape[1]
    priors = HYPERPRIORS[case["hyperpriors"]]
    starts = {name: median for name, (median, _) in priors.items()}
    lengthscale = torch.full((dim,), starts["lengthscale"])
    kernel = RBF(dim, variance=torch.tensor(starts["variance"]), lengthscale=lengthscale)
    if case["sampled"] in ("all", "u theta"):
        for name, (median, scale) in priors.items():
            lognormal_priors(kernel, {name: median}, scale, like=x)
    return BSGP(
        x,
        y,
        kernel,
        Bernoulli("probit") if binary else Gaussian(0.05),
        inducing=case["inducing"],
        objective=case["objective"],
        inducing_prior=PRIORS.get(case["prior"], case["prior"]) if case["sampled"] == "all" else None,
        num_layers=case["layers"],
        seed=seed,
    )


def sample(gp, case, seed, progress):
    """Posterior draws of all sites, and the diagnostics of the chain."""
    gaussian, kind = case["sampled"] == "gaussian", AutoNormal
    steps, recipe = case["svi"], {"lr": 0.02, "elbo": Trace_ELBO(), "num_data": gp.num_data, "progress": False}
    if gaussian:
        kind, steps, recipe = AutoMultivariateNormal, steps + case["burn_in"], recipe | {"lr": 0.01}
    guide = kind(gp.model, init_loc_fn=gp.init_strategy, init_scale=0.05)
    fit((gp.model, guide), steps, batch_size=case["batch_size"], **recipe)
    if gaussian:
        with torch.no_grad():
            draws = [guide(torch.arange(2)) for _ in range(case["samples"])]
        return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}, {}
    if case["starts"] == "one":
        pyro.set_rng_seed(seed)
    median = init_to_value(values={name: value.detach() for name, value in guide.median().items()})
    first, last, settled = case["first_step"], case["step_size"], case["burn_in"] / 2

    def step_size(update):
        return last * (first / last) ** max(0.0, 1 - update / settled)

    recipe = {"num_steps": case["thin"], "temperature": case["run_temperature"], "optim": {"lr": 0.01}}
    if case["sampled"] == "u held":
        gp.requires_grad_(False)
        recipe["optim"] = None
    sghmc = SGHMC(gp.model, step_size, init_strategy=median, **recipe)
    mcmc = MCMC(sghmc, case["samples"], case["burn_in"], disable_progbar=not progress)
    mcmc.run(Minibatch(gp.num_data, min(case["batch_size"], gp.num_data)))
    found = sghmc.diagnostics()
    facts = {"temperature": found["configurational temperature"], "noise_share": found["gradient noise share"]}
    return mcmc.get_samples(), facts


def of_sites(samples):
    """Root mean square of all coordinates of z, medians of the hyperparameters, in the first layer, where sampled."""
    sites = {name: f"layers.0.kernel.{name}" for name in ("lengthscale", "variance")}
    found = {name: samples[site].median() for name, site in sites.items() if site in samples}
    return found | ({"rms_z": samples["layers.0.z"].square().mean().sqrt()} if "layers.0.z" in samples else {})


def exact(x, y, x_test, seed):
    """Predictive distribution of y, outputs first, by a dense GP per output; the noise of the last one, and seconds."""
    start = time.process_time()
    kernel = ConstantKernel(1.0, (1e-3, 1e4)) * DenseRBF([2.0] * x.shape[1], (1e-2, 1e4))
    kernel = kernel + WhiteKernel(1e-2, (1e-8, 1.0))
    moments = []
    for column in y.reshape(len(y), -1).T:
        gp = GaussianProcessRegressor(kernel, alpha=0.0, n_restarts_optimizer=3, random_state=seed).fit(x, column)
        moments.append(torch.as_tensor(np.stack(gp.predict(x_test, return_std=True))))
    loc, deviation = torch.stack(moments, 1)
    shape = (*y.shape[1:], len(x_test))
    row = {"noise": gp.kernel_.k2.noise_level**0.5, "seconds": time.process_time() - start}
    return dist.Normal(loc.reshape(shape), deviation.reshape(shape)), row


def by_chains(train, binary, case, x_test, fold, progress):
    """Predictive distribution of y, averaged over chains; their diagnostics, and seconds."""
    chains, facts, seconds, probes = [], [], 0.0, []
    for chain in range(case["chains"]):
        pyro.clear_param_store()  # where Pyro's own guides keep their parameters by name
        seed = fold + 1000 * chain
        start, first = time.process_time(), seed if case["starts"] == "own" else fold
        pyro.set_rng_seed(first)
        gp = build(*train, binary, case, first)
        samples, found = sample(gp, case, seed, progress)
        seconds += time.process_time() - start
        facts.append(found | of_sites(samples))
        # The mixture keeps what the parameters of this chain are.
        chains.append(gp.predict(x_test, samples=samples))
        if case["chains"] > 1:
            probes.append(torch.stack([component.mean[..., :1000] for component in chains[-1].components]))
    row = {name: sum(found[name] for found in facts) / len(facts) for name in facts[0]}
    if probes:
        rhat = torch.as_tensor(az.rhat(az.convert_to_dataset({"y": torch.stack(probes).numpy()}))["y"].values)
        row |= {"rhat_median": rhat.median(), "rhat_95": rhat.quantile(0.95), "rhat_max": rhat.max()}
        row["rhat_up_to_1.1"] = (rhat <= 1.1).double().mean()
    if not binary:
        row["noise"] = gp.likelihood.variance.detach().sqrt()
    return Mixture([component for chain in chains for component in chain.components]), row | {"seconds": seconds}


def run(case, fold, progress=False):
    """One row."""
    train, (x_test, y_test), scale, binary = split(case["data"], fold, case["part"])
    if case["sampled"] == "exact":
        predictive, row = exact(*train, x_test, fold)
    else:
        predictive, row = by_chains(train, binary, case, x_test, fold, progress)
    sizes = {"num_train": len(train[0]), "num_test": len(x_test), "torch": torch.__version__, "commit": commit()}
    return case | {"fold": fold} | row | scores(predictive, y_test, scale, binary) | sizes


@torch.no_grad()
def scores(predictive, y, scale, binary):
    if binary:
        prob = predictive.mean
        error, auc = error_rate(y, (prob > 0.5).double()), roc_auc_score(y.numpy(), prob.numpy())
        return {"nll": nll(y, predictive), "error": error, "auc": auc}
    y, deviation = y.mT if y.dim() == 2 else y, predictive.variance.sqrt()
    by_target = -predictive.log_prob(y).reshape(len(scale), -1).mean(-1) + scale.log()
    interval = gaussian_interval(predictive.mean, deviation)
    found = {"nll": by_target.mean(), "rmse": rmse(y, predictive.mean), "coverage": coverage(y, *interval)}
    return found | {"nll_by_target": " ".join(f"{value:.4g}" for value in by_target.tolist())}


def mean(rows, name, spec=".3g"):
    """Mean over folds in print; nothing where the scores have no such number."""
    values = [float(row[name]) for row in rows if row[name] != ""]
    return f"{sum(values) / len(values):{spec}}" if values else ""


def error_of_mean(rows, name):
    values = torch.tensor([float(row[name]) for row in rows])
    return f" ± {float(values.std() / len(values) ** 0.5):.2f}" if len(values) > 1 else ""


def table(groups):
    """One line per case, with the mean over its folds, and for the NLL its standard error."""
    binary = groups[0][0]["error"] != ""
    names = ("rmse", "coverage", "noise")
    if binary:
        names = ("error", "auc", "rhat_median", "rhat_95", "rhat_max", "rhat_up_to_1.1")
    if all(row[name] for rows in groups for row in rows for name in SITES):
        names += SITES
    lines = [
        f"| data | L | objective | prior of z | sampled | folds | NLL | paper | {' | '.join(names)} "
        "| paper's RMSE | temperature | noise share | CPU s |",
        "|---" * (len(names) + 12) + "|",
    ]
    for rows in groups:
        case = rows[0]
        known = PAPER.get(case["data"].partition(":")[0], ())
        paper = known[int(case["layers"]) - 1] if int(case["layers"]) <= len(known) else ("", "")
        by_target = [row["nll_by_target"].split() for row in rows]
        targets = [sum(map(float, values)) / len(rows) for values in zip(*by_target, strict=True)]
        apart = f" ({', '.join(f'{value:.2f}' for value in targets)})" if len(targets) > 1 else ""
        spread = error_of_mean(rows, "nll")
        prior = case["prior"] if case["sampled"] == "all" else ""
        objective = "" if case["sampled"] == "exact" else case["objective"]
        cells = [case["data"], case["layers"], objective, prior, case["sampled"], str(len(rows))]
        cells += [f"{mean(rows, 'nll', '.3f' if binary else '.2f')}{spread}{apart}", str(paper[0])]
        cells += [mean(rows, name) for name in names] + [str(paper[1])]
        cells += [mean(rows, "temperature"), mean(rows, "noise_share", ".2g"), mean(rows, "seconds", ".0f")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ranks(rows):
    """Mean ranks of the NLL, 1 the best, over the data sets and folds that have all cases of a figure."""
    found = {}
    for row in rows:
        case = (row["objective"], row["prior"], row["sampled"])
        found.setdefault((row["data"], row["fold"]), {})[case] = float(row["nll"])
    theirs = {"BSGP": {name: values[0][0] for name, values in PAPER.items()}} | BASELINES
    lines = ["| figure | data sets and folds | case | place in the paper | mean rank |", "|---|---|---|---|---|"]
    for figure, cases in FIGURES.items():
        done = {block: nlls for block, nlls in found.items() if nlls.keys() >= set(cases.values())}
        if not done:
            continue
        means = mean_ranks([[nlls[case] for case in cases.values()] for nlls in done.values()])
        places = range(1, len(cases) + 1)
        if figure == "7":
            names = sorted({name for name, _ in done} & PAPER.keys())
            places = mean_ranks([[theirs[case][name] for case in cases] for name in names])
        for case, place, rank in zip(cases, places, means, strict=True):
            lines.append(f"| {figure} | {len(done)} | {case} | {place:.3g} | {rank:.2f} |")
    return "\n".join(lines)


def mean_ranks(blocks):
    """Of each column of numbers, the smallest of a row having rank 1."""
    return rankdata(blocks, axis=1).mean(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--layers", type=int, nargs="+", default=[1])
    parser.add_argument("--objectives", nargs="+", default=["fitc"])
    parser.add_argument("--priors", nargs="+", default=["normal"])
    parser.add_argument("--sampled", nargs="+", default=["all"], choices=list(SAMPLED))
    parser.add_argument("--chains", type=int, default=1)
    parser.add_argument("--starts", choices=["own", "one"], default="own", help="of several chains")
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--inducing", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--svi", type=int, default=1000)
    parser.add_argument("--burn-in", type=int, default=3000)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--thin", type=int, default=6)
    parser.add_argument("--step-size", type=float, default=0.05)
    parser.add_argument("--first-step", type=float, help="step size from which the first half of burn-in comes down")
    parser.add_argument("--run-temperature", type=float, default=1.0, help="below 1, narrower than the posterior")
    parser.add_argument("--hyperpriors", choices=list(HYPERPRIORS), default="medians")
    parser.add_argument("--part", choices=["test", "validation", "authors"], default="test")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/bsgp.csv"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    fixed = {name: getattr(args, name) for name in RUN if name in vars(args) and name not in ("layers", "sampled")}
    fixed["first_step"] = args.first_step or args.step_size
    groups = {}
    for fold in range(args.folds):
        for each in itertools.product(args.names, args.layers, args.objectives, args.priors, args.sampled):
            case = fixed | dict(zip(("data", "layers", "objective", "prior", "sampled"), each, strict=True))
            key = {name: str(cell(value)) for name, value in case.items()}
            if not any(key | {"fold": str(fold)} == {n: row[n] for n in (*key, "fold")} for row in read(args.csv)):
                append(args.csv, FIELDS, run(case, fold, args.progress))
                print(read(args.csv)[-1], flush=True)
            groups.setdefault(tuple(key.values()), key)
    done = [[row for row in read(args.csv) if key.items() <= row.items()] for key in groups.values()]
    text = table(done)
    if args.ranks:
        schedule = {name: str(cell(value)) for name, value in fixed.items()} | {"layers": "1"}
        text += "\n\n" + ranks([r for r in read(args.csv) if r["data"] in args.names and schedule.items() <= r.items()])
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
