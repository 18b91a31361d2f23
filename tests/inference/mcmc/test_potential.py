"""Potentials of models on minibatches, against Pyro's own potential and by hand."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import init_to_uniform, init_to_value
from pyro.infer.mcmc.util import initialize_model
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pyro_nngp.inference import Minibatch
from pyro_nngp.inference.mcmc.potential import ModelPotential

F64 = torch.float64
X = torch.randn(12, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(12, dtype=F64, generator=torch.Generator().manual_seed(1))


def potential(model, *args, init=init_to_uniform, vectorize=True, **kwargs):
    return ModelPotential("Test", model, args, kwargs, init, vectorize)


def zeros(*shape):
    return torch.zeros(shape, dtype=F64)


class Regression(PyroModule):
    """Every kind of site: PyroSample weights, constrained sites, scale, mask, factor, deterministic."""

    def __init__(self):
        super().__init__()
        self.linear = PyroModule[nn.Linear](2, 1)
        self.linear.weight = PyroSample(dist.Normal(zeros(1, 2), 1.0).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(zeros(1), 1.0).to_event(1))

    def forward(self, idx=None):
        scale = pyro.sample("scale", dist.Gamma(torch.tensor(2.0, dtype=F64), 1.0))
        mix = pyro.sample("mix", dist.Dirichlet(torch.ones(3, dtype=F64)))
        corr = pyro.sample("corr", dist.LKJCholesky(2, torch.tensor(2.0, dtype=F64)))
        pyro.factor("tie", -((mix[0] - corr[1, 0]) ** 2))
        pyro.deterministic("twice", 2 * scale)
        with poutine.scale(scale=0.5), poutine.mask(mask=torch.tensor(True)):
            pyro.sample("extra", dist.Normal(scale, 1.0))
        mean = self.linear(X).squeeze(-1)
        with pyro.plate("data", 12, subsample=idx) as i, poutine.mask(mask=Y[i] > -1):
            pyro.sample("y", dist.Normal(mean[i], scale), obs=Y[i])


def test_value_and_gradient_are_those_of_pyro():
    model = Regression()
    params, energy, transforms, _ = initialize_model(model)
    here = potential(model)
    assert here.shapes.keys() == params.keys() == here.transforms.keys()
    position = here.pack(params).detach().requires_grad_()
    expected = energy(here.unpack(position))
    (slope,) = torch.autograd.grad(expected, position)
    value, gradient, _ = here.gradient(position)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-12)
    for name, z in here.unpack(position.detach()).items():
        torch.testing.assert_close(here.transforms[name].inv(z), transforms[name].inv(z))


def test_disjoint_minibatches_average_to_the_full_batch():
    model = Regression()
    position = potential(model).initial()
    full = potential(model).gradient(position)[1]
    parts = [potential(model, torch.arange(k, k + 3)).gradient(position)[1] for k in range(0, 12, 3)]
    torch.testing.assert_close(torch.stack(parts).mean(0), full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vectorize", [True, False])
def test_chains_side_by_side_equal_chains_alone(vectorize):
    with pyro.validation_enabled(False):
        side = potential(Regression(), vectorize=vectorize)
        positions = torch.stack([side.initial() for _ in range(3)])
        values, gradients, _ = side.gradient(positions)
        for c, position in enumerate(positions):
            value, gradient, _ = side.gradient(position)
            torch.testing.assert_close(values[c], value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradients[c], gradient, rtol=1e-12, atol=1e-12)


def subsampled(size):
    z = pyro.sample("z", dist.Normal(zeros(), 1.0))
    with pyro.plate("data", 12, subsample_size=size) as idx:
        pyro.sample("y", dist.Normal(z, 1.0), obs=Y[idx])


def by_index(idx, again=None):
    assert again is None or torch.equal(idx, again)
    z = pyro.sample("z", dist.Normal(zeros(), 1.0))
    with pyro.plate("data", 12, subsample=idx):
        pyro.sample("y", dist.Normal(z, 1.0), obs=Y[idx])


@pytest.mark.parametrize(
    ("model", "args", "kwargs"),
    [
        (subsampled, (4,), {}),
        (by_index, (Minibatch(12, 4),), {}),
        (by_index, (), {"idx": Minibatch(12, 4)}),
    ],
    ids=["plate", "argument", "keyword"],
)
def test_every_evaluation_and_every_chain_draws_a_minibatch_of_its_own(model, args, kwargs):
    with pyro.validation_enabled(False):
        here = potential(model, *args, **kwargs)
        gradients = here.gradient(zeros(2000, 1))[1]
        assert len(set(gradients.flatten().tolist())) > 400  # of 495 batches of 4 in 12
        assert here.gradient(zeros(1))[1] != here.gradient(zeros(1))[1]
    expected = -Y.sum()
    assert abs(gradients.mean() - expected) < 6 * gradients.std() / 2000**0.5


def test_one_minibatch_object_gives_one_index():
    batch = Minibatch(12, 4)
    potential(by_index, batch, again=batch).gradient(zeros(1))
    with pytest.raises(AssertionError):
        potential(by_index, batch, again=Minibatch(12, 4)).gradient(zeros(1))


def test_parameters_have_gradients_of_the_mean_over_chains():
    def model():
        shift = pyro.param("shift", torch.tensor(2.0, dtype=F64), constraint=dist.constraints.positive)
        z = pyro.sample("z", dist.Normal(zeros(), 1.0))
        pyro.sample("y", dist.Normal(z + shift, 1.0), obs=torch.tensor(5.0, dtype=F64))

    with pyro.validation_enabled(False):
        here = potential(model)
        leaf = here.params["shift"]
        _, _, (gradient,) = here.gradient(torch.tensor([[1.0], [2.0]], dtype=F64), (leaf,))
    torch.testing.assert_close(leaf.exp(), torch.tensor(2.0, dtype=F64))
    torch.testing.assert_close(
        gradient, torch.tensor(2 * -1.5, dtype=F64)
    )  # d/dlog shift of mean (5 - z - shift)^2 / 2
    torch.testing.assert_close(here.param_values()["shift"], torch.tensor(2.0, dtype=F64))


def test_parameters_in_subsampled_plates_are_found_whole():
    def model():
        z = pyro.sample("z", dist.Normal(zeros(), 1.0))
        with pyro.plate("data", 10, subsample_size=3):
            shift = pyro.param("shift", zeros(10), event_dim=0)
            pyro.sample("y", dist.Normal(z + shift, 1.0), obs=torch.ones(3, dtype=F64))

    here = potential(model)
    _, _, (gradient,) = here.gradient(zeros(1), (here.params["shift"],))
    assert gradient.shape == (10,)
    assert int((gradient != 0).sum()) == 3


def test_starts_come_from_the_strategy():
    here = potential(subsampled, 4, init=init_to_value(values={"z": torch.tensor(0.25, dtype=F64)}))
    torch.testing.assert_close(here.initial(), torch.tensor([0.25], dtype=F64))


def test_discrete_latent_sites_are_refused():
    def model():
        k = pyro.sample("k", dist.Poisson(zeros() + 1.0))
        pyro.sample("y", dist.Normal(k, 1.0), obs=zeros())

    with pytest.raises(ValueError, match="expected site 'k' to be continuous, got the discrete Poisson"):
        potential(model)


def test_latent_sites_in_subsampled_plates_are_refused():
    def model():
        with pyro.plate("data", 12, subsample_size=4):
            pyro.sample("local", dist.Normal(zeros(), 1.0))

    with pytest.raises(ValueError, match="expected latent site 'local' outside subsampled plates"):
        potential(model)


def test_latent_sites_in_full_plates_are_welcome():
    def model():
        with pyro.plate("groups", 5, subsample=torch.arange(5)):
            pyro.sample("local", dist.Normal(zeros(), 1.0))

    assert potential(model).shapes == {"local": (5,)}


def test_models_without_latent_sites_are_refused():
    with pytest.raises(ValueError, match="expected model with a latent site, got none"):
        potential(lambda: pyro.sample("y", dist.Normal(zeros(), 1.0), obs=zeros()))


def test_sites_of_two_dtypes_are_refused():
    def model():
        pyro.sample("a", dist.Normal(zeros(), 1.0))
        pyro.sample("b", dist.Normal(torch.tensor(0.0), 1.0))

    with pytest.raises(TypeError, match="expected b of the dtype of a"):
        potential(model)


@pytest.mark.parametrize(("start", "actual"), [(lambda site: site, "dict"), (lambda site: torch.ones(2), r"\(2,\)")])
def test_strategies_return_a_tensor_of_the_shape_of_the_site(start, actual):
    def model():
        pyro.sample("z", dist.Normal(zeros(3), 1.0).to_event(1))

    with pytest.raises(
        TypeError, match=rf"init_strategy to return a tensor of shape \(3,\) for site 'z', got {actual}"
    ):
        ModelPotential("test", model, (), {}, start)


def test_models_that_are_nowhere_finite_are_refused():
    def model():
        pyro.sample("z", dist.Normal(zeros(), 1.0))
        pyro.factor("hole", torch.tensor(float("-inf"), dtype=F64))

    with (
        pyro.validation_enabled(False),
        pytest.raises(ValueError, match="find a finite potential in 100 draws, got none; in the last, site 'hole'"),
    ):
        potential(model).initial()


class Shifted(PyroModule):
    """A parameter of torch, which enters Pyro's store when the model reads it; the model empties the store."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(zeros() + 0.3)

    def forward(self):
        pyro.clear_param_store()
        z = pyro.sample("z", dist.Normal(zeros(), 1.0))
        pyro.sample("y", dist.Normal(z + self.shift, 1.0), obs=zeros())


def test_parameters_of_torch_modules_under_vmap():
    model = Shifted()
    with pyro.validation_enabled(False):
        _, gradient, (by_shift,) = potential(model).gradient(zeros(2, 1) + torch.tensor([[0.0], [1.0]]), (model.shift,))
    torch.testing.assert_close(gradient, torch.tensor([[0.3], [2.3]]).to(gradient))
    torch.testing.assert_close(by_shift, torch.tensor(0.8).to(by_shift))


def test_models_that_vmap_cannot_follow_run_one_chain_after_the_other():
    def model():
        z = pyro.sample("z", dist.Normal(zeros(), 1.0))
        pyro.sample("y", dist.Normal(z if z.item() > 0 else -z, 1.0), obs=zeros())

    with pyro.validation_enabled(False):
        with pytest.raises(RuntimeError, match="failed under torch.func.vmap .* pass vectorize=False"):
            potential(model).gradient(zeros(2, 1))
        assert potential(model, vectorize=False).gradient(zeros(2, 1) - 1)[0].shape == (2,)


def test_values_of_other_sites_or_shapes_are_refused():
    here = potential(subsampled, 4)
    with pytest.raises(ValueError, match=r"expected values at the sites \['z'\], got \['w'\]"):
        here.pack({"w": zeros()})
    two = potential(lambda: pyro.sample("z", dist.Normal(zeros(2), 1.0).to_event(1)))
    with pytest.raises(ValueError, match=r"expected z of unconstrained shape \(2,\), got \(3,\)"):
        two.pack({"z": zeros(3)})
