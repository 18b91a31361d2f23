"""Conditionals with batches of hyperparameters, against one set after the other, in compiled code and in torch."""

import warnings

import pyro
import pytest
import torch
from oracles.compiled import LEVELS, needs_library

from pyro_nngp._memory import block_limit
from pyro_nngp.conditionals import graph_conditional, nn_conditional
from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import RBF, Constant, Linear, Matern12, Matern32, Matern52, Periodic, RationalQuadratic
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.linalg.nuggets import quiet_nuggets
from pyro_nngp.native import conditional as compiled
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
RADIAL = [RBF, Matern12, Matern32, Matern52]
OTHERS = [RationalQuadratic, Periodic, lambda d, v, s: Matern32(d, v, s) + Linear(d, v)]


def combined(d, v, s):
    """A sum of products, of which one part acts on one column."""
    return Matern32(d, v, s) + Constant(d, v) * (RBF(d, lengthscale=s) + Matern12(1, v, active_dims=[0]))


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def way(request, monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "1" if request.param == "compiled" else "0")
    return request.param


class Case:
    """Padded neighbors, duplicates, and a batch of hyperparameters and noises."""

    def __init__(self, batch=(3,), noise=(), b=9, k=4, d=2, n=14):
        self.x, self.points = torch.randn(b, d, dtype=F64), torch.randn(n, d, dtype=F64)
        self.points[1] = self.points[0]
        self.neighbors = torch.rand(b, n).argsort(-1)[:, :k]
        self.neighbors[torch.rand(b, k) < 0.2] = -1
        self.neighbors[0, : min(2, k)] = torch.arange(min(2, k))
        self.lengthscale = 0.5 + torch.rand(*batch, d, dtype=F64)
        self.variance = 0.5 + torch.rand(batch, dtype=F64)
        self.noise = None if noise is None else torch.rand(*noise, n, dtype=F64)
        self.batch = torch.broadcast_shapes(batch, () if noise is None else noise)
        self.grads = torch.randn(*self.batch, b, k, dtype=F64), torch.randn(*self.batch, b, dtype=F64)

    def leaves(self):
        every = [self.x, self.points, self.lengthscale, self.variance, self.noise]
        return [None if each is None else each.clone().requires_grad_() for each in every]

    def loop(self, kernel, x, points, lengthscale, variance, noise):
        """Weights and variances of one set after the other."""
        d, found = x.shape[1], []
        noises = None if noise is None else noise.expand(*self.batch, -1).reshape(-1, len(points))
        scales, variances = lengthscale.expand(*self.batch, d).reshape(-1, d), variance.expand(self.batch).reshape(-1)
        for i in range(self.batch.numel()):
            given = None if noises is None else noises[i]
            one = kernel(d, variances[i], scales[i])
            found.append(graph_conditional(one, x, points, self.neighbors, given, 1e-3))
        return tuple(torch.stack(each).unflatten(0, self.batch) for each in zip(*found, strict=True))

    def together(self, kernel, x, points, lengthscale, variance, noise):
        return graph_conditional(kernel(x.shape[1], variance, lengthscale), x, points, self.neighbors, noise, 1e-3)

    def check(self, kernel):
        results = []
        for compute in (self.together, self.loop):
            leaves = self.leaves()
            values = compute(kernel, *leaves)
            inputs = [leaf for leaf in leaves if leaf is not None]
            results.append([*values, *torch.autograd.grad(values, inputs, self.grads)])
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [*RADIAL, *OTHERS, combined])
@pytest.mark.parametrize("noise", [None, (), (3,)])
def test_a_batch_is_a_loop(kernel, noise):
    Case(noise=noise).check(kernel)


@pytest.mark.parametrize("kernel", [Matern32, RationalQuadratic, combined])
@pytest.mark.parametrize(("batch", "noise"), [((3, 1), (2,)), ((2, 3), (3,)), ((2, 1), (4, 1, 2)), ((), (2,))])
def test_batch_dimensions_broadcast(kernel, batch, noise):
    Case(batch, noise).check(kernel)


@pytest.mark.parametrize("kernel", [Matern52, RationalQuadratic, combined])
@pytest.mark.parametrize(("b", "k"), [(1, 1), (2, 1), (40, 13), (5, 40)])
def test_sizes(kernel, b, k):
    case = Case(b=b, k=k, n=max(14, k + 1))
    case.check(kernel)
    with block_limit(1):  # chunks of a few targets
        case.check(kernel)


@pytest.mark.parametrize("kernel", [pytest.param(RBF, marks=pytest.mark.slow), RationalQuadratic, combined])
def test_gradients_to_second_order(kernel):
    case = Case((2,), (2,), b=2, k=2, n=4)
    case.points[1] = -case.points[0]  # apart: finite differences of coinciding points are rough
    assert torch.autograd.gradcheck(lambda *leaves: case.together(kernel, *leaves), case.leaves())
    assert torch.autograd.gradgradcheck(lambda *leaves: case.together(kernel, *leaves), case.leaves(), atol=1e-4)


@pytest.mark.parametrize("kernel", [Matern32, RationalQuadratic, combined])
@pytest.mark.parametrize("inner", [(), (2,)])
@pytest.mark.parametrize(
    "mapped", [("lengthscale",), ("variance", "noise"), ("lengthscale", "variance", "noise"), ("x",)]
)
def test_vmap_is_a_loop(kernel, inner, mapped):
    case = Case(inner, inner)
    given = {name: getattr(case, name) for name in ("x", "points", "lengthscale", "variance", "noise")}
    given = {name: value.requires_grad_() for name, value in given.items()}
    several = {name: torch.stack([given[name], given[name] * 1.3, given[name] * 0.7]) for name in mapped}
    leaves = [given[name] for name in given]

    def values(changed):
        return case.together(kernel, *(given | changed).values())

    found = torch.func.vmap(values)(several)
    each = [values({name: value[i] for name, value in several.items()}) for i in range(3)]
    looped = tuple(map(torch.stack, zip(*each, strict=True)))
    torch.testing.assert_close(found, looped, rtol=1e-12, atol=1e-12)
    slopes = [
        torch.autograd.grad(w.square().sum() + v.log().sum(), leaves, retain_graph=True) for w, v in (found, looped)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernel", [RBF, lambda d, v, s: RBF(d, v, s) * RBF(d, v, s)])
def test_one_indefinite_set_changes_no_other(kernel):
    case = Case((3,), None, b=6, k=5, n=12)
    case.points[1] = -case.points[0]
    case.x, case.points = case.x.float(), case.points.float()
    case.lengthscale[1] = 1e10  # all points in one place, in float64 too
    lengthscale, variance = case.lengthscale.float().requires_grad_(), case.variance.float().requires_grad_()

    def conditional(sets):
        made = kernel(2, variance[sets], lengthscale[sets])
        return graph_conditional(made, case.x, case.points, case.neighbors, jitter=0.0)

    with pytest.warns(UserWarning, match="took an extra nugget"):
        found = conditional(slice(None))
    with quiet_nuggets():
        looped = tuple(map(torch.stack, zip(*map(conditional, range(3)), strict=True)))
    torch.testing.assert_close(found, looped, rtol=1e-4, atol=1e-5)
    assert found[1].isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conditional(slice(None, None, 2))
    slopes = [torch.autograd.grad(values[0].sum() + values[1].sum(), lengthscale)[0] for values in (found, looped)]
    torch.testing.assert_close(slopes[0][::2], slopes[1][::2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [Matern32, RationalQuadratic])
def test_a_set_without_a_value_is_an_error(kernel):
    case = Case((2,), None)
    case.variance[1] = torch.nan
    made = kernel(2, 1.0, case.lengthscale.requires_grad_())
    del made.variance
    made.variance = case.variance
    with pytest.raises(NotPositiveDefiniteError, match="input is not positive-definite"):
        graph_conditional(made, case.x, case.points, case.neighbors)


def test_one_number_for_one_column_is_a_batch():
    scales = torch.tensor([0.3, 0.5, 0.9], dtype=F64, requires_grad=True)
    x, neighbors = torch.rand(6, 1, dtype=F64), torch.tensor([[1, 2], [2, 3], [3, 4], [4, 5], [5, 0], [0, 1]])
    for made in (Matern32, lambda d, lengthscale: Matern32(d, lengthscale=lengthscale) * Matern52(d)):
        w, v = graph_conditional(made(1, lengthscale=scales), x, x, neighbors)
        for i, scale in enumerate(scales):
            one = graph_conditional(made(1, lengthscale=scale), x, x, neighbors)
            torch.testing.assert_close((w[i], v[i]), one, rtol=1e-12, atol=1e-12)


def test_neighbors_of_each_target():
    """The function that takes blocks of neighbors has batches too."""
    x, z, mask = torch.randn(5, 2, dtype=F64), torch.randn(5, 3, 2, dtype=F64), torch.rand(5, 3) < 0.7
    scales = torch.tensor([[0.4], [0.9]], dtype=F64, requires_grad=True)
    w, v = nn_conditional(Matern32(2, lengthscale=scales), x, z, mask, torch.rand(5, 3, dtype=F64))
    assert w.shape == (2, 1, 5, 3)
    assert v.shape == (2, 1, 5)


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("k", "threads"), [(3, 1), (41, 2), (100, 1)])
def test_every_instruction_set_gives_each_set_its_own_bits(level, dtype, shared, k, threads, monkeypatch):
    b, d, n, sets = 57, 3, 130, 3  # with 41 neighbors enough work for two threads
    neighbors = torch.rand(b, n).argsort(-1)[:, :k]
    neighbors[2, 1:] = -1
    noise = torch.rand(b, k, dtype=dtype) if shared else torch.rand(sets, b, k, dtype=dtype)
    tensors = torch.randn(b, d, dtype=dtype), torch.randn(n, d, dtype=dtype), 1 + torch.rand(sets, d, dtype=dtype)
    variance = 1 + torch.rand(sets, dtype=dtype)
    problem = compiled.Problem(*tensors, variance, noise, neighbors, Matern52.profile, 1e-3)
    wanted = compiled.Wanted()
    grads = torch.randn(sets, b, k, dtype=dtype), torch.randn(sets, b, dtype=dtype)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(compiled, "KEPT_BYTES", 0 if k == 41 else 2**28)
    w, v, failed, kept = compiled.forward(problem, wanted, level)
    assert len(kept) == (3 if k == 41 else 4)
    slopes = compiled.backward(problem, kept, *grads, wanted, level)
    for i in range(sets):
        one = problem.one(i)
        w1, v1, failed1, kept1 = compiled.forward(one, wanted, level)
        assert torch.equal(w[i], w1)
        assert torch.equal(v[i], v1)
        assert torch.equal(failed[i], failed1)
        each = compiled.backward(one, kept1, grads[0][i], grads[1][i], wanted, level)
        for found, alone in zip(slopes[:5], each[:5], strict=True):
            assert torch.equal(found[i], alone)


def test_gradients_within_vmap_are_those_of_each_set():
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(20, 2, dtype=F64, generator=generator)
    graph, fresh = NeighborGraph(points, 4), NeighborGraph(points, 4)  # one whose levels are not known yet
    scales = 0.2 + torch.rand(3, 2, dtype=F64, generator=generator)
    noises = torch.rand(3, 20, dtype=F64, generator=generator)
    others = torch.rand(3, 20, 2, dtype=F64, generator=generator)

    def value(scale, noise, own):
        kernel = Matern32(2, lengthscale=scale, variance=scale[0])
        w, var = graph_conditional(kernel, own, points, graph.neighbors, noise)
        return (w * w.cos()).sum() + var.log().sum()

    def second(scale, noise, own):
        return torch.func.grad(lambda at: torch.func.grad(value)(at, noise, own).square().sum())(scale)

    def color(scale):
        return NNGP(Matern32(2, lengthscale=scale), fresh).color(points[:, 0]).square().sum()

    gradient = torch.func.grad(value, argnums=(0, 1, 2))
    with pyro.validation_enabled(False):
        for dims in ((0, 0, 0), (0, None, None), (0, 0, None)):
            given = [each if dim == 0 else each[0] for each, dim in zip((scales, noises, others), dims, strict=True)]
            found = torch.func.vmap(gradient, in_dims=dims)(*given)
            for i in range(3):
                own = (each[i] if dim == 0 else each for each, dim in zip(given, dims, strict=True))
                leaves = [each.clone().requires_grad_() for each in own]
                want = torch.autograd.grad(value(*leaves), leaves)
                torch.testing.assert_close([part[i] for part in found], list(want))
        leaf = scales[0].clone().requires_grad_()
        (first,) = torch.autograd.grad(value(leaf, noises[0], others[0]), leaf, create_graph=True)
        (want,) = torch.autograd.grad(first.square().sum(), leaf)
        torch.testing.assert_close(second(scales[0], noises[0], others[0]), want)
        mapped = torch.func.vmap(torch.func.grad(color))(scales)
        torch.testing.assert_close(mapped, torch.stack([torch.func.grad(color)(scale) for scale in scales]))


def test_gradients_of_general_kernels_within_vmap_are_refused():
    points = torch.rand(9, 2, generator=torch.Generator().manual_seed(0))
    neighbors = NeighborGraph(points, 3).neighbors

    def value(scale):
        kernel = Matern32(2, lengthscale=scale) + RationalQuadratic(2)
        return graph_conditional(kernel, points, points, neighbors)[1].sum()

    scales = torch.tensor([0.3, 0.5])
    with pytest.raises(NotImplementedError, match=r"expected a gradient outside torch.func.vmap for a general kernel"):
        torch.func.vmap(torch.func.grad(value))(scales)
    together = torch.func.grad(lambda every: torch.func.vmap(value)(every).sum())(scales)
    torch.testing.assert_close(together, torch.stack([torch.func.grad(value)(scale) for scale in scales]))
