"""The Triton conditional against the general code: on a GPU with ``-m gpu``, elsewhere in Triton's interpreter."""

import copy

import pytest
import torch
from oracles.conditionals import Case, general

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.gpu import conditional as on_gpu
from pyro_nngp.gpu import installed
from pyro_nngp.inference import fit
from pyro_nngp.kernels import RBF, Matern, Matern12, Matern32, Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.linalg import NotPositiveDefiniteError, report_nuggets
from pyro_nngp.linalg.nuggets import quiet_nuggets
from pyro_nngp.models import VNNGP
from pyro_nngp.native.conditional import Problem, Wanted
from pyro_nngp.variational import MeanField

if not installed():
    pytest.skip("Triton is not installed; torch for CUDA on Linux brings it", allow_module_level=True)

F64 = torch.float64
EVERY = Wanted()
KERNELS = [RBF, Matern12, Matern32, Matern52]
PROFILES = [kernel.profile for kernel in (*KERNELS, Matern)]
THERE = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU instead")
INTERPRETED = pytest.param("cpu", marks=[THERE, pytest.mark.slow])  # half a second for each target


def let_ranges_take_arguments(monkeypatch):
    """Triton 3.6's interpreter makes an index of an array of one number, which NumPy refuses from 2.4 on."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(params=[INTERPRETED, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device whose conditionals the kernels compute; in the interpreter with small tiles, which take less time."""
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "0")
    monkeypatch.setattr(on_gpu, "FEWEST_TARGETS", 1)
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "cpu":
        monkeypatch.setattr(on_gpu, "supported", lambda problem: problem.profile in PROFILES)
        monkeypatch.setattr(on_gpu, "tiles", lambda k: on_gpu.Tiles(4, 8, 1, 1))
        let_ranges_take_arguments(monkeypatch)
    yield request.param
    report_nuggets()


@pytest.fixture
def given(monkeypatch, device):
    """The problems that the kernels were asked for."""
    problems, supported = [], on_gpu.supported
    monkeypatch.setattr(on_gpu, "supported", lambda problem: problems.append(problem) or supported(problem))
    return problems


def moved(case, device):
    for name, value in vars(case).items():
        if isinstance(value, torch.Tensor):
            setattr(case, name, value.to(device))
    return case


def single_set(device, k=6, dtype=F64, b=2, spread=1.0):
    x, points = torch.rand(b, 2, dtype=dtype), spread * torch.rand(2 * k, 2, dtype=dtype)
    neighbors = torch.rand(b, 2 * k).argsort(-1)[:, :k]
    scale, variance = torch.full((2,), 0.5, dtype=dtype), torch.tensor(1.7, dtype=dtype)
    tensors = [value.to(device) for value in (x, points, scale, variance)]
    return Problem(*tensors, None, neighbors.to(device), Matern32.profile, 1e-6)


@pytest.mark.parametrize(("kernel", "smoothness"), [*((kernel, None) for kernel in KERNELS), (Matern, 0.8)])
def test_values_and_gradients_are_those_of_the_general_code(kernel, smoothness, device):
    case = moved(Case(kernel, b=5, d=2, smoothness=smoothness), device)
    torch.testing.assert_close(case.run(), case.run(kernel=general), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("k", [1, 20, 117])
def test_every_size(k, device, monkeypatch):
    """The real tiles, in the interpreter too."""
    monkeypatch.undo()
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "0")
    let_ranges_take_arguments(monkeypatch)
    monkeypatch.setattr(on_gpu, "supported", lambda problem: True)
    case = moved(Case(Matern32, b=3, k=k, n=150, d=3), device)
    torch.testing.assert_close(case.run(), case.run(kernel=general), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("kernel", "smoothness"), [(Matern52, None), (Matern, 1.7)])
def test_single_precision(kernel, smoothness, device):
    case = moved(Case(kernel, b=5, k=18, n=60, smoothness=smoothness), device)
    wanted = EVERY._replace(smoothness=smoothness is not None)
    double, single = case.problem(), case.problem(torch.float32)
    want = on_gpu.forward(double)
    got = on_gpu.forward(single)
    torch.testing.assert_close([t.double() for t in got[:2]], list(want[:2]), rtol=1e-4, atol=1e-5)
    grads = on_gpu.backward(double, want[3], case.grad_w, case.grad_v, wanted)
    found = on_gpu.backward(single, got[3], case.grad_w.float(), case.grad_v.float(), wanted)
    there = [(t.double(), want) for t, want in zip(found, grads, strict=True) if t is not None]
    assert len(there) > 2
    for grad, want in there:
        torch.testing.assert_close(grad, want, rtol=1e-3, atol=1e-3)


def test_a_conditional_without_noise_is_computed_in_float64(device, given):
    problem = single_set(device, dtype=torch.float32)
    with torch.no_grad():
        w, var = graph_conditional(Matern52(2).to(device), problem.x, problem.points, problem.neighbors)
    assert (w.dtype, var.dtype) == (torch.float32, torch.float32)
    assert given[-1].x.dtype == F64


def test_factors_that_are_kept_change_no_bit(device, monkeypatch):
    problem = single_set(device)
    grad_w, grad_v = torch.randn(2, 6, dtype=F64, device=device), torch.randn(2, dtype=F64, device=device)
    *values, _, kept = on_gpu.forward(problem, EVERY)
    want = on_gpu.backward(problem, kept, grad_w, grad_v, EVERY)
    monkeypatch.setattr(on_gpu, "FACTORS_BYTES", 0)
    *again, _, alone = on_gpu.forward(problem, EVERY)
    assert (len(kept), len(alone)) == (3, 2)
    found = on_gpu.backward(problem, alone, grad_w, grad_v, EVERY)
    assert all(torch.equal(a, b) for a, b in zip([*values, *want], [*again, *found], strict=True) if a is not None)


@pytest.mark.parametrize("smoothness", [None, [0.8, 2.3]])
@pytest.mark.parametrize("own_noise", [False, True])
def test_sets_of_hyperparameters_are_computed_in_one_launch(own_noise, smoothness, device, given):
    case = moved(Case(Matern52 if smoothness is None else Matern, b=3, k=3, d=2), device)
    lengthscale = torch.tensor([[0.5, 1.0], [0.7, 0.4]], dtype=F64, device=device, requires_grad=True)
    variance = torch.tensor([1.7, 0.6], dtype=F64, device=device, requires_grad=True)
    of_kernel = [lengthscale, variance]
    if smoothness is not None:
        of_kernel.append(torch.tensor(smoothness, dtype=F64, device=device, requires_grad=True))
    noise = case.noise.expand(2, -1).clone() if own_noise else case.noise.clone()
    if own_noise:
        noise[1] *= 3
    noise.requires_grad_()

    def run(kernel):
        w, v = graph_conditional(kernel, case.x, case.points, case.neighbors, noise, jitter=1e-3)
        return [w, v, *torch.autograd.grad(w.sin().sum() + v.sum(), [*of_kernel, noise])]

    found = run(case.bound(*of_kernel))
    assert [problem.sets for problem in given] == [(2,)]
    each = []
    for i in range(2):
        kernel, own = general(case.bound(*(value[i] for value in of_kernel))), noise[i] if own_noise else noise
        each.append(graph_conditional(kernel, case.x, case.points, case.neighbors, own, jitter=1e-3))
    w, v = map(torch.stack, zip(*each, strict=True))
    want = [w, v, *torch.autograd.grad(w.sin().sum() + v.sum(), [*of_kernel, noise])]
    torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_covariances_that_are_indefinite_get_the_nugget_of_the_cpu(dtype, device):
    """Of two targets one has coinciding neighbors, and no jitter; the gradient has the nugget too."""
    problem = single_set(device, dtype=dtype)
    neighbors = problem.neighbors.clone()
    neighbors[1, 1:] = neighbors[1, :1]
    problem = problem._replace(neighbors=neighbors, jitter=0.0)
    w, var, failed, kept = on_gpu.forward(problem, EVERY)
    assert failed is None
    extra = kept[0]
    assert extra[0] == 0
    assert 0 < extra[1] <= 1.01e-2 * problem.variance
    deliberate = problem._replace(noise=extra[:, None].expand_as(w).contiguous())
    want = on_gpu.forward(deliberate)
    torch.testing.assert_close(w, want[0], rtol=1e-6, atol=1e-6)
    grad_w, grad_v = torch.ones_like(w), torch.ones_like(var)
    found = on_gpu.backward(problem, kept, grad_w, grad_v, EVERY)
    again = on_gpu.backward(deliberate, want[3], grad_w, grad_v, EVERY)
    torch.testing.assert_close(found.log_lengthscale, again.log_lengthscale)
    torch.testing.assert_close(found.log_variance, again.log_variance)
    with pytest.warns(UserWarning, match="1 of the covariances were indefinite"):
        report_nuggets()
    report_nuggets()  # once
    with quiet_nuggets():
        on_gpu.forward(problem)
    report_nuggets()


def test_nuggets_do_not_depend_on_units_where_neighbors_are_missing(device):
    problem = single_set(device)
    neighbors = problem.neighbors.clone()
    neighbors[:, 1:] = neighbors[:, :1]
    neighbors[:, neighbors.shape[1] // 2 :] = -1
    problem = problem._replace(neighbors=neighbors, noise=None, jitter=0.0)
    extra = on_gpu.forward(problem, EVERY)[3][0]
    small = on_gpu.forward(problem._replace(variance=problem.variance * 2**-20), EVERY)[3][0]
    assert (extra > 0).all()
    torch.testing.assert_close(small * 2**20, extra, rtol=1e-6, atol=0)
    with pytest.warns(UserWarning, match="covariances were indefinite"):
        report_nuggets()


def test_what_no_nugget_repairs_is_nan_and_raises_when_reported(device):
    problem = single_set(device)
    lengthscale = torch.full_like(problem.lengthscale, torch.nan)
    w, var, _, kept = on_gpu.forward(problem._replace(lengthscale=lengthscale), EVERY)
    assert w.isnan().all()
    assert var.isnan().all()
    found = on_gpu.backward(problem._replace(lengthscale=lengthscale), kept, torch.ones_like(w), var, EVERY)
    assert found.log_variance.isnan()
    with pytest.raises(NotPositiveDefiniteError, match="some of 2 of the covariances of size 6"):
        report_nuggets()
    report_nuggets()


def test_only_what_is_asked_for(device):
    problem = single_set(device)
    w, var, _, kept = on_gpu.forward(problem)
    whole = on_gpu.backward(problem, kept, w, var, EVERY)
    found = on_gpu.backward(problem, kept, w, var, Wanted(False, True, False))
    assert found.log_lengthscale is found.log_variance is found.x is found.z is None
    assert torch.equal(found.noise, whole.noise)
    found = on_gpu.backward(problem, kept, w, var, Wanted(True, False, False))
    assert torch.equal(found.log_lengthscale, whole.log_lengthscale)
    assert found.noise is found.x is None


def test_hyperparameters_on_the_cpu_are_moved(device):
    """As in a program whose kernel has a plain number among its arguments."""
    case = moved(Case(Matern, b=3, k=3, d=2, smoothness=0.8), device)
    there = case.run()
    case.lengthscale, case.variance, case.smoothness = (
        value.cpu() for value in (case.lengthscale, case.variance, case.smoothness)
    )
    torch.testing.assert_close(case.run(), there, check_device=False)


def test_second_derivatives(device):
    case = moved(Case(Matern52, b=3, k=3, d=1), device)
    x, points, lengthscale, variance, noise = case.inputs()

    def run(lengthscale, variance):
        w, v = graph_conditional(case.bound(lengthscale, variance), x, points, case.neighbors, noise, jitter=1e-2)
        return w.sum() + v.sum()

    assert torch.autograd.gradgradcheck(run, (lengthscale, variance), fast_mode=True, nondet_tol=1e-8)


@pytest.fixture
def few(device, monkeypatch):
    """Only small problems go to the interpreter: those of a step."""
    if device == "cpu":
        monkeypatch.setattr(on_gpu, "supported", lambda problem: problem.neighbors.shape == (4, 3))
    return device


def test_a_method_trains_as_with_torch(few, monkeypatch):
    x = torch.rand(12, 1, dtype=F64, device=few)
    y = torch.sin(6 * x[:, 0])
    kernel = Matern52(1, lengthscale=0.2).to(x)
    gp = VNNGP(x, y, kernel, Gaussian(0.1).to(x), num_neighbors=3, guide=MeanField())
    other = copy.deepcopy(gp)
    fit(gp, 2, batch_size=4, progress=False, solve_every=0, refresh_every=0)
    monkeypatch.setattr(on_gpu, "supported", lambda problem: False)
    fit(other, 2, batch_size=4, progress=False, solve_every=0, refresh_every=0)
    torch.testing.assert_close(dict(gp.named_parameters()), dict(other.named_parameters()), rtol=1e-6, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_fit_reports_what_was_added_on_the_device(device):
    x = torch.zeros(12, 1, device=device)  # one place
    gp = VNNGP(x, torch.randn(12, device=device), RBF(1), Gaussian(0.1), num_neighbors=3, jitter=0.0, guide=MeanField())
    with pytest.warns(UserWarning, match="of the covariances were indefinite"):
        fit(gp, 1, batch_size=4, progress=False, solve_every=0, refresh_every=0)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_no_step_waits_for_the_device(device):
    case = moved(Case(Matern52), device)
    case.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
