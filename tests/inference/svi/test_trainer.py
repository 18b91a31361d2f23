"""Decisions of training: the optimizer, rounds, refreshes, solutions, validation, steps back, convergence."""

import itertools
import math
import os
import re
import signal

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import slow_except
from pyro.infer import Trace_ELBO
from pyro.nn import PyroModule, PyroSample, pyro_method
from torch import nn
from training import SETTINGS, Line, assert_same, bumps, poison, stop_at, values, vecchia, vnngp

from pyro_nngp.inference import Checkpoint, ConvergenceWarning, Schedule, Validation, fit
from pyro_nngp.inference.checkpoint import load_checkpoint
from pyro_nngp.inference.svi import final_checks
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, StudentT
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.models import LMC, LOO, SVGP, VNNGP, Vecchia
from pyro_nngp.variational import MeanField


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_generators_of_other_devices_are_left_alone(monkeypatch, optimizer):
    def seed_all(seed):
        pytest.fail("torch.manual_seed seeds those of all devices")

    gp = vecchia(60)
    monkeypatch.setattr(torch, "manual_seed", seed_all)
    fit(gp, 2, optimizer=optimizer, progress=False)


@pytest.mark.filterwarnings("error")
def test_without_a_number_of_steps_hyperparameters_reach_the_optimum_of_all_data():
    gp = vecchia()
    result = fit(gp, progress=False)
    assert result.converged
    assert result.optimizer == "lbfgs"
    assert result.refreshes >= 1
    assert result.batch_size == 200
    assert 0.008 < gp.likelihood.variance < 0.013
    loss = -gp.log_prob() / 200
    torch.autograd.backward(-gp_loss(gp) / 200)
    gradients = torch.cat([p.grad.reshape(-1) for p in gp.parameters()])
    assert gradients.abs().max() < 0.01
    assert loss.item() == pytest.approx(result.loss, abs=2e-3)  # neighbors were found again after the last step


def gp_loss(gp):
    from pyro import poutine

    return poutine.trace(gp.model).get_trace().log_prob_sum()


def test_a_subsample_leads_to_the_optimum_of_all_data():
    whole, part = vecchia(1600), vecchia(1600)
    everything = fit(whole, batch_size=1600, progress=False)
    result = fit(part, batch_size=1000, progress=False)
    assert (everything.batch_size, result.batch_size) == (1600, 1000)
    assert (whole.log_prob() - part.log_prob()) / 1600 < 0.02


def test_the_same_seed_gives_the_same_bits_and_leaves_the_random_state_alone():
    one, two = vecchia(), vecchia()
    torch.manual_seed(5)
    fit(one, seed=3, progress=False)
    torch.manual_seed(5)
    want = torch.rand(2)
    torch.manual_seed(5)
    fit(two, seed=3, progress=False)
    assert torch.equal(torch.rand(2), want)
    assert_same(values(one), values(two))


class Slope(PyroModule):
    """Bayesian regression on a batch of rows, with as little work per step as can be."""

    num_data = 60

    def __init__(self):
        super().__init__()
        self.x = torch.linspace(-1, 1, 60)
        self.loc = nn.Parameter(torch.tensor(0.0))

    @pyro_method
    def model(self, idx=None):
        slope = pyro.sample("slope", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", 60, subsample=idx) as rows:
            pyro.sample("y", dist.Normal(slope * self.x[rows], 0.1), obs=2 * self.x[rows])

    @pyro_method
    def guide(self, idx=None):
        pyro.sample("slope", dist.Normal(self.loc, 0.1))


def method():
    x, y = bumps(120)
    return VNNGP(x, y, Matern52(2, 1.0, torch.full((2,), 0.5)), Gaussian(0.05), num_neighbors=5)


def classified():
    x, y = bumps(30)
    return VNNGP(x, (y > 0).double(), Matern52(2, 1.0, 0.5), Bernoulli(), num_neighbors=5)


def species(n=400, seed=6):
    """Labels of four outputs, with two factors."""
    generator = torch.Generator().manual_seed(seed)
    x = 10 * torch.rand(n, 2, generator=generator)
    f = torch.sin(x).sum(-1, keepdim=True) + torch.arange(-1.0, 3.0)
    return LMC(
        x, torch.bernoulli(f.sigmoid(), generator=generator), likelihood=Bernoulli(), mixing=FactorLoadings(4, 2)
    )


STEPS = SETTINGS | {"refresh_every": 7, "seed": 2}
RUNS = {  # what is trained and how, steps between checkpoints, the last step before the cut
    "quasi-Newton": (vecchia, {}, 3, 9),
    "quasi-Newton, early": (vecchia, {}, 3, 4),
    "profile": (classified, {}, 1, 3),
    "rounds between solutions": (lambda: species(150), {}, 1, 8),
    "rounds of Adam": (Slope, {"tolerance": 10.0, "batch_size": 30, "progress": False}, 70, 230),
    "minibatches": (vnngp, STEPS | {"num_steps": 20, "solve_every": 4}, 5, 10),
    "minibatches, by gradients": (vnngp, STEPS | {"num_steps": 20, "solve_every": 0}, 5, 17),
    "before the first checkpoint": (vnngp, STEPS | {"num_steps": 20, "solve_every": 4}, 5, 1),
}


@pytest.mark.parametrize("seed", slow_except(range(6, 10), 6))
def test_rounds_between_solutions_do_not_go_back_and_forth_for_ever(seed):
    """Steps are on a loss that is near the one that is minimized; parameters can take turns between two places."""
    result = fit(species(seed=seed), progress=False)
    assert result.converged
    assert result.steps < 80


@pytest.mark.parametrize(
    "run", slow_except(RUNS, "quasi-Newton", "profile", "rounds between solutions", "rounds of Adam", "minibatches")
)
def test_a_run_that_is_cut_resumes_with_the_same_bits(tmp_path, run):
    make, settings, every, cut = RUNS[run]
    settings = {"progress": False} | settings
    want, whole, file = [], make(), Checkpoint(tmp_path / "run.pt", every=every)
    other = Checkpoint(tmp_path / "whole.pt", every=every)  # with one a profile is of all rows from the start
    result = fit(whole, checkpoint=other, callback=lambda step, loss: want.append(step), **settings)
    pyro.clear_param_store()  # where plain modules of one class share parameters
    with pytest.raises(RuntimeError, match="power cut"):
        fit(make(), checkpoint=file, callback=stop_at(cut), **settings)
    pyro.clear_param_store()
    seen, resumed = [], make()
    got = fit(resumed, checkpoint=file, callback=lambda step, loss: seen.append(step), **settings)
    assert seen == want[(cut - 1) // every * every :]
    assert torch.equal(got.losses, result.losses)
    assert got.refreshes == result.refreshes
    assert_same(values(whole), values(resumed))
    if result.converged:
        pyro.clear_param_store()
        again = fit(make(), checkpoint=file, **settings)  # goes on no further
        assert torch.equal(again.losses, result.losses)
        assert again.converged


@pytest.mark.slow
def test_a_profile_is_trained_on_first_rows_and_then_on_all(tmp_path):
    x = torch.rand(2100, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.sin(20 * x[:, 0]) + 0.1 * torch.randn(
        2100, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )

    def trained(**settings):
        gp = VNNGP(x, y, Matern52(1), Gaussian(), num_neighbors=3)
        return gp, fit(gp, progress=False, **settings)

    gp, result = trained()
    assert result.converged
    assert result.optimizer == "lbfgs"
    assert len(gp.q.loc) == 2100
    other, again = trained(checkpoint=tmp_path / "run")  # on all rows from the start
    assert float(again.losses[-1]) == pytest.approx(float(result.losses[-1]), abs=1e-3)
    torch.testing.assert_close(other.kernel.lengthscale, gp.kernel.lengthscale, rtol=0.15, atol=0)


@pytest.mark.slow
def test_the_optimizer_suits_the_loss():
    x, y = bumps(60)

    def chosen(gp, *args, **settings):
        return fit(gp, *args, max_seconds=1e-9, progress=False, **settings).optimizer

    assert chosen(vecchia()) == "lbfgs"
    assert chosen(LOO(x, y, Matern52(2), Gaussian(), num_neighbors=5)) == "lbfgs"
    assert chosen(vecchia(), 5) == "adam"
    assert chosen(vecchia(), lr=0.1) == "adam"
    assert chosen(vecchia(), schedule=Schedule(clip_norm=1.0)) == "adam"
    assert chosen(vecchia(), schedule=Schedule(())) == "lbfgs"
    assert chosen(vecchia(), 5, optimizer="lbfgs") == "lbfgs"
    labels = LOO(x, (y > 0).double(), Matern52(2, 1.0, 0.5), Bernoulli(), num_neighbors=5)
    assert chosen(labels) == "lbfgs"  # between solutions for what each datum has
    assert chosen(labels, solve_every=0) == "adam"
    for likelihood in (Gaussian(), StudentT()):
        gp = VNNGP(x, y, Matern52(2), likelihood, num_neighbors=5)
        assert chosen(gp) == "lbfgs"  # with a solution before each evaluation
        assert chosen(gp, solve_every=20) == chosen(gp, solve_every=0) == chosen(gp, batch_size=20) == "adam"
        assert chosen(gp, elbo=Trace_ELBO()) == chosen(gp, 5) == "adam"
    gp.kernel.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    assert chosen(VNNGP(x, y, gp.kernel, num_neighbors=5)) == "adam"
    assert chosen(VNNGP(x, y, Matern52(2), num_neighbors=5, guide=MeanField())) == "adam"
    prior = Matern52(2)
    prior.variance = PyroSample(dist.Gamma(torch.ones((), dtype=x.dtype), 1.0))
    assert chosen(Vecchia(x, y, prior, Gaussian(), num_neighbors=5)) == "adam"  # a loss that depends on chance


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.1, "optimizer": "lbfgs"}, r"lr, local_lr and clip_norm to be None with L-BFGS, got lr=0.1 and"),
        ({"schedule": Schedule(clip_norm=1.0), "optimizer": "lbfgs"}, r"clip_norm to be None with L-BFGS"),
        ({"schedule": Schedule((0.5,))}, r"expected schedule without milestones of its own here, got .* fractions of"),
        ({"schedule": Schedule(decay=0.5), "optimizer": "lbfgs", "num_steps": 5}, r"schedule without milestones of"),
    ],
)
def test_rates_that_no_step_takes_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fit(vecchia(), progress=False, **settings)


@pytest.mark.slow
def test_neighbors_are_found_again_as_the_kernel_moves_and_only_then():
    moving, still = vecchia(100), vecchia(100)
    assert (
        fit(moving, 55, lr=0.1, schedule=Schedule(()), batch_size=20, progress=False).refreshes == 2
    )  # after step 50 and the last
    assert fit(still, 50, lr=1e-6, batch_size=20, progress=False).refreshes == 0
    assert fit(vecchia(100), 50, lr=0.1, batch_size=20, refresh_every=0, progress=False).refreshes == 0
    torch.testing.assert_close(moving.graph.lengthscale, moving.kernel.lengthscale.detach(), rtol=0.06, atol=0)


def test_positive_parameters_move_by_a_tenth_per_step_and_others_by_a_hundredth():
    x, y = bumps(60)
    gp = SVGP(x, y + 100, Matern52(2), Gaussian(), inducing=5)
    before = values(gp)
    fit(gp, 1, solve_every=0, progress=False)
    after = values(gp)
    moves = {name: (after[name] - before[name]).abs().max().item() for name in before}
    for name in ("kernel.variance_unconstrained", "likelihood.variance_unconstrained"):
        assert moves[name] == pytest.approx(0.1, rel=1e-3)
    assert moves["q.loc"] == pytest.approx(0.01, rel=1e-3)


def test_what_was_chosen_is_said_on_one_line():
    result = fit(vecchia(), progress=False)
    steps = r"\d+ steps of L-BFGS on 200 rows, \d+ refreshes, K = 8, \d solves"
    pattern = rf"FitResult\(converged: loss -?\d\.\d{{4}}, {steps}, .* s\)"
    assert re.fullmatch(pattern, repr(result))
    result = fit(method(), 5, progress=False)
    assert result.converged is None
    steps = r"5 steps of Adam on 120 rows, [01] refreshes, K = \d+, \d solves"
    pattern = rf"FitResult\(convergence unknown: loss .*, {steps}, .* s\)"
    assert re.fullmatch(pattern, repr(result))


def test_a_loss_that_still_falls_is_warned_of():
    with pytest.warns(ConvergenceWarning, match=r"fell by \S+ nats per data point .* Leave num_steps=60 out, or raise"):
        result = fit(vecchia(), 60, lr=0.02, batch_size=200, progress=False)
    assert result.converged is False


def test_a_ceiling_in_seconds_ends_a_run_with_a_warning():
    with pytest.warns(ConvergenceWarning, match=r"Raise max_seconds"):
        result = fit(vecchia(), max_seconds=1e-9, progress=False)
    assert result.converged is False
    assert result.ended_by == "the time limit"
    assert result.steps == 0


def test_ctrl_c_ends_a_run_without_a_number_of_steps():
    press = lambda step, loss: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None  # noqa: E731
    with pytest.warns(ConvergenceWarning, match="Ctrl-C after 3 steps: predictions are those of a model that is not"):
        result = fit(vecchia(), callback=press, progress=False)
    assert result.ended_by == "Ctrl-C"
    assert result.steps == 3


def test_a_trained_method_is_checked_but_not_one_whose_training_was_cut_short(monkeypatch):
    checks = ["leak", "neighbors", "near_duplicates", "outcome", "family", "tails", "trend", "dispersion"]
    run = []
    for name in checks:
        monkeypatch.setattr(final_checks, f"check_{name}", lambda *_, name=name: run.append(name))
    press = lambda step, loss: os.kill(os.getpid(), signal.SIGINT) if step == 2 else None  # noqa: E731
    with pytest.warns(ConvergenceWarning, match="Ctrl-C"):
        fit(vecchia(60), 5, callback=press, progress=False)
    assert run == []
    fit(vecchia(60), 3, progress=False)
    assert run == checks


def test_convergence_of_a_run_that_ctrl_c_cut_short_is_unknown():
    press = lambda step, loss: os.kill(os.getpid(), signal.SIGINT) if step == 40 else None  # noqa: E731
    with pytest.warns(ConvergenceWarning, match="got Ctrl-C after 40 steps"):
        result = fit(vecchia(60), 50, lr=1e-9, callback=press, progress=False)
    assert (result.steps, result.converged, result.interrupted) == (40, None, True)
    assert repr(result).startswith("FitResult(convergence unknown, ended by Ctrl-C: loss")


def test_a_score_that_is_not_finite_is_never_the_best():
    scores, states, gp = iter([math.nan, 2.0, math.inf, 1.0, 3.0]), [], vecchia()

    def score():
        states.append(values(gp))
        return next(scores)

    result = fit(gp, 5, validation=Validation(score, every=1), batch_size=50, refresh_every=0, progress=False)
    assert [s for _, s in result.scores][1::2] == [2.0, 1.0]
    assert_same(values(gp), states[3])


def test_patience_counts_from_the_best_score_that_is_finite():
    for scores in ([math.nan, 5.0, 4.0, 3.0, 3.5, 3.6, 1.0], [-math.inf, 5.0, 4.0, 3.0, 3.5, 3.6, 1.0]):
        given = iter(scores)
        validation = Validation(lambda given=given: next(given), every=1, patience=2)
        result = fit(vecchia(), 7, validation=validation, batch_size=50, refresh_every=0, progress=False)
        assert [s for _, s in result.scores][1:] == scores[1:6]


def test_a_score_at_the_start_may_be_the_best_and_costs_no_patience():
    given, states, gp = iter([1.0, 9.0, 8.0, 7.0, 7.5, 7.6, 0.0]), [], vecchia()
    validation = Validation(lambda: states.append(values(gp)) or next(given), every=1, patience=2, at_start=True)
    result = fit(gp, 7, validation=validation, batch_size=50, refresh_every=0, progress=False)
    assert result.scores == [(0, 1.0), (1, 9.0), (2, 8.0), (3, 7.0), (4, 7.5), (5, 7.6)]
    assert_same(values(gp), states[0])


def test_validation_comes_once_per_round():
    count = []
    result = fit(vecchia(), validation=Validation(lambda: count.append(1) or float(len(count))), progress=False)
    assert 1 <= len(result.scores) < result.steps


def test_stepping_back_is_refused_with_quasi_newton_steps(tmp_path):
    with pytest.raises(ValueError, match=r"expected checkpoint without step_back with L-BFGS, got step_back=True"):
        fit(vecchia(), checkpoint=Checkpoint(tmp_path / "run.pt", step_back=True), progress=False)


def test_a_schedule_belongs_to_a_given_number_of_steps():
    gp = vecchia()
    fit(gp, 20, schedule=Schedule((0.5,), 0.5), lr=0.02, progress=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'milestones'"):
        fit(gp, 20, milestones=(0.5,))


class Cliff(PyroModule):
    """A loss of -p per data point that jumps to 100, without a slope, where p exceeds 1."""

    num_data = 10

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(0.0))

    @pyro_method
    def model(self, idx=None):
        score = torch.where(self.p < 1, self.p, -100.0 + 0 * self.p)
        pyro.factor("score", self.num_data * score)

    @pyro_method
    def guide(self, idx=None):
        pass


def test_a_run_that_falls_off_a_cliff_goes_back_and_ends_at_its_best_round():
    cliff, places = Cliff(), []
    settings = {"lr": 0.01, "tolerance": 0.05, "progress": False}
    result = fit(cliff, optimizer="adam", callback=lambda *_: places.append(cliff.p.item()), **settings)
    moves = torch.tensor(places).diff()
    assert moves.min() < -0.05
    assert moves[moves.argmin() + 1] == pytest.approx(0.01 / 3, rel=1e-3)  # Adam starts anew, at a third of the rate
    assert max(result.losses) == 100
    assert result.converged
    assert 0.4 < cliff.p < 1


class Descent(PyroModule):
    """A loss that L-BFGS, whose steps are bounded, lowers by .2 per data point in each of twenty steps."""

    num_data = 10_000

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))

    @pyro_method
    def model(self, idx=None):
        pyro.factor("score", -0.2 * self.num_data * (1 + (self.p - 20) ** 2).sqrt())

    @pyro_method
    def guide(self, idx=None):
        pass


def test_steps_on_all_rows_end_where_they_gain_less_than_a_tenth_of_the_tolerance():
    descent = Descent()
    result = fit(descent, optimizer="lbfgs", tolerance=0.5, progress=False)
    assert descent.p.item() == pytest.approx(20, abs=0.5)
    assert result.converged


def valley_nats(a, b):
    """A curved valley of some nats in all, which are nothing per data point."""
    return 5 * (1 - a) ** 2 + 500 * (b - a**2) ** 2


class Valley(PyroModule):
    num_data = 20_000

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(-1.2, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    @pyro_method
    def model(self, idx=None):
        pyro.factor("score", -valley_nats(self.a, self.b))

    @pyro_method
    def guide(self, idx=None):
        pass


def test_steps_end_near_the_bottom_of_a_valley_in_nats_of_all_rows():
    def trained(**kwargs):
        pyro.clear_param_store()
        valley = Valley()
        result = fit(valley, optimizer="lbfgs", progress=False, **kwargs)
        assert result.converged
        return result.steps, valley_nats(valley.a.item(), valley.b.item())

    steps, nats = trained()
    assert nats < 0.1
    coarse_steps, coarse_nats = trained(tolerance=0.1)
    subsample_steps, _ = trained(batch_size=1000)  # which says a twentieth of it
    assert coarse_steps < subsample_steps < steps
    assert coarse_nats > 0.5


def test_best_state_and_scores_survive_a_stop(tmp_path):
    file = Checkpoint(tmp_path / "run.pt", every=4)
    scores = [5.0, 3.0, 4.0, 6.0, 7.0, 3.5, 9.0, 8.0]

    def validation(scores):
        seen = iter(scores)
        return Validation(lambda: next(seen), every=2)

    whole, stopped, resumed = vnngp(), vnngp(), vnngp()
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
    assert result.ended_by == "early stopping"
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
    model = vnngp(torch.float64)
    press = lambda step, loss: os.kill(os.getpid(), signal.SIGINT) if step == 5 else None  # noqa: E731
    with pytest.warns(ConvergenceWarning, match="Ctrl-C"):
        fit(model, 12, callback=press, **SETTINGS)
    left = values(model)["q.loc"]
    model.solve()
    torch.testing.assert_close(values(model)["q.loc"], left, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Encountered NaN")
@pytest.mark.parametrize(
    ("at", "schedule", "rate"), [((4,), None, 0.5 * 0.02 * 0.1**2), ((4, 8), Schedule(()), 0.25 * 0.02)]
)
def test_each_step_back_halves_the_rate(tmp_path, at, schedule, rate):
    line, path, hits = Line(), tmp_path / "run.pt", []

    def callback(step, loss):
        if step in at and step not in hits:
            hits.append(step)
            poison(line, step)(step, loss)

    pyro.enable_validation(False)
    try:
        settings = SETTINGS | {"schedule": schedule, "checkpoint": Checkpoint(path, 3, step_back=True)}
        result = fit(line, 10, callback=callback, **settings)
    finally:
        pyro.enable_validation(True)
    assert len(result.losses) == 10
    rates = [group["lr"] for o in load_checkpoint(path)["run"]["optimizers"] for group in o["param_groups"]]
    assert rates == pytest.approx([rate] * len(rates))


def test_closed_form_updates_take_the_place_of_gradients():
    model, seen = vnngp(torch.float64), []
    fit(model, 5, solve_every=2, callback=lambda step, _: seen.append(values(model)), **SETTINGS)
    moved = [not torch.equal(a["q.loc"], b["q.loc"]) for a, b in itertools.pairwise(seen)]
    assert moved == [True, False, True, True]  # solved after steps 2, 4 and the last
    assert not torch.equal(seen[0]["q.weights"], seen[1]["q.weights"])  # the factor is solved for, too
    assert torch.equal(seen[1]["q.weights"], seen[2]["q.weights"])
    model.solve()
    torch.testing.assert_close(values(model)["q.loc"], seen[-1]["q.loc"], rtol=1e-3, atol=1e-3)


def test_methods_that_can_solve_do_so_once_per_epoch():
    model, solved = vnngp(), []
    solve = model.solve
    model.solve = lambda: (solved.append(1), solve())
    fit(model, 45, **SETTINGS)
    assert len(solved) == 4  # at the start, after steps 20 and 40, at the end


def test_progress_bar_shows_the_loss(capsys):
    fit(Line(), 40, batch_size=16)
    assert "loss=" in capsys.readouterr().err


def test_the_bar_shows_the_loss_per_row_and_what_ends_the_run(capsys):
    gp = vecchia()
    result = fit(gp, max_seconds=100)
    last = capsys.readouterr().err.split("\r")[-1]
    assert f"loss={result.losses[-1]:.4f} per row" in last
    assert f"(ends above {-0.001 * gp.num_data / 2_500:g})" in last  # of few rows
    assert re.search(r"left=\d+ s", last)
    assert "rows=" not in last  # all of them
