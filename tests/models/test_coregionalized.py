import copy
import math

import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from pyro.nn import PyroSample

from pyro_nngp._memory import block_limit
from pyro_nngp.inference import fit
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Gaussian, StudentT
from pyro_nngp.linalg import cholesky
from pyro_nngp.means import ConstantMean, LinearMean
from pyro_nngp.models import LOO, CoregionalizedLOO, coregionalized

F64 = torch.float64
N, T = 20, 3


def data(n=N):
    x = torch.rand(n, 2, dtype=F64)
    f = torch.stack([torch.sin(5 * x[:, 0]), torch.cos(4 * x[:, 1])], -1)
    return x, f @ torch.tensor([[1.0, 0.5, -1.0], [0.2, -1.0, 0.4]], dtype=F64) + 0.1 * torch.randn(n, T, dtype=F64)


def model(x, y, **settings):
    kernels = [Matern52(2, lengthscale=torch.tensor([0.3, 0.6])), RBF(2, lengthscale=torch.tensor([0.5, 0.4]))]
    gp = CoregionalizedLOO(x, y, kernels, Gaussian(torch.tensor([[0.1], [0.2], [0.05]])), **settings)
    if settings.get("mean") is None:
        gp.mean.value = torch.tensor([0.3, -0.2, 0.1]).to(gp.mean.value)
    return gp


def dense(gp, x, z=None):
    """Covariance of all outputs, point by point; with noise and nugget if z is None."""
    g = gp.mixing.detach()
    pairs = [(kernel(x, x if z is None else z).detach(), g[:, q]) for q, kernel in enumerate(gp.kernel)]
    cov = sum(torch.kron(k, torch.outer(c, c)) for k, c in pairs)
    if z is None:
        cov = cov + gp.jitter * torch.diag(cov.diagonal())
    return cov


def noise(gp, n):
    return torch.diag(gp.likelihood.variance.detach()[:, 0].repeat(n))


def loss(gp, *args):
    return TraceMeanField_ELBO().loss(gp.model, gp.guide, *args)


def basis(mean, x):
    """Change of all outputs, point by point, per unit of each coefficient of the mean."""
    columns = mean.basis(x).detach()
    if not mean.own_shape:
        return columns.repeat_interleave(T, 0)
    return torch.kron(columns[:, None], torch.eye(T, dtype=F64)).flatten(0, 1)


def posterior(gp, x, y, new, level="as it is"):
    """Mean and covariance of the noise-free outputs at new points, point by point; missing values are left out.

    The coefficients of the mean are as they are, or "uncertain" about these, or "estimated" from these data too.
    """
    there = ~y.flatten().isnan()
    cross, cov = dense(gp, x, new)[there], (dense(gp, x) + noise(gp, len(x)))[there][:, there]
    c, c_new = (gp.mean(at).detach().reshape(len(at), -1).expand(-1, T).flatten() for at in (x, new))
    w = torch.linalg.solve(cov, cross)
    residual = y.flatten()[there] - c[there]
    loc, own = c_new + residual @ w, dense(gp, new) - w.mT @ cross
    if level == "as it is":
        return loc, own
    b = basis(gp.mean, x)[there]
    inverse, rest = torch.linalg.inv(b.mT @ torch.linalg.solve(cov, b)), basis(gp.mean, new) - w.mT @ b
    shift = inverse @ b.mT @ torch.linalg.solve(cov, residual) * (level == "estimated")
    return loc + rest @ shift, own + rest @ inverse @ rest.mT


def test_full_neighbors_give_dense_leave_one_out_densities():
    x, y = data()
    gp = model(x, y, num_neighbors=N - 1)
    want = 0.0
    for i in range(N):
        others = torch.arange(N) != i
        mean, cov = posterior(gp, x[others], y[others], x[i : i + 1])
        want += float(dist.MultivariateNormal(mean, cov + noise(gp, 1)).log_prob(y[i]))
    assert -loss(gp) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("mean", [lambda: None, ConstantMean, lambda: LinearMean(2, num_latents=T)])
@pytest.mark.parametrize("has_missing", [False, True])
def test_a_level_is_uncertain_in_predictions_draws_and_leave_one_out_densities(mean, has_missing):
    x, y = data()
    if has_missing:
        y[torch.rand(N, T) < torch.tensor([0.0, 0.3, 0.3])] = torch.nan
    gp = model(x, y, num_neighbors=N - 1, mean=mean(), jitter=1e-10)
    there = ~y.flatten().isnan()
    cov, b = (dense(gp, x) + noise(gp, N))[there][:, there], basis(gp.mean, x)[there]
    best = torch.linalg.solve(b.mT @ torch.linalg.solve(cov, b), b.mT @ torch.linalg.solve(cov, y.flatten()[there]))
    gp.mean.assign(best.reshape(-1, T) if gp.mean.own_shape else best[:, None])
    new = torch.cat([torch.rand(2, 2, dtype=F64), torch.tensor([[9.0, 9.0]], dtype=F64)])
    loc, want = posterior(gp, x, y, new, "uncertain")
    got = gp(new, num_neighbors=N)
    torch.testing.assert_close(got[0].mT.flatten().detach(), loc, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1].mT.flatten().detach(), want.diagonal(), rtol=1e-5, atol=0)
    blocks = gp.predict(new, num_neighbors=N).covariance_matrix.detach()
    for i in range(3):
        own = slice(T * i, T * i + T)
        torch.testing.assert_close(blocks[i], want[own, own] + noise(gp, 1), rtol=1e-4, atol=1e-5)
    draws = gp.sample(new, 20_000, num_neighbors=N + 2).mT.flatten(1)
    spread = (want.diagonal()[:, None] * want.diagonal() + want.square()).sqrt() / 20_000**0.5
    assert ((draws.mT.cov() - want).abs() / spread).max() < 6
    densities = gp.loo(num_neighbors=N - 1)
    for i in range(0, N, 3):
        others, seen = torch.arange(N) != i, ~y[i].isnan()
        loc, cov = posterior(gp, x[others], y[others], x[i : i + 1], "estimated")
        own = dist.MultivariateNormal(loc[seen], (cov + noise(gp, 1))[seen][:, seen])
        assert float(densities[i]) == pytest.approx(float(own.log_prob(y[i, seen])), abs=1e-4)


def test_disjoint_batches_average_exactly():
    x, y = data()
    gp = model(x, y, num_neighbors=4)
    parts = [loss(gp, idx) for idx in torch.randperm(N).split(5)]
    assert sum(parts) / len(parts) == pytest.approx(loss(gp), rel=1e-12)


def test_independent_outputs_equal_separate_models():
    x, y = data()
    kernels = [Matern52(2, variance=1.0, lengthscale=torch.tensor([0.3 + 0.1 * t, 0.6])) for t in range(T)]
    plain = {"num_neighbors": 5, "metric": torch.ones(2, dtype=F64)}
    gp = CoregionalizedLOO(x, y, kernels, Gaussian(0.1), mixing=torch.eye(T, dtype=F64), **plain)
    single = [LOO(x, y[:, t], copy.deepcopy(k), Gaussian(0.1), **plain) for t, k in enumerate(kernels)]
    assert loss(gp) == pytest.approx(sum(loss(one) for one in single), rel=1e-9)
    variances = torch.stack([one(x[:3] + 1, num_neighbors=5)[1] for one in single])
    torch.testing.assert_close(gp(x[:3] + 1)[1], variances, rtol=1e-7, atol=0)


def test_predictions_and_joint_draws_agree_with_dense_conditionals():
    x, y = data()
    gp = model(x, y, num_neighbors=4)
    new = torch.rand(3, 2, dtype=F64)
    gp.mean.requires_grad_(False)
    mean, cov = posterior(gp, x, y, new)
    loc, var = gp(new, num_neighbors=N)
    torch.testing.assert_close(loc.mT.flatten().detach(), mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(var.mT.flatten().detach(), cov.diagonal(), rtol=1e-8, atol=1e-10)
    predictive = gp.predict(new, num_neighbors=N)
    for i in range(3):
        block = cov[T * i : T * i + T, T * i : T * i + T] + noise(gp, 1)
        torch.testing.assert_close(predictive.covariance_matrix[i].detach(), block, rtol=1e-8, atol=1e-10)
    draws = gp.sample(new, 20_000, num_neighbors=N + 2).mT.flatten(1)
    assert ((draws.mean(0) - mean) / (cov.diagonal() / 20_000).sqrt()).abs().max() < 6
    spread = (cov.diagonal()[:, None] * cov.diagonal() + cov.square()).sqrt() / 20_000**0.5
    assert ((draws.mT.cov() - cov).abs() / spread).max() < 6
    assert gp.sample(new, 2).shape == (2, T, 3)
    assert torch.equal(gp.sample(new, 2, seed=1), gp.sample(new, 2, seed=1))
    assert not torch.equal(gp.sample(new, 2), gp.sample(new, 2))
    with pytest.raises(ValueError, match=r"with input_dim = 1 columns, got \(20, 2\)"):
        CoregionalizedLOO(x, y, [RBF(1), RBF(2)], num_neighbors=4)


@pytest.mark.slow
def test_training_and_refreshing_under_all_lengthscales():
    x, y = data(60)
    gp = model(x, y, num_neighbors=4)
    result = fit(gp, 40, batch_size=20, lr=0.05, refresh_every=10, progress=False)
    assert result.losses[-10:].mean() < result.losses[:3].mean()
    gp.refresh_neighbors()
    scales = torch.stack([kernel.lengthscale.detach() for kernel in gp.kernel])
    torch.testing.assert_close(gp.graph.lengthscale, scales.pow(-2).mean(0).rsqrt())


@pytest.mark.slow
def test_mixing_with_a_prior():
    x, y = data()
    prior = dist.Normal(torch.zeros(T, 2, dtype=F64), 1.0).to_event(2)
    gp = CoregionalizedLOO(x, y, [Matern52(2), RBF(2)], num_neighbors=4, mixing=PyroSample(prior))
    result = fit(gp, 30, batch_size=10, lr=0.1, progress=False)
    assert result.losses[-10:].mean() < result.losses[:3].mean()
    assert gp(x[:2])[0].equal(gp(x[:2])[0])  # the median, not a draw


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_one_mean_for_all_outputs_shifts_them(shape):
    def mean(x):
        return (1 + 2 * x[:, 0]).reshape(shape)

    x, y = data()
    shift = mean(x).reshape(-1, 1)
    kernels = [Matern52(2, lengthscale=0.5), RBF(2, lengthscale=0.4)]
    gp, centered = (
        CoregionalizedLOO(x, target, copy.deepcopy(kernels), num_neighbors=4, mean=function)
        for target, function in ((y, mean), (y - shift, lambda x: 0 * x[:, 0]))
    )
    assert loss(gp) == pytest.approx(loss(centered), rel=1e-9)
    for new in (x[:T] + 0.1, x[: T + 2] + 0.1):  # as many points as outputs, too
        row = mean(new).reshape(-1)
        torch.testing.assert_close(gp(new)[0], centered(new)[0] + row, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gp.predict(new).mean, centered.predict(new).mean + row[:, None])
        torch.testing.assert_close(gp.sample(new, 2, seed=1), centered.sample(new, 2, seed=1) + row)


def test_training_leaves_the_given_mixing_alone():
    x, y = data()
    mixing = torch.eye(T, dtype=F64)
    gp = CoregionalizedLOO(x, y, [RBF(2) for _ in range(T)], num_neighbors=4, mixing=mixing)
    gp.mixing.data.add_(1.0)
    assert torch.equal(mixing, torch.eye(T, dtype=F64))


def test_blocks_of_points_do_not_matter(monkeypatch):
    x, y = data()
    gp, new = model(x, y, num_neighbors=4), torch.rand(11, 2, dtype=F64)

    def everything():
        return loss(gp), *gp(new), gp.predict(new).scale_tril, gp.sample(new, 3, seed=0)

    def count(cov, jitter):
        if cov.shape[-1] > T:
            sizes.append(len(cov))
        return cholesky(cov, jitter)

    whole, sizes = everything(), []
    monkeypatch.setattr(coregionalized, "cholesky", count)
    with block_limit(4 * 6 * (5 * T) ** 2):  # four points
        torch.testing.assert_close(everything(), whole, rtol=1e-12, atol=1e-12)
    assert sizes == [4] * 5 + [4, 4, 3] * 3


def test_predictions_average_over_posterior_draws_of_the_hyperparameters():
    x, y = data()
    new, target = torch.rand(4, 2, dtype=F64), torch.randn(4, T, dtype=F64)
    prior = dist.LogNormal(torch.zeros((), dtype=F64), 1.0)
    normal = dist.Normal(torch.zeros(T, 1, dtype=F64), 1.0).to_event(2)
    settings = {"likelihood": Gaussian(0.1), "num_neighbors": 6}
    kernel = RBF(2, variance=1.0, lengthscale=PyroSample(prior))
    gp = CoregionalizedLOO(x, y, [kernel], mixing=PyroSample(normal), **settings)
    gp.mean.requires_grad_(False)  # its uncertainty is that at the medians
    samples = {"kernel.0.lengthscale": torch.tensor([0.3, 0.9], dtype=F64), "mixing": torch.randn(2, T, 1, dtype=F64)}
    each = [
        CoregionalizedLOO(x, y, [RBF(2, variance=1.0, lengthscale=scale)], mixing=mixing, **settings)
        for scale, mixing in zip(*samples.values(), strict=True)
    ]
    for one in each:
        one.mean.requires_grad_(False)
    locs, variances = (torch.stack(values) for values in zip(*(one(new) for one in each), strict=True))
    loc, var = gp(new, samples=samples)
    torch.testing.assert_close(loc, locs.mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(var, variances.mean(0) + locs.var(0, correction=0), rtol=1e-9, atol=1e-9)
    densities = torch.stack([one.predict(new).log_prob(target) for one in each])
    predictive = gp.predict(new, samples=samples)
    torch.testing.assert_close(predictive.log_prob(target), densities.logsumexp(0) - math.log(2), rtol=1e-9, atol=1e-9)
    draws = gp.sample(new, 4000, samples=samples)  # the first half from the first draw, the second from the other
    assert draws.shape == (4000, T, 4)
    for half, one, spread in zip(draws.split(2000), locs, variances, strict=True):
        assert ((half.mean(0) - one) / (spread / 2000).sqrt()).abs().max() < 6
    with pytest.raises(ValueError, match=r"expected samples to hold the site 'mixing'"):
        gp.predict(new, samples={"kernel.0.lengthscale": torch.ones(2, dtype=F64)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(N, dtype=F64)}, r"expected y of shape \(N, T\) with T > 1"),
        ({"y": torch.zeros(N, 1, dtype=F64)}, r"expected y of shape \(N, T\) with T > 1"),
        ({"y": torch.full((N, T), torch.nan, dtype=F64)}, r"expected y with values, got NaN in all rows"),
        ({"kernels": []}, r"expected kernels to be a sequence of kernels"),
        ({"likelihood": StudentT()}, r"expected likelihood to be Gaussian, got StudentT"),
        ({"mixing": torch.zeros(2, 2, dtype=F64)}, r"expected mixing to be finite, of shape \(3, 1\), got \(2, 2\)"),
        ({"num_neighbors": N}, r"expected num_neighbors in 1\.\.19, got 20"),
    ],
)
def test_wrong_input(change, message):
    x, y = data()
    settings = {"x": x, "y": y, "kernels": [RBF(2)], "num_neighbors": 4} | change
    with pytest.raises((ValueError, TypeError), match=message):
        CoregionalizedLOO(**settings)
