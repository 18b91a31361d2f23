"""Priors of processes on minibatches of their conditionals: exact batch laws, and values at all points."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar
from pyro.infer.autoguide import init_to_sample
from pyro.nn import PyroSample

from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import SGHMC, SGMCMC, Minibatch
from pyro_nngp.inference.mcmc.control_variates import AnchoredPotential
from pyro_nngp.inference.mcmc.potential import ModelPotential
from pyro_nngp.inference.mcmc.process_rows import init_near_mean
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Poisson
from pyro_nngp.models import VNNGP, Vecchia
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
N, B, PLACES = 24, 6, 11
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(N, 2, dtype=F64, generator=GENERATOR)
Y = torch.poisson(4 * X.sum(-1), generator=GENERATOR)
GRAPH = NeighborGraph(X, 4)
ELSEWHERE = NeighborGraph(torch.rand(PLACES, 2, dtype=F64, generator=GENERATOR), 3)
PLACE = torch.randint(PLACES, (N,), generator=GENERATOR)


def program(idx=None):
    """Two processes at the data under a common lengthscale, and one at fewer points."""
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(scalar(-1.0), 0.5))
    kernel = Matern32(2, lengthscale=lengthscale)
    f = pyro.sample("f", NNGP(kernel, GRAPH).expand([2]).to_event(1))
    g = pyro.sample("g", NNGP(kernel, ELSEWHERE))
    with pyro.plate("data", N, subsample=idx) as i:
        pyro.sample("y", dist.Poisson((f[0, i] + f[1, i] * X[i, 0] + g[PLACE[i]]).exp()), obs=Y[i])


def method(kind, **options):
    kernel = Matern32(2, variance=scalar(1.0))
    kernel.lengthscale = PyroSample(dist.LogNormal(scalar(-1.0), 0.5))
    return kind(X, Y, kernel, num_neighbors=4, **options)


def potential(kind, model, *args, **options):
    return kind("Test", model, args, {}, init_near_mean, **options)


MODELS = {
    "program": lambda: program,
    "VNNGP": lambda: method(VNNGP, likelihood=Poisson()).model,
    "Vecchia": lambda: method(Vecchia).model,
}


@pytest.mark.parametrize("name", MODELS)
def test_disjoint_minibatches_average_exactly_to_the_full_gradient(name):
    model = MODELS[name]()
    whole = potential(ModelPotential, model)
    part = potential(AnchoredPotential, model, Minibatch(N, B))
    assert part.shapes == whole.shapes
    position = whole.initial() + 0.3 * torch.randn_like(whole.initial())
    torch.testing.assert_close(part.whole_gradient(position), whole.gradient(position)[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["program", "VNNGP"])
def test_chains_side_by_side_have_minibatches_of_their_own(name):
    with pyro.validation_enabled(False):
        here = potential(ModelPotential, MODELS[name](), Minibatch(N, B))
        position = here.initial() + 0.3
        value, gradient, _ = here.gradient(torch.stack([position, position]))
        alone = potential(ModelPotential, MODELS[name](), Minibatch(N, B), vectorize=False)
        torch.manual_seed(0)
        side = here.gradient(torch.stack([position, position + 0.1]))[1]
        torch.manual_seed(0)
        single = alone.gradient(torch.stack([position, position + 0.1]))[1]
    assert value[0] != value[1]
    assert not torch.equal(gradient[0], gradient[1])
    torch.testing.assert_close(side, single, rtol=1e-10, atol=1e-10)


def test_an_update_reads_the_points_of_a_minibatch_and_their_neighbors_alone():
    here = potential(ModelPotential, MODELS["VNNGP"](), Minibatch(N, 2))
    for _ in range(5):
        touched = here.unpack(here.gradient(here.initial() + 0.3)[1])["u"].nonzero().flatten()
        assert 2 <= len(touched) <= 2 * (1 + GRAPH.num_neighbors)


def test_plates_that_subsample_themselves_have_minibatches_of_the_prior():
    def model():
        f = pyro.sample("f", NNGP(Matern32(2, lengthscale=0.3), GRAPH))
        with pyro.plate("data", N, subsample_size=2) as i:
            pyro.sample("y", dist.Poisson(f[i].exp()), obs=Y[i])

    here = potential(ModelPotential, model)
    touched = here.gradient(here.initial() + 0.3)[1].nonzero().flatten()
    assert len(touched) <= 2 + 2 * (1 + GRAPH.num_neighbors)


def test_processes_start_at_their_mean_or_at_a_draw_of_all_points():
    for name, site in (("program", "f"), ("VNNGP", "u")):
        here = potential(ModelPotential, MODELS[name](), Minibatch(N, B))
        assert not here.unpack(here.initial())[site].any()
    sampled = ModelPotential("Test", MODELS["VNNGP"](), (Minibatch(N, B),), {}, init_to_sample)
    assert sampled.unpack(sampled.initial())["u"].count_nonzero() == N


def test_a_method_is_sampled_on_minibatches():
    gp = method(VNNGP, likelihood=Poisson())
    mcmc = SGMCMC(SGHMC(gp.model, 1e-3, adapt=False), 3, 3, num_chains=2, disable_progbar=True)
    mcmc.run(Minibatch(N, B))
    assert mcmc.get_samples()["u"].shape == (6, N)
