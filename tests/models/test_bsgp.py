import copy
import math
import pickle

import arviz as az
import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import waves
from oracles.dense import dense_covariance
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroModule, PyroSample
from pyro.ops.stats import effective_sample_size
from pyro.optim import Adam

from pyro_nngp._memory import block_limit
from pyro_nngp.hyperparameters.positive import lognormal_priors
from pyro_nngp.inference import SGHMC, SGMCMC, Minibatch, to_arviz
from pyro_nngp.inference.mcmc.potential import ModelPotential
from pyro_nngp.kernels import RBF, Matern12, Matern32
from pyro_nngp.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroskedasticGaussian,
    Likelihood,
    Ordinal,
    Poisson,
    StudentT,
)
from pyro_nngp.linalg import DEFAULT_JITTER, NotPositiveDefiniteError
from pyro_nngp.models import BSGP

F64 = torch.float64


N, M = 24, 6


def kernel(priors=False):
    found = Matern32(2, variance=torch.tensor(1.3, dtype=F64), lengthscale=torch.tensor([0.3, 0.5], dtype=F64))
    return lognormal_priors(found, like=torch.empty(0, dtype=F64)) if priors else found


def trace_at(gp, values, *args):
    """A run of the model with some sites at given values."""
    trace = poutine.trace(poutine.condition(gp.model, values)).get_trace(*args)
    trace.compute_log_prob()
    return trace


def log_likelihood(gp, values, *args):
    return trace_at(gp, values, *args).nodes["y"]["log_prob_sum"].detach()


def a_draw(gp):
    """One draw of all latent sites from the prior."""
    trace = poutine.trace(gp.model).get_trace()
    return {
        name: site["value"].detach()
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and name.startswith(("layers", "lik"))
    }


def several_draws(gp, num=3):
    """What MCMC.get_samples() would return."""
    draws = [a_draw(gp) for _ in range(num)]
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


def posterior(gp):
    """The normal posterior of nu and the log of the integral of exp(log joint) over nu: the log joint is quadratic."""

    def log_joint(nu):
        return trace_at(gp, {"layers.0.nu": nu}).log_prob_sum()

    zero = torch.zeros(len(gp.layers[0].start), dtype=F64)
    value, gradient = log_joint(zero).detach(), torch.autograd.functional.jacobian(log_joint, zero)
    cov = torch.cholesky_inverse(torch.linalg.cholesky(-torch.autograd.functional.hessian(log_joint, zero)))
    tril, mean = torch.linalg.cholesky(cov), cov @ gradient
    log_integral = value + 0.5 * gradient @ mean + tril.diagonal().log().sum()
    return mean, tril, float(log_integral) + 0.5 * len(zero) * math.log(2 * math.pi)


def nystrom(gp):
    """Q = K_xz K_zz^-1 K_zx and the diagonal of K - Q, with the nugget."""
    k, z = gp.layers[0].kernel, gp.layers[0].start
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(dense_covariance(k, z)), k(z, gp.x), upper=False)
    q = (half.mT @ half).detach()
    return q, (1 + DEFAULT_JITTER) * k(gp.x, diag=True).detach() - q.diagonal()


def normal_log_prob(y, mean, cov):
    return float(dist.MultivariateNormal(mean.expand(len(y)), cov).log_prob(y))


def gaussian_model(objective, inducing=M, noise=0.15, k=None):
    x, y = waves(N)
    likelihood, inducing = Gaussian(torch.tensor(noise, dtype=F64)), x if inducing is None else inducing
    k = kernel() if k is None else k
    gp = BSGP(x, y, k, likelihood, inducing=inducing, objective=objective, inducing_prior=None)
    gp.mean.value = torch.full_like(gp.mean.value, 0.4)
    return gp


@pytest.mark.parametrize("objective", ["fitc", "vfe"])
def test_nu_integrates_out_to_the_collapsed_objective(objective):
    """FITC's marginal likelihood, and the bound of Titsias."""
    gp = gaussian_model(objective)
    q, rest = nystrom(gp)
    noise, excess = (
        (rest + 0.15, 0.0) if objective == "fitc" else (torch.full_like(rest, 0.15), float(rest.sum()) / 0.3)
    )
    want = normal_log_prob(gp.y, gp.mean.value.detach(), q + torch.diag(noise)) - excess
    assert posterior(gp)[2] == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("objective", ["fitc", "vfe"])
def test_inducing_inputs_at_the_data_give_the_exact_process(objective):
    k = Matern12(2, lengthscale=torch.tensor(0.4, dtype=F64))
    gp = gaussian_model(objective, inducing=None, k=k)
    cov = dense_covariance(k, gp.x).detach() + 0.15 * torch.eye(N, dtype=F64)
    assert posterior(gp)[2] == pytest.approx(normal_log_prob(gp.y, gp.mean.value.detach(), cov), rel=1e-4)


def test_one_draw_is_predicted_by_the_dense_conditional():
    gp = gaussian_model("fitc", k=kernel(True))
    new, _ = waves(5)
    samples = several_draws(gp, 1)
    loc, var = gp(new, samples=samples)
    k = Matern32(
        2, variance=samples["layers.0.kernel.variance"][0], lengthscale=samples["layers.0.kernel.lengthscale"][0]
    ).double()
    z = gp.layers[0].z.detach()
    tril = torch.linalg.cholesky(dense_covariance(k, z))
    u, w = tril @ samples["layers.0.nu"][0], torch.cholesky_solve(k(z, new), tril)
    torch.testing.assert_close(loc, (w.mT @ u + 0.4).detach(), rtol=1e-9, atol=1e-9)
    want = (1 + DEFAULT_JITTER) * k(new, diag=True) - (w * k(z, new)).sum(0)
    torch.testing.assert_close(var, want.detach(), rtol=1e-9, atol=1e-9)


def test_predictions_average_over_draws():
    x, y = waves(N)
    likelihood = lognormal_priors(Gaussian(), {"variance": 0.2}, like=x)
    gp = BSGP(x, y, kernel(True), likelihood, inducing=M)
    samples, (new, y_new) = several_draws(gp, 4), waves(5)
    loc, var = gp.moments_by_draw(new, samples=samples)
    assert loc.shape == var.shape == (4, 5)
    one = [
        gp.moments_by_draw(new, samples={name: value[s : s + 1] for name, value in samples.items()}) for s in range(4)
    ]
    torch.testing.assert_close(loc, torch.cat([pair[0] for pair in one]), rtol=1e-12, atol=1e-12)
    noise = samples["likelihood.variance"][:, None]
    log_probs = dist.Normal(loc, (var + noise).sqrt()).log_prob(y_new)
    predictive = gp.predict(new, samples=samples)
    torch.testing.assert_close(predictive.log_prob(y_new), log_probs.exp().mean(0).log(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(predictive.mean, loc.mean(0))
    mean, variance = gp(new, samples=samples)
    torch.testing.assert_close(mean, loc.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(predictive.variance, variance + noise.mean())
    torch.testing.assert_close(variance, var.mean(0) + loc.var(0, correction=0))


def test_test_points_are_streamed(monkeypatch):
    gp = gaussian_model("fitc")
    samples, (new, _) = several_draws(gp), waves(7)
    whole = gp(new, samples=samples)
    sizes, layer = [], type(gp.layers[0]).forward
    monkeypatch.setattr(type(gp.layers[0]), "forward", lambda self, x: sizes.append(x.shape[-2]) or layer(self, x))
    with block_limit(2 * M):
        torch.testing.assert_close(gp(new, samples=samples), whole, rtol=1e-12, atol=1e-12)
    assert sizes == [2, 2, 2, 1] * 3


def test_joint_draws_have_the_dense_covariance():
    gp = gaussian_model("fitc")
    samples, (new, _) = several_draws(gp, 1), waves(4)
    draws = gp.sample(new, 250, samples=samples)
    loc, var = gp(new, samples=samples)
    k, z = gp.layers[0].kernel, gp.layers[0].start
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(dense_covariance(k, z)), k(z, new), upper=False)
    cov = (dense_covariance(k, new) - half.mT @ half).detach()
    torch.testing.assert_close(cov.diagonal(), var)
    assert bool(((draws.mean(0) - loc).abs() < 6 * (var / 250).sqrt()).all())
    se = ((var[:, None] * var + cov.square()) / 250).sqrt()
    assert bool(((draws.mT.cov() - cov).abs() < 6 * se).all())


def test_joint_draws_take_the_posterior_draws_evenly():
    gp = gaussian_model("fitc")
    samples = {"layers.0.nu": torch.stack([torch.full((M,), c, dtype=F64) for c in (-1e3, 0.0, 1e3)])}
    z = gp.layers[0].start[:1]
    draws = gp.sample(z, 5, samples=samples)[:, 0]
    assert torch.where(draws.abs() > 50, draws.sign() * draws[-1].sign(), 0.0).tolist() == [-1, -1, 0, 1, 1]


@pytest.mark.parametrize("settings", [{}, {"objective": "vfe"}, {"num_layers": 2, "num_draws": 2, "fixed_draws": True}])
@pytest.mark.parametrize("batch_size", [4, 12])
def test_disjoint_batches_average_exactly(settings, batch_size):
    x, y = waves(N)
    gp = BSGP(x, y, kernel(True), Gaussian(0.2), inducing=M, **settings)
    draw = a_draw(gp)
    whole = trace_at(gp, draw).log_prob_sum().detach()
    parts = [trace_at(gp, draw, idx).log_prob_sum().detach() for idx in torch.randperm(N).split(batch_size)]
    assert sum(parts) / len(parts) == pytest.approx(float(whole), rel=1e-12)


def test_outputs_share_inducing_inputs_and_nothing_else():
    x, y = waves(N)
    both = BSGP(x, torch.stack([y, y.square()], -1), kernel(True), Gaussian(0.2), inducing=M)
    draw = a_draw(both)
    assert draw["layers.0.nu"].shape == (2, M)
    apart = 0
    for t, target in enumerate((y, y.square())):
        one = BSGP(x, target, kernel(True), Gaussian(0.2), inducing=M)
        apart += log_likelihood(one, draw | {"layers.0.nu": draw["layers.0.nu"][t]})
    torch.testing.assert_close(log_likelihood(both, draw), apart, rtol=1e-12, atol=0)
    samples = several_draws(both)
    assert both(x[:3], samples=samples)[0].shape == both.predict(x[:3], samples=samples).mean.shape == (2, 3)
    assert both.sample(x[:3], 4, samples=samples).shape == (4, 2, 3)


class Extremes(Likelihood):
    """A user's own likelihood: nothing but p(y | f)."""

    def forward(self, f):
        return dist.Gumbel(f, torch.tensor(0.7, dtype=F64))


@pytest.mark.parametrize("likelihood", [Bernoulli("probit"), Bernoulli(), Poisson(), StudentT(), Extremes()])
def test_both_objectives_against_brute_force(likelihood):
    x, y = waves(N)
    y = y if isinstance(likelihood, StudentT | Extremes) else (y > 0).to(F64)
    nodes = torch.linspace(-9, 9, 4001, dtype=F64)[:, None]
    for objective in ("fitc", "vfe"):
        gp = BSGP(x, y, kernel(), likelihood, inducing=M, objective=objective)
        draw = a_draw(gp)
        loc, var = gp.moments_by_draw(x, samples={name: value[None] for name, value in draw.items()})
        f = loc[0] + var[0].sqrt() * nodes
        log_f, log_y = dist.Normal(0.0, 1.0).log_prob(nodes), likelihood(f).log_prob(y)
        want = (
            torch.trapezoid((log_f + log_y).exp(), nodes, dim=0).log()
            if objective == "fitc"
            else torch.trapezoid(log_f.exp() * log_y, nodes, dim=0)
        )
        assert float(log_likelihood(gp, draw)) == pytest.approx(float(want.sum().detach()), rel=1e-5)


@pytest.mark.parametrize("objective", ["fitc", "vfe"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("likelihood", [Categorical(3), HeteroskedasticGaussian(), Ordinal(torch.tensor([0.0, 1.0]))])
def test_likelihoods_of_several_latents_and_classes(likelihood, num_layers, objective):
    x, y = waves(N)
    y = y if isinstance(likelihood, HeteroskedasticGaussian) else torch.randint(3, (N,))
    gp = BSGP(x, y, kernel(True), likelihood, inducing=M, objective=objective, num_layers=num_layers, num_draws=2)
    samples = several_draws(gp)
    assert bool(log_likelihood(gp, {name: value[0] for name, value in samples.items()}).isfinite())
    predictive = gp.predict(x[:4], samples=samples)
    assert predictive.log_prob(y[:4]).shape == (4,)
    latents = () if likelihood.num_latents is None else (likelihood.num_latents,)
    assert gp(x[:4], samples=samples)[0].shape == (*latents, 4)
    if not isinstance(likelihood, HeteroskedasticGaussian):
        total = sum(predictive.log_prob(torch.full((4,), c)).exp() for c in range(3))
        torch.testing.assert_close(total, torch.ones(4, dtype=F64))


def two_layers(**settings):
    x, y = waves(N)
    return BSGP(x, y, kernel(True), Gaussian(0.2), inducing=M, num_layers=2, **settings)


def test_a_hidden_layer_without_variance_passes_its_inputs_on():
    x, y = waves(N)
    shallow, deep = BSGP(x, y, kernel(True), Gaussian(0.2), inducing=M), two_layers()
    deep.x.copy_(x)
    deep.y.copy_(y)
    deep.mean.value = shallow.mean.value.detach()  # each starts at the level of its own targets
    draw = a_draw(shallow)
    last = {name.replace("layers.0", "layers.1"): value for name, value in draw.items()}
    quiet = {"layers.0.kernel.variance": torch.tensor(1e-24, dtype=F64)}
    torch.testing.assert_close(log_likelihood(deep, last | quiet), log_likelihood(shallow, draw), rtol=1e-9, atol=0)


@pytest.mark.parametrize("settings", [{"num_draws": 3}, {"fixed_draws": True}])
def test_one_layer_has_no_hidden_draws(settings):
    x, y = waves(N)
    one, plain = (BSGP(x, y, kernel(True), Gaussian(0.2), inducing=M, **s) for s in (settings, {}))
    draw = a_draw(plain)
    assert log_likelihood(one, draw) == log_likelihood(plain, draw)
    assert one.state_dict().keys() == plain.state_dict().keys()


def by_groups(objective):
    """The log likelihood from 16 hidden draws, the mean of those from groups of four of them, and from single ones."""
    gp = two_layers(objective=objective, num_draws=16, fixed_draws=True)
    draw, noise, found = a_draw(gp), gp.noise, []
    for size in (16, 4, 1):
        gp.num_draws, values = size, []
        for group in noise.split(size, 1):
            gp.noise = group
            values.append(log_likelihood(gp, draw))
        found.append(float(sum(values)) / len(values))
    return found


def test_hidden_draws_are_averaged_inside_the_logarithm_by_fitc_and_outside_by_vfe():
    """Jensen's inequality for the very same draws: it holds for their means, so also in expectation."""
    sixteen, four, one = by_groups("fitc")
    assert sixteen > four > one
    sixteen, four, one = by_groups("vfe")
    assert (four, one) == pytest.approx((sixteen, sixteen), rel=1e-12)


@pytest.mark.slow
def test_hidden_draws_have_the_moments_of_the_layer():
    gp = two_layers(num_draws=1000)
    draw = a_draw(gp)
    layer = gp.layers[0]
    seen = {}

    def recorded(x, noise):
        seen["h"] = type(layer).hidden(layer, x, noise)
        seen["moments"] = layer(x[0])
        return seen["h"]

    object.__setattr__(layer, "hidden", recorded)
    log_likelihood(gp, draw, torch.arange(5))
    h, (loc, var) = seen["h"].detach(), (v.detach().mT for v in seen["moments"])
    assert h.shape == (1000, 5, 2)
    assert bool(((h.mean(0) - gp.x[:5] - loc).abs() < 6 * (var / 1000).sqrt()).all())
    assert bool(((h.var(0) / var - 1).abs() < 6 * (2 / 1000) ** 0.5).all())


def test_fixed_draws_make_the_density_a_function():
    fixed, fresh = two_layers(fixed_draws=True), two_layers()
    draw = a_draw(fixed)
    assert log_likelihood(fixed, draw) == log_likelihood(fixed, draw)
    assert log_likelihood(fresh, draw) != log_likelihood(fresh, draw)
    other = two_layers(fixed_draws=True, seed=1)
    assert not torch.equal(fixed.noise, other.noise)


def test_widths_of_hidden_layers():
    x, y = waves(N)
    x = torch.cat([3 * x[:, :1], x], -1)  # three inputs in a plane
    for width, kernels in ((2, [RBF(3), RBF(2), RBF(2)]), (5, [RBF(3), RBF(5), RBF(5)])):
        gp = BSGP(x, y, [k.double() for k in kernels], Gaussian(), inducing=M, num_layers=3, hidden_dim=width)
        shapes = [(tuple(layer.start.shape), layer.outputs) for layer in gp.layers]
        assert shapes == [((M, 3), (width,)), ((M, width), (width,)), ((M, width), ())]
        assert bool(log_likelihood(gp, a_draw(gp)).isfinite())
        torch.testing.assert_close(gp.layers[1].skip, torch.eye(width, dtype=F64))
        if width == 2:  # nothing of the plane is lost
            centered = x - x.mean(0)
            torch.testing.assert_close((centered @ gp.layers[0].skip).square().sum(), centered.square().sum())
        else:
            torch.testing.assert_close(x @ gp.layers[0].skip, torch.cat([x, torch.zeros(N, 2, dtype=F64)], -1))


def test_layers_have_kernels_of_their_own():
    gp = two_layers()
    draw = a_draw(gp)
    assert {f"layers.{i}.{s}" for i in (0, 1) for s in ("nu", "z", "kernel.variance", "kernel.lengthscale")} == set(
        draw
    )
    assert not torch.equal(draw["layers.0.kernel.variance"], draw["layers.1.kernel.variance"])


def test_deep_joint_draws_agree_with_the_moments():
    gp = two_layers()
    samples, (new, _) = several_draws(gp, 1), waves(3)
    draws = gp.sample(new, 200, samples=samples)
    gp.num_draws = 200
    loc, var = gp(new, samples=samples)
    assert bool(((draws.mean(0) - loc).abs() < 6 * (2 * var / 200).sqrt()).all())
    kurtosis = 6.0  # of a mixture of normals, at most so for these
    assert bool(((draws.var(0) / var - 1).abs() < 6 * (2 * kurtosis / 200) ** 0.5).all())


@pytest.mark.parametrize("objective", ["fitc", "vfe"])
def test_a_gaussian_guide_reaches_the_collapsed_objective(objective):
    """SVGP and FITC-SVGP: with q(nu) at the exact posterior, which is normal, the bound is the integral over nu."""
    gp = gaussian_model(objective)
    guide = AutoMultivariateNormal(gp.model, init_loc_fn=gp.init_strategy)
    guide()
    mean, tril, want = posterior(gp)
    guide.loc.data.copy_(mean)
    guide.scale, guide.scale_tril = tril.diagonal().clone(), tril / tril.diagonal()[:, None]
    svi = SVI(gp.model, guide, Adam({"lr": 0.1}), Trace_ELBO())
    assert svi.evaluate_loss() == pytest.approx(-want, rel=1e-6)
    guide.loc.data.add_(0.1)
    assert svi.evaluate_loss() != pytest.approx(-want, rel=1e-6)


@pytest.mark.slow
def test_what_is_sampled_and_what_is_optimized():
    x, y = waves(N)
    gp = BSGP(x, y, kernel(), Gaussian(0.2), inducing=M, inducing_prior=None)
    before = {name: value.clone() for name, value in gp.named_parameters()}
    mcmc = MCMC(
        SGHMC(gp.model, optim={"lr": 0.01}, init_strategy=gp.init_strategy), 5, warmup_steps=20, disable_progbar=True
    )
    mcmc.run(Minibatch(N, 8))
    assert set(mcmc.get_samples()) == {"layers.0.nu"}
    moved = {name for name, value in gp.named_parameters() if not torch.equal(value, before[name])}
    lengthscales = {f"layers.0.kernel.{name}_unconstrained" for name in ("lengthscale", "variance")}
    assert moved == {"layers.0.z", "likelihood.variance_unconstrained", "mean.value_unconstrained"} | lengthscales


@pytest.mark.parametrize("prior", ["normal", "uniform", "determinantal", "strauss"])
def test_chains_start_where_they_are_told(prior):
    x, y = waves(N)
    gp = BSGP(x, y, kernel(True), Gaussian(0.2), inducing=M, inducing_prior=prior)
    potential = ModelPotential("test", gp.model, (), {}, gp.init_strategy)
    values = potential.unpack(potential.initial())
    torch.testing.assert_close(values["layers.0.z"], gp.layers[0].start)
    assert not values["layers.0.nu"].any()
    mcmc = MCMC(
        NUTS(gp.model, init_strategy=gp.init_strategy, max_plate_nesting=2, max_tree_depth=2),
        2,
        2,
        disable_progbar=True,
    )
    mcmc.run()
    assert mcmc.get_samples()["layers.0.z"].shape == (2, M, 2)


@pytest.mark.parametrize("name", ["determinantal", "strauss"])
def test_the_prior_of_z_enters_the_density(name):
    x, y = waves(N)
    gp, flat = (BSGP(x, y, kernel(True), Gaussian(0.2), inducing=M, inducing_prior=p) for p in (name, "uniform"))
    draw = a_draw(BSGP(x, y, kernel(True), Gaussian(0.2), inducing=M))
    site = trace_at(gp, draw).nodes["layers.0.z"]
    if name == "determinantal":  # with the kernel at the values of this draw
        variance, lengthscale = (draw[f"layers.0.kernel.{part}"] for part in ("variance", "lengthscale"))
        k = Matern32(2, variance=variance, lengthscale=lengthscale)
        want = torch.logdet(dense_covariance(k, draw["layers.0.z"]) / variance).detach()
        torch.testing.assert_close(site["log_prob_sum"].detach(), want, rtol=1e-8, atol=1e-8)
    gain = trace_at(gp, draw).log_prob_sum() - trace_at(flat, draw).log_prob_sum()
    torch.testing.assert_close(gain, site["log_prob_sum"], rtol=1e-9, atol=1e-9)
    assert bool(gain != 0)


def test_priors_of_ones_own():
    x, y = waves(N)
    box = dist.Uniform(torch.zeros(M, 2, dtype=F64), torch.ones(M, 2, dtype=F64)).to_event(2)
    for prior in (box, lambda k, z: box):
        z = a_draw(BSGP(x, y, kernel(True), Gaussian(0.2), inducing=M, inducing_prior=prior))["layers.0.z"]
        assert bool(((z > 0) & (z < 1)).all())


def test_inputs_that_the_prior_of_z_does_not_fit_warn():
    x, y = waves(N)
    with pytest.warns(UserWarning, match=r"prior of the inducing inputs has units of one.*Standardize x"):
        BSGP(100 * x, y, kernel(True), Gaussian(0.2), inducing=M)
    BSGP(100 * x, y, kernel(True), Gaussian(0.2), inducing=M, inducing_prior=None)


def test_mean_field_svi_runs_on_the_same_model():
    x, y = waves(N)
    gp = BSGP(x, y, kernel(True), Gaussian(0.2), inducing=M)
    guide = AutoNormal(gp.model, init_loc_fn=gp.init_strategy, init_scale=0.05)
    svi = SVI(gp.model, guide, Adam({"lr": 0.02}), Trace_ELBO())
    losses = [svi.step(torch.randperm(N)[:12]) for _ in range(50)]
    assert sum(losses[-15:]) < sum(losses[:15]) - 15 * 2
    draws = [guide() for _ in range(20)]
    samples = {name: torch.stack([draw[name].detach() for draw in draws]) for name in draws[0]}
    assert bool(gp.predict(x, samples=samples).log_prob(y).isfinite().all())


@pytest.mark.filterwarnings("ignore:There is a performance drop.*log_ndtr")  # vmap calls it chain by chain
@pytest.mark.parametrize(
    ("likelihood", "settings"),
    [
        (Gaussian(0.2), {}),
        (Gaussian(0.2), {"inducing_prior": None, "objective": "vfe"}),
        (Bernoulli(), {"inducing_prior": "determinantal"}),
        (Bernoulli("probit"), {"inducing_prior": "strauss", "num_layers": 2, "num_draws": 3, "fixed_draws": True}),
    ],
)
def test_chains_in_one_batch_are_those_one_after_the_other(likelihood, settings):
    """Potential and gradients at other values of all sites and on other rows in each chain."""
    x, y = waves(N)
    y = y if isinstance(likelihood, Gaussian) else (y > 0).to(F64)
    gp = BSGP(x, y, kernel(True), likelihood, inducing=M, **settings)
    found = []
    with pyro.validation_enabled(False):
        options = gp.model, (Minibatch(N, 12),), {}, gp.init_strategy
        together, apart = (ModelPotential("Test", *options, vectorize) for vectorize in (True, False))
        start = together.initial()
        position = start + 0.2 * torch.randn(3, *start.shape, dtype=F64)
        for potential in (together, apart):
            torch.manual_seed(3)
            found.append(potential.gradient(position, tuple(potential.params.values())))
    (energy, gradient, by_params), (energy_1, gradient_1, by_params_1) = found
    torch.testing.assert_close(energy, energy_1, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, gradient_1, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(by_params, by_params_1, rtol=1e-9, atol=1e-9)
    assert len({float(value) for value in energy}) == 3


def test_a_covariance_without_a_factor_is_named_in_chains_side_by_side():
    x, y = waves(N)
    gp = BSGP(x, y, kernel(True), Gaussian(0.2), inducing=M)
    with pyro.validation_enabled(False):
        potential = ModelPotential("Test", gp.model, (), {}, gp.init_strategy)
        position = torch.stack([potential.initial(), torch.full_like(potential.initial(), torch.nan)])
        with pytest.raises(NotPositiveDefiniteError, match=f"cholesky: .* a covariance of size {M}"):
            potential.gradient(position)


@pytest.mark.slow
def test_chains_side_by_side_and_export():
    x, y = waves(N)
    gp = BSGP(x, y, kernel(True), Gaussian(0.2), inducing=M)
    mcmc = SGMCMC(SGHMC(gp.model, init_strategy=gp.init_strategy), 4, 10, 2, disable_progbar=True)
    mcmc.run(Minibatch(N, 12))
    found = to_arviz(mcmc, progress=False)
    assert found.posterior["layers.0.z"].shape == (2, 4, M, 2)
    assert found.posterior["layers.0.kernel.lengthscale"].shape == (2, 4, 2)
    assert found.posterior_predictive["y"].shape == found.log_likelihood["y"].shape == (2, 4, N)
    chains = [
        gp.moments_by_draw(
            x[:3], samples={name: value[c] for name, value in mcmc.get_samples(group_by_chain=True).items()}
        )[0]
        for c in (0, 1)
    ]
    assert az.rhat(torch.stack(chains)[..., 0].numpy()) > 0


@pytest.mark.slow
def test_sghmc_agrees_with_nuts():
    """Same means up to six standard errors, and a tenth of a deviation that the step size is granted."""
    torch.manual_seed(2)
    x = torch.rand(50, 1, dtype=F64).sort(0).values * 4 - 2
    y = torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(50, dtype=F64)
    k = lognormal_priors(Matern32(1), {"lengthscale": 1.0, "variance": 1.0}, 0.5, like=x)
    likelihood = lognormal_priors(Gaussian(), {"variance": 0.1}, 0.5, like=x)
    z = torch.linspace(-2, 2, 8, dtype=F64)[:, None]  # points that trade places would be hard for NUTS
    near = dist.Normal(z, 0.1).to_event(2)
    gp = BSGP(x, y, k, likelihood, inducing=z, inducing_prior=near, mean=lambda x: x.new_zeros(len(x)))
    new = torch.linspace(-2.5, 2.5, 7, dtype=F64)[:, None]
    nuts = MCMC(NUTS(gp.model, init_strategy=gp.init_strategy, max_tree_depth=5), 250, 150, disable_progbar=True)
    kernel = SGHMC(gp.model, 0.05, num_steps=10, init_strategy=gp.init_strategy)
    sghmc = SGMCMC(kernel, 400, 1500, num_chains=2, vectorize=False, disable_progbar=True)
    nuts.run()
    sghmc.run(Minibatch(50, 50))
    found = []
    for run in (nuts, sghmc):
        chains, flat = run.get_samples(group_by_chain=True), run.get_samples()
        loc, var = gp.moments_by_draw(new, samples=flat)
        theta = [flat[name].log() for name in sorted(chains) if name.endswith(("lengthscale", "variance"))]
        draws = torch.cat([torch.stack(theta, -1), loc, var.log()], -1).unflatten(0, (run.num_chains, -1))
        found.append((draws.mean((0, 1)), draws.std((0, 1)), effective_sample_size(draws), gp(new, samples=flat)))
    (mean, std, ess, exact), (mean_sg, std_sg, ess_sg, approximate) = found
    assert float(ess_sg.min()) > 30
    error = (std.square() / ess + std_sg.square() / ess_sg).sqrt()
    assert bool(((mean_sg - mean).abs() < 6 * error + 0.1 * std).all())
    assert bool(((approximate[0] - exact[0]).abs() < 0.2 * exact[1].sqrt()).all())
    torch.testing.assert_close(approximate[1], exact[1], rtol=0.25, atol=0)


def test_saved_and_copied_models_predict_the_same():
    gp = two_layers(inducing_prior="determinantal", num_draws=2)
    samples = several_draws(two_layers(num_draws=2))
    new, _ = waves(3)
    fresh = two_layers(inducing_prior="determinantal", num_draws=2)
    fresh.load_state_dict(gp.state_dict())
    found = []
    for each in (gp, fresh, copy.deepcopy(gp), pickle.loads(pickle.dumps(gp))):
        torch.manual_seed(3)
        found.append(each(new, samples=samples))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


@pytest.mark.parametrize("place", ["named", "inside"])
def test_chains_start_at_the_inducing_points_under_any_name(place):
    x, y = waves(N)
    gp = BSGP(x, y, kernel(), Gaussian(0.2), inducing=x[:M], num_layers=2)
    if place == "named":
        model, start = gp.named("t").model, gp.init_strategy
    else:
        larger = PyroModule()
        larger.t = gp
        model, start = larger.t.model, larger.t.init_strategy
    sites = pyro.poutine.trace(InitMessenger(start)(model)).get_trace().nodes
    for layer in range(2):
        assert torch.equal(sites[f"t.layers.{layer}.z"]["value"], x[:M])
        assert not sites[f"t.layers.{layer}.nu"]["value"].any()


def test_two_models_share_nothing():
    x, y = waves(N)
    one, two = (BSGP(x, y, kernel(), Gaussian(0.2), inducing=M, inducing_prior=None) for _ in range(2))
    draw = a_draw(one)
    want = log_likelihood(two, draw)
    with torch.no_grad():
        one.layers[0].z.add_(1.0)
    assert log_likelihood(two, draw) == want != log_likelihood(one, draw)


def test_single_precision():
    x, y = waves(N)
    k = lognormal_priors(RBF(2), like=x)
    wide = BSGP(x, y, k, Gaussian(0.2), inducing=M, jitter=1e-5)
    draw = a_draw(wide)
    single = BSGP(x.float(), y.float(), lognormal_priors(RBF(2)), Gaussian(0.2), inducing=M, jitter=1e-5)
    value = log_likelihood(single, {name: v.float() for name, v in draw.items()})
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(float(log_likelihood(wide, draw)), rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_new": torch.rand(3, 5, dtype=F64)}, r"BSGP.sample: expected x_new with 2 columns"),
        ({"num_neighbors": 3}, r"BSGP: expected num_neighbors to be None with inducing points, got 3"),
        ({"samples": None}, r"BSGP: expected samples posterior draws of all sites"),
    ],
)
def test_wrong_input_of_samples(change, message):
    gp = gaussian_model("fitc")
    arguments = {"x_new": waves(3)[0], "num_samples": 2, "samples": several_draws(gp)} | change
    with pytest.raises((ValueError, TypeError), match=message):
        gp.sample(**arguments)


def test_wrong_samples():
    gp = gaussian_model("fitc")
    samples, new = several_draws(gp), waves(3)[0]
    with pytest.raises(ValueError, match=r"BSGP.predict: expected samples to hold the site 'layers.0.nu'"):
        gp.predict(new, samples={"nu": samples["layers.0.nu"]})
    with pytest.raises(ValueError, match=r"BSGP.forward: expected samples to hold the same number >= 1 of draws"):
        gp(new, samples=samples | {"other": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"expected samples to hold the same number >= 1 of draws"):
        gp.sample(new, 2, samples={})
    with pytest.raises(ValueError, match=r"BSGP.predict: expected x_new with 2 columns"):
        gp.predict(torch.zeros(3, 5, dtype=F64), samples=samples)


def test_an_improper_prior_has_no_draws():
    x, y = waves(N)
    gp = BSGP(x, y, kernel(), Gaussian(0.2), inducing=M, inducing_prior="uniform")
    with pytest.raises(NotImplementedError, match=r"expected a prior that is sampled from to be proper"):
        gp.model()


def test_sampling_beside_parameters_that_nobody_trained_warns():
    x = torch.rand(20, 2, dtype=torch.float64)

    def run(likelihood, change=lambda gp: None, **options):
        kernel = Matern32(2, PyroSample(dist.LogNormal(x.new_zeros(()), 1.0)))
        gp = BSGP(x, x.sum(-1), kernel, likelihood, inducing=5)
        change(gp)
        sghmc = SGHMC(gp.model, 0.01, num_steps=1, init_strategy=gp.init_strategy, **options)
        MCMC(sghmc, 1, warmup_steps=1, disable_progbar=True).run()

    names = r"SGHMC: \['likelihood.variance', 'layers.0.kernel.lengthscale'\] have no priors .* optim="
    with pytest.warns(UserWarning, match=names):
        run(Gaussian())
    with pytest.warns(UserWarning, match=r"SGHMC: \['layers.0.kernel.lengthscale'\] have no priors"):
        run(Gaussian(0.1))
    run(Gaussian(), optim={"lr": 0.01})

    def trained(gp):
        gp.likelihood.variance, gp.layers[0].kernel.lengthscale = 0.1, 0.5

    run(Gaussian(), trained)


def test_predictions_without_draws_name_the_cure():
    x = torch.rand(20, 2, dtype=torch.float64)
    gp = BSGP(x, x.sum(-1), inducing=5)
    for predict in (gp, gp.predict, gp.moments_by_draw):
        with pytest.raises(TypeError, match=r"expected samples posterior draws of all sites, .* mcmc.get_samples\(\)"):
            predict(x[:2])
    with pytest.raises(TypeError, match=r"BSGP: expected method with Gaussian observations of f at the data"):
        gp.joint(x[None, :2])


@pytest.mark.parametrize("size", [15, 25])
def test_minibatches_of_other_data_are_refused(size):
    x = torch.rand(20, 2, dtype=torch.float64)
    gp = BSGP(x, x.sum(-1), Matern32(2, 1.0, 0.5).double(), Gaussian(0.1), inducing=5)
    mcmc = MCMC(SGHMC(gp.model, 0.01, num_steps=1), 1, warmup_steps=1, disable_progbar=True)
    with pytest.raises(ValueError, match=rf"expected Minibatch.size to be 20, .* got {size}"):
        mcmc.run(Minibatch(size, 5))
