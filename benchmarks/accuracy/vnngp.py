"""The experiments behind the figures of the VNNGP paper (Wu, Pleiss, Cunningham 2022), on data at hand.

- neighbors (figure 2): scores on elevators and house prices as K grows, of plain calls, beside SVGP with 512 inducing
  points. Standardized as in papers.py, first split. "Solved each step" takes `fit(gp, solve_every=1, lr=0.3,
  batch_size=4096)`: q(u) is put at its optimum after each step, and not once per epoch.
- divergence (figures 3 and 7): KL(q || p) of a mean-field q as K grows, for several lengthscales; VNNGP, SWSGP and the
  exact value. M = 200 points on a line with spacing 1, means of q drawn from an RBF process with lengthscale 5,
  variances 1, random ordering. The divergences depend on the nugget, 1e-3 here.
- noise (figures 5 and 8): the negative evidence bound and test scores as the noise variance is held at several values,
  with the kernel of a trained Vecchia; mean-field q. House prices, 3,000 training rows.

Rows are appended to a CSV file; one that is there is not run again.

Usage: python benchmarks/accuracy/vnngp.py [--parts neighbors divergence noise] [--csv benchmarks/results/vnngp.csv]
           [--out benchmarks/results/vnngp.md] [--figure docs/_static/vnngp_divergence.svg]
The data come from the folder that PYRO_NNGP_DATA names.
"""

import itertools
import time

import torch
from papers import TASKS  # beside this file
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from sweeps import Sweep, main
from tasks import evaluate, standardized

from pyro_nngp.inference import fit
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import SVGP, SWSGP, VNNGP, Vecchia

NEIGHBORS = (4, 8, 16, 32, 64, 128, 256)
SOLVED = {"solve_every": 1, "lr": 0.3, "batch_size": 4096}
GRID, LENGTHSCALES, JITTER = 200, (2.0, 5.0, 10.0), 1e-3
NOISES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def neighbors():
    """Rows of scores against K."""
    data = {name: standardized(TASKS[name]) for name in ("house prices", "elevators")}
    runs = [("SVGP", 512, SVGP, {"inducing": 512}, {})]
    for k in NEIGHBORS:
        mean_field = {"num_neighbors": k, "posterior": "mean-field"}
        runs.append(("VNNGP", k, VNNGP, {"num_neighbors": k}, {}))
        runs.append(("VNNGP, mean-field", k, VNNGP, mean_field, {}))
        runs.append(("VNNGP, mean-field, solved each step", k, VNNGP, mean_field, SOLVED))
    for (label, setting, method, settings, recipe), name in itertools.product(runs, data):

        def measure(name=name, method=method, settings=settings, recipe=recipe):
            x, y, *test = data[name]
            begin = time.process_time()
            gp = method(x, y, Matern52(x.shape[1]), Gaussian(), seed=0, **settings)
            fit(gp, max_seconds=1800, progress=False, **recipe)
            return {"seconds": time.process_time() - begin} | scores(gp, *test)

        yield {"data": name, "method": label, "setting": setting}, measure


def divergence():
    """Rows of KL divergences against K."""
    x = torch.arange(float(GRID), dtype=torch.float64)[:, None]
    cov = RBF(1, lengthscale=torch.tensor(5.0)).double()(x).detach() + 1e-6 * torch.eye(GRID)
    loc = torch.linalg.cholesky(cov) @ torch.randn(GRID, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    for lengthscale in LENGTHSCALES:
        kernel = RBF(1, variance=torch.tensor(1.0), lengthscale=torch.tensor(lengthscale)).double()
        for method, k in [("exact", GRID - 1), *((m, k) for k in (1, 2, 3, 5, 10, 20, 50) for m in ("VNNGP", "SWSGP"))]:

            def measure(kernel=kernel, method=method, k=k):
                options = {"num_neighbors": k, "jitter": JITTER}
                if method == "SWSGP":
                    gp = SWSGP(x, loc, kernel, Gaussian(), inducing=x, learn_inducing=False, **options)
                else:
                    gp = VNNGP(x, loc, kernel, Gaussian(), posterior="mean-field", **options)
                q = gp.local.distribution()
                gp.local.assign(type(q)(loc, torch.ones_like(loc)))
                prior = poutine.block(gp.model, hide=["y"])
                return {"value": TraceMeanField_ELBO().loss(prior, gp.guide, torch.arange(GRID))}

            yield {"data": f"lengthscale {lengthscale:g}", "method": method, "setting": k}, measure


def noise():
    """Rows of bounds and scores against the noise variance."""
    x, y, x_test, y_test = standardized(TASKS["house prices"], most=3000)
    first = Vecchia(x, y, Matern52(2))
    fit(first, progress=False)
    kernel = {"variance": first.kernel.variance.detach(), "lengthscale": first.kernel.lengthscale.detach()}
    for value in NOISES:
        builders = {
            "VNNGP": lambda cov, lik: VNNGP(x, y, cov, lik, num_neighbors=32, posterior="mean-field"),
            "SWSGP-N": lambda cov, lik: SWSGP(x, y, cov, lik, num_neighbors=32, inducing=x, learn_inducing=False),
            "SWSGP, M = 512": lambda cov, lik: SWSGP(x, y, cov, lik, num_neighbors=32, inducing=512),
            "SVGP, M = 512": lambda cov, lik: SVGP(x, y, cov, lik, inducing=512, mean_field=True),
        }
        for method, builder in builders.items():

            def measure(builder=builder, value=value):
                gp = builder(Matern52(2, **kernel).requires_grad_(False), Gaussian(value).requires_grad_(False))
                fit(gp, max_seconds=600, progress=False)
                torch.manual_seed(0)
                bound = TraceMeanField_ELBO().loss(gp.model, gp.guide, torch.arange(len(x))) / len(x)
                return {"value": bound} | scores(gp, x_test, y_test)

            yield {"data": "house prices", "method": method, "setting": value}, measure


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
        "KL(q || p) in nats against the number of neighbors (figures 3, 7)",
        divergence,
        ("value",),
        score="value",
        label="KL [nats]",
        axis="K",
        value="KL",
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
}

if __name__ == "__main__":
    main("vnngp", __doc__, SWEEPS)
