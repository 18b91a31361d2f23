"""The K x K systems of any covariance function against dense algebra, in values and gradients."""

import pytest
import torch
from builders import tensor

from pyro_nngp._memory import block_limit
from pyro_nngp.conditionals.general_kernel import (
    Conditional,
    block_conditional,
    chunks,
    each_member,
    solve,
    solve_gradient,
    variance_left,
)
from pyro_nngp.kernels import RBF, Linear, Matern32, bind

F64 = torch.float64
JITTER = 1e-3


def generator():
    return torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, dtype=F64, generator=generator())


def systems(b=6, k=5):
    """Covariances (K_nn, k_n, k_xx) of b targets, noise and a mask, with one target that has no neighbor."""
    full = draw(b, k + 1, k + 3)
    full = full @ full.mT
    mask = torch.rand(b, k, generator=generator()) > 0.3
    mask[0] = False
    noise = torch.rand(b, k, dtype=F64, generator=generator())
    return full[:, :k, :k].contiguous(), full[:, :k, k].contiguous(), full[:, k, k].contiguous(), noise, mask


def dense(cov_nn, cov_nx, cov_xx, noise, mask):
    """One target at a time by plain linear algebra, differentiable by autograd; masked neighbors are left out."""
    weights, variances = torch.zeros_like(cov_nx), []
    for b, keep in enumerate(mask):
        near = cov_nn[b][keep][:, keep]
        near = near + torch.diag(noise[b][keep] + JITTER * near.diagonal())
        w = torch.linalg.inv(near) @ cov_nx[b][keep]
        weights = weights.index_put((torch.tensor(b), keep.nonzero()[:, 0]), w)
        variances.append(cov_xx[b] * (1 + JITTER) - cov_nx[b][keep] @ w)
    return weights, torch.stack(variances)


def test_weights_variances_and_factors_are_those_of_dense_algebra():
    *covs, noise, mask = systems()
    w, var, tril, extra, inside = solve(covs[0].clone(), *covs[1:], noise, mask, JITTER)
    torch.testing.assert_close((w, var), dense(*covs, noise, mask), rtol=1e-9, atol=1e-12)
    assert extra is None
    assert inside.all()
    both = mask[:, :, None] & mask[:, None, :]
    want = torch.where(both, covs[0], 0.0)
    diagonal = covs[0].diagonal(dim1=-2, dim2=-1)
    want.diagonal(dim1=-2, dim2=-1).copy_(diagonal + mask * (diagonal * JITTER + noise))
    torch.testing.assert_close(tril @ tril.mT, want, rtol=1e-12, atol=1e-12)


def test_gradients_of_the_covariances_are_those_of_dense_algebra():
    *covs, noise, mask = systems()
    grad_w, grad_var = draw(6, 5), draw(6)
    inputs = [each.clone().requires_grad_() for each in (*covs, noise)]
    got = Conditional.apply(*inputs, mask, JITTER)[:2]
    want = dense(*inputs, mask)
    got_grad = torch.autograd.grad(got, inputs, (grad_w, grad_var))
    want_grad = torch.autograd.grad(want, inputs, (grad_w, grad_var))
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-8, atol=1e-10)


def test_first_and_second_derivatives_agree_with_differences():
    *covs, noise, mask = systems(b=2, k=3)
    half = [each.clone().requires_grad_() for each in (covs[1], covs[2], noise)]

    def function(cov_nx, cov_xx, noise):
        return Conditional.apply(covs[0], cov_nx, cov_xx, noise, mask, JITTER)[:2]

    torch.autograd.gradcheck(function, half)
    torch.autograd.gradgradcheck(function, half)


@pytest.mark.filterwarnings("ignore:.*of the covariances were indefinite")
def test_second_derivatives_keep_a_nugget_that_was_found():
    """One covariance is indefinite until its nugget reaches 1e-4, the other is not."""
    eye = torch.eye(3, dtype=F64)
    cov_nn = torch.stack([1 - 2e-5 * eye, 2 * eye])
    cov_nx, cov_xx = 1e-3 * draw(2, 3), torch.ones(2, dtype=F64)
    extra = solve(cov_nn.clone(), cov_nx, cov_xx, None, None, 1e-8)[3]
    assert extra[0] > 0 == extra[1]

    def function(cov_nx, cov_xx):
        return Conditional.apply(cov_nn, cov_nx, cov_xx, None, None, 1e-8)[:2]

    inputs = [cov_nx.requires_grad_(), cov_xx.requires_grad_()]
    torch.autograd.gradgradcheck(function, inputs)
    once, again = (
        torch.autograd.grad(function(*inputs), inputs, (draw(2, 3), draw(2)), create_graph=twice)
        for twice in (False, True)
    )
    torch.testing.assert_close(again, once)


def test_the_parts_of_every_gradient():
    *covs, noise, mask = systems()
    w, _, tril, *_ = solve(covs[0].clone(), *covs[1:], noise, mask, JITTER)
    grad_w, grad_var = draw(6, 5), draw(6)
    left, vw = solve_gradient(grad_w, grad_var, w, tril, mask)
    torch.testing.assert_close(vw, grad_var[:, None] * w)
    a = torch.linalg.inv(tril @ tril.mT) @ (grad_w * mask)[..., None]
    torch.testing.assert_close(left, vw - a[..., 0], rtol=1e-9, atol=1e-12)


def test_a_variance_below_its_floor_takes_the_floor_and_is_marked():
    cov_xx = tensor(1.0, 1.0, 0.0)
    half = torch.tensor([[0.6], [1.1], [0.0]], dtype=F64)
    var, above = variance_left(cov_xx, half, 0.01)
    smallest = torch.finfo(F64).tiny
    torch.testing.assert_close(var, torch.tensor([1.01 - 0.36, 0.01, smallest], dtype=F64), rtol=1e-12, atol=0)
    assert above.tolist() == [True, False, False]


@pytest.mark.parametrize("noises", [0, 1, 3])
def test_chunks_and_noise_of_several_functions_do_not_matter(noises):
    """A kernel that is no stationary one; noise (B, K), or (L, B, K) for L latent functions."""
    kernel = Linear(2).double() + Matern32(2).double()
    points, rows = draw(30, 2), torch.randint(-1, 30, (21, 4), generator=generator())
    noise = 0.1 + torch.rand(noises or 1, 21, 4, dtype=F64, generator=generator())
    each = [
        dense(
            kernel(points[rows.clamp(min=0)]),
            kernel(points[rows.clamp(min=0)], points[:21, None])[..., 0],
            kernel(points[:21], diag=True),
            torch.zeros_like(n) if noises == 0 else n,
            rows >= 0,
        )
        for n in noise
    ]
    want = tuple(torch.stack(parts) if noises > 1 else parts[0] for parts in zip(*each, strict=True))
    given = None if noises == 0 else noise[0] if noises == 1 else noise
    for limit in (None, 1):
        if limit is None:
            got = block_conditional(bind(kernel), points[:21], points, rows, given, JITTER)
        else:
            with block_limit(limit):
                got = block_conditional(bind(kernel), points[:21], points, rows, given, JITTER)
        torch.testing.assert_close(tuple(got), want, rtol=1e-9, atol=1e-12)


def test_chunks_cover_every_target_once():
    x = torch.zeros(1000, 2)
    with block_limit(1):
        parts = list(chunks(x, 40))
    assert len(parts) > 1
    assert torch.equal(torch.cat([torch.arange(1000)[part] for part in parts]), torch.arange(1000))
    assert len(list(chunks(x, 1))) == 1


def test_members_are_stacked_in_front_and_shared_arguments_repeated():
    a, b = draw(3, 4), draw(4)
    (got,) = each_member(lambda one, two: (one * two,), 3, (0, None), (a, b))
    assert torch.equal(got, a * b)
    (got,) = each_member(lambda one, two: (one - two,), 4, (1, 0), (a, b))
    assert torch.equal(got, (a - b).mT)


def test_systems_are_evaluated_in_the_precision_of_the_inputs():
    x = torch.rand(9, 2, generator=generator())
    rows = torch.arange(1, 5).expand(9, 4)
    got = block_conditional(bind(RBF(2)), x, x, rows, None, 1e-4)
    assert [each.dtype for each in got] == [torch.float32] * 2
    want = block_conditional(bind(RBF(2).double()), x.double(), x.double(), rows, None, 1e-4)
    torch.testing.assert_close([each.double() for each in got], list(want), rtol=2e-2, atol=2e-3)
