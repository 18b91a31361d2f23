"""The protocol of likelihoods: what a user writes, hyperparameters, binding, marginals as Pyro distributions."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import tensor
from oracles.likelihoods import dense_expected, dense_marginal
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam
from torch import Tensor
from torch.distributions import constraints

from pyro_nngp.inference import IntegratedELBO, fit
from pyro_nngp.kernels import RBF
from pyro_nngp.likelihoods import (
    Categorical,
    Gamma,
    Gaussian,
    Likelihood,
    LogNormal,
    Marginal,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from pyro_nngp.models import VNNGP

CUTS = torch.tensor([-1.0, 0.2, 1.5])


class Laplace(Likelihood):
    """A likelihood as a user writes it."""

    def __init__(self) -> None:
        super().__init__(num_quadrature=200)
        self.scale = PyroParam(torch.tensor(0.5), constraints.positive)
        self.shift = torch.nn.Parameter(torch.tensor(0.1))

    def forward(self, f: Tensor) -> dist.Laplace:
        return dist.Laplace(f + self.shift, self.scale)


class Product(Likelihood):
    """Two latent functions and only a conditional."""

    num_latents = 2

    def forward(self, f: Tensor) -> dist.Normal:
        return dist.Normal(f[0] * f[1], 1.0)


def test_marginals_check_values_as_they_are_told() -> None:
    arguments, y = (Laplace().bind(), torch.zeros(2), torch.ones(2)), torch.zeros(3)
    with pytest.raises(ValueError, match="not broadcastable"):
        Marginal(*arguments, validate_args=True).log_prob(y)
    with pytest.raises(RuntimeError, match="broadcast a dimension of length 2"):
        Marginal(*arguments, validate_args=False).log_prob(y)


def test_a_conditional_is_all_that_a_user_writes() -> None:
    likelihood = Laplace()
    loc, var, y = tensor(0.3), tensor(0.5), tensor(1.0)
    assert likelihood.expected_log_prob(y, loc, var).item() == pytest.approx(
        dense_expected(likelihood, 1, 0.3, 0.5), rel=1e-2
    )
    marginal = likelihood.marginal(loc, var)
    assert marginal.log_prob(y).item() == pytest.approx(dense_marginal(likelihood, 1, 0.3, 0.5), abs=1e-2)
    assert marginal.mean.item() == pytest.approx(0.4)
    assert marginal.variance.item() == pytest.approx(0.5 + 2 * 0.5**2)
    likelihood.check(y)
    with pytest.raises(ValueError, match=r"Laplace: expected y to be finite, got 1 of 2 values such as nan"):
        likelihood.check(tensor(0.0, math.nan))


@pytest.mark.slow
def test_a_likelihood_of_ones_own_trains_with_the_method() -> None:
    x = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
    for train in (
        lambda gp: fit(gp, 2, progress=False),
        lambda gp: SVI(gp.model, gp.guide, Adam({"lr": 0.1}), Trace_ELBO()).step(),
        lambda gp: SVI(gp.model, gp.guide, Adam({"lr": 0.1}), IntegratedELBO()).step(),
    ):
        gp = VNNGP(x, torch.sin(6 * x[:, 0]), RBF(1), Laplace(), num_neighbors=4)
        gp.solve()
        before = [p.detach().clone() for p in gp.likelihood.parameters()]
        train(gp)
        after = list(gp.likelihood.parameters())
        assert len(after) == 2
        assert all((old != new).all() for old, new in zip(before, after, strict=True))


def test_a_conditional_on_two_latents() -> None:
    likelihood = Product(num_quadrature=4096)
    loc, var, y = tensor(0.5, -1.0)[:, None], tensor(0.2, 0.3)[:, None], tensor(0.4)
    second_moment = (loc.square() + var).prod().item()
    want = -0.5 * math.log(2 * math.pi) - (0.4**2 - 2 * 0.4 * loc.prod().item() + second_moment) / 2
    assert likelihood.expected_log_prob(y, loc, var).item() == pytest.approx(want, rel=1e-3)
    marginal = likelihood.marginal(loc, var)
    assert marginal.mean.item() == pytest.approx(-0.5, rel=1e-9)
    assert marginal.variance.item() == pytest.approx(1 + second_moment - 0.25, rel=1e-2)
    ys = torch.linspace(-12, 12, 401, dtype=torch.float64)
    assert marginal.log_prob(ys).exp().sum().item() * 24 / 400 == pytest.approx(1.0, abs=1e-6)
    draws = marginal.sample((20_000,))
    assert draws.mean().item() == pytest.approx(-0.5, abs=6 * math.sqrt(marginal.variance.item() / 20_000))


def test_hyperparameters_are_parameters_or_priors() -> None:
    f = torch.randn(4)
    trace = poutine.trace(StudentT()).get_trace(f)
    assert trace.nodes["df"]["value"].item() == pytest.approx(4.0)
    assert trace.nodes["scale"]["value"].item() == 1.0
    for likelihood, name in ((Gaussian(), "variance"), (Gamma(), "concentration"), (NegativeBinomial(), "total_count")):
        assert poutine.trace(likelihood).get_trace(f).nodes[name]["type"] == "param"
        setattr(likelihood, name, PyroSample(dist.LogNormal(0.0, 1.0)))
        assert poutine.trace(likelihood).get_trace(f).nodes[name]["type"] == "sample"
    assert Gaussian(PyroSample(dist.Exponential(1.0)))(f).scale.shape == (4,)
    ratings = Ordinal(CUTS)
    assert torch.equal(ratings.cutpoints.argsort(), torch.arange(3))
    ratings.cutpoints = PyroSample(
        dist.TransformedDistribution(dist.Normal(torch.zeros(3), 1.0).to_event(1), [dist.transforms.OrderedTransform()])
    )
    assert "cutpoints" in poutine.trace(ratings).get_trace(f).stochastic_nodes


@pytest.mark.parametrize("method", ["expected_log_prob", "marginal"])
def test_every_method_reads_the_prior_once(method: str) -> None:
    class Model(PyroModule):
        def __init__(self, likelihood: Likelihood) -> None:
            super().__init__()
            self.likelihood = likelihood

        def forward(self, *args: Tensor) -> Any:
            return getattr(self.likelihood, method)(*args)

    priors = {
        "variance": [Gaussian(), LogNormal()],
        "concentration": [Gamma()],
        "total_count": [NegativeBinomial()],
        "scale": [StudentT()],
    }
    y, loc, var = torch.ones(2), torch.zeros(2), torch.ones(2)
    args = (y, loc, var) if method == "expected_log_prob" else (loc, var)
    for name, likelihoods in priors.items():
        for likelihood in likelihoods:
            setattr(likelihood, name, PyroSample(dist.LogNormal(0.0, 1.0)))
            trace = poutine.trace(Model(likelihood)).get_trace(*args)
            assert trace.stochastic_nodes == [f"likelihood.{name}"]


def test_a_bound_copy_keeps_the_values_and_has_no_effects() -> None:
    likelihood = Laplace()
    likelihood.scale = PyroSample(dist.LogNormal(0.0, 1.0))
    with poutine.trace() as outer:
        bound = likelihood.bind()
    assert set(outer.trace.nodes) == {"scale", "shift"}
    drawn = outer.trace.nodes["scale"]["value"]
    loc, var, y = torch.zeros(3), torch.ones(3), torch.ones(3)
    with poutine.trace() as outer:
        conditional = bound(loc)
        bound.expected_log_prob(y, loc, var)
        marginal = bound.marginal(loc, var)
        log_prob = marginal.log_prob(y)
    assert not outer.trace.nodes
    assert not pyro.get_param_store().keys()
    assert torch.equal(conditional.scale, drawn.expand(3))
    log_prob.sum().backward()
    assert likelihood.shift.grad is not None
    assert poutine.trace(likelihood).get_trace(loc).nodes["scale"]["value"] != drawn  # the original still draws


def test_marginals_are_pyro_distributions() -> None:
    likelihood = Poisson()
    marginal = likelihood.marginal(torch.zeros(3), torch.ones(3))
    wider = marginal.expand((2, 3))
    assert wider.batch_shape == (2, 3)
    assert wider.sample((4,)).shape == (4, 2, 3)
    torch.testing.assert_close(wider.log_prob(torch.ones(3))[1], marginal.log_prob(torch.ones(3)))
    with poutine.trace() as outer, pyro.plate("outputs", 2, dim=-2), pyro.plate("data", 3, dim=-1):
        pyro.sample("y", marginal)
    assert outer.trace.nodes["y"]["value"].shape == (2, 3)
    with pytest.raises(ValueError, match="within the support"):
        marginal.log_prob(torch.full((3,), 0.5))
    several = Marginal(Categorical(4), torch.zeros(4, 3), torch.ones(4, 3)).expand((2, 3))
    assert several.log_prob(several.sample((5,))).shape == (5, 2, 3)


def test_unknown_keywords_and_the_abstract_base() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'noise'"):
        Gaussian(noise=1.0)  # type: ignore[call-arg]
    with pytest.raises(NotImplementedError, match="Likelihood: expected forward to be defined by the likelihood"):
        Likelihood()(torch.zeros(2))


def test_hyperparameters_that_do_not_fit_f_are_named() -> None:
    with pytest.raises(ValueError, match=r"Gaussian: expected variance, f of shapes that broadcast"):
        Gaussian(torch.ones(3))(torch.zeros(4))
