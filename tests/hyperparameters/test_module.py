"""Names of what modules own in one Pyro program: collisions are errors, and names cure them."""

import copy
import gc

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI, JitTrace_ELBO, JitTraceMeanField_ELBO, Trace_ELBO
from pyro.infer.mcmc.util import initialize_model
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.ops.integrator import potential_grad
from pyro.optim import Adam
from torch import nn

from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Constant, Matern32
from pyro_nngp.likelihoods import Bernoulli, Gaussian, PolyaGammaBound
from pyro_nngp.models import BSGP, LOO, NPVI, VNNGP, CoregionalizedLOO, Vecchia
from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.variational import Amortized
from pyro_nngp.variational.encoders import SiteEncoder
from pyro_nngp.variational.gaussian import LocalGaussian

X = torch.rand(12, 1, generator=torch.Generator().manual_seed(0))
GRAPH = NeighborGraph(X, 3)
TWICE = r"Matern32: expected .* names that the program has not used, got \['(lengthscale|variance)'\] twice"


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


@pytest.mark.slow
def test_parameters_of_one_name_are_refused_where_one_would_not_be_trained():
    one, two = Matern32(1, lengthscale=0.3), Matern32(1, lengthscale=2.0)
    step = SVI(program(one, two), guide, Adam({"lr": 0.1}), Trace_ELBO()).step
    with pytest.raises(RuntimeError, match=TWICE + r"\. Name one of the two: module\.named\("):
        step()
    two.named("trend")
    assert {"lengthscale", "trend.lengthscale"} <= trace(program(one, two)).keys()
    before = [p.clone() for k in (one, two) for p in k.parameters()]
    step()
    assert all((old != new).all() for old, new in zip(before, (*one.parameters(), *two.parameters()), strict=True))


def test_sites_of_one_name_are_refused():
    prior = dist.LogNormal(0.0, 1.0)
    one, two = (Matern32(1, lengthscale=PyroSample(prior)) for _ in range(2))
    with pytest.raises(RuntimeError, match=TWICE):
        trace(program(one, two))
    with pytest.raises(RuntimeError, match=TWICE + r".*Bind a shared kernel once: cov = kernel\.bind\(\)"):
        trace(program(one, one))

    def shared():
        cov = one.bind()
        program(cov, cov)()

    assert {"lengthscale", "f", "g"} <= trace(shared).keys()


@pytest.mark.slow
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
    samples = {"lengthscale": torch.ones(2)}
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


def after_running(part, *args):
    part(*args)
    return part


def labels():
    return (X[:, 0] > 0.5).float()


def of_another(part):
    """A part of a method that has been trained."""
    gp = LOO(X, X[:, 0], Matern32(1, 1.0, 0.5) + Constant(1, 0.5), num_neighbors=3)
    fit(gp, 1, progress=False)
    return getattr(gp, part)


def bound_of_another():
    gp = VNNGP(X, labels(), Matern32(1, 1.0, 0.5), PolyaGammaBound(Bernoulli()), num_neighbors=3)
    fit(gp, 1, progress=False)
    return gp.likelihood


def amortized():
    gp = NPVI(
        X,
        X[:, 0],
        Matern32(1, 1.0, 0.5) + Constant(1, 0.5),
        Gaussian(),
        num_neighbors=3,
        guide=Amortized(SiteEncoder(1)),
    )
    fit(gp, 1, progress=False)
    return gp.amortize(X + 1, X[:, 0])


def composed():
    return after_running(Matern32(1, 1.0, 0.5) + Constant(1, 0.5), X)


def module_mean():
    linear = PyroModule[nn.Linear](1, 1)
    return after_running(PyroModule[nn.Sequential](linear), X)


BOTH = torch.cat([X, -X], 1)
WITH_USED_PARTS = {
    "kernel": lambda: VNNGP(X, X[:, 0], composed(), Gaussian(), num_neighbors=3),
    "sum of a sum": lambda: VNNGP(X, X[:, 0], composed() + Matern32(1, 1.0, 0.5), Gaussian(), num_neighbors=3),
    "mean": lambda: VNNGP(X, X[:, 0], Matern32(1, 1.0, 0.5), Gaussian(), num_neighbors=3, mean=module_mean()),
    "another's": lambda: VNNGP(X, X[:, 0], of_another("kernel"), of_another("likelihood"), num_neighbors=3),
    "another's bound": lambda: VNNGP(X, labels(), Matern32(1, 1.0, 0.5), bound_of_another(), num_neighbors=3),
    "amortized": amortized,
    "layer": lambda: BSGP(X, X[:, 0], composed(), Gaussian(), inducing=4),
    "layers": lambda: BSGP(X, X[:, 0], composed(), Gaussian(), inducing=4, num_layers=2),
    "coregionalized": lambda: CoregionalizedLOO(X, BOTH, [composed(), composed()], num_neighbors=3),
}


SLOW = ("amortized", "another's", "coregionalized", "layers")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in WITH_USED_PARTS]
)
def test_parts_that_have_run_serve_in_a_method(name):
    gp = WITH_USED_PARTS[name]()
    sites = trace(gp.model)
    names = {name for name, site in sites.items() if site["type"] == "param"}
    assert names
    assert all(name.split(".")[0] in ("kernel", "mean", "likelihood", "layers", "mixing") for name in names)
    if not isinstance(gp, BSGP):
        before = [p.clone() for p in gp.parameters()]
        if getattr(gp, "can_solve", False):
            gp.solve()
        SVI(gp.model, gp.guide, Adam({"lr": 0.1}), Trace_ELBO()).step()
        assert any((old != new).any() for old, new in zip(before, gp.parameters(), strict=True))
    larger = PyroModule()
    larger.inner = WITH_USED_PARTS[name]()
    assert {f"inner.{name}" for name in names} <= trace(larger.inner.model).keys()


def test_a_module_that_runs_keeps_its_names():
    kernel = composed()
    with kernel._pyro_context, pytest.raises(AssertionError, match="executed outside of supermodule"):
        kernel + Matern32(1)


def test_a_shallow_copy_leaves_what_the_running_program_refers_to():
    q = LocalGaussian(3)
    with pyro.poutine.trace(param_only=True) as record, q._pyro_context:
        assert q.loc is q.loc
        copied = copy.copy(q)
    assert record.trace.nodes["loc"]["value"].unconstrained() is q.loc is copied.loc
    copied.__dict__["loc"] = 2.0
    assert isinstance(q.loc, nn.Parameter)


@pytest.mark.parametrize("value", [0.5, 1, torch.tensor(0.5), torch.tensor([0.5, 2.0], dtype=torch.float64)])
def test_a_number_or_a_tensor_is_the_new_value_of_a_parameter(value):
    kernel = Matern32(2, lengthscale=3.0)
    kernel(BOTH)
    param = kernel.lengthscale_unconstrained
    kernel.lengthscale = value
    assert kernel.lengthscale_unconstrained is param
    assert kernel.lengthscale.dtype == torch.float32
    torch.testing.assert_close(kernel.lengthscale.detach(), torch.as_tensor(value, dtype=torch.float32))
    torch.testing.assert_close(kernel(BOTH), Matern32(2, lengthscale=value)(BOTH))
    kernel.lengthscale = torch.tensor(0.7)
    assert kernel.lengthscale.item() == pytest.approx(0.7)


def test_a_number_takes_the_shape_of_the_parameter_and_a_method_predicts_with_it():
    kernel = Matern32(2, lengthscale=torch.ones(2))
    kernel.lengthscale = 0.5
    assert kernel.lengthscale.tolist() == pytest.approx([0.5, 0.5])
    gp = Vecchia(BOTH, X[:, 0], kernel, Gaussian(0.1), num_neighbors=3)
    gp.kernel.variance = 2
    same = Vecchia(BOTH, X[:, 0], Matern32(2, 2.0, torch.full((2,), 0.5)), Gaussian(0.1), num_neighbors=3)
    for one, two in zip(gp(BOTH), same(BOTH), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), torch.tensor([1.0, -1.0])])
def test_values_outside_the_constraint_are_refused(value):
    kernel = Matern32(2)
    with pytest.raises(ValueError, match=r"Matern32: expected lengthscale to be finite and within GreaterThan"):
        kernel.lengthscale = value
    assert kernel.lengthscale.item() == 1.0


def test_a_prior_is_not_replaced_by_a_number():
    kernel = Matern32(2, lengthscale=PyroSample(dist.LogNormal(0.0, 1.0)))
    with pytest.raises(ValueError, match=r"expected lengthscale to keep its prior, got the value 0\.5\. Assign"):
        kernel.lengthscale = 0.5
    kernel.lengthscale = PyroParam(torch.tensor(0.5), torch.distributions.constraints.positive)
    assert kernel.lengthscale.item() == 0.5


@pytest.mark.parametrize("name", ["lengthscale", "variance"])
def test_a_kernel_built_from_a_draw_passes_its_gradient_on(name):
    x = torch.rand(8, 2, dtype=torch.float64)
    graph, f = NeighborGraph(x, num_neighbors=4), torch.randn(8, dtype=torch.float64)

    def log_prob(log_value):
        return NNGP(Matern32(2, **{name: log_value.exp()}), graph).log_prob(f)

    log_value = torch.tensor(-0.5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_prob, log_value)
    (gradient,) = torch.autograd.grad(log_prob(log_value), log_value)
    assert gradient.abs() > 1e-3


def test_nuts_samples_a_lengthscale_of_a_kernel_that_the_model_builds():
    x = torch.rand(8, 2, dtype=torch.float64)
    graph, f = NeighborGraph(x, num_neighbors=4), torch.randn(8, dtype=torch.float64)

    def model(kernel=None):
        if kernel is None:
            lengthscale = pyro.sample("lengthscale", dist.LogNormal(torch.zeros((), dtype=x.dtype), 1.0))
            kernel = Matern32(2, lengthscale=lengthscale)
        pyro.sample("f", NNGP(kernel, graph), obs=f)

    own = Matern32(2).double()
    own.lengthscale = PyroSample(dist.LogNormal(torch.zeros((), dtype=x.dtype), 1.0))
    start = {"lengthscale": torch.tensor(0.3, dtype=torch.float64)}
    gradients = []
    for kernel in (None, own):
        _, potential, transforms, _ = initialize_model(model, (kernel,))
        z = {key: transforms[key](value) for key, value in start.items()}
        gradients.append(potential_grad(potential, z)[0]["lengthscale"])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_draw_out_of_range_is_for_the_sampler_to_reject():
    lengthscale = torch.tensor(1000.0, requires_grad=True).exp()
    assert Matern32(2, lengthscale=lengthscale).lengthscale.isinf()


@pytest.mark.parametrize("elbo", [JitTrace_ELBO, JitTraceMeanField_ELBO])
def test_compiled_elbos_are_refused_with_a_cure(elbo):
    gp = Vecchia(X, X[:, 0], Matern32(1), num_neighbors=3)
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.01}), elbo())
    with pytest.raises(RuntimeError, match=r"that is not traced by torch\.jit.* Take Trace_ELBO"):
        svi.step()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")  # which Pyro calls
def test_compiled_potentials_are_refused_with_a_cure():
    def model():
        pyro.sample("f", NNGP(Matern32(1, lengthscale=pyro.sample("scale", dist.LogNormal(0.0, 1.0))), GRAPH))

    sampler = MCMC(
        NUTS(model, jit_compile=True, ignore_jit_warnings=True), num_samples=1, warmup_steps=1, disable_progbar=True
    )
    with pytest.raises(
        RuntimeError, match=r"Matern32: expected a program that is not traced by torch\.jit.*Trace_ELBO"
    ):
        sampler.run()


def test_a_name_that_no_one_knows_is_a_key_error():
    with pytest.raises(KeyError, match="unheard"):
        pyro.param("unheard")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is one that torch can use")
@pytest.mark.parametrize("move", [lambda kernel: kernel.to("cuda"), lambda kernel: kernel.cuda()])
def test_a_device_that_torch_cannot_use_is_an_error_with_a_cure(move):
    with pytest.raises(ValueError, match=r"Matern32\.(to|cuda): expected device that torch can use here.* install"):
        move(Matern32(1))


def test_a_module_moves_as_torch_does():
    kernel = Matern32(1)
    assert kernel.to(torch.float64).lengthscale.dtype == torch.float64
    assert kernel.to(device="meta", dtype=torch.float32).lengthscale.device.type == "meta"
