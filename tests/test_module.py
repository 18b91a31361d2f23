"""Names of what modules own in one Pyro program: collisions are errors, and names cure them."""

import gc

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroSample
from pyro.optim import Adam

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import Matern32
from pyro_nngp.models import Vecchia
from pyro_nngp.neighbors import NeighborGraph

X = torch.rand(12, 1)
GRAPH = NeighborGraph(X, 3)
TWICE = r"Matern32: expected .* names that the program has not used, got \['lengthscale'{}\] twice"


def program(one, two):
    def model():
        f = pyro.sample("f", NNGP(one, GRAPH)) + pyro.sample("g", NNGP(two, GRAPH))
        pyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=torch.sin(5 * X[:, 0]))

    return model


def guide():
    for name in "fg":
        pyro.sample(name, dist.Normal(torch.zeros(12), 0.1).to_event(1))


def trace(model):
    return pyro.poutine.trace(model).get_trace().nodes


def test_parameters_of_one_name_are_refused_where_one_would_not_be_trained():
    one, two = Matern32(1, lengthscale=0.3), Matern32(1, lengthscale=2.0)
    step = SVI(program(one, two), guide, Adam({"lr": 0.1}), Trace_ELBO()).step
    with pytest.raises(RuntimeError, match=TWICE.format(", 'variance'") + r"\. Name one of the two: module\.named\("):
        step()
    two.named("trend")
    assert {"lengthscale", "trend.lengthscale"} <= trace(program(one, two)).keys()
    before = [p.clone() for k in (one, two) for p in k.parameters()]
    step()
    assert all((old != new).all() for old, new in zip(before, (*one.parameters(), *two.parameters()), strict=True))


def test_sites_of_one_name_are_refused():
    prior = dist.LogNormal(0.0, 1.0)
    one, two = (Matern32(1, lengthscale=PyroSample(prior)) for _ in range(2))
    with pytest.raises(RuntimeError, match=TWICE.format("")):
        trace(program(one, two))
    with pytest.raises(RuntimeError, match=TWICE.format("") + r".*serves twice is bound once: cov = kernel\.bind\(\)"):
        trace(program(one, one))

    def shared():
        cov = one.bind()
        program(cov, cov)()

    assert {"lengthscale", "f", "g"} <= trace(shared).keys()


def test_one_kernel_may_be_read_twice_and_another_after_it_is_gone():
    one = Matern32(1)
    assert {"lengthscale", "f", "g"} <= trace(program(one, one)).keys()

    def rebuilt():
        for scale in (0.5, 2.0):
            Matern32(1, lengthscale=scale)(X)
            gc.collect()

    assert trace(rebuilt)["lengthscale"]["value"] == 2.0


def test_a_prior_belongs_to_one_method():
    kernel = Matern32(1, lengthscale=PyroSample(dist.LogNormal(0.0, 1.0)))
    first = Vecchia(X, X[:, 0], kernel, num_neighbors=3)
    second = Vecchia(X, X[:, 0], kernel, num_neighbors=3)
    samples = {"kernel.lengthscale": torch.ones(2)}
    for call in (first.model, first.guide, lambda: first(X), lambda: first.predict(X, samples=samples)):
        with pytest.raises(ValueError, match=r"expected the prior of 'lengthscale' in one method alone.*deepcopy"):
            call()
    second.model()
    second.named("renamed")(X)
    assert "renamed.kernel.lengthscale" in trace(second.model)


def test_other_errors_of_a_program_stay_what_they_are():
    class Broken(Matern32):
        def bind(self):
            raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="^of its own$"):
        Broken(1)(X)
