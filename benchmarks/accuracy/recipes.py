"""What `papers.py` trains: the methods by name, each with its recipe, within a budget of processor seconds.

A method is called as ``(x, y, binary, seed, budget, max_steps)`` and returns its predictions, a function of new inputs,
and facts about the run. The docstring of `papers.py` says how the recipes came about.
"""

import copy
import itertools
import statistics
import time

import torch
from pyro.infer import MCMC, Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value
from torch.distributions import Normal

from pyro_nngp.hyperparameters import lognormal_priors
from pyro_nngp.inference import SGHMC, Minibatch, PredictiveLogLikelihood, Schedule, fit
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import BSGP, LOO, NPVI, SVGP, SWSGP, VNNGP, MLLk, Vecchia
from pyro_nngp.variational.encoders import ConditionalEncoder, GraphConvolutionEncoder

K, START = 32, 0.6931


class NotApplicable(Exception):
    """The method has no answer for such data; the words go into the table."""


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
        refresh_every = max(1, steps // (refreshes + 1)) if refreshes else 0
        start = time.process_time()
        fit(gp, steps, refresh_every=refresh_every, **recipe)
        seconds = setup + time.process_time() - start
        noise = float("nan") if binary else float(gp.likelihood.variance.detach())
        return gp.predict, {"seconds": seconds, "steps": steps, "parameters": count(gp), "noise": noise}

    def affordable(self, gp, recipe, budget):
        """Numbers of steps and refreshes, from the times of finding neighbors, of a few steps, of solving for q(u)."""
        start = time.process_time()
        if self.refreshes:
            gp.refresh_neighbors()
        refresh = max(time.process_time() - start, 1e-6)
        refreshes = min(self.refreshes, max(0, int(0.4 * budget / refresh)))
        ticks = []
        for _ in range(1 + getattr(gp, "can_solve", False)):  # the second solution starts near its end, as in training
            ticks.clear()
            start = time.process_time()
            fit(gp, 15, refresh_every=0, callback=lambda *_: ticks.append(time.process_time()), **recipe)
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


NEAREST = {"batch_size": 128, "lr": 0.03, "schedule": Schedule((0.25, 0.5, 0.75), 0.2), "refreshes": 8}
LOCAL = {"lr": 0.03, "refreshes": 8}
NETWORK = {"num_neighbors": 20, "jitter": 0.02}  # a nugget, because no network follows a stiff prior exactly
AMORTIZED = {"batch_size": 64, "lr": 0.03}  # a batch encodes the parents of its points, too
M = {"inducing": lambda x: min(512, len(x)), "jitter": 1e-5}
METHODS = {
    "VNNGP": Trained(made(VNNGP, num_neighbors=K), **LOCAL),
    "VNNGP after Vecchia": Trained(after_vecchia(VNNGP, num_neighbors=K), **LOCAL),
    "SWSGP-M": Trained(made(SWSGP, num_neighbors=K, inducing=lambda x: min(1024, len(x)), scale=0.3), lr=0.1),
    "SWSGP-N": Trained(
        made(SWSGP, num_neighbors=K, inducing=lambda x: x, learn_inducing=False, scale=0.3),
        lr=0.03,
        schedule=Schedule(local_lr=0.05),
    ),
    "LOO-k": Trained(made(LOO, num_neighbors=K), **NEAREST),
    "MLL-k": Trained(gaussian_only(made(MLLk, num_neighbors=K)), **NEAREST),
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
    "PPGPR": Trained(made(SVGP, **M), lr=0.03, elbo=PredictiveLogLikelihood(0.05)),
    "exact GP": Exact(),
}


def method_of(label):
    """A method by its name, or by name@rate with another learning rate."""
    name, _, lr = label.partition("@")
    return METHODS[name].at(float(lr)) if lr else METHODS[name]
