"""Leave-one-out densities against dense matrices and against refits without each datum."""

import copy

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar, zero
from oracles.dense import dense_covariance, dense_precision
from pyro.nn import PyroSample
from sklearn.datasets import make_moons

from pyro_nngp.conditionals import graph_conditional, whitened_conditional
from pyro_nngp.inference import to_arviz
from pyro_nngp.kernels import RBF, Matern32
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from pyro_nngp.means import ConstantMean
from pyro_nngp.models import BSGP, LOO, NPVI, SVGP, SWSGP, VNNGP, CoregionalizedLOO, MLLk, Vecchia, swsgp
from pyro_nngp.models.base import Method, Posterior, Program
from pyro_nngp.variational import MeanField, leave_one_out
from pyro_nngp.variational.natural_gradient import gaussian_sites

N = 200


DTYPE = torch.float64


NOISE = 0.1


def kernel():
    return Matern32(2, variance=scalar(1.5), lengthscale=scalar(0.3))


@pytest.fixture(scope="module")
def problem():
    """Inputs, and targets for each likelihood."""
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(N, 2, dtype=DTYPE, generator=generator)
    f = torch.linalg.cholesky(dense_covariance(kernel(), x)) @ torch.randn(N, dtype=DTYPE, generator=generator)
    noise = torch.randn(N, dtype=DTYPE, generator=generator)
    counts = torch.poisson(f.exp().detach(), generator=generator)
    labels = (torch.rand(N, dtype=DTYPE, generator=generator) < f.sigmoid()).to(DTYPE)
    return x, {Gaussian: (f + NOISE**0.5 * noise).detach(), Poisson: counts, Bernoulli: labels}


def loo_of(cov, y):
    """Mean and variance of each y given the others, for y ~ N(0, cov): by deleting rows, one datum at a time."""
    found = []
    for i in range(len(y)):
        keep = torch.arange(len(y)) != i
        weights = torch.linalg.solve(cov[keep][:, keep], cov[keep, i])
        found.append(torch.stack([weights @ y[keep], cov[i, i] - weights @ cov[keep, i]]))
    return torch.stack(found, -1)


def normal_log_prob(moments, y):
    return dist.Normal(moments[0], moments[1].sqrt()).log_prob(y).detach()


def exact(x, y, kernel=kernel):
    cov = dense_covariance(kernel(), x) + NOISE * torch.eye(len(x), dtype=DTYPE)
    return normal_log_prob(loo_of(cov.detach(), y), y)


def refit(likelihood, cov, y, i):
    """Log density of y_i from the dense variational posterior of all other data, found anew."""
    keep = torch.arange(len(y)) != i
    prior = cov[keep][:, keep]
    loc, var, shift, precision = 0 * y[keep], prior.diagonal() / 4, 0 * y[keep], 0 * y[keep]
    for _ in range(30):  # damped natural gradients
        target, found = gaussian_sites(likelihood, y[keep], loc, var)
        shift, precision = torch.lerp(shift, found * target, 0.6), torch.lerp(precision, found, 0.6)
        tril = torch.linalg.cholesky(prior + torch.diag(1 / precision))
        root = torch.linalg.solve_triangular(tril, prior, upper=False)
        weights = torch.cholesky_solve((shift / precision)[:, None], tril)[:, 0]
        loc, var = prior @ weights, prior.diagonal() - root.square().sum(0)
    root = torch.linalg.solve_triangular(tril, cov[keep, i : i + 1], upper=False)[:, 0]
    return likelihood.marginal(cov[keep, i] @ weights, cov[i, i] - root @ root).log_prob(y[i])


@pytest.fixture(scope="module")
def refits(problem):
    """Log densities of every 25th datum under refits without it."""
    cov, rows = dense_covariance(kernel(), problem[0]).detach(), range(0, N, 25)
    return {
        likelihood: torch.stack([refit(likelihood(), cov, problem[1][likelihood], i) for i in rows]).detach()
        for likelihood in (Bernoulli, Poisson)
    }


@pytest.mark.parametrize("method", [Vecchia, LOO, MLLk, VNNGP])
def test_all_neighbors_give_the_exact_process(problem, method):
    x, y = problem[0], problem[1][Gaussian]
    gp = method(x, y, kernel(), Gaussian(NOISE), num_neighbors=N - 1, mean=zero)
    torch.testing.assert_close(gp.loo(), exact(x, y), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", [Vecchia, LOO, MLLk])
def test_response_methods_condition_on_the_nearest_others(problem, method):
    x, y, k = problem[0], problem[1][Gaussian], 12
    gp = method(x, y, kernel(), Gaussian(NOISE), num_neighbors=5, mean=zero)
    cov = (dense_covariance(kernel(), x) + NOISE * torch.eye(N, dtype=DTYPE)).detach()
    expected = []
    for i in range(N):
        near = torch.cdist(x[i : i + 1], x)[0].argsort()[1 : k + 1]
        weights = torch.linalg.solve(cov[near][:, near], cov[near, i])
        expected.append(normal_log_prob((weights @ y[near], cov[i, i] - weights @ cov[near, i]), y[i]))
    torch.testing.assert_close(gp.loo(num_neighbors=k), torch.stack(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", [VNNGP, NPVI])
def test_latent_methods_are_close_to_the_exact_process_with_few_neighbors(problem, method):
    x, y = problem[0], problem[1][Gaussian]
    gp = method(x, y, kernel(), Gaussian(NOISE), num_neighbors=30, mean=zero)
    found, process = gp.loo(), exact(x, y)
    cov = torch.linalg.inv(dense_precision(kernel(), gp.graph)).detach() + NOISE * torch.eye(N, dtype=DTYPE)
    error = found - normal_log_prob(loo_of(cov, y), y)  # under the prior that the method has
    assert error.abs().max() < (0.03 if method is VNNGP else 0.2)
    assert error.abs().mean() < 0.005
    error = found - process
    assert error.abs().mean() < 0.02
    assert abs(error.sum()) < 1
    nearest = LOO(x, y, kernel(), Gaussian(NOISE), num_neighbors=30, mean=zero).loo() - process
    assert error.square().mean() < nearest.square().mean()


def test_latent_methods_take_64_others_where_k_is_less(problem):
    x, y = problem[0], problem[1][Bernoulli]
    gp = VNNGP(x, y, kernel(), Bernoulli(), num_neighbors=5, mean=zero)
    torch.testing.assert_close(gp.loo(), gp.loo(num_neighbors=64))
    assert not torch.allclose(gp.loo(), gp.loo(num_neighbors=5), rtol=1e-3)


def test_the_state_of_the_guide_does_not_matter(problem):
    x, y = problem[0], problem[1][Bernoulli]
    for method in (VNNGP, SVGP):
        options = {"inducing": x[:40]} if method is SVGP else {}
        gp = method(x, y, kernel(), Bernoulli(), mean=zero, **options)
        before = gp.loo()
        gp.solve()
        torch.testing.assert_close(gp.loo(), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("likelihood", [Bernoulli, Poisson])
@pytest.mark.parametrize("method", [VNNGP, NPVI, SVGP])
def test_refits_of_other_likelihoods(problem, refits, likelihood, method):
    x, y = problem[0], problem[1][likelihood]
    options = {"inducing": x[::1], "jitter": 1e-6} if method is SVGP else {"num_neighbors": 30}
    gp = method(x, y, kernel(), likelihood(), mean=zero, **options)
    error = gp.loo(torch.arange(0, N, 25)) - refits[likelihood]
    assert error.abs().max() < 0.15
    assert error.abs().mean() < 0.02


@pytest.mark.parametrize("objective", ["vfe", "fitc"])
def test_inducing_points_against_dense_covariances(problem, objective):
    x, y = problem[0], problem[1][Gaussian]
    gp = SVGP(x, y, kernel(), Gaussian(NOISE), inducing=x[:30], mean=zero, objective=objective)
    a, var, _ = whitened_conditional(kernel(), x, x[:30])
    a, var = a.detach(), var.detach()
    noise = NOISE + (var if objective == "fitc" else 0 * var)
    loc, spread = loo_of(a @ a.mT + torch.diag(noise), y)
    expected = normal_log_prob((loc, spread - noise + var + NOISE), y)
    torch.testing.assert_close(gp.loo(), expected, rtol=0, atol=1e-6)
    model = gp.loo(samples={"nu": torch.zeros(1, 30, dtype=DTYPE)})[0]  # draws of the model: its own noise
    if objective == "fitc":
        torch.testing.assert_close(model, expected, rtol=0, atol=1e-6)
    else:
        assert (model - expected).abs().max() > 1e-3


@pytest.mark.parametrize("likelihood", [Gaussian, Bernoulli])
def test_inducing_points_against_refits(problem, likelihood):
    x, y = problem[0], problem[1][likelihood]
    settings = {"inducing": x[:30], "mean": zero}
    make = (lambda: Gaussian(NOISE)) if likelihood is Gaussian else likelihood
    rows = torch.arange(0, N, 25)
    found = SVGP(x, y, kernel(), make(), **settings).loo(rows)
    for i, density in zip(rows.tolist(), found, strict=True):
        keep = torch.arange(N) != i
        other = SVGP(x[keep], y[keep], kernel(), make(), **settings)
        other.solve(max_steps=60, tolerance=1e-6)
        error = other.predict(x[i : i + 1]).log_prob(y[i]) - density
        assert abs(error) < (1e-6 if likelihood is Gaussian else 0.02)


def test_vnngp_and_swsgp_with_few_inducing_points(problem):
    x, y, m, k = problem[0], problem[1][Gaussian], 40, 8
    gp = VNNGP(x, y, kernel(), Gaussian(NOISE), inducing=x[:m], num_neighbors=k, mean=zero)
    sw = SWSGP(x, y, kernel(), Gaussian(NOISE), inducing=x[:m], num_neighbors=k, mean=zero, learn_inducing=False)
    average = torch.zeros(m, m, dtype=DTYPE)
    cov = dense_covariance(kernel(), x[:m]).detach()
    for near in sw.data_neighbors:
        average[near[:, None], near] += torch.linalg.inv(cov[near][:, near]) / N
    for method, near, precision in (
        (gp, gp.data_neighbors, dense_precision(kernel(), gp.graph).detach()),
        (sw, sw.data_neighbors, average),
    ):
        w, var = graph_conditional(kernel(), x, x[:m], near)
        weights = torch.zeros(N, m, dtype=DTYPE).scatter(-1, near, w.detach())
        loc, spread = loo_of(weights @ torch.linalg.inv(precision) @ weights.mT + NOISE * torch.eye(N, dtype=DTYPE), y)
        expected = normal_log_prob((loc, spread + var.detach()), y)
        torch.testing.assert_close(method.loo(), expected, rtol=0, atol=1e-5)


def test_outputs_and_classes(problem):
    x, y = problem[0][:60], problem[1][Gaussian][:60]
    both = torch.stack([y, y.flip(0)], -1)
    separate = torch.stack([exact(x, y), exact(x, y.flip(0))])
    settings = {"num_neighbors": 59, "mean": zero}
    for method in (Vecchia, VNNGP):
        found = method(x, both, kernel(), Gaussian(NOISE), **settings).loo()
        torch.testing.assert_close(found, separate, rtol=0, atol=1e-6)
    classes = (y > 0).long() + (y > 1).long()
    for method in (VNNGP, LOO):
        gp = method(x, classes, kernel(), Categorical(3), **settings)
        if method is LOO:
            gp.solve()
        found = gp.loo()
        assert found.shape == (60,)
        assert -3 < found.mean() < -0.2  # below certainty, no worse than a guess by far


def test_augmented_loo_conditions_on_the_others(problem):
    x, y = problem[0][:60], problem[1][Bernoulli][:60]
    gp = LOO(x, y, kernel(), Bernoulli(), num_neighbors=59, mean=zero, divergence="posterior")
    gp.solve()
    with torch.no_grad():
        target, noise = gp.posterior(gp.bound()).observations(torch.arange(60))
    cov = dense_covariance(kernel(), x).detach()
    loc, spread = loo_of(cov + torch.diag(noise), target)
    expected = Bernoulli().marginal(loc, spread - noise).log_prob(y)
    torch.testing.assert_close(gp.loo(), expected.detach(), rtol=0, atol=1e-6)


def test_coregionalized_outputs_jointly(problem):
    x, y = problem[0][:25], problem[1][Gaussian][:25]
    both, mixing = torch.stack([y, y.flip(0)], -1), torch.tensor([[1.0, 0.2], [0.5, -0.8]], dtype=DTYPE)
    kernels = [kernel(), RBF(2, variance=scalar(1.0), lengthscale=scalar(0.5))]
    gp = CoregionalizedLOO(x, both, copy.deepcopy(kernels), Gaussian(NOISE), num_neighbors=24, mixing=mixing, mean=zero)
    cov = sum(
        torch.kron(dense_covariance(k, x).detach(), torch.outer(g, g)) for k, g in zip(kernels, mixing.mT, strict=True)
    )
    cov = cov + NOISE * torch.eye(50, dtype=DTYPE)
    expected, flat = [], both.flatten()
    for i in range(25):
        own = torch.zeros(50, dtype=torch.bool)
        own[2 * i : 2 * i + 2] = True
        w = torch.linalg.solve(cov[~own][:, ~own], cov[~own][:, own])
        left = cov[own][:, own] - w.mT @ cov[~own][:, own]
        expected.append(dist.MultivariateNormal(w.mT @ flat[~own], left).log_prob(flat[own]))
    torch.testing.assert_close(gp.loo(), torch.stack(expected), rtol=0, atol=1e-4)


def with_prior(method, x, y, **options):
    k = Matern32(2, lengthscale=scalar(0.3))
    k.variance = PyroSample(dist.LogNormal(scalar(0.0), 0.5))
    return method(x, y, k, Gaussian(NOISE), mean=zero, **options)


@pytest.mark.parametrize(("method", "options"), [(Vecchia, {}), (VNNGP, {}), (SVGP, {"inducing": 40})])
def test_draws_and_rows(problem, method, options):
    x, y = problem[0], problem[1][Gaussian]
    gp = with_prior(method, x, y, **options)
    draws = {"kernel.variance": torch.tensor([0.7, 1.5], dtype=DTYPE)}
    found = gp.loo(samples=draws)
    idx = torch.tensor([150, 3])
    torch.testing.assert_close(gp.loo(idx, samples=draws), found[:, idx], rtol=0, atol=1e-8)
    by_draw = gp.loo_by_draw(idx)
    for variance, expected in zip(draws["kernel.variance"], found, strict=True):
        torch.testing.assert_close(by_draw({"kernel.variance": variance}), expected[idx], rtol=0, atol=1e-5)
        fixed = Matern32(2, variance=variance, lengthscale=scalar(0.3))
        settings = dict(options, objective="fitc") if method is SVGP else options
        alone = method(x, y, fixed, Gaussian(NOISE), mean=zero, **settings)
        torch.testing.assert_close(alone.loo(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("method", "options"), [(SVGP, {}), (SWSGP, {"num_neighbors": 8})])
def test_densities_of_a_draw_do_not_depend_on_the_draws_before_it(problem, method, options):
    x, y = problem[0][:60], problem[1][Bernoulli][:60]
    k = Matern32(2, lengthscale=scalar(0.3))
    k.variance = PyroSample(dist.LogNormal(scalar(0.0), 0.5))
    by_draw = method(x, y, k, Bernoulli(), inducing=12, **options).loo_by_draw(from_guide=True)
    first, *_, again = (by_draw({"kernel.variance": scalar(value)}) for value in (0.5, 3.0, 0.5))
    torch.testing.assert_close(again, first, rtol=0, atol=0)


@pytest.mark.slow
def test_inverse_densities_are_the_weights_that_leave_a_datum_out(problem):
    x, y = problem[0][:20], problem[1][Gaussian][:20]
    gp = with_prior(Vecchia, x, y, num_neighbors=19)
    grid = torch.linspace(-2.5, 2.5, 81, dtype=DTYPE).exp()
    log_joint = []
    for variance in grid:
        cov = variance / 1.5 * dense_covariance(kernel(), x).detach() + NOISE * torch.eye(20, dtype=DTYPE)
        log_joint.append([dist.MultivariateNormal(0 * y, cov).log_prob(y)])
        for i in range(20):
            keep = torch.arange(20) != i
            log_joint[-1].append(dist.MultivariateNormal(0 * y[keep], cov[keep][:, keep]).log_prob(y[keep]))
    log_joint = torch.tensor(log_joint, dtype=DTYPE) + dist.Normal(0.0, 0.5).log_prob(grid.log())[:, None]
    exact_loo = log_joint[:, 0].logsumexp(0) - log_joint[:, 1:].logsumexp(0)  # log p(y) - log p(y_-i)
    posterior = log_joint[:, 0] - log_joint[:, 0].logsumexp(0)
    found = gp.loo(samples={"kernel.variance": grid})
    weighted = -(posterior[:, None] - found).logsumexp(0)  # importance sampling, with the posterior on the grid
    torch.testing.assert_close(weighted, exact_loo, rtol=0, atol=1e-5)


@pytest.mark.parametrize("objective", ["fitc", "vfe"])
def test_bsgp_integrates_inducing_values(problem, objective):
    x, y = problem[0][:60], problem[1][Gaussian][:60]
    gp = BSGP(x, y, kernel(), Gaussian(NOISE), inducing=15, mean=zero, objective=objective)
    pyro.set_rng_seed(0)
    draws = {"layers.0.z": torch.rand(2, 15, 2, dtype=DTYPE), "layers.0.nu": torch.randn(2, 15, dtype=DTYPE)}
    for z, found in zip(draws["layers.0.z"], gp.loo(samples=draws), strict=True):
        other = SVGP(x, y, kernel(), Gaussian(NOISE), inducing=z, mean=zero, objective=objective)
        torch.testing.assert_close(found, other.loo(), rtol=0, atol=1e-7)
    assert "integrated" in gp.loo_kind


def test_deep_bsgp_is_given_inducing_values(problem):
    x, y = problem[0][:30], problem[1][Gaussian][:30]
    gp = BSGP(x, y, kernel(), Gaussian(NOISE), inducing=6, num_layers=2, num_draws=3, fixed_draws=True)
    pyro.set_rng_seed(0)
    shapes = {"layers.0.z": (6, 2), "layers.0.nu": (2, 6), "layers.1.z": (6, 2), "layers.1.nu": (6,)}
    draws = {name: torch.randn(2, *shape, dtype=DTYPE) for name, shape in shapes.items()}
    found = gp.loo(samples=draws)
    assert found.shape == (2, 30)
    assert gp.loo_kind.startswith("given")


def test_refusals(problem):
    x, y = problem[0], problem[1][Gaussian]
    with pytest.raises(ValueError, match=r"VNNGP.loo: expected a likelihood in the model"):
        VNNGP(x, None, kernel(), num_neighbors=5).loo()
    gp = Vecchia(x, y, kernel(), num_neighbors=5)
    with pytest.raises(ValueError, match="idx"):
        gp.loo(torch.tensor([N]))
    for each in (gp, VNNGP(x, y, kernel(), num_neighbors=5)):
        with pytest.raises(ValueError, match=rf"num_neighbors in 1..{N - 1}, got {N}"):
            each.loo(num_neighbors=N)
    with pytest.raises(ValueError, match=r"to hold the site 'kernel.variance'"):
        with_prior(Vecchia, x, y).loo(samples={"other": torch.ones(2)})
    for kind, settings in ((SVGP, {}), (SWSGP, {"num_neighbors": 5}), (VNNGP, {"num_neighbors": 5}), (BSGP, {})):
        inducing = kind(x, y, kernel(), Gaussian(), inducing=20, **settings)
        with pytest.raises(ValueError, match=r"loo: expected num_neighbors to be None with inducing points, got -5"):
            inducing.loo(num_neighbors=-5)
    with pytest.raises(ValueError, match=r"SWSGP: expected samples None"):
        SWSGP(x, y, kernel(), Gaussian(), inducing=20, num_neighbors=5).loo(samples={"u": torch.zeros(2, N, 5)})
    with pytest.raises(ValueError, match=r"BSGP.loo: expected samples of all sites"):
        BSGP(x, y, kernel(), Gaussian(), inducing=10).loo()


def test_methods_without_leave_one_out(problem):
    class Bare(Method):
        def __init__(self, *data):
            super().__init__(*data)
            self._start()

        def model(self, idx=None):
            program = Program.model(self, idx)
            slope = pyro.sample(self.site("slope"), dist.Normal(scalar(0.0), 1.0))
            with program.plates[0]:
                return pyro.sample(self.site("y"), dist.Normal(slope * self.x[:, 0], 1.0), obs=self.y)

        def guide(self, idx=None):
            pyro.sample(self.site("slope"), dist.Normal(scalar(0.0), 1.0))

        def posterior(self, bound, draw=None, part=None):
            return Posterior(self.rows, None, bound)

    gp = Bare(problem[0], problem[1][Gaussian], kernel(), Gaussian())
    with pytest.raises(NotImplementedError, match=r"Posterior: expected leave_one_out to be defined by the posterior"):
        gp.loo()
    idata = to_arviz(gp, num_samples=2)
    assert idata.log_likelihood_conditional["y"].shape == (1, 2, N)
    assert not hasattr(idata, "log_likelihood")


def test_too_many_inducing_points_for_a_dense_precision(problem, monkeypatch):
    monkeypatch.setattr(swsgp, "LARGEST_FULL", 10)
    gp = SWSGP(problem[0], problem[1][Gaussian], kernel(), Gaussian(), inducing=20, num_neighbors=5)
    with pytest.raises(ValueError, match=r"SWSGP.loo: expected M to be at most 10"):
        gp.loo()


def test_slow_convergence_is_reported(problem, monkeypatch):
    monkeypatch.setattr(leave_one_out, "MAX_STEPS", 1)
    gp = VNNGP(problem[0], problem[1][Poisson], kernel(), Poisson(), num_neighbors=5, mean=zero)
    with pytest.warns(UserWarning, match="loo: means still moved"):
        gp.loo()


@pytest.mark.slow
def test_labels_far_from_the_mean_function_start_at_the_sites():
    """At logits of -13 a label says next to nothing, and steps from there lead nowhere."""
    inputs, labels = make_moons(1500, noise=0.3, random_state=0)
    x, y = torch.from_numpy(inputs), torch.from_numpy(labels).double()
    kernel, mean = Matern32(2, 822.0, 3.3), ConstantMean(-13.0)
    gp = VNNGP(x, y, kernel, Bernoulli(), mean=mean, num_neighbors=20)
    gp.solve(60)
    gp.mean.value = -13.0
    assert -gp.loo().mean() < 0.3
    unsolved = VNNGP(x, y, kernel, Bernoulli(), mean=mean, num_neighbors=20, guide=MeanField())
    with pytest.warns(UserWarning, match="loo: means still moved by .* no step improved the bound"):
        unsolved.loo()


def test_densities_in_inference_mode(problem):
    gp = VNNGP(problem[0][:50], problem[1][Poisson][:50], kernel(), Poisson(), num_neighbors=8)
    want = gp.loo()
    with torch.inference_mode():
        torch.testing.assert_close(gp.loo(), want)
        torch.testing.assert_close(gp.loo_by_draw(from_guide=True)({}), want)


def test_labels_whose_likelihood_takes_the_noise_of_f(problem):
    """With one inducing value the exact density of each label given the others is an integral over a line."""
    x, y = problem[0][:30], problem[1][Bernoulli][:30]
    z = torch.full((1, 2), 0.5, dtype=DTYPE)
    gp = SVGP(x, y, kernel(), Bernoulli(), inducing=z, mean=zero, objective="fitc")
    variance = kernel()(z, z).detach()[0, 0]
    along = kernel()(x, z).detach()[:, 0] / variance.sqrt()
    rest = kernel()(x, diag=True).detach() - along.square()
    nu = torch.linspace(-8, 8, 801, dtype=DTYPE)
    f = dist.Normal(along * nu[:, None], rest.sqrt())
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(40))
    at = f.loc[..., None] + f.scale[..., None] * nodes
    likelihood = (dist.Bernoulli(logits=at).log_prob(y[:, None]).exp() * weights).sum(-1) / weights.sum()
    log_likelihood, prior = likelihood.log(), dist.Normal(0.0, 1.0).log_prob(nu)
    others = (prior[:, None] + log_likelihood.sum(-1, keepdim=True) - log_likelihood).softmax(0)
    torch.testing.assert_close(gp.loo(), (others * likelihood).sum(0).log(), rtol=0, atol=2e-3)
