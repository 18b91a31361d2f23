import pytest
import torch
from builders import F64, normal

from pyro_nngp.linalg import neighbor_products
from pyro_nngp.linalg.neighbor_products import combined, gram_of_neighbors

NEAR = torch.tensor([[-1, -1, -1], [0, -1, 2], [4, 0, 1], [3, 3, 2]])


@pytest.fixture(params=[1, 2**20], autouse=True)
def chunk(request, monkeypatch):
    monkeypatch.setattr(neighbor_products, "CHUNK", request.param)


def gathered(table):
    return torch.where((NEAR >= 0)[..., None], table[NEAR], 0.0)


def test_products_are_those_of_gathered_rows():
    own, table, w = normal(4, 2), normal(5, 2), normal(4, 3)
    rows = gathered(table)
    among, cross, square = gram_of_neighbors(own, table, NEAR)
    torch.testing.assert_close(among, rows @ rows.mT)
    torch.testing.assert_close(cross, (rows * own[:, None]).sum(-1))
    torch.testing.assert_close(square, (own * own).sum(-1))
    torch.testing.assert_close(combined(w, table, NEAR), (w[..., None] * rows).sum(1))


def test_gradients_are_right():
    own, table, w = (part.requires_grad_() for part in (normal(4, 2), normal(5, 2), normal(4, 3)))
    assert torch.autograd.gradcheck(lambda *parts: gram_of_neighbors(*parts, NEAR), (own, table))
    assert torch.autograd.gradcheck(lambda *parts: combined(*parts, NEAR), (w, table))


def test_a_table_without_columns_gives_zeros():
    among, _, square = gram_of_neighbors(torch.zeros(4, 0, dtype=F64), torch.zeros(5, 0, dtype=F64), NEAR)
    assert not among.any()
    assert not square.any()
