"""Log densities of the rows that are asked for are those of the export."""

import warnings
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import slow_except
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroSample

from pyro_nngp.inference import PointwiseLogLikelihood, to_arviz
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import LOO, SVGP, VNNGP, Vecchia

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.x speaks of 1.x once a day
    import arviz as az

F64 = torch.float64
N = 40
X = torch.rand(N, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = torch.sin(5 * X[:, 0]) + 0.1 * torch.randn(N, dtype=F64, generator=torch.Generator().manual_seed(1))
ROWS = np.array([7, 2, 31])
NAMES = [f"site {i}" for i in range(N)]
SOME = {"posterior_predictive": False, "progress": False}


def kernel():
    return Matern52(2, lengthscale=PyroSample(dist.LogNormal(torch.tensor(-1.0, dtype=F64), 0.3)))


METHODS = {
    "vecchia": lambda: Vecchia(X, Y, kernel(), Gaussian(0.05), num_neighbors=5),
    "loo": lambda: LOO(X, Y, kernel(), Gaussian(0.05), num_neighbors=5),
    "vnngp": lambda: VNNGP(X, (Y > 0).to(F64), kernel(), Bernoulli(), num_neighbors=5),
    "svgp": lambda: SVGP(X, Y, kernel(), Gaussian(0.05), inducing=8),
    "outputs": lambda: Vecchia(X, torch.stack([Y, Y.flip(0)], 1), kernel(), Gaussian(0.05), num_neighbors=5),
}


def regression(idx=None):
    """The model runs on rows alone."""
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
    with pyro.plate("data", N, subsample=idx) as rows:
        effect = pyro.sample("effect", dist.Normal(torch.tensor(0.0, dtype=F64), 0.3))
        with pyro.poutine.mask(mask=rows != 2):
            pyro.sample("y", dist.Normal(X[rows] @ slope + effect, 0.2), obs=Y[rows])


def with_arguments(x, y):
    slope = pyro.sample("slope", dist.Normal(torch.tensor(0.0, dtype=F64), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x[:, 0] * slope, 0.2), obs=y)


def part(idata, rows=ROWS):
    return idata.observed_data["y"].isel(data=rows)


def assert_equal(found, expected, gp=None):
    assert found.dims == expected.dims
    for dim in expected.dims:
        assert (found[dim].values == expected[dim].values).all()
    # where sites are solved for, each solution starts at the one before
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-3 if isinstance(gp, VNNGP) else 1e-10)


@pytest.mark.parametrize("name", slow_except(METHODS, "vnngp", "outputs"))
def test_densities_of_methods_are_those_of_the_export(name):
    pyro.set_rng_seed(0)
    gp = METHODS[name]()
    idata = to_arviz(gp, num_samples=3, coords={"data": NAMES}, **SOME)
    log_lik = PointwiseLogLikelihood(gp, coords={"data": NAMES})
    expected = idata.log_likelihood["y"]
    assert_equal(log_lik(part(idata), idata), expected.isel(data=ROWS), gp)
    lazy = log_lik.group(idata)["y"]
    assert lazy.shape == expected.shape
    assert_equal(lazy.isel(data=ROWS, draw=[2, 0]), expected.isel(data=ROWS, draw=[2, 0]), gp)
    assert_equal(lazy.isel(data=4, draw=1, chain=0), expected.isel(data=4, draw=1, chain=0), gp)
    assert_equal(lazy, expected, gp)


def test_densities_of_programs_are_those_of_the_export():
    pyro.set_rng_seed(0)
    pair = (regression, AutoNormal(regression))
    idata = to_arviz(pair, num_samples=4, **SOME)
    found = PointwiseLogLikelihood(pair)(part(idata), idata)
    assert_equal(found, idata.log_likelihood["y"].isel(data=ROWS))
    assert np.isnan(found.sel(data=2)).all()
    pyro.clear_param_store()
    pair = (with_arguments, AutoNormal(with_arguments))
    idata = to_arviz(pair, X, Y, num_samples=4, **SOME)
    found = PointwiseLogLikelihood(pair, X, Y)(part(idata), idata)
    assert_equal(found, idata.log_likelihood["y"].isel(data=ROWS))
    found = PointwiseLogLikelihood(pair, X, model_kwargs={"y": Y})(part(idata), idata)
    assert_equal(found, idata.log_likelihood["y"].isel(data=ROWS))


def test_runs_know_their_arguments():
    mcmc = MCMC(NUTS(with_arguments), 3, 2, disable_progbar=True)
    mcmc.run(X, Y)
    idata = to_arviz(mcmc, **SOME)
    assert_equal(PointwiseLogLikelihood(mcmc)(part(idata), idata), idata.log_likelihood["y"].isel(data=ROWS))
    mcmc = MCMC(NUTS(METHODS["vecchia"]().model), 3, 2, disable_progbar=True)
    mcmc.run()
    idata = to_arviz(mcmc, **SOME)
    assert_equal(PointwiseLogLikelihood(mcmc)(part(idata), idata), idata.log_likelihood["y"].isel(data=ROWS))


def test_at_the_mean_of_the_draws_there_are_no_draws():
    gp = METHODS["vecchia"]()
    idata = to_arviz(gp, num_samples=3, **SOME)
    mean = idata.posterior.mean(["chain", "draw"])
    found = PointwiseLogLikelihood(gp)(part(idata), SimpleNamespace(posterior=mean))
    assert found.dims == ("data",)
    lengthscale = torch.as_tensor(mean["kernel.lengthscale"].values)[None]
    expected = gp.loo(torch.as_tensor(ROWS), samples={"kernel.lengthscale": lengthscale})[0]
    torch.testing.assert_close(torch.as_tensor(found.values), expected)


def test_only_the_rows_that_are_read_are_computed(monkeypatch):
    seen = []

    def watched(idx=None):
        seen.append(None if idx is None else len(idx))
        return regression(idx)

    pair = (watched, AutoNormal(regression))
    idata = to_arviz((regression, pair[1]), num_samples=5, log_likelihood=False, **SOME)
    group = PointwiseLogLikelihood(pair).group(idata)
    assert seen == []
    assert group["y"].isel(data=ROWS).values.shape == (1, 5, 3)
    assert seen == [3] * 5
    assert group["y"][0, :2, :4].values.shape == (2, 4)
    assert seen[5:] == [4] * 2


@pytest.mark.skipif(not hasattr(az, "loo_subsample"), reason="of ArviZ 1.x")
@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_loo_from_some_rows():
    pyro.set_rng_seed(0)
    gp = METHODS["vecchia"]()
    whole = to_arviz(gp, num_samples=200, **SOME)
    idata = to_arviz(gp, num_samples=200, log_likelihood=False, **SOME)
    log_lik = PointwiseLogLikelihood(gp)
    idata["log_likelihood"] = log_lik.group(idata)
    for data in (whole, idata):
        data["posterior"] = whole["posterior"]
    found = az.loo_subsample(idata, 15, method="plpd", log_lik_fn=log_lik, seed=0)
    assert abs(found.elpd - az.loo(whole).elpd) < 4 * found.subsampling_se + 0.01
    assert az.loo(idata, log_lik_fn=log_lik, var_name="y").elpd == pytest.approx(az.loo(whole).elpd)


def test_refusals():
    gp = METHODS["vecchia"]()
    idata = to_arviz(gp, num_samples=2, coords={"data": NAMES}, **SOME)
    with pytest.raises(
        ValueError, match=r"PointwiseLogLikelihood: expected coordinates of 'data' to be row numbers, got"
    ):
        PointwiseLogLikelihood(gp)(part(idata), idata)
    with pytest.raises(ValueError, match=r"row numbers, .* Pass the labels as coords=\{'data': \.\.\.\}"):
        PointwiseLogLikelihood(gp, coords={"data": ["other"] * N})(part(idata), idata)
    pair = (regression, AutoNormal(regression))
    idata = to_arviz(pair, num_samples=2, var_names=["~effect"], **SOME)
    with pytest.raises(ValueError, match=r"expected latent site 'effect' among \['slope'\], got no value of it"):
        PointwiseLogLikelihood(pair)(part(idata), idata)
    with pytest.raises(TypeError, match=r"PointwiseLogLikelihood: expected source to be an MCMC object"):
        PointwiseLogLikelihood(3)
