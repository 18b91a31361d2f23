"""Small programs and methods to train, and comparisons of what training leaves."""

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam, pyro_method
from torch import nn
from torch.distributions import constraints

from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import VNNGP, Vecchia
from pyro_nngp.variational import SparseCholesky

N = 60
SETTINGS = {"batch_size": 16, "lr": 0.02, "progress": False}
BY_GRADIENTS = SETTINGS | {"solve_every": 0, "refresh_every": 0}


class Line(PyroModule):
    """Bayesian regression on a batch of rows: enough of a method for the engine."""

    num_data = N

    def __init__(self):
        super().__init__()
        self.x = torch.linspace(-1, 1, N)
        self.y = 2 * self.x + 0.1 * torch.randn(N)
        self.loc = nn.Parameter(torch.tensor(0.0))
        self.scale = PyroParam(torch.tensor(0.5), constraints.positive)

    @pyro_method
    def model(self, idx=None):
        slope = pyro.sample("slope", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", N, subsample=idx) as rows:
            pyro.sample("y", dist.Normal(slope * self.x[rows], 0.1), obs=self.y[rows])

    @pyro_method
    def guide(self, idx=None):
        pyro.sample("slope", dist.Normal(self.loc, self.scale))


class Stuck(Bernoulli):
    """Its expected log likelihood falls at each evaluation, wherever one goes."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def expected_log_prob(self, y, loc, var):
        self.calls.append(loc)
        value = super().expected_log_prob(y, loc, var)
        return value - value.detach() - 1e6 * len(self.calls)


def vnngp(dtype=torch.float32):
    torch.manual_seed(1)
    x = torch.rand(N, 2, dtype=dtype)
    return VNNGP(
        x, torch.sin(5 * x.sum(-1)), Matern52(2, 1.0, 0.5), Gaussian(0.1), num_neighbors=6, guide=SparseCholesky(3)
    )


def bumps(n, dtype=torch.float64):
    """Inputs on the unit square and noisy targets of a smooth function."""
    torch.manual_seed(0)
    x = torch.rand(n, 2, dtype=dtype)
    return x, torch.sin(6 * x[:, 0]) * torch.cos(4 * x[:, 1]) + 0.1 * torch.randn(n, dtype=dtype)


def vecchia(n=200, **settings):
    return Vecchia(*bumps(n), Matern52(2, 1.0, torch.ones(2)), Gaussian(1.0), num_neighbors=8, **settings)


def values(module):
    """Copies of parameters and buffers."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(one, two):
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def stop_at(step):
    """A callback that ends a run by an error after a step."""

    def callback(now, loss):
        if now == step:
            raise RuntimeError("power cut")

    return callback


def poison(model, at):
    """A callback that spoils a parameter after a step."""

    def callback(step, loss):
        if step == at:
            with torch.no_grad():
                model.loc.fill_(torch.nan)

    return callback
