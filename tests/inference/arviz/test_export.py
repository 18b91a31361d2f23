import signal
import warnings
from datetime import UTC, datetime

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import slow_except
from oracles.dense import dense_cholesky
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.infer.mcmc.util import initialize_model
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroSample

from pyro_nngp.inference import SGHMC, SGMCMC, Minibatch, to_arviz
from pyro_nngp.kernels import Matern32, Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.models import LOO, SWSGP, VNNGP, CoregionalizedLOO, Vecchia
from pyro_nngp.variational import MeanField, SparseCholesky

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.x speaks of 1.x once a day
    import arviz as az

OLD = az.__version__.startswith("0.")
N = 12
X = torch.linspace(-1, 1, N, dtype=torch.float64)
Y = (1.5 * X + 0.3 * torch.cos(9 * X)).masked_fill(torch.arange(N) == 4, torch.nan)
SEEN = torch.arange(N) != 4


def tensor(variable):
    return torch.as_tensor(variable.values)


def normal(loc, scale):
    return dist.Normal(torch.as_tensor(loc, dtype=X.dtype), torch.as_tensor(scale, dtype=X.dtype))


def model(idx=None):
    """A slope, a local effect per row, one missing observation, a tempered prior, a factor."""
    slope = pyro.sample("slope", normal([0.0, 0.0], 1.0).to_event(1))
    with pyro.plate("rows", N, subsample=idx) as rows, poutine.scale(scale=0.5):
        effect = pyro.sample("effect", normal(0.0, 0.3))
        mean = pyro.deterministic("mean", slope[0] * X[rows] + slope[1] + effect)
        with poutine.mask(mask=SEEN[rows]):
            pyro.sample("y", normal(mean, 0.2).mask(rows != 7), obs=Y[rows].nan_to_num())
    pyro.factor("factor", -slope.square().sum())


def guide(idx=None):
    loc = pyro.param("loc", lambda: torch.tensor([1.5, 0.1], dtype=X.dtype))
    slope = pyro.sample("slope", normal(loc.detach(), 0.1).to_event(1))
    with pyro.plate("rows", N, subsample=idx) as rows, poutine.scale(scale=0.5):
        pyro.sample("effect", normal(0.1 * slope[0] + 0.1 * X[rows], 0.3))


@pytest.fixture(scope="module")
def gp():
    pyro.set_rng_seed(1)
    x = torch.rand(30, 2, dtype=torch.float64)
    kernel = Matern52(2, variance=torch.tensor(1.3, dtype=torch.float64))
    gp = VNNGP(x, x.sum(-1), kernel, Gaussian(0.1), num_neighbors=4, guide=SparseCholesky(2, loc=x.sum(-1)))
    gp.q.weights.data.normal_(0, 0.1)
    return gp


def test_guide_draws_and_densities_by_hand():
    idata = to_arviz((model, guide), num_samples=6, log_density=True, losses=torch.tensor([3.0, 2.0]))
    post, stats = idata.posterior, idata.sample_stats
    assert post["effect"].dims == ("chain", "draw", "rows")
    assert post["slope"].dims == ("chain", "draw", "slope_dim_0")
    slope, effect = tensor(post["slope"])[0], tensor(post["effect"])[0]
    assert len(np.unique(slope[:, 0])) == 6
    mean = slope[:, :1] * X + slope[:, 1:] + effect
    torch.testing.assert_close(tensor(post["mean"])[0], mean, rtol=1e-12, atol=0)
    pointwise = normal(mean, 0.2).log_prob(Y.nan_to_num())
    counted = SEEN & (torch.arange(N) != 7)
    expected = torch.where(counted, pointwise, torch.nan)
    torch.testing.assert_close(tensor(idata.log_likelihood["y"])[0], expected, rtol=1e-12, atol=0, equal_nan=True)
    log_p = normal(0.0, 1.0).log_prob(slope).sum(-1) - slope.square().sum(-1)
    log_p = log_p + normal(0.0, 0.3).log_prob(effect).sum(-1) + torch.where(counted, pointwise, 0.0).sum(-1)
    loc = torch.tensor([1.5, 0.1], dtype=X.dtype)
    log_q = normal(loc, 0.1).log_prob(slope).sum(-1)
    log_q = log_q + normal(0.1 * slope[:, :1] + 0.1 * X, 0.3).log_prob(effect).sum(-1)
    torch.testing.assert_close(tensor(stats["log_p"])[0], log_p, rtol=1e-12, atol=0)
    torch.testing.assert_close(tensor(stats["log_q"])[0], log_q, rtol=1e-12, atol=0)
    assert "factor" not in idata.observed_data
    assert "factor" not in post
    assert "sample_stats" not in to_arviz((model, guide), num_samples=2)
    assert idata.svi["loss"].dims == ("step",)
    assert idata.svi["loss"].values.tolist() == [3.0, 2.0]


def test_batch_of_rows_gives_coordinates_and_unscaled_likelihoods():
    rows = torch.tensor([7, 2, 9])
    names = [f"site {i}" for i in range(N)]
    idata = to_arviz(
        (model, guide), rows, num_samples=4, constant_data={"x": X}, dims={"x": ["rows"]}, coords={"rows": names}
    )
    for group in (
        idata.posterior,
        idata.log_likelihood,
        idata.posterior_predictive,
        idata.observed_data,
        idata.constant_data,
    ):
        assert group["rows"].values.tolist() == ["site 7", "site 2", "site 9"]
    np.testing.assert_array_equal(idata.constant_data["x"], X[rows])
    np.testing.assert_array_equal(idata.observed_data["y"], Y[rows])
    expected = normal(tensor(idata.posterior["mean"]), 0.2).log_prob(Y[rows])
    expected[..., 0] = torch.nan
    torch.testing.assert_close(tensor(idata.log_likelihood["y"]), expected, rtol=1e-12, atol=0, equal_nan=True)


def test_batches_of_rows_change_nothing():
    pyro.set_rng_seed(3)
    whole = to_arviz((model, guide), num_samples=5, posterior_predictive=False)
    pyro.set_rng_seed(3)
    parts = to_arviz((model, guide), num_samples=5, posterior_predictive=False, batch_size=5, num_data=N)
    for group in ("posterior", "log_likelihood", "observed_data"):
        assert whole[group].equals(parts[group])


@pytest.mark.slow
def test_predictive_draws_have_the_distribution_of_the_model():
    idata = to_arviz((model, guide), num_samples=300, batch_size=8, num_data=N)
    y, mean = tensor(idata.posterior_predictive["y"])[0], tensor(idata.posterior["mean"])[0]
    z = (y - mean) / 0.2  # also where the data are masked
    count = N * 300
    assert abs(z.mean()) < 6 / count**0.5
    assert abs(z.square().mean() - 1) < 6 * (2 / count) ** 0.5


def test_data_that_depend_on_data_are_drawn_jointly():
    def chained():
        loc = pyro.sample("loc", dist.Normal(0.0, 0.1))
        first = pyro.sample("first", dist.Normal(loc, 1.0), obs=torch.tensor(5.0))
        pyro.sample("second", dist.Normal(first, 1e-3), obs=torch.tensor(5.0))

    drawn = to_arviz((chained, AutoNormal(chained)), num_samples=50).posterior_predictive
    np.testing.assert_allclose(drawn["second"], drawn["first"], atol=6e-3)
    assert abs(drawn["first"].mean() - 0) < 6 * (2 / 50) ** 0.5


def test_nuts_run_keeps_draws_and_arguments():
    def regression(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(slope * x, scale), obs=y)

    x, y = X.float(), 1.5 * X.float()
    mcmc = MCMC(NUTS(regression), num_samples=20, warmup_steps=20, disable_progbar=True)
    mcmc.run(x, y=y)
    mcmc._diagnostics[0]["divergences"] = [0, 19]
    idata = to_arviz(mcmc, log_density=True)
    draws = mcmc.get_samples(group_by_chain=True)
    for name in ("slope", "scale"):
        np.testing.assert_array_equal(idata.posterior[name], draws[name])
    expected = dist.Normal(draws["slope"][..., None] * x, draws["scale"][..., None]).log_prob(y)
    torch.testing.assert_close(tensor(idata.log_likelihood["y"]), expected)
    assert idata.sample_stats["diverging"].values[0].nonzero()[0].tolist() == [0, 19]
    assert idata.sample_stats["acceptance_rate"].dims == ("chain",)
    assert "log_q" not in idata.sample_stats
    prior = dist.Normal(0.0, 1.0).log_prob(draws["slope"]) + dist.HalfNormal(1.0).log_prob(draws["scale"])
    torch.testing.assert_close(
        tensor(idata.sample_stats["log_p"]), (prior + expected.sum(-1)).double(), rtol=1e-5, atol=0
    )
    thin = to_arviz(mcmc, num_samples=3)
    np.testing.assert_array_equal(thin.posterior["slope"], draws["slope"][:, [0, 10, 19]])
    assert thin.sample_stats["diverging"].values.tolist() == [[True, False, True]]
    other = to_arviz(mcmc, x[:3], model_kwargs={"y": y[:3]})
    np.testing.assert_array_equal(other.log_likelihood["y"], idata.log_likelihood["y"][..., :3])


def test_stochastic_gradient_chains_stay_apart():
    def counts(idx):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", N, subsample=idx):
            pyro.sample("y", dist.Poisson(rate), obs=torch.arange(N)[idx] % 3)

    mcmc = SGMCMC(SGHMC(counts, 0.05), num_samples=6, warmup_steps=20, num_chains=2, disable_progbar=True)
    mcmc.run(Minibatch(N, 4))
    for chain, found in enumerate(mcmc._diagnostics):
        found["divergences"] = [chain]
    idata = to_arviz(mcmc)
    draws = mcmc.get_samples(group_by_chain=True)["rate"]
    np.testing.assert_array_equal(idata.posterior["rate"], draws)
    expected = dist.Poisson(draws[..., None]).log_prob(torch.arange(N) % 3)
    torch.testing.assert_close(tensor(idata.log_likelihood["y"]), expected)
    assert idata.sample_stats["step_size"].values.tolist() == [0.05, 0.05]
    assert idata.sample_stats["kinetic_temperature"].dims == ("chain",)
    assert idata.sample_stats["diverging"].values.tolist() == np.eye(2, 6, dtype=bool).tolist()


BATCHED = [{}, {"inducing": 9}, {"y": 2}, {"likelihood": Poisson()}]


@pytest.mark.parametrize("settings", slow_except(BATCHED, BATCHED[0], BATCHED[2]))
def test_method_with_and_without_batches(settings):
    x = torch.rand(20, 2, dtype=torch.float64)
    settings = dict(settings)
    likelihood = settings.pop("likelihood", Gaussian(0.1))
    y = (3 * x.sum(-1)).round()
    y = torch.stack([y, -y], -1) if settings.pop("y", 1) == 2 else y
    kernel = Matern52(2)
    kernel.variance = PyroSample(dist.LogNormal(torch.tensor(0.0, dtype=x.dtype), 0.3))
    gp = VNNGP(x, y, kernel, likelihood, num_neighbors=4, **settings)
    pyro.set_rng_seed(3)
    options = {"posterior_predictive": False, "log_likelihood_conditional": True, "log_density": True}
    whole = to_arviz(gp, num_samples=4, **options)
    pyro.set_rng_seed(3)
    parts = to_arviz(gp, num_samples=4, batch_size=7, **options)
    latents = ("latents",) if y.dim() == 2 else ()
    assert whole.posterior["f"].dims == ("chain", "draw", *latents, "data")
    assert set(whole.posterior) == {"kernel.variance", "u", "f"}
    assert set(whole.params) >= {"kernel.lengthscale", "mean.value"}
    for group in ("posterior", "log_likelihood", "log_likelihood_conditional", "observed_data", "sample_stats"):
        for name in whole[group]:
            np.testing.assert_allclose(whole[group][name], parts[group][name], rtol=1e-9)
    assert whole.log_likelihood.attrs["kind"].startswith("leave-one-out")
    samples = {"kernel.variance": tensor(whole.posterior["kernel.variance"])[0]}
    for s, variance in enumerate(samples["kernel.variance"]):
        alone = gp.loo_by_draw(from_guide=True)({"kernel.variance": variance})
        np.testing.assert_allclose(whole.log_likelihood["y"][0, s], alone, atol=1e-3)
    f = tensor(whole.posterior["f"])
    expected = gp.likelihood(f).log_prob(y.mT if y.dim() == 2 else y)
    torch.testing.assert_close(tensor(whole.log_likelihood_conditional["y"]), expected.detach(), rtol=1e-12, atol=0)


def test_batches_of_rows_add_up_to_the_log_density():
    pyro.set_rng_seed(3)
    whole = to_arviz((model, guide), num_samples=5, posterior_predictive=False, log_density=True)
    pyro.set_rng_seed(3)
    parts = to_arviz(
        (model, guide), num_samples=5, posterior_predictive=False, log_density=True, batch_size=5, num_data=N
    )
    for name in ("log_p", "log_q"):
        np.testing.assert_allclose(whole.sample_stats[name], parts.sample_stats[name], rtol=1e-12)


def test_log_prior_site_by_site():
    idata = to_arviz((model, guide), num_samples=3, log_prior=True)
    assert set(idata.log_prior) == {"slope", "effect"}  # what is a function of others has no density
    assert idata.log_prior["effect"].dims == ("chain", "draw", "rows")
    slope, effect = tensor(idata.posterior["slope"]), tensor(idata.posterior["effect"])
    torch.testing.assert_close(tensor(idata.log_prior["slope"]), normal(0.0, 1.0).log_prob(slope).sum(-1))
    torch.testing.assert_close(tensor(idata.log_prior["effect"]), normal(0.0, 0.3).log_prob(effect))


def constrained():
    pyro.sample("scale", dist.LogNormal(torch.zeros(2, dtype=X.dtype), 1.0).to_event(1))
    with pyro.plate("groups", 4):
        share = pyro.sample("share", dist.Dirichlet(torch.ones(3, dtype=X.dtype)))
        pyro.sample("real", normal(0.0, 1.0))
    pyro.sample("count", dist.Poisson(torch.tensor(2.0, dtype=X.dtype)))
    pyro.sample("y", normal(share.sum(), 1.0), obs=torch.tensor(0.0, dtype=X.dtype))


def test_unconstrained_values():
    dims = {"scale": ["part"]}
    idata = to_arviz(
        (constrained, poutine.block(constrained, hide=["y"])), num_samples=3, unconstrained=True, dims=dims
    )
    found = idata.unconstrained_posterior
    assert set(found.data_vars) == {"scale", "share"}
    assert found["scale"].dims == ("chain", "draw", "part")
    np.testing.assert_allclose(found["scale"], np.log(idata.posterior["scale"]))
    assert found["share"].dims == ("chain", "draw", "groups", "share_unconstrained_dim_0")
    transform = torch.distributions.biject_to(dist.constraints.simplex)
    torch.testing.assert_close(transform(tensor(found["share"])), tensor(idata.posterior["share"]))
    assert "unconstrained_posterior" not in to_arviz((model, guide), num_samples=2, unconstrained=True)


def test_densities_of_an_export_are_those_of_the_program_in_unconstrained_space():
    """What moment matching of leave-one-out scores needs: prior, likelihood and volume add up to the potential."""

    def counted():
        rate = pyro.sample("rate", dist.LogNormal(normal(0.0, 1.0).mean, 1.0))
        slope = pyro.sample("slope", normal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Poisson(rate * slope.exp()), obs=torch.tensor([1.0, 0.0, 4.0], dtype=X.dtype))

    pyro.set_rng_seed(0)
    guide = poutine.block(counted, hide=["y"])
    idata = to_arviz((counted, guide), num_samples=4, log_prior=True, unconstrained=True, progress=False)
    values = {"rate": tensor(idata.unconstrained_posterior["rate"])[0], "slope": tensor(idata.posterior["slope"])[0]}
    found = sum(tensor(idata.log_prior[name])[0] for name in values) + tensor(idata.log_likelihood["y"])[0].sum(-1)
    _, potential, _, _ = initialize_model(counted)
    want = torch.stack([-potential({name: value[i] for name, value in values.items()}) for i in range(4)])
    torch.testing.assert_close(found + values["rate"], want)
    for group in (idata.observed_data, idata.posterior_predictive):
        assert group["y"].dtype == np.int64  # counts, whatever the type of the tensor


def test_counts_with_missing_ones_stay_floats():
    def masked():
        rate = pyro.sample("rate", dist.LogNormal(normal(0.0, 1.0).mean, 1.0))
        y = torch.tensor([1.0, torch.nan], dtype=X.dtype)
        with pyro.plate("data", 2), poutine.mask(mask=~y.isnan()):
            pyro.sample("y", dist.Poisson(rate, validate_args=False), obs=y)

    idata = to_arviz((masked, poutine.block(masked, hide=["y"])), num_samples=2, progress=False)
    assert np.isnan(idata.observed_data["y"].values).tolist() == [False, True]


def test_prior_draws():
    pyro.set_rng_seed(2)
    idata = to_arviz((model, guide), num_samples=2, num_prior_samples=400)
    prior, y = idata.prior, tensor(idata.prior_predictive["y"])[0]
    assert prior["effect"].sizes == {"chain": 1, "draw": 400, "rows": N}
    slope, effect = tensor(prior["slope"])[0], tensor(prior["effect"])[0]
    assert abs(slope.mean()) < 6 / 800**0.5
    assert abs(effect.std() / 0.3 - 1) < 6 / (2 * 400 * N) ** 0.5
    z = (y - tensor(prior["mean"])[0]) / 0.2
    assert abs(z.mean()) < 6 / (400 * N) ** 0.5
    assert abs(z.square().mean() - 1) < 6 * (2 / (400 * N)) ** 0.5
    np.testing.assert_allclose(prior["mean"][0], slope[:, :1] * X + slope[:, 1:] + effect)


@pytest.mark.parametrize("in_program", [False, True])
@pytest.mark.parametrize("method", [VNNGP, Vecchia, LOO])
def test_prior_predictive_draws_of_methods(method, in_program):
    x = torch.rand(20, 2, dtype=torch.float64)
    kernel = Matern52(2)
    kernel.variance = PyroSample(dist.LogNormal(torch.tensor(0.0, dtype=x.dtype), 0.3))
    gp = method(x, x.sum(-1), kernel, Gaussian(0.1), num_neighbors=4)
    source = (lambda: gp.model(), lambda: gp.guide()) if in_program else gp
    idata = to_arviz(source, num_samples=2, num_prior_samples=3, progress=False)
    assert idata.prior["kernel.variance"].shape == (1, 3)
    groups = idata.groups() if OLD else idata.children
    assert ("prior_predictive" in groups) == (method is VNNGP)  # others are given the data of neighbors


def test_predictions_of_local_copies_are_draws_from_the_guide():
    x, x_new = torch.rand(30, 2, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    gp = SWSGP(x, x.sum(-1), None, Gaussian(0.01), inducing=5, num_neighbors=3)
    idata = to_arviz(gp, num_samples=2, predictions=x_new, log_likelihood=False, progress=False)
    assert np.isfinite(idata.predictions["y"].values).all()
    assert idata.predictions["f"].shape == (1, 2, 3)
    torch.manual_seed(0)
    f, _ = gp.predictions_by_draw(x_new, from_guide=True)({})
    torch.manual_seed(0)
    assert torch.equal(f, gp.sample(x_new, 1)[0])
    with pytest.raises(ValueError, match="posterior draws of each datum's own copy of u"):
        gp.predictions_by_draw(x_new)({})


def test_predictions_belong_to_their_draws():
    x = torch.rand(30, 2, dtype=torch.float64)
    y = torch.stack([x.sum(-1), -x.sum(-1)], -1)
    kernel = Matern52(2, variance=torch.ones((), dtype=x.dtype), lengthscale=torch.ones(2, dtype=x.dtype))
    gp = VNNGP(x, y, kernel, Gaussian(1e-6), num_neighbors=6, guide=MeanField(loc=torch.stack([x.sum(-1)] * 2, -1)))
    rows = torch.tensor([4, 7])
    idata = to_arviz(gp, num_samples=3, predictions=x[rows], coords={"input_dim": ["east", "north"]})
    assert idata.predictions["f"].dims == ("chain", "draw", "latents", "prediction")
    f = idata.posterior["f"].values[..., rows.numpy()]
    np.testing.assert_allclose(idata.predictions["f"], f, atol=0.03)  # at the data, up to the nugget
    np.testing.assert_allclose(idata.predictions["y"], idata.predictions["f"], atol=6e-3)
    np.testing.assert_array_equal(idata.predictions_constant_data["x"], x[rows])
    assert idata.predictions_constant_data["input_dim"].values.tolist() == ["east", "north"]
    latent = VNNGP(x, None, Matern52(2), num_neighbors=6)
    assert set(to_arviz(latent, num_samples=2, predictions=x[:2]).predictions) == {"f"}
    with pytest.raises(TypeError, match="expected source to be a method, with predictions, got tuple"):
        to_arviz((model, guide), predictions=x)
    with pytest.raises(ValueError, match="x_new"):
        to_arviz(gp, num_samples=2, predictions=x[:, :1])


def test_chains_of_a_method_have_leave_one_out_densities_and_predictions():
    x = torch.rand(20, 2, dtype=torch.float64)
    kernel = Matern52(2)
    kernel.variance = PyroSample(dist.LogNormal(torch.tensor(0.0, dtype=x.dtype), 0.3))
    gp = Vecchia(x, x.sum(-1), kernel, Gaussian(0.1), num_neighbors=5)
    mcmc = MCMC(NUTS(gp.model), num_samples=6, warmup_steps=4, disable_progbar=True)
    mcmc.run()
    idata = to_arviz(mcmc, predictions=x[:3] + 0.01)
    torch.testing.assert_close(tensor(idata.log_likelihood["y"])[0], gp.loo(samples=mcmc.get_samples()))
    assert idata.predictions["y"].shape == (1, 6, 3)
    of_auto = to_arviz((gp.model, AutoNormal(gp.model)), num_samples=2)
    samples = {"kernel.variance": tensor(of_auto.posterior["kernel.variance"])[0]}
    torch.testing.assert_close(tensor(of_auto.log_likelihood["y"])[0], gp.loo(samples=samples))


def test_dimensions_named_in_the_model():
    def factors():
        pyro.sample("both", dist.Normal(torch.zeros(3), 1.0).to_event(1), infer={"event_dims": ["kind"]})

    assert to_arviz((factors, AutoNormal(factors)), num_samples=2).posterior["both"].dims[2:] == ("kind",)
    renamed = to_arviz((factors, AutoNormal(factors)), num_samples=2, dims={"both": ["sort"]})
    assert renamed.posterior["both"].dims[2:] == ("sort",)


def test_attributes():
    idata = to_arviz((model, guide), num_samples=2)
    attrs = idata.posterior.attrs
    assert list(attrs["sample_dims"]) == ["chain", "draw"]
    assert "sample_dims" not in idata.observed_data.attrs
    assert attrs["creation_library"] == "pyro_nngp"
    assert attrs["creation_library_language"] == "Python"
    assert attrs["inference_library"] == "pyro"
    assert abs((datetime.now(UTC) - datetime.fromisoformat(attrs["created_at"])).total_seconds()) < 100
    assert idata.log_likelihood.attrs["kind"] == "given all latent sites"


def test_method_densities_inputs_and_batch(gp):
    idata = to_arviz(gp, num_samples=3, log_density=True, coords={"input_dim": ["east", "north"]})
    assert idata.constant_data["x"].dims == ("data", "input_dim")
    np.testing.assert_array_equal(idata.constant_data["x"].sel(input_dim="north"), gp.x[:, 1])
    u = tensor(idata.posterior["u"])[0]
    root = dense_cholesky(gp.q.distribution())
    q = dist.MultivariateNormal(gp.q.distribution().loc, root @ root.mT)
    torch.testing.assert_close(tensor(idata.sample_stats["log_q"])[0], q.log_prob(u).detach(), rtol=1e-9, atol=0)
    rows = torch.tensor([5, 1])
    part = to_arviz(gp, rows, num_samples=2, var_names=["f"])
    assert list(part.posterior) == ["f"]
    assert part.posterior["data"].values.tolist() == [5, 1]
    np.testing.assert_array_equal(part.constant_data["x"], gp.x[rows])


def test_var_names_keep_and_leave_out():
    assert set(to_arviz((model, guide), num_samples=2, var_names=["~effect"]).posterior) == {"slope", "mean"}
    assert set(to_arviz((model, guide), num_samples=2, var_names=["slope"]).posterior) == {"slope"}


def test_names_of_dimensions_and_labels():
    def factors():
        pyro.sample("both", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        with pyro.plate("outer", 3, dim=-2), pyro.plate("inner", 4, dim=-1):
            pyro.sample("events", dist.Normal(torch.zeros(5), 1.0).to_event(1))

    names = {"both": ["outer", "kind"], "events": ["band"]}
    idata = to_arviz((factors, AutoNormal(factors)), num_samples=2, dims=names, coords={"kind": ["a", "b"]})
    assert idata.posterior["events"].dims == ("chain", "draw", "outer", "inner", "band")
    assert idata.posterior["both"].dims == ("chain", "draw", "outer", "kind")
    assert idata.posterior["kind"].values.tolist() == ["a", "b"]
    plain = to_arviz((factors, AutoNormal(factors)), num_samples=2)
    assert plain.posterior["events"].dims[2:] == ("outer", "inner", "events_dim_2")


def test_reparametrized_sites_are_variables_not_data():
    def centered():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", 3):
            x = pyro.sample("x", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(x, 1.0), obs=torch.ones(3))

    reparam = poutine.reparam(centered, config={"x": LocScaleReparam(0.0)})
    idata = to_arviz((reparam, AutoNormal(reparam)), num_samples=3)
    assert set(idata.posterior) == {"scale", "x", "x_decentered"}
    assert idata.posterior["x"].dims == ("chain", "draw", "rows")
    assert list(idata.observed_data) == ["y"]
    np.testing.assert_allclose(
        idata.posterior["x"], idata.posterior["scale"] * idata.posterior["x_decentered"], rtol=1e-5
    )


def test_netcdf_round_trip(tmp_path):
    idata = to_arviz(
        (model, guide), num_samples=3, log_density=True, losses=[1.0, 0.5], coords={"rows": [f"r{i}" for i in range(N)]}
    )
    idata.to_netcdf(tmp_path / "posterior.nc")
    again = az.from_netcdf(tmp_path / "posterior.nc")
    groups = {"posterior", "posterior_predictive", "log_likelihood", "sample_stats", "observed_data", "svi"}
    assert set(again.groups() if OLD else again.children) == groups
    for group in groups:
        for name in idata[group].data_vars:
            assert idata[group][name].equals(again[group][name])
    (again.close if OLD else lambda: None)()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pandas and Matplotlib, to ArviZ
def test_arviz_accepts_the_result():
    y = torch.randn(40) + 1

    def location(scale):
        loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        with pyro.plate("data", 40):
            pyro.sample("y", dist.Normal(loc, scale), obs=y)

    def exact(scale):  # the posterior, up to the prior
        pyro.sample("loc", dist.Normal(y.mean(), scale / 40**0.5))

    good, bad = (to_arviz((location, exact), scale, num_samples=400, log_density=True) for scale in (1.0, 3.0))
    assert abs(az.summary(good).loc["loc", "mean"] - y.mean()) < 0.05
    loo = az.loo(good)
    pointwise = tensor(good.log_likelihood["y"])[0]
    weights = -pointwise - torch.logsumexp(-pointwise, 0)  # plain importance sampling, fine for one parameter
    expected = torch.logsumexp(pointwise + weights, 0).sum()
    assert abs(float(loo.elpd_loo if OLD else loo.elpd) - expected) < 0.1
    assert az.compare({"good": good, "bad": bad}).index[0] == "good"
    import matplotlib as mpl

    mpl.use("Agg")
    az.plot_trace(good)
    (az.plot_ppc if OLD else az.plot_ppc_dist)(good)
    mpl.pyplot.close("all")
    if not OLD:
        stats = good.sample_stats
        corrected = az.loo_approximate_posterior(good, log_p=stats["log_p"], log_q=stats["log_q"])
        assert abs(float(corrected.elpd) - expected) < 0.1
        part = az.loo_subsample(good, 20, log_p=stats["log_p"], log_q=stats["log_q"])
        assert abs(float(part.elpd) - expected) < 6 * part.subsampling_se + 0.1


def test_interrupt_returns_the_draws_so_far():
    runs = []

    def interrupted():
        pyro.sample("loc", dist.Normal(0.0, 1.0))
        runs.append(1)
        if len(runs) == 3:
            signal.raise_signal(signal.SIGINT)

    def alone():
        pyro.sample("loc", dist.Normal(0.0, 1.0))

    idata = to_arviz((interrupted, alone), num_samples=10, posterior_predictive=False, log_density=True)
    assert idata.posterior["loc"].shape == idata.sample_stats["log_p"].shape == (1, 3)


def test_discrete_and_single_precision_types_are_kept():
    def counts():
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        pyro.sample("y", dist.Poisson(rate).expand([4]).to_event(1), obs=torch.tensor([1, 0, 2, 1]))

    idata = to_arviz((counts, AutoMultivariateNormal(counts)), num_samples=2)
    assert idata.posterior["rate"].dtype == np.float32
    assert idata.observed_data["y"].dtype == np.int64
    assert idata.observed_data["y"].dims == ("y_dim_0",)
    assert idata.log_likelihood["y"].dims == ("chain", "draw")


def test_sites_that_some_draws_lack_or_that_change_their_type():
    def branches():
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        if m > 0:
            pyro.deterministic("above", m)
            pyro.deterministic("count", torch.tensor(3))
        pyro.deterministic("half", torch.tensor(0.5) if m > 0 else torch.tensor(2))
        pyro.sample("y", dist.Normal(m, 1.0), obs=torch.tensor(0.0))

    pyro.set_rng_seed(0)
    data = to_arviz((branches, lambda: pyro.sample("m", dist.Normal(0.0, 1.0))), num_samples=40, progress=False)
    m = data.posterior["m"].values
    np.testing.assert_array_equal(data.posterior["above"].values, np.where(m > 0, m, np.nan))
    np.testing.assert_array_equal(data.posterior["count"].values, np.where(m > 0, 3.0, np.nan))
    np.testing.assert_array_equal(data.posterior["half"].values, np.where(m > 0, 0.5, 2.0))


@pytest.mark.gpu
def test_draws_come_from_the_gpu():
    x = torch.rand(20, 2, device="cuda")
    gp = VNNGP(x, x.sum(-1), Matern52(2), Gaussian(0.1), num_neighbors=4)
    idata = to_arviz(gp, num_samples=3, batch_size=8, losses=torch.ones(2, device="cuda"))
    np.testing.assert_array_equal(idata.constant_data["x"], x.cpu())
    assert idata.posterior_predictive["y"].shape == (1, 3, 20)


def latent_only():
    pyro.sample("loc", dist.Normal(0.0, 1.0))


def random_rows():
    pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 100, subsample_size=5):
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.ones(5))


def shapeless(idx=None):
    size = 3 if idx is None else len(idx)
    pyro.sample("local", dist.Normal(0.0, 1.0).expand([size]).to_event(1))


@pytest.mark.parametrize(
    ("source", "args", "options", "message"),
    [
        ((latent_only, latent_only), (), {"num_samples": 0}, "expected num_samples >= 1"),
        ((latent_only, latent_only), (), {"batch_size": 0, "num_data": 3}, "expected batch_size >= 1"),
        ((latent_only, latent_only), (), {"batch_size": 2}, "expected num_data to be the number of rows"),
        ((model, guide), (X,), {"batch_size": 2, "num_data": N}, "expected model arguments to be none with batch_size"),
        ((model, guide), (), {"batch_size": 2, "num_data": N, "log_prior": True}, "expected log_prior to be False"),
        (
            (model, guide),
            (torch.arange(3),),
            {"log_density": True},
            "to take all rows of its plates, got some of ['rows']",
        ),
        ((random_rows, latent_only), (), {}, "expected plate 'rows' to take the same rows at each draw"),
        ((model, latent_only), (), {}, "expected latent site 'slope' among ['loc'], got no value of it"),
        ((shapeless, shapeless), (), {"batch_size": 2, "num_data": 3}, "the value of 'local' to follow the rows"),
        (
            (model, guide),
            (),
            {"var_names": ["~efect"]},
            "expected var_names among ['effect', 'mean', 'slope'], got ['efect']",
        ),
        ((model, guide), (), {"dims": {"slopes": ["a"]}}, "expected dims among"),
        ((model, guide), (), {"coords": {"row": range(N)}}, "expected coords among"),
        ((model, guide), (), {"coords": {"rows": range(3)}}, "expected coords['rows'] to have 12 labels, got 3"),
        ((model, guide), (), {"dims": {"slope": ["a", "b"]}}, "expected dims to name the 1 dimensions of 'slope'"),
        (MCMC(NUTS(model), num_samples=2), (), {}, "expected the MCMC object to hold draws, got none"),
    ],
)
def test_errors(source, args, options, message):
    with pytest.raises(ValueError, match="to_arviz: ") as error:
        to_arviz(source, *args, **{"num_samples": 2, **options})
    assert message in str(error.value)


@pytest.mark.parametrize("source", [model, (model,), (model, 3), None])
def test_other_sources_are_type_errors(source):
    with pytest.raises(TypeError, match=r"to_arviz: expected source to be an MCMC object, a pair \(model, guide\)"):
        to_arviz(source)


def test_errors_of_mcmc_runs():
    mcmc = MCMC(NUTS(latent_only), num_samples=4, warmup_steps=1, disable_progbar=True)
    mcmc.run()
    with pytest.raises(ValueError, match="expected num_samples <= 4, the draws of a chain, got 5"):
        to_arviz(mcmc, num_samples=5)
    mcmc.kernel.model = None
    with pytest.raises(ValueError, match="expected the MCMC kernel to have a model"):
        to_arviz(mcmc)


def test_a_pair_of_functions_without_latent_sites_has_its_data():
    data = torch.tensor([0.3, -1.2, 0.8])

    def model():
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=data)

    idata = to_arviz((model, lambda: None), num_samples=2)
    np.testing.assert_array_equal(idata.observed_data["y"], data)
    assert idata.log_likelihood["y"].shape == (1, 2, 3)


@pytest.mark.parametrize("method", [Vecchia, pytest.param(LOO, marks=pytest.mark.slow)])
def test_a_method_without_sites_has_joint_draws_of_f(method):
    """With K = N - 1 they are nearly draws of the exact process."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(5 * x[:, 0]) + 0.3 * torch.randn(30, generator=generator, dtype=torch.float64)
    offset, rows = torch.linspace(0, 3, 30, dtype=torch.float64), torch.arange(4, 12)
    kernel = Matern32(2, torch.tensor(1.0), torch.tensor(0.7)).double()
    gp = method(x, y + offset, kernel, Gaussian(0.1), num_neighbors=29, mean=lambda x: 0.5 * x[:, 0], offset=offset)
    torch.manual_seed(0)
    idata = to_arviz(gp, rows, num_samples=300, posterior_predictive=False, progress=False)
    f = torch.as_tensor(idata.posterior["f"].values[0])
    assert idata.posterior["f"].dims == ("chain", "draw", "data")
    assert idata.posterior["data"].values.tolist() == rows.tolist()
    cov = kernel(x, x).detach()
    gain = torch.linalg.solve(cov + 0.1 * torch.eye(30), cov).mT
    mean = 0.5 * x[:, 0] + gain @ (y - 0.5 * x[:, 0]) + offset
    spread = cov - gain @ cov
    error = (f.mean(0) - mean[rows]) / spread.diagonal()[rows].sqrt()
    assert error.abs().max() < 0.4  # each draw is given 29 of the 30 observations and the earlier values
    torch.testing.assert_close(f.mT.cov(), spread[rows][:, rows], rtol=0, atol=0.03)
    assert "posterior" not in to_arviz(gp, rows, num_samples=2, var_names=["~f"], progress=False)


@pytest.mark.parametrize("method", [Vecchia, LOO, VNNGP])
@pytest.mark.slow
def test_densities_that_all_draws_share_are_left_out(method):
    """ArviZ fits no importance weights to them: `elpd` takes them from `gp.loo`."""
    x = torch.rand(30, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.sin(5 * x[:, 0]) + 0.1 * torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kernel, options = Matern32(1, torch.tensor(1.0), torch.tensor(0.7)).double(), {"progress": False, "num_samples": 60}
    parts = {"num_neighbors": 8, "mean": lambda x: 0 * x[:, 0]}  # a learned level is uncertain in gp.loo()
    gp = method(x, y, kernel, Gaussian(0.1), **parts)
    assert "log_likelihood" not in to_arviz(gp, **options)
    kept = to_arviz(gp, log_likelihood=True, **options).log_likelihood["y"]
    expected = gp.loo()
    torch.testing.assert_close(tensor(kept)[0], expected.expand(60, 30))
    kernel.variance = PyroSample(dist.LogNormal(torch.tensor(0.0).double(), 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of Pareto k, with few draws
        found = az.loo(to_arviz(method(x, y, kernel, Gaussian(0.1), **parts), **options))
    assert abs(float(found.elpd_loo if OLD else found.elpd) - expected.sum()) < 1


def test_draws_of_f_of_several_outputs_have_their_dimensions():
    x = torch.rand(12, 2, dtype=torch.float64)
    y = torch.stack([x[:, 0], -x[:, 0], x[:, 1]], 1)
    f = to_arviz(Vecchia(x, y, num_neighbors=5), num_samples=3, progress=False).posterior["f"]
    assert f.dims == ("chain", "draw", "latents", "data")
    f = to_arviz(CoregionalizedLOO(x, y, 1, num_neighbors=5), num_samples=3, progress=False).posterior["f"]
    assert f.dims == ("chain", "draw", "f_dim_0", "data")
    assert f.shape == (1, 3, 3, 12)
