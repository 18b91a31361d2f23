"""Programs in the fixed coordinates of a guide: the posterior that they had, on minibatches, with a better shape."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide import init_to_sample
from pyro.nn import PyroSample
from torch.distributions import biject_to

from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import SGHMC, SGMCMC, AutoNNGP, Minibatch, to_arviz
from pyro_nngp.inference.autoguide.fixed_transport import FixedTransport
from pyro_nngp.inference.autoguide.transport import SITE
from pyro_nngp.inference.mcmc.control_variates import AnchoredPotential
from pyro_nngp.inference.mcmc.potential import ModelPotential
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Poisson
from pyro_nngp.models import VNNGP
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
N, B = 30, 6
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(N, 2, dtype=F64, generator=GENERATOR)
GRAPH = NeighborGraph(X, 5)
Y = torch.poisson(6 * X.sum(-1), generator=GENERATOR)
ROWS = torch.arange(N)
SUPPORTS = {
    "variance": dist.constraints.positive,
    "lengthscale": dist.constraints.positive,
    "slopes": dist.constraints.real_vector,
    "f": dist.constraints.real_vector,
}


def counts(idx):
    variance = pyro.sample("variance", dist.LogNormal(scalar(0.0), 0.5))
    slopes = pyro.sample("slopes", dist.Normal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(scalar(-1.0), 0.5))
    f = pyro.sample("f", NNGP(Matern32(2, variance=variance, lengthscale=lengthscale), GRAPH))
    with pyro.plate("data", N, subsample=idx):
        pyro.sample("y", dist.Poisson((X[idx] @ slopes + f[idx]).exp()), obs=Y[idx])


@pytest.fixture(scope="module")
def fitted():
    pyro.set_rng_seed(0)
    program = FixedTransport("Test", counts, AutoNNGP(counts))
    program.prepare(ROWS)
    return program


def potential(kind, program, *args):
    return kind("Test", program, args, {}, init_to_sample)


def unconstrained(values):
    """Values of the program's sites in one unconstrained vector, and the log volume of the map from there."""
    vector, volume = [], 0.0
    for name, support in SUPPORTS.items():
        part = biject_to(support).inv(values[name])
        vector.append(part.flatten())
        volume += biject_to(support).log_abs_det_jacobian(part, values[name]).sum()
    return torch.cat(vector), volume


@pytest.mark.slow
def test_density_is_that_of_the_program_times_the_volume_of_the_map(fitted):
    here = potential(ModelPotential, fitted, ROWS)
    steps, excess = 1e-6 * torch.eye(N + 4, dtype=F64), []

    def originals(white):
        return fitted.original_values({SITE: white}, ROWS)

    for seed in range(2):
        white = torch.randn(N + 4, dtype=F64, generator=torch.Generator().manual_seed(seed))
        ends = [(unconstrained(originals(white + s))[0], unconstrained(originals(white - s))[0]) for s in steps]
        jacobian = torch.stack([(a - b) / 2e-6 for a, b in ends])
        values = originals(white)
        trace = poutine.trace(poutine.condition(counts, values)).get_trace(ROWS)
        density = trace.log_prob_sum() + unconstrained(values)[1] + torch.linalg.slogdet(jacobian).logabsdet
        excess.append(-here.energy(white) - density)
    torch.testing.assert_close(excess[0], excess[1], rtol=0, atol=1e-5)  # a constant


def test_minibatches_average_exactly_and_the_posterior_is_nearly_white(fitted):
    whole = potential(ModelPotential, fitted, ROWS)
    part = potential(AnchoredPotential, fitted, Minibatch(N, B))
    white = torch.randn(N + 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected = whole.gradient(white)[1]
    torch.testing.assert_close(part.whole_gradient(white), expected, rtol=1e-9, atol=1e-9)
    center = whole.gradient(0 * white)[1]
    rows = [whole.gradient(1e-4 * row)[1] for row in torch.eye(N + 4, dtype=F64)[2:]]
    hessian = torch.stack([row - center for row in rows])[:, 2:] / 1e-4
    values = torch.linalg.eigvalsh((hessian + hessian.mT) / 2)
    assert values[0] > 0.5
    assert values[-1] < 2


@pytest.mark.slow
def test_draws_have_all_sites_of_the_program():
    pyro.set_rng_seed(0)
    kernel = SGHMC(counts, guide=AutoNNGP(counts), num_steps=2)
    mcmc = SGMCMC(kernel, 3, 20, num_chains=2, disable_progbar=True)
    mcmc.run(Minibatch(N, B))
    draws = Predictive(kernel.model, mcmc.get_samples())(ROWS)
    assert {"f", "variance", "lengthscale", "slopes"} <= draws.keys()
    posterior = to_arviz(mcmc).posterior
    found = torch.from_numpy(posterior["f"].values).reshape(6, N)
    torch.testing.assert_close(found, draws["f"].reshape(6, N))


def test_a_method_is_sampled_in_coordinates_of_a_guide():
    pyro.set_rng_seed(0)
    kernel = Matern32(2, variance=scalar(1.0))
    kernel.lengthscale = PyroSample(dist.LogNormal(scalar(-1.0), 0.5))
    gp = VNNGP(X, Y, kernel, Poisson(), num_neighbors=5)
    program = FixedTransport("Test", gp.model, AutoNNGP(gp.model))
    program.prepare(ROWS)
    white = torch.randn(N + 1, dtype=F64)
    part = potential(AnchoredPotential, program, Minibatch(N, B))
    expected = potential(ModelPotential, program).gradient(white)[1]
    torch.testing.assert_close(part.whole_gradient(white), expected, rtol=1e-9, atol=1e-9)


def test_a_checkpoint_is_refused_since_white_values_belong_to_one_run_of_the_guide(tmp_path):
    kernel = SGHMC(counts, guide=AutoNNGP(counts))
    with pytest.raises(ValueError, match=r"SGMCMC: expected checkpoint to be None with a guide"):
        SGMCMC(kernel, 1, 1, checkpoint=tmp_path / "run.pt")


def test_wrong_guides_and_rows_are_refused():
    with pytest.raises(TypeError, match=r"SGHMC: expected guide to be an AutoNNGP, got str"):
        SGHMC(counts, guide="auto")
    gp = VNNGP(X, Y, Matern32(2), Poisson(), num_neighbors=5)
    mcmc = SGMCMC(SGHMC(gp.model, guide=AutoNNGP(gp.model)), 1, 1, disable_progbar=True)
    with pytest.raises(ValueError, match=r"SGHMC: expected Minibatch.size to be 30, the rows of the method, got 20"):
        mcmc.run(Minibatch(20, 5))


def test_processes_without_a_guide_are_warned_of():
    mcmc = SGMCMC(SGHMC(counts, num_steps=1), 1, 1, disable_progbar=True)
    with pytest.warns(UserWarning, match=r"SGHMC: the values of the processes \['f'\] are strongly correlated"):
        mcmc.run(Minibatch(N, B))
