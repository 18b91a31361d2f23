"""Distinct rows and Adam's step on rows, beside torch's."""

import pytest
import torch
from oracles.compiled import needs_library

from pyro_nngp.inference import RowAdam
from pyro_nngp.native import rows
from pyro_nngp.neighbors.table import distinct_rows

pytestmark = needs_library


@pytest.mark.parametrize("size", [1, 63, 64, 65, 5_000])
def test_distinct_rows_are_those_of_torch(size):
    numbers = torch.randint(size, (40, 7), generator=torch.Generator().manual_seed(size))
    found, places = rows.distinct(numbers)
    want, positions = numbers.unique(return_inverse=True)
    assert torch.equal(found, want)
    assert torch.equal(places, positions)
    padded = torch.where(numbers % 3 == 0, -1, numbers)
    found, places = rows.distinct(padded.mT, padded=True)  # not contiguous
    assert torch.equal(found, padded[padded >= 0].unique())
    assert torch.equal(places < 0, padded.mT < 0)
    assert torch.equal(found[places[places >= 0]], padded.mT[padded.mT >= 0])


@pytest.mark.parametrize(
    "numbers",
    [torch.tensor([3, -1]), torch.tensor([2**30, 1]), torch.tensor([1, 2]).int(), torch.zeros(0, dtype=torch.int64)],
    ids=["negative", "large", "int32", "none"],
)
def test_what_compiled_code_leaves_to_torch(numbers):
    assert rows.distinct(numbers) is None
    found, places = distinct_rows(numbers)
    assert torch.equal(found[places], numbers.long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_sparse_adam_and_of_torch_operations(dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, 3, generator=generator, dtype=dtype)
    tables = [torch.nn.Parameter(start.clone()) for _ in range(3)]
    optimizers = RowAdam(tables[:1], 0.1), RowAdam(tables[1:2], 0.1), torch.optim.SparseAdam(tables[2:], 0.1)
    for _ in range(5):
        own = torch.randperm(50, generator=generator)[:20].sort().values
        grad = torch.randn(20, 3, generator=generator, dtype=dtype)
        for i, (table, optimizer) in enumerate(zip(tables, optimizers, strict=True)):
            table.grad = torch.sparse_coo_tensor(own[None], grad, table.shape, is_coalesced=True, check_invariants=True)
            with monkeypatch.context() as patch:
                patch.setenv("PYRO_NNGP_NATIVE", str(1 - i % 2))
                optimizer.step()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(tables[0], tables[1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(tables[0], tables[2], rtol=tolerance, atol=100 * tolerance)  # another place of eps
    assert not torch.equal(tables[0], start)


def step_arguments():
    whole, own = torch.zeros(4, 2), torch.tensor([0, 3])
    parts = {"table": whole, "first": whole.clone(), "second": whole.clone(), "rows": own, "grad": torch.ones(2, 2)}
    return parts | {"rate": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": torch.zeros(4)}, r"adam_step: expected table with 2 dimensions, float32 or float64"),
        ({"first": torch.zeros(3, 2)}, r"adam_step: expected first of shape \(4, 2\), got \(3, 2\)"),
        ({"second": torch.zeros(4, 2).double()}, r"expected second of dtype torch.float32, got torch.float64"),
        ({"grad": torch.ones(2, 3)}, r"expected grad of shape \(2, 2\), got \(2, 3\)"),
        ({"rows": torch.tensor([0, 4])}, r"adam_step: expected rows in 0..3, got 0..4"),
        ({"rows": torch.tensor([0, -1])}, r"adam_step: expected rows in 0..3, got -1..0"),
    ],
)
def test_memory_that_does_not_fit_is_refused(change, message):
    given = step_arguments() | change
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        rows.adam_step(**given)
    assert not given["table"].any()
