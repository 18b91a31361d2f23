import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import matern, stir, waves
from oracles.dense import dense_covariance
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_nngp._memory import block_limit
from pyro_nngp.conditionals.nearest_neighbor import nn_conditional
from pyro_nngp.inference import IntegratedELBO, fit, to_arviz
from pyro_nngp.kernels import Matern32, Periodic
from pyro_nngp.likelihoods import Bernoulli, Gaussian, Poisson
from pyro_nngp.linalg import DEFAULT_JITTER, cholesky
from pyro_nngp.models import SVGP, SWSGP, VNNGP
from pyro_nngp.variational import FullRank, LocalGaussian, MeanField

F64 = torch.float64
N, M, H = 40, 12, 5
FAMILIES = MeanField, FullRank


@pytest.mark.parametrize("guide", FAMILIES)
def test_q_starts_at_what_the_nearest_data_say(guide):
    x, y = waves(N)
    z, weights = x[:M] + 0.01, 0.5 + torch.rand(N, dtype=F64)
    by_row = {"offset": 3 * x[:, 0], "weights": weights}
    options = {"inducing": z, "num_neighbors": H, "mean": lambda x: 2 + x[:, 1], **by_row}
    q = SWSGP(x, y, matern().double(), Gaussian(0.04), guide=guide(), **options).q.distribution()
    cov, nearest = matern().double(), torch.cdist(z / matern().lengthscale, x / matern().lengthscale).argsort(-1)
    for j, near in enumerate(nearest[:, :H]):
        points, residual = torch.cat([z[j : j + 1], x[near]]), (y - 2 - x[:, 1] - 3 * x[:, 0])[near]
        joint = dense_covariance(cov, points).detach()
        w = torch.linalg.solve(joint[1:, 1:] + torch.diag(0.04 / weights[near]), joint[1:, 0])
        torch.testing.assert_close(q.mean[j], w @ residual, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(q.variance[j], joint[0, 0] - w @ joint[1:, 0], rtol=1e-4, atol=1e-5)
    assert not SWSGP(x, y, cov, Gaussian(0.04), guide=guide(scale=0.1), **options).q.distribution().mean.any()
    assert not SWSGP(x, (y > 0).double(), cov, Bernoulli(), inducing=z).q.distribution().mean.any()


@pytest.mark.parametrize(("method", "learns"), [(SVGP, True), (SWSGP, True), (VNNGP, False)])
def test_inducing_points_are_learned_where_nothing_is_said_but_by_nearest_neighbors(method, learns):
    gp = method(*waves(N), inducing=M)
    assert ("z_unconstrained" in dict(gp.named_parameters())) == learns


def test_a_start_in_the_data_spares_steps():
    x, y = waves(1000)
    gp = SWSGP(x, y, matern().double(), Gaussian(0.04), inducing=200)
    with torch.no_grad():
        assert (gp(x)[0] - torch.sin(5 * x.sum(-1))).square().mean().sqrt() < 0.12


def build(x, y, likelihood=None, **settings):
    settings = {"inducing": M, "num_neighbors": H, "guide": MeanField(scale=0.5)} | settings
    return stir(SWSGP(x, y, matern(), Gaussian(0.125) if likelihood is None else likelihood, **settings))


def loss(gp, *args, elbo=None):
    return (IntegratedELBO() if elbo is None else elbo).loss(gp.model, gp.guide, *args)


def covariance(gp):
    """S over all inducing points."""
    q = gp.q.distribution()
    return torch.diag(q.variance) if isinstance(gp.q, LocalGaussian) else q.covariance_matrix


def dense_bound(gp, num_neighbors):
    """The negative bound, one datum at a time, with gradients."""
    prior, cov, loc = dense_covariance(gp.kernel, gp.z), covariance(gp), gp.q.distribution().mean
    value = 0.0
    for point, target in zip(gp.x, gp.y, strict=True):
        near = ((gp.z - point) / gp.lengthscale).norm(dim=-1).argsort()[:num_neighbors]
        mean, spread = loc[near], cov[near][:, near]
        p = MultivariateNormal(torch.zeros_like(mean), prior[near][:, near])
        cross = gp.kernel(gp.z[near], point[None])[:, 0]
        w = torch.cholesky_solve(cross[:, None], torch.linalg.cholesky(p.covariance_matrix))[:, 0]
        var = gp.kernel(point[None], diag=True)[0] * (1 + DEFAULT_JITTER) - w @ cross + w @ spread @ w
        expected = gp.likelihood.expected_log_prob(target, gp.mean.value + w @ mean, var)
        value = value - expected + kl_divergence(MultivariateNormal(mean, spread), p) / len(gp.x)
    return value


@pytest.mark.parametrize("guide", FAMILIES)
@pytest.mark.parametrize("learn_inducing", [True, False])
def test_bound_and_its_gradient_agree_with_dense_ones(guide, learn_inducing):
    x, y = waves(N)
    gp = build(x, y, guide=guide(scale=0.5), learn_inducing=learn_inducing)
    gp.mean.value = torch.full_like(gp.mean.value, 0.25)
    params = dict(gp.named_parameters())
    want = dense_bound(gp, H)
    wanted = dict(zip(params, torch.autograd.grad(want, params.values()), strict=True))
    found = IntegratedELBO().differentiable_loss(gp.model, gp.guide)
    found.backward()
    assert float(found.detach()) == pytest.approx(float(want.detach()), rel=1e-9)
    for name, param in params.items():
        torch.testing.assert_close(param.grad, wanted[name].to(param.dtype), rtol=1e-5, atol=1e-6)


def like(svgp, num_neighbors):
    """The SWSGP with the inducing points and the q(u) of an SVGP."""
    gp = SWSGP(
        svgp.x,
        svgp.y,
        svgp.kernel,
        svgp.likelihood,
        num_neighbors=num_neighbors,
        inducing=svgp.z.detach(),
        guide=FullRank(),
    )
    tril, q = cholesky(gp.kernel(gp.z)).detach(), svgp.q.distribution()
    gp.q.assign(dist.MultivariateNormal(q.mean @ tril.mT, scale_tril=tril @ q.scale_tril))
    return gp


def test_all_neighbors_give_svgp():
    x, y = waves(N)
    svgp = SVGP(x, y, matern(), Gaussian(0.125), inducing=M)
    svgp.solve()
    gp = like(svgp, M)
    assert loss(gp) == pytest.approx(loss(svgp), rel=1e-9)
    idx = torch.arange(0, N, 4)
    assert loss(gp, idx) == pytest.approx(loss(svgp, idx), rel=1e-9)
    new = waves(6)[0]
    for one, two in zip(gp(new), svgp(new), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    # SVGP-M-H predicts likewise, in its own metric
    for one, two in zip(gp(new, num_neighbors=H), svgp(new, num_neighbors=H), strict=True):
        assert (one - two).abs().max() < 0.5
    gp.refresh_neighbors()
    for one, two in zip(gp(new, num_neighbors=H), svgp(new, num_neighbors=H), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_averaged_local_divergence_grows_with_neighbors_up_to_that_of_svgp():
    """Appendix C of the VNNGP paper: it is a divergence of marginals, so it can only lose."""
    x, y = waves(N)
    svgp = SVGP(x, y, matern(), Gaussian(0.125), inducing=M)
    svgp.solve()
    full = float(kl_divergence(svgp.q.distribution(), dist.Normal(torch.zeros(M, dtype=F64), 1.0).to_event(1)).detach())
    found = []
    for num_neighbors in (1, 3, 6, 9, M):
        gp = like(svgp, num_neighbors)
        loc, var = (value.detach() for value in gp(x))
        found.append(loss(gp) + float(gp.likelihood.expected_log_prob(y, loc, var).sum().detach()))
    assert (torch.tensor(found).diff() > 0.01).all()
    assert found[-1] == pytest.approx(full, rel=1e-8)


def test_diagonal_covariance_is_a_full_one_with_nothing_beside_the_diagonal():
    x, y = waves(N)
    diagonal, full = build(x, y), build(x, y, guide=FullRank())
    q = diagonal.q.distribution()
    full.q.assign(dist.Normal(q.loc, q.scale).to_event(1))
    with torch.no_grad():
        full.z.copy_(diagonal.z)
    assert loss(full) == pytest.approx(loss(diagonal), rel=1e-9)
    for one, two in zip(full(x), diagonal(x), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_neighbors_given_are_neighbors_found():
    x, y = waves(N)
    for learn in (True, False):
        gp, idx = build(x, y, learn_inducing=learn), torch.arange(3, 20)
        args = gp.batch_args(idx, torch.Generator())
        lengthscale = gp.kernel.lengthscale.detach().to(F64)
        near = torch.cdist(x[idx] / lengthscale, gp.z.detach() / lengthscale).argsort(-1)[:, :H]
        assert torch.equal(args[1], near)
        assert loss(gp, *args) == loss(gp, idx)


def test_learned_inducing_points_have_their_neighbors_found_at_each_step():
    x, y = waves(150)
    gp = build(x, y)
    before = gp.neighbors(None)
    fit(gp, 25, batch_size=50, lr=0.05, progress=False)
    lengthscale = gp.kernel.lengthscale.detach().to(F64)
    after = torch.cdist(x / lengthscale, gp.z.detach() / lengthscale).argsort(-1)[:, :H]
    assert not torch.equal(before, after)
    assert torch.equal(gp.neighbors(None), after)


@pytest.mark.parametrize("learn_inducing", [True, False])
def test_refresh_takes_the_learned_lengthscales(learn_inducing):
    x, y = waves(N)
    gp = build(x, y, learn_inducing=learn_inducing)
    before = gp.neighbors(None).clone()
    gp.kernel.lengthscale = scale = torch.tensor([3.0, 0.1])
    gp.refresh_neighbors()
    after = torch.cdist(x / scale, gp.z.detach() / scale).argsort(-1)[:, :H]
    assert torch.equal(gp.neighbors(None), after)
    assert not torch.equal(before, after)


def test_gradients_of_the_table_are_sparse_in_training():
    x, y = waves(200)
    gp = SWSGP(x, y, matern(), Gaussian(0.125), inducing=x.clone(), learn_inducing=False, num_neighbors=4)
    start = gp.q.loc.detach().clone()
    fit(gp, 1, batch_size=10, lr=0.1, progress=False)
    touched = gp.q.loc.grad.coalesce().indices()[0]
    moved = (gp.q.loc.detach() - start).abs()[:, 0] > 0
    assert gp.q.loc.grad.is_sparse
    assert len(touched) <= 40
    assert torch.equal(moved.nonzero()[:, 0], touched)


@pytest.mark.slow
@pytest.mark.parametrize("guide", FAMILIES)
def test_draws_have_the_moments_of_the_guide(guide):
    x, y = waves(N)
    gp, new = build(x, y, guide=guide(scale=0.5)), waves(6)[0]
    gp.mean.value = torch.full_like(gp.mean.value, 0.5)
    scale = gp.kernel.lengthscale.detach()
    near = torch.cdist(new / scale, gp.z.detach() / scale).argsort(-1)[:, :H]
    w, var = nn_conditional(gp.kernel, new, gp.z.detach()[near])
    weights = torch.zeros(6, M, dtype=F64).scatter_(1, near, w.detach())
    want = weights @ covariance(gp).detach() @ weights.mT + torch.diag(var.detach())
    draws = gp.sample(new, 20_000)
    error = ((want.diagonal()[:, None] * want.diagonal() + want.square()) / 20_000).sqrt()
    assert ((draws.mT.cov() - want).abs() < 6 * error).all()
    mean = 0.5 + weights @ gp.q.distribution().mean.detach()
    assert ((draws.mean(0) - mean).abs() < 6 * (want.diagonal() / 20_000).sqrt()).all()
    loc, spread = gp(new)
    torch.testing.assert_close(loc.detach(), mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(spread.detach(), want.diagonal(), rtol=1e-8, atol=1e-9)


def most_correlated(k, x, z):
    """The H points z of largest |k(x, z)|, for a kernel of constant variance."""
    return k(x, z).detach().abs().topk(H).indices


def share(found, wanted):
    """Of the wanted neighbors, those that were found."""
    return (wanted[:, :, None] == found[:, None, :]).any(-1).double().mean()


@pytest.mark.parametrize("learn_inducing", [True, False])
def test_neighbors_under_a_periodic_kernel_are_the_most_correlated_inducing_points(learn_inducing):
    x, y = waves(N)
    z = torch.rand(60, 2, dtype=F64)
    one = torch.tensor(1.0)
    k = Periodic(1, one, one, torch.tensor(0.2), active_dims=[0]) * Matern32(1, one, one / 2, active_dims=[1])
    gp = SWSGP(x, y, k.double(), Gaussian(0.1), inducing=z, num_neighbors=H, learn_inducing=learn_inducing)
    assert share(gp.neighbors(None), most_correlated(gp.kernel, x, z)) > 0.95  # by Euclidean distance .2
    with torch.no_grad():
        gp.kernel.kern0.period = torch.tensor(0.5, dtype=F64)
    gp.refresh_neighbors()
    for found in (gp.neighbors(None), gp.posterior(gp.bound()).neighbors(x, None)):
        assert share(found, most_correlated(gp.kernel, x, z)) > 0.95


@pytest.mark.parametrize("learn_inducing", [True, False])
def test_a_covariance_function_as_its_own_metric_chooses_the_largest_values(learn_inducing):
    def season(a, b):
        apart = a[..., :, None, :] - b[..., None, :, :]
        return torch.exp(-2 * torch.sin(math.pi * apart[..., 0] / 0.2).square() - apart[..., 1].abs())

    (x, y), z = waves(N), torch.rand(60, 2, dtype=F64)
    settings = {"inducing": z, "num_neighbors": H, "learn_inducing": learn_inducing}
    gp = SWSGP(x, y, season, Gaussian(0.1), metric=lambda a, b: -season(a, b), **settings)
    for _ in range(2):
        assert torch.equal(gp.neighbors(None), most_correlated(season, x, z))
        assert torch.equal(gp.posterior(gp.bound()).neighbors(x, None), most_correlated(season, x, z))
        gp.refresh_neighbors()


def test_model_is_the_stated_density():
    x, y = waves(N)
    gp, u, f = build(x, y), torch.randn(N, H, dtype=F64), torch.randn(N, dtype=F64)
    trace = pyro.poutine.trace(pyro.poutine.condition(gp.model, {"u": u, "f": f})).get_trace()
    want = 0.0
    for i, near in enumerate(gp.neighbors(None)):
        prior = dense_covariance(gp.kernel, gp.z[near])
        w, var = nn_conditional(gp.kernel, x[i : i + 1], gp.z[near][None])
        want = want + MultivariateNormal(torch.zeros(H, dtype=F64), prior).log_prob(u[i]) / N
        want = want + dist.Normal(gp.mean.value + w[0] @ u[i], var[0].sqrt()).log_prob(f[i])
        want = want + dist.Normal(f[i], gp.likelihood.variance.sqrt()).log_prob(y[i])
    assert float(trace.log_prob_sum().detach()) == pytest.approx(float(want.detach()), rel=1e-9)


def test_hidden_duplicates_train_in_single_precision():
    x, y = waves(60, torch.float32)
    gp = SWSGP(x, y, matern(), Gaussian(0.125), inducing=torch.cat([x[:20], x[:20]]), num_neighbors=8)
    fit(gp, 5, batch_size=20, progress=False)
    assert torch.isfinite(gp(x)[1]).all()


def test_more_neighbors_than_inducing_points():
    x, y = waves(N)
    with pytest.raises(ValueError, match=r"expected num_neighbors in 1\.\.12, got 13"):
        build(x, y)(x, num_neighbors=M + 1)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Poisson()], ids=lambda each: type(each).__name__)
def test_intervals_without_a_log_evidence_come_with_a_warning(likelihood):
    x = torch.rand(30, 2)
    gp = SWSGP(x, (x[:, 0] > 0.5).float(), None, likelihood, inducing=10, num_neighbors=5)
    name = type(likelihood).__name__
    message = rf"SWSGP: intervals of f from {name} data are too narrow: .* Take SVGP or VNNGP for them\."
    for call in (lambda: gp(x), lambda: gp.predict(x), lambda: gp.sample(x, 2), lambda: to_arviz(gp, num_samples=2)):
        with pytest.warns(UserWarning, match=message):
            call()
    SWSGP(x, x[:, 0], inducing=10, num_neighbors=5)(x)  # warnings are errors


@pytest.mark.parametrize(
    ("rows", "points"), [(40, 40), (100, 64), (2560, 80), pytest.param(40_000, 1024, marks=pytest.mark.slow)]
)
def test_inducing_points_are_a_share_of_the_rows(rows, points):
    assert SWSGP(torch.rand(rows, 2), None, num_neighbors=4).num_inducing == points


def test_log_densities_of_few_rows_given_those_before_them_sum_to_the_log_evidence():
    x, y = waves(20)
    gp = build(x, y, Gaussian(0.1))
    cov = dense_covariance(gp.kernel, x).detach() + 0.1 * torch.eye(20, dtype=x.dtype)
    want = MultivariateNormal(gp.mean(x).detach(), cov).log_prob(y)
    for entries in (10**6, 60):  # in one block, and in several
        with block_limit(entries):
            assert 20 * gp.log_density(torch.arange(20)).item() == pytest.approx(want.item(), rel=1e-6)
    for likelihood, settings in ((Gaussian(0.1), {"weights": torch.ones_like(y)}), (Poisson(), {}), (Bernoulli(), {})):
        assert build(x, (y > 0).to(y), likelihood, **settings).log_density(torch.arange(20)) is None
