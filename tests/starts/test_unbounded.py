"""Levels that data do not bound are held, in single functions and in some of several outputs, until data bound them."""

import pytest
import torch
from builders import F64, matern, uniform

from pyro_nngp.coefficients import joint_trend
from pyro_nngp.inference import fit
from pyro_nngp.likelihoods import (
    Bernoulli,
    BetaBinomial,
    Binomial,
    Categorical,
    Censored,
    Gaussian,
    Hurdle,
    Multinomial,
    NegativeBinomial,
    Occupancy,
    Poisson,
    StudentT,
    Tweedie,
    ZeroInflated,
)
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.means import ConstantMean, LinearMean
from pyro_nngp.models import LMC, LOO, NPVI, SVGP, VNNGP
from pyro_nngp.storage import load, save

N = 60
QUIET = pytest.mark.filterwarnings("ignore:.*in all rows", "ignore:.*more likely, the further")
ZERO, ONE, HALF = torch.zeros(N, dtype=F64), torch.ones(N, dtype=F64), (torch.arange(N) % 2).to(F64)


def rare(n=N):
    return (torch.arange(n) == 3).to(F64)


@QUIET
@pytest.mark.filterwarnings("ignore:.*offset has values", "ignore:.*outputs")
@pytest.mark.parametrize(
    ("likelihood", "y", "given", "held"),
    [
        (Bernoulli, ZERO, {}, (True,)),
        (Bernoulli, ONE, {}, (True,)),
        (Bernoulli, rare(), {}, ()),
        (Bernoulli, ZERO, {"weights": 2 * ONE}, (True,)),
        (Bernoulli, rare(5000), {"mean": ConstantMean(9.0)}, ()),
        (Bernoulli, rare(5000).flip(0), {}, ()),  # beyond the rows that are looked at first
        (Binomial, 3 * ONE, {"trials": 3 * ONE}, (True,)),
        (Binomial, 3 * ONE, {"trials": 3 + rare()}, ()),
        (BetaBinomial, ZERO, {"trials": 5 * ONE}, (True,)),
        (Tweedie, ZERO, {}, (True,)),
        (lambda: Hurdle(Poisson()), ZERO, {}, (True,)),
        (lambda: Occupancy(3), ZERO, {}, (True,)),
        (lambda: Occupancy(3), 3 * ONE, {}, (True,)),
        (Poisson, ZERO, {}, (True,)),
        (Poisson, ZERO, {"offset": HALF}, (True,)),
        (Poisson, 4 * ONE, {}, ()),
        (NegativeBinomial, ZERO, {}, (True,)),
        (NegativeBinomial, rare(), {}, ()),
        (lambda: ZeroInflated(Poisson()), 1 + HALF, {}, ()),
        (lambda: Categorical(3), HALF.long(), {}, (False, False, True)),
        (lambda: Categorical(2), HALF.long(), {}, ()),
        (lambda: Censored(Gaussian(), upper=1.0), ONE, {}, (True,)),
        (lambda: Censored(Gaussian(), upper=1.0), HALF, {}, ()),
        (lambda: Censored(Gaussian(), upper="limits"), 3 + HALF, {"limits": 3 + HALF}, (True,)),
        (Multinomial, torch.stack([HALF, 3 - HALF], -1), {"trials": 3 * ONE}, ()),
        (Multinomial, torch.stack([ZERO, 3 * ONE], -1), {"trials": 3 * ONE}, (True, True)),
        (Poisson, HALF, {"offset": 300 + 50 * HALF}, ()),  # an exposure in place of its logarithm
        (Gaussian, ONE, {}, ()),
        (StudentT, HALF + 1e4 * rare(), {}, ()),
    ],
)
def test_levels_are_held_where_no_data_bound_them(likelihood, y, given, held):
    gp = VNNGP(uniform(len(y)), y, likelihood=likelihood(), num_neighbors=4, **given)
    assert gp.mean.held == held


@QUIET
def test_a_level_that_is_no_parameter_is_not_held():
    x = uniform(N)
    assert VNNGP(x, ZERO, likelihood=Poisson(), mean=LinearMean(2, prior="weak"), num_neighbors=4).mean.held == ()
    assert VNNGP(x, ZERO, likelihood=Poisson(), mean=LinearMean(2), num_neighbors=4).mean.held == (True,)
    assert VNNGP(x, None, num_neighbors=4).mean.held == ()


@QUIET
@pytest.mark.parametrize(
    ("likelihood", "y", "given"),
    [
        (Bernoulli, ZERO, {}),
        (Poisson, ZERO, {}),
        (Binomial, ZERO, {"trials": 5 * ONE}),
        (BetaBinomial, ZERO, {"trials": 5 * ONE}),
        (lambda: Censored(Gaussian(0.1), upper=1.0), ONE, {}),
        (Bernoulli, ONE, {"mean": ConstantMean(-3.0)}),
    ],
)
def test_a_level_that_is_held_is_the_nearest_at_which_the_data_lose_half_a_nat(likelihood, y, given):
    gp = VNNGP(uniform(N), y, likelihood=likelihood(), num_neighbors=4, **given)
    f = torch.stack([gp.mean.value.detach().expand(N), gp.mean.value.sign().detach().expand(N) * 60])
    bound = gp.rows.likelihood(gp.bound())
    lost = bound.expected_log_prob(y, f, torch.full_like(f, 1e-12)).sum(-1)
    torch.testing.assert_close(lost[1] - lost[0], torch.tensor(0.5, dtype=F64), rtol=0.0, atol=0.01)


@QUIET
@pytest.mark.filterwarnings("ignore:expected:UserWarning", "ignore:fit:UserWarning")
@pytest.mark.parametrize("method", [VNNGP, LOO, NPVI, SVGP])
@pytest.mark.parametrize(("y", "low"), [(ZERO, True), (ONE, False)])
def test_one_class_gives_half_a_datum_of_the_other(method, y, low):
    """The level is held where half a datum of one more would put it; f has a variance of almost 0."""
    given = {"inducing": 10} if method is SVGP else {"num_neighbors": 4}
    gp = method(uniform(N, seed=1), y, likelihood=Bernoulli(), **given)
    fit(gp, num_steps=30, progress=False)
    other = gp.predict(uniform(20, seed=2)).mean if low else 1 - gp.predict(uniform(20, seed=2)).mean
    torch.testing.assert_close(other, torch.full_like(other, 0.5 / (N + 1)), rtol=0.3, atol=0.0)


@QUIET
@pytest.mark.filterwarnings("ignore:fit:UserWarning")
@pytest.mark.parametrize("likelihood", [Bernoulli, Poisson])
@pytest.mark.parametrize("factors", [False, True])
def test_an_output_of_zeros_is_predicted_near_zero_beside_others(likelihood, factors):
    y = torch.stack([HALF, ZERO, HALF.flip(0)], -1)
    given = {"mixing": FactorLoadings(3, 1)} if factors else {"num_latents": 1}
    gp = LMC(uniform(N, seed=1), y, likelihood=likelihood(), num_neighbors=4, **given)
    assert gp.mean.held == (False, True, False)
    level = gp.mean.value.detach().clone()
    fit(gp, num_steps=5, progress=False)
    x_new = uniform(20, seed=2)
    assert gp.mean.value[1] == level[1]
    assert gp.mean.value[0] != level[0]
    torch.testing.assert_close(gp.predict(x_new).mean[1], torch.full((20,), 0.5 / N, dtype=F64), rtol=0.1, atol=0.0)
    if not factors:  # loadings without a prior, of which nothing is known
        assert gp.loading(x_new)[:, 1].abs().max() < 0.01
        assert gp(x_new)[1][1].max() < 1e-4


@QUIET
def test_more_data_free_a_level():
    """The solution is then that of a method that has had all data from the beginning, but for another ordering."""
    x, y = uniform(2 * N, seed=3), torch.cat([ZERO, HALF])
    gp = VNNGP(x[:N], y[:N], matern(), likelihood=Poisson(), num_neighbors=8)
    whole = VNNGP(x, y, matern(), likelihood=Poisson(), num_neighbors=8)
    assert (gp.mean.held, whole.mean.held) == ((True,), ())
    gp.solve()
    far = torch.full((1, 2), 50.0, dtype=F64)
    torch.testing.assert_close(gp(far)[1], gp.kernel.variance[None], rtol=1e-5, atol=0.0)
    with pytest.warns(UserWarning, match="extend: expected the kernel to be trained .* Call fit again"):
        gp.extend(x[N:], y[N:])
    assert gp.mean.held == ()
    for each in 5 * [gp, whole]:  # steps of the level are limited
        each.solve()
    torch.testing.assert_close(gp.mean.value, whole.mean.value, rtol=0.0, atol=0.03)
    assert gp(far)[1] > 1.01 * gp.kernel.variance  # the level is uncertain


@QUIET
def test_a_part_of_the_data_may_not_bound_a_level():
    gp = VNNGP(uniform(2 * N, seed=3), torch.cat([ZERO, HALF]), likelihood=Poisson(), num_neighbors=8)
    part = gp.subset(torch.arange(N))
    part.solve()
    assert (gp.mean.held, part.mean.held) == ((), (True,))
    assert part.mean.value == gp.mean.value


@QUIET
def test_a_level_stays_held_in_a_file(tmp_path):
    gp = VNNGP(uniform(N), ZERO, likelihood=Poisson(), num_neighbors=4)
    save(gp, tmp_path / "gp.pt")
    assert load(tmp_path / "gp.pt").mean.held == (True,)


@pytest.mark.parametrize("mean", [ConstantMean(num_latents=3), LinearMean(2, num_latents=3)])
def test_coefficients_that_are_held_have_no_gradient_and_take_no_values(mean):
    mean.held = (False, True, False)
    mean(uniform(N)).sum().backward()
    for parameter in mean.parameters():
        assert parameter.grad[..., [0, 2]].abs().min() > 0 or parameter.dim() == 2
        assert not parameter.grad[..., 1].any()
    mean.assign(torch.ones_like(mean.coefficients))
    assert mean.coefficients[..., [0, 2]].eq(1).all()
    assert not mean.coefficients[..., 1].any()
    assert mean.is_learned
    mean.held = (True, True, True)
    assert not mean.is_learned


@pytest.mark.parametrize("mean", [ConstantMean(num_latents=3), LinearMean(2, num_latents=3)])
def test_coefficients_of_other_outputs_are_as_if_those_held_were_known(mean):
    size = mean.coefficients.numel()
    root = torch.randn(size, size, dtype=F64)
    information = root @ root.mT + torch.eye(size, dtype=F64)
    mean.held = (False, True, False)
    cov = joint_trend(mean, information).root.flatten(0, -2)
    cov = cov @ cov.mT
    free = torch.tensor([True, False, True]).repeat_interleave(size // 3)
    torch.testing.assert_close(cov[free][:, free], torch.linalg.inv(information[free][:, free]), rtol=1e-6, atol=1e-8)
    assert not cov[~free].any()


@pytest.mark.parametrize(
    ("likelihood", "y", "given", "match"),
    [
        (Poisson, ZERO, {}, r"y is 0 in all rows. .* The level of f, which such data do not bound, is held at -4.8"),
        (lambda: Categorical(3), HALF.long(), {}, r"level of f of functions \[2\] is from 0. It is held at -"),
    ],
)
def test_the_method_says_that_it_holds_a_level(likelihood, y, given, match):
    with pytest.warns(UserWarning, match=match):
        VNNGP(uniform(N), y, likelihood=likelihood(), num_neighbors=4, **given)
