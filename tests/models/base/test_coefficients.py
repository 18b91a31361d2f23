"""Coefficients of a linear mean with priors: their joint posterior with f in each method that solves for it."""

import contextlib
import copy

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.nn import PyroSample

import pyro_nngp as nngp
from pyro_nngp.inference import IntegratedELBO
from pyro_nngp.inference.svi.cubature import CubatureELBO
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Gaussian, NegativeBinomial, Poisson, StudentT
from pyro_nngp.means import LinearMean
from pyro_nngp.models.base import Fantasies
from pyro_nngp.variational.natural_gradient import gaussian_sites

N, NOISE = 50, 0.04
generator = torch.Generator().manual_seed(0)
x = torch.rand(N, 3, dtype=torch.float64, generator=generator) * torch.tensor([1.0, 1.0, 1000.0], dtype=torch.float64)
x_new = torch.tensor([[0.5, 0.5, 500.0], [3.0, 3.0, 2000.0]], dtype=torch.float64)
white = torch.randn(2, N, dtype=torch.float64, generator=generator)


def kernel():
    return Matern32(2, variance=0.5, lengthscale=0.3, active_dims=[0, 1]).double()


COV = kernel()(x, x).detach()
f = torch.linalg.cholesky(COV + 1e-8 * torch.eye(N)) @ white[0] + 3 + 0.004 * x[:, 2]
y = f + NOISE**0.5 * white[1]


def trend(prior="weak", **settings):
    return LinearMean(1, prior=prior, active_dims=[2], **settings)


def dense(mean, target, noise):
    """Moments of the coefficients, and of f at new points and at the data, under the exact process."""
    loc, precision = mean.prior_moments()
    basis, basis_new = mean.basis(x), mean.basis(x_new)
    system = COV + torch.diag(noise)
    solved = torch.linalg.solve(system, torch.cat([basis, (target - basis @ loc)[:, None]], 1))
    cov = torch.linalg.inv(basis.T @ solved[:, :-1] + precision.diag())
    coefficients = loc + cov @ (basis.T @ solved[:, -1])

    def joint(a, b, basis_a, basis_b):
        return kernel()(a, b).detach() + basis_a @ torch.diag(1 / precision) @ basis_b.T

    whole = joint(x, x, basis, basis) + torch.diag(noise)
    moments = []
    for at, own in ((x_new, basis_new), (x, basis)):
        cross = joint(at, x, own, basis)
        gain = torch.linalg.solve(whole, cross.T).T
        moments.append(
            (own @ loc + gain @ (target - basis @ loc), (joint(at, at, own, own) - gain @ cross.T).diagonal())
        )
    return coefficients, cov, moments


def posterior(gp):
    tril = gp.mean.posterior_tril
    return gp.mean.posterior_loc, tril @ tril.T


@pytest.mark.parametrize("method", [nngp.Vecchia, nngp.LOO, nngp.MLLk, nngp.VNNGP])
def test_gaussian_data_give_the_exact_joint_posterior(method):
    gp = method(x, y, kernel(), Gaussian(NOISE), num_neighbors=N - 1, mean=trend(), jitter=1e-9)
    gp.solve()
    coefficients, cov, ((loc, var), _) = dense(gp.mean, y, torch.full_like(y, NOISE))
    for got, want in zip(posterior(gp), (coefficients, cov), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)
    found = gp(x_new, num_neighbors=N)
    torch.testing.assert_close(found[0].detach(), loc, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1].detach(), var, rtol=1e-4, atol=1e-6)
    low = gp.summary().loc["mean.slope[0]", "lower"]
    assert low == pytest.approx(float(coefficients[1] - 1.959964 * cov[1, 1].sqrt()), rel=1e-4)


@pytest.mark.parametrize("method", [nngp.Vecchia, nngp.VNNGP])
def test_joint_posteriors_have_the_uncertainty_of_coefficients_and_learn_them_from_fantasies(method):
    gp = method(x[:-4], y[:-4], kernel(), Gaussian(NOISE), num_neighbors=N - 5, mean=trend(), jitter=1e-9)
    gp.solve()
    loc, cov = gp.joint(x_new, num_neighbors=N - 4)
    for got, want in zip((loc, cov.diagonal()), gp(x_new, num_neighbors=N - 4), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    # all data as those of the method and four fantasies: the exact posterior
    whole = method(x, y, kernel(), Gaussian(NOISE), num_neighbors=N - 1, mean=copy.deepcopy(gp.mean), jitter=1e-9)
    whole.solve()
    with_fantasies = gp.joint(x_new, num_neighbors=N - 4, fantasies=Fantasies(x[-4:], y[-4:]))
    for got, want in zip(with_fantasies, whole.joint(x_new, num_neighbors=N), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", [nngp.Vecchia, nngp.LOO])
def test_new_rows_count_for_the_coefficients(method):
    gp = method(x[:30], y[:30], kernel(), Gaussian(NOISE), num_neighbors=29, mean=trend(), jitter=1e-9)
    gp.solve()
    before = [value.clone() for value in posterior(gp)]
    new = gp.condition_on(x[30:], y[30:])
    assert all(torch.equal(value, old) for value, old in zip(posterior(gp), before, strict=True))
    several = gp.condition_on(x[30:], torch.stack([y[30:], 1 - y[30:]]))  # fantasies have them in common
    assert all(torch.equal(value, old) for value, old in zip(posterior(several), before, strict=True))
    gp.extend(x[30:], y[30:])
    coefficients, cov, _ = dense(gp.mean, y, torch.full_like(y, NOISE))
    for grown in (gp, new):
        for got, want in zip(posterior(grown), (coefficients, cov), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-6)  # of 32 neighbors
    assert not torch.allclose(before[1], cov, rtol=0.1)


@pytest.mark.slow
def test_the_guide_draws_coefficients_and_f_jointly():
    gp = nngp.VNNGP(x, y, kernel(), Gaussian(NOISE), num_neighbors=N - 1, mean=trend(), jitter=1e-9)
    gp.solve()
    _, cov, (_, (loc, var)) = dense(gp.mean, y, torch.full_like(y, NOISE))
    torch.manual_seed(1)
    with torch.no_grad():
        traces = [poutine.trace(gp.guide).get_trace() for _ in range(400)]
    draws = torch.stack([trace.nodes["f"]["value"] for trace in traces])
    assert float(((draws.mean(0) - loc) / var.sqrt()).abs().max()) < 6 / 20
    assert float((draws.var(0) / var).mean()) == pytest.approx(1, abs=0.1)
    both = torch.stack([torch.stack([t.nodes["mean.value"]["value"], *t.nodes["mean.slope"]["value"]]) for t in traces])
    torch.testing.assert_close(torch.cov(both.T) / cov, torch.ones_like(cov), rtol=0.5, atol=0.5)
    joint = gp.sample(x_new, 300, seed=0)
    assert float((joint.var(0) / gp(x_new)[1].detach()).log().abs().max()) < 0.5


@pytest.mark.slow
def test_the_bound_is_the_evidence_with_coefficients_integrated_out():
    gp = nngp.VNNGP(x, y, kernel(), Gaussian(NOISE), num_neighbors=N - 1, mean=trend(), jitter=1e-9)
    gp.solve()
    loc, precision = gp.mean.prior_moments()
    basis = gp.mean.basis(x)
    cov = COV + NOISE * torch.eye(N) + basis @ torch.diag(1 / precision) @ basis.T
    want = dist.MultivariateNormal(basis @ loc, cov).log_prob(y)
    torch.manual_seed(0)
    losses = torch.tensor([IntegratedELBO().loss(gp.model, gp.guide) for _ in range(200)])
    assert abs(-losses.mean() - want) < 6 * losses.std() / 200**0.5 + 1e-3


@pytest.mark.parametrize(
    ("method", "settings"), [(nngp.Vecchia, {}), (nngp.Vecchia, {"inducing": x[:9]}), (nngp.VNNGP, {})]
)
def test_the_loss_at_the_nodes_of_coefficients_is_the_evidence_as_is_its_gradient(method, settings):
    gp = method(x, y, kernel(), Gaussian(NOISE), mean=trend(), jitter=1e-9, num_neighbors=N - 1, **settings)
    gp.solve()
    loc, precision = gp.mean.prior_moments()
    basis, bound, eye = gp.mean.basis(x), gp.bound(), torch.eye(N)
    cov = bound.covariance(x, x) + bound.likelihood.variance * eye + basis @ torch.diag(1 / precision) @ basis.T
    want = -dist.MultivariateNormal(basis @ loc, cov).log_prob(y)
    with gp.profile.optimum() if method is nngp.VNNGP else contextlib.nullcontext():
        got = CubatureELBO(gp).differentiable_loss(gp.model, gp.guide)
    assert got.item() == pytest.approx(want.item(), abs=1e-4)
    learned = [*gp.kernel.parameters(), *gp.likelihood.parameters()]
    for left, right in zip(torch.autograd.grad(got, learned), torch.autograd.grad(want, learned), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_latents", [None, 2])
def test_nodes_have_the_moments_of_the_posterior(num_latents):
    mean = trend(num_latents=num_latents)
    gp = nngp.Vecchia(x, torch.stack([y, y.flip(0)], 1) if num_latents else y, kernel(), mean=mean, num_neighbors=8)
    gp.solve()
    nodes = torch.cat([values.reshape(len(values), -1) for values in gp.mean.nodes().values()], 1)
    loc, cov = posterior(gp)
    assert len(nodes) == 1 + len(loc)
    torch.testing.assert_close(nodes.mean(0), loc)
    torch.testing.assert_close(torch.cov(nodes.T, correction=0), cov)


@pytest.mark.slow
def test_counts_train_on_a_bound_that_integrates_over_coefficients():
    """Not below where steps of Adam on draws end, less what these leave."""
    torch.manual_seed(2)
    counts, ends = Poisson()((f - 4) / 2).sample(), []
    for optimizer in (None, "adam"):
        gp = nngp.VNNGP(x, counts, Matern32(2, active_dims=[0, 1]), Poisson(), num_neighbors=N - 1, mean=trend())
        result = nngp.fit(gp, progress=False, optimizer=optimizer)
        gp.solve()
        with torch.no_grad(), gp.profile.optimum():
            ends.append(-CubatureELBO(gp).loss(gp.model, gp.guide))
        assert result.optimizer == (optimizer or "lbfgs")
        table = gp.summary()
        assert table.filter(like="lengthscale", axis=0)[["lower", "upper"]].notna().all(axis=None)
    assert ends[0] > ends[1] - 0.1


@pytest.mark.parametrize("likelihood", [Bernoulli, NegativeBinomial, StudentT])
def test_auxiliary_variables_alternate_with_steps_that_integrate_over_coefficients(likelihood):
    torch.manual_seed(2)
    data = likelihood()((f - 4) / 2).sample()
    gp = nngp.LOO(x, data, Matern32(2, active_dims=[0, 1]), likelihood(), num_neighbors=10, mean=trend())
    assert nngp.fit(gp, progress=False).optimizer == "lbfgs"
    variance = PyroSample(dist.LogNormal(torch.tensor(0.0).double(), 1.0))
    other = nngp.LOO(x, data, Matern32(2, variance, active_dims=[0, 1]), likelihood(), num_neighbors=10, mean=trend())
    assert not other.can_alternate


@pytest.mark.parametrize("method", [nngp.Vecchia, nngp.LOO, nngp.MLLk, nngp.VNNGP])
def test_training_needs_no_draws_of_coefficients(method):
    gp = method(x, y, kernel(), num_neighbors=8, mean=trend())
    assert nngp.fit(gp, progress=False).optimizer == "lbfgs"
    own = method(x, y, kernel(), num_neighbors=8, mean=trend())  # an objective of one's own has draws
    assert nngp.fit(own, elbo=Trace_ELBO(), max_seconds=0.01, progress=False).optimizer == "adam"


@pytest.mark.parametrize("likelihood", [Poisson(), Bernoulli()])
def test_other_data_give_the_posterior_under_their_sites(likelihood):
    torch.manual_seed(2)
    counts = likelihood((f - 4) / 2).sample()
    gp = nngp.VNNGP(x, counts, kernel(), likelihood, num_neighbors=N - 1, mean=trend(), jitter=1e-9)
    gp.solve()
    target, precision = gp.q.target + gp.mean.basis(x) @ gp.mean.posterior_loc, gp.q.precision
    coefficients, cov, ((loc, var), (at_data, spread)) = dense(gp.mean, target, 1 / precision)
    want = gaussian_sites(likelihood, counts, at_data, spread - trend_part(gp, precision))
    torch.testing.assert_close(posterior(gp)[0], coefficients, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(posterior(gp)[1], cov, rtol=1e-3, atol=1e-8)
    torch.testing.assert_close(gp(x_new)[0].detach(), loc, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(gp(x_new)[1].detach(), var, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(precision, want[1], rtol=0.05, atol=0.01)  # the sites are those of f itself


def trend_part(gp, precision):
    """Variance of f at the data because of the coefficients."""
    basis = gp.mean.basis(x)
    rest = basis - COV @ torch.linalg.solve(COV + torch.diag(1 / precision), basis)
    return ((rest @ posterior(gp)[1]) * rest).sum(-1)


def test_labels_have_a_posterior_of_coefficients_in_loo():
    torch.manual_seed(2)
    labels = Bernoulli()((f - 5) / 2).sample()
    gp = nngp.LOO(x, labels, kernel(), Bernoulli(), num_neighbors=N - 1, mean=trend())
    sites = nngp.VNNGP(x, labels, kernel(), Bernoulli(), num_neighbors=N - 1, mean=trend())
    for _ in range(4):
        gp.solve()
    sites.solve()
    (loc, cov), (want, want_cov) = posterior(gp), posterior(sites)
    assert float(((loc - want) / want_cov.diagonal().sqrt()).abs().max()) < 0.2
    torch.testing.assert_close(cov.diagonal(), want_cov.diagonal(), rtol=0.2, atol=1e-9)


@pytest.mark.parametrize("method", [nngp.Vecchia, nngp.VNNGP])
@pytest.mark.parametrize("own", [True, False])
def test_several_outputs_have_their_coefficients_or_share_them(method, own):
    mean = trend(num_latents=2 if own else None)
    both = torch.stack([y, y.flip(0)], 1)
    gp = method(x, both, kernel(), Gaussian(NOISE), num_neighbors=N - 1, mean=mean, jitter=1e-9)
    gp.solve()
    noise = torch.full_like(y, NOISE)
    if own:
        for output in range(2):
            alone = method(
                x, both[:, output], kernel(), Gaussian(NOISE), num_neighbors=N - 1, mean=trend(), jitter=1e-9
            )
            for event_dim, name in enumerate(("value", "slope")):
                prior = gp.mean._pyro_samples[name].base_dist
                one = dist.Normal(prior.loc[..., output], prior.scale[..., output]).to_event(event_dim)
                setattr(alone.mean, name, PyroSample(one))
            alone.solve()
            torch.testing.assert_close(gp.mean.posterior_loc[output::2], alone.mean.posterior_loc, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(gp(x_new)[1][output].detach(), alone(x_new)[1].detach(), rtol=1e-6, atol=1e-9)
        return
    loc, precision = gp.mean.prior_moments()
    basis, system = gp.mean.basis(x), COV + torch.diag(noise)
    solved = torch.linalg.solve(system, basis)
    cov = torch.linalg.inv(2 * basis.T @ solved + precision.diag())
    torch.testing.assert_close(posterior(gp)[1], cov, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(posterior(gp)[0], cov @ (solved.T @ both.sum(1) + precision * loc), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_weak_priors_follow_the_units_of_covariates_and_data(unit):
    scale = torch.tensor([1.0, 1.0, unit], dtype=torch.float64)
    fits = []
    for places, data, size in ((x, y, 1.0), (x * scale + scale * 1e3, 100 * y, 100.0)):
        mean = trend()
        gp = nngp.Vecchia(
            places, data, Matern32(2, 0.5 * size**2, 0.3, active_dims=[0, 1]), Gaussian(NOISE * size**2), mean=mean
        )
        gp.solve()
        fits.append(posterior(gp))
    factor = torch.tensor([100.0, 100.0 / unit], dtype=torch.float64)
    torch.testing.assert_close(fits[1][0], fits[0][0] * factor, rtol=1e-3, atol=0)
    torch.testing.assert_close(fits[1][1].diagonal(), fits[0][1].diagonal() * factor.square(), rtol=1e-3, atol=0)


@pytest.mark.slow
def test_95_percent_intervals_cover_simulated_coefficients():
    torch.manual_seed(3)
    prior, inside, sets = dist.Normal(torch.tensor(0.0, dtype=torch.float64), 2.0), 0, 60
    root, column = torch.linalg.cholesky(COV + 1e-8 * torch.eye(N)), x[:, 2] / 1000
    places = torch.cat([x[:, :2], column[:, None]], 1)
    for _ in range(sets):
        value, slope = prior.sample((2,))
        data = value + slope * (column - column.mean()) + root @ torch.randn(N).double() + 0.2 * torch.randn(N).double()
        gp = nngp.Vecchia(places, data, kernel(), Gaussian(NOISE), mean=trend(prior), num_neighbors=15)
        gp.solve()
        table = gp.summary()
        for name, truth in (("mean.value", value), ("mean.slope[0]", slope)):
            inside += int(table.loc[name, "lower"] <= float(truth) <= table.loc[name, "upper"])
    assert 0.88 * 2 * sets <= inside <= 2 * sets - 1


@pytest.mark.slow
def test_coefficients_are_in_exports_and_survive_saving(tmp_path):
    gp = nngp.VNNGP(x, y, kernel(), Gaussian(NOISE), num_neighbors=10, mean=trend())
    gp.solve()
    idata = nngp.to_arviz(gp, num_samples=60)
    slope = torch.from_numpy(idata.posterior["mean.slope"].to_numpy()).flatten()
    assert float(slope.std()) == pytest.approx(float(posterior(gp)[1][1, 1].sqrt()), rel=0.5)
    gp.save(tmp_path / "gp.safetensors")
    again = nngp.load(tmp_path / "gp.safetensors")
    for got, want in zip(again(x_new), gp(x_new), strict=True):
        assert torch.equal(got, want)


def test_rows_that_come_later_count():
    gp = nngp.VNNGP(x[:-5], y[:-5], kernel(), Gaussian(NOISE), num_neighbors=N - 6, mean=trend(), jitter=1e-9)
    gp.solve()
    center = gp.mean.center.clone()
    gp.extend(x[-5:], y[-5:])
    gp.solve()
    assert torch.equal(gp.mean.center, center)
    coefficients, cov, _ = dense(gp.mean, y, torch.full_like(y, NOISE))
    torch.testing.assert_close(posterior(gp)[1], cov, rtol=1e-3, atol=1e-8)
    torch.testing.assert_close(posterior(gp)[0], coefficients, rtol=1e-3, atol=1e-6)


def test_methods_that_hold_coefficients_independent_of_f_say_so():
    with pytest.warns(UserWarning, match="SVGP: its guide holds the coefficients of the mean independent of f"):
        nngp.SVGP(x, y, kernel(), Gaussian(NOISE), inducing=5, mean=trend())


def test_columns_of_a_linear_mean():
    mean = LinearMean(2, active_dims=[2, 0])
    torch.testing.assert_close(mean.double().basis(x), torch.stack([torch.ones(N).double(), x[:, 2], x[:, 0]], 1))
    with pytest.raises(ValueError, match=r"LinearMean: expected active_dims of length 2, got 1"):
        LinearMean(2, active_dims=[0])
    with pytest.raises(TypeError, match="LinearMean: expected active_dims"):
        LinearMean(1, active_dims=["a"])
