"""Inducing points beside neighbors: the exact process at the same hyperparameters, and training from scratch.

Rows "exact" compare predictions of f + noise at held-out points with the exact process's, at the hyperparameters of
`fit(Vecchia(x, y))`, as in `exact_gp.py`: NLL beyond that of the exact process. Rows "dense" do so by dense matrices,
with 500 inducing points at centers of k-means, at random rows or at those that explain most of the variance left by
others (greedy), and 32 neighbors by their correlation under the kernel or in the residual. Rows "trained" are of
Matern-5/2 with one lengthscale per column, K neighbors and M inducing points at k-means centers, beside more neighbors
alone: NLL of held-out y, and processor seconds of training and predictions. K is given or chosen, and predictions
choose theirs, as in a plain call. Inputs and targets are in units of their standard deviations, in float64. Rows
"counts" are a Pyro program of 1,000 Poisson counts of a smooth function of four columns, with a level and a Matern-5/2
process, or with a full-scale prior by `FullScaleReparam`: the bound on the evidence where the first call of `AutoNNGP`
ends, the root mean square error of the log rate at the data, and processor seconds of that call. Rows "peer" are
trained as "trained" are, beside GPBoost's `full_scale_vecchia` with the same K and M, which needs `pip install
gpboost`; both predict from 2 K neighbors, which is GPBoost's default; the setting is the split. Rows are appended to a
CSV file; one that is there is not run again.

Usage: python benchmarks/accuracy/full_scale.py [--csv benchmarks/results/full_scale.csv]
           [--out benchmarks/results/full_scale.md]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import time
from functools import cache, partial

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from exact_gp import Exact, problem  # beside this file
from papers import MORE, TASKS
from sweeps import Sweep, main
from torch.distributions import Normal

from pyro_nngp import NNGP, AutoNNGP, FullScaleNNGP, FullScaleReparam, NeighborGraph
from pyro_nngp.inducing import kmeans
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.models import Vecchia

K, M, ROWS, POINTS, MOST_TEST, PLACES = 32, 200, 3000, 5000, 4000, 500
TASKS |= MORE
TRAINED = ("kin8nm", "elevators", "powerplant", "protein", "california_housing", "pol", "kin40k", "bike, 15 columns")


@cache
@torch.enable_grad()
def trained(name):
    """A method from plain arguments, and the exact process at its hyperparameters."""
    x, y, *_ = problem(name, POINTS)
    gp = Vecchia(x, y)
    fit(gp, progress=False)
    return gp, Exact(gp, x, y)


def beside_exact(name, num_neighbors, inducing, near):
    """NLL beyond that of the exact process, with a number of neighbors in predictions."""
    x, y, x_test, y_test = problem(name, POINTS)
    gp, exact = trained(name)
    start = time.process_time()
    both = Vecchia(x, y, start=gp, num_neighbors=num_neighbors, inducing=inducing)
    with torch.no_grad():
        near = both(x_test[:MOST_TEST], num_neighbors=near)
    seconds = time.process_time() - start
    every = exact.predict(x_test[:MOST_TEST])
    scores = [score(loc, var + exact.noise, y_test[:MOST_TEST]) for loc, var in (near, every)]
    return {"nll": scores[0], "value": scores[0] - scores[1], "seconds": seconds}


def places(name, cov, x):
    """500 inducing points."""
    if name == "k-means":
        return kmeans(x, PLACES)
    if name == "random rows":
        return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:PLACES]]
    left, root, rows = cov.diagonal().clone(), cov.new_zeros(len(x), PLACES), []
    for m in range(PLACES):
        rows.append(int(left.argmax()))
        root[:, m] = (cov[:, rows[-1]] - root @ root[rows[-1]]) / left[rows[-1]].sqrt()
        left = (left - root[:, m].square()).clamp(min=1e-12)
    return x[rows]


@torch.no_grad()
def densely(name, points, metric):
    """As `beside_exact`, with all covariances as matrices, in which neighbors are found."""
    x, y, x_test, y_test = problem(name, POINTS)
    gp, exact = trained(name)
    x_test, y_test, noise = x_test[:MOST_TEST], y_test[:MOST_TEST], float(exact.noise)
    z, num_old = places(points, exact.cov, x), len(x)
    order = torch.randperm(num_old, generator=torch.Generator().manual_seed(0))
    both, old = torch.cat([x[order], x_test]), torch.arange(num_old)
    whole, cross = gp.kernel(both), gp.kernel(z, both)
    tril = torch.linalg.cholesky(gp.kernel(z) + 1e-6 * gp.kernel.variance * torch.eye(len(z)).to(x))
    features = torch.linalg.solve_triangular(tril, cross, upper=False).mT
    rest = whole - features @ features.mT
    by = whole if metric == "kernel" else rest
    spread = by.diagonal().clamp(min=1e-10).sqrt()
    close = (by / spread / spread[:, None]).abs()[:, :num_old]
    close[:num_old].masked_fill_(old[:, None] <= old, -1.0)  # predecessors alone, but for new points
    near = close.topk(K).indices
    given = torch.gather(close, 1, near) >= 0
    among = rest[near[:, :, None], near[:, None]] * (given[:, :, None] & given[:, None])
    among = among + torch.diag_embed(torch.where(given, noise + 1e-6 * float(gp.kernel.variance), 1.0))
    own = torch.gather(rest, 1, near) * given
    w = torch.linalg.solve(among, own)
    var = (rest.diagonal() - (w * own).sum(1)).clamp(min=0) + noise
    residual = (y - gp.mean(x).reshape(-1))[order]
    left = features - (w[..., None] * features[near]).sum(1)
    white = left[:num_old] / var[:num_old, None].sqrt()
    errors = (residual - (w[:num_old] * residual[near[:num_old]]).sum(1)) / var[:num_old].sqrt()
    root = torch.linalg.cholesky(white.mT @ white + torch.eye(len(z)).to(x))
    low = torch.cholesky_solve((white.mT @ errors)[:, None], root)[:, 0]
    loc = gp.mean(x_test).reshape(-1) + (w[num_old:] * residual[near[num_old:]]).sum(1) + left[num_old:] @ low
    var = var[num_old:] + torch.linalg.solve_triangular(root, left[num_old:].mT, upper=False).square().sum(0)
    every = exact.predict(x_test)
    nll = score(loc, var, y_test)
    return {"nll": nll, "value": nll - score(every[0], every[1] + exact.noise, y_test)}


def score(loc, var, y):
    """Mean negative log density."""
    return float(-Normal(loc, var.sqrt()).log_prob(y).mean())


def from_scratch(name, inducing, seed=0, near=K, num_neighbors=K):
    """Scores on the test rows, with a number of neighbors in predictions."""
    x, y, x_test, y_test = problem(name, ROWS, seed)
    start = time.process_time()
    gp = Vecchia(x, y, Matern52(x.shape[1]), num_neighbors=num_neighbors, inducing=inducing)
    fit(gp, progress=False)
    with torch.no_grad():
        loc, var = gp(x_test, num_neighbors=near)
        var = var + gp.bound().likelihood.variance
    return scores(loc, var, y_test) | {"seconds": time.process_time() - start}


def theirs(name, inducing, seed):
    """Scores of GPBoost's full-scale approximation."""
    import gpboost as gpb

    x, y, x_test, y_test = problem(name, ROWS, seed)
    varies = x.std(0) > 0  # a constant column, which GPBoost refuses, says nothing
    x, x_test = x[:, varies], x_test[:, varies]
    start = time.process_time()
    model = gpb.GPModel(
        gp_coords=x.numpy(),
        cov_function="matern_ard",
        cov_fct_shape=2.5,
        gp_approx="full_scale_vecchia",
        num_neighbors=K,
        num_ind_points=inducing,
        num_parallel_threads=1,
    )
    model.fit(y=y.numpy(), X=np.ones((len(x), 1)))
    ones = np.ones((len(x_test), 1))
    found = model.predict(gp_coords_pred=x_test.numpy(), X_pred=ones, predict_var=True, predict_response=True)
    seconds = time.process_time() - start
    return scores(*(torch.from_numpy(found[part]) for part in ("mu", "var")), y_test) | {"seconds": seconds}


def scores(loc, var, y):
    """Mean negative log density of y and root mean square error."""
    return {"nll": score(loc, var, y), "rmse": float((y - loc).square().mean().sqrt())}


def program_of_counts(num_neighbors, inducing):
    """Scores of the guide of a program with a process or a full-scale prior."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    x = torch.rand(1000, 4, dtype=torch.float64)
    log_rate = torch.sin(4 * x[:, 0] + 2 * x[:, 1]) + x[:, 2] * torch.cos(3 * x[:, 3])
    y, zero = torch.poisson(log_rate.exp()), torch.zeros((), dtype=torch.float64)
    graph, z = NeighborGraph(x, num_neighbors), kmeans(x, inducing) if inducing else None

    def program():
        variance, scale = (pyro.sample(name, dist.LogNormal(zero, 1.0)) for name in ("variance", "lengthscale"))
        kernel, level = Matern52(4, variance, scale), pyro.sample("level", dist.Normal(zero, 2.0))
        f = pyro.sample("f", NNGP(kernel, graph) if z is None else FullScaleNNGP(kernel, graph, z))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((level + f).exp()), obs=y)

    start = time.process_time()
    model = program if z is None else pyro.poutine.reparam(program, config={"f": FullScaleReparam()})
    guide = AutoNNGP(model)
    with torch.no_grad():
        guide()
        seconds = time.process_time() - start
        found = guide.median()
        trace = pyro.poutine.trace(pyro.condition(model, data=found)).get_trace()
        error = found["level"] + trace.nodes["f"]["value"] - log_rate
        losses = torch.tensor([pyro.infer.Trace_ELBO().loss(model, guide) for _ in range(100)])
    return {"value": -float(losses.mean()), "rmse": float(error.square().mean().sqrt()), "seconds": seconds}


def counts():
    """Rows of a program with and without inducing points."""
    for k, m in ((10, 0), (10, 60), (30, 0), (30, 60), (120, 0)):
        key = {"data": "simulated counts", "method": "AutoNNGP", "setting": f"{k}, {m}"}
        yield key, lambda k=k, m=m: program_of_counts(k, m)


def exact():
    """Rows of numbers of neighbors and inducing points."""
    for k, m, near in ((K, 0, K), (K, 200, K), (K, 500, K), (160, 0, 160), (K, 500, 160), (K, 1000, K)):
        setting = f"{k}, {m}" if near == k else f"{k} ({near} in predictions), {m}"
        key = {"data": "kin40k", "method": "Vecchia", "setting": setting}
        yield key, partial(beside_exact, "kin40k", k, m, near)


def dense():
    """Rows of places of inducing points and metrics of neighbors."""
    for points in ("k-means", "random rows", "greedy"):
        for metric in ("kernel", "residual"):
            key = {"data": "kin40k", "method": points, "setting": metric}
            yield key, partial(densely, "kin40k", points, metric)


def training():
    """Rows of inducing points, and of more neighbors in their place."""
    settings = {"chosen, 0": (0, None), "128, 0": (0, 128), "256, 0": (0, 256), f"{K}, {M}": (M, K)}
    for name in TRAINED:
        for setting, (m, k) in settings.items():
            key = {"data": name, "method": "Vecchia", "setting": setting}
            yield key, partial(from_scratch, name, m, near=None, num_neighbors=k)


def peer():
    """Rows of splits."""
    for seed in range(3):
        for name in ("elevators", "protein", "california_housing", "kin8nm"):
            for method, measure in (("Vecchia", partial(from_scratch, near=2 * K)), ("GPBoost", theirs)):
                key = {"data": name, "method": method, "setting": seed}
                yield key, lambda name=name, seed=seed, measure=measure: measure(name, M, seed)


SWEEPS = {
    "exact": Sweep(
        "Predictions beside the exact process with the same hyperparameters, 5,000 training rows",
        exact,
        ("nll", "value", "seconds"),
        score="nll",
        label="test NLL",
        axis="K, M",
        value="beyond exact",
    ),
    "dense": Sweep(
        "The same by dense matrices, K = 32 and M = 500",
        dense,
        ("nll", "value"),
        score="nll",
        label="test NLL",
        axis="neighbors by",
        value="beyond exact",
    ),
    "trained": Sweep(
        "Trained from scratch, 3,000 training rows; predictions choose their neighbors",
        training,
        ("nll", "rmse", "seconds"),
        score="nll",
        label="test NLL",
        axis="K, M",
    ),
    "peer": Sweep(
        "Beside GPBoost's `full_scale_vecchia`, 3,000 training rows, K = 32, M = 200; means of splits",
        peer,
        ("nll", "rmse", "seconds"),
        score="nll",
        label="test NLL",
        axis="splits",
        averaged=True,
    ),
    "counts": Sweep(
        "A program of counts",
        counts,
        ("value", "rmse", "seconds"),
        score="value",
        label="bound",
        axis="K, M",
        value="bound",
    ),
}

if __name__ == "__main__":
    main("full_scale", __doc__, SWEEPS)
