"""Likelihoods: expectations and marginals against dense integration, float32 tails, Pyro effects, every error."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam
from torch import Tensor
from torch.distributions import constraints

from pyro_nngp.inference import IntegratedELBO, fit
from pyro_nngp.kernels import RBF
from pyro_nngp.likelihoods import (
    Bernoulli,
    Binomial,
    Categorical,
    Gamma,
    Gaussian,
    HeteroskedasticGaussian,
    Likelihood,
    LogNormal,
    Marginal,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from pyro_nngp.likelihoods.quadrature import gauss_hermite, log_expectation, normal_nodes
from pyro_nngp.models import SVGP, VNNGP

CUTS = torch.tensor([-1.0, 0.2, 1.5])
ONE_LATENT: list[tuple[str, Callable[[], Likelihood], list[float]]] = [
    ("Gaussian", lambda: Gaussian(0.3), [-1.0, 0.4, 2.0]),
    ("StudentT", lambda: StudentT(3.0, 0.5), [-1.0, 0.4, 2.0]),
    ("LogNormal", lambda: LogNormal(0.2), [0.1, 1.0, 7.0]),
    ("Gamma", lambda: Gamma(2.5), [0.1, 1.0, 7.0]),
    ("Bernoulli-logit", lambda: Bernoulli(), [0.0, 1.0]),
    ("Bernoulli-probit", lambda: Bernoulli("probit"), [0.0, 1.0]),
    ("Binomial", lambda: Binomial(7), [0.0, 3.0, 7.0]),
    ("Poisson-exp", lambda: Poisson(), [0.0, 2.0, 30.0]),
    ("Poisson-softplus", lambda: Poisson("softplus"), [0.0, 2.0, 30.0]),
    ("NegativeBinomial", lambda: NegativeBinomial(1.7), [0.0, 2.0, 30.0]),
    ("Ordinal-logit", lambda: Ordinal(CUTS), [0.0, 1.0, 3.0]),
    ("Ordinal-probit", lambda: Ordinal(CUTS, "probit"), [0.0, 1.0, 3.0]),
]
over_one_latent = pytest.mark.parametrize(("make", "data"), [c[1:] for c in ONE_LATENT], ids=[c[0] for c in ONE_LATENT])


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def grid(loc: float, var: float, num: int = 100_001, width: float = 12.0) -> tuple[Tensor, Tensor]:
    """A fine grid of f, and the logarithms of its trapezoidal weights under N(loc, var)."""
    f = loc + math.sqrt(var) * torch.linspace(-width, width, num, dtype=torch.float64)
    return f, dist.Normal(scalar(loc), math.sqrt(var)).log_prob(f) + math.log(float(f[1] - f[0]))


def dense_expected(likelihood: Likelihood, y: float, loc: float, var: float) -> float:
    f, log_weights = grid(loc, var)
    return (log_weights.exp() * likelihood.forward(f).log_prob(scalar(y))).sum().item()


def dense_marginal(likelihood: Likelihood, y: float, loc: float, var: float, width: float = 12.0) -> float:
    f, log_weights = grid(loc, var, width=width)
    return (log_weights + likelihood.forward(f).log_prob(scalar(y))).logsumexp(0).item()


# ------------------------------------------------------------------------------------------------------ quadrature


def test_gauss_hermite_is_exact_for_polynomials() -> None:
    nodes, weights = gauss_hermite(20, torch.float64, torch.device("cpu"))
    for degree in range(0, 24, 2):
        moment = math.prod(range(1, degree, 2))  # (degree - 1)!!
        assert (weights * nodes**degree).sum().item() == pytest.approx(moment, rel=1e-12)
    assert gauss_hermite(20, torch.float64, torch.device("cpu"))[0] is nodes


def test_normal_nodes_have_the_moments_of_the_normal() -> None:
    nodes = normal_nodes(4, 64, torch.float64, torch.device("cpu"))
    assert nodes.shape == (4, 64)
    torch.testing.assert_close(nodes.mean(1), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(nodes @ nodes.mT / 64, torch.eye(4, dtype=torch.float64))
    few = normal_nodes(40, 8, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(few.mean(1), torch.zeros(40, dtype=torch.float64))


def test_nodes_first_made_in_inference_mode_work_with_autograd() -> None:
    with torch.inference_mode():
        gauss_hermite(19, torch.float64, torch.device("cpu"))
        normal_nodes(3, 18, torch.float64, torch.device("cpu"))
    loc = tensor(0.3).requires_grad_()
    Bernoulli(num_quadrature=19).expected_log_prob(tensor(1.0), loc, tensor(1.0)).sum().backward()
    Categorical(3, 18).expected_log_prob(
        torch.tensor([1]), loc.expand(3, 1), torch.ones(3, 1).double()
    ).sum().backward()
    assert loc.grad.abs() > 0.1


@pytest.mark.parametrize("slope", [0.0, 3.0, -60.0])
@pytest.mark.parametrize("curvature", [0.0, 1.0, 1e3, 1e6])
def test_log_expectation_of_gaussian_factors(slope: float, curvature: float) -> None:
    r"""log E exp(a t - c t^2 / 2) = a^2 / (2 (1 + c)) - log(1 + c) / 2, however narrow the peak or far off."""

    def log_function(t: Tensor) -> Tensor:
        return slope * t - curvature * t.square() / 2

    value = log_expectation(log_function, *torch.tensor([0.0, 1.0], dtype=torch.float64))
    exact = slope**2 / (2 * (1 + curvature)) - math.log1p(curvature) / 2
    assert value.item() == pytest.approx(exact, abs=1e-9)


# ------------------------------------------------------------------------------------- expected log-densities


@over_one_latent
def test_expected_log_prob_against_dense_integration(make: Callable[[], Likelihood], data: list[float]) -> None:
    likelihood = make()
    for y in data:
        for loc, var in ((0.3, 0.5), (-1.0, 0.05)):
            got = likelihood.expected_log_prob(scalar(y), scalar(loc), scalar(var)).item()
            # the Student-t has the least smooth logarithm, with poles at the distance of its scale
            want = dense_expected(likelihood, y, loc, var)
            assert got == pytest.approx(want, rel=2e-3 if isinstance(likelihood, StudentT) else 1e-7)


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [(Gaussian(0.3), 0.7), (LogNormal(0.2), 3.0), (Poisson(), 4.0), (Gamma(2.5), 3.0), (Gamma(0.3), 1e-3)],
    ids=["Gaussian", "LogNormal", "Poisson", "Gamma", "Gamma-small"],
)
def test_closed_forms_equal_quadrature(likelihood: Likelihood, y: float) -> None:
    likelihood.num_quadrature = 100
    loc, var = torch.meshgrid(tensor(-1.5, 0.0, 2.0), tensor(1e-4, 0.3, 2.0), indexing="ij")
    closed = likelihood.expected_log_prob(scalar(y), loc, var)
    torch.testing.assert_close(
        closed, Likelihood.expected_log_prob(likelihood, scalar(y), loc, var), rtol=1e-9, atol=1e-9
    )


def test_heteroskedastic_closed_form_equals_product_quadrature() -> None:
    likelihood = HeteroskedasticGaussian()
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    t, w = torch.as_tensor(nodes), torch.as_tensor(weights / weights.sum())
    loc, var, y = tensor(0.4, -0.8), tensor(0.6, 0.9), scalar(1.3)
    f = torch.stack(torch.meshgrid(loc[0] + var[0].sqrt() * t, loc[1] + var[1].sqrt() * t, indexing="ij"))
    want = w @ likelihood.forward(f).log_prob(y) @ w
    got = likelihood.expected_log_prob(y[None], loc[:, None], var[:, None])
    torch.testing.assert_close(got, want[None], rtol=1e-9, atol=0.0)


@over_one_latent
def test_no_variance_is_the_conditional(make: Callable[[], Likelihood], data: list[float]) -> None:
    likelihood, y = make(), tensor(*data)
    loc = torch.linspace(-1, 1, len(y), dtype=torch.float64)
    want = likelihood.forward(loc).log_prob(y)
    torch.testing.assert_close(likelihood.expected_log_prob(y, loc, torch.zeros_like(loc)), want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(likelihood.marginal(loc, torch.zeros_like(loc)).log_prob(y), want, rtol=1e-7, atol=1e-7)


@over_one_latent
def test_gradients_of_expectations(make: Callable[[], Likelihood], data: list[float]) -> None:
    """Through mean, variance and the unconstrained hyperparameters."""
    likelihood = make().double()
    y = tensor(*data)
    names = [name.removesuffix("_unconstrained") for name, _ in likelihood.named_parameters()]
    leaves = [p.detach().clone().requires_grad_() for p in likelihood.parameters()]

    def expected(loc: Tensor, log_var: Tensor, *leaves: Tensor) -> Tensor:
        pyro.clear_param_store()
        values = {n: likelihood_transform(likelihood, n)(v) for n, v in zip(names, leaves, strict=True)}
        with poutine.substitute(data=values):
            return likelihood.expected_log_prob(y, loc, log_var.exp())

    loc, log_var = torch.randn(2, len(y), dtype=torch.float64).requires_grad_().unbind()
    assert torch.autograd.gradcheck(expected, (loc, log_var, *leaves))


def likelihood_transform(likelihood: Likelihood, name: str) -> Any:
    return torch.distributions.transform_to(likelihood._pyro_params[name][0])


# ------------------------------------------------------------------------------------------------------- marginals


@over_one_latent
def test_marginals_against_dense_integration(make: Callable[[], Likelihood], data: list[float]) -> None:
    likelihood = make()
    for loc, var in ((0.3, 0.5), (-1.0, 4.0), (2.0, 0.01)):
        marginal = likelihood.marginal(scalar(loc), scalar(var))
        for y in data:
            assert marginal.log_prob(scalar(y)).item() == pytest.approx(
                dense_marginal(likelihood, y, loc, var), abs=1e-7
            )


@pytest.mark.parametrize(
    ("likelihood", "y", "loc", "var", "width"),
    [
        (Poisson(), 1000, 0.0, 1.0, 12),
        (Poisson(), 1000, 0.0, 0.01, 80),
        (Poisson("softplus"), 50, 3.0, 4.0, 30),
        (Poisson(), 0, -3.0, 25.0, 12),
        (NegativeBinomial(5.0), 300, 1.0, 2.0, 12),
        (Binomial(1000), 3, 0.0, 4.0, 12),
        (Gamma(500.0), 30.0, 1.0, 3.0, 12),
        (StudentT(4.0, 0.01), 0.3, 0.0, 1.0, 12),
        (StudentT(4.0, 0.01), 9.0, 0.0, 1.0, 12),
        (StudentT(1.0, 0.1), 1.0, 0.0, 2.0, 12),
        (StudentT(300.0, 0.2), 1.0, 0.0, 2.0, 12),
        (Bernoulli(), 1, 2.0, 25.0, 12),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Likelihood) else str(v),
)
def test_marginals_where_data_are_sharper_than_the_latent_or_far_off(
    likelihood: Likelihood, y: float, loc: float, var: float, width: float
) -> None:
    """Twenty Gauss-Hermite nodes around the mean of f are wrong by more than a nat in most of these."""
    got = likelihood.marginal(scalar(loc), scalar(var)).log_prob(scalar(y)).item()
    assert got == pytest.approx(dense_marginal(likelihood, y, loc, var, width), abs=2e-7)


@pytest.mark.parametrize(
    "likelihood",
    [Gaussian(0.3), LogNormal(0.2), Bernoulli("probit"), Ordinal(CUTS, "probit")],
    ids=lambda v: type(v).__name__,
)
def test_closed_marginals_equal_the_numerical_one(likelihood: Likelihood) -> None:
    y = tensor(1.0, 1.0, 1.0)
    loc, var = tensor(-1.0, 0.0, 2.0), tensor(0.2, 1.0, 4.0)
    numerical = Marginal(likelihood.bind(), loc, var)
    torch.testing.assert_close(likelihood.marginal(loc, var).log_prob(y), numerical.log_prob(y), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("likelihood", "values"),
    [
        (Bernoulli(), range(2)),
        (Binomial(7), range(8)),
        (Poisson(), range(400)),
        (NegativeBinomial(1.7), range(2000)),
        (Ordinal(CUTS), range(4)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Likelihood) else "",
)
def test_discrete_marginals_sum_to_one_with_the_stated_moments(likelihood: Likelihood, values: range) -> None:
    y = torch.tensor(values, dtype=torch.float64)
    marginal = likelihood.marginal(tensor(0.3), tensor(0.4))
    probabilities = marginal.log_prob(y).exp()
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-6)
    if not isinstance(likelihood, Ordinal):
        mean = (probabilities * y).sum()
        assert marginal.mean.item() == pytest.approx(mean.item(), rel=1e-5)
        assert marginal.variance.item() == pytest.approx((probabilities * (y - mean) ** 2).sum().item(), rel=1e-4)


@pytest.mark.parametrize("likelihood", [Gamma(2.5), StudentT(5.0, 0.5)], ids=lambda v: type(v).__name__)
def test_continuous_marginals_integrate_to_one_with_the_stated_moments(likelihood: Likelihood) -> None:
    y = torch.linspace(-80, 80, 20_001, dtype=torch.float64)
    y = y[y > 0] if isinstance(likelihood, Gamma) else y
    marginal = likelihood.marginal(tensor(0.3), tensor(0.4))
    density = marginal.log_prob(y).exp() * (y[1] - y[0])
    assert density.sum().item() == pytest.approx(1.0, abs=1e-5)
    mean = (density * y).sum()
    assert marginal.mean.item() == pytest.approx(mean.item(), rel=1e-4)
    assert marginal.variance.item() == pytest.approx((density * (y - mean) ** 2).sum().item(), rel=2e-3)


@pytest.mark.parametrize(
    ("loc", "var", "y"),
    [((0.0, -2.0), (1.0, 0.3), 0.5), ((0.0, -6.0), (1e-4, 1.0), 0.2), ((0.0, 0.0), (0.01, 9.0), 2.0)],
)
def test_heteroskedastic_marginal(loc: tuple[float, float], var: tuple[float, float], y: float) -> None:
    log_noise, log_weights = grid(loc[1], var[1])
    want = (log_weights + dist.Normal(loc[0], (var[0] + log_noise.exp()).sqrt()).log_prob(scalar(y))).logsumexp(0)
    marginal = HeteroskedasticGaussian().marginal(tensor(*loc)[:, None], tensor(*var)[:, None])
    assert marginal.batch_shape == (1,)
    assert marginal.log_prob(scalar(y)).item() == pytest.approx(want.item(), abs=1e-5)
    assert marginal.mean.item() == pytest.approx(loc[0])


@over_one_latent
def test_gradients_of_marginals_against_dense_integration(make: Callable[[], Likelihood], data: list[float]) -> None:
    likelihood = make().double()
    y = scalar(data[-1])
    t, log_weights = grid(0.0, 1.0, num=20_001)

    def gradients(log_prob: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        loc, var = scalar(0.4).requires_grad_(), scalar(0.7).requires_grad_()
        return list(torch.autograd.grad(log_prob(loc, var), [loc, var, *likelihood.parameters()]))

    dense = gradients(lambda m, v: (log_weights + likelihood(m + v.sqrt() * t).log_prob(y)).logsumexp(0))
    got = gradients(lambda m, v: likelihood.marginal(m, v).log_prob(y))
    for g, want in zip(got, dense, strict=True):
        torch.testing.assert_close(g, want, rtol=1e-5, atol=1e-6)


@over_one_latent
def test_draws_follow_the_log_density(make: Callable[[], Likelihood], data: list[float]) -> None:
    """Probabilities of four bins, by counting draws and by integrating the density, within six standard errors."""
    likelihood = make()
    marginal = likelihood.marginal(tensor(0.3), tensor(0.8))
    draws = marginal.sample((20_000,)).double()[:, 0]
    discrete = marginal.support is not None and marginal.support.is_discrete
    if discrete:
        y = torch.arange(31.0, dtype=torch.float64)[: int(draws.max()) + 1]
        mass = marginal.log_prob(y).exp()
    else:
        y = torch.linspace(-20, 60, 20_001, dtype=torch.float64)
        y = y[y > 0] if isinstance(likelihood, LogNormal | Gamma) else y
        mass = marginal.log_prob(y).exp() * (y[1] - y[0])
    for cut in draws.quantile(tensor(0.1, 0.4, 0.7, 0.95)):
        p = mass[y <= cut].sum().clamp(max=1).item()
        assert abs((draws <= cut).double().mean().item() - p) < 6 * math.sqrt(p * (1 - p) / len(draws)) + 1e-4


@pytest.mark.parametrize(
    "make", [lambda: HeteroskedasticGaussian(), lambda: Categorical(3)], ids=["heteroskedastic", "C"]
)
def test_draws_of_several_latents(make: Callable[[], Likelihood]) -> None:
    likelihood = make()
    loc = torch.randn(likelihood.num_latents, 2, dtype=torch.float64)
    var = torch.rand_like(loc)
    exact = Marginal(likelihood.bind(), loc, var).sample((20_000,)).double()  # latent, then conditional
    other = likelihood.marginal(loc, var).sample((20_000,)).double()
    assert exact.shape == other.shape == (20_000, 2)
    error = (exact.var(0) + other.var(0)).div(20_000).sqrt()
    assert ((exact.mean(0) - other.mean(0)).abs() < 6 * error + 2e-3).all()


# ---------------------------------------------------------------------------------------------- relations, classes


def test_relations_between_likelihoods() -> None:
    loc, var, y = tensor(-1.0, 0.5, 3.0), tensor(0.3, 2.0, 1.0), tensor(0.0, 1.0, 1.0)
    same: list[tuple[Likelihood, Likelihood]] = [
        (Bernoulli(), Binomial(1)),
        (Bernoulli(), Ordinal(torch.zeros(1))),
        (Bernoulli("probit"), Ordinal(torch.zeros(1), "probit")),
    ]
    for first, second in same:
        for method in ("expected_log_prob", "marginal"):
            a, b = (
                m(y, loc, var) if method == "expected_log_prob" else m(loc, var).log_prob(y)
                for m in (getattr(first, method), getattr(second, method))
            )
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    r, count = 1e7, tensor(3.0, 0.0, 7.0)
    poisson = Poisson().expected_log_prob(count, loc, var)
    pyro.clear_param_store()
    many = NegativeBinomial(torch.tensor(r, dtype=torch.float64)).expected_log_prob(count, loc - math.log(r), var)
    torch.testing.assert_close(many, poisson, rtol=1e-4, atol=1e-4)
    narrow = StudentT(scalar(1e7), scalar(0.5)).marginal(loc, var).log_prob(y)
    pyro.clear_param_store()
    torch.testing.assert_close(narrow, Gaussian(scalar(0.25)).marginal(loc, var).log_prob(y), rtol=1e-6, atol=1e-6)


def test_negative_binomial_mean_and_variance() -> None:
    conditional = NegativeBinomial(2.5)(tensor(0.7))
    mean = 2.5 * math.exp(0.7)
    assert conditional.mean.item() == pytest.approx(mean)
    assert conditional.variance.item() == pytest.approx(mean * (1 + math.exp(0.7)))


def test_two_classes_are_a_logistic_regression_on_the_difference() -> None:
    loc, var = torch.randn(2, 6, dtype=torch.float64), torch.rand(2, 6, dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    two, one = Categorical(2), Bernoulli(num_quadrature=100)
    difference = (loc[1] - loc[0], var[0] + var[1])
    torch.testing.assert_close(
        two.expected_log_prob(y, loc, var), one.expected_log_prob(y, *difference), rtol=0.0, atol=1e-4
    )
    torch.testing.assert_close(two.marginal(loc, var).probs[:, 1], one.marginal(*difference).probs, rtol=0.0, atol=1e-4)
    assert two(loc).log_prob(y).shape == (6,)


def test_ordinal_probabilities_by_hand() -> None:
    f, cuts = tensor(-0.7, 2.0), CUTS.double()
    for link, cdf in (("logit", torch.sigmoid), ("probit", torch.special.ndtr)):
        pyro.clear_param_store()
        below = cdf(cuts - f[:, None])
        want = torch.cat([below, torch.ones(2, 1)], 1) - torch.cat([torch.zeros(2, 1), below], 1)
        torch.testing.assert_close(Ordinal(cuts, link)(f).probs, want, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------------------ elementwise


@over_one_latent
def test_several_outputs_are_elementwise(make: Callable[[], Likelihood], data: list[float]) -> None:
    likelihood = make()
    y = tensor(*data).expand(2, len(data))
    loc, var = torch.randn(y.shape, dtype=torch.float64), torch.rand(y.shape, dtype=torch.float64)
    expected, marginal = likelihood.expected_log_prob(y, loc, var), likelihood.marginal(loc, var)
    assert likelihood(loc).batch_shape == marginal.batch_shape == expected.shape == y.shape
    for i in range(2):
        torch.testing.assert_close(expected[i], likelihood.expected_log_prob(y[i], loc[i], var[i]))
        torch.testing.assert_close(marginal.log_prob(y)[i], likelihood.marginal(loc[i], var[i]).log_prob(y[i]))
    assert marginal.sample((3,)).shape == (3, *y.shape)


def test_one_noise_variance_per_output() -> None:
    noise = tensor(0.1, 3.0)[:, None]
    likelihood = Gaussian(noise)
    y, loc, var = torch.randn(3, 2, 5, dtype=torch.float64).unbind()
    var = var.square()
    torch.testing.assert_close(likelihood.marginal(loc, var).variance, var + noise)
    pyro.clear_param_store()
    alone = Gaussian(scalar(3.0)).expected_log_prob(y[1], loc[1], var[1])
    pyro.clear_param_store()
    torch.testing.assert_close(likelihood.expected_log_prob(y, loc, var)[1], alone)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_labels_of_any_type(dtype: torch.dtype) -> None:
    labels = torch.tensor([0, 1, 1]).to(dtype)
    loc, var = torch.randn(3), torch.rand(3)
    likelihood = Bernoulli()
    likelihood.check(labels)
    for value in (
        likelihood(loc).log_prob(labels),
        likelihood.expected_log_prob(labels, loc, var),
        likelihood.marginal(loc, var).log_prob(labels),
    ):
        assert value.dtype == torch.float32
    with pyro.plate("data", 3):
        pyro.sample("y", likelihood(loc), obs=labels)


# --------------------------------------------------------------------------------------------------- tails, dtypes


@over_one_latent
@pytest.mark.parametrize("f", [-50.0, 50.0])
def test_tails_in_float32(make: Callable[[], Likelihood], data: list[float], f: float) -> None:
    """Finite values and gradients at f = +-50 for the conditional, its expectation and the marginal."""
    likelihood = make()
    y = torch.tensor(data)
    loc = torch.full_like(y, f).requires_grad_()
    var = torch.full_like(y, 2.0).requires_grad_()
    for value in (
        likelihood(loc).log_prob(y),
        likelihood.expected_log_prob(y, loc, var),
        likelihood.marginal(loc, var).log_prob(y),
    ):
        assert value.isfinite().all()
        assert value.dtype == torch.float32
        gradients = torch.autograd.grad(value.sum(), (loc, var, *likelihood.parameters()), allow_unused=True)
        assert all(g is None or g.isfinite().all() for g in gradients)


def test_heavy_tails_in_float32() -> None:
    """Half a degree of freedom: mixture components of noise variance beyond the range of float32."""
    likelihood = StudentT(0.5)
    log_prob = likelihood.marginal(torch.zeros(3), torch.ones(3)).log_prob(torch.tensor([0.0, 1e3, 1e6]))
    assert log_prob.isfinite().all()
    assert all(g.isfinite() for g in torch.autograd.grad(log_prob.sum(), list(likelihood.parameters())))


@pytest.mark.parametrize(
    ("likelihood", "y", "f", "exact"),
    [
        (Bernoulli(), 1.0, -50.0, -50.0),
        (Bernoulli("probit"), 1.0, -50.0, -1254.8313611394),
        (Bernoulli("probit"), 0.0, 50.0, -1254.8313611394),
        (Ordinal(torch.tensor([-1.0, 1.0])), 1.0, -50.0, -49 + math.log1p(-math.exp(-2))),
        (Ordinal(torch.tensor([-1.0, 1.0]), "probit"), 1.0, 50.0, -1205.3111748916656),
    ],
)
def test_tail_values(likelihood: Likelihood, y: float, f: float, exact: float) -> None:
    for dtype, rel in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        pyro.clear_param_store()
        assert likelihood(torch.tensor(f, dtype=dtype)).log_prob(torch.tensor(y)).item() == pytest.approx(
            exact, rel=rel
        )


@over_one_latent
def test_float32_agrees_with_float64(make: Callable[[], Likelihood], data: list[float]) -> None:
    likelihood = make()
    y = tensor(*data)
    loc, var = torch.randn_like(y), torch.rand_like(y)
    for method in (likelihood.expected_log_prob, lambda y, loc, var: likelihood.marginal(loc, var).log_prob(y)):
        torch.testing.assert_close(
            method(y.float(), loc.float(), var.float()).double(), method(y, loc, var), rtol=2e-5, atol=2e-5
        )


# ------------------------------------------------------------------------------------- user's own, Pyro effects


class Laplace(Likelihood):
    """A likelihood as a user writes it."""

    def __init__(self) -> None:
        super().__init__(num_quadrature=200)
        self.scale = PyroParam(torch.tensor(0.5), constraints.positive)
        self.shift = torch.nn.Parameter(torch.tensor(0.1))

    def forward(self, f: Tensor) -> dist.Laplace:
        return dist.Laplace(f + self.shift, self.scale)


class Product(Likelihood):
    """Two latent functions and only a conditional."""

    num_latents = 2

    def forward(self, f: Tensor) -> dist.Normal:
        return dist.Normal(f[0] * f[1], 1.0)


def test_a_conditional_is_all_that_a_user_writes() -> None:
    likelihood = Laplace()
    loc, var, y = tensor(0.3), tensor(0.5), tensor(1.0)
    assert likelihood.expected_log_prob(y, loc, var).item() == pytest.approx(
        dense_expected(likelihood, 1, 0.3, 0.5), rel=1e-2
    )
    marginal = likelihood.marginal(loc, var)
    assert marginal.log_prob(y).item() == pytest.approx(dense_marginal(likelihood, 1, 0.3, 0.5), abs=1e-2)
    assert marginal.mean.item() == pytest.approx(0.4)
    assert marginal.variance.item() == pytest.approx(0.5 + 2 * 0.5**2)
    likelihood.check(y)
    with pytest.raises(ValueError, match=r"Laplace: expected y to be finite, got 1 of 2 values such as nan"):
        likelihood.check(tensor(0.0, math.nan))


def test_a_likelihood_of_ones_own_trains_with_the_method() -> None:
    x = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
    for train in (
        lambda gp: fit(gp, 2, progress=False),
        lambda gp: SVI(gp.model, gp.guide, Adam({"lr": 0.1}), Trace_ELBO()).step(),
        lambda gp: SVI(gp.model, gp.guide, Adam({"lr": 0.1}), IntegratedELBO()).step(),
    ):
        gp = VNNGP(x, torch.sin(6 * x[:, 0]), RBF(1), Laplace(), num_neighbors=4)
        gp.solve()
        before = [p.detach().clone() for p in gp.likelihood.parameters()]
        train(gp)
        after = list(gp.likelihood.parameters())
        assert len(after) == 2
        assert all((old != new).all() for old, new in zip(before, after, strict=True))


def test_a_conditional_on_two_latents() -> None:
    likelihood = Product(num_quadrature=4096)
    loc, var, y = tensor(0.5, -1.0)[:, None], tensor(0.2, 0.3)[:, None], tensor(0.4)
    second_moment = (loc.square() + var).prod().item()
    want = -0.5 * math.log(2 * math.pi) - (0.4**2 - 2 * 0.4 * loc.prod().item() + second_moment) / 2
    assert likelihood.expected_log_prob(y, loc, var).item() == pytest.approx(want, rel=1e-3)
    marginal = likelihood.marginal(loc, var)
    assert marginal.mean.item() == pytest.approx(-0.5, rel=1e-9)
    assert marginal.variance.item() == pytest.approx(1 + second_moment - 0.25, rel=1e-2)
    ys = torch.linspace(-12, 12, 401, dtype=torch.float64)
    assert marginal.log_prob(ys).exp().sum().item() * 24 / 400 == pytest.approx(1.0, abs=1e-6)
    draws = marginal.sample((20_000,))
    assert draws.mean().item() == pytest.approx(-0.5, abs=6 * math.sqrt(marginal.variance.item() / 20_000))


def test_hyperparameters_are_parameters_or_priors() -> None:
    f = torch.randn(4)
    trace = poutine.trace(StudentT()).get_trace(f)
    assert trace.nodes["df"]["value"].item() == pytest.approx(4.0)
    assert trace.nodes["scale"]["value"].item() == 1.0
    for likelihood, name in ((Gaussian(), "variance"), (Gamma(), "concentration"), (NegativeBinomial(), "total_count")):
        pyro.clear_param_store()
        assert poutine.trace(likelihood).get_trace(f).nodes[name]["type"] == "param"
        setattr(likelihood, name, PyroSample(dist.LogNormal(0.0, 1.0)))
        assert poutine.trace(likelihood).get_trace(f).nodes[name]["type"] == "sample"
    assert Gaussian(PyroSample(dist.Exponential(1.0)))(f).scale.shape == (4,)
    ratings = Ordinal(CUTS)
    assert torch.equal(ratings.cutpoints.argsort(), torch.arange(3))
    ratings.cutpoints = PyroSample(
        dist.TransformedDistribution(dist.Normal(torch.zeros(3), 1.0).to_event(1), [dist.transforms.OrderedTransform()])
    )
    assert "cutpoints" in poutine.trace(ratings).get_trace(f).stochastic_nodes


@pytest.mark.parametrize("method", ["expected_log_prob", "marginal"])
def test_every_method_reads_the_prior_once(method: str) -> None:
    class Model(PyroModule):
        def __init__(self, likelihood: Likelihood) -> None:
            super().__init__()
            self.likelihood = likelihood

        def forward(self, *args: Tensor) -> Any:
            return getattr(self.likelihood, method)(*args)

    priors = {
        "variance": [Gaussian(), LogNormal()],
        "concentration": [Gamma()],
        "total_count": [NegativeBinomial()],
        "scale": [StudentT()],
    }
    y, loc, var = torch.ones(2), torch.zeros(2), torch.ones(2)
    args = (y, loc, var) if method == "expected_log_prob" else (loc, var)
    for name, likelihoods in priors.items():
        for likelihood in likelihoods:
            setattr(likelihood, name, PyroSample(dist.LogNormal(0.0, 1.0)))
            trace = poutine.trace(Model(likelihood)).get_trace(*args)
            assert trace.stochastic_nodes == [f"likelihood.{name}"]


def test_a_bound_copy_keeps_the_values_and_has_no_effects() -> None:
    likelihood = Laplace()
    likelihood.scale = PyroSample(dist.LogNormal(0.0, 1.0))
    with poutine.trace() as outer:
        bound = likelihood.bind()
    assert set(outer.trace.nodes) == {"scale", "shift"}
    drawn = outer.trace.nodes["scale"]["value"]
    loc, var, y = torch.zeros(3), torch.ones(3), torch.ones(3)
    pyro.clear_param_store()
    with poutine.trace() as outer:
        conditional = bound(loc)
        bound.expected_log_prob(y, loc, var)
        marginal = bound.marginal(loc, var)
        log_prob = marginal.log_prob(y)
    assert not outer.trace.nodes
    assert not pyro.get_param_store().keys()
    assert torch.equal(conditional.scale, drawn.expand(3))
    log_prob.sum().backward()
    assert likelihood.shift.grad is not None
    assert poutine.trace(likelihood).get_trace(loc).nodes["scale"]["value"] != drawn  # the original still draws


def test_marginals_are_pyro_distributions() -> None:
    likelihood = Poisson()
    marginal = likelihood.marginal(torch.zeros(3), torch.ones(3))
    wider = marginal.expand((2, 3))
    assert wider.batch_shape == (2, 3)
    assert wider.sample((4,)).shape == (4, 2, 3)
    torch.testing.assert_close(wider.log_prob(torch.ones(3))[1], marginal.log_prob(torch.ones(3)))
    with poutine.trace() as outer, pyro.plate("outputs", 2, dim=-2), pyro.plate("data", 3, dim=-1):
        pyro.sample("y", marginal)
    assert outer.trace.nodes["y"]["value"].shape == (2, 3)
    with pytest.raises(ValueError, match="within the support"):
        marginal.log_prob(torch.full((3,), 0.5))
    several = Marginal(Categorical(4), torch.zeros(4, 3), torch.ones(4, 3)).expand((2, 3))
    assert several.log_prob(several.sample((5,))).shape == (5, 2, 3)


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Gaussian(0.0), r"Gaussian: expected variance to be positive and finite, in floating point, got 0.0"),
        (lambda: StudentT(df=-1.0), r"StudentT: expected df to be positive"),
        (lambda: StudentT(scale=math.nan), r"StudentT: expected scale to be positive"),
        (lambda: LogNormal(torch.tensor(1)), r"LogNormal: expected variance .* in floating point, got 1"),
        (lambda: Gamma(math.inf), r"Gamma: expected concentration to be positive and finite"),
        (lambda: NegativeBinomial(0.0), r"NegativeBinomial: expected total_count to be positive"),
        (lambda: Binomial(0), r"Binomial: expected total_count >= 1, got 0"),
        (lambda: Categorical(1), r"Categorical: expected num_classes >= 2, got 1"),
        (
            lambda: Ordinal(torch.tensor([1.0, 0.0])),
            r"Ordinal: expected cutpoints .* increasing vector, got \[1.0, 0.0\]",
        ),
        (lambda: Ordinal(torch.zeros(1, 2)), r"Ordinal: expected cutpoints to be a strictly increasing vector"),
        (lambda: Ordinal(torch.zeros(0)), r"Ordinal: expected cutpoints to be a strictly increasing vector, got \[\]"),
        (lambda: Bernoulli("cloglog"), r"Bernoulli: expected link to be 'logit' or 'probit', got 'cloglog'"),
        (lambda: Poisson("identity"), r"Poisson: expected link to be 'exp' or 'softplus', got 'identity'"),
        (lambda: Ordinal(CUTS, "log"), r"Ordinal: expected link to be 'logit' or 'probit', got 'log'"),
        (lambda: Bernoulli(num_quadrature=0), r"Bernoulli: expected num_quadrature >= 2, got 0"),
    ],
)
def test_construction_errors(make: Callable[[], Likelihood], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Binomial(2.5), r"Binomial: expected total_count to be an int, got 2.5. Pass the number of trials"),
        (lambda: Categorical(2.5), r"Categorical: expected num_classes to be an int, got 2.5. Count the distinct"),
        (lambda: StudentT(num_quadrature=9.0), r"StudentT: expected num_quadrature to be an int, got 9.0"),
    ],
)
def test_counts_are_integers(make: Callable[[], Likelihood], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        make()


def test_unknown_keywords_and_the_abstract_base() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'noise'"):
        Gaussian(noise=1.0)  # type: ignore[call-arg]
    with pytest.raises(NotImplementedError, match="Likelihood: expected forward to be defined by the likelihood"):
        Likelihood()(torch.zeros(2))


@pytest.mark.parametrize(
    ("likelihood", "good", "bad", "match"),
    [
        (
            Gaussian(),
            [0.0, -3.5],
            [math.inf],
            r"Gaussian: expected y to be finite, got 1 of 3 values such as inf\. Drop",
        ),
        (StudentT(), [0.0], [math.nan], r"StudentT: expected y to be finite, got 1 of 2 values such as nan"),
        (HeteroskedasticGaussian(), [1.0], [math.nan], r"HeteroskedasticGaussian: expected y to be finite"),
        (LogNormal(), [0.1], [0.0, -1.0], r"LogNormal: expected y to be positive, got 2 of 3 values such as 0.0, -1.0"),
        (Gamma(), [0.1], [0.0], r"Gamma: expected y to be positive, got 1 of 2"),
        (Bernoulli(), [0.0, 1.0], [-1.0], r"Bernoulli: .* labels 0 and 1, got 1 of 3 values such as -1.0\. Map labels"),
        (Binomial(3), [0.0, 3.0], [4.0, 0.5], r"Binomial: expected y to be counts in 0..3, got 2 of 4 .* 4.0, 0.5"),
        (Poisson(), [0.0, 9.0], [-1.0, 2.5], r"Poisson: expected y to be counts 0, 1, 2, .., got 2 of 4 .* -1.0, 2.5"),
        (NegativeBinomial(), [0.0], [math.inf], r"NegativeBinomial: expected y to be counts 0, 1, 2, .., got 1 of 2"),
        (
            Categorical(3),
            [0.0, 2.0],
            [3.0],
            r"Categorical: expected y to be labels in 0..2, got 1 of 3 .* 3.0\. Renumber",
        ),
        (Ordinal(CUTS), [0.0, 3.0], [4.0], r"Ordinal: expected y to be ratings in 0..3, got 1 of 3 values such as 4.0"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Likelihood) else "",
)
def test_data_outside_the_support(likelihood: Likelihood, good: list[float], bad: list[float], match: str) -> None:
    likelihood.check(tensor(*good))
    with pytest.raises(ValueError, match=match):
        likelihood.check(tensor(*good, *bad))
    with pytest.raises(TypeError, match=rf"{type(likelihood).__name__}: expected y to be a torch.Tensor, got list"):
        likelihood.check(good)  # type: ignore[arg-type]


def test_integer_data_pass() -> None:
    for likelihood in (Bernoulli(), Binomial(2), Poisson(), NegativeBinomial(), Categorical(2), Ordinal(CUTS)):
        likelihood.check(torch.tensor([[0, 1], [1, 0]]))


def test_integer_targets_are_numbers_to_a_gaussian() -> None:
    x, y = torch.rand(30, 2), torch.arange(30)
    fits = [SVGP(x, targets, RBF(2), Gaussian(0.3), inducing=5) for targets in (y, y.float())]
    for gp in fits:
        gp.solve()
    torch.testing.assert_close(fits[0](x[:4]), fits[1](x[:4]))
