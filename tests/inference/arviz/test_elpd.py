import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar
from pyro.nn import PyroSample

from pyro_nngp.inference import elpd, fit, to_arviz
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import LOO, SVGP, VNNGP, Vecchia

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.x speaks of 1.x once a day
    import arviz as az

OLD = az.__version__.startswith("0.")
DTYPE = torch.float64
METHODS = {
    "VNNGP": (VNNGP, {"num_neighbors": 15}),
    "LOO": (LOO, {"num_neighbors": 15}),
    "Vecchia": (Vecchia, {"num_neighbors": 15}),
    "SVGP": (SVGP, {"inducing": 20, "learn_inducing": False}),
}


def total(result):
    return float(result.elpd_loo if OLD else result.elpd)


@pytest.fixture(scope="module")
def data():
    """400 points to train on, 400 fresh ones."""
    pyro.set_rng_seed(1)
    x = torch.rand(800, 2, dtype=DTYPE)
    kernel = Matern32(2, variance=scalar(1.0), lengthscale=scalar(0.3))
    cov = kernel(x).detach() + 1e-6 * torch.eye(800, dtype=DTYPE)
    y = torch.linalg.cholesky(cov) @ torch.randn(800, dtype=DTYPE) + 0.3 * torch.randn(800, dtype=DTYPE)
    return x[:400], y[:400], x[400:], y[400:]


def score(gp, x, y):
    log_prob = gp.predict(x).log_prob(y).detach()
    return float(log_prob.sum()), float(len(y) ** 0.5 * log_prob.std())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pandas, to ArviZ
def test_compare_ranks_point_estimates_as_fresh_data_do(data):
    x, y, x_new, y_new = data
    estimates, fresh = {}, {}
    for name, (method, options) in METHODS.items():
        kernel = Matern32(2, variance=scalar(1.0), lengthscale=scalar(0.3))
        gp = method(x, y, kernel, Gaussian(0.09), **options)
        if getattr(gp, "can_solve", False):
            gp.solve()
        estimates[name], (fresh[name], error) = elpd(gp.loo()), score(gp, x_new, y_new)
        assert abs(total(estimates[name]) - fresh[name]) < 2 * error
    table = az.compare(estimates, **({} if OLD else {"round_to": "none"}))
    assert table.index[-1] == "SVGP" == min(fresh, key=fresh.get)
    assert fresh["SVGP"] < min(fresh["LOO"], fresh["Vecchia"], fresh["VNNGP"]) - 10
    np.testing.assert_allclose(table.loc["SVGP", "se"], estimates["SVGP"].se)
    if OLD:  # 1.x puts it in words
        assert not table["warning"].any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Pareto k above .5 by ArviZ with few draws
def test_loo_of_exports_is_the_score_on_fresh_data(data):
    x, y, x_new, y_new = data
    exports, fresh = {}, {}
    for name, (method, options) in METHODS.items():
        pyro.set_rng_seed(0)
        kernel, likelihood = Matern32(2), Gaussian()
        kernel.variance = PyroSample(dist.LogNormal(scalar(0.0), 1.0))
        kernel.lengthscale = PyroSample(dist.LogNormal(scalar(-1.0), 1.0))
        likelihood.variance = PyroSample(dist.LogNormal(scalar(-3.0), 1.0))
        gp = method(x, y, kernel, likelihood, **options)
        fit(gp, 200, batch_size=100, lr=0.03, progress=False)
        exports[name] = to_arviz(gp, num_samples=100, posterior_predictive=False, progress=False)
        fresh[name], error = score(gp, x_new, y_new)
        found = az.loo(exports[name])
        assert abs(total(found) - fresh[name]) < 2 * (error**2 + found.se**2) ** 0.5
    assert az.compare(exports).index[-1] == min(fresh, key=fresh.get)


def test_values():
    found = elpd(torch.tensor([[-1.0, -2.0], [-3.0, -6.0]]))
    assert total(found) == -12
    np.testing.assert_allclose(found.se, (4 * np.var([1, 2, 3, 6])) ** 0.5)
    assert found["loo_i" if OLD else "elpd_i"].dims == ("latents", "data")
    assert "elpd_loo" in str(found)


def test_refusals():
    with pytest.raises(ValueError, match=r"elpd: expected log_densities of shape \(N,\) or \(T, N\)"):
        elpd(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="elpd: expected log_densities"):
        elpd(torch.tensor([0.0, torch.nan]))
    with pytest.raises(TypeError, match="elpd: expected log_densities"):
        elpd([0.0])
