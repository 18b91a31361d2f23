import itertools
import math
import os
import signal
import subprocess
import sys
import textwrap

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam, pyro_method
from torch import nn
from torch.distributions import constraints

from pyro_nngp.inference import (
    Checkpoint,
    CheckpointError,
    DivergenceError,
    IntegratedELBO,
    RowAdam,
    Schedule,
    Validation,
    fit,
)
from pyro_nngp.inference.checkpoint import load_checkpoint
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import BSGP, VNNGP

N = 60


class Line(PyroModule):
    """Bayesian regression on a batch of rows: enough of a method for the engine."""

    num_data = N

    def __init__(self):
        super().__init__()
        self.x = torch.linspace(-1, 1, N)
        self.y = 2 * self.x + 0.1 * torch.randn(N)
        self.loc = nn.Parameter(torch.tensor(0.0))
        self.scale = PyroParam(torch.tensor(0.5), constraints.positive)

    @pyro_method
    def model(self, idx=None):
        slope = pyro.sample("slope", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", N, subsample=idx) as rows:
            pyro.sample("y", dist.Normal(slope * self.x[rows], 0.1), obs=self.y[rows])

    @pyro_method
    def guide(self, idx=None):
        pyro.sample("slope", dist.Normal(self.loc, self.scale))


def gp(dtype=torch.float32):
    torch.manual_seed(1)
    x = torch.rand(N, 2, dtype=dtype)
    return VNNGP(x, torch.sin(5 * x.sum(-1)), Matern52(2, 1.0, 0.5), Gaussian(0.1), num_neighbors=6, guide_neighbors=3)


SETTINGS = {"batch_size": 16, "lr": 0.02, "progress": False}
BY_GRADIENTS = SETTINGS | {"solve_every": 0, "refresh_every": 0}


def values(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(one, two):
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def test_fit_is_ten_lines_of_pyro_and_torch():
    fitted, by_hand = gp(), gp()
    result = fit(fitted, 25, seed=3, **BY_GRADIENTS)

    elbo, rows = IntegratedELBO(), torch.Generator().manual_seed(3)
    elbo.loss(by_hand.model, by_hand.guide)  # touches every parameter once
    by_hand.local.sparse_grad = True
    sparse = [by_hand.local.loc, by_hand.local.log_scale, by_hand.local.weights]
    dense = [p for p in by_hand.parameters() if all(p is not q for q in sparse)]
    optims = [torch.optim.Adam(dense, 0.02), RowAdam(sparse, 0.02)]
    schedules = [torch.optim.lr_scheduler.MultiStepLR(o, [19, 22], 0.1) for o in optims]
    losses, epoch = [], []
    torch.randint(2, (1,), generator=rows)  # so that rows do not follow a random ordering of the same seed
    for _ in range(25):
        epoch = epoch or list(torch.randperm(N, generator=rows)[:48].split(16))
        loss = elbo.differentiable_loss(by_hand.model, by_hand.guide, epoch.pop(0)) / N
        loss.backward()
        losses.append(loss.item())
        for step in (*optims, *schedules):
            step.step()
        by_hand.zero_grad(set_to_none=True)
    assert result.losses.tolist() == pytest.approx(losses, rel=1e-6)
    assert_same(values(fitted), values(by_hand))


def test_a_pair_of_plain_functions_trains():
    x = torch.linspace(-1, 1, N)

    def model(idx=None):
        slope = pyro.sample("slope", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", N, subsample=idx) as rows:
            pyro.sample("y", dist.Normal(slope * x[rows], 0.1), obs=2 * x[rows])

    def guide(idx=None):
        scale = pyro.param("scale", torch.tensor(0.1), constraint=constraints.positive)
        pyro.sample("slope", dist.Normal(pyro.param("loc", torch.tensor(0.0)), scale))

    fit((model, guide), 400, num_data=N, elbo=TraceMeanField_ELBO(), lr=0.05, batch_size=20, progress=False)
    assert abs(pyro.param("loc") - 2) < 0.1


def test_the_random_state_outside_is_left_alone():
    line = Line()
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    one = fit(line, 5, seed=1, **SETTINGS).losses
    assert torch.equal(torch.rand(3), want)
    with pytest.raises(ValueError, match="clear_param_store"):  # two plain modules of Pyro share their names
        fit(Line(), 5, seed=1, **SETTINGS)
    pyro.clear_param_store()
    assert torch.equal(fit(Line(), 5, seed=1, **SETTINGS).losses[:1], one[:1]) is False  # other data: other loss


def test_sparse_gradients_are_for_the_time_of_training_only():
    model = gp()
    seen = []
    fit(model, 2, callback=lambda *_: seen.append(model.local.sparse_grad), **SETTINGS)
    assert seen == [True, True]
    assert model.local.sparse_grad is False


def test_gradients_are_of_one_batch_and_not_of_what_is_solved_for():
    solved, free, rows = gp(), gp(), []
    fit(solved, 6, callback=lambda *_: rows.append(solved.local.loc.grad), **SETTINGS)
    assert rows == [None] * 6
    fit(free, 6, callback=lambda *_: rows.append(free.local.loc.grad), **(BY_GRADIENTS | {"batch_size": 3}))
    assert max(len(grad.indices()[0]) for grad in rows[6:]) <= 3 * (1 + 6) < N


def test_full_batches_call_the_model_without_rows():
    calls = []
    line = Line()
    guide = line.guide
    line.guide = lambda *args: (calls.append(args), guide(*args))[1]
    fit(line, 2, batch_size=N, elbo=Trace_ELBO(), progress=False)
    assert set(calls) == {()}


def stop_at(step):
    def callback(now, loss):
        if now == step:
            raise RuntimeError("power cut")

    return callback


@pytest.mark.parametrize("solve_every", [0, 4])
@pytest.mark.parametrize("cut", [pytest.param(1, marks=pytest.mark.slow), 10, pytest.param(17, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same_bits(tmp_path, cut, solve_every):
    path = tmp_path / "run.pt"
    settings = SETTINGS | {"refresh_every": 7, "solve_every": solve_every, "seed": 2}
    whole, stopped, resumed = gp(), gp(), gp()
    want = fit(whole, 20, **settings)
    with pytest.raises(RuntimeError, match="power cut"):
        fit(stopped, 20, checkpoint=Checkpoint(path, every=5), callback=stop_at(cut), **settings)
    seen = []
    got = fit(resumed, 20, checkpoint=path, callback=lambda step, loss: seen.append(step), **settings)
    assert seen[0] == (cut - 1) // 5 * 5 + 1
    assert torch.equal(got.losses, want.losses)
    assert_same(values(whole), values(resumed))


def test_a_run_that_is_extended_early_has_the_bits_of_the_longer_one(tmp_path):
    path, whole, stopped, resumed = tmp_path / "run.pt", gp(), gp(), gp()
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


def test_best_state_and_scores_survive_a_stop(tmp_path):
    file = Checkpoint(tmp_path / "run.pt", every=4)
    scores = [5.0, 3.0, 4.0, 6.0, 7.0, 3.5, 9.0, 8.0]

    def validation(scores):
        seen = iter(scores)
        return Validation(lambda: next(seen), every=2)

    whole, stopped, resumed = gp(), gp(), gp()
    want = fit(whole, 16, validation=validation(scores), **SETTINGS)
    with pytest.raises(RuntimeError, match="power cut"):
        fit(stopped, 16, validation=validation(scores), checkpoint=file, callback=stop_at(8), **SETTINGS)
    got = fit(resumed, 16, validation=validation(scores[2:]), checkpoint=file, **SETTINGS)
    assert got.scores == want.scores == list(zip(range(2, 17, 2), scores, strict=True))
    assert_same(values(whole), values(resumed))


def test_early_stopping_keeps_the_best_state():
    line, states, scores = Line(), [], iter([3.0, 2.0, 2.5, 2.1, 1.0])

    def validate():
        states.append(values(line))
        return next(scores)

    result = fit(line, 100, validation=Validation(validate, 3, 2), elbo=Trace_ELBO(), **SETTINGS)
    assert [step for step, _ in result.scores] == [3, 6, 9, 12]
    assert result.interrupted
    assert_same(values(line), states[1])


def test_a_run_that_patience_ended_stays_ended(tmp_path):
    path, line, scores = tmp_path / "run.pt", Line(), iter([1.0, 2.0, 3.0])
    settings = SETTINGS | {"elbo": Trace_ELBO(), "checkpoint": path}
    first = fit(line, 100, validation=Validation(lambda: next(scores), 3, 2), **settings)
    again = fit(line, 100, validation=Validation(lambda: pytest.fail("validated again"), 3, 2), **settings)
    assert torch.equal(first.losses, again.losses)
    assert first.interrupted
    assert again.interrupted


def test_ctrl_c_leaves_a_solution_for_the_last_parameters():
    model = gp(torch.float64)
    press = lambda step, loss: os.kill(os.getpid(), signal.SIGINT) if step == 5 else None  # noqa: E731
    fit(model, 12, callback=press, **SETTINGS)
    left = values(model)["local.loc"]
    model.solve()
    torch.testing.assert_close(values(model)["local.loc"], left, rtol=1e-6, atol=1e-6)


def test_ctrl_c_finishes_the_step_and_loses_nothing(tmp_path):
    path, whole, stopped, resumed = tmp_path / "run.pt", gp(), gp(), gp()
    want = fit(whole, 12, **SETTINGS)
    press = lambda step, loss: os.kill(os.getpid(), signal.SIGINT) if step == 5 else None  # noqa: E731
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
        from pyro_nngp.models import BSGP, VNNGP
        torch.manual_seed(1)
        x = torch.rand(60, 2)
        kernel = Matern52(2, 1.0, 0.5)
        gp = VNNGP(x, torch.sin(5 * x.sum(-1)), kernel, Gaussian(0.1), num_neighbors=6, guide_neighbors=3)
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
    want, resumed = fit(gp(), 12, **SETTINGS), fit(gp(), 12, checkpoint=path, **SETTINGS)
    assert torch.equal(resumed.losses, want.losses)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    fit(gp(), 3, checkpoint=path, **SETTINGS)
    with pytest.raises(CheckpointError, match=r"a checkpoint of this run, got one with num_steps = 3 and not 2\. Name"):
        fit(gp(), 2, checkpoint=path, **SETTINGS)
    with pytest.raises(CheckpointError, match=r"got one with seed = 0 and not 1\. Name another file"):
        fit(gp(), 4, checkpoint=path, seed=1, **SETTINGS)
    with pytest.raises(CheckpointError, match=r"with solve_every = None and not 0, solving = True and not False"):
        fit(gp(), 3, checkpoint=path, solve_every=0, **SETTINGS)
    with pytest.raises(CheckpointError, match=r"got one with .*model = .*VNNGP and not .*Line"):
        fit(Line(), 3, checkpoint=path, **SETTINGS)


def poison(model, at):
    def callback(step, loss):
        if step == at:
            with torch.no_grad():
                model.loc.fill_(torch.nan)

    return callback


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


@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_stepping_back_halves_the_rate_and_goes_on(tmp_path):
    line, path, hits = Line(), tmp_path / "run.pt", []

    def callback(step, loss):
        if step == 4 and not hits:
            hits.append(step)
            poison(line, 4)(step, loss)

    pyro.enable_validation(False)
    try:
        result = fit(line, 10, checkpoint=Checkpoint(path, 3, step_back=True), callback=callback, **SETTINGS)
    finally:
        pyro.enable_validation(True)
    assert len(result.losses) == 10
    rates = [group["lr"] for o in load_checkpoint(path)["run"]["optimizers"] for group in o["param_groups"]]
    assert rates == pytest.approx([0.5 * 0.02 * 0.1**2] * len(rates))


@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_stepping_back_twice_quarters_the_rate(tmp_path):
    line, path, hits = Line(), tmp_path / "run.pt", []

    def callback(step, loss):
        if step in (4, 8) and step not in hits:
            hits.append(step)
            poison(line, step)(step, loss)

    pyro.enable_validation(False)
    try:
        settings = SETTINGS | {"schedule": Schedule(()), "checkpoint": Checkpoint(path, 3, step_back=True)}
        fit(line, 10, callback=callback, **settings)
    finally:
        pyro.enable_validation(True)
    rates = [group["lr"] for o in load_checkpoint(path)["run"]["optimizers"] for group in o["param_groups"]]
    assert rates == pytest.approx([0.25 * 0.02] * len(rates))


def test_closed_form_updates_take_the_place_of_gradients():
    model, seen = gp(torch.float64), []
    fit(model, 5, solve_every=2, callback=lambda step, _: seen.append(values(model)), **SETTINGS)
    moved = [not torch.equal(a["local.loc"], b["local.loc"]) for a, b in itertools.pairwise(seen)]
    assert moved == [True, False, True, True]  # solved after steps 2, 4 and the last
    assert not torch.equal(seen[0]["local.weights"], seen[1]["local.weights"])  # the factor is solved for, too
    assert torch.equal(seen[1]["local.weights"], seen[2]["local.weights"])
    model.solve()
    torch.testing.assert_close(values(model)["local.loc"], seen[-1]["local.loc"], rtol=1e-3, atol=1e-3)


def test_methods_that_can_solve_do_so_once_per_epoch():
    model, solved = gp(), []
    solve = model.solve
    model.solve = lambda: (solved.append(1), solve())
    fit(model, 45, **SETTINGS)
    assert len(solved) == 4  # at the start, after steps 20 and 40, at the end


def test_clipping_bounds_the_step():
    free, clipped = Line(), Line()
    settings = {"batch_size": 16, "lr": 0.02, "progress": False, "elbo": Trace_ELBO()}
    norms = []

    def record(model):
        return lambda *_: norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())

    fit(free, 5, callback=record(free), **settings)
    large, norms[:] = max(norms), []
    pyro.clear_param_store()  # the two are plain modules of one name
    fit(clipped, 5, schedule=Schedule(clip_norm=0.1 * large), callback=record(clipped), **settings)
    assert max(norms) == pytest.approx(0.1 * large, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"refresh_every": 3}, r"expected method to have refresh_neighbors\(\)"),
        ({"solve_every": 3}, r"expected method to be able to solve\(\)"),
        ({"solve_every": -1}, r"expected solve_every >= 0, got -1. .* 0 is never"),
        ({"solve_every": 1.5}, r"expected solve_every to be an int, got 1.5"),
        ({"refresh_every": -1}, r"expected refresh_every >= 0, got -1"),
        ({"lr": 0.0}, r"expected lr to be finite and > 0, got 0.0"),
        ({"lr": float("nan")}, r"expected lr to be finite and > 0, got nan"),
        ({"tolerance": -1.0}, r"expected tolerance to be finite and > 0, got -1.0"),
        ({"max_seconds": 0}, r"expected max_seconds to be finite and > 0, got 0"),
        ({"optimizer": "sgd"}, r"expected optimizer to be 'adam' or 'lbfgs', got 'sgd'"),
        ({"schedule": 0.1}, r"expected schedule to be a Schedule, got float"),
        ({"validation": print}, r"expected validation to be a Validation, got builtin_function_or_method"),
        ({"checkpoint": 3}, r"Checkpoint: expected path to be a path, got int"),
        ({"seed": 0.5}, r"expected seed to be an int, got 0.5"),
        ({"seed": 2**64}, r"expected seed in -2\*\*63..2\*\*64-1, got 18446744073709551616"),
        ({"device": "gpu"}, r"expected device to be a device of torch, got 'gpu'"),
        ({"callback": 3}, r"expected callback to be callable, got int"),
        ({"elbo": Trace_ELBO}, r"expected elbo to be a ELBO, got"),
        ({"batch": 3}, r"unexpected keyword argument 'batch'"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fit(Line(), 3, **settings)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Schedule(clip_norm=-1), r"Schedule: expected clip_norm to be finite and > 0, got -1"),
        (lambda: Schedule(clip_norm=math.nan), r"expected clip_norm to be finite and > 0, got nan"),
        (lambda: Schedule(local_lr=0), r"expected local_lr to be finite and > 0, got 0"),
        (lambda: Schedule(decay=-1), r"expected decay to be finite and > 0 and <= 1, got -1"),
        (lambda: Schedule(decay=1.5), r"expected decay to be finite and > 0 and <= 1, got 1.5"),
        (lambda: Schedule(milestones=(0.5, 1.5)), r"expected milestones to be in \(0, 1\), got \(0.5, 1.5\)"),
        (lambda: Checkpoint("run.pt", 0), r"Checkpoint: expected every >= 1, got 0"),
        (lambda: Validation(3), r"Validation: expected score to be callable, got int"),
        (lambda: Validation(float, 2.5), r"Validation: expected every to be an int, got 2.5"),
        (lambda: Validation(float, 1, True), r"Validation: expected patience to be an int, got True"),
    ],
)
def test_wrong_groups_of_settings(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()


def test_pairs_need_the_number_of_data_points_and_parameters():
    with pytest.raises(TypeError, match=r"expected num_data to be an int, got None"):
        fit((lambda: None, lambda: None), 3)
    with pytest.raises(ValueError, match=r"expected method to have parameters to train"):
        fit((lambda: None, lambda: None), 3, num_data=3)


def test_progress_bar_shows_the_loss(capsys):
    fit(Line(), 40, batch_size=16)
    assert "loss=" in capsys.readouterr().err


def test_an_autoguide_trains_on_minibatches():
    x = torch.rand(40, 2)
    sparse = BSGP(x, x.sum(-1), Matern52(2, 1.0, 0.5), Gaussian(0.1), inducing=5)
    pair = (sparse.model, AutoNormal(sparse.model))
    result = fit(pair, 3, batch_size=10, num_data=40, elbo=Trace_ELBO(), progress=False)
    assert result.losses.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, r"expected num_steps >= 1, got 0"),
        ({"num_steps": 2, "batch_size": 0}, r"expected batch_size >= 1, got 0"),
    ],
)
def test_counts_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit(gp(), progress=False, **arguments)


def test_a_model_alone_is_refused():
    with pytest.raises(TypeError, match=r"expected method with model and guide, got method"):
        fit(gp().model, 3)


def test_a_pair_is_of_functions():
    with pytest.raises(TypeError, match=r"expected method to be a pair of functions .*, got \(method, int\)"):
        fit((gp().model, 3), 3, num_data=40)


@pytest.mark.parametrize(
    ("off", "message"),
    [
        (torch.no_grad, r"expected gradients to be on, got torch.no_grad\(\). Call fit outside of it"),
        (torch.inference_mode, r"expected gradients to be on, got torch.inference_mode\(\). Call fit outside of it"),
    ],
)
def test_gradients_that_are_switched_off_are_an_error(off, message):
    method = gp()
    with off(), pytest.raises(RuntimeError, match=message):
        fit(method, 3, **SETTINGS)
    fit(method, 3, **SETTINGS)


def test_a_method_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        method = Line()
        with pytest.raises(RuntimeError, match=r"VNNGP: expected gradients to be possible, .* build it outside"):
            gp()
    with pytest.raises(RuntimeError, match=r"expected parameters that can have gradients, .* Build the method outside"):
        fit(method, 3, **SETTINGS)


def test_a_prior_without_data_is_refused():
    prior = VNNGP(torch.rand(N, 2), None, Matern52(2), num_neighbors=6)
    with pytest.raises(ValueError, match=r"expected method to have a likelihood, got a VNNGP without one"):
        fit(prior, 3, **SETTINGS)


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    one, other = gp(), gp()
    other.y.neg_()
    fit(one, 2, checkpoint=tmp_path / "run.pt", progress=False)
    with pytest.raises(CheckpointError, match="expected a checkpoint of this run"):
        fit(other, 2, checkpoint=tmp_path / "run.pt", progress=False)
    assert not torch.equal(other.y, one.y)


def test_a_pair_is_guarded_and_saved_like_its_method(tmp_path):
    settings = {"num_data": N, "checkpoint": tmp_path / "run.pt"} | BY_GRADIENTS
    one, other = gp(), gp()
    fit((one.model, one.guide), 2, **settings)
    assert len(load_checkpoint(tmp_path / "run.pt")["run"]["values"]["modules"]) == 1
    other.y.neg_()
    with pytest.raises(CheckpointError, match="expected a checkpoint of this run"):
        fit((other.model, AutoNormal(other.model)), 2, **settings)
    with pytest.raises(CheckpointError, match="expected a checkpoint of this run"):
        fit((other.model, other.guide), 2, **settings)


def test_parameters_that_no_loss_can_take_are_named():
    method = gp()

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


def test_a_kernel_inside_a_users_module_moves_once_per_step():
    x, y = gp().x, gp().y
    plain, inner = (
        VNNGP(x, y, kernel, Gaussian(0.1), num_neighbors=6, guide_neighbors=3) for kernel in (unit_kernel(), Deep())
    )
    for model in (plain, inner):
        fit(model, 1, lr=0.02, progress=False)
    moved = inner.kernel.kernel.lengthscale_unconstrained
    assert abs(moved.item()) == pytest.approx(0.02, rel=1e-3)  # a first step of Adam is the rate itself
    torch.testing.assert_close(moved, plain.kernel.lengthscale_unconstrained)


def test_a_function_that_closes_over_a_net_is_an_error_that_names_the_cure():
    net = nn.Linear(2, 1)
    x, y = gp().x, gp().y

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
