"""Steps of training: batches, gradients, divergence, and runs that resume with the same bits."""

import os
import signal
import subprocess
import sys
import textwrap

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO
from torch import nn
from training import BY_GRADIENTS, SETTINGS, Line, N, assert_same, poison, stop_at, values, vnngp

from pyro_nngp.inference import (
    Checkpoint,
    ConvergenceWarning,
    DivergenceError,
    Schedule,
    fit,
)
from pyro_nngp.inference.checkpoint import load_checkpoint
from pyro_nngp.inference.svi.batches import Minibatches
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import VNNGP
from pyro_nngp.variational import SparseCholesky


def test_sparse_gradients_are_for_the_time_of_training_only():
    model = vnngp()
    seen = []
    fit(model, 2, callback=lambda *_: seen.append(model.q.sparse_grad), **SETTINGS)
    assert seen == [True, True]
    assert model.q.sparse_grad is False


def test_the_loss_has_the_factor_of_its_rows(monkeypatch):
    plain = fit(vnngp(), 1, **BY_GRADIENTS).losses
    monkeypatch.setattr(Minibatches, "weight", 2.0)
    torch.testing.assert_close(fit(vnngp(), 1, **BY_GRADIENTS).losses, 2 * plain)


def test_gradients_are_of_one_batch_and_not_of_what_is_solved_for():
    solved, free, rows = vnngp(), vnngp(), []
    fit(solved, 6, callback=lambda *_: rows.append(solved.q.loc.grad), **SETTINGS)
    assert rows == [None] * 6
    fit(free, 6, callback=lambda *_: rows.append(free.q.loc.grad), **(BY_GRADIENTS | {"batch_size": 3}))
    assert max(len(grad.indices()[0]) for grad in rows[6:]) <= 3 * (1 + 6) < N


def test_full_batches_call_the_model_without_rows():
    calls = []
    line = Line()
    guide = line.guide
    line.guide = lambda *args: (calls.append(args), guide(*args))[1]
    fit(line, 2, batch_size=N, elbo=Trace_ELBO(), progress=False)
    assert set(calls) == {()}


def test_a_run_that_is_extended_early_has_the_bits_of_the_longer_one(tmp_path):
    path, whole, stopped, resumed = tmp_path / "run.pt", vnngp(), vnngp(), vnngp()
    want = fit(whole, 20, **SETTINGS)
    with pytest.raises(RuntimeError, match="power cut"):
        fit(stopped, 12, checkpoint=Checkpoint(path, every=5), callback=stop_at(8), **SETTINGS)
    got = fit(resumed, 20, checkpoint=path, **SETTINGS)
    assert torch.equal(got.losses, want.losses)
    assert_same(values(whole), values(resumed))


def test_a_finished_run_goes_on_at_the_rates_of_the_longer_schedule(tmp_path):
    path, line = tmp_path / "run.pt", Line()

    def rates():
        state = load_checkpoint(path)["run"]["optimizers"]
        return [group["lr"] for optimizer in state for group in optimizer["param_groups"]]

    fit(line, 8, checkpoint=path, **SETTINGS)
    assert rates() == [pytest.approx(0.02 * 0.1**2)]
    with pytest.raises(RuntimeError, match="power cut"):  # after steps 9 and 10, which are before the first milestone
        fit(line, 20, checkpoint=Checkpoint(path, every=10), callback=stop_at(11), **SETTINGS)
    assert rates() == [0.02]
    result = fit(line, 20, checkpoint=path, **SETTINGS)
    assert len(result.losses) == 20
    assert rates() == [pytest.approx(0.02 * 0.1**2)]


@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_a_run_that_stepped_back_keeps_its_lower_rate_on_a_longer_schedule(tmp_path):
    path, line, hits = tmp_path / "run.pt", Line(), []

    def poison(step, loss):
        if step == 4 and not hits:
            hits.append(step)
            with torch.no_grad():
                line.loc.fill_(torch.nan)

    pyro.enable_validation(False)
    try:
        fit(line, 8, checkpoint=Checkpoint(path, 3, step_back=True), callback=poison, **SETTINGS)
    finally:
        pyro.enable_validation(True)
    with pytest.raises(RuntimeError, match="power cut"):  # before the first milestone
        fit(line, 20, checkpoint=Checkpoint(path, every=10), callback=stop_at(11), **SETTINGS)
    rates = [group["lr"] for o in load_checkpoint(path)["run"]["optimizers"] for group in o["param_groups"]]
    assert rates == [pytest.approx(0.5 * 0.02)]


def test_ctrl_c_finishes_the_step_and_loses_nothing(tmp_path):
    path, whole, stopped, resumed = tmp_path / "run.pt", vnngp(), vnngp(), vnngp()
    want = fit(whole, 12, **SETTINGS)
    press = lambda step, loss: os.kill(os.getpid(), signal.SIGINT) if step == 5 else None  # noqa: E731
    with pytest.warns(ConvergenceWarning, match="Ctrl-C after 5 steps"):
        result = fit(stopped, 12, checkpoint=path, callback=press, **SETTINGS)
    assert result.interrupted
    assert len(result.losses) == 5
    got = fit(resumed, 12, checkpoint=path, **SETTINGS)
    assert torch.equal(got.losses, want.losses)


@pytest.mark.slow
def test_a_killed_process_resumes(tmp_path):
    script = textwrap.dedent(
        """
        import os, signal, sys, torch
        from pyro_nngp.inference import Checkpoint, fit
        from pyro_nngp.kernels import Matern52
        from pyro_nngp.likelihoods import Gaussian
        from pyro_nngp.models import VNNGP
        from pyro_nngp.variational import SparseCholesky
        torch.manual_seed(1)
        x = torch.rand(60, 2)
        kernel = Matern52(2, 1.0, 0.5)
        gp = VNNGP(x, torch.sin(5 * x.sum(-1)), kernel, Gaussian(0.1), num_neighbors=6, guide=SparseCholesky(3))
        kill = int(sys.argv[2])
        def callback(step, loss):
            if step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
        settings = {"batch_size": 16, "lr": 0.02, "progress": False, "callback": callback}
        fit(gp, 12, checkpoint=Checkpoint(sys.argv[1], every=3), **settings)
        """
    )
    path = str(tmp_path / "run.pt")
    dead = subprocess.run([sys.executable, "-c", script, path, "8"], check=False)
    assert dead.returncode == -signal.SIGKILL
    assert load_checkpoint(path)["run"]["step"] == 6
    want, resumed = fit(vnngp(), 12, **SETTINGS), fit(vnngp(), 12, checkpoint=path, **SETTINGS)
    assert torch.equal(resumed.losses, want.losses)


@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_divergence_names_step_parameters_and_checkpoint(tmp_path):
    line, path = Line(), tmp_path / "run.pt"
    pyro.enable_validation(False)
    try:
        with pytest.raises(
            DivergenceError, match=r"at step 4; not finite, value or gradient: \['loc'.*checkpoint: .*run.pt"
        ):
            fit(line, 10, checkpoint=path, callback=poison(line, 4), **SETTINGS)
    finally:
        pyro.enable_validation(True)


@pytest.mark.parametrize(("make", "options"), [(Line, SETTINGS | {"elbo": Trace_ELBO()}), (vnngp, BY_GRADIENTS)])
def test_clipping_bounds_the_step(make, options):
    free, clipped = make(), make()
    settings, norms = options | {"batch_size": 16}, []

    def record(model):
        def norm(*_):
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            norms.append(torch.stack([g.norm() for g in gradients]).norm().item())

        return norm

    fit(free, 5, callback=record(free), **settings)
    large, norms[:] = max(norms), []
    pyro.clear_param_store()  # the two are plain modules of one name
    fit(clipped, 5, schedule=Schedule(clip_norm=0.1 * large), callback=record(clipped), **settings)
    assert max(norms) == pytest.approx(0.1 * large, rel=1e-4)


def test_parameters_that_no_loss_can_take_are_named():
    method = vnngp()

    def spoil(*_):
        method.kernel.lengthscale_unconstrained.data.fill_(torch.nan)

    with pytest.raises(DivergenceError, match=r"no loss at step 1; not finite: .*lengthscale"):
        fit(method, 2, solve_every=0, callback=spoil, progress=False)


def unit_kernel():
    return Matern52(2, variance=torch.tensor(1.0), lengthscale=torch.tensor(1.0))


class Deep(nn.Module):
    """A user's own module around a kernel of the package."""

    def __init__(self):
        super().__init__()
        self.kernel = unit_kernel()

    def forward(self, x, z):
        return self.kernel(x, z)


@pytest.mark.filterwarnings("ignore:nn_conditional. variances of f")
def test_a_kernel_inside_a_users_module_moves_once_per_step():
    x, y = vnngp().x, vnngp().y
    plain, inner = (
        VNNGP(x, y, kernel, Gaussian(0.1), num_neighbors=6, guide=SparseCholesky(3))
        for kernel in (unit_kernel(), Deep())
    )
    for model in (plain, inner):
        fit(model, 1, lr=0.02, progress=False)
    moved = inner.kernel.kernel.lengthscale_unconstrained
    assert abs(moved.item()) == pytest.approx(0.02, rel=1e-3)  # a first step of Adam is the rate itself
    torch.testing.assert_close(moved, plain.kernel.lengthscale_unconstrained)


def test_a_function_that_closes_over_a_net_is_an_error_that_names_the_cure():
    net = nn.Linear(2, 1)
    x, y = vnngp().x, vnngp().y

    def built(mean):
        return VNNGP(x, y, Matern52(2, 1.0, 0.5), Gaussian(0.1), num_neighbors=6, mean=mean)

    with pytest.raises(ValueError, match=r"got others of shapes \[\(1,\), \(1, 2\)\], .*Pass the network itself"):
        fit(built(lambda x: net(x)), 2, **SETTINGS)
    before = net.weight.clone()
    fit(built(net), 2, **SETTINGS)
    fit(built(lambda x: pyro.module("net", net)(x)), 2, **SETTINGS)
    assert (net.weight != before).all()
    net.requires_grad_(False)
    fit(built(lambda x: net(x)), 2, **SETTINGS)
