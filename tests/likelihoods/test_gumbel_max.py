"""Integrals of the softmax against product rules in float64, their gradients, and how many nodes they take."""

import math

import pytest
import torch
from torch import Tensor

from pyro_nngp.likelihoods import Categorical
from pyro_nngp.likelihoods.gumbel_max import expected_logsumexp, gauss_gumbel, softmax_log_probs

F64 = torch.float64


def three_classes(loc: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """E log sum exp f and E softmax(f) for C = 3, by the trapezoidal rule over the two differences of f."""
    t = torch.linspace(-8, 8, 801, dtype=F64)
    weights = torch.softmax(-t.square() / 2, 0)
    weights = (weights[:, None] * weights).reshape(-1)
    t = torch.stack(torch.meshgrid(t, t, indexing="ij")).reshape(2, -1)
    values, probs = [], []
    for m, v in zip(loc.mT, var.mT, strict=True):
        tril = torch.linalg.cholesky(torch.diag(v[1:]) + v[0])
        f = torch.cat([torch.zeros_like(t[:1]), (m[1:] - m[0])[:, None] + tril @ t])
        values.append(m[0] + weights @ f.logsumexp(0))
        probs.append(f.softmax(0) @ weights)
    return torch.stack(values), torch.stack(probs, -1)


@pytest.mark.parametrize("sd", [[0.05] * 3, [0.7] * 3, [1.19, 1.21, 1.2], [3.0] * 3, [28.0] * 3, [0.3, 1.0, 25.0]])
def test_three_classes_against_a_product_rule(sd: list[float]) -> None:
    scale = torch.tensor(sd, dtype=F64)[:, None]
    loc, var = torch.randn(3, 4, dtype=F64) * scale.clamp(min=1), (scale.square()).expand(3, 4)
    value, probs = three_classes(loc, var)
    torch.testing.assert_close(expected_logsumexp(loc, var), value, rtol=0.0, atol=2e-4)
    torch.testing.assert_close(softmax_log_probs(loc, var).exp(), probs, rtol=0.0, atol=1e-4)
    gradient = torch.func.grad(lambda m: expected_logsumexp(m, var).sum())(loc)
    torch.testing.assert_close(gradient, probs, rtol=0.0, atol=5e-4)


@pytest.mark.parametrize("num_classes", [2, 10, 50])
def test_classes_of_unlike_variances_have_converged_at_the_default_number_of_nodes(num_classes: int) -> None:
    loc = 3 * torch.randn(num_classes, 20, dtype=F64)
    var = torch.exp(2 * torch.randn_like(loc))
    fine = expected_logsumexp(loc, var, 400, 24)
    torch.testing.assert_close(expected_logsumexp(loc, var), fine, rtol=0.0, atol=1e-3)
    more = softmax_log_probs(loc, var, 400, 24)
    error = (softmax_log_probs(loc, var) - more)[more > math.log(1e-4)]
    assert error.abs().max() < 1e-2


@pytest.mark.parametrize("scale", [0.4, 4.0], ids=["narrow", "wide"])
def test_gradients_are_those_of_the_integral(scale: float) -> None:
    loc = (scale * torch.randn(3, 2, dtype=F64)).requires_grad_()
    var = (scale**2 * (0.5 + torch.rand(3, 2, dtype=F64))).requires_grad_()

    def value(m: Tensor, v: Tensor) -> Tensor:
        return expected_logsumexp(m, v, 100, 20)

    assert torch.autograd.gradcheck(value, (loc, var), atol=1e-6)
    assert torch.autograd.gradgradcheck(value, (loc, var), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_extreme_moments_stay_finite(dtype: torch.dtype) -> None:
    loc = torch.tensor([[-300.0, 0.0, 1e3, 0.0], [300.0, 0.0, -1e3, 0.0], [0.0, 0.0, 2.0, 0.0]], dtype=dtype)
    var = torch.tensor([1e-8, 1e4, 1.0, 1e-3], dtype=dtype).expand(3, 4)
    loc, var = loc.requires_grad_(), var.clone().requires_grad_()
    value = Categorical(3).expected_log_prob(torch.zeros(4), loc, var)
    gradients = torch.autograd.grad(value.sum(), (loc, var))
    log_probs = Categorical(3).marginal(loc, var).log_prob(torch.ones(4))
    for found in (value, *gradients, log_probs):
        assert found.isfinite().all()
    assert value[0].item() == pytest.approx(-600, rel=1e-4)
    assert (gradients[1] <= 1e-5).all()  # concave in f, but for rounding
    torch.testing.assert_close(gradients[0].sum(0), torch.zeros(4, dtype=dtype), rtol=0, atol=1e-4)


def test_vmap_is_a_batch() -> None:
    loc, var = torch.randn(3, 6, dtype=F64), torch.logspace(-2, 2, 18, dtype=F64).reshape(3, 6)
    for compute in (expected_logsumexp, lambda m, v: softmax_log_probs(m, v)[0]):
        torch.testing.assert_close(torch.func.vmap(compute, in_dims=1)(loc, var), compute(loc, var))


def test_gauss_rule_of_the_gumbel_density() -> None:
    nodes, weights = gauss_gumbel(8, F64, torch.device("cpu"))
    euler = 0.5772156649015329
    assert weights.sum().item() == pytest.approx(1, abs=1e-9)
    assert (weights @ nodes).item() == pytest.approx(euler, abs=1e-6)
    assert (weights @ (nodes - euler).square()).item() == pytest.approx(math.pi**2 / 6, abs=1e-5)
