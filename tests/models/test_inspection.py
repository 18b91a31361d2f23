"""What a model depends on, as Pyro's inspection sees it, and Pyro's handlers on every method."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Importance, Predictive
from pyro.infer.autoguide import AutoNormal
from pyro.infer.inspect import get_dependencies, get_model_relations
from pyro.nn import PyroSample
from torch.testing import assert_close

import pyro_nngp as nngp
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, Poisson

X = torch.rand(30, 2, generator=torch.Generator().manual_seed(0))
Y = (10 * X[:, 0]).floor()
HYPERPARAMETERS = {"kernel.variance", "kernel.lengthscale"}

METHODS = {  # and the site that the kernel stands behind
    "Vecchia": (lambda k: nngp.Vecchia(X, Y, k, Gaussian(), num_neighbors=5), "y"),
    "MLLk": (lambda k: nngp.MLLk(X, Y, k, Gaussian(), num_neighbors=5), "y"),
    "LOO": (lambda k: nngp.LOO(X, (Y > 4).float(), k, Bernoulli(), num_neighbors=5), "y"),
    "VNNGP": (lambda k: nngp.VNNGP(X, Y, k, Poisson(), num_neighbors=5), "u"),
    "VNNGP with inducing points": (lambda k: nngp.VNNGP(X, Y, k, Poisson(), num_neighbors=5, inducing=12), "f"),
    "NPVI": (lambda k: nngp.NPVI(X, Y, k, Poisson(), num_neighbors=5), "u"),
    "SVGP": (lambda k: nngp.SVGP(X, Y, k, Poisson(), inducing=8), "f"),
    "SWSGP": (lambda k: nngp.SWSGP(X, Y, k, Poisson(), inducing=10, num_neighbors=4), "u"),
    "LMC": (lambda k: nngp.LMC(X, torch.stack([Y, -Y], 1), [k], num_neighbors=5), "u"),
    "CoregionalizedLOO": (lambda k: nngp.CoregionalizedLOO(X, torch.stack([Y, -Y], 1), [k], num_neighbors=5), "y"),
    "BSGP": (lambda k: nngp.BSGP(X, Y, k, Poisson(), inducing=8), "y"),
}


def full(gp, name):
    """Name of the site of a hyperparameter."""
    parts = {nngp.LMC: "kernel.0.", nngp.CoregionalizedLOO: "kernel.0.", nngp.BSGP: "layers.0.kernel."}
    return parts.get(type(gp), "kernel.") + name


def hyperparameters(gp):
    return {full(gp, "variance"), full(gp, "lengthscale")}


def guide_of(gp):
    return gp.guide if hasattr(gp, "guide") else AutoNormal(gp.model, init_loc_fn=gp.init_strategy)


def prior_kernel():
    return Matern52(2, PyroSample(dist.LogNormal(0.0, 1.0)), PyroSample(dist.LogNormal(-1.0, 0.5)))


SLOW = ("NPVI", "MLLk", "CoregionalizedLOO")  # whose relatives are among the others


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in METHODS])
def case(request):
    build, site = METHODS[request.param]
    return build, site


def test_the_process_depends_on_its_hyperparameters(case):
    build, site = case
    gp, plain = build(prior_kernel()), build(Matern52(2))
    assert set(get_model_relations(gp.model)["sample_sample"][site]) >= hyperparameters(gp)
    assert set(get_dependencies(gp.model)["prior_dependencies"][site]) >= hyperparameters(gp)
    assert set(get_model_relations(plain.model)["sample_param"][site]) >= hyperparameters(plain)


def test_a_program_with_a_reparametrized_process_depends_on_them_too():
    graph = nngp.NeighborGraph(X, 5)

    def model():
        f = pyro.sample("f", nngp.NNGP(prior_kernel().named("kernel"), graph))
        pyro.sample("y", dist.Poisson(f.exp()).to_event(1), obs=Y)

    assert set(get_model_relations(model)["sample_sample"]["f"]) == HYPERPARAMETERS
    white = poutine.reparam(model, config={"f": nngp.NNGPReparam()})
    assert set(get_model_relations(white)["sample_sample"]["y"]) == {*HYPERPARAMETERS, "f_white"}


@pytest.mark.filterwarnings("ignore:.* is the prior, since solve")  # of a guide that was not trained
def test_handlers_replace_values_and_hide_sites(case):
    build, _ = case
    gp, scale = build(prior_kernel()), torch.tensor(0.3)
    lengthscale, variance = full(gp, "lengthscale"), full(gp, "variance")
    fixed = poutine.trace(poutine.condition(gp.model, {lengthscale: scale})).get_trace()
    assert fixed.nodes[lengthscale]["is_observed"]
    assert_close(fixed.nodes[lengthscale]["value"], scale)
    cut = poutine.trace(poutine.do(gp.model, {lengthscale: scale})).get_trace()
    assert variance in cut.nodes
    guide = poutine.trace(guide_of(gp)).get_trace()
    replayed = poutine.trace(poutine.replay(gp.model, guide)).get_trace()
    for name, site in guide.nodes.items():
        if site["type"] == "sample" and not site["is_observed"] and name in replayed.nodes:
            assert_close(replayed.nodes[name]["value"], site["value"])
    hidden = poutine.trace(poutine.block(gp.model, hide=[variance])).get_trace()
    assert variance not in hidden.nodes
    assert "y" in hidden.nodes


@pytest.mark.filterwarnings("ignore:.* is the prior, since solve")
def test_importance_weights_are_those_of_model_and_guide(case):
    build, _ = case
    gp = build(prior_kernel())
    q = guide_of(gp)
    q()
    pyro.set_rng_seed(1)
    posterior = Importance(gp.model, q, num_samples=1).run()
    pyro.set_rng_seed(1)
    guide = poutine.trace(q).get_trace()
    trace = poutine.trace(poutine.replay(gp.model, guide)).get_trace()
    assert_close(posterior.log_weights[0], trace.log_prob_sum() - guide.log_prob_sum())
    assert set(trace.nodes) >= hyperparameters(gp)
    assert Predictive(gp.model, guide=q, num_samples=2)().keys() >= hyperparameters(gp)


@pytest.mark.parametrize(("name", "sizes"), [("LMC", "T=2, L=1,"), ("CoregionalizedLOO", "T=2, Q=1,")])
def test_sizes_count_outputs_and_latent_functions(name, sizes):
    assert sizes in repr(METHODS[name][0](Matern52(2)))
