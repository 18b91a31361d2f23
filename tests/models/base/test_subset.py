"""Copies of methods on some of their rows: they equal methods built on these rows, and know nothing of the others."""

import copy

import pyro.distributions as dist
import pytest
import torch
from builders import F64, build, data, matern, methods, uniform, waves
from torch.testing import assert_close

from pyro_nngp.likelihoods import Bernoulli, Gaussian, Poisson
from pyro_nngp.means import LinearMean
from pyro_nngp.models import BSGP, LMC, LOO, SVGP, VNNGP, CoregionalizedLOO, Vecchia
from pyro_nngp.neighbors import NearestOthers, NeighborGraph, SymmetricGraph
from pyro_nngp.variational import SparseCholesky

HELD = torch.arange(60) % 4 == 0
REST = (~HELD).nonzero()[:, 0]


def constant(x):
    return torch.full_like(x[:, 0], 0.7)


@pytest.mark.parametrize("name", methods())
def test_rows_that_are_left_out_are_forgotten(name):
    """Other targets there change no prediction from the rest, although they change those of the whole method."""
    methods = []
    for shift in (0.0, 5.0):
        gp = build(name)
        del gp.mean
        gp.mean = constant
        with torch.no_grad():
            gp.y += shift * HELD
            if not gp.follows_rows:
                gp.q.loc.add_(shift)
        if name.startswith("NPVI-"):
            gp.q.rows_changed(gp.posterior(gp.bound()))
        if getattr(gp, "can_solve", False):
            gp.solve()
        methods.append(gp)
    x_new = data()[0][HELD]
    assert (methods[0](x_new)[0] - methods[1](x_new)[0]).abs().max() > 0.01
    one, two = (gp.subset(REST) for gp in methods)
    for a, b in zip(one(x_new), two(x_new), strict=True):
        assert torch.equal(a, b)
    assert one.num_data == len(REST)


METHODS_Q = {
    "labels": (LOO, Bernoulli, lambda f: (f > 0).double(), {}),
    "counts": (VNNGP, Poisson, lambda f: (f + 1).exp().round(), {}),
    "sparse": (VNNGP, Poisson, lambda f: (f + 1).exp().round(), {"guide": SparseCholesky()}),
    "coefficients": (
        Vecchia,
        lambda: Gaussian(0.04),
        lambda f: f,
        {"mean": LinearMean(2, prior=dist.Normal(0.0, 3.0))},
    ),
    "coefficients of q": (
        VNNGP,
        lambda: Gaussian(0.04),
        lambda f: f,
        {"mean": LinearMean(2, prior=dist.Normal(0.0, 3.0))},
    ),
}


@pytest.mark.parametrize("case", METHODS_Q)
def test_a_copy_equals_a_method_built_on_the_rows(case):
    method, likelihood, targets, options = METHODS_Q[case]
    x, f = waves(60)
    weights, offset = 1 + torch.rand(60, dtype=F64), 0.1 * x[:, 0]
    by_row = {"offset": offset} | ({} if method is LOO else {"weights": weights})
    options = {**options, **({"mean": copy.deepcopy(options["mean"])} if "mean" in options else {"mean": constant})}
    gp = method(x, targets(f), matern(), likelihood(), num_neighbors=59, **by_row, **options)
    gp.solve()
    options |= {"mean": copy.deepcopy(gp.mean)} if "coefficients" in case else {}
    by_row = {name: value[REST] for name, value in by_row.items()}
    fresh = method(x[REST], gp.y[REST], num_neighbors=44, start=gp, **by_row, **options)
    fresh.solve()
    part = gp.subset(REST)
    for a, b in zip(part(x[HELD]), fresh(x[HELD]), strict=True):
        assert_close(a, b, rtol=0, atol=1e-9)
    assert not torch.allclose(gp(x[HELD])[0], part(x[HELD])[0], atol=1e-3)


def test_outputs_and_their_missing_values_follow():
    x, f = waves(60)
    y = torch.stack([f, torch.where(x[:, 0] > 0.5, -f, torch.nan)], 1)
    for gp in (LMC(x, y, matern(), num_neighbors=6), CoregionalizedLOO(x, y, 1, num_neighbors=6)):
        if isinstance(gp, LMC):
            gp.solve()
        moved = copy.deepcopy(gp)
        moved.y[HELD] += 3.0
        parts = [each.subset(REST)(x[HELD])[0] for each in (gp, moved)]
        assert torch.equal(*parts)
        assert parts[0].shape == (2, 15)


def test_a_copy_is_independent():
    gp = build("Vecchia")
    part, before = gp.subset(REST), gp(data()[0][:5])[0]
    with torch.no_grad():
        part.kernel.lengthscale_unconstrained.add_(1.0)
    assert torch.equal(gp(data()[0][:5])[0], before)


@pytest.mark.parametrize("kind", [NeighborGraph, SymmetricGraph, NearestOthers])
def test_a_table_of_some_points_keeps_order_and_metric(kind):
    x, metric = uniform(40), torch.tensor([0.1, 1.0], dtype=F64)
    table, rows = kind(x, 6, metric=metric), torch.tensor([31, 4, 17, 9, 22])
    part = table.subset(rows)
    ranks = table.order.argsort()[rows]
    assert torch.equal(part.order, ranks.argsort())
    assert torch.equal(part.x, x[rows])
    assert part.num_neighbors == 4
    assert torch.equal(part.lengthscale, metric)
    assert torch.equal(part.others(2), kind(x[rows], 4, ordering=ranks.argsort(), metric=metric).others(2))


def test_methods_say_whether_rows_need_training():
    x, f = waves(30)
    assert build("VNNGP").follows_rows
    assert SVGP(x, f, matern(), inducing=9).follows_rows
    assert not VNNGP(x, f, matern(), num_neighbors=5, inducing=9).follows_rows
    assert not build("SWSGP").follows_rows
    assert not BSGP(x, f, None, inducing=9).follows_rows
    assert BSGP(x, f, None, inducing=9, fixed_draws=True, num_layers=2).subset(torch.arange(20)).noise.shape[2] == 20


def test_refusals():
    gp = build("Vecchia")
    with pytest.raises(ValueError, match="expected rows to hold two or more rows, got 1"):
        gp.subset(torch.tensor([3]))
    with pytest.raises(ValueError, match="rows"):
        gp.subset(torch.tensor([3, 60]))
