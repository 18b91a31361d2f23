"""Methods of the package have the protocols that ``fit`` asks for, and pairs of functions are adapted once."""

import pytest
import torch
from torch import nn

from pyro_nngp.inference.protocols import (
    Alternating,
    Batched,
    Checked,
    Induced,
    Program,
    Refreshable,
    ReportsDensity,
    ReportsEvidence,
    ReportsLeak,
    Sharded,
    Smooth,
    Solvable,
    graph_of,
    has_program,
    owner_of,
    shard_of,
    total_rows,
)
from pyro_nngp.models import LMC, LOO, SVGP, SWSGP, VNNGP, MLLk, Vecchia

OPTIONAL = {
    Alternating,
    Batched,
    Induced,
    Refreshable,
    ReportsDensity,
    ReportsEvidence,
    ReportsLeak,
    Smooth,
    Solvable,
}
X = torch.rand(30, 2, generator=torch.Generator().manual_seed(0))
Y = torch.sin(6 * X[:, 0])


@pytest.mark.parametrize(
    ("make", "has"),
    [
        (lambda: Vecchia(X, Y, num_neighbors=3), {Refreshable, Solvable}),
        (lambda: MLLk(X, Y, num_neighbors=3), {Refreshable, Solvable}),
        (
            lambda: LOO(X, (Y > 0).float(), num_neighbors=3),
            {Alternating, Batched, Refreshable, ReportsLeak, Solvable},
        ),
        (lambda: VNNGP(X, Y, num_neighbors=3), {Batched, Induced, Refreshable, ReportsEvidence, Solvable}),
        (lambda: LMC(X, Y[:, None], num_neighbors=3), {Batched, Refreshable, Smooth, Solvable}),
        (lambda: SVGP(X, Y, inducing=3), {Induced, Solvable}),
        (lambda: SWSGP(X, Y, inducing=5, num_neighbors=3), {Batched, Induced, Refreshable, ReportsDensity}),
    ],
    ids=["Vecchia", "MLLk", "LOO", "VNNGP", "LMC", "SVGP", "SWSGP"],
)
def test_methods_have_the_protocols_that_fit_asks_for(make, has):
    method = make()
    assert {protocol for protocol in OPTIONAL if isinstance(method, protocol)} == has
    assert all(isinstance(method, protocol) for protocol in (Checked, Sharded))
    assert has_program(method)
    assert owner_of(method.model) is method
    assert shard_of(method) is None
    assert total_rows(method) == 30
    graph = graph_of(method)
    assert graph is None if isinstance(method, SVGP | SWSGP) else graph.num_neighbors == 3


def test_a_pair_has_none_of_them():
    def model(idx=None): ...

    pair = Program(model, model, 7)
    assert has_program(pair)
    assert total_rows(pair) == 7
    assert owner_of(model) is shard_of(pair) is graph_of(pair) is None
    assert not isinstance(pair, Checked | Refreshable | Solvable | Sharded)


def test_a_guide_that_is_a_submodule_counts():
    """``inspect.getattr_static``, which ``isinstance`` uses from Python 3.12 on, does not find submodules."""

    class Method(nn.Module):
        def __init__(self):
            super().__init__()
            self.guide = nn.Linear(1, 1)

        def model(self, idx=None): ...

    assert has_program(Method())
