"""AutoNNGP beside exact posteriors, importance weights, and as an automatic guide of Pyro."""

import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar
from pyro import poutine
from pyro.infer import MCMC, SVI, Predictive, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO, config_enumerate
from pyro.infer.autoguide import AutoGuideList, init_to_value
from pyro.optim import Adam

from pyro_nngp import NNGP, AutoNNGP, NeighborGraph, to_arviz
from pyro_nngp.inference import QuickNUTS, psis_khat
from pyro_nngp.kernels import Matern32, Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.means import LinearMean
from pyro_nngp.models import VNNGP

N, GROUPS = 24, 9
NUMBER = {"dtype": torch.float64}


def points():
    x = torch.rand(N, 2, generator=torch.Generator().manual_seed(0), **NUMBER)
    return x, torch.stack([x[:, 0], torch.sin(5 * x[:, 1])], -1), torch.arange(N) % GROUPS


X, COVARIATES, GROUP = points()
GRAPH = NeighborGraph(X, N - 1)
Y = torch.sin(4 * X.sum(-1)) + 0.3 * torch.cos(torch.arange(N, **NUMBER))
COUNTS = torch.arange(N, **NUMBER) % 5


def mixed(y=Y, noise=0.3, lengthscale=0.4, graph=GRAPH):
    """Coefficients, group effects with a mean of their own, and a process."""
    intercept = pyro.sample("intercept", dist.Normal(scalar(1.0), 3.0))
    slope = pyro.sample("slope", dist.MultivariateNormal(torch.zeros(2, **NUMBER), torch.eye(2, **NUMBER) + 0.5))
    level = pyro.sample("level", dist.Normal(scalar(0.0), 0.5))
    with pyro.plate("groups", GROUPS):
        effect = pyro.sample("effect", dist.Normal(level, 0.7))
    f = pyro.sample("f", NNGP(Matern32(2, variance=scalar(0.8), lengthscale=scalar(lengthscale)), graph))
    mean = intercept + (COVARIATES * slope).sum(-1) + effect[..., GROUP] + f
    with pyro.plate("points", N):
        pyro.sample("y", dist.Normal(mean, noise), obs=y)


def mixed_moments():
    """Mean and covariance of the data of :func:`mixed`, and the covariance of f with them."""
    kernel = Matern32(2, variance=0.8, lengthscale=0.4).double()(X).detach()
    kernel = kernel + 0.8e-6 * torch.eye(N, **NUMBER)
    slope = COVARIATES @ (torch.eye(2, **NUMBER) + 0.5) @ COVARIATES.mT
    same = (GROUP[:, None] == GROUP).double()
    rest = 9.0 + slope + 0.25 + 0.49 * same + 0.09 * torch.eye(N, **NUMBER)
    return torch.ones(N, **NUMBER), kernel + rest, kernel


def varying(y=Y):
    """Two processes, one of them as a coefficient, and two sets of data."""
    f = pyro.sample("f", NNGP(Matern32(2, variance=scalar(1.0), lengthscale=scalar(0.5)), GRAPH))
    g = pyro.sample("g", NNGP(Matern52(2, variance=scalar(0.5), lengthscale=scalar(0.5)), GRAPH))
    with pyro.plate("points", N):
        pyro.sample("y", dist.Normal(f + COVARIATES[:, 0] * g, 0.3), obs=y)
        pyro.sample("z", dist.Normal(2 * g, 0.5), obs=-y)


def varying_moments():
    first = Matern32(2, variance=1.0, lengthscale=0.5).double()(X).detach() + 1e-6 * torch.eye(N, **NUMBER)
    second = Matern52(2, variance=0.5, lengthscale=0.5).double()(X).detach() + 0.5e-6 * torch.eye(N, **NUMBER)
    a, eye = COVARIATES[:, :1], torch.eye(N, **NUMBER)
    top = torch.cat([first + a * second * a.mT + 0.09 * eye, 2 * a * second], -1)
    cov = torch.cat([top, torch.cat([2 * second * a.mT, 4 * second + 0.25 * eye], -1)])
    return torch.zeros(2 * N, **NUMBER), cov, torch.cat([first, torch.zeros(N, N, **NUMBER)], -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "moments", "data", "gaussian"),
    [
        (mixed, mixed_moments, Y, ["intercept", "slope", "level", "effect", "f"]),
        (varying, varying_moments, torch.cat([Y, -Y]), ["f", "g"]),
    ],
)
def test_gaussian_data_have_the_exact_posterior(model, moments, data, gaussian):
    """At each draw the joint density over that of the guide is the evidence, which checks mean, covariance and size."""
    loc, cov, cross = moments()
    guide, want = AutoNNGP(model), torch.distributions.MultivariateNormal(loc, cov).log_prob(data)
    for elbo in (Trace_ELBO(), TraceMeanField_ELBO()):
        for _ in range(2):
            assert elbo.loss(model, guide) == pytest.approx(-want.item(), rel=1e-6)
    assert guide.gaussian == gaussian
    assert guide.hyperparameters == []
    mean = cross @ torch.cholesky_solve((data - loc)[:, None], torch.linalg.cholesky(cov))
    torch.testing.assert_close(guide.median()["f"], mean[:, 0], rtol=1e-5, atol=1e-6)
    scale = (
        cross.diagonal() - (cross @ torch.cholesky_inverse(torch.linalg.cholesky(cov)) @ cross.mT).diagonal()
    ).sqrt()
    low, high = guide.quantiles([0.05, 0.95])["f"]
    torch.testing.assert_close((high - low) / 2 / 1.645, scale, rtol=6 * 2.1 / 1024**0.5 / 1.645 / 2**0.5, atol=0)


def hyper(y=COUNTS):
    """Counts with an unknown kernel."""
    variance = pyro.sample("variance", dist.LogNormal(scalar(0.0), 0.5))
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(scalar(-1.0), 0.5))
    intercept = pyro.sample("intercept", dist.Normal(scalar(0.0), 2.0))
    f = pyro.sample("f", NNGP(Matern32(2, variance=variance, lengthscale=lengthscale), GRAPH))
    with pyro.plate("points", N):
        return pyro.sample("y", dist.Poisson((intercept + f).exp()), obs=y)


@pytest.mark.slow
def test_importance_weights_of_counts_are_even():
    """The guide is close to the posterior: a mean-field guide's effective share is a few percent here."""
    guide = AutoNNGP(hyper)
    svi = SVI(hyper, guide, Adam({"lr": 0.02}), Trace_ELBO())
    for _ in range(30):
        svi.step()
    with torch.no_grad():
        weights = torch.tensor([-svi.evaluate_loss() for _ in range(100)])
    share = weights.softmax(0).square().sum().reciprocal() / len(weights)
    assert share > 0.5
    assert guide.hyperparameters == ["variance", "lengthscale"]


def unknown_scales(y=Y):
    """Two hyperparameters."""
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(scalar(-1.0), 0.5))
    noise = pyro.sample("noise", dist.LogNormal(scalar(-1.0), 0.5))
    f = pyro.sample("f", NNGP(Matern32(2, variance=scalar(0.8), lengthscale=lengthscale), GRAPH))
    with pyro.plate("points", N):
        pyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.slow
def test_gradients_of_hyperparameters_are_those_of_the_evidence():
    def log_evidence(u):
        lengthscale, noise = u.exp()
        cov = Matern32(2, variance=scalar(0.8), lengthscale=lengthscale)(X) + (0.8e-6 + noise**2) * torch.eye(N)
        prior = dist.Normal(scalar(-1.0), 0.5).log_prob(u).sum()
        return torch.distributions.MultivariateNormal(torch.zeros(N, **NUMBER), cov).log_prob(Y) + prior

    guide = AutoNNGP(unknown_scales)
    guide()
    mode = guide.loc.detach().clone()
    assert torch.func.grad(log_evidence)(mode).abs().max() < 0.5
    curvature = -torch.autograd.functional.hessian(log_evidence, mode)
    tril = guide.scale.detach()[:, None] * guide.scale_tril.detach()
    torch.testing.assert_close(tril @ tril.mT, torch.linalg.inv(curvature), rtol=0.1, atol=1e-3)

    at = mode + 0.3
    guide.loc = at
    guide.scale = torch.full_like(at, 1e-4)
    draws = []
    for _ in range(100):
        loss = Trace_ELBO().differentiable_loss(unknown_scales, guide)
        draws.append(-torch.autograd.grad(loss, guide.loc_unconstrained)[0] / guide.unit)
    found = torch.stack(draws)
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - torch.func.grad(log_evidence)(at)).abs() < 6 * error).all()
    assert (error < 3.0).all()


def test_it_is_an_automatic_guide():
    guide = AutoNNGP(hyper)
    trace = poutine.trace(guide).get_trace()
    assert {"variance", "lengthscale", "intercept", "f"} <= set(trace.nodes)
    svi = SVI(hyper, guide, Adam({"lr": 0.02}), Trace_ELBO())
    svi.step()
    draws = Predictive(hyper, guide=guide, num_samples=5)()
    assert draws["f"].shape[0] == 5
    assert draws["f"].shape[-1] == N
    new = Predictive(hyper, guide=guide, num_samples=5)(None)  # the data are those of the first call
    assert new["y"].shape == (5, N)
    medians, quantiles = guide.median(), guide.quantiles([0.25, 0.5, 0.75])
    assert medians["f"].shape == (N,)
    for name in ("variance", "intercept"):
        assert quantiles[name].shape == (3,)
        assert quantiles[name][0] < medians[name] < quantiles[name][2]
    exact = dist.LogNormal(guide.loc.detach()[0], guide.scale.detach()[0])
    torch.testing.assert_close(quantiles["variance"], exact.icdf(scalar([0.25, 0.5, 0.75])))
    idata = to_arviz((hyper, guide), num_samples=3, progress=False)
    assert idata.posterior["f"].shape == (1, 3, N)
    state = pickle.loads(pickle.dumps(guide.state_dict()))
    assert state["phi_0"].shape == (N, 1)


def test_likelihoods_of_the_package_and_float32():
    graph = NeighborGraph(X.float(), 5)
    likelihood = Poisson().bind()

    def model(y):
        intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
        f = pyro.sample("f", NNGP(Matern32(2, lengthscale=torch.tensor(0.4)), graph))
        with pyro.plate("points", N):
            pyro.sample("y", likelihood(intercept + f), obs=y)

    guide = AutoNNGP(model)
    assert Trace_ELBO().loss(model, guide, COUNTS.float()) < 80
    assert guide.median()["f"].dtype == torch.float32


@pytest.mark.parametrize(
    "zero_inflated",
    [
        lambda f: dist.ZeroInflatedPoisson((1 + f).exp(), gate=scalar(0.3)),
        lambda f: dist.ZeroInflatedPoisson(scalar(3.0), gate_logits=f),
        lambda f: dist.ZeroInflatedNegativeBinomial(scalar(2.0), probs=f.sigmoid(), gate_logits=scalar(-1.0)),
    ],
)
def test_zero_inflated_counts_have_the_posterior_of_quadrature(zero_inflated):
    """Three values too far apart to be correlated, at counts of 0, 2 and 6."""
    graph, y = NeighborGraph(1e3 * torch.arange(3, **NUMBER)[:, None], 1), scalar([0.0, 2.0, 6.0])

    def model():
        f = pyro.sample("f", NNGP(Matern32(1, variance=scalar(0.5), lengthscale=scalar(1.0)), graph))
        with pyro.plate("points", 3):
            pyro.sample("y", zero_inflated(f), obs=y)

    grid = torch.linspace(-5, 5, 2001, **NUMBER)[:, None].expand(-1, 3)
    weights = (zero_inflated(grid).log_prob(y) - grid.square()).softmax(0)
    mean = (weights * grid).sum(0)
    scale = (weights * (grid - mean).square()).sum(0).sqrt()
    pyro.set_rng_seed(0)
    guide = AutoNNGP(model)
    found = guide.median()["f"]
    low, high = guide.quantiles([0.1587, 0.8413])["f"]
    torch.testing.assert_close(found, mean, rtol=0, atol=0.05)
    torch.testing.assert_close((high - low) / 2, scale, rtol=6 * 1.1 / 1024**0.5, atol=0)


def test_a_coefficient_of_a_process_is_a_hyperparameter():
    """Its product with the process is not linear."""

    def model():
        scale = pyro.sample("scale", dist.Normal(scalar(1.0), 0.1))
        spread = pyro.sample("spread", dist.Normal(scalar(0.0), 0.1))
        f = pyro.sample("f", NNGP(Matern32(2, variance=scalar(0.8), lengthscale=scalar(0.4)), GRAPH))
        with pyro.plate("groups", GROUPS):
            effect = pyro.sample("effect", dist.Normal(scalar(0.0), spread.exp()))
        with pyro.plate("points", N):
            pyro.sample("y", dist.Normal(scale * f + effect[GROUP], 0.3), obs=Y)

    guide = AutoNNGP(model)
    guide()
    assert guide.gaussian == ["f", "effect"]
    assert guide.hyperparameters == ["scale", "spread"]


def of_mean_and_scale(y, graph):
    """The mean and the log of the scale are processes, at points that are hardly correlated."""

    def model():
        prior = NNGP(Matern32(1, variance=scalar(1.0), lengthscale=scalar(0.05)), graph)
        f, s = pyro.sample("f", prior), pyro.sample("s", prior)
        with pyro.plate("points", len(y)):
            pyro.sample("y", dist.Normal(f, (s - 1).exp()), obs=y)

    return model


@pytest.mark.slow
def test_a_process_in_the_log_scale_does_not_collapse():
    """The mode of the joint density has s far below its prior where f fits: the losses were 87 and infinite there."""
    pyro.set_rng_seed(2)
    graph = NeighborGraph(torch.rand(40, 1, **NUMBER), 10)
    prior = NNGP(Matern32(1, variance=scalar(1.0), lengthscale=scalar(0.05)), graph)
    f, s = prior.sample(), prior.sample()
    model = of_mean_and_scale(f + (s - 1).exp() * torch.randn(40, **NUMBER), graph)
    guide = AutoNNGP(model)
    with pytest.warns(UserWarning, match=r"given the hyperparameters is far from the posterior.*Draw with QuickNUTS"):
        guide()
    with torch.no_grad():
        losses = torch.tensor([Trace_ELBO().loss(model, guide) for _ in range(20)])
    assert 50 < losses.mean() < 57  # 53.5 is the best of a Gaussian, 65 that of independent white values
    bound = guide.conditional_at(torch.zeros(0)).elbo(guide.conditional_at(torch.zeros(0)).marginals())
    assert abs(losses.mean() + bound) < 6 * losses.std() / 20**0.5
    with pytest.warns(UserWarning, match=r"AutoNNGP: the guide is far from the posterior"):
        Predictive(model, guide=guide, num_samples=100)()
    with pytest.warns(UserWarning, match=r"AutoNNGP: the guide is far from the posterior"):
        guide.quantiles([0.5])


def test_values_in_the_param_store_are_taken(tmp_path):
    guide = AutoNNGP(unknown_scales)
    guide()
    guide.loc = guide.loc.detach() + 0.1
    loc, scale = guide.loc.detach().clone(), guide.scale.detach().clone()
    store = pyro.get_param_store()
    store.save(tmp_path / "params")
    store.clear()
    store.load(tmp_path / "params")
    again = AutoNNGP(unknown_scales)
    with pytest.warns(UserWarning, match=r"AutoNNGP: the hyperparameters start at 'AutoNNGP\.loc' in Pyro's param"):
        again()
    torch.testing.assert_close(again.loc.detach(), loc)
    torch.testing.assert_close(again.scale.detach(), scale)
    with pytest.raises(ValueError, match=r"'AutoNNGP\.loc' in Pyro's param store of shape \(1,\), got \(2,\)"):
        AutoNNGP(poutine.condition(unknown_scales, {"noise": scalar(0.3)}))()


def test_hidden_sites_are_refused():
    """The posterior of the rest would be that given a new draw of the hidden site at each run."""
    part = poutine.block(unknown_scales, hide=["noise"])
    with pytest.raises(ValueError, match=r"'y' determined by the latent sites .* Do not hide"):
        AutoNNGP(part)()
    parts = AutoGuideList(unknown_scales)
    parts.append(AutoNNGP(part))
    with pytest.raises(ValueError, match=r"the guide of a whole program, got a part of an AutoGuideList\."):
        parts()


@pytest.mark.slow
def test_khat_is_that_of_importance_weights():
    guide = AutoNNGP(unknown_scales)
    with pytest.raises(ValueError, match=r"AutoNNGP\.khat: expected the guide after its first call, got a new one"):
        guide.khat()
    with pytest.raises(ValueError, match=r"num_samples >= 25, got 24"):
        guide.khat(24)
    guide()
    pyro.set_rng_seed(0)
    khat = guide.khat(25, progress=False)
    pyro.set_rng_seed(0)
    assert khat == pytest.approx(psis_khat(unknown_scales, guide, num_samples=25, progress=False), abs=1e-6)


def test_the_gaussian_of_gaussian_data_has_equal_weights():
    guide = AutoNNGP(mixed)
    guide()
    assert guide.khat(25) == -torch.inf


def test_a_new_guide_has_no_place_for_a_state():
    with pytest.raises(ValueError, match=r"AutoNNGP\.load_state_dict: expected the guide after its first call"):
        AutoNNGP(hyper).load_state_dict({"phi_0": torch.zeros(N, 1, **NUMBER)})


def squared(noise, y):
    def model():
        f = pyro.sample("f", NNGP(Matern32(2, variance=scalar(1.0), lengthscale=scalar(0.4)), GRAPH))
        pyro.sample("y", dist.Normal(f.square(), noise).to_event(1), obs=y)

    return model


def exponential():
    f = pyro.sample("f", NNGP(Matern32(2, variance=scalar(1.0), lengthscale=scalar(0.4)), GRAPH))
    pyro.sample("y", dist.Normal(f.exp(), 0.05).to_event(1), obs=Y.exp())


def test_data_that_are_not_linear_are_linearized_at_the_posterior():
    guide = AutoNNGP(exponential)
    torch.testing.assert_close(guide.median()["f"], Y, rtol=0, atol=0.4)  # at the prior mean it is 1.3


def scaled_by_a_process():
    """At f = 0, where the guide starts, the data do not depend on the log of the scale."""
    kernel = Matern32(2, variance=scalar(0.1), lengthscale=scalar([0.5, 0.5]))
    f, log_scale = (pyro.sample(name, NNGP(kernel, GRAPH)) for name in ("f", "log_scale"))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(f * log_scale.exp(), scalar(1.0)), obs=Y)
        pyro.sample("beside", dist.Normal(f, scalar(1.0)), obs=Y)


def test_dependence_is_read_where_no_entry_vanishes():
    guide = AutoNNGP(scaled_by_a_process)
    median = guide.median()
    q = guide.conditional_at(torch.zeros(0))
    product, _ = q.marginals()
    torch.testing.assert_close(product.mean[:, 0], median["f"] * median["log_scale"].exp(), rtol=0, atol=0.05)
    of_product, beside = q.precision.sparse_covariances([2, 3])
    for i, name in enumerate(("f", "log_scale")):
        torch.testing.assert_close(of_product[:, i, i], q.prior_covariance(name)[:, 0, 0])
    # what reads one process alone is linked to no value of the other
    torch.testing.assert_close(beside, q.prior_covariance("f")[:, :1, :1].expand(N, 2, 2))


def test_a_likelihood_that_no_gaussian_fits_is_reported():
    """The sign of f is not determined: at its prior mean the data do not depend on it."""
    with pytest.warns(UserWarning, match=r"is far from the posterior.*guide\.khat\(\)"):
        AutoNNGP(squared(0.02, Y.square() + 0.5))()


def without_process():
    pyro.sample("y", dist.Normal(pyro.sample("a", dist.Normal(0.0, 1.0)), 1.0), obs=torch.tensor(1.0))


def with_label():
    pyro.sample("label", dist.Poisson(scalar(0.5)))
    hyper()


def without_data():
    pyro.sample("f", NNGP(Matern32(2, lengthscale=scalar(0.4)), GRAPH))


def of_another():
    without_data()
    without_process()


def of_sums():
    f = pyro.sample("f", NNGP(Matern32(2, lengthscale=scalar(0.4)), GRAPH))
    pyro.sample("y", dist.Normal(f[:5] + f[5:10], 1.0).to_event(1), obs=Y[:5])


def subsampled():
    f = pyro.sample("f", NNGP(Matern32(2, lengthscale=scalar(0.4)), GRAPH))
    with pyro.plate("points", N, subsample_size=5) as rows:
        pyro.sample("y", dist.Normal(f[rows], 1.0), obs=Y[rows])


def some_rows():
    f = pyro.sample("f", NNGP(Matern32(2, lengthscale=scalar(0.4)), GRAPH))
    with pyro.plate("points", N, subsample=torch.arange(5)) as rows:
        pyro.sample("y", dist.Normal(f[rows], 1.0), obs=Y[rows])


def some_effects():
    with pyro.plate("groups", GROUPS, subsample_size=5):
        pyro.sample("effect", dist.Normal(scalar(0.0), 1.0))
    hyper()


def observed_twice(second):
    """A program whose second process is read by another site."""

    def model():
        prior = NNGP(Matern32(2, variance=scalar(1.0), lengthscale=scalar(0.4)), GRAPH)
        pyro.sample("y", dist.Normal(pyro.sample("f", prior), 0.3).to_event(1), obs=Y)
        second(pyro.sample("g", prior))

    return model


def transformed(f):
    made = dist.TransformedDistribution(dist.Normal(f, 0.3), [dist.transforms.ExpTransform()])
    pyro.sample("z", made.to_event(1), obs=Y.exp())


def in_plate(f):
    with pyro.plate("points", N):
        pyro.factor("z", dist.Normal(f, 0.3).log_prob(Y) - Y)


def in_sum(f):
    pyro.factor("z", dist.Normal(f, 0.3).log_prob(Y).sum() - Y.sum())


def with_states(f):
    """Hidden states of two values that Y has no say in, and one measurement of each."""
    with pyro.plate("points", N):
        state = pyro.sample("state", dist.Bernoulli(scalar(0.3)))
        pyro.sample("z", dist.Normal(f, 0.3), obs=Y)
        pyro.sample("of_state", dist.Poisson(1 + state), obs=COUNTS)


@pytest.mark.parametrize("second", [transformed, in_plate, in_sum, with_states])
def test_densities_by_rows_have_the_exact_posterior(second):
    """Y under normal noise, whose density is not read from a distribution's parameters."""

    def model():
        f = pyro.sample("f", NNGP(Matern32(2, variance=scalar(0.8), lengthscale=scalar(0.4)), GRAPH))
        second(f)

    guide = AutoNNGP(model)
    cov = Matern32(2, variance=0.8, lengthscale=0.4).double()(X).detach() + (0.09 + 0.8e-6) * torch.eye(N, **NUMBER)
    want = torch.distributions.MultivariateNormal(torch.zeros(N, **NUMBER), cov).log_prob(Y) - Y.sum()
    if second is with_states:
        rates = torch.stack([dist.Poisson(scalar(rate)).log_prob(COUNTS) for rate in (1.0, 2.0)], -1)
        want = want + Y.sum() + (rates + scalar([0.7, 0.3]).log()).logsumexp(-1).sum()
    elbo = TraceEnum_ELBO(max_plate_nesting=1) if second is with_states else Trace_ELBO()
    program = config_enumerate(model) if second is with_states else model
    for _ in range(2):
        assert elbo.loss(program, guide) == pytest.approx(-want.item(), rel=1e-6)
    assert guide.gaussian == ["f"]


def occupancy(detections=None):
    """Animals that live at some places are seen in some of four visits."""
    seen = pyro.sample("seen", dist.Normal(scalar(0.0), 1.0))
    f = pyro.sample("f", NNGP(Matern32(2, variance=scalar(1.0), lengthscale=scalar(0.4)), GRAPH))
    with pyro.plate("points", N):
        here = pyro.sample("here", dist.Bernoulli(logits=f))
        with pyro.plate("visits", 4):
            return pyro.sample("detections", dist.Bernoulli(probs=here * seen.sigmoid()), obs=detections)


@pytest.mark.slow
def test_hidden_states_have_the_posterior_of_nuts():
    pyro.set_rng_seed(0)
    detections = poutine.block(occupancy)()
    guide = AutoNNGP(occupancy)
    guide(detections)
    found = guide.quantiles([0.16, 0.5, 0.84])
    nuts = QuickNUTS(occupancy, guide=guide, max_plate_nesting=2)
    mcmc = MCMC(nuts, num_samples=800, warmup_steps=200, disable_progbar=True)
    mcmc.run(detections)
    draws = Predictive(nuts.model, mcmc.get_samples())(detections)
    for name in ("seen", "f"):
        want = draws[name].reshape(800, -1)
        low, middle, high = found[name].reshape(3, -1)
        torch.testing.assert_close(middle, want.mean(0), rtol=0, atol=0.25)
        torch.testing.assert_close((high - low) / 2, want.std(0), rtol=0.2, atol=0)


def factor(f):
    pyro.factor("total", -f.sum().square())


def unpredictable(f):
    pyro.factor("total", -(f - f.exp().mean()).square())


def heavy_tails(f):
    pyro.sample("t", dist.StudentT(scalar(4.0), f, scalar(0.3)).to_event(1))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (factor, r"AutoNNGP: expected site 'g' read at one point by each observation, got several points"),
        (
            unpredictable,
            r"the log density of 'total' to be a function of linear predictors, .* rows that depend on oth",
        ),
        (
            heavy_tails,
            r"expected the density of site 't' not to depend on processes, .*, got StudentT\. Let .* QuickNUTS",
        ),
    ],
)
def test_sites_that_the_guide_cannot_take_apart(second, message):
    with pytest.raises(ValueError, match=message):
        AutoNNGP(observed_twice(second))()


def test_a_factor_of_effects_is_an_observation():
    """The posterior is Gaussian: all losses are the same."""

    def model():
        with pyro.plate("groups", GROUPS):
            effect = pyro.sample("effect", dist.Normal(scalar(0.0), 1.0))
        pyro.factor("sum_to_zero", -effect.sum().square())
        f = pyro.sample("f", NNGP(Matern32(2, variance=scalar(1.0), lengthscale=scalar(0.4)), GRAPH))
        with poutine.mask(mask=False):
            pyro.factor("unused", f.sum())
        pyro.sample("y", dist.Normal(f + effect[GROUP], 0.3).to_event(1), obs=Y)

    guide = AutoNNGP(model)
    losses = [Trace_ELBO().loss(model, guide) for _ in range(2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert guide.gaussian == ["effect", "f"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (without_process, r"AutoNNGP: expected the program to have an NNGP site over all points, got \['a'\]"),
        (
            with_label,
            r"expected latent sites continuous, or discrete with finitely many values, got \['label'\]\. Give them",
        ),
        (of_sums, r"AutoNNGP: expected site 'f' read at one point by each observation, got several points"),
        (subsampled, r"AutoNNGP: expected plates with all their rows, got subsampled \['points'\]"),
        (some_rows, r"AutoNNGP: expected plates with all their rows, got subsampled \['points'\]"),
        (some_effects, r"AutoNNGP: expected plates with all their rows, got subsampled \['groups'\]"),
        (
            without_data,
            r"expected the program to have an observed site that depends on its NNGP sites, got none\. Call",
        ),
        (of_another, r"that depends on its NNGP sites, got only \['y'\], which do not\. Let their parameters"),
    ],
)
def test_programs_that_do_not_fit(model, message):
    guide = AutoNNGP(model)
    for _ in range(2):  # the guide stays as it was
        with pytest.raises(ValueError, match=message):
            guide()


def test_calls_that_do_not_fit():
    with pytest.raises(ValueError, match=r"AutoNNGP: expected init_scale"):
        AutoNNGP(hyper, init_scale=-1.0)
    with pytest.raises(TypeError, match=r"AutoNNGP: expected model to be callable, got str\. Pass a Pyro program"):
        AutoNNGP("m")
    with pytest.raises(TypeError, match=r"AutoNNGP: expected init_loc_fn to be callable, got float"):
        AutoNNGP(hyper, init_loc_fn=0.0)
    guide = AutoNNGP(mixed)
    guide(Y)
    with pytest.raises(ValueError, match=r"expected arguments while training as at the first call, got others"):
        guide(2 * Y)
    message = r"expected the guide outside vectorized plates, got \['particles'\]"
    with pytest.raises(ValueError, match=message), pyro.plate("particles", 3, dim=-2):
        guide(Y)


@pytest.mark.slow
def test_methods_with_a_linear_mean_have_the_exact_posterior():
    """The program of a method is one like any other; predictions from its draws include the coefficients."""
    mean = LinearMean(2, prior=dist.Normal(scalar(0.0), 2.0))
    kernel = Matern32(2, variance=0.8, lengthscale=0.4).double()
    gp = VNNGP(X, Y, kernel, Gaussian(0.1).double(), mean=mean, num_neighbors=N - 1)
    with pytest.raises(TypeError, match=r"expected model to be a Pyro program, got a method, VNNGP\. Pass its"):
        AutoNNGP(gp)
    guide = AutoNNGP(gp.model)
    basis = mean.basis(X)
    cov = kernel(X).detach() + 4 * basis @ basis.mT + (0.1 + 0.8e-6) * torch.eye(N, **NUMBER)
    want = torch.distributions.MultivariateNormal(torch.zeros(N, **NUMBER), cov).log_prob(Y)
    assert Trace_ELBO().loss(gp.model, guide) == pytest.approx(-want.item(), rel=1e-6)
    assert guide.gaussian == ["mean.value", "mean.slope", "u"]
    with torch.no_grad():
        draws = Predictive(gp.model, guide=guide, num_samples=50)()
    x_new = X[:3] + 0.01
    found = gp.predict(x_new, samples={name: draws[name] for name in guide.gaussian}).mean
    weights = torch.cholesky_solve(Y[:, None], torch.linalg.cholesky(cov))
    exact = (kernel(x_new, X).detach() + 4 * mean.basis(x_new) @ basis.mT) @ weights
    torch.testing.assert_close(found, exact[:, 0], rtol=0, atol=6 * 0.4 / 50**0.5)
    idata = to_arviz((gp.model, guide), num_samples=3, progress=False)
    assert idata.posterior["mean.slope"].shape == (1, 3, 2)


def test_an_unknown_shape_of_data_is_found():
    """The factors of the data at one shape, taken at others, have an evidence without limit."""
    graph = NeighborGraph(torch.rand(40, 2, generator=torch.Generator().manual_seed(0), **NUMBER), 10)
    y = dist.Gamma(scalar(2.7), 2.7 * (-2 * torch.sin(6 * graph.x[:, 0])).exp()).sample()

    def model():
        shape = pyro.sample("shape", dist.LogNormal(scalar(1.0), 0.5))
        variance = pyro.sample("variance", dist.LogNormal(scalar(0.0), 0.5))
        f = pyro.sample("f", NNGP(Matern32(2, variance, scalar(0.4)), graph))
        with pyro.plate("data", 40):
            pyro.sample("y", dist.Gamma(shape, shape * (-f).exp()), obs=y)

    guide = AutoNNGP(model)
    guide()
    shape, scale = guide.median()["shape"], guide.scale[guide.hyperparameters.index("shape")]
    assert 1.5 < shape < 5
    assert 0.1 < scale < 0.4


@pytest.mark.parametrize("start", [{"lengthscale": 3.0, "noise": 0.01}, {"lengthscale": 0.02, "noise": 3.0}])
def test_the_mode_is_found_from_far_away(start):
    """Between small noise and the mode the evidence of long ranges is no concave function."""
    near = AutoNNGP(unknown_scales)
    near()
    pyro.clear_param_store()
    values = {name: scalar(value) for name, value in start.items()}
    guide = AutoNNGP(unknown_scales, init_loc_fn=init_to_value(values=values))
    guide()
    torch.testing.assert_close(guide.loc, near.loc, rtol=0.0, atol=0.05)


def test_hyperparameters_without_a_mode_within_reach_are_reported():
    def model():
        pyro.sample("far", dist.LogNormal(scalar(99.0), 1.0))
        f = pyro.sample("f", NNGP(Matern32(2, variance=scalar(0.8), lengthscale=scalar(0.4)), GRAPH))
        pyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=Y)

    guide = AutoNNGP(model, init_loc_fn=init_to_value(values={"far": scalar(1.0)}))
    with pytest.warns(UserWarning, match="expected the mode of far, got a density that still rises"):
        guide()


@pytest.mark.parametrize("columns", [9, 24])
def test_many_hyperparameters_start_at_their_mode(columns):
    """A lengthscale for each column, and the noise."""
    x = torch.rand(30, columns, generator=torch.Generator().manual_seed(2), **NUMBER)
    y, graph = torch.sin(torch.arange(30, **NUMBER)), NeighborGraph(x, 29)

    def covariance(lengthscale):
        return Matern32(columns, variance=scalar(0.8), lengthscale=lengthscale)

    def model():
        with pyro.plate("columns", columns):
            lengthscale = pyro.sample("lengthscale", dist.LogNormal(scalar(0.5), 0.5))
        noise = pyro.sample("noise", dist.LogNormal(scalar(-1.0), 0.5))
        f = pyro.sample("f", NNGP(covariance(lengthscale), graph))
        with pyro.plate("points", 30):
            pyro.sample("y", dist.Normal(f, noise), obs=y)

    def log_evidence(u):
        cov = covariance(u[:-1].exp())(x) + (0.8e-6 + (2 * u[-1]).exp()) * torch.eye(30)
        prior = dist.Normal(scalar([0.5] * columns + [-1.0]), 0.5).log_prob(u).sum()
        return torch.distributions.MultivariateNormal(torch.zeros(30, **NUMBER), cov).log_prob(y) + prior

    guide = AutoNNGP(model)
    guide()
    mode = guide.loc.detach()
    assert torch.func.grad(log_evidence)(mode).abs().max() < 0.3
    curvature = -torch.autograd.functional.hessian(log_evidence, mode)
    want = torch.linalg.inv(curvature) if columns < 20 else torch.diag(1 / curvature.diagonal())
    torch.testing.assert_close(guide.unit, want.diagonal().sqrt(), rtol=0.1, atol=0.0)
    svi = SVI(model, guide, Adam({"lr": 0.02}), Trace_ELBO())
    for _ in range(3):
        svi.step()
    assert bool((guide.loc != mode).all())
    assert torch.equal(guide.scale_tril, torch.eye(columns + 1, **NUMBER)) == (columns > 20)
