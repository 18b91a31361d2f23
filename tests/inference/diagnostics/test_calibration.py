import signal
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import slow_except
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.optim import Adam
from scipy import stats

from pyro_nngp.distributions import Mixture
from pyro_nngp.inference import (
    coverage_curve,
    pit,
    psis_khat,
    reliability,
    sbc_ranks,
    symmetry,
    uniformity,
)
from pyro_nngp.likelihoods import Censored, Gaussian, Poisson

F64 = torch.float64


LEVEL = 1e-4  # of every test that must not reject; the seeds are fixed


def model(scale=1.0, size=3):
    with pyro.plate("rows", size):
        pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), 1.0))


def guide(scale=1.0, size=3):
    with pyro.plate("rows", size):
        pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), scale))


@pytest.mark.slow
def test_khat_sees_a_narrow_guide_and_not_a_wide_one():
    # P(p/q > t) falls as t^(-1/k) with k = 1 - scale^2, times powers of log t.
    assert psis_khat(model, guide, 0.3, num_samples=1000, progress=False) > 0.7
    assert psis_khat(model, guide, 1.2, num_samples=1000, progress=False) < 0.5
    assert psis_khat(model, guide, 1.0, num_samples=50) == -float("inf")
    assert psis_khat(model, guide, 50.0, 1000, num_samples=50) == float("inf")


@pytest.mark.parametrize(("scale", "size"), [pytest.param(0.6, 3, marks=pytest.mark.slow), (1.8, 400)])  # underflows
def test_khat_is_that_of_arviz(scale, size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import arviz as az
    pyro.set_rng_seed(7)
    khat = psis_khat(model, guide, scale, size, num_samples=400)
    pyro.set_rng_seed(7)
    z = torch.stack([poutine.trace(guide).get_trace(scale, size).nodes["z"]["value"] for _ in range(400)])
    weights = (dist.Normal(0.0, 1.0).log_prob(z) - dist.Normal(0.0, scale).log_prob(z)).sum(-1)
    if az.__version__.startswith("0."):
        expected = az.psislw(weights.numpy())[1]
    else:
        from arviz_stats.base import array_stats

        expected = array_stats.psislw(-weights.numpy())[1]  # takes log likelihoods
    assert abs(khat - float(expected)) < 1e-6


def test_khat_errors():
    def subsampled():
        with pyro.plate("rows", 3, subsample_size=2):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="psis_khat: expected num_samples >= 25, got 24"):
        psis_khat(model, guide, num_samples=24)
    with pytest.raises(
        ValueError, match=r"psis_khat: expected the model to take all rows of its plates, got some of \['rows'\]"
    ):
        psis_khat(subsampled, subsampled)
    with pytest.raises(ValueError, match="psis_khat: expected latent site 'z' among"):
        psis_khat(model, lambda: None)


def simulate():
    theta = torch.randn(2)
    return {"theta": theta}, theta + torch.randn(5, 2)


def posterior(shift=0.0, factor=1.0):
    def infer(y):
        scale = 1 / 6**0.5
        return {"theta": y.sum(0) / 6 + shift * scale + factor * scale * torch.randn(39, 2)}

    return infer


@pytest.mark.parametrize(
    ("shift", "factor", "uniform", "symmetric"),
    [(0, 1, True, True), (0, 0.6, False, True), (0, 1.6, False, True), (0.5, 1, False, False)],
)
def test_sbc_tells_right_posteriors_from_wrong_ones(shift, factor, uniform, symmetric):
    ranks = sbc_ranks(simulate, posterior(shift, factor), 400, progress=False)["theta"]
    assert ranks.shape == (400, 2)
    for values in ranks.mT:
        assert (uniformity(values) > LEVEL) == uniform
        assert (symmetry(values) > LEVEL) == symmetric
    if factor != 1:  # too narrow: true values in the tails; too wide: in the middle
        assert ((ranks - 0.5).abs().mean() > 0.25) == (factor < 1)


@pytest.mark.slow
def test_sbc_of_guides_fails_the_mean_field_one_of_a_correlated_posterior():
    """Variational simulation-based calibration: R regressions at once, one guide for each."""
    count, x = 300, torch.linspace(0.5, 2.5, 8, dtype=F64)
    true = torch.randn(count, 2, dtype=F64)
    features = torch.stack([torch.ones_like(x), x], -1)
    y = true @ features.mT + 0.5 * torch.randn(count, 8, dtype=F64)

    def regressions():
        with pyro.plate("regressions", count):
            beta = pyro.sample("beta", dist.Normal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(beta @ features.mT, 0.5).to_event(1), obs=y)

    def gaussian(full):
        loc = pyro.param("loc", torch.zeros(count, 2, dtype=F64))
        scale = pyro.param("scale", torch.full((count, 2), 0.3, dtype=F64), constraint=constraints.positive)
        below = pyro.param("below", torch.zeros(count, dtype=F64))
        corner = torch.stack([torch.zeros_like(below), below * full], -1)
        tril = torch.diag_embed(scale) + torch.stack([torch.zeros_like(corner), corner.flip(-1)], -2)
        with pyro.plate("regressions", count):
            return pyro.sample("beta", dist.MultivariateNormal(loc, scale_tril=tril))

    passed = {}
    for full in (0.0, 1.0):
        pyro.clear_param_store()
        svi = SVI(regressions, lambda full=full: gaussian(full), Adam({"lr": 0.05}), TraceMeanField_ELBO())
        for _ in range(200):
            svi.step()
        draws = torch.stack([gaussian(full) for _ in range(99)]).detach()
        pairs = iter(({"beta": true[r]}, r) for r in range(count))
        ranks = sbc_ranks(
            lambda pairs=pairs: next(pairs), lambda r, draws=draws: {"beta": draws[:, r]}, count, progress=False
        )
        passed[full] = [uniformity(values) > LEVEL for values in ranks["beta"].mT]
    assert passed == {0.0: [False, False], 1.0: [True, True]}


def test_sbc_returns_what_it_has_when_interrupted():
    def interrupted(y):
        signal.raise_signal(signal.SIGINT)
        return posterior()(y)

    assert sbc_ranks(simulate, interrupted, 9, progress=False)["theta"].shape == (1, 2)


def test_sbc_errors():
    with pytest.raises(
        ValueError, match=r"sbc_ranks: expected infer\(data\) to draw \['theta'\], got none of \['theta'\]"
    ):
        sbc_ranks(simulate, lambda y: {}, 2)
    with pytest.raises(ValueError, match=r"pit: expected draws of shape \(S, \*\(2,\)\)"):
        sbc_ranks(simulate, lambda y: {"theta": torch.zeros(9)}, 2)


def test_pit_of_draws_spreads_ties_over_their_ranks():
    draws, y = torch.tensor([1, 2, 2, 3])[:, None].expand(4, 20_000), torch.full((20_000,), 2)
    values = pit(draws, y)
    assert 0.2 < values.min() < 0.201
    assert 0.799 < values.max() < 0.8
    assert uniformity((values - 0.2) / 0.6) > LEVEL


def test_pit_of_distributions():
    loc, y = torch.randn(2000, dtype=F64), torch.randn(2000, dtype=F64)
    normal = dist.Normal(loc, 2.0)
    assert torch.equal(pit(normal, y), normal.cdf(y))
    assert uniformity(pit(dist.StudentT(3.0, loc, 2.0), dist.StudentT(3.0, loc, 2.0).sample())) > LEVEL
    marginal = Poisson().marginal(loc, torch.full_like(loc, 0.5))  # a cdf nowhere, and ties everywhere
    counts = marginal.sample()
    assert uniformity(pit(marginal, counts)) > LEVEL
    assert uniformity(pit(dist.Poisson(marginal.mean), counts)) < 1e-6


def test_pit_of_mixtures_is_exact_where_the_components_know_it():
    loc, y = torch.randn(3, 2000, dtype=F64), torch.randn(2000, dtype=F64)
    normals = Mixture([dist.Normal(row, 2.0) for row in loc])
    torch.testing.assert_close(pit(normals, y), dist.Normal(loc, 2.0).cdf(y).mean(0), rtol=1e-12, atol=0)
    heavy = Mixture([dist.StudentT(3.0, row, 2.0) for row in loc])  # without a cumulative function
    assert uniformity(pit(heavy, heavy.sample())) > LEVEL


def test_pit_of_discrete_data_does_not_take_the_cumulative_function():
    class Coin(torch.distributions.Bernoulli):
        def cdf(self, value):
            return torch.where(value < 1, 1 - self.probs, 1.0)

    coin = Coin(torch.full((1000,), 0.3))
    assert uniformity(pit(coin, coin.sample())) > LEVEL


@pytest.mark.parametrize("limit", slow_except([{"lower": 0.0}, {"upper": 0.5}], {"lower": 0.0}))
def test_pit_of_censored_data_is_uniform_at_the_limit_too(limit):
    loc = torch.randn(2000, dtype=F64)
    one = Censored(Gaussian(0.25).double(), **limit).marginal(loc, torch.full_like(loc, 0.1))
    for predictive in (one, Mixture([one, one])):
        assert uniformity(pit(predictive, one.sample())) > LEVEL


def test_pit_errors():
    with pytest.raises(ValueError, match=r"pit: expected draws of shape \(S, \*\(3,\)\) with S >= 1, got \(3, 9\)"):
        pit(torch.zeros(3, 9), torch.zeros(3))
    with pytest.raises(ValueError, match="with S >= 1, got \\(0, 3\\)"):
        pit(torch.zeros(0, 3), torch.zeros(3))
    with pytest.raises(TypeError, match="pit: expected predictive to be a distribution, or a tensor of draws, got str"):
        pit("x", torch.zeros(3))


def test_uniformity_is_the_chi_squared_test():
    values = torch.tensor([0.1] * 30 + [0.6] * 20)
    assert abs(uniformity(values, 2) - stats.chi2.sf((5**2 + 5**2) / 25, 1)) < 1e-12
    with pytest.raises(ValueError, match="uniformity: expected values to be >= 100 for 20 bins, got 50"):
        uniformity(values)


def test_coverage_curve():
    values = torch.tensor([0.5, 0.3, 0.9, 0.05])  # inside the central intervals of level 0, 0.4, 0.8, 0.9
    levels = torch.tensor([0.1, 0.5, 0.85, 0.95])
    assert coverage_curve(values, levels).tolist() == [0.25, 0.5, 0.75, 1.0]
    y = torch.randn(4000, dtype=F64)
    narrow = pit(dist.Normal(torch.zeros_like(y), 0.5), y)
    expected = 2 * stats.norm.cdf(0.5 * stats.norm.ppf(0.95)) - 1
    assert (
        abs(coverage_curve(narrow, torch.tensor([0.9], dtype=F64)) - expected)
        < 6 * (expected * (1 - expected) / 4000) ** 0.5
    )


def test_reliability_of_two_labels():
    found = reliability(torch.tensor([0.1, 0.15, 0.9, 1.0]), torch.tensor([0, 1, 1, 1]), num_bins=5)
    for value, expected in zip(found, ([0.125, 0.95], [0.5, 1.0], [2.0, 2.0]), strict=True):
        torch.testing.assert_close(value, torch.tensor(expected))
    assert abs(found.error - (0.375 + 0.05) / 2) < 1e-6


def test_reliability_of_several_labels():
    prob = torch.tensor([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.05, 0.05, 0.9]])
    found = reliability(prob, torch.tensor([0, 1, 2]), num_bins=2)
    torch.testing.assert_close(found.predicted, torch.tensor([2.2 / 3]))
    torch.testing.assert_close(found.observed, torch.tensor([2 / 3]))


@pytest.mark.parametrize(
    ("prob", "y", "message"),
    [
        (torch.rand(3), torch.zeros(4), "expected prob, y of shapes"),
        (torch.rand(0), torch.zeros(0), "expected prob, y of shapes"),
        (torch.tensor([1.5]), torch.zeros(1), "expected prob in \\[0, 1\\]"),
        (torch.rand(2), torch.tensor([0, 2]), r"expected y to hold labels in 0..1, got \[0, 2\]"),
        (torch.rand(2, 3) / 3, torch.tensor([0, 3]), "expected y to hold labels in 0..2"),
    ],
)
def test_reliability_errors(prob, y, message):
    with pytest.raises(ValueError, match=f"reliability: {message}"):
        reliability(prob, y)
