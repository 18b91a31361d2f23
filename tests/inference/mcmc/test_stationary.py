"""The samplers against known stationary distributions: the Lyapunov solution of their update, and posteriors."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS
from scipy.linalg import solve_discrete_lyapunov

from pyro_nngp.inference import SGHMC, SGLD, SGNHT

F64 = torch.float64
MIX = torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=F64)
DATA = 2 * torch.randn(20, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
NOISE_VAR = 4.0


def linear_gaussian(subsample_size=None):
    """A quadratic potential whose minibatch gradient has noise that does not depend on the position."""
    theta = pyro.sample("theta", dist.Normal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
    with pyro.plate("data", len(DATA), subsample_size=subsample_size) as idx:
        pyro.sample("y", dist.Normal(theta @ MIX, math.sqrt(NOISE_VAR)).to_event(1), obs=DATA[idx])


HESSIAN = torch.eye(2, dtype=F64) + len(DATA) / NOISE_VAR * MIX @ MIX.T


def gradient_covariance(batch_size):
    """Covariance of the minibatch gradient: N/s^2 times MIX times the mean of B rows drawn without replacement."""
    n = len(DATA)
    return (n / NOISE_VAR) ** 2 * MIX @ torch.cov(DATA.T) @ MIX.T / batch_size * (1 - batch_size / n)


def start(kernel, num_chains, warmup_steps, *args, initial=None):
    kernel.initial_params = initial
    with pyro.validation_enabled(False):
        kernel.setup_chains((num_chains,), True, warmup_steps, args, {})


def advance(kernel, updates):
    """Move all chains on and return their values, {site: (C, ...)}, in the space of the model."""
    params = kernel.initial_params
    with pyro.validation_enabled(False):
        for _ in range(updates):
            params = kernel.sample(params)
    return {name: kernel.transforms[name].inv(z) for name, z in params.items()}


def with_mass(kernel, inverse_mass, num_chains, *args):
    """Start chains behind a burn-in that has frozen a given preconditioner."""
    start(kernel, num_chains, 1, *args, initial={"theta": torch.zeros(num_chains, 2, dtype=F64)})
    advance(kernel, 1)
    snapshot = kernel.state_dict()
    snapshot["state"]["inverse_mass"] = torch.tensor(inverse_mass, dtype=F64).expand(num_chains, 2)
    kernel.load_state_dict(snapshot)
    start(kernel, num_chains, 0, *args)


def assert_covariance(draws, expected):
    """Six standard errors, those of independent normal draws."""
    found = torch.cov(draws.T)
    expected = torch.as_tensor(expected)
    error = ((expected.diag()[:, None] * expected.diag() + expected**2) / len(draws)).sqrt()
    assert ((found - expected).abs() < 6 * error).all(), f"{found} against {expected}, standard errors {error}"


@pytest.mark.parametrize(
    ("inverse_mass", "temperature", "batch_size"),
    [
        pytest.param([1.0, 1.0], 1.0, 20, id="plain"),
        pytest.param([0.5, 1.5], 0.5, 10, id="adapted-minibatch", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sampler", [pytest.param(SGLD, marks=pytest.mark.slow), SGHMC])
def test_covariance_is_the_lyapunov_solution_of_the_update(sampler, inverse_mass, temperature, batch_size):
    # With x' = A x + n the stationary covariance solves S = A S A' + Cov(n), at steps as coarse as these.
    step, alpha, given = (0.1, 1.0, 0.5) if sampler is SGLD else (0.4, 0.3, 0.5)
    options = {"friction": alpha} if sampler is SGHMC else {}
    kernel = sampler(
        linear_gaussian, step, adapt=True, temperature=temperature, gradient_noise=given, num_steps=40, **options
    )
    with_mass(kernel, inverse_mass, 4000, batch_size)
    draws = advance(kernel, 1)["theta"]

    inv, h, eye = torch.diag(torch.tensor(inverse_mass, dtype=F64)), HESSIAN, torch.eye(2, dtype=F64)
    brought = step**2 * inv @ gradient_covariance(batch_size) @ inv
    if sampler is SGLD:
        a = eye - step * inv @ h
        noise = 2 * step * temperature * inv - given * step**2 * inv @ inv + brought
    else:
        velocity = torch.cat([-step * inv @ h, (1 - alpha) * eye], 1)
        a = torch.cat([torch.cat([eye, torch.zeros_like(eye)], 1) + step * velocity, velocity])
        kick = 2 * alpha * temperature * inv - given * step**2 * inv @ inv + brought
        spread = torch.cat([step * eye, eye])
        noise = spread @ kick @ spread.T
    assert np.abs(np.linalg.eigvals(a)).max() ** 40 < 1e-2  # 40 updates forget the start
    joint = torch.as_tensor(solve_discrete_lyapunov(a.numpy(), noise.numpy()))
    expected, limit = joint[:2, :2], temperature * h.inverse()
    assert ((expected - limit).diag() / limit.diag()).abs().max() > 0.2  # tests the chain's distribution, not its limit
    assert_covariance(draws, expected)

    # The mean temperatures over the next 120 updates, from those over 40 and 160.
    before, _, after = kernel.diagnostics(), advance(kernel, 3), kernel.diagnostics()
    exact = {"configurational temperature": (h @ expected).trace() / 2}
    if sampler is SGHMC:
        middle = (torch.cat([torch.zeros_like(eye), eye], 1) + velocity) / 2
        exact["kinetic temperature"] = (inv.inverse() @ (middle @ joint @ middle.T + kick / 4)).trace() / 2
    for name, value in exact.items():
        found = (4 * torch.tensor(after[name]) - torch.tensor(before[name])) / 3
        assert abs(found.mean() - value) < 6 * found.std() / math.sqrt(4000), name


@pytest.mark.slow
def test_gradient_noise_estimate_is_the_variance_over_minibatches():
    kernel = SGLD(linear_gaussian, 1e-6)
    start(kernel, 400, 40, 5)
    advance(kernel, 40)
    found = kernel.state_dict()["state"]["gradient_variance"]  # of each chain the mean of two pairs
    expected = gradient_covariance(5).diag()
    error = found.std(0) / 20
    assert ((found.mean(0) - expected).abs() < 6 * error).all()
    assert (error < 0.06 * expected).all()


def test_gradient_noise_of_full_batches_is_exactly_zero():
    kernel = SGLD(linear_gaussian, 0.01)
    start(kernel, 3, 40, 20)
    advance(kernel, 40)
    assert (kernel.state_dict()["state"]["gradient_variance"] == 0).all()


@pytest.mark.slow
def test_estimated_gradient_noise_is_taken_off_what_is_injected():
    covariances = {}
    for given in (None, 0.0):
        kernel = SGLD(linear_gaussian, 0.005, gradient_noise=given, num_steps=100)
        start(kernel, 2000, 200, 1, initial={"theta": torch.zeros(2000, 2, dtype=F64)})
        advance(kernel, 200)
        covariances[given] = torch.cov(advance(kernel, 1)["theta"].T).diag()
    expected = HESSIAN.inverse().diag()
    error = expected * math.sqrt(2 / 2000)
    assert ((covariances[None] - expected).abs() < 6 * error).all()
    assert (covariances[0.0] - expected > 6 * error).all()


@pytest.mark.slow
def test_thermostat_finds_the_friction_that_unknown_noise_needs():
    # As the step tends to 0 the mean friction tends to A + epsilon sigma^2 / (2 T), and positions to the posterior.
    step, diffusion = 0.02, 1.0
    kernel = SGNHT(linear_gaussian, step, diffusion=diffusion, num_steps=10)
    start(kernel, 200, 500, 1)
    advance(kernel, 500)
    draws, frictions = [], []
    for _ in range(40):
        draws.append(advance(kernel, 1)["theta"])
        frictions.append(kernel.state_dict()["state"]["friction"])
    needed = step * gradient_covariance(1).diag().mean() / 2
    assert needed > diffusion
    friction = torch.stack(frictions).mean(0)
    assert abs(friction.mean() - diffusion - needed) < 6 * friction.std() / math.sqrt(200) + 0.05 * needed
    kinetic = torch.tensor(kernel.diagnostics()["kinetic temperature"], dtype=F64)
    assert abs(kinetic.mean() - 1) < 6 * kinetic.std() / math.sqrt(200)
    mean = len(DATA) / NOISE_VAR * HESSIAN.inverse() @ MIX @ DATA.mean(0)
    assert_moments(torch.stack(draws), mean, HESSIAN.inverse().diag(), allowance=0.1)


GROUPS = torch.tensor([1.9, -0.4, 3.1, 0.7, -1.6, 2.2, 0.3, 1.1], dtype=F64)


def hierarchical():
    mu = pyro.sample("mu", dist.Normal(torch.tensor(0.0, dtype=F64), 2.0))
    scale = pyro.sample("scale", dist.LogNormal(torch.tensor(0.0, dtype=F64), 0.5))
    with pyro.plate("groups", len(GROUPS)):
        offset = pyro.sample("offset", dist.Normal(torch.tensor(0.0, dtype=F64), 1.0))
        pyro.sample("y", dist.Normal(mu + scale * offset, 0.5), obs=GROUPS)


def hierarchical_moments():
    """Mean and variance of mu and log scale by a grid, the group values integrated out."""
    mu, log_scale = torch.linspace(-4, 6, 401, dtype=F64)[:, None], torch.linspace(-2, 2.5, 401, dtype=F64)
    log_p = dist.Normal(0.0, 2.0).log_prob(mu) + dist.Normal(0.0, 0.5).log_prob(log_scale)
    marginal = (log_scale.exp() ** 2 + 0.25).sqrt()
    log_p = log_p + dist.Normal(mu[..., None], marginal[..., None]).log_prob(GROUPS).sum(-1)
    return _grid_moments(log_p, mu.expand_as(log_p), log_scale.expand_as(log_p))


COVARIATE = torch.linspace(-2, 2, 40, dtype=F64)
UNIFORM = torch.rand(40, dtype=F64, generator=torch.Generator().manual_seed(2))
LABELS = (torch.sigmoid(1.5 * COVARIATE) > UNIFORM).double()


def logistic(subsample_size=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=F64), 2.0).to_event(1))
    with pyro.plate("data", len(LABELS), subsample_size=subsample_size) as idx:
        pyro.sample("y", dist.Bernoulli(logits=w[0] + w[1] * COVARIATE[idx]), obs=LABELS[idx])


def logistic_moments():
    a, b = torch.linspace(-4, 4, 401, dtype=F64)[:, None], torch.linspace(-2, 8, 401, dtype=F64)
    logits = a[..., None] + b[..., None] * COVARIATE
    log_p = dist.Bernoulli(logits=logits).log_prob(LABELS).sum(-1)
    log_p = log_p + dist.Normal(0.0, 2.0).log_prob(a) + dist.Normal(0.0, 2.0).log_prob(b)
    return _grid_moments(log_p, a.expand_as(log_p), b.expand_as(log_p))


def _grid_moments(log_p, *coordinates):
    weight = (log_p - log_p.max()).exp()
    weight = weight / weight.sum()
    means = torch.stack([(weight * x).sum() for x in coordinates])
    variances = torch.stack([(weight * (x - m) ** 2).sum() for x, m in zip(coordinates, means, strict=True)])
    return means, variances


def correlated():
    covariance = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=F64)
    pyro.sample("w", dist.MultivariateNormal(torch.tensor([1.0, -1.0], dtype=F64), covariance))


def assert_moments(draws, means, variances, allowance=0.0):
    """Chains are independent: standard errors come from the spread of their averages over (S, C, d) draws."""
    for found, expected in ((draws.mean(0), means), (((draws - means) ** 2).mean(0), variances)):
        error = found.std(0) / math.sqrt(len(found))
        difference = (found.mean(0) - expected).abs()
        assert (difference < 6 * error + allowance * expected.abs()).all(), (found.mean(0), expected)


def _values(model, values):
    if model is hierarchical:
        return torch.stack([values["mu"], values["scale"].log()], -1)
    return values["w"]


CASES = {
    "correlated": (correlated, lambda: (torch.tensor([1.0, -1.0], dtype=F64), torch.ones(2, dtype=F64))),
    "hierarchical": (hierarchical, hierarchical_moments),
    "logistic": (logistic, logistic_moments),
}


SAMPLERS = {
    "SGHMC": lambda model: SGHMC(model, 0.1, friction=0.2, num_steps=10),
    "SGLD": lambda model: SGLD(model, 0.02, adapt=True, num_steps=10),
    "SGNHT": lambda model: SGNHT(model, 0.1, adapt=True, num_steps=10),
}
QUICK = {("correlated", "SGLD"), ("correlated", "SGNHT")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sampler"),
    [
        pytest.param(c, s, marks=[] if (c, s) in QUICK else [pytest.mark.slow], id=f"{c}-{s}")
        for c in CASES
        for s in SAMPLERS
    ],
)
def test_full_batches_with_small_steps_give_the_posterior(case, sampler):
    model, moments = CASES[case]
    kernel = SAMPLERS[sampler](model)
    start(kernel, 200, 800)
    advance(kernel, 800)
    draws = torch.stack([_values(model, advance(kernel, 1)) for _ in range(20)])
    assert_moments(draws, *moments())


@pytest.mark.slow
def test_minibatches_give_the_posterior_of_full_batches():
    kernel = SGHMC(logistic, 0.05, num_steps=10)
    start(kernel, 100, 600, 10)
    advance(kernel, 600)
    draws = torch.stack([advance(kernel, 1)["w"] for _ in range(20)])
    assert_moments(draws, *logistic_moments())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sghmc_through_pyro_mcmc_agrees_with_nuts(case):
    model, _ = CASES[case]
    found = {}
    for name, kernel, warmup in (
        ("sghmc", SGHMC(model, 0.1, friction=0.2, num_steps=20), 3000),
        ("nuts", NUTS(model), 300),
    ):
        mcmc = MCMC(kernel, num_samples=1500, warmup_steps=warmup, disable_progbar=True)
        mcmc.run()
        draws = _values(model, mcmc.get_samples())
        batches = torch.stack([draws, (draws - draws.mean(0)) ** 2]).reshape(2, 50, 30, -1).mean(2)
        found[name] = batches.mean(1), batches.var(1) / 50
    difference = found["sghmc"][0] - found["nuts"][0]
    assert (difference.abs() < 6 * (found["sghmc"][1] + found["nuts"][1]).sqrt()).all()
