"""Likelihoods: expectations and marginals against dense integration, float32 tails, Pyro effects, every error."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import scalar, tensor
from oracles.likelihoods import dense_expected, dense_marginal, grid
from pyro import poutine
from torch import Tensor

from pyro_nngp.likelihoods import (
    AsymmetricLaplace,
    Bernoulli,
    Beta,
    BetaBinomial,
    Binomial,
    Categorical,
    Censored,
    Gamma,
    Gaussian,
    GeneralizedPareto,
    HeteroskedasticGaussian,
    Hurdle,
    IntervalCensored,
    InverseGaussian,
    Likelihood,
    LogNormal,
    Marginal,
    NegativeBinomial,
    Occupancy,
    Ordinal,
    Poisson,
    StudentT,
    Tweedie,
    ZeroInflated,
    ZeroTruncated,
)

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
    ("Beta", lambda: Beta(4.0), [0.02, 0.4, 0.99]),
    ("BetaBinomial", lambda: BetaBinomial(7, 3.0), [0.0, 3.0, 7.0]),
    ("InverseGaussian", lambda: InverseGaussian(2.0), [0.1, 1.0, 7.0]),
    ("Tweedie", lambda: Tweedie(0.8, 1.4), [0.0, 0.3, 7.0]),
    ("GeneralizedPareto", lambda: GeneralizedPareto(0.3), [0.1, 1.0, 7.0]),
    ("AsymmetricLaplace", lambda: AsymmetricLaplace(0.8, 0.4), [-1.0, 0.4, 2.0]),
    ("ZeroInflated-Poisson", lambda: ZeroInflated(Poisson(), 0.3), [0.0, 2.0, 30.0]),
    ("ZeroInflated-NB", lambda: ZeroInflated(NegativeBinomial(1.7), 0.05), [0.0, 2.0, 30.0]),
    ("Occupancy", lambda: Occupancy(5, 0.3), [0.0, 1.0, 5.0]),
    ("ZeroTruncated", lambda: ZeroTruncated(Poisson()), [1.0, 2.0, 30.0]),
    ("Hurdle", lambda: Hurdle(NegativeBinomial(1.7), 0.4), [0.0, 1.0, 30.0]),
    ("Censored", lambda: Censored(Gaussian(0.3), -0.5, 2.0), [-0.5, 0.4, 2.0]),
    ("Censored-LogNormal", lambda: Censored(LogNormal(0.3), 0.2), [0.2, 0.4, 7.0]),
    ("IntervalCensored", lambda: IntervalCensored(Gaussian(0.3), CUTS), [0.0, 1.0, 3.0]),
    ("Ordinal-logit", lambda: Ordinal(CUTS), [0.0, 1.0, 3.0]),
    ("Ordinal-probit", lambda: Ordinal(CUTS, "probit"), [0.0, 1.0, 3.0]),
]


over_one_latent = pytest.mark.parametrize(("make", "data"), [c[1:] for c in ONE_LATENT], ids=[c[0] for c in ONE_LATENT])


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
    [
        (Gaussian(0.3), 0.7),
        (LogNormal(0.2), 3.0),
        (Poisson(), 4.0),
        (Gamma(2.5), 3.0),
        (Gamma(0.3), 1e-3),
        (InverseGaussian(2.0).double(), 0.7),
        (Tweedie(0.8, 1.4).double(), 0.0),
        (Tweedie(0.8, 1.6).double(), 3.0),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Likelihood) else str(v),
)
def test_closed_forms_equal_quadrature(likelihood: Likelihood, y: float) -> None:
    likelihood.num_quadrature = 100
    loc, var = torch.meshgrid(tensor(-1.5, 0.0, 2.0), tensor(1e-4, 0.3, 2.0), indexing="ij")
    closed = likelihood.expected_log_prob(scalar(y), loc, var)
    numerical = Likelihood.expected_log_prob(likelihood, scalar(y), loc, var)
    rtol, atol = (1e-6, 1e-7) if isinstance(likelihood, InverseGaussian | Tweedie) else (1e-9, 1e-9)
    torch.testing.assert_close(closed, numerical, rtol=rtol, atol=atol)


@over_one_latent
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_off_an_expectation_is_below_the_largest_density(
    make: Callable[[], Likelihood], data: list[float], dtype: torch.dtype
) -> None:
    """Where exponents are clamped a bound must not rise without end."""
    likelihood, grid = make().double(), torch.linspace(-30, 30, 6001, dtype=torch.float64)[:, None]
    y = torch.tensor(data, dtype=torch.float64)
    largest = likelihood.forward(grid).log_prob(y).max(0).values
    loc, var = torch.meshgrid(tensor(-300, -65, 0, 65, 300), tensor(0.1, 40, 200), indexing="ij")
    found = likelihood.to(dtype).expected_log_prob(y.to(dtype), *(part[..., None].to(dtype) for part in (loc, var)))
    assert not found.isnan().any()
    assert (found <= largest + 1e-3 * largest.abs() + 1e-3).all()


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
        values = {n: likelihood_transform(likelihood, n)(v) for n, v in zip(names, leaves, strict=True)}
        with poutine.substitute(data=values):
            return likelihood.expected_log_prob(y, loc, log_var.exp())

    loc, log_var = torch.randn(2, len(y), dtype=torch.float64).requires_grad_().unbind()
    assert torch.autograd.gradcheck(expected, (loc, log_var, *leaves))


def likelihood_transform(likelihood: Likelihood, name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return torch.distributions.transform_to(likelihood.get_submodule(module)._pyro_params[attribute][0])


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
    [
        Gaussian(0.3),
        LogNormal(0.2),
        Bernoulli("probit"),
        Ordinal(CUTS, "probit"),
        Censored(Gaussian(0.3), 0.2, 1.5),
        Censored(Gaussian(0.3), lower=0.2),
        Censored(LogNormal(0.3), 0.2, 1.5),
        Censored(LogNormal(0.3), upper=1.5),
        IntervalCensored(Gaussian(0.3), CUTS),
        IntervalCensored(LogNormal(0.3), CUTS + 1.5),
    ],
    ids=lambda v: type(v).__name__,
)
def test_closed_marginals_equal_the_numerical_one(likelihood: Likelihood) -> None:
    loc, var = tensor(-1.0, 0.0, 2.0), tensor(0.2, 1.0, 4.0)
    y = likelihood.marginal(loc, var).sample((20,)).double()
    numerical = Marginal(likelihood.bind(), loc, var)
    torch.testing.assert_close(likelihood.marginal(loc, var).log_prob(y), numerical.log_prob(y), rtol=1e-7, atol=1e-8)


@over_one_latent
def test_gradients_of_marginals_against_dense_integration(make: Callable[[], Likelihood], data: list[float]) -> None:
    likelihood = make().double()
    y = scalar(data[-1])
    t, log_weights = grid(0.0, 1.0, num=1_000_001 if isinstance(likelihood, AsymmetricLaplace) else 20_001)  # a kink

    def gradients(log_prob: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        loc, var = scalar(0.4).requires_grad_(), scalar(0.7).requires_grad_()
        return list(torch.autograd.grad(log_prob(loc, var), [loc, var, *likelihood.parameters()]))

    dense = gradients(lambda m, v: (log_weights + likelihood(m + v.sqrt() * t).log_prob(y)).logsumexp(0))
    got = gradients(lambda m, v: likelihood.marginal(m, v).log_prob(y))
    for g, want in zip(got, dense, strict=True):
        torch.testing.assert_close(g, want, rtol=5e-5, atol=1e-6)


@over_one_latent
def test_draws_follow_the_log_density(make: Callable[[], Likelihood], data: list[float]) -> None:
    """Probabilities of four bins, by counting draws and by integrating the density, within six standard errors."""
    likelihood = make()
    marginal = likelihood.marginal(tensor(0.3), tensor(0.8))
    draws = marginal.sample((5_000,)).double()[:, 0]
    if marginal.support is not None and marginal.support.is_discrete:
        y = torch.arange(1.0 + float(draws.max()), dtype=torch.float64)
        y = y[marginal.support.check(y)]
        mass = marginal.log_prob(y).exp()
    else:
        atoms = draws[: len(draws) // 2].unique(return_counts=True)
        atoms = atoms[0][atoms[1] > 1]  # values that are drawn again: zeros, limits
        y = torch.linspace(-20, 60, 4_001, dtype=torch.float64)
        if isinstance(likelihood, Beta):
            y = torch.linspace(0, 1, 4_001, dtype=torch.float64)
        width = y[1] - y[0]
        y = y + width / 2  # no atom, no end of the support
        y = y[marginal.support.check(y)]
        mass = marginal.log_prob(y).exp() * width
        if len(atoms):
            y, mass = torch.cat([atoms, y]), torch.cat([marginal.log_prob(atoms).exp(), mass])
    for cut in draws.quantile(tensor(0.1, 0.4, 0.7, 0.95)):
        p = mass[y <= cut].sum().clamp(max=1).item()
        assert abs((draws <= cut).double().mean().item() - p) < 6 * math.sqrt(p * (1 - p) / len(draws)) + 3e-4


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
    many = NegativeBinomial(torch.tensor(r, dtype=torch.float64)).expected_log_prob(count, loc, var)
    torch.testing.assert_close(many, poisson, rtol=1e-4, atol=1e-4)
    narrow = StudentT(scalar(1e7), scalar(0.5)).marginal(loc, var).log_prob(y)
    torch.testing.assert_close(narrow, Gaussian(scalar(0.25)).marginal(loc, var).log_prob(y), rtol=1e-6, atol=1e-6)


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


@over_one_latent
def test_float32_agrees_with_float64(make: Callable[[], Likelihood], data: list[float]) -> None:
    likelihood = make()
    y = tensor(*data)
    loc, var = torch.randn_like(y), torch.rand_like(y)
    for method in (likelihood.expected_log_prob, lambda y, loc, var: likelihood.marginal(loc, var).log_prob(y)):
        torch.testing.assert_close(
            method(y.float(), loc.float(), var.float()).double(), method(y, loc, var), rtol=2e-5, atol=2e-5
        )


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
        (lambda: HeteroskedasticGaussian(0), r"HeteroskedasticGaussian: expected num_quadrature >= 2, got 0"),
    ],
)
def test_construction_errors(make: Callable[[], Likelihood], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


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
        (Bernoulli(), [0.0, 1.0], [-1.0], r"Bernoulli: .* labels 0 and 1, got 1 of 3 values such as -1.0\. Map two"),
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
