"""Nodes of quadrature; adaptive quadrature against 8,001 points, at scales of 1e-3 to 1e3 standard deviations of f."""

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import tensor
from torch import Tensor

from pyro_nngp.likelihoods import (
    Bernoulli,
    Binomial,
    Categorical,
    Gamma,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from pyro_nngp.likelihoods.base import Marginal
from pyro_nngp.likelihoods.quadrature import gauss_hermite, log_expectation, normal_nodes

F64 = torch.float64
SCALES = [10.0**power for power in range(-3, 4)]
ENDS = [pytest.param(s, marks=() if s in (SCALES[0], 1.0, SCALES[-1]) else pytest.mark.slow) for s in SCALES]
PLACES = [(0.0, 0.3), (0.5, 2.0), (-1.3, 0.7), (2.0, -1.0), (0.2, 3.0)]  # mean of f and y, in standard deviations


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
    binary, classes = Bernoulli(), Categorical(3)
    binary.num_quadrature, classes.num_quadrature = 19, 18
    binary.expected_log_prob(tensor(1.0), loc, tensor(1.0)).sum().backward()
    classes.expected_log_prob(torch.tensor([1]), loc.expand(3, 1), torch.ones(3, 1).double()).sum().backward()
    assert loc.grad.abs() > 0.1


@pytest.mark.parametrize("slope", [0.0, 3.0, -60.0])
@pytest.mark.parametrize("curvature", [0.0, 1.0, 1e3, 1e6])
def test_log_expectation_of_gaussian_factors(slope: float, curvature: float) -> None:
    r"""log E exp(a t - c t^2 / 2) = a^2 / (2 (1 + c)) - log(1 + c) / 2, however narrow the peak or far off."""

    def log_function(t: Tensor) -> Tensor:
        return slope * t - curvature * t.square() / 2

    value = log_expectation(log_function, *tensor(0.0, 1.0))
    exact = slope**2 / (2 * (1 + curvature)) - math.log1p(curvature) / 2
    assert value.item() == pytest.approx(exact, abs=1e-9)


class Laplace(Likelihood):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(scale, dtype=F64))

    def forward(self, f: Tensor) -> dist.Laplace:
        return dist.Laplace(f, self.scale.to(f.dtype))


class Cauchy(Laplace):
    def forward(self, f: Tensor) -> dist.Cauchy:
        return dist.Cauchy(f, self.scale.to(f.dtype))


def fine_grid(center: float) -> tuple[Tensor, Tensor]:
    """Standard normal nodes and weights, by the sinh rule around a center."""
    u = torch.linspace(-math.asinh(2.4e8), math.asinh(2.4e8), 8_001, dtype=F64)
    t, step = center + 1e-7 * u.sinh(), 1e-7 * u.cosh() * (u[1] - u[0])
    keep = t.abs() < 12
    return t[keep], (step * (-t.square() / 2).exp() / math.sqrt(2 * math.pi))[keep]


def errors(likelihood: Likelihood, y: float, loc: float, sd: float, center: float, dtype: torch.dtype) -> list[float]:
    """Relative errors of the value and of its gradients in loc, var and the hyperparameters.

    Gradients in loc and var, which may vanish by symmetry, are relative to the integral of the absolute integrand.
    """

    def run(kind: torch.dtype, expected: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[float]:
        leaves = [torch.tensor(v, dtype=kind, requires_grad=True) for v in (loc, sd**2)]
        value = expected(torch.tensor(y, dtype=kind), *leaves)
        return [float(v.detach()) for v in (value, *torch.autograd.grad(value, [*leaves, *likelihood.parameters()]))]

    t, weights = fine_grid(max(-4.5, min(4.5, center)))
    want = run(F64, lambda y, m, v: (weights * likelihood.forward(m + v.sqrt() * t).log_prob(y)).sum())
    got = run(dtype, likelihood.expected_log_prob)
    f = (loc + sd * t).requires_grad_()
    slope = torch.autograd.grad(likelihood.forward(f).log_prob(torch.tensor(y, dtype=F64)).sum(), f)[0].abs()
    sizes = [abs(want[0]), (weights * slope).sum(), (weights * slope * t.abs()).sum() / (2 * sd), *map(abs, want[3:])]
    return [abs(a - b) / float(size) for a, b, size in zip(got, want, sizes, strict=True)]


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("make", [Laplace, Cauchy, lambda s: StudentT(4.0, s)], ids=["Laplace", "Cauchy", "StudentT"])
def test_expectations_at_any_scale_of_the_noise(make: Callable, scale: float, dtype: torch.dtype) -> None:
    for loc, y in PLACES:
        value, *gradients = errors(make(scale), y, loc, 1.0, y - loc, dtype)
        assert value < 1e-4
        assert max(gradients[:2]) < (3e-4 if dtype == F64 else 1e-2)  # those of a kink jump from node to node
        assert max(gradients[2:]) < 1e-3


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("make", "y"),
    [
        (Bernoulli, 1.0),
        (lambda: Bernoulli("probit"), 0.0),
        (lambda: Binomial(7), 3.0),
        (lambda: Ordinal(torch.tensor([-1.0, 0.2, 1.5])), 1.0),
        (lambda: Ordinal(torch.tensor([-1.0, 0.2, 1.5]), "probit"), 3.0),
        (lambda: Poisson("softplus"), 0.0),
    ],
    ids=["logit", "probit", "Binomial", "Ordinal-logit", "Ordinal-probit", "softplus"],
)
def test_expectations_at_any_variance_of_the_latent(make: Callable, y: float, scale: float) -> None:
    likelihood, sd = make(), 1 / scale
    for parameter in likelihood.parameters():
        parameter.requires_grad_(False)
    for loc, _ in PLACES:
        t, weights = fine_grid(max(-4.5, min(4.5, -loc)))
        want = (weights * likelihood.forward(loc * sd + sd * t).log_prob(torch.tensor(y, dtype=F64))).sum()
        for dtype in (F64, torch.float32):
            leaves = (torch.tensor(v, dtype=dtype) for v in (y, loc * sd, sd**2))
            assert float(likelihood.expected_log_prob(*leaves)) == pytest.approx(float(want.detach()), rel=1e-4), dtype


def test_the_example_that_twenty_fixed_nodes_missed() -> None:
    value = StudentT(4.0, 0.05).expected_log_prob(*tensor(0.3, 0.0, 1.0))
    assert value.item() == pytest.approx(-7.121, abs=1e-3)


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [(Laplace(0.02), 0.03), (Bernoulli(), 1.0), (Gamma(2.5), 0.4), (Poisson(), 0.0), (Poisson("softplus"), 2.0)],
    ids=["Laplace", "logit", "Gamma", "Poisson", "softplus"],
)
@pytest.mark.parametrize("sd", [0.01, 1.0, 30.0])
def test_marginals_at_any_variance_of_the_latent(likelihood: Likelihood, y: float, sd: float) -> None:
    center = (y if isinstance(likelihood, Laplace) else 0.0) / sd - 0.5
    t, weights = fine_grid(max(-11.0, min(11.0, center)))
    want = (weights.log() + likelihood.forward(sd * (0.5 + t)).log_prob(torch.tensor(y, dtype=F64))).logsumexp(0)
    for dtype in (F64, torch.float32):
        loc, var = torch.tensor(0.5 * sd, dtype=dtype), torch.tensor(sd**2, dtype=dtype)
        got = likelihood.marginal(loc, var).log_prob(torch.tensor(y, dtype=dtype))
        assert float(got.detach()) == pytest.approx(
            float(want.detach()), abs=1e-4 * max(1.0, abs(float(want.detach())))
        )


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("make", "y"),
    [
        (lambda s: Laplace(s), None),
        (lambda s: Cauchy(s), None),
        (lambda s: Bernoulli(), 1.0),
        (lambda s: Poisson(), 3.0),
        (lambda s: Poisson("softplus"), 0.0),
        (lambda s: Gamma(2.5), 0.4),
        (lambda s: NegativeBinomial(2.0), 4.0),
    ],
    ids=["Laplace", "Cauchy", "logit", "Poisson", "softplus", "Gamma", "NegativeBinomial"],
)
@pytest.mark.parametrize("scale", ENDS)
def test_gradients_of_marginals_at_any_scale(make: Callable, y: float | None, scale: float, dtype: torch.dtype) -> None:
    """Against dense integration with the gradient of the normal density: E[t] / sd and E[t^2 - 1] / (2 var)."""
    likelihood = make(scale)
    sd = 1.0 if y is None else 1 / scale
    for place, target in PLACES:
        loc, data = (place, target) if y is None else (place * sd, y)
        center = target - place if y is None else -place
        t, weights = fine_grid(max(-11.0, min(11.0, center)))
        log_mass = weights.log() + likelihood.forward(loc + sd * t).log_prob(torch.tensor(data, dtype=F64)).detach()
        mass = log_mass.softmax(0)
        want = torch.stack([(mass * t).sum() / sd, (mass * (t.square() - 1)).sum() / (2 * sd**2)])
        leaves = [torch.tensor(v, dtype=dtype, requires_grad=True) for v in (loc, sd**2)]
        value = likelihood.marginal(*leaves).log_prob(torch.tensor(data, dtype=dtype))
        got = torch.stack(torch.autograd.grad(value, leaves)).double()
        size = torch.stack([(mass * t.abs()).sum() / sd, (mass * (t.square() + 1)).sum() / (2 * sd**2)])
        torch.testing.assert_close(got / size, want / size, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize(
    "make", [Bernoulli, lambda: Laplace(1.0), lambda: Cauchy(0.7)], ids=["logit", "Laplace", "Cauchy"]
)
def test_a_value_does_not_depend_on_the_rest_of_its_batch(make: Callable) -> None:
    """Some elements are smooth, others are not: each gets the rule and the gradient that it has alone."""
    likelihood = make()
    y, loc = tensor(1.0, 0.0, 1.0), tensor(0.3, -1.0, 0.5)
    for compute in (likelihood.expected_log_prob, lambda y, loc, var: likelihood.marginal(loc, var).log_prob(y)):
        var = torch.tensor([0.01, 1.0, 1e4], dtype=F64, requires_grad=True)
        together = compute(y, loc, var)
        apart = torch.cat([compute(y[i : i + 1], loc[i : i + 1], var[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(together, apart, rtol=1e-12, atol=0.0)
        gradients = [torch.autograd.grad(v.sum(), var)[0] for v in (together, apart)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


class CountingBernoulli(Bernoulli):
    evaluations = 0

    def forward(self, f: Tensor) -> dist.Bernoulli:
        self.evaluations += len(f)
        return super().forward(f)


class CountingUser(CountingBernoulli):
    def focus(self, y: Tensor) -> None:
        return None


@pytest.mark.parametrize("kind", [CountingBernoulli, CountingUser])
def test_smooth_integrands_cost_24_evaluations(kind: type[CountingBernoulli]) -> None:
    likelihood, loc = kind(), torch.randn(50)
    likelihood.expected_log_prob(torch.ones(50), loc, torch.full((50,), 1.0))
    assert likelihood.evaluations == 24


@pytest.mark.parametrize("make", [Bernoulli, lambda: Laplace(0.5)], ids=["logit", "Laplace"])
def test_expectations_under_vmap_are_those_of_a_batch(make: Callable) -> None:
    likelihood, y = make().bind(), torch.ones(6, dtype=F64)
    loc, var = torch.randn(6, dtype=F64), torch.logspace(-3, 3, 6, dtype=F64)
    for compute in (likelihood.expected_log_prob, lambda y, m, v: likelihood.marginal(m, v).log_prob(y)):
        with pyro.validation_enabled(False):  # torch 2.6 cannot check arguments under vmap
            found = torch.func.vmap(compute)(y, loc, var)
        torch.testing.assert_close(found, compute(y, loc, var), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("var", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("num_classes", [2, 3, 12])
def test_categorical_marginal_of_a_rare_class(num_classes: int, var: float) -> None:
    """Against draws of the other latents, with that of the rare class integrated out, within six standard errors."""
    loc = torch.randn(num_classes, dtype=F64)
    loc[0] = -6.0
    others = (loc[1:] + math.sqrt(var) * torch.randn(4_000, num_classes - 1, dtype=F64)).logsumexp(1)
    t = torch.linspace(-9, 9, 201, dtype=F64)
    odds = loc[0] + math.sqrt(var) * t[:, None] - others
    density = torch.softmax(-t.square() / 2, 0) @ odds.sigmoid()
    got = Categorical(num_classes).marginal(loc[:, None], torch.full_like(loc, var)[:, None]).probs[0, 0]
    assert abs(float(got) - float(density.mean())) < 6 * float(density.std()) / math.sqrt(len(density))


def test_categorical_marginal_of_two_classes_is_the_logistic_one() -> None:
    loc, var = torch.tensor([[-7.0, 0.0], [1.0, 3.0]], dtype=F64), torch.tensor([[10.0, 4.0], [0.1, 6.0]], dtype=F64)
    two = Categorical(2).marginal(loc, var).logits.diff(dim=-1)[:, 0]
    one = Bernoulli().marginal(loc[1] - loc[0], var.sum(0)).logits
    torch.testing.assert_close(two, one, rtol=0.0, atol=1e-2)


def test_logits_of_the_logistic_marginal_are_odd_in_the_mean() -> None:
    loc, var = (
        tensor(-40.0, -3.0, 0.0, 0.5, 20.0),
        torch.tensor([9.0, 0.01, 4.0, 1.0, 100.0]).double(),
    )
    logits, mirrored = Bernoulli().marginal(loc, var).logits, Bernoulli().marginal(-loc, var).logits
    torch.testing.assert_close(logits, -mirrored, rtol=1e-10, atol=1e-12)
    both = Marginal(Bernoulli().bind(), loc[:, None], var[:, None]).log_prob(tensor(0.0, 1.0))
    torch.testing.assert_close(logits, both.diff(dim=-1)[:, 0], rtol=1e-3, atol=1e-4)
