"""What `papers.py` trains: the methods of the papers by name, as plain calls with K = 32 or the size of their paper.

Those with their "own K" choose it, and that of predictions, from the training data.

A method is called as ``(x, y, kind, seed, seconds)`` and returns its predictions, a function of new inputs, and facts
about the run.
"""

import time
from functools import partial

import torch
from alc import LocalDesigns  # beside this file
from exact_evidence import evidence, maximize
from pyro.infer import MCMC, Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value
from pyro.nn import PyroParam
from tasks import evaluate, likelihood
from torch.distributions import Normal, constraints

from pyro_nngp.hyperparameters import lognormal_priors
from pyro_nngp.inference import SGHMC, Minibatch, PredictiveLogLikelihood, fit
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import PolyaGammaBound
from pyro_nngp.models import BSGP, LOO, NPVI, SVGP, SWSGP, VNNGP, MLLk, Vecchia
from pyro_nngp.variational import Amortized, MeanField
from pyro_nngp.variational.encoders import ConditionalEncoder, GraphConvolutionEncoder

K = 32
REAL, ALL = ("real",), ("real", "heavy tails", "binary", "classes")
ONE_LATENT = ("real", "heavy tails", "binary")


class Fitted:
    """What `fit` makes of a method with nothing set but the number of neighbors or inducing points.

    Args:
        method: class of the method.
        kinds: of data that it takes.
        elbo: objective in place of the default.
        bound: in place of a likelihood, what makes one of it.
        settings: further arguments of the method, or functions of the training inputs that return them.
    """

    def __init__(self, method, kinds, elbo=None, bound=None, **settings):
        self.method, self.kinds, self.elbo, self.bound, self.settings = method, kinds, elbo, bound, settings

    def __call__(self, x, y, kind, seed, seconds, steps=None):
        settings = {name: value(x) if callable(value) else value for name, value in self.settings.items()}
        noise = likelihood(kind, y)
        begin = time.process_time()
        noise = noise if self.bound is None else self.bound(noise)
        gp = self.method(x, y, Matern52(x.shape[1]), noise, seed=seed, **settings)
        options = {} if self.elbo is None else {"elbo": self.elbo}
        result = fit(gp, steps, max_seconds=seconds, seed=seed, progress=False, **options)
        facts = {"seconds": time.process_time() - begin, "steps": result.steps, "converged": result.converged}
        facts["noise"] = gp.likelihood.variance.item() if kind == "real" else float("nan")
        return gp.predict, facts


class Validated:
    """The best of some methods on a tenth of the rows, after a number of steps on the others; trained on all rows."""

    kinds = REAL

    def __init__(self, methods, steps=200):
        self.methods, self.steps = methods, steps

    def __call__(self, x, y, kind, seed, seconds):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        held, rest, begin, scores = order[: len(x) // 10], order[len(x) // 10 :], time.process_time(), []
        for method in self.methods:
            predict, _ = method(x[rest], y[rest], kind, seed, seconds, self.steps)
            scores.append(evaluate(predict, x[held], y[held], kind)["nll"])
        spent = time.process_time() - begin
        predict, facts = self.methods[min(range(len(scores)), key=scores.__getitem__)](x, y, kind, seed, seconds)
        return predict, facts | {"seconds": facts["seconds"] + spent}


def noise_from(first, least, noise):
    """A likelihood whose noise variance starts at a value and stays above another."""
    noise.variance = PyroParam(torch.tensor(first), constraints.greater_than(least))
    return noise


first_noise = partial(noise_from, 0.6931, 0.0)  # where the VNNGP paper starts it
bounded_noise = partial(noise_from, 0.01, 1e-4)  # in variances of y, where GPyTorch keeps it


class Sampled:
    """BSGP: a mean-field guide, whose median starts SGHMC, half of whose updates are burn-in.

    A third of the seconds go to the guide, at most.
    """

    kinds = ("real", "binary")

    def __init__(self, num_layers, guide_steps=3000, updates=10_000):
        self.num_layers, self.guide_steps, self.updates = num_layers, guide_steps, updates

    def __call__(self, x, y, kind, seed, seconds):
        begin = time.process_time()
        x, y = x.double(), y.double()
        prior = lognormal_priors(RBF(x.shape[1], lengthscale=torch.ones(x.shape[1])), like=x)
        noise = likelihood(kind, y, 0.05)
        gp = BSGP(x, y, prior, noise, num_layers=self.num_layers, seed=seed)
        guide = AutoNormal(gp.model, init_loc_fn=gp.init_strategy, init_scale=0.05)
        guide(torch.arange(2))  # makes its parameters
        recipe = {"lr": 0.02, "elbo": Trace_ELBO(), "num_data": len(x), "seed": seed, "progress": False}
        fit((gp.model, guide), self.guide_steps, max_seconds=seconds / 3, **recipe)
        initial = init_to_value(values={name: value.detach() for name, value in guide.median().items()})

        def sample(burn_in, draws, thin):
            start = time.perf_counter()
            kernel = SGHMC(gp.model, num_steps=thin, optim={"lr": 0.01}, init_strategy=initial)
            mcmc = MCMC(kernel, draws, burn_in, disable_progbar=True)
            mcmc.run(Minibatch(len(x), min(1000, len(x))))
            return mcmc.get_samples(), time.perf_counter() - start

        _, of_thirty = sample(20, 2, 5)
        updates = int(min(self.updates, max(64, seconds / 3 / of_thirty * 30)))
        draws, _ = sample(updates // 2, 32, max(1, updates // 64))
        noise = gp.likelihood.variance.item() if kind == "real" else float("nan")
        facts = {"seconds": time.process_time() - begin, "steps": updates, "converged": "", "noise": noise}
        return lambda x_new: gp.predict(x_new.double(), samples=draws), facts


class Exact:
    """The exact process with the hyperparameters of a trained Vecchia, in float64, up to `limit` data points.

    Or with those that the exact marginal likelihood of `own` random rows prefers, which starts there.
    """

    kinds = REAL

    def __init__(self, own=None, limit=15_000):
        self.own, self.limit = own, limit

    def __call__(self, x, y, kind, seed, seconds):
        if len(x) > self.limit:
            raise NotApplicable(f"N > {self.limit:,}")
        begin = time.process_time()
        gp = Vecchia(x, y, Matern52(x.shape[1]), likelihood(kind, y), num_neighbors=K, seed=seed)
        result = fit(gp, max_seconds=seconds, seed=seed, progress=False)
        gp.double()
        if self.own is not None:
            some = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: self.own]
            maximize(gp, lambda: evidence(gp, x[some].double(), y[some].double()))
        kernel, noise = gp.kernel.requires_grad_(False), gp.likelihood.variance.item()
        x, residual = x.double(), y.double() - gp.mean(x.double()).detach().reshape(-1)
        cov = kernel(x)
        cov.diagonal().add_(noise + 1e-6 * kernel.variance)
        tril = torch.linalg.cholesky(cov)
        weights = torch.cholesky_solve(residual[:, None], tril)[:, 0]
        facts = {"seconds": time.process_time() - begin, "steps": result.steps, "converged": result.converged}

        @torch.no_grad()
        def predict(x_new):
            cross = kernel(x, x_new.double())
            half = torch.linalg.solve_triangular(tril, cross, upper=False)
            var = kernel(x_new.double(), diag=True) - half.square().sum(0) + noise
            loc = gp.mean(x_new.double()).reshape(-1) + cross.mT @ weights
            return Normal(loc.float(), var.sqrt().float())

        return predict, facts | {"noise": noise}


class NotApplicable(Exception):
    """The method has no answer for such data; the words go into the table."""


METHODS = {
    "Vecchia": Fitted(Vecchia, REAL, num_neighbors=K),
    "Vecchia, own K": Fitted(Vecchia, REAL),
    "LOO-k, own K": Fitted(LOO, REAL),
    "VNNGP, own K": Fitted(VNNGP, REAL),
    "Vecchia, principal": Fitted(Vecchia, REAL, num_neighbors=K, ordering="principal"),
    "LOO-k": Fitted(LOO, ALL, num_neighbors=K),
    "LOO-k, noise > 1e-4": Fitted(LOO, REAL, bound=bounded_noise, num_neighbors=K),
    "VNNGP": Fitted(VNNGP, ONE_LATENT, num_neighbors=K),
    "MLL-k": Fitted(MLLk, REAL, num_neighbors=K),
    "VNNGP, mean-field": Fitted(VNNGP, ONE_LATENT, num_neighbors=K, guide=MeanField()),
    "NPVI": Fitted(NPVI, ONE_LATENT, num_neighbors=20),
    "NPVI-NN": Fitted(NPVI, ONE_LATENT, num_neighbors=20, guide=Amortized(lambda x: GraphConvolutionEncoder())),
    "NPVI-NN, conditional": Fitted(NPVI, ONE_LATENT, num_neighbors=20, guide=Amortized(lambda x: ConditionalEncoder())),
    "SWSGP-M": Fitted(SWSGP, ONE_LATENT, num_neighbors=K, inducing=lambda x: min(1024, len(x))),
    "SWSGP-M, 8192": Fitted(SWSGP, REAL, num_neighbors=K, inducing=lambda x: min(8192, len(x))),
    "SWSGP-M, 8192, from the prior": Fitted(
        SWSGP,
        REAL,
        bound=first_noise,
        num_neighbors=K,
        inducing=lambda x: min(8192, len(x)),
        guide=MeanField(scale=1.0),
    ),
    "SWSGP-N": Fitted(SWSGP, ONE_LATENT, num_neighbors=K, inducing=lambda x: x, learn_inducing=False),
    "SVGP": Fitted(SVGP, ALL, inducing=lambda x: min(512, len(x))),
    "SVGP, 1024": Fitted(SVGP, REAL, inducing=lambda x: min(1024, len(x))),
    "PPGPR": Fitted(SVGP, REAL, PredictiveLogLikelihood(0.05), inducing=lambda x: min(512, len(x))),
    "PPGPR, validated": Validated(
        [
            Fitted(SVGP, REAL, PredictiveLogLikelihood(weight), bounded_noise, inducing=lambda x: min(512, len(x)))
            for weight in (0.01, 0.05, 0.2, 1.0)
        ]
    ),
    "PG-VI": Fitted(SVGP, ("binary",), bound=PolyaGammaBound, inducing=lambda x: min(512, len(x))),
    "BSGP-1": Sampled(1),
    "BSGP-2": Sampled(2),
    "exact GP": Exact(),
    "exact GP, own optimum": Exact(3000),
    "ALC": LocalDesigns(),
}
