"""NUTS on recorded potentials draws what NUTS of Pyro draws."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar
from pyro.infer import MCMC, NUTS, Predictive
from pyro.infer.autoguide import init_to_median
from pyro.infer.mcmc.util import initialize_model
from pyro.nn import PyroModule, PyroSample
from torch.distributions import constraints

from pyro_nngp.distributions import NNGP, NNGPReparam
from pyro_nngp.inference import QuickNUTS, Recorder, to_arviz
from pyro_nngp.inference.mcmc.quick_nuts import RecordedPotential
from pyro_nngp.kernels import RBF, Matern12, Matern32, Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.models import VNNGP, Vecchia
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
N = 30
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(N, 2, dtype=F64, generator=GENERATOR)
Y = torch.poisson(2 + X.sum(-1), generator=GENERATOR)
GRAPH = NeighborGraph(X, 5)


def own_program(y=Y):
    variance = pyro.sample("variance", dist.LogNormal(scalar(0.0), 1.0))
    lengthscale = pyro.sample("lengthscale", dist.InverseGamma(scalar(3.0), scalar(1.0)))
    f = pyro.sample("f", NNGP(Matern32(2, variance=variance, lengthscale=lengthscale), GRAPH))
    pyro.deterministic("rate", f.exp())
    with pyro.plate("data", N):
        pyro.sample("y", dist.Poisson(f.exp()), obs=y)


def two_sites():
    scale = pyro.sample("scale", dist.HalfNormal(scalar(1.0)).expand([2]).to_event(1))
    f = pyro.sample("f", NNGP(Matern12(2, lengthscale=scale), GRAPH))
    g = pyro.sample("g", NNGP(RBF(1, active_dims=[0]) + Matern52(1, lengthscale=scale[0], active_dims=[1]), GRAPH))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(f, g.exp()), obs=Y)


def several_functions():
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3, dtype=F64)))
    root = pyro.sample("root", dist.LKJCholesky(3, scalar(2.0)))
    with pyro.plate("functions", 3):
        f = pyro.sample("f", NNGP(Matern32(2, lengthscale=0.3), GRAPH).expand([3]))
    mixed = (weights[:, None] * (root @ f)).sum(0)
    low = pyro.sample("low", dist.Uniform(scalar(-2.0), scalar(3.0)))
    with pyro.plate("data", N), pyro.poutine.scale(scale=2.0):
        pyro.sample("y", dist.NegativeBinomial(scalar(4.0), logits=mixed + low), obs=Y)


def mixture():
    level = pyro.sample("level", dist.Normal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
    with pyro.plate("data", N):
        kind = pyro.sample("kind", dist.Categorical(scalar([0.3, 0.7])))
        pyro.sample("y", dist.Poisson(level[kind].exp()), obs=Y)


class Module(PyroModule):
    def __init__(self):
        super().__init__()
        self.kernel = Matern52(2, variance=PyroSample(dist.LogNormal(scalar(0.0), 1.0)))
        self.slope = PyroSample(dist.StudentT(scalar(3.0), 0.0, 1.0).expand([2]).to_event(1))

    def forward(self):
        f, slope = pyro.sample("f", NNGP(self.kernel, GRAPH)), self.slope
        with pyro.plate("data", N):
            pyro.sample("y", dist.Poisson((f + X @ slope).exp()), obs=Y)


def vnngp():
    kernel = Matern32(2, scalar(1.0), PyroSample(dist.LogNormal(scalar(0.0), 1.0)))
    return VNNGP(X, Y, kernel=kernel, likelihood=Poisson(), num_neighbors=5).model


def vecchia():
    kernel = Matern32(2, scalar(1.0), PyroSample(dist.LogNormal(scalar(0.0), 1.0)))
    return Vecchia(X, Y, kernel, Gaussian(scalar(0.5)), num_neighbors=5).model


def value_and_gradient(potential, values):
    leaves = [value.detach().requires_grad_() for value in values.values()]
    value = potential(dict(zip(values, leaves, strict=True)))
    return (value.detach(), *torch.autograd.grad(value, leaves))


PROGRAMS = {
    "own": lambda: own_program,
    "two sites": lambda: two_sites,
    "several functions": lambda: several_functions,
    "enumerated mixture": lambda: mixture,
    "module": Module,
    "VNNGP": vnngp,
    "Vecchia": vecchia,
}


@pytest.mark.parametrize(
    ("name", "native"), [*((name, "1") for name in PROGRAMS), pytest.param("two sites", "0", marks=pytest.mark.slow)]
)
def test_the_potential_is_that_of_pyro(name, native, monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", native)
    pyro.set_rng_seed(0)
    with pyro.validation_enabled(False):
        start, potential, _, _ = initialize_model(QuickNUTS(PROGRAMS[name]()).model)
        recorded = RecordedPotential(potential, start)
        assert recorded.tape is not None
        for _ in range(3):
            values = {site: 0.3 * torch.randn_like(z) + z for site, z in start.items()}
            expected = value_and_gradient(potential, values)
            for now, then in zip(value_and_gradient(recorded, values), expected, strict=True):
                torch.testing.assert_close(now, then, rtol=1e-13, atol=1e-13)


def run(kernel, num_samples=4, warmup_steps=4, **options):
    pyro.set_rng_seed(1)
    mcmc = MCMC(kernel, num_samples, warmup_steps, disable_progbar=True, **options)
    mcmc.run()
    return mcmc


def test_chains_are_those_of_pyro():
    white = pyro.poutine.reparam(own_program, config={"f": NNGPReparam()})
    quick = run(QuickNUTS(own_program, max_tree_depth=4))
    plain = run(NUTS(white, max_tree_depth=4, init_strategy=init_to_median))
    assert quick.get_samples().keys() == {"f_white", "lengthscale", "variance"}
    for name, draws in plain.get_samples().items():
        torch.testing.assert_close(quick.get_samples()[name], draws, rtol=1e-9, atol=1e-9)


def test_samples_are_constrained_and_give_the_original_site():
    kernel = QuickNUTS(own_program, max_tree_depth=2)
    mcmc = run(kernel, 3, 3, hook_fn=Recorder())
    draws = mcmc.get_samples()
    assert (draws["variance"] > 0).all()
    found = Predictive(kernel.model, draws, return_sites=("f", "rate", "y"))()
    for i, (white, variance, lengthscale) in enumerate(
        zip(draws["f_white"], draws["variance"], draws["lengthscale"], strict=True)
    ):
        prior = NNGP(Matern32(2, variance=variance, lengthscale=lengthscale), GRAPH)
        torch.testing.assert_close(found["f"][i].flatten(), prior.color(white))
    exported = to_arviz(mcmc, progress=False)
    torch.testing.assert_close(torch.tensor(exported.posterior["f"].values[0]), found["f"].reshape(-1, N))
    assert {"tree_depth", "energy", "step_size", "lp"} <= set(exported.sample_stats)


@pytest.mark.slow
def test_chains_in_several_processes(monkeypatch):
    monkeypatch.setattr("pyro.infer.mcmc.api.mp.cpu_count", lambda: 3)  # Pyro keeps one for itself
    draws = run(QuickNUTS(own_program, max_tree_depth=4), num_chains=2).get_samples(group_by_chain=True)
    assert draws["f_white"].shape == (2, 4, N)
    assert not torch.equal(draws["variance"][0], draws["variance"][1])


def test_another_branch_runs_the_program():
    def program():
        x = pyro.sample("x", dist.Normal(scalar(0.0), 1.0))
        pyro.factor("corner", -x.abs() if x > 0 else -3 * x.square())

    start, potential, _, _ = initialize_model(program)
    recorded = RecordedPotential(potential, start)
    for x in (-1.0, -0.2, 0.2, 1.0):
        expected = 0.5 * x**2 + 0.5 * math.log(2 * math.pi) + (x if x > 0 else 3 * x**2)
        slope = x + (1 if x > 0 else 6 * x)
        found = value_and_gradient(recorded, {"x": scalar(x)})
        torch.testing.assert_close(torch.stack(found), scalar([expected, slope]))


def test_a_program_that_one_run_does_not_determine_runs_as_usual():
    def program():
        x = pyro.sample("x", dist.Normal(scalar(0.0), 1.0))
        pyro.factor("float", -scalar(x.item() ** 2) * x)

    start, potential, _, _ = initialize_model(program)
    with pytest.warns(
        UserWarning, match="got one that reads a number out of a tensor. .*The program is run at every step"
    ):
        recorded = RecordedPotential(potential, start)
    assert recorded.tape is None
    expected = value_and_gradient(potential, {"x": scalar(0.7)})
    assert value_and_gradient(recorded, {"x": scalar(0.7)}) == expected


def changing(when):
    counter = itertools.count()

    def potential(values):
        return values["x"].square().sum() * (1.0 if next(counter) < when else 2.0)

    return potential


def test_a_program_that_changes_is_noticed():
    with pytest.warns(UserWarning, match="same in each run, got another potential in a second run at the same values"):
        assert RecordedPotential(changing(2), {"x": torch.ones(2)}).tape is None
    recorded = RecordedPotential(changing(4), {"x": torch.ones(2)}, check_every=20)
    assert recorded.tape is not None
    for _ in range(17):
        recorded.evaluate([torch.full((2,), 3.0)])
    with pytest.raises(RuntimeError, match="QuickNUTS: expected a program that is the same in each run"):
        recorded.evaluate([torch.full((2,), 3.0)])


def test_constraints_outside_the_program_of_the_user_are_kept():
    pyro.clear_param_store()

    def program():
        rate = pyro.param("rate", scalar(2.0), constraint=constraints.positive)
        pyro.sample("x", dist.Exponential(rate))

    draws = run(QuickNUTS(program), 10, 5).get_samples()
    assert (draws["x"] > 0).all()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (3, {}, "expected model to be callable, got int"),
        (own_program, {"jit_compile": True}, "expected options without a potential and its compilation"),
        (own_program, {"potential_fn": abs}, "expected options without a potential and its compilation"),
    ],
)
def test_other_arguments(model, options, message):
    with pytest.raises(TypeError, match=f"QuickNUTS: {message}"):
        QuickNUTS(model, **options)


def test_hyperparameters_that_stay_at_their_starts_are_reported():
    kernel = Matern32(2, lengthscale=PyroSample(dist.LogNormal(scalar(0.0), 1.0)))
    gp = Vecchia(X, Y, kernel, Gaussian(scalar(0.5)), num_neighbors=5)
    with pytest.raises(TypeError, match=r"QuickNUTS: expected model to be a Pyro program, got a method, Vecchia\."):
        QuickNUTS(gp)
    with pytest.warns(UserWarning, match=r"QuickNUTS: \['kernel.variance'\] have no priors .* give them priors\."):
        QuickNUTS(gp.model)
