"""LMC against the dense multi-output process, and what every method has to do."""

import copy
import math

import arviz as az
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar, solve_alone, surface
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroSample
from pyro.optim import Adam
from torch import nn

import pyro_nngp as nngp
from pyro_nngp.inference import IntegratedELBO, fit, to_arviz
from pyro_nngp.kernels import RBF, Matern, Matern52
from pyro_nngp.likelihoods import Bernoulli, Binomial, Gaussian, PerOutput, Poisson, StudentT
from pyro_nngp.linalg import DEFAULT_JITTER
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.means import ConstantMean, LinearMean
from pyro_nngp.models import LMC, VNNGP, Vecchia

F64 = torch.float64
N, T = 24, 3
MIXING = torch.tensor([[1.0, 0.3], [-0.5, 0.8], [0.2, 0.9]], dtype=F64)
NOISE = torch.tensor([0.1, 0.2, 0.3], dtype=F64)
LEVEL = torch.tensor([0.1, -0.2, 0.3], dtype=F64)


def kernels():
    return [Matern52(2, variance=scalar(1.0), lengthscale=scalar(0.4)), RBF(2, scalar(1.5), scalar(0.6))]


def data(n=N, holes=True):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(n, d, generator=generator, dtype=F64) for d in (2, T))
    if holes:
        y[torch.rand(n, T, generator=generator) < 0.2] = torch.nan
        y[:, 2] = torch.where(y.isnan().all(-1), 0.5, y[:, 2])
        y[0] = torch.tensor([0.3, torch.nan, torch.nan])
    return x, 3 * y - 1


def build(x=None, y=None, likelihood=None, **settings):
    if x is None:
        x, y = data()
    parts = [Gaussian(v) for v in NOISE] if likelihood is None else likelihood
    settings = {"mixing": MIXING, "num_neighbors": len(x) - 1} | settings
    gp = LMC(x, y, settings.pop("kernels", None) or kernels(), parts, **settings)
    gp.mean.value = LEVEL
    return gp


def covariance(gp, x, z=None):
    """Covariance of all outputs, output by output; with nugget if z is None."""
    total = 0.0
    each = list(gp.kernel) * (len(gp.q.loc) if len(gp.kernel) == 1 else 1)
    loadings = [gp.loading(at).detach().expand(len(at), -1, -1) for at in (x, x if z is None else z)]
    for number, kernel in enumerate(each):
        k = kernel(x, x if z is None else z).detach()
        k = k + DEFAULT_JITTER * torch.diag(k.diagonal()) if z is None else k
        one, two = (loading[..., number].mT.flatten() for loading in loadings)
        total = total + torch.outer(one, two) * k.repeat(T, T)
    return total


def dense(gp, x_new, flat=True):
    """Log marginal likelihood, mean (T, P) and covariance (TP, TP) of f of the exact process; levels known or flat."""
    y, n = gp.y.mT.flatten(), len(gp.y)
    seen = ~y.isnan()
    cov = covariance(gp, gp.x) + torch.diag(NOISE.repeat_interleave(n))
    residual, cov = (y - LEVEL.repeat_interleave(n))[seen], cov[seen][:, seen]
    cross = covariance(gp, gp.x, x_new)[seen]
    weights = torch.cholesky_solve(cross, torch.linalg.cholesky(cov))
    evidence = dist.MultivariateNormal(torch.zeros_like(residual), cov).log_prob(residual)
    mean = LEVEL.repeat_interleave(len(x_new)) + weights.mT @ residual
    if not flat:
        return evidence, mean.view(T, -1), covariance(gp, x_new) - weights.mT @ cross
    levels, new = (torch.eye(T, dtype=F64).repeat_interleave(count, 0) for count in (n, len(x_new)))
    levels, rest = levels[seen], new - weights.mT @ levels[seen]
    certainty = levels.mT @ torch.cholesky_solve(levels, torch.linalg.cholesky(cov))
    cov = covariance(gp, x_new) - weights.mT @ cross + rest @ certainty.inverse() @ rest.mT
    return evidence, mean.view(T, -1), cov


def elbo(gp, *args):
    return -IntegratedELBO().loss(gp.model, gp.guide, *args)


NEW = torch.rand(4, 2, generator=torch.Generator().manual_seed(5), dtype=F64)


def varying(x):
    """Loadings (B, T, 2) that depend on place."""
    return MIXING * torch.stack([1 + x[:, :1], x[:, 1:] - 2], -1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"kernels": kernels()[0], "num_latents": 2}, {"mixing": varying}],
    ids=["two kernels", "one kernel", "varying loadings"],
)
def test_all_neighbors_and_gaussian_noise_give_the_exact_process(settings):
    gp = build(**settings)
    evidence, mean, cov = dense(gp, NEW)
    assert elbo(gp) == pytest.approx(float(evidence), rel=1e-10)
    solve_alone(gp)
    assert elbo(gp) == pytest.approx(float(evidence), rel=1e-10)
    loc, var = gp(NEW, num_neighbors=N)
    torch.testing.assert_close(loc.detach(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(var.detach().flatten(), cov.diagonal(), rtol=1e-7, atol=1e-9)
    joint = gp.joint_outputs(NEW, num_neighbors=N)
    blocks = cov.view(T, 4, T, 4).diagonal(dim1=1, dim2=3).permute(2, 0, 1)
    torch.testing.assert_close(joint.covariance_matrix.detach(), blocks, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joint.mean.detach(), mean.mT, rtol=1e-6, atol=1e-6)
    predictive = gp.predict(NEW, num_neighbors=N)
    torch.testing.assert_close(predictive.variance.detach(), var.detach() + NOISE[:, None])
    torch.manual_seed(0)
    pairs = torch.cat([NEW[:2], NEW[:2] + 0.05])  # which depend on each other, given the data
    mean, cov = dense(gp, pairs)[1:]
    draws = gp.sample(pairs, 4000, num_neighbors=N + 3).flatten(1)
    assert ((draws.mean(0) - mean.flatten()) / (cov.diagonal() / 4000).sqrt()).abs().max() < 6
    spread = (cov.diagonal()[:, None] * cov.diagonal() + cov.square()).sqrt() / 4000**0.5
    assert ((draws.mT.cov() - cov).abs() / spread).max() < 6


def test_a_level_that_all_outputs_share_is_uncertain():
    """Far from the data f is the level, of which each output says something, plus the prior."""
    parts = [Gaussian(v) for v in NOISE]
    gp = LMC(*data(), kernels(), parts, mixing=MIXING, num_neighbors=N - 1, mean=ConstantMean(0.3).double())
    solve_alone(gp)
    far, n = NEW + 1e6, len(gp.y)
    seen = ~gp.y.mT.flatten().isnan()
    cov = (covariance(gp, gp.x) + torch.diag(NOISE.repeat_interleave(n)))[seen][:, seen]
    certainty = torch.linalg.solve(cov, torch.ones(len(cov), 1, dtype=F64)).sum()
    want = covariance(gp, far, far).diagonal() + 1 / certainty
    torch.testing.assert_close(gp(far, num_neighbors=N)[1].detach().flatten(), want, rtol=1e-4, atol=0)
    joint = gp.joint_outputs(far, num_neighbors=N).covariance_matrix.detach()
    assert (joint[:, 0, 1] - covariance(gp, far, far).view(T, 4, T, 4)[0, 0, 1, 0]).allclose(1 / certainty, rtol=1e-3)
    torch.manual_seed(0)
    torch.testing.assert_close(gp.sample(far, 4000).var(0).flatten(), want, rtol=0.15, atol=0)


def test_coefficients_of_a_linear_mean_are_uncertain():
    """With one output, as of a model of one output."""
    x, y = surface(Gaussian, 40)[:2]
    settings = {"kernels": [Matern52(2, 1.0, 0.3)], "likelihood": Gaussian(0.05), "mixing": torch.ones(1, 1, dtype=F64)}
    many = LMC(x, y[:, None], **settings, mean=LinearMean(2, num_latents=1).double(), num_neighbors=39)
    one = VNNGP(x, y, Matern52(2, 1.0, 0.3), Gaussian(0.05), num_neighbors=39, mean=LinearMean(2).double())
    for gp in (many, one):
        gp.solve()
    far = NEW + torch.tensor([0.0, 3.0], dtype=F64)
    want = one(far, num_neighbors=40)[1]
    torch.testing.assert_close(many(far, num_neighbors=40)[1][0], want, rtol=1e-4, atol=1e-6)
    assert (want > 1.5).all()  # above the prior variance


def test_q_has_the_exact_marginals_at_the_data_and_draws_from_the_exact_posterior():
    gp = build()
    solve_alone(gp)
    _, mean, cov = dense(gp, gp.x, flat=False)
    with torch.no_grad():
        trace = pyro.poutine.trace(gp.guide).get_trace()
    marginal = trace.nodes["f"]["infer"]["marginal"]
    torch.testing.assert_close(marginal.mean, mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(marginal.variance.flatten(), cov.diagonal(), rtol=1e-4, atol=1e-5)
    torch.manual_seed(1)
    with torch.no_grad():
        u = trace.nodes["u"]["fn"].sample((1000,))
    draws = (LEVEL[:, None] + torch.einsum("tl,sln->stn", MIXING, u)).flatten(1)
    spread = (cov.diagonal()[:, None] * cov.diagonal() + cov.square()).sqrt() / math.sqrt(1000)
    assert ((draws.mean(0) - mean.flatten()) / (cov.diagonal() / 1000).sqrt()).abs().max() < 6
    assert ((draws.mT.cov() - cov).abs() / spread).max() < 6


def test_disjoint_batches_average_exactly_and_gradients_are_those_of_the_evidence():
    gp = build(num_neighbors=4)
    parts = [elbo(gp, idx) for idx in torch.randperm(N).split(6)]
    assert sum(parts) / len(parts) == pytest.approx(elbo(gp), rel=1e-12)
    gp = build()
    IntegratedELBO().differentiable_loss(gp.model, gp.guide).backward()
    step, moved = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            change = torch.zeros_like(MIXING)
            change[1, 0] = sign * step
            moved.append(float(dense(build(mixing=MIXING + change), NEW)[0]))
    unit = gp.mixing_unconstrained.detach()[1, 0] / MIXING[1, 0]
    assert -float(gp.mixing_unconstrained.grad[1, 0] * unit) == pytest.approx(
        (moved[0] - moved[1]) / (2 * step), rel=1e-4
    )


def test_one_output_is_a_model_of_one_output():
    x, y = data(60, holes=False)
    kernel, settings = kernels()[0], {"num_neighbors": 10, "seed": 0}
    one = Vecchia(x, y[:, 0], copy.deepcopy(kernel), Gaussian(scalar(0.1)), **settings)
    gp = LMC(
        x, y[:, :1], [copy.deepcopy(kernel)], Gaussian(scalar(0.1)), mixing=torch.ones(1, 1, dtype=F64), **settings
    )
    one.mean.value, gp.mean.value = 0.2, scalar([0.2])
    assert elbo(gp) == pytest.approx(-TraceMeanField_ELBO().loss(one.model, one.guide), rel=1e-10)


@pytest.mark.slow
def test_counts_beside_measurements_agree_with_dense_variational_inference():
    """At the fixed point, q is the Gaussian posterior of its own sites, whose moments give the sites."""
    x, y = data(holes=False)
    y = torch.stack([torch.poisson((0.5 * y[:, 0]).exp()), y[:, 1], (y[:, 2] > 0).double()], -1)
    y[3, 0] = y[5, 1] = y[7:9, 2] = torch.nan
    gp = build(x, y, [Poisson(), Gaussian(scalar(0.2)), Bernoulli()])
    solve_alone(gp, max_steps=200, tolerance=1e-7)
    cov = covariance(gp, x)
    y = y.mT
    seen = ~y.isnan()
    mean = LEVEL[:, None].expand(T, N)
    m, s = mean.clone(), cov.diagonal().view(T, N).clone()
    for _ in range(300):  # damped fixed point, in dense form
        loc, var = m.clone().requires_grad_(), s.clone().requires_grad_()
        value = gp.likelihood.bind().expected_log_prob(y, loc, var).sum()
        slope, curve = torch.autograd.grad(value, (loc, var))
        precision = (-2 * curve * seen).clamp(min=1e-10).flatten()
        target = (m.flatten() - mean.flatten()) + slope.flatten() / precision
        gain = cov @ torch.linalg.inv(cov + torch.diag(1 / precision))
        m = 0.5 * m + 0.5 * (mean + (gain @ target).view(T, N))
        s = 0.5 * s + 0.5 * (cov - gain @ cov).diagonal().view(T, N)
    with torch.no_grad():
        marginal = pyro.poutine.trace(gp.guide).get_trace().nodes["f"]["infer"]["marginal"]
    torch.testing.assert_close(marginal.mean, m, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(marginal.variance, s, rtol=2e-2, atol=1e-4)
    kl = 0.5 * (torch.linalg.slogdet(torch.eye(T * N, dtype=F64) + cov * precision)[1])
    # cov has rank L N, but its inverse cancels: gain = cov (cov + 1 / precision)^-1
    inner = torch.linalg.solve(cov + torch.diag(1 / precision), target)
    quadratic = (m - mean).flatten() @ inner - gain.trace()
    want = (gp.likelihood.bind().expected_log_prob(y, m, s).sum() - kl - quadratic / 2).item()
    assert elbo(gp) == pytest.approx(want, rel=1e-4)


@pytest.mark.slow
def test_plain_pyro_trains_draws_and_samples():
    x, y = data(40)
    gp = build(x, y, num_neighbors=6)
    gp.solve()
    for bound in (TraceMeanField_ELBO(), Trace_ELBO()):
        svi = SVI(gp.model, gp.guide, Adam({"lr": 0.01}), bound)
        assert torch.tensor([svi.step(torch.arange(k, k + 20)) for k in (0, 20)]).isfinite().all()
    torch.manual_seed(0)
    losses = torch.tensor([TraceMeanField_ELBO().loss(gp.model, gp.guide) for _ in range(60)])
    assert (losses.mean() + elbo(gp)).abs() < 6 * losses.std() / 60**0.5 + 1e-6
    drawn = Predictive(gp.model, guide=gp.guide, num_samples=3)()
    assert drawn["f"].shape == (3, T, 40)
    prior = Predictive(pyro.poutine.uncondition(gp.model), num_samples=2)()
    assert prior["y"].shape == (2, T, 40)
    assert prior["y"].isfinite().all()


@pytest.mark.slow
def test_loadings_with_a_prior_are_sampled():
    x, y = data(15)
    prior = PyroSample(dist.Normal(torch.zeros(T, 1, dtype=F64), 1.0).to_event(2))
    gp = LMC(x, y, [Matern52(2, variance=scalar(1.0), lengthscale=scalar(0.5))], mixing=prior, num_neighbors=4)
    fit(gp, 3, progress=False)
    assert to_arviz(gp, num_samples=2).posterior["mixing"].shape == (1, 2, T, 1)
    mcmc = MCMC(NUTS(gp.model, max_tree_depth=2), num_samples=2, warmup_steps=1, disable_progbar=True)
    mcmc.run()
    samples = mcmc.get_samples()
    assert samples["mixing"].shape == (2, T, 1)
    assert samples["u"].shape == (2, 1, 15)
    loc, var = gp(NEW, samples=samples)
    assert loc.shape == var.shape == (T, 4)
    assert gp.sample(NEW, 2, samples=samples).shape == (2, T, 4)
    assert to_arviz(mcmc).posterior.sizes["draw"] == 2


@pytest.mark.slow
def test_raw_units_train_export_save_and_resume(tmp_path):
    x, y = data(60)
    y = torch.stack([torch.poisson((0.5 * y[:, 0]).nan_to_num().exp()), 5000 + 300 * y[:, 1], 1e-3 * y[:, 2]], -1)
    y[:20, 1] = torch.nan
    y[50:, 0] = torch.nan
    gp = LMC(5e5 + 1e4 * x, y, 2, [Poisson(), Gaussian(), StudentT(4.0)], num_neighbors=6)
    fit(gp, 4, batch_size=30, progress=False, checkpoint=tmp_path / "run.pt")
    twin = LMC(5e5 + 1e4 * x, y, 2, [Poisson(), Gaussian(), StudentT(4.0)], num_neighbors=6)
    fit(twin, 6, batch_size=30, progress=False, checkpoint=tmp_path / "run.pt")
    new = 5e5 + 1e4 * NEW
    twin.save(tmp_path / "gp.nngp")
    loaded = nngp.load(tmp_path / "gp.nngp")
    for got, expected in zip(loaded(new), twin(new), strict=True):
        assert torch.equal(got, expected)
    assert not any(param.requires_grad for kernel in loaded.kernel for param in [kernel.variance_unconstrained])
    idata = to_arviz(twin, num_samples=3)
    assert idata.posterior_predictive["y"].shape == (1, 3, T, 60)
    assert idata.observed_data["y"].shape == (T, 60)
    assert az.summary(idata, var_names=["f"], kind="stats").shape[0] == T * 60
    assert twin.loo().shape == (T, 60)
    assert (twin.loo()[1, :20] == 0).all()
    predictive = twin.predict(new)
    assert predictive.batch_shape == (T, 4)
    assert predictive.sample((5,)).shape == (5, T, 4)
    assert predictive.log_prob(predictive.sample()).isfinite().all()
    f = twin.sample(new, 3, seed=1)
    assert torch.equal(f, twin.sample(new, 3, seed=1))
    assert twin.sample_y(new, 3).shape == (3, T, 4)


@pytest.mark.slow
def test_single_precision_stays_single():
    x, y = (part.float() for part in data(30))
    gp = LMC(x, y, kernels(), num_neighbors=5)
    fit(gp, 2, progress=False)
    assert all(part.dtype is torch.float32 for part in gp.parameters())
    assert gp(x[:3])[0].dtype is gp.sample(x[:3], 2).dtype is torch.float32


@pytest.mark.slow
def test_starts_do_not_depend_on_units():
    x, y = data(60)
    plain = LMC(x, y, 2, num_neighbors=5)
    shift, scale = torch.tensor([3e5, -2.0, 1e-3], dtype=F64), torch.tensor([1e5, 2.0, 1e-4], dtype=F64)
    other = LMC(1000 * x, shift + scale * y, 2, num_neighbors=5)
    torch.testing.assert_close(other.mixing / scale[:, None], plain.mixing, rtol=1e-3, atol=1e-4)
    for one, two in zip(plain.kernel, other.kernel, strict=True):
        torch.testing.assert_close(two.lengthscale, 1000 * one.lengthscale, rtol=1e-3, atol=0)
    torch.testing.assert_close(
        other.output_covariance(), plain.output_covariance() * torch.outer(scale, scale), rtol=1e-2, atol=1e-12
    )


@pytest.mark.slow
def test_offsets_weights_and_trials_per_output():
    x, y = data(20)
    offset = torch.rand(20, T, generator=torch.Generator().manual_seed(1), dtype=F64)
    fixed = {"num_neighbors": 19, "mean": None}
    plain, shifted = build(x, y, **fixed), build(x, y + offset, offset=offset, **fixed)
    assert elbo(shifted) == pytest.approx(elbo(plain), rel=1e-10)
    torch.testing.assert_close(shifted(NEW)[0] + 2, shifted(NEW, offset=torch.full((4, T), 2.0, dtype=F64))[0])
    weights = torch.ones(20, T, dtype=F64)
    weights[:, 1] = 2.0
    weighted = build(x, y, weights=weights, **fixed)
    for gp in (plain, weighted):
        solve_alone(gp)
    halved = build(x, y, [Gaussian(NOISE[0]), Gaussian(NOISE[1] / 2), Gaussian(NOISE[2])], **fixed)
    solve_alone(halved)
    for got, expected in zip(weighted(NEW), halved(NEW), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
    counts = torch.stack([torch.full((20,), 3.0, dtype=F64), y[:, 1]], -1)
    counts[2, 0] = torch.nan
    trials = torch.stack([torch.arange(4.0, 24.0, dtype=F64), torch.ones(20, dtype=F64)], -1)
    gp = LMC(x, counts, 1, [Binomial(), Gaussian()], trials=trials, num_neighbors=5)
    gp.solve()
    assert gp.predict(NEW, trials=torch.full((4,), 9.0, dtype=F64)).mean[0].max() < 9
    assert elbo(gp) > -1e4


@pytest.mark.slow
def test_new_rows_join_and_conditioning_leaves_the_original():
    x, y = data(30)
    gp = build(x[:26], y[:26], num_neighbors=25)
    solve_alone(gp)
    before = gp(NEW)[0].clone()
    new = gp.condition_on(x[26:], y[26:])
    assert torch.equal(gp(NEW)[0], before)
    whole = build(x, y, num_neighbors=29)
    solve_alone(whole)
    for got, expected in zip(new(NEW, num_neighbors=30), whole(NEW, num_neighbors=30), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_spatially_varying_coefficients_are_found():
    torch.manual_seed(0)
    place, z = torch.rand(300, 2, dtype=F64), torch.randn(300, dtype=F64)
    intercept, slope = torch.sin(5 * place[:, 0]), 2 * torch.cos(4 * place[:, 1])
    y = (3 + intercept + slope * z + 0.1 * torch.randn(300, dtype=F64))[:, None]
    each = [Matern52(2, active_dims=[0, 1]) for _ in range(2)]
    gp = LMC(
        torch.cat([place, z[:, None]], -1),
        y,
        each,
        mixing=intercept_and_slope,
        metric=torch.tensor([1, 1, 1e6], dtype=F64),
        num_neighbors=10,
    )
    fit(gp, 60, progress=False)
    loc, cov = gp.latent_functions(gp.x)
    assert (loc[1] - slope).square().mean().sqrt() < 0.2
    assert ((loc[1] - slope).abs() < 2 * cov[:, 1, 1].sqrt()).double().mean() > 0.85


def intercept_and_slope(x):
    return torch.stack([torch.ones_like(x[:, 2]), x[:, 2]], -1)[:, None]


def test_frames_keep_the_names_of_outputs():
    x, y = data(20)
    frame = pd.DataFrame(y.numpy(), columns=["count", "depth", "pH"])
    gp = LMC(pd.DataFrame(x.numpy(), columns=["east", "north"]), frame, 1, num_neighbors=5)
    mean, _ = gp(pd.DataFrame(NEW.numpy(), columns=["east", "north"]))
    assert list(mean.columns) == ["count", "depth", "pH"]


@pytest.mark.slow
def test_simulated_counts_and_measurements_are_covered_and_borrow_strength():
    torch.manual_seed(0)
    x = 1000 * torch.rand(600, 2, dtype=F64)
    each = [Matern52(2, variance=1.0, lengthscale=scale) for scale in (400.0, 150.0)]
    x = torch.cat([x, 1000 * torch.rand(200, 2, dtype=F64)])
    jitter = 1e-8 * torch.eye(800)
    u = torch.stack([torch.linalg.cholesky(k(x, x).detach() + jitter) @ torch.randn(800, dtype=F64) for k in each])
    mixing = torch.tensor([[0.8, 0.3], [300.0, -150.0], [0.05, 0.05]], dtype=F64)
    f = torch.tensor([[1.0], [5000.0], [-0.2]], dtype=F64) + mixing @ u
    count = torch.poisson(f[0].exp())
    y = torch.stack([count, f[1] + 100 * torch.randn(800, dtype=F64), f[2] + 0.03 * torch.randn(800, dtype=F64)], -1)
    given = y[:600].clone()
    given[:200, 0] = given[400:, 1] = torch.nan
    gp = LMC(x[:600], given, 2, [Poisson(), Gaussian(), Gaussian()])
    fit(gp, progress=False)
    with torch.no_grad():
        loc, var = gp(x[600:])
    error = loc - f[:, 600:]
    assert (error.abs() < 1.96 * var.sqrt()).double().mean(-1).min() > 0.9
    one = VNNGP(x[200:600], given[200:, 0], likelihood=Poisson())
    fit(one, progress=False)
    with torch.no_grad():
        assert error[0].square().mean() < 0.5 * (one(x[600:])[0] - f[0, 600:]).square().mean()
    assert gp.likelihood.outputs[1].variance.item() == pytest.approx(1e4, rel=0.2)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"y": torch.zeros(N, dtype=F64)}, ValueError, r"LMC: expected y of shape \(N, T\), got .*Pass y\[:, None\]"),
        ({"kernels": []}, TypeError, r"LMC: expected kernels to be a sequence of kernels"),
        ({"kernels": 0}, ValueError, r"LMC: expected kernels.* >= 1"),
        ({"mixing": [[1.0]]}, TypeError, r"LMC: expected mixing to be a tensor \(T, L\) or a function of x, got list"),
        ({"kernels": 10**12}, ValueError, r"LMC: expected kernels <= \d+, the number of values in y"),
        ({"num_latents": 3}, ValueError, r"LMC: expected num_latents 2, the number of kernels, got 3"),
        ({"likelihood": [Gaussian()]}, ValueError, r"LMC: expected likelihood to be 3 likelihoods"),
        (
            {"likelihood": [Gaussian(), Poisson(), 3]},
            TypeError,
            r"PerOutput: expected likelihood to be a Likelihood, got 3",
        ),
        ({"mixing": torch.ones(2, 2, dtype=F64)}, ValueError, r"LMC: expected mixing to be finite, of shape \(3, 2\)"),
        ({"mixing": lambda: None}, TypeError, r"LMC: expected mixing to be callable with 1 arguments, got function"),
        ({"mixing": int}, TypeError, r"LMC: expected mixing to be callable, got the class int"),
        ({"mixing": lambda x: x}, ValueError, r"LMC: expected mixing to be finite, of shape \(2, 3, 2\)"),
        ({"likelihood": [Gaussian(), Gaussian(), Poisson()]}, ValueError, r"Poisson: expected y"),
        ({"trials": torch.ones(N, dtype=F64)}, ValueError, r"LMC: expected trials None"),
    ],
)
def test_wrong_parts_are_refused(settings, error, message):
    x, y = data()
    with pytest.raises(error, match=message):
        LMC(**({"x": x, "y": y, "kernels": kernels()} | settings))


def test_empty_outputs_and_other_methods_are_refused():
    x, y = data()
    y[:, 1] = torch.nan
    with pytest.raises(ValueError, match=r"expected y\[:, 1\] with values, got NaN in all rows"):
        LMC(x, y, 1)
    with pytest.raises(TypeError, match=r"VNNGP: expected likelihood of one output, got PerOutput\. Take LMC"):
        VNNGP(x, data(holes=False)[1], None, PerOutput(Gaussian(), Gaussian(), Gaussian()))


@pytest.mark.slow
def test_modules_as_loadings_are_trained():
    class Loading(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 2 * T, dtype=F64)

        def forward(self, x):
            return self.net(x).unflatten(-1, (T, 2))

    x, y = data(30)
    gp = LMC(x, y, kernels(), [Gaussian(v) for v in NOISE], mixing=Loading(), num_neighbors=5)
    before = gp.mixing.net.weight.clone()
    fit(gp, 3, progress=False)
    assert not torch.equal(before, gp.mixing.net.weight)


def half_seen(dim, lengthscale):
    """300 points and two related outputs, each seen at a random half of them."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(300, dim, generator=generator, dtype=F64)
    y = torch.randn(300, 2, generator=generator, dtype=F64)
    seen = torch.rand(300, generator=generator) < 0.5
    y[:, 0] = y[:, 0].where(seen, torch.nan)
    y[:, 1] = y[:, 1].where(~seen, torch.nan)
    kernel = RBF(dim, variance=scalar(1.0), lengthscale=scalar(lengthscale))
    mixing = torch.tensor([[1.0, 0.0], [0.8, 0.6]], dtype=F64)
    return x, y, {"kernels": kernel, "num_latents": 2, "mixing": mixing, "likelihood": Gaussian(scalar(0.01))}


def dense_log_variances(gp, rows, k):
    """Mean log variance of both outputs at rows, given what is seen at the k nearest others."""
    found, unit = [], gp.mixing.detach() @ gp.mixing.detach().mT
    for row in rows.tolist():
        near = torch.cdist(gp.x[row, None], gp.x)[0].argsort()[1 : k + 1]
        output = gp.y[near].isnan()[:, 0].long()
        cov = unit[output][:, output] * gp.kernel[0](gp.x[near]).detach() + 0.01 * torch.eye(k, dtype=F64)
        cross = unit[:, output] * gp.kernel[0](gp.x[row, None], gp.x[near]).detach()
        explained = (cross * torch.linalg.solve(cov, cross.mT).mT).sum(-1)
        found.append((unit.diagonal() - explained + 0.01).log().mean())
    return float(torch.stack(found).mean())


@pytest.mark.slow
def test_smooth_outputs_of_many_inputs_take_more_neighbors():
    x, y, settings = half_seen(6, 4.0)
    gp = LMC(x, y, **settings)
    rows = torch.linspace(0, 299, 64).long()
    values = [dense_log_variances(gp, rows, k) for k in (16, 32, 64)]
    assert values[0] - values[1] > 0.15
    assert values[1] - values[2] > 0.15
    assert gp.graph.num_neighbors == 64  # the most, 128 / T
    assert gp.graph.neighbors.shape == (300, 64)
    assert LMC(x, y, **settings, num_neighbors=5).graph.num_neighbors == 5
    rough = LMC(x, y, **settings | {"kernels": RBF(6, variance=scalar(1.0), lengthscale=scalar(0.1))})
    assert rough.graph.num_neighbors == 16
    counts = LMC(x, y.abs().round(), **settings | {"likelihood": Poisson()})
    assert counts.graph.num_neighbors == 16


@pytest.mark.slow
def test_factors_train_export_save_and_draw_their_loadings(tmp_path):
    x, y = data(60)
    y = torch.stack([torch.poisson((0.5 * y[:, 0]).nan_to_num().exp()), 5000 + 300 * y[:, 1], y[:, 2]], -1)
    y[:20, 1] = torch.nan
    gp = LMC(x, y, Matern52(2), [Poisson(), Gaussian(), StudentT(4.0)], mixing=FactorLoadings(T, 2), num_neighbors=8)
    result = fit(gp, progress=False)
    assert bool(result.losses.isfinite().all())
    trace = pyro.poutine.trace(gp.guide).get_trace()
    assert torch.equal(trace.nodes["mixing.weights"]["value"], gp.mixing.mode)  # a point while it trains
    found = gp.correlations()
    assert bool(((found.lower <= found.estimate) & (found.estimate <= found.upper)).all())
    posterior = to_arviz(gp, num_samples=3).posterior
    assert posterior["mixing.weights"].shape == (1, 3, T, 2)
    assert float(posterior["mixing.weights"].std("draw").min()) > 0
    gp.save(tmp_path / "factors.safetensors")
    loaded = nngp.load(tmp_path / "factors.safetensors")
    torch.testing.assert_close(loaded(NEW)[0], gp(NEW)[0])
    torch.testing.assert_close(loaded.correlations().upper, found.upper)
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.01}), TraceMeanField_ELBO())
    assert math.isfinite(svi.step(torch.arange(30)))
    prior = Predictive(pyro.poutine.uncondition(gp.model), num_samples=2)()
    assert prior["mixing.weights"].shape[-2:] == (T, 2)


def test_known_gaussian_outputs_at_new_points_condition_the_joint_distribution():
    gp = build()
    known = torch.tensor([[0.7, torch.nan, -0.4], [torch.nan, 1.2, torch.nan]], dtype=F64)
    found, joint = gp.predict_given(NEW[:2], known), gp.joint_outputs(NEW[:2])
    alone = gp.predict(NEW[:2])
    noise = alone.variance.mT - joint.variance
    for row in range(2):
        seen = ~known[row].isnan()
        cov, cross = joint.covariance_matrix[row] + torch.diag(noise[row]), joint.covariance_matrix[row][:, seen]
        gain = cross @ torch.linalg.inv(cov[seen][:, seen])
        want = joint.loc[row] + gain @ (known[row, seen] - joint.loc[row, seen])
        torch.testing.assert_close(found.mean[:, row], want, rtol=1e-4, atol=1e-4)
        variance = (joint.covariance_matrix[row] - gain @ cross.mT).diagonal() + noise[row]
        torch.testing.assert_close(found.variance[:, row], variance, rtol=1e-4, atol=1e-4)
    nothing = gp.predict_given(NEW[:2], torch.full((2, 3), torch.nan, dtype=F64))
    torch.testing.assert_close(nothing.mean, alone.mean, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"LMC.predict_given: expected .*y_new"):
        gp.predict_given(NEW[:2], torch.full((2, 3), torch.nan))


def test_known_labels_at_a_new_point_are_near_quadrature(monkeypatch):
    x, y = data(30)
    gp = LMC(
        x, (y.nan_to_num() > 0).to(F64), RBF(2, scalar(1.0), scalar(0.5)), Bernoulli(), num_latents=1, num_neighbors=8
    )
    gp.solve()
    known = torch.tensor([[1.0, 0.0, torch.nan]], dtype=F64)
    with torch.no_grad():
        (loc, cov), loading, f = gp.latent_functions(NEW[:1]), gp.loading(NEW[:1])[0, :, 0], gp(NEW[:1])[0]
    levels = f[:, 0] - loading * loc[0, 0]
    u = loc[0, 0] + cov[0, 0, 0].sqrt() * torch.linspace(-8, 8, 2001, dtype=F64)
    chance = (levels + loading * u[:, None]).sigmoid()
    weight = torch.distributions.Normal(loc[0, 0], cov[0, 0, 0].sqrt()).log_prob(u).exp()
    weight = weight * chance[:, 0] * (1 - chance[:, 1])
    want = (weight * chance[:, 2]).sum() / weight.sum()
    assert float(gp.predict_given(NEW[:1], known).mean[2, 0]) == pytest.approx(float(want), abs=0.01)
    monkeypatch.setattr("pyro_nngp.variational.coregionalized.GIVEN_ROUNDS", 1)
    with pytest.warns(UserWarning, match=r"LMC.predict_given: means still move by .* after 1 rounds"):
        gp.predict_given(NEW[:1], known)
    with pytest.raises(ValueError, match=r"LMC.predict_given: expected y_new of shape \(1, 3\), got \(1, 2\)"):
        gp.predict_given(NEW[:1], known[:, :2])


def test_wrong_factors_are_refused():
    x, y = data()
    with pytest.raises(ValueError, match=r"LMC: expected mixing with 3 outputs, the columns of y, got 4"):
        LMC(x, y, mixing=FactorLoadings(4, 2))
    with pytest.raises(ValueError, match=r"LMC: expected mixing with 3 factors, one per latent function, got 2"):
        LMC(x, y, 3, mixing=FactorLoadings(3, 2))
    gp = build()
    with pytest.raises(TypeError, match=r"LMC.correlations: expected mixing to be FactorLoadings"):
        gp.correlations()
    with pytest.raises(ValueError, match=r"LMC.correlations: expected probability in \(0, 1\), got 1"):
        LMC(x, y, mixing=FactorLoadings(3, 1)).correlations(1.0)


def test_leave_one_out_densities_given_all_other_sites_are_those_of_the_dense_process():
    gp, rows = build(), torch.tensor([0, 5])
    gp.solve()
    found = gp.loo(rows, num_neighbors=N - 1)
    with torch.no_grad():
        cov = sum(
            torch.kron(torch.outer(a, a), kernel(gp.x, gp.x)) for a, kernel in zip(MIXING.mT, gp.kernel, strict=True)
        )
        cov = cov + torch.diag(NOISE.repeat_interleave(N))
        residual, site = (gp.y - gp.mean.value).mT.flatten(), torch.arange(N).repeat(T)
        for i, row in enumerate(rows):
            others = (~residual.isnan() & (site != row)).nonzero()[:, 0]
            weights = torch.linalg.solve(cov[others][:, others], cov[others])
            for t in range(T):
                at = t * N + row
                loc, var = weights[:, at] @ residual[others], cov[at, at] - weights[:, at] @ cov[others, at]
                want = dist.Normal(loc, var.sqrt(), validate_args=False).log_prob(residual[at])
                torch.testing.assert_close(found[t, i], want.nan_to_num(), rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match="expected num_neighbors in 1..23"):
        gp.loo(rows, num_neighbors=N)


def test_covariances_of_the_outputs_at_a_site():
    gp = build()
    want = MIXING @ torch.diag(torch.tensor([1.0, 1.5], dtype=F64)) @ MIXING.mT
    torch.testing.assert_close(gp.output_covariance().detach(), want)
    torch.testing.assert_close(gp.output_covariance(gp.x[:2]).detach(), want.expand(2, T, T))


@pytest.mark.parametrize(
    ("count", "likelihood", "mixing", "kind"),
    [
        (100, None, None, Matern),
        (99, None, None, Matern52),
        (100, [Gaussian(), Bernoulli()], None, Matern52),
        (100, Poisson(), None, Matern),
        (100, None, FactorLoadings(2, 1), Matern52),
    ],
)
def test_the_smoothness_is_learned_where_outputs_tell_it(count, likelihood, mixing, kind):
    x = torch.rand(count, 2, dtype=F64)
    y = torch.stack([x[:, 0], x[:, 1]], 1).round()
    gp = LMC(x, y, likelihood=likelihood, mixing=mixing, num_neighbors=3)
    assert [type(each) for each in gp.kernel] == [kind]


def test_a_number_of_kernels_has_the_usual_ones():
    x = torch.rand(100, 2, dtype=F64)
    assert [type(each) for each in LMC(x, x.cos(), 3, num_neighbors=3).kernel] == [Matern] * 3
