"""Hand-written gradients of isotropic blocks: first and second derivatives, vmap, finite values, reuse of memory."""

import pytest
import torch
from builders import normal, scalar, tensor
from oracles.kernels import name_of
from pyro import poutine
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from pyro_nngp.kernels import (
    RBF,
    Constant,
    Covariance,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    bind,
)


def smooth_kernels() -> list[Kernel]:
    ard = tensor(0.7, 1.4)
    one = scalar(0.9)
    return [
        RBF(2, one, ard),
        Matern12(2, one, ard),
        Matern32(2, one, ard),
        Matern52(2, one, ard),
        RationalQuadratic(2, one, ard, one),
        Periodic(2, one, ard, 2 * ard),
        Constant(2, one),
        Linear(2, one),
        Matern52(2, one, ard) * Linear(2, one) + RBF(1, one, one, active_dims=[1]),
    ]


def leaves_of(kernel: Kernel) -> list[Tensor]:
    return [p.detach().clone().requires_grad_() for p in kernel.parameters()]


def with_leaves(kernel: Kernel, leaves: tuple[Tensor, ...]) -> Covariance:
    """Bind the kernel with its unconstrained parameters replaced by tensors that record gradients."""
    names = [name.replace("_unconstrained", "") for name, _ in kernel.named_parameters()]
    with poutine.substitute(data={name: leaf.exp() for name, leaf in zip(names, leaves, strict=True)}):
        return bind(kernel)


def by_seconds(kernel: Kernel) -> object:
    slow = isinstance(kernel, RationalQuadratic | Periodic)
    return pytest.param(kernel, id=name_of(kernel), marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize("kernel", [by_seconds(kernel) for kernel in smooth_kernels()])
def test_first_and_second_derivatives(kernel: Kernel) -> None:
    x, z = normal(2, 2).requires_grad_(), normal(2, 3, 2).requires_grad_()  # x broadcasts over the batch of z

    def block(x: Tensor, z: Tensor, *leaves: Tensor) -> Tensor:
        return with_leaves(kernel, leaves)(x, z)

    inputs = (x, z, *leaves_of(kernel))
    assert gradcheck(block, inputs)
    assert gradgradcheck(block, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", smooth_kernels(), ids=name_of)
def test_derivatives_of_a_block_with_itself(kernel: Kernel) -> None:
    def block(x: Tensor, *leaves: Tensor) -> Tensor:
        return with_leaves(kernel, leaves)(x, x)

    inputs = (normal(3, 2).requires_grad_(), *leaves_of(kernel))
    assert gradcheck(block, inputs)
    assert gradgradcheck(block, inputs)


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 1, None), (None, None, 0), (0, 1, 0)])
@pytest.mark.parametrize("kernel", [k for k in smooth_kernels() if not isinstance(k, Constant)], ids=name_of)
def test_blocks_under_vmap(kernel: Kernel, mapped: tuple[int | None, ...]) -> None:
    """Values and gradients are those of one call after the other, whichever of x, z and parameters are mapped over."""
    x, z = normal(3, 4, 2), normal(5, 3, 6, 2)
    x, z = x if mapped[0] == 0 else x[0], z if mapped[1] == 1 else z[:, 0]  # (4, 2) and (5, 6, 2) each
    leaves = [torch.stack([leaf, leaf + 0.1, leaf - 0.2]) for leaf in leaves_of(kernel)]
    leaves = leaves if mapped[2] == 0 else [leaf[0] for leaf in leaves]
    inputs = [tensor.requires_grad_() for tensor in (x, z, *leaves)]
    in_dims = (*mapped[:2], *[mapped[2]] * len(leaves))

    def block(x: Tensor, z: Tensor, *leaves: Tensor) -> Tensor:
        return with_leaves(kernel, leaves)(x, z)

    def one(c: int) -> Tensor:
        pairs = zip(inputs, in_dims, strict=True)
        return block(*[y if dim is None else y.select(dim, c) for y, dim in pairs])

    weights = normal(3, 5, 4, 6)
    together, apart = torch.func.vmap(block, in_dims)(*inputs), torch.stack([one(c) for c in range(3)])
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)
    pair = (torch.autograd.grad((weights * values).sum(), inputs) for values in (together, apart))
    for gradient, expected in zip(*pair, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


def test_only_the_wanted_gradients_are_computed() -> None:
    x, z = normal(3, 2), normal(4, 2).requires_grad_()
    variance, lengthscale = scalar(2.0), scalar(1.0)
    kernel = RBF(2)
    del kernel.variance, kernel.lengthscale
    kernel.variance, kernel.lengthscale = variance, lengthscale
    calls: list[tuple[Tensor | None, ...]] = []
    block = kernel(x, z)
    block.grad_fn.register_hook(lambda grad_inputs, _: calls.append(grad_inputs))
    block.sum().backward()
    assert [g is not None for g in calls[0][:3]] == [False, True, False]


def test_a_changed_block_is_noticed_by_autograd() -> None:
    block = RBF(1)(normal(3, 1))
    with pytest.raises(RuntimeError, match="inplace operation"):
        block.diagonal().add_(1.0).sum().backward()
