"""Provenance of the results of autograd functions, and mapped dimensions that broadcast."""

import pytest
import torch
from builders import normal
from pyro.ops.provenance import get_provenance, track_provenance

from pyro_nngp._autograd import apply, mapped_first


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a * b, a


def test_results_come_from_all_arguments():
    a, b = normal(3), normal(3)
    product, _ = apply(Product, track_provenance(a, frozenset({"a"})), track_provenance(b, frozenset({"b"})))
    assert get_provenance(product) == frozenset({"a", "b"})
    assert not get_provenance(apply(Product, a, b)[0])
    torch.testing.assert_close(apply(Product, a, b)[0], a * b)


class Root(torch.autograd.Function):
    """The root, whose forward pass stands in for compiled code: it knows neither gradients nor batches."""

    @staticmethod
    def forward(a):
        assert type(a) is torch.Tensor
        return torch.from_numpy(a.detach().numpy() ** 0.5)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad / (2 * ctx.saved_tensors[0])

    @staticmethod
    def vmap(info, in_dims, a):
        return Root.apply(a), in_dims[0]


def test_the_forward_pass_alone_is_called_only_where_nothing_is_differentiated_or_mapped():
    a = normal(3).square() + 1
    with torch.no_grad():
        assert torch.equal(apply(Root, a), a.sqrt())
        assert torch.equal(torch.func.vmap(lambda part: apply(Root, part))(a), a.sqrt())
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
            with pytest.raises(RuntimeError, match="jvp"):  # not a result without its tangent
                apply(Root, dual)
    slope = torch.func.grad(lambda part: apply(Root, part).sum())(a)
    torch.testing.assert_close(slope, 0.5 / a.sqrt())


def test_mapped_dimensions_lead_and_broadcast():
    weights, right = normal(4, 7, 3, 2), normal(7, 5)  # (L, mapped, N, K), (mapped, N)
    moved = mapped_first((weights, right), (1, 0), (2, 1))
    assert [value.shape for value in moved] == [(7, 4, 3, 2), (7, 1, 5)]
    assert torch.equal(moved[0], weights.movedim(1, 0))
    assert torch.equal(moved[1][:, 0], right)
    alone, shared = mapped_first((right, normal(6, 5)), (0, None), (1, 1))
    assert (alone.shape, shared.shape) == ((7, 1, 5), (6, 5))
