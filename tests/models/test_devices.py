"""Nothing mixes devices: everything runs on a pretended device, with ``-m gpu`` on a GPU, and agrees with the CPU."""

import copy
from collections import Counter
from contextlib import nullcontext

import pyro
import pytest
import torch
from builders import METHODS, P, build, data
from oracles.pretended_device import DEVICE, pretended_device
from pyro.infer import MCMC, Predictive
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_nngp.distributions import NNGP, PolyaGamma
from pyro_nngp.inference import SGHMC, IntegratedELBO, Minibatch, PolyaGammaGibbs, fit, to_arviz
from pyro_nngp.inference.svi import parameters
from pyro_nngp.inference.svi.train_state import TrainState
from pyro_nngp.kernels import RBF, Matern32, Matern52
from pyro_nngp.likelihoods import Bernoulli, Binomial, Categorical, Gaussian, NegativeBinomial, Poisson, StudentT
from pyro_nngp.models import BSGP, LMC, LOO, VNNGP, CoregionalizedLOO, Vecchia
from pyro_nngp.neighbors.graph import NeighborGraph


@pytest.fixture
def pretended(monkeypatch):
    """The pretended device; it has no sparse tensors, so that gradients of single rows are dense."""
    monkeypatch.setattr(TrainState, "sparse_gradients", lambda self: nullcontext())
    monkeypatch.setattr(parameters, "RowAdam", torch.optim.Adam)
    with pretended_device():
        yield DEVICE


@pytest.fixture(params=["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
def there(request):
    """A device that is not the CPU."""
    if request.param == "pretended":
        return request.getfixturevalue("pretended")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)


def agrees(gp, device, **recipe):
    """Train a copy there and `gp` here, in the same way, and compare predictions.

    A GPU draws rows with a generator of its own: there the copy comes after training, and is trained for itself.
    """
    moved, x_new = copy.deepcopy(gp).to(device), data()[0][:P] + 0.01
    for method in (gp, moved):
        fit(method, 2, batch_size=20, progress=False, **recipe)
    if device.type == "cuda":
        assert moved.predict(x_new.to(device)).log_prob(gp.y[:P].to(device)).isfinite().all()
        moved = copy.deepcopy(gp).to(device)
    y_new = gp.y[:P].mT if isinstance(gp, LMC) else gp.y[:P]
    log_prob = moved.predict(x_new.to(device)).log_prob(y_new.to(device))
    assert log_prob.device == moved.sample(x_new.to(device), 2).device == device
    torch.testing.assert_close(log_prob.cpu(), gp.predict(x_new).log_prob(y_new), rtol=1e-6, atol=1e-8)
    return moved


def test_the_pretended_device_refuses_to_meet_the_cpu(pretended):
    there = pretended
    one, two = torch.ones(3, device=there), torch.ones(3)
    assert (one + 1).device == there
    torch.testing.assert_close((one + 1).cpu(), two + 1)
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        one + two


# Every operation on the pretended device costs: the variants that differ in parts tested elsewhere are slow tests.
VARIANTS = (
    "NPVI",
    "NPVI-NN",
    "NPVI-conditional",
    "NPVI-sites",
    "VNNGP-inducing",
    "VNNGP-sparse",
    "SWSGP",
    "MLLk",
    "Vecchia-inducing",
)
CASES = [pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else []) for name in METHODS]


@pytest.mark.parametrize("name", CASES)
def test_methods_train_and_predict_elsewhere(name, there):
    moved = agrees(build(name), there)
    assert to_arviz(moved, num_samples=2).posterior_predictive.sizes["draw"] == 2


@pytest.mark.parametrize("method", [Vecchia, VNNGP])
def test_a_default_device_changes_nothing(method, pretended):
    """With a kernel of its own, from a start that is found on the CPU."""
    x, y = data()
    here = method(x, y, num_neighbors=8)
    fit(here, 2, progress=False)
    with pretended:
        moved = method(x.to(pretended), y.to(pretended), num_neighbors=8)
        fit(moved, 2, progress=False)
        loc, variance = moved(x[:P].to(pretended))
    torch.testing.assert_close([loc.cpu(), variance.cpu()], list(here(x[:P])), rtol=1e-6, atol=1e-8)


LABELS = {
    "binary": (Bernoulli(), lambda y: (y > y.mean()).double()),
    "binomial": (Binomial(5), lambda y: (2 * y).round().clamp(0, 5)),
    "negative binomial": (NegativeBinomial(4.0), lambda y: (2 * y).round().clamp(min=0)),
    "robust": (StudentT(4.0, 0.1), lambda y: y),
    "classes": (Categorical(3), lambda y: (y > 0.4).long() + (y > 1.0).long()),
}


@pytest.mark.parametrize("kind", [k if k == "classes" else pytest.param(k, marks=pytest.mark.slow) for k in LABELS])
def test_auxiliary_variables_elsewhere(kind, there):
    likelihood, coded = LABELS[kind]
    x, y = data()
    agrees(LOO(x, coded(y), Matern52(2, 1.0, 0.5), copy.deepcopy(likelihood), num_neighbors=8), there)


@pytest.mark.slow
def test_natural_gradients_elsewhere(there):
    x, y = data()
    gp = VNNGP(x, (3 * y).round().clamp(min=0), Matern32(2, 1.0, 0.5), Poisson(), num_neighbors=8)
    agrees(gp, there, solve_every=1)


def test_correlated_outputs_elsewhere(there):
    x, y = data()
    gp = CoregionalizedLOO(x, torch.stack([y, -y], 1), [RBF(2, lengthscale=0.5)], num_neighbors=8)
    agrees(gp, there)


def test_latent_functions_of_several_outputs_elsewhere(there):
    x, y = data()
    kernels, mixing = [Matern52(2, 1.0, 0.5), Matern52(2, 1.0, 0.3)], torch.tensor([[1.0, 0.3], [0.5, -1.0]]).double()
    gp = LMC(x, torch.stack([y, -y], 1), kernels, Gaussian(0.05), mixing=mixing, num_neighbors=8)
    moved = agrees(gp, there)
    if there.type != "cuda":
        loss, other = (IntegratedELBO().loss(each.model, each.guide) for each in (gp, moved))  # of all rows
        assert loss == pytest.approx(other, rel=1e-9)


@pytest.mark.slow
def test_sampled_posteriors_elsewhere(there):
    x, y = data()
    gp = BSGP(x, y, Matern52(2, 1.0, 0.5), Gaussian(0.05), inducing=10).to(there)
    mcmc = MCMC(SGHMC(gp.model, num_steps=1), 2, 1, disable_progbar=True)
    mcmc.run(Minibatch(len(x), 20))
    samples = mcmc.get_samples()
    assert all(value.device == there for value in samples.values())
    assert gp.predict(x[:P].to(there), samples=samples).mean.device == there


def test_priors_elsewhere(there):
    x, _ = data()
    kernel, graph = Matern52(2, lengthscale=0.5), NeighborGraph(x, num_neighbors=8)
    here = NNGP(kernel, graph)
    moved = NNGP(copy.deepcopy(kernel).to(there), copy.deepcopy(graph).to(there))
    f = here.sample()
    torch.testing.assert_close(moved.log_prob(f.to(there)).cpu(), here.log_prob(f))
    assert moved.sample().device == there
    tilt = torch.tensor([0.3, 2.0], device=there)
    assert PolyaGamma(torch.ones_like(tilt), tilt).sample().device == there


def test_gibbs_elsewhere(there):
    x, y = data()
    kernel, graph = Matern52(2, lengthscale=0.5), NeighborGraph(x, num_neighbors=8)
    kernel, graph, labels = kernel.to(there), graph.to(there), (y > y.mean()).double().to(there)

    def model():
        f = pyro.sample("f", NNGP(kernel, graph))
        with pyro.plate("data", len(labels)):
            pyro.sample("y", pyro.distributions.Bernoulli(logits=f), obs=labels)

    mcmc = MCMC(PolyaGammaGibbs(model), 2, 1, disable_progbar=True)
    mcmc.run()
    assert mcmc.get_samples()["f"].device == there
    assert Predictive(model, mcmc.get_samples())()["y"].shape == (2, len(labels))


class Waits(TorchDispatchMode):
    """Operations whose result the host waits for, by the step in which they were made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        reads = (aten._local_scalar_dense, aten.nonzero, aten._unique2, aten.equal, aten._coalesce, aten.masked_select)
        if func.overloadpacket in reads and args[0].device == DEVICE:
            self.made.append(func.overloadpacket)
        if func is aten._to_copy.default and args[0].device != ((kwargs or {}).get("device") or args[0].device):
            self.made.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["VNNGP", "Vecchia"])
def test_a_step_waits_for_the_device_at_its_distinct_rows_and_at_its_loss(name, pretended, monkeypatch):
    """The loss is read by ``tolist``, not counted here; on the torch path a step also asks whether a factor failed.

    Of two steps the second begins an epoch, whose order is copied to the device.
    """
    moved, waits, advance = build(name).to(pretended), Waits(), TrainState.advance

    def counted(run):
        if run.step < 2:
            return advance(run)
        with waits:
            return advance(run)

    monkeypatch.setattr(TrainState, "advance", counted)
    fit(moved, 4, batch_size=20, progress=False, lr=0.01, solve_every=0)
    assert Counter(str(each) for each in waits.made) == {
        "aten._unique2": 2,
        "aten._local_scalar_dense": 2,
        "aten._to_copy": 1,
    }
