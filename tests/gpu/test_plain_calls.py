"""Everything a user calls, on a GPU, without settings: the same answers as on the CPU, and results that stay there."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import F64, surface
from pyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from pyro.nn import PyroSample
from pyro.optim import ClippedAdam

import pyro_nngp as nngp
from pyro_nngp.inference import Checkpoint, QuickNUTS, to_arviz
from pyro_nngp.kernels import RBF, Matern32, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, NegativeBinomial, Poisson, StudentT
from pyro_nngp.loadings import FactorLoadings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
THERE = torch.device("cuda")
COUNTS, LABELS = (lambda y: (4 * y.exp()).round()), (lambda y: (y > 0).to(y.dtype))
PLAIN = {
    "Vecchia": (nngp.Vecchia, None, lambda y: y),
    "VNNGP": (nngp.VNNGP, None, lambda y: y),
    "labels": (nngp.VNNGP, Bernoulli, LABELS),
    "counts": (nngp.VNNGP, Poisson, COUNTS),
    "dispersed": (nngp.VNNGP, NegativeBinomial, COUNTS),
    "robust": (nngp.VNNGP, StudentT, lambda y: y),
    "LOO": (lambda x, y: nngp.LOO(x, y, Matern52(2)), None, lambda y: y),  # its smoothness would run away
    "LOO of labels": (nngp.LOO, Bernoulli, LABELS),
    "NPVI": (nngp.NPVI, None, lambda y: y),
    "SVGP": (nngp.SVGP, None, lambda y: y),
    "SWSGP": (nngp.SWSGP, None, lambda y: y),
    "two outputs": (nngp.VNNGP, None, lambda y: torch.stack([y, -2 * y], -1)),
    "full scale": (lambda x, y, **given: nngp.Vecchia(x, y, inducing=20, **given), None, lambda y: y),
}
STEPPED = "NPVI", "SVGP", "SWSGP", "LOO of labels"
SOLVED = [name for name in PLAIN if name not in STEPPED]  # fits draw no random numbers, and have one optimum


def plain(name, device="cpu", dtype=F64):
    """A method on 400 points, with its inputs on a device, and new points there."""
    method, likelihood, coded = PLAIN[name]
    x, y, x_new = surface(Gaussian, 400)
    given = {} if likelihood is None else {"likelihood": likelihood()}
    torch.manual_seed(0)
    moved = x.to(device, dtype), coded(y).to(device, dtype)
    return method(*moved, **given), x_new.to(device, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, F64) for name in SOLVED), ("Vecchia", torch.float32), ("labels", torch.float32)]
)
def test_the_plain_call_gives_what_it_gives_on_the_cpu(name, dtype):
    (here, x_new), (there, x_there) = plain(name), plain(name, THERE, dtype)
    for gp in (here, there):
        nngp.fit(gp, progress=False)
    with torch.no_grad():
        (mean, variance), (mean_there, variance_there) = here(x_new), there(x_there)
        draws = there.sample(x_there, 3)
    assert mean_there.device.type == draws.device.type == "cuda"
    assert ((mean_there.cpu() - mean).abs() < 0.3 * variance.sqrt() + 0.02).all()
    assert ((variance_there.cpu() / variance).log().abs() < 0.4).all()


@pytest.mark.parametrize("name", STEPPED)
def test_steps_go_down_on_the_device(name):
    gp, x_new = plain(name, THERE)
    losses = nngp.fit(gp, 20, lr=0.03, progress=False).losses  # after 20, LOO solves for its sites anew
    assert losses[-5:].mean() < losses[:5].mean()
    assert gp(x_new)[0].isfinite().all()


def test_fit_moves_to_the_device():
    gp, x_new = plain("Vecchia")
    nngp.fit(gp, 3, device="cuda", progress=False)
    assert gp(x_new.to(THERE))[0].is_cuda
    assert gp.cpu()(x_new)[0].device.type == "cpu"


def test_a_run_resumes_with_the_same_bits(tmp_path):
    def run(steps, name):
        gp, x_new = plain("VNNGP", THERE)
        checkpoint = Checkpoint(tmp_path / name, every=5)
        nngp.fit(gp, steps, batch_size=50, lr=0.01, checkpoint=checkpoint, progress=False)
        return gp(x_new)

    run(10, "stopped")
    torch.testing.assert_close(run(20, "stopped")[0], run(20, "whole")[0], rtol=1e-3, atol=1e-3)


def test_a_file_is_read_on_either_device(tmp_path):
    gp, x_new = plain("labels", THERE)
    nngp.fit(gp, 5, progress=False)
    gp.save(tmp_path / "gp.safetensors")
    mean = gp(x_new)[0]
    there, here = nngp.load(tmp_path / "gp.safetensors", device="cuda"), nngp.load(tmp_path / "gp.safetensors")
    torch.testing.assert_close(there(x_new)[0], mean)
    torch.testing.assert_close(here(x_new.cpu())[0], mean.cpu())


def test_rows_are_appended_and_conditioned_on():
    x, y, x_new = (value.to(THERE) for value in surface(Gaussian, 200))
    gp = nngp.Vecchia(x[:150], y[:150])
    nngp.fit(gp, progress=False)
    more = gp.condition_on(x[150:], y[150:])
    gp.extend(x[150:], y[150:])
    torch.testing.assert_close(more(x_new), gp(x_new), rtol=1e-4, atol=1e-5)
    assert gp.subset(torch.arange(50, device=THERE))(x_new)[0].is_cuda


def test_reports_come_from_the_device():
    gp, _ = plain("VNNGP", THERE)
    nngp.fit(gp, progress=False)
    assert nngp.cross_validate(gp, 3, progress=False) is not None
    assert to_arviz(gp, num_samples=3).posterior_predictive.sizes["draw"] == 3
    grid = {"east": torch.linspace(0, 1, 8).numpy(), "north": torch.linspace(0, 1, 6).numpy()}
    field = nngp.predict_grid(gp, grid, columns=["east", "north"], num_draws=2, quantile_levels=0.9, progress=False)
    assert field["mean"].size == 48


def test_outputs_of_several_kinds():
    x, y, x_new = surface(Gaussian, 120)
    both = torch.stack([COUNTS(y), 3 * y], -1)
    both[60:, 0] = torch.nan
    fitted = []
    for device in ("cpu", "cuda"):
        gp = nngp.LMC(x.to(device), both.to(device), kernels=2, likelihood=[Poisson(), Gaussian()])
        nngp.fit(gp, progress=False)
        fitted.append(gp(x_new.to(device)))
    torch.testing.assert_close([t.cpu() for t in fitted[1]], list(fitted[0]), rtol=0.1, atol=0.05)


def test_factors_of_many_outputs():
    x, y, x_new = surface(Gaussian, 80)
    weights = torch.linspace(-1, 1, 6, dtype=F64)
    labels = ((y[:, None] * weights + 0.3 * torch.randn(80, 6, dtype=F64)) > 0).to(F64)
    kernels = [Matern32(2, lengthscale=0.3) for _ in range(2)]
    gp = nngp.LMC(x.to(THERE), labels.to(THERE), kernels=kernels, likelihood=Bernoulli(), mixing=FactorLoadings(6, 2))
    nngp.fit(gp, progress=False)
    assert gp(x_new.to(THERE))[0].isfinite().all()


def program(device):
    """A program with a coefficient, groups and a process over 60 places."""
    x, y, _ = surface(Gaussian, 60)
    graph = nngp.NeighborGraph(x.to(device), num_neighbors=10)
    counts = torch.poisson((y + 1).exp()).to(device)

    def number(value):
        return torch.tensor(value, dtype=F64, device=device)

    def model(observed=counts):
        lengthscale = pyro.sample("lengthscale", dist.LogNormal(number(-1.0), 0.5))
        slope = pyro.sample("slope", dist.Normal(number(0.0), 2.0))
        f = pyro.sample("f", nngp.NNGP(Matern32(2, lengthscale=lengthscale), graph))
        with pyro.plate("sites", 60):
            pyro.sample("counts", dist.Poisson((f + slope * graph.x[:, 0]).exp()), obs=observed)

    return model


def test_a_program_of_ones_own_with_auto_nngp():
    medians = []
    for device in ("cpu", "cuda"):
        pyro.clear_param_store()
        torch.manual_seed(0)
        guide = nngp.AutoNNGP(program(device))
        svi = SVI(program(device), guide, ClippedAdam({"lr": 0.02}), Trace_ELBO())
        for _ in range(100):
            svi.step()
        medians.append(guide.median())
    assert all(value.is_cuda for value in medians[1].values())
    torch.testing.assert_close(medians[1]["f"].cpu(), medians[0]["f"], rtol=0, atol=0.2)
    drawn = Predictive(program(THERE), guide=guide, num_samples=3)(None)
    assert drawn["counts"].is_cuda


@pytest.mark.parametrize("kernel", [QuickNUTS, pyro.infer.NUTS])
def test_nuts_on_a_program(kernel):
    mcmc = MCMC(kernel(program(THERE)), num_samples=5, warmup_steps=5, disable_progbar=True)
    mcmc.run()
    assert all(value.is_cuda for value in mcmc.get_samples().values())
    assert to_arviz(mcmc).posterior.sizes["draw"] == 5


def test_priors_on_hyperparameters():
    x, y, x_new = (value.to(THERE) for value in surface(Gaussian, 120))
    prior = dist.LogNormal(torch.tensor(-1.0, dtype=F64, device=THERE), 1.0)
    for method in (nngp.Vecchia, nngp.VNNGP):
        kernel = Matern52(2, lengthscale=PyroSample(prior)).to(THERE)
        gp = method(x, y, kernel, Gaussian(0.1).to(x), num_neighbors=8)
        nngp.fit(gp, 20, progress=False)
        assert gp(x_new)[0].isfinite().all()


def test_sums_of_kernels_and_columns():
    x, y, x_new = surface(Gaussian, 120)
    kernel = RBF(2, lengthscale=0.3) + Matern32(2, lengthscale=0.1, variance=0.1)
    gp = nngp.VNNGP(x, y, kernel, num_neighbors=8)
    there = copy.deepcopy(gp).to(THERE)
    for each in (gp, there):
        nngp.fit(each, progress=False)
    torch.testing.assert_close(there(x_new.to(THERE))[0].cpu(), gp(x_new)[0], rtol=0, atol=0.05)
