"""Learned coefficients of the mean in predictions: ordinary and universal kriging, against dense matrices."""

import pyro.distributions as dist
import pytest
import torch
from builders import scalar, uniform
from oracles.dense import dense_precision
from pyro.nn import PyroSample

import pyro_nngp as nngp
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.means import ConstantMean, LinearMean
from pyro_nngp.models.base import Fantasies
from pyro_nngp.variational import MeanField, PseudoObservations, SparseCholesky

N, NOISE = 40, 0.04
METHODS = {
    "Vecchia": (nngp.Vecchia, {}),
    "LOO": (nngp.LOO, {}),
    "MLLk": (nngp.MLLk, {}),
    "VNNGP": (nngp.VNNGP, {}),
    "sparse factor": (nngp.VNNGP, {"guide": SparseCholesky(N - 1)}),
    "NPVI": (nngp.NPVI, {"guide": PseudoObservations()}),
}


def kernel(variance=0.7, lengthscale=0.4):
    return Matern32(2, variance, lengthscale).double()


def data(n=N):
    x = uniform(n, seed=1)
    generator = torch.Generator().manual_seed(2)
    white = torch.randn(n, dtype=x.dtype, generator=generator)
    return x, torch.linalg.cholesky(covariance(x)) @ white + 3, torch.cat([uniform(4, seed=3), 3 + x[:1]])


def covariance(x):
    return kernel()(x, x).detach() + NOISE * torch.eye(len(x))


def kriging(basis, x, y, x_new):
    """Means, covariances and coefficients of universal kriging (Cressie 1993, eq. 3.4.65)."""
    solve = torch.cholesky_inverse(torch.linalg.cholesky(covariance(x)))
    b, b_new, cross = basis(x), basis(x_new), kernel()(x_new, x).detach()
    spread = torch.cholesky_inverse(torch.linalg.cholesky(b.T @ solve @ b))
    coefficients = spread @ b.T @ solve @ y
    rest = b_new - cross @ solve @ b
    cov = kernel()(x_new, x_new).detach() - cross @ solve @ cross.T + rest @ spread @ rest.T
    return b_new @ coefficients + cross @ solve @ (y - b @ coefficients), cov, coefficients


def close(found, want, rtol=1e-6, atol=1e-9):
    torch.testing.assert_close(found.detach(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("is_linear", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_learned_coefficients_are_integrated_over_as_in_universal_kriging(name, is_linear):
    (method, settings), (x, y, x_new) = METHODS[name], data()
    mean = LinearMean(2) if is_linear else ConstantMean()
    gp = method(x, y, kernel(), Gaussian(NOISE), num_neighbors=N - 1, mean=mean, jitter=1e-10, **settings)
    loc, cov, coefficients = kriging(gp.mean.basis, x, y, x_new)
    gp.mean.assign(coefficients[:, None])
    gp.solve()
    found = gp(x_new, num_neighbors=N)
    close(found[0], loc)
    close(found[1], cov.diagonal())
    if name != "sparse factor":
        for got, want in zip(gp.joint(x_new, num_neighbors=N), (loc, cov), strict=True):
            close(got, want, atol=1e-7)
    draws = gp.sample(x_new, 2000, num_neighbors=N, seed=0)
    error = ((cov.diagonal()[:, None] * cov.diagonal() + cov.square()) / 2000).sqrt()
    assert ((torch.cov(draws.T) - cov) / error).abs().max() < 6
    densities = gp.loo(torch.arange(0, N, 13), num_neighbors=N - 1)
    for row, density in zip(range(0, N, 13), densities, strict=True):
        others = torch.arange(N) != row
        loc, cov, _ = kriging(gp.mean.basis, x[others], y[others], x[row : row + 1])
        want = dist.Normal(loc, (cov[0] + NOISE).sqrt()).log_prob(y[row])
        close(density, want[0], rtol=1e-5, atol=1e-6)


def test_a_flat_prior_is_the_limit_of_wide_normal_priors():
    x, y, x_new = data()
    means = LinearMean(2), LinearMean(2, prior=dist.Normal(scalar(0.0), 1e3))
    flat, wide = (nngp.Vecchia(x, y, kernel(), Gaussian(NOISE), num_neighbors=12, mean=mean) for mean in means)
    for gp in (flat, wide):
        gp.solve()
    for got, want in zip(flat(x_new), wide(x_new), strict=True):
        close(got, want.detach(), rtol=1e-4)
    close(flat.loo(), wide.loo(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [nngp.Vecchia, nngp.VNNGP])
def test_predictions_follow_the_units_of_the_data(method):
    """Above 1,000 points the means of VNNGP come from iterations, whose tolerance must not depend on the units."""
    x, unit = uniform(1100, seed=1), 1e5
    y = torch.sin(6 * x[:, 0]) + 0.2 * torch.randn(1100, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    found = []
    for size in (1.0, unit):
        gp = method(x, size * y + size, kernel(size**2), Gaussian(NOISE * size**2), num_neighbors=6)
        gp.solve()
        found.append(gp(x.new_tensor([[0.5, 0.5], [3.0, 3.0]]), num_neighbors=8))
    close(found[1][0] / unit, found[0][0].detach(), rtol=1e-4)
    close(found[1][1] / unit**2, found[0][1].detach(), rtol=1e-4)
    assert found[0][1][1] > 0.7 * 1.05


def test_iterations_find_the_precision_of_the_level():
    x, y, _ = data(1100)
    gp = nngp.VNNGP(x, y, kernel(), Gaussian(NOISE), num_neighbors=10, guide=MeanField())
    gp.solve()
    far = gp(x[:1] + 100, num_neighbors=8)[1] - 0.7  # of the level alone
    precision = torch.eye(1100).to(x) / NOISE
    ones, prior = torch.ones(1100, 1).to(x), gp.graph
    system = dense_precision(gp.kernel, prior)
    gain = torch.cholesky_solve(precision @ ones, torch.linalg.cholesky(system + precision))
    close(far, 1 / (ones.T @ precision @ (ones - gain))[0], rtol=1e-3)


@pytest.mark.parametrize("method", [nngp.Vecchia, nngp.VNNGP])
def test_several_outputs_have_their_levels_or_share_one(method):
    x, y, x_new = data()
    both = torch.stack([y, 2 - y], 1)
    alone = method(x, y, kernel(), Gaussian(NOISE), num_neighbors=N - 1)
    own = method(x, both, kernel(), Gaussian(NOISE), num_neighbors=N - 1)
    shared = method(x, both, kernel(), Gaussian(NOISE), num_neighbors=N - 1, mean=ConstantMean())
    for gp in (alone, own, shared):
        gp.solve()
    close(own(x_new)[1], alone(x_new)[1].detach().expand(2, -1))
    plain = 0.7 - 1e-9
    far = [gp(x_new[-1:])[1].detach().reshape(-1)[0] - plain for gp in (alone, shared)]
    close(far[1], far[0] / 2, rtol=1e-3)  # two independent outputs say twice as much
    draws = shared.sample(x_new[-1:], 3000, seed=0)[:, :, 0]
    assert torch.cov(draws.T)[0, 1] == pytest.approx(float(far[1]), abs=6 * float(0.9 / 3000**0.5))
    assert (own.loo()[0] - alone.loo()).abs().max() < 1e-9


def test_fantasies_say_something_of_the_level():
    x, y, x_new = data()
    gp = nngp.Vecchia(x[:30], y[:30], kernel(), Gaussian(NOISE), num_neighbors=29, jitter=1e-10)
    gp.solve()
    found = gp.joint(x_new, num_neighbors=30, fantasies=Fantasies(x[30:], y[30:]))
    for got, want in zip(found, kriging(gp.mean.basis, x, y, x_new)[:2], strict=True):
        close(got, want, atol=1e-6)


def test_outliers_widen_the_intervals_of_f():
    """Three rows of forty at 1,000 standard deviations move the level, and f where data are far, by less than 3 sd."""
    x, y, _ = data()
    y = torch.cat([y[:-3], y[-3:] + 1000])
    gp = nngp.Vecchia(x, y, num_neighbors=15)
    nngp.fit(gp, 60, seed=0)
    mean, variance = gp(x[:1] + 50)
    assert (mean - 3).abs() < 3 * variance.sqrt()
    assert variance > gp.kernel.variance * 1.01


def test_means_that_are_not_learned_are_taken_as_they_are():
    x, y, x_new = data()
    frozen = ConstantMean(2.0).requires_grad_(False)
    for mean in (lambda x: 2 + 0 * x[:, 0], frozen):
        gp = nngp.Vecchia(x, y, kernel(), Gaussian(NOISE), num_neighbors=10, mean=mean)
        assert not gp.can_solve
        assert gp(x_new)[1][-1].item() == pytest.approx(0.7, rel=1e-3)
        assert gp(x_new)[0][-1].item() == pytest.approx(2.0, abs=1e-2)


@pytest.mark.parametrize("method", [nngp.Vecchia, nngp.LOO, nngp.VNNGP])
def test_labels_leave_their_level_uncertain(method):
    x, y, x_new = data()
    options = {} if method is nngp.Vecchia else {"likelihood": Bernoulli()}
    gp = method(x, y if method is nngp.Vecchia else (y > 3).to(y), kernel(), num_neighbors=10, **options)
    gp.solve()
    assert gp(x_new)[1][-1] > 1.02 * 0.7


def test_the_level_follows_hyperparameters_however_they_are_changed():
    x, y, x_new = data()
    gp = nngp.Vecchia(x, y, kernel(), Gaussian(NOISE), num_neighbors=10)
    before = gp(x_new)[1][-1].item()
    gp.kernel.lengthscale_unconstrained.data.sub_(1.0)
    shorter = gp(x_new)[1][-1].item()
    assert 0.7 < shorter < before - 0.01
    gp.extend(x + 2, y)
    assert gp(x_new + 50)[1][-1].item() < shorter


def test_draws_of_hyperparameters_have_the_uncertainty_of_the_level_in_their_predictions():
    x, y, x_new = data()
    own = kernel()
    own.variance = PyroSample(dist.LogNormal(scalar(-0.36), scalar(1e-3)))
    gp = nngp.Vecchia(x[:5], y[:5], own, Gaussian(30.0), num_neighbors=4)  # of which the level is almost all
    for guide in gp.hyper_guide.parameters():
        guide.data.copy_(scalar(-0.36) if guide is gp.hyper_guide.loc_0 else scalar(-9.0))
    draws = gp.sample(x_new[-1:], 150, seed=0)
    assert float(draws.var() / gp(x_new)[1][-1].detach()) == pytest.approx(1, abs=6 * (2 / 150) ** 0.5)
    assert gp(x_new)[1][-1] > 6
