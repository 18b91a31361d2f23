"""The compiled conditional of the Matérn kernel of any smoothness against the general code and the closed forms."""

import pytest
import torch
from oracles.conditionals import Case, general

from pyro_nngp import native
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.kernels import Matern, Matern12, Matern32, Matern52
from pyro_nngp.native import conditional as compiled

F64 = torch.float64
FLAGS = dict.fromkeys(("kernel", "noise", "inputs", "shape"), True)
needs_library = pytest.mark.skipif(native.library() is None, reason="this installation has no compiled code")


def levels():
    return range(native.library().nn_levels() if native.library() else 0)


class OfSmoothness(Case):
    """A case whose kernel has a smoothness as its last input."""

    def __init__(self, smoothness=1.3, **sizes):
        super().__init__(Matern, **sizes)
        self.smoothness = torch.tensor(smoothness, dtype=F64)

    def inputs(self):
        return [*super().inputs(), self.smoothness.clone().requires_grad_()]

    def bound(self, lengthscale, variance, smoothness):
        kernel = super().bound(lengthscale, variance)
        del kernel.smoothness
        kernel.smoothness = smoothness
        return kernel

    def problem(self, dtype=F64, jitter=1e-3):
        return super().problem(dtype, jitter)._replace(shape=self.smoothness)

    def values(self, x, points, lengthscale, variance, noise, smoothness, way=lambda kernel: kernel, jitter=1e-3):
        kernel = way(self.bound(lengthscale, variance, smoothness))
        return graph_conditional(kernel, x, points, self.neighbors, noise, jitter=jitter)

    def run(self, **options):
        inputs = self.inputs()
        w, v = self.values(*inputs, **options)
        return [w.detach(), v.detach(), *torch.autograd.grad((w, v), inputs, (self.grad_w, self.grad_v))]


@needs_library
@pytest.mark.parametrize("smoothness", [0.08, 0.5, 1.0, 2.5, 7.3])
def test_values_and_gradients_are_those_of_the_general_code(smoothness):
    case = OfSmoothness(smoothness)
    torch.testing.assert_close(case.run(), case.run(way=general), rtol=1e-8, atol=1e-9)


@needs_library
@pytest.mark.parametrize(("smoothness", "closed"), [(0.5, Matern12), (1.5, Matern32), (2.5, Matern52)])
def test_half_integers_are_the_closed_forms(smoothness, closed):
    case = OfSmoothness(smoothness)
    found = case.run()
    case.kernel = closed
    inputs = Case.inputs(case)
    want = Case.bound(case, *inputs[2:4])
    w, v = graph_conditional(want, *inputs[:2], case.neighbors, inputs[4], jitter=1e-3)
    grads = torch.autograd.grad((w, v), inputs, (case.grad_w, case.grad_v))
    torch.testing.assert_close(found[:-1], [w.detach(), v.detach(), *grads], rtol=1e-9, atol=1e-10)


@needs_library
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("k", [1, 12, 50])
def test_every_instruction_set_and_size(level, k):
    case = OfSmoothness(b=19, k=k, n=150, d=2)
    problem = case.problem()
    want = case.run(way=general)
    w, v, failed, kept = compiled.forward(problem, level=level)
    found = compiled.backward(problem, kept, case.grad_w, case.grad_v, **FLAGS, level=level)
    assert not failed.any()
    scale, variance = found.log_lengthscale / case.lengthscale, found.log_variance / case.variance
    got = [w, v, found.x, scale, variance, found.shape]
    torch.testing.assert_close(got, [*want[:3], *want[4:6], want[7]], rtol=1e-7, atol=1e-8)


@needs_library
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("d", [1, 2])
def test_derivatives_that_are_kept_give_the_gradient(level, d):
    case = OfSmoothness(b=37, k=12, n=60, d=d)
    problem, grads = case.problem()._replace(noise=None), (case.grad_w, case.grad_v)
    flags = FLAGS | {"noise": False, "inputs": False, "level": level}
    want = compiled.backward(problem, compiled.forward(problem, level=level)[3], *grads, **flags)
    kept = compiled.forward(problem, recording=True, level=level, inputs=False)[3]
    assert len(kept) == 5
    found = compiled.backward(problem, kept, *grads, **flags)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-10)
    fixed = flags | {"shape": False}
    given = compiled.forward(problem, recording=True, level=level, inputs=False, shape=False)[3]
    without = compiled.backward(problem, given, *grads, **fixed)
    assert without.shape is None
    torch.testing.assert_close(without[:2], want[:2], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(compiled.backward(problem, kept, *grads, **fixed)[:2], want[:2], rtol=1e-9, atol=1e-10)


@needs_library
@pytest.mark.parametrize("level", levels())
def test_single_precision(level):
    case = OfSmoothness(b=35, k=18, n=60)
    single = case.problem(torch.float32)
    want = compiled.backward(case.problem(), compiled.forward(case.problem())[3], case.grad_w, case.grad_v, **FLAGS)
    w, v, _, kept = compiled.forward(single, level=level)
    got = compiled.backward(single, kept, case.grad_w.float(), case.grad_v.float(), **FLAGS, level=level)
    torch.testing.assert_close((w.double(), v.double()), compiled.forward(case.problem())[:2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([t.double() for t in got], list(want), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["0", "1"])
def test_sets_of_hyperparameters_and_vmap(way, monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", way)
    case = OfSmoothness(b=12, k=5, n=30, d=2)
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


@pytest.mark.slow
@pytest.mark.parametrize("way", ["0", "1"])
def test_derivatives_by_differences(way, monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", way)
    case = OfSmoothness(b=3, k=3, n=6, d=1)
    case.x[2] += 0.3  # apart from its neighbor, where the second derivative is large
    case.points[1] += 0.2
    torch.autograd.gradcheck(case.values, case.inputs())
    torch.autograd.gradgradcheck(case.values, case.inputs(), atol=1e-4)


@needs_library
def test_indefinite_members_take_the_way_that_adds_jitter():
    case = OfSmoothness(b=20, k=6)
    case.neighbors[5, :3] = 7  # one point three times, with less than no noise
    case.noise[7] = -3e-5
    with pytest.warns(UserWarning, match=r"1 of the covariances were indefinite"):
        got = case.run(jitter=0.0)
    with pytest.warns(UserWarning, match=r"1 of the covariances were indefinite"):
        want = case.run(jitter=0.0, way=general)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
