"""Provenance of the results of autograd functions, and mapped dimensions that broadcast."""

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


def test_mapped_dimensions_lead_and_broadcast():
    weights, right = normal(4, 7, 3, 2), normal(7, 5)  # (L, mapped, N, K), (mapped, N)
    moved = mapped_first((weights, right), (1, 0), (2, 1))
    assert [value.shape for value in moved] == [(7, 4, 3, 2), (7, 1, 5)]
    assert torch.equal(moved[0], weights.movedim(1, 0))
    assert torch.equal(moved[1][:, 0], right)
    alone, shared = mapped_first((right, normal(6, 5)), (0, None), (1, 1))
    assert (alone.shape, shared.shape) == ((7, 1, 5), (6, 5))
