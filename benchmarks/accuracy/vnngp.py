"""The experiments behind the figures of the VNNGP paper (Wu, Pleiss, Cunningham 2022), on data at hand.

- neighbors (figure 2): scores on elevators and house prices as K grows, of plain calls, beside SVGP with 512 inducing
  points. Standardized as in papers.py, first split. "Solved each step" takes `fit(gp, solve_every=1, lr=0.3,
  batch_size=4096)`: q(u) is put at its optimum after each step, and not once per epoch; K up to 64.
- divergence, variants (figures 3, 7): KL(q || p) of a mean-field q as K grows, for several lengthscales; VNNGP, SWSGP
  and the exact value. M = 200 points on a line with spacing 1, means of q drawn from an RBF process with lengthscale 5,
  variances 1, random ordering; then ordered along the line, with Matérn-5/2, and at 500 places of prism_elevation,
  where the means are the standardized elevations. The divergences depend on the nugget, 1e-3 here.
- clusters (figure 4): 50 very noisy observations, most of them in two clusters, kernel and noise known, and
  mean-field q with inducing points at the data and K = 5, unless "sites" are named: scores of f itself inside and
  between the clusters, over 20 draws.
- noise (figures 5 and 8): the negative evidence bound and test scores as the noise variance is held at several values,
  with the kernel of a trained Vecchia; mean-field q, solved where the method can, else 4,000 steps. House prices,
  inducing points at all training rows or 512.
- convergence (figure 6): the negative bound as training by gradient steps on batches of 1,024 goes on, on house prices
  and bike without its leaking columns.

Rows are appended to a CSV file; one that is there is not run again.

Usage: python benchmarks/accuracy/vnngp.py [--parts neighbors divergence ...] [--csv benchmarks/results/vnngp.csv]
           [--out benchmarks/results/vnngp.md] [--figure docs/_static/vnngp_divergence.svg]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import itertools
import time
from functools import cache

import torch
from papers import TASKS  # beside this file
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from sweeps import Sweep, looks, main
from tasks import evaluate, standardized
from torch.distributions import Normal

from pyro_nngp.inference import IntegratedELBO, fit
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import SVGP, SWSGP, VNNGP, Vecchia
from pyro_nngp.variational import MeanField

NEIGHBORS = (4, 8, 16, 32, 64, 128, 256)
SOLVED = {"solve_every": 1, "lr": 0.3, "batch_size": 4096}
GRID, LENGTHSCALES, JITTER = 200, (2.0, 5.0, 10.0), 1e-3
NOISES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
STEPS = (10, 20, 40, 80, 160, 320, 640, 1280)


def neighbors():
    """Rows of scores against K."""
    data = {name: standardized(TASKS[name]) for name in ("house prices", "elevators")}
    runs = [("SVGP", 512, SVGP, {"inducing": 512}, {})]
    for k in NEIGHBORS:
        mean_field = {"num_neighbors": k, "guide": MeanField()}
        runs.append(("VNNGP", k, VNNGP, {"num_neighbors": k}, {}))
        runs.append(("VNNGP, mean-field", k, VNNGP, mean_field, {}))
        if k <= 64:
            runs.append(("VNNGP, mean-field, solved each step", k, VNNGP, mean_field, SOLVED))
    for (label, setting, method, settings, recipe), name in itertools.product(runs, data):

        def measure(name=name, method=method, settings=settings, recipe=recipe):
            x, y, *test = data[name]
            begin = time.process_time()
            gp = method(x, y, Matern52(x.shape[1]), Gaussian(), seed=0, **settings)
            fit(gp, max_seconds=1800, progress=False, **recipe)
            return {"seconds": time.process_time() - begin} | scores(gp, *test)

        yield {"data": name, "method": label, "setting": setting}, measure


def line():
    """200 points with spacing 1, and means drawn from an RBF process of lengthscale 5."""
    x = torch.arange(float(GRID), dtype=torch.float64)[:, None]
    cov = RBF(1, lengthscale=torch.tensor(5.0)).double()(x).detach() + 1e-6 * torch.eye(GRID)
    return x, torch.linalg.cholesky(cov) @ torch.randn(GRID, dtype=x.dtype, generator=torch.Generator().manual_seed(0))


def places():
    """500 places of a raster, in units in which the lengthscales of the line are .2, .5 and 1 standard deviations."""
    x, y, _, _ = standardized(TASKS["prism_elevation"], most=500)
    return 10 * x.double(), y.double()


def divergences(settings):
    """Rows of KL divergences against K."""
    for (name, data, family, ordering), lengthscale in itertools.product(settings, LENGTHSCALES):
        x, loc = data()
        lengthscales = torch.full((x.shape[1],), lengthscale)
        kernel = family(x.shape[1], variance=torch.tensor(1.0), lengthscale=lengthscales).double()
        counts = itertools.product((1, 2, 3, 5, 10, 20, 50), ("VNNGP", "SWSGP"))
        for method, k in [("exact", len(x) - 1), *((method, k) for k, method in counts)]:

            def measure(x=x, loc=loc, kernel=kernel, method=method, k=k, ordering=ordering):
                options = {"num_neighbors": k, "jitter": JITTER}
                if method == "SWSGP":
                    gp = SWSGP(x, loc, kernel, Gaussian(), inducing=x, learn_inducing=False, **options)
                else:
                    gp = VNNGP(x, loc, kernel, Gaussian(), guide=MeanField(), ordering=ordering, **options)
                q = gp.q.distribution()
                gp.q.assign(type(q)(loc, torch.ones_like(loc)))
                prior = poutine.block(gp.model, hide=["y"])
                return {"value": TraceMeanField_ELBO().loss(prior, gp.guide, torch.arange(len(x)))}

            yield {"data": f"lengthscale {lengthscale:g}{name}", "method": method, "setting": k}, measure


VARIANTS = (
    (", along the line", line, RBF, "coordinate"),
    (", Matérn-5/2", line, Matern52, "random"),
    (", elevations", places, RBF, "random"),
)


@cache
def clustered(seed):
    """Observations, places inside and between their clusters, and f there; a squared exponential process."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(46, generator=generator, dtype=torch.float64)
    x = torch.cat([2.5 * spread + 50 * (torch.arange(46) % 2), torch.tensor([10.0, 20, 30, 40])])[:, None]
    at = torch.cat([torch.linspace(-4, 4, 40), torch.linspace(46, 54, 40), torch.linspace(8, 42, 80)]).double()[:, None]
    cov = clusters_kernel()(torch.cat([x, at])).detach()
    root = torch.linalg.cholesky(cov + 1e-6 * torch.eye(len(cov)))
    f = root @ torch.randn(len(cov), generator=generator, dtype=torch.float64)
    y = f[:50] + 5**0.5 * torch.randn(50, generator=generator, dtype=torch.float64)
    return x, y, {"inside": (at[:80], f[50:130]), "between": (at[80:], f[130:])}


def clusters_kernel():
    return RBF(1, variance=torch.tensor(5.0), lengthscale=torch.tensor([5.0])).double().requires_grad_(False)


def everywhere(x):
    """Inducing points at all data."""
    return x


def built(recipe, x, *parts, **settings):
    """A method of these settings, some of which are functions of the inputs."""
    method, own = recipe
    own = {name: value(x) if callable(value) else value for name, value in own.items()}
    return method(x, *parts, **own, **settings)


CLUSTERED = {
    "exact": (Vecchia, {"num_neighbors": 49}),
    "SVGP": (SVGP, {"inducing": everywhere, "learn_inducing": False, "guide": MeanField()}),
    "VNNGP": (VNNGP, {"num_neighbors": 5, "guide": MeanField()}),
    "VNNGP, sites": (VNNGP, {"num_neighbors": 5}),
    "SWSGP": (SWSGP, {"inducing": everywhere, "learn_inducing": False, "num_neighbors": 5}),
}


@cache
def predicted_clusters(method, seed):
    """f inside and between clusters, of a method whose q is at its optimum."""
    x, y, regions = clustered(seed)
    noise = Gaussian(5.0).requires_grad_(False)
    gp = built(CLUSTERED[method], x, y, clusters_kernel(), noise, mean=lambda x: 0 * x[:, 0])
    optimize(gp)
    with torch.no_grad():
        found = {name: gp(at) for name, (at, _) in regions.items()}
    return {name: Normal(mean, variance.sqrt()) for name, (mean, variance) in found.items()}


def clusters():
    """Rows of scores of f."""
    for method, region, seed in itertools.product(CLUSTERED, ("inside", "between"), range(20)):

        def measure(method=method, region=region, seed=seed):
            here, exact = predicted_clusters(method, seed)[region], predicted_clusters("exact", seed)[region]
            truth = clustered(seed)[2][region][1]
            nll = -here.log_prob(truth).mean().item()
            covered = ((truth - here.mean).abs() < 1.96 * here.stddev).double().mean().item()
            return {"nll": nll, "rmse": (here.mean - exact.mean).square().mean().sqrt().item(), "value": covered}

        yield {"data": region, "method": method, "setting": seed}, measure


def optimize(gp):
    """Put q, if there is one, at its optimum; where the method cannot solve for it, by gradient steps."""
    if getattr(gp, "can_solve", False):
        gp.solve()
    elif not isinstance(gp, Vecchia):
        fit(gp, 4000, lr=0.02, progress=False)


def noise():
    """Rows of bounds and scores against the noise variance."""
    x, y, x_test, y_test = standardized(TASKS["house prices"])
    first = Vecchia(x, y, Matern52(2))
    fit(first, progress=False)
    kernel = {"variance": first.kernel.variance.detach(), "lengthscale": first.kernel.lengthscale.detach()}
    local = {"num_neighbors": 32}
    recipes = {
        "VNNGP-N": (VNNGP, local | {"guide": MeanField()}),
        "SWSGP-N": (SWSGP, local | {"inducing": everywhere, "learn_inducing": False}),
        "VNNGP-512": (VNNGP, local | {"guide": MeanField(), "inducing": 512}),
        "SWSGP-512": (SWSGP, local | {"inducing": 512, "learn_inducing": False}),
        "SVGP-512": (SVGP, {"inducing": 512, "learn_inducing": False, "guide": MeanField()}),
    }
    for (method, recipe), value in itertools.product(recipes.items(), NOISES):

        def measure(recipe=recipe, value=value):
            fixed = Matern52(2, **kernel).requires_grad_(False), Gaussian(value).requires_grad_(False)
            gp = built(recipe, x, y, *fixed)
            optimize(gp)
            return {"value": bound(gp)} | scores(gp, x_test, y_test)

        yield {"data": "house prices", "method": method, "setting": value}, measure


@torch.no_grad()
def bound(gp):
    """Negative evidence bound per datum."""
    torch.manual_seed(0)
    return IntegratedELBO().loss(gp.model, gp.guide) / gp.num_data


COURSES = {
    "SVGP, M = 512": (SVGP, {"inducing": 512}),
    "VNNGP, mean-field": (VNNGP, {"guide": MeanField()}),
    "VNNGP, sites": (VNNGP, {}),
    "SWSGP-N": (SWSGP, {"inducing": everywhere, "learn_inducing": False}),
}


@cache
def course(data, method):
    """Bounds after numbers of steps of one run."""
    x, y, _, _ = standardized(TASKS[data])
    gp = built(COURSES[method], x, y, Matern52(x.shape[1]), Gaussian(), seed=0)
    return looks(gp, STEPS, lambda: {"value": bound(gp)}, batch_size=1024, solve_every=0)


def convergence():
    """Rows of bounds after numbers of steps."""
    for data, method in itertools.product(("house prices", "bike, 15 columns"), COURSES):
        for step in STEPS:
            yield {"data": data, "method": method, "setting": step}, lambda d=data, m=method, s=step: course(d, m)[s]


def scores(gp, x, y):
    found = evaluate(gp.predict, x, y, "real")
    return {name: found[name] for name in ("nll", "rmse")}


SWEEPS = {
    "neighbors": Sweep(
        "Scores against the number of neighbors (figure 2); of SVGP, inducing points",
        neighbors,
        ("nll", "rmse", "seconds"),
        score="nll",
        label="test NLL",
        axis="K",
    ),
    "divergence": Sweep(
        "KL(q || p) in nats against the number of neighbors (figure 3)",
        lambda: divergences([("", line, RBF, "random")]),
        ("value",),
        score="value",
        label="KL [nats]",
        axis="K",
    ),
    "variants": Sweep(
        "The same along the line, with another kernel and on other data (figure 7)",
        lambda: divergences(VARIANTS),
        ("value",),
        score="value",
        label="KL [nats]",
        axis="K",
    ),
    "clusters": Sweep(
        "f inside and between two clusters of noisy data: its NLL, the RMSE of its mean from the exact posterior's, "
        "and the coverage of its 95 % intervals (figure 4)",
        clusters,
        ("nll", "rmse", "value"),
        score="nll",
        label="NLL of f",
        axis="draws",
        value="coverage",
        averaged=True,
    ),
    "noise": Sweep(
        "Negative evidence bound per datum and test scores against the noise variance (figures 5, 8)",
        noise,
        ("value", "nll", "rmse"),
        score="value",
        label="negative bound per datum",
        axis="noise variance",
        value="bound",
    ),
    "convergence": Sweep(
        "Negative evidence bound per datum after numbers of steps (figure 6)",
        convergence,
        ("value",),
        score="value",
        label="negative bound per datum",
        axis="steps",
    ),
}

if __name__ == "__main__":
    main("vnngp", __doc__, SWEEPS)
