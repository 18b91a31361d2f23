"""The compiled conditional against the general code, for every kernel, dtype and instruction set of this machine."""

from functools import partial

import pytest
import torch
from oracles.compiled import LEVELS, needs_library
from oracles.conditionals import Case, general

from pyro_nngp import native
from pyro_nngp._memory import block_limit
from pyro_nngp.conditionals import stationary_kernel as radial_conditional
from pyro_nngp.conditionals.nearest_neighbor import graph_conditional, nn_conditional
from pyro_nngp.kernels import (
    RBF,
    Constant,
    Cosine,
    Matern,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    Wendland,
    bind,
)
from pyro_nngp.kernels.radial import Combination
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.native import conditional as compiled

F64 = torch.float64
EVERY = compiled.Wanted()
KERNELS = [RBF, Matern12, Matern32, Matern52, Wendland]
CLOSED = [(kernel, None) for kernel in KERNELS]


@pytest.fixture
def switched_off(monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "0")


@needs_library
@pytest.mark.parametrize(("kernel", "smoothness"), [*CLOSED, *((Matern, nu) for nu in (0.08, 0.5, 1.0, 2.5, 7.3))])
def test_values_and_gradients_are_those_of_the_general_code(kernel, smoothness):
    case, rtol = Case(kernel, smoothness=smoothness), 1e-9 if smoothness is None else 1e-8
    torch.testing.assert_close(case.run(), case.run(kernel=general), rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_torch_operations_give_the_same(kernel, switched_off):
    case = Case(kernel)
    want = case.run(kernel=general)
    torch.testing.assert_close(case.run(), want, rtol=1e-9, atol=1e-10)
    with block_limit(1):  # chunks of 16 targets
        torch.testing.assert_close(case.run(), want, rtol=1e-9, atol=1e-10)


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("smoothness", "k"),  # no, one and several panels of columns, padded tiles
    [(None, 1), (None, 5), (None, 12), (None, 50), (None, 117), (1.3, 1), (1.3, 12), (1.3, 50)],
)
def test_every_instruction_set_and_size(level, smoothness, k):
    case = Case(Matern32 if smoothness is None else Matern, b=19, k=k, n=150, d=2, smoothness=smoothness)
    problem, every = case.problem(), EVERY._replace(smoothness=smoothness is not None)
    want = case.run(kernel=general)
    w, v, failed, kept = compiled.forward(problem, None, level)
    found = compiled.backward(problem, kept, case.grad_w, case.grad_v, every, level)
    grad_points = torch.zeros_like(case.points)
    grad_points.index_add_(0, case.neighbors.clamp(min=0).flatten(), found.z.flatten(0, 1))
    grad_noise = torch.zeros_like(case.noise)
    grad_noise.index_add_(0, case.neighbors.clamp(min=0).flatten(), found.noise.flatten())
    scale, variance = found.log_lengthscale / case.lengthscale, found.log_variance / case.variance
    assert not failed.any()
    got = [w, v, found.x, grad_points, scale, variance, grad_noise]
    rtol = 1e-8 if smoothness is None else 1e-7
    got += [] if smoothness is None else [found.smoothness]
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol / 10)


COMBINATIONS = {
    "product": lambda: Matern32(2, active_dims=[0, 1]) * Matern12(1, active_dims=[2]),
    "sum": lambda: Matern52(3, lengthscale=0.7) + RBF(3, variance=0.5, lengthscale=0.3),
    "season": lambda: Matern(2, smoothness=0.8, active_dims=[0, 1]) * Periodic(1, period=0.4, active_dims=[2]),
    "waves": lambda: RBF(3) * Cosine(3, period=0.7) + RBF(3, variance=0.5) * Cosine(3, period=2.0),
    "nested": lambda: (
        (Matern(1, smoothness=1.3, active_dims=[0]) + Wendland(2, lengthscale=3.0, active_dims=[1, 2]))
        * (Matern(2, smoothness=0.7, active_dims=[2, 0]) + Constant(3, variance=0.3))
        + RBF(3)
    ),
}


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("k", [1, 12, 50])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_sums_of_products_of_kernels(name, level, k, monkeypatch):
    monkeypatch.setattr(compiled, "best_level", lambda _: level)
    kernel, case = COMBINATIONS[name]().double(), Case(Matern32, b=19, k=k, n=150)
    x, points, noise = (part.clone().requires_grad_() for part in (case.x, case.points, case.noise))
    leaves = [x, points, noise, *kernel.parameters()]

    def values_and_gradients(kernel):
        values = graph_conditional(kernel, x, points, case.neighbors, noise, jitter=1e-3)
        return *values, *torch.autograd.grad(values, leaves, (case.grad_w, case.grad_v))

    want = values_and_gradients(general(kernel))
    torch.testing.assert_close(values_and_gradients(kernel), want, rtol=1e-7, atol=1e-8)


@needs_library
def test_columns_of_all_parts_are_asked_for():
    radial = bind(COMBINATIONS["product"]()).radial
    x, rows = torch.rand(4, 2), torch.zeros(4, 1, dtype=torch.int64)
    problem = compiled.Problem(x, x, radial.lengthscale, radial.variance, None, rows, radial.profile, 1e-6)
    with pytest.raises(ValueError, match=r"expected x, lengthscale with the 3 columns of all parts, got \(2, \(3,\)\)"):
        compiled.forward(problem)
    x = torch.rand(4, 3)
    with pytest.raises(ValueError, match="expected variance"):
        compiled.forward(problem._replace(x=x, points=x, variance=torch.ones(1)))
    nine = Combination((RBF.profile,) * 9, (1,) * 9, ((0,),))
    x, nine_numbers = torch.rand(4, 9), torch.ones(9)
    many = problem._replace(x=x, points=x, lengthscale=nine_numbers, variance=nine_numbers, profile=nine)
    assert not compiled.supported(many)
    with pytest.raises(ValueError, match="expected a kernel of at most 8 parts, got 9"):
        compiled.forward(many)


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kernel", "d", "k"), [(RBF, 1, 5), (Matern12, 2, 1), (Matern32, 3, 12), (Matern52, 8, 50)])
def test_derivatives_that_are_kept_give_the_gradient(level, kernel, d, k):
    case = Case(kernel, b=37, k=k, n=60, d=d)
    problem = case.problem()._replace(noise=None)
    grads, wanted = (case.grad_w, case.grad_v), EVERY._replace(noise=False, inputs=False)
    w, v, failed, without = compiled.forward(problem, None, level)
    failed[7] = True
    want = compiled.backward(problem, without, *grads, wanted, level)
    w2, v2, failed2, kept = compiled.forward(problem, wanted, level)
    assert not failed2.any()
    assert torch.equal(w2, w)
    assert torch.equal(v2, v)
    kept[3][7], kept[4][7] = 0, 0
    found = compiled.backward(problem, kept, *grads, wanted, level)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-10)
    assert compiled.backward(problem, kept, *grads, wanted._replace(kernel=False), level).log_lengthscale is None
    nothing = [torch.zeros_like(t) for t in kept]  # it does read them
    assert not compiled.backward(problem, nothing, *grads, wanted, level).log_variance
    kept[0][7] = True
    torch.testing.assert_close(
        compiled.backward(problem, kept, *grads, EVERY, level),  # gradients that they do not give
        compiled.backward(problem, without, *grads, EVERY, level),
    )


@needs_library
def test_derivatives_are_kept_where_they_serve(monkeypatch):
    problem = Case(Matern32).problem()
    noiseless, many = problem._replace(noise=None), Case(Matern32, d=9).problem()._replace(noise=None)

    def kept(problem, inputs=False):
        return len(compiled.forward(problem, EVERY._replace(inputs=inputs))[3])

    assert kept(noiseless) == 5
    assert kept(problem) == kept(many) == kept(noiseless, inputs=True) == 4
    assert all(len(compiled.forward(each, None)[3]) == 3 for each in (noiseless, problem))
    monkeypatch.setattr(compiled, "KEPT_BYTES", 21 * 8 * 4 * 8 - 1)
    assert kept(noiseless) == 3


@needs_library
@pytest.mark.parametrize("kernel", KERNELS)
def test_derivatives_of_several_sets(kernel):
    case = Case(kernel, b=30, k=9, n=50, d=2)
    scales = torch.tensor([[0.3, 0.7], [2.0, 1.0], [0.9, 0.9]], dtype=F64).requires_grad_()
    variances = torch.tensor([0.5, 1.0, 2.0], dtype=F64).requires_grad_()

    def gradient(kernel):
        w, v = graph_conditional(kernel, case.x, case.points, case.neighbors, jitter=1e-3)
        return torch.autograd.grad((w * case.grad_w).sum() + (v * case.grad_v).sum(), (scales, variances))

    together = gradient(case.bound(scales, variances))
    each = [gradient(case.bound(*one)) for one in zip(scales, variances, strict=True)]
    torch.testing.assert_close(together, tuple(sum(parts) for parts in zip(*each, strict=True)))


@needs_library
@pytest.mark.parametrize(("smoothness", "closed"), [(0.5, Matern12), (1.5, Matern32), (2.5, Matern52)])
def test_half_integer_smoothness_gives_the_closed_forms(smoothness, closed):
    case = Case(Matern, smoothness=smoothness)
    found = case.run()
    case.kernel, case.smoothness = closed, None
    torch.testing.assert_close(found[:-1], case.run(), rtol=1e-9, atol=1e-10)


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("d", [1, 2])
def test_derivatives_that_are_kept_give_the_gradient_by_smoothness(level, d):
    case = Case(Matern, b=37, k=12, n=60, d=d, smoothness=1.3)
    problem, grads = case.problem()._replace(noise=None), (case.grad_w, case.grad_v)
    wanted = compiled.Wanted(noise=False, inputs=False, smoothness=True)
    want = compiled.backward(problem, compiled.forward(problem, None, level)[3], *grads, wanted, level)
    kept = compiled.forward(problem, wanted, level)[3]
    assert len(kept) == 5
    found = compiled.backward(problem, kept, *grads, wanted, level)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-10)
    fixed = wanted._replace(smoothness=False)
    given = compiled.forward(problem, fixed, level)[3]
    without = compiled.backward(problem, given, *grads, fixed, level)
    assert without.smoothness is None
    torch.testing.assert_close(without[:2], want[:2], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        compiled.backward(problem, kept, *grads, fixed, level)[:2], want[:2], rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize("way", ["0", "1"])
def test_sets_of_hyperparameters_with_a_smoothness_and_vmap(way, monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", way)
    case = Case(Matern, b=12, k=5, n=30, d=2, smoothness=1.3)
    scales = torch.tensor([[0.3, 0.7], [2.0, 1.0], [0.9, 0.9]], dtype=F64)
    variances, smoothnesses = torch.tensor([0.5, 1.0, 2.0], dtype=F64), torch.tensor([0.4, 1.5, 3.1], dtype=F64)
    sets = [value.requires_grad_() for value in (scales, variances, smoothnesses)]

    def loss(*values):
        w, v = case.values(case.x, case.points, *values[:2], None, values[2])
        return (w * case.grad_w).sum((-2, -1)) + (v * case.grad_v).sum(-1)

    each = [torch.autograd.grad(loss(*one), sets) for one in zip(*sets, strict=True)]
    want = [sum(parts) for parts in zip(*each, strict=True)]
    torch.testing.assert_close(list(torch.autograd.grad(loss(*sets).sum(), sets)), want)
    torch.testing.assert_close(list(torch.autograd.grad(torch.vmap(loss)(*sets).sum(), sets)), want)
    one = torch.autograd.grad(loss(scales, variances, smoothnesses[1]).sum(), sets)[2]
    each = [torch.autograd.grad(loss(*row, smoothnesses[1]), sets)[2] for row in zip(scales, variances, strict=True)]
    torch.testing.assert_close(one, sum(each))
    if way == "0" or native.library() is None:
        return  # the general code has no gradient within vmap
    mapped = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*(value.detach() for value in sets))
    torch.testing.assert_close([value.detach() for value in mapped], want)


@needs_library
def test_points_that_fail_have_no_derivatives():
    case = Case(RBF, b=30, k=9, n=50, d=2, dtype=torch.float32)
    case.points[:9] *= 0.1
    case.neighbors[5] = torch.arange(9)  # too close to each other for single precision
    problem = case.problem(torch.float32, jitter=0.0)._replace(noise=None)
    _, _, failed, kept = compiled.forward(problem, EVERY._replace(inputs=False))
    assert failed[5]
    assert not failed[6:].all()
    for derivatives in kept[3:]:
        assert not derivatives[failed].any()
        assert derivatives[~failed].any()


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "k"), [(F64, 5), (torch.float32, 50)])
def test_factors_that_are_kept_change_no_bit(level, dtype, k, monkeypatch):
    case = Case(Matern32, b=37, k=k, n=60)
    problem = case.problem(dtype)
    w, v, _, without = compiled.forward(problem, None, level)
    grads = case.grad_w.to(dtype), case.grad_v.to(dtype)
    want = compiled.backward(problem, without, *grads, EVERY, level)
    assert len(without) == 3
    w2, v2, _, kept = compiled.forward(problem, EVERY, level)
    assert torch.equal(w2, w)
    assert torch.equal(v2, v)
    factors = kept[3].clone()
    for _ in range(2):  # the backward pass may be repeated
        found = compiled.backward(problem, kept, *grads, EVERY, level)
        assert all(torch.equal(a, b) for a, b in zip(found[:5], want[:5], strict=True))
        assert torch.equal(kept[3], factors)
    nothing = torch.zeros_like(factors)  # it does read them
    found = compiled.backward(problem, (*without, nothing), *grads, EVERY, level)
    assert not torch.equal(found.log_variance, want.log_variance)
    monkeypatch.setattr(compiled, "KEPT_BYTES", len(factors) - 1)
    assert len(compiled.forward(problem, EVERY, level)[3]) == 3


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kernel", "smoothness"), [*CLOSED, (Matern, 1.3)])
def test_single_precision(level, kernel, smoothness):
    case = Case(kernel, b=35, k=18, n=60, smoothness=smoothness)
    every = EVERY._replace(smoothness=smoothness is not None)
    single = case.problem(torch.float32)
    want = compiled.backward(case.problem(), compiled.forward(case.problem())[3], case.grad_w, case.grad_v, every)
    w, v, _, kept = compiled.forward(single, level=level)
    got = compiled.backward(single, kept, case.grad_w.float(), case.grad_v.float(), every, level)
    torch.testing.assert_close((w.double(), v.double()), compiled.forward(case.problem())[:2], rtol=1e-4, atol=1e-5)
    pairs = [(one.double(), other) for one, other in zip(got, want, strict=True) if one is not None]
    assert len(pairs) == 5 + (smoothness is not None)
    torch.testing.assert_close(*map(list, zip(*pairs, strict=True)), rtol=1e-3, atol=1e-3)


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "end"), [(torch.float32, 87.0), (F64, 708.0)])
def test_exponential_is_accurate_to_a_few_units_in_the_last_place(level, dtype, end):
    q = torch.linspace(0, end, 5001, dtype=dtype)[:, None]
    x, ones = torch.zeros_like(q), torch.ones((), dtype=dtype)
    points, scale = q.sqrt(), torch.ones(1, dtype=dtype) / RBF.profile.stretch
    rows = torch.arange(len(q))[:, None]
    w = compiled.forward(compiled.Problem(x, points, scale, ones, None, rows, RBF.profile, 0.0), level=level)[0]
    distance = (points - x) / (scale * RBF.profile.stretch)
    want = torch.exp(-distance.double().square())
    rounding = (4 + 2 * distance.double().square()) * torch.finfo(dtype).eps  # of the squared distance, and ours
    assert ((w.double() - want).abs() <= rounding * want).all()


@needs_library
def test_only_what_is_asked_for_and_the_same():
    problem, case = Case(Matern52).problem(), Case(Matern52)
    kept = compiled.forward(problem)[3]
    whole = compiled.backward(problem, kept, case.grad_w, case.grad_v, EVERY)
    owners = {"log_lengthscale": "kernel", "log_variance": "kernel", "noise": "noise", "x": "inputs", "z": "inputs"}
    for flag in ("kernel", "noise", "inputs"):
        wanted = compiled.Wanted(False, False, False)._replace(**{flag: True})
        part = compiled.backward(problem, kept, case.grad_w, case.grad_v, wanted)
        for name, owner in owners.items():
            value = getattr(part, name)
            assert (value is None) == (owner != flag)
            if value is not None:
                torch.testing.assert_close(value, getattr(whole, name), rtol=1e-12, atol=1e-14)


@needs_library
def test_threads_change_no_bit():
    case = Case(Matern52, b=2000, k=20, n=2100)
    want = case.run()
    for threads in (2, 5):
        torch.set_num_threads(threads)
        try:
            assert all(torch.equal(a, b) for a, b in zip(case.run(), want, strict=True))
        finally:
            torch.set_num_threads(1)


@needs_library
def test_companions_in_a_block_change_no_bit():
    case, kernel = Case(Matern32, b=40), Matern32(3).double()
    w, v = graph_conditional(kernel, case.x, case.points, case.neighbors)
    rows = torch.randperm(40)[:11]
    w2, v2 = graph_conditional(kernel, case.x[rows], case.points, case.neighbors[rows])
    assert torch.equal(w[rows], w2)
    assert torch.equal(v[rows], v2)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["0", "1"])
def test_second_derivatives(way, monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", way)
    case = Case(RBF, b=5, k=4, n=9)

    values = partial(case.values, jitter=1e-2)
    torch.autograd.gradcheck(values, case.inputs())
    torch.autograd.gradgradcheck(values, case.inputs())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["0", "1"])
def test_second_derivatives_with_a_smoothness(way, monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", way)
    case = Case(Matern, b=3, k=3, n=6, d=1, smoothness=1.3)
    case.x[2] += 0.3  # apart from its neighbor, where the second derivative is large
    case.points[1] += 0.2
    torch.autograd.gradcheck(case.values, case.inputs())
    torch.autograd.gradgradcheck(case.values, case.inputs(), atol=1e-4)


@needs_library
@pytest.mark.parametrize(
    ("kept_bytes", "kernel", "smoothness"), [(0, RBF, None), (2**28, RBF, None), (2**28, Matern, 1.3)]
)
def test_indefinite_members_take_the_way_that_adds_jitter(kept_bytes, kernel, smoothness, monkeypatch):
    monkeypatch.setattr(compiled, "KEPT_BYTES", kept_bytes)
    case = Case(kernel, b=20, k=6, smoothness=smoothness)
    case.neighbors[5, :3] = 7  # one point three times, with less than no noise
    case.noise[7] = -3e-5
    with pytest.warns(UserWarning, match=r"1 of the covariances were indefinite"):
        got = case.run(jitter=0.0)
    with pytest.warns(UserWarning, match=r"1 of the covariances were indefinite"):
        want = case.run(jitter=0.0, kernel=general)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@needs_library
def test_not_a_number_is_an_error_as_elsewhere():
    case = Case(RBF)
    case.lengthscale[1] = float("nan")
    with pytest.raises(NotPositiveDefiniteError, match="stayed indefinite"):
        case.run()


@needs_library
def test_any_layout_of_memory():
    case, kernel = Case(Matern52), Matern52(3).double()
    want = graph_conditional(kernel, case.x, case.points, case.neighbors)
    strided = [t.mT.contiguous().mT for t in (case.x, case.points, case.neighbors)]
    assert torch.equal(graph_conditional(kernel, *strided)[0], want[0])


@needs_library
def test_the_switch_and_what_is_not_supported(monkeypatch):
    calls, forward = [], compiled.forward
    engine = radial_conditional.NATIVE._replace(forward=lambda *args: calls.append(1) or forward(*args))
    monkeypatch.setattr(radial_conditional, "NATIVE", engine)
    x, z = torch.randn(4, 2), torch.randn(4, 3, 2)
    for kernel, switch, taken in [
        (Matern52(2), "1", True),
        (Matern52(2), "0", False),
        (RationalQuadratic(2), "1", False),
        (Matern52(2) + RBF(2), "1", True),
        (Matern52(2) + RationalQuadratic(2), "1", False),
        (sum((RBF(2) for _ in range(8)), start=RBF(2)), "1", False),  # of nine parts
    ]:
        calls.clear()
        monkeypatch.setenv("PYRO_NNGP_NATIVE", switch)
        nn_conditional(kernel, x, z)
        assert bool(calls) == taken, (kernel, switch)
    monkeypatch.setattr(compiled, "MAX_NEIGHBORS", 2)
    calls.clear()
    nn_conditional(Matern52(2), x, z)
    assert not calls


def test_columns_of_the_kernel_are_chosen_first():
    case = Case(RBF)
    part = RBF(2, active_dims=[2, 0]).double()
    got = graph_conditional(part, case.x, case.points, case.neighbors)
    want = graph_conditional(general(part), case.x, case.points, case.neighbors)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@needs_library
def test_neighbors_that_are_no_points_are_an_error():
    problem = Case(RBF).problem()
    problem.neighbors[3, 2] = len(problem.points)
    with pytest.raises(IndexError, match="expected neighbors below the number of points, 40"):
        compiled.forward(problem)


@needs_library
def test_lack_of_memory_is_an_error(monkeypatch):
    problem = Case(RBF).problem()
    monkeypatch.setattr(native.library(), "nn_conditional_run", lambda *_: 1)
    with pytest.raises(MemoryError, match="no memory for blocks of points with 7 neighbors"):
        compiled.forward(problem)
