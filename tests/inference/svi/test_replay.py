"""Replayed steps are the program's, bit for bit, and stop where the program changes."""

import pytest
import torch
from builders import slow_except
from pyro.distributions import LogNormal
from pyro.infer import Trace_ELBO
from pyro.nn import PyroSample

from pyro_nngp._tape import Tape
from pyro_nngp.inference import Schedule, fit
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, Poisson
from pyro_nngp.models import LOO, NPVI, SVGP, SWSGP, VNNGP, Vecchia
from pyro_nngp.variational import MeanField, SparseCholesky

GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(300, 2, generator=GENERATOR)
Y = torch.sin(6 * X[:, 0]) + 0.1 * torch.randn(300, generator=GENERATOR)
STEPS = 60
SOLVE_EVERY = {"sites": 30, "counts": 30}
RUN_ALWAYS = {"inducing"}  # the number of distinct rows among those drawn is a number read out of a tensor
METHODS = {
    "mean-field": lambda mean: VNNGP(X, Y, num_neighbors=8, guide=MeanField(), mean=mean),
    "factor": lambda mean: VNNGP(X, Y, num_neighbors=8, guide=SparseCholesky(3), mean=mean),
    "sites": lambda mean: VNNGP(X, Y, num_neighbors=8, mean=mean),
    "counts": lambda mean: VNNGP(X, Y.exp().round(), RBF(2, 1.0, 0.5), Poisson(), num_neighbors=8, mean=mean),
    "LOO": lambda mean: LOO(X, Y, num_neighbors=8, mean=mean),
    "labels": lambda mean: LOO(X, (Y > 0).float(), None, Bernoulli(), num_neighbors=8, mean=mean),
    "Vecchia": lambda mean: Vecchia(X, Y, Matern52(2), Gaussian(), num_neighbors=8, mean=mean),
    "outputs": lambda mean: Vecchia(X, torch.stack([Y, Y.square()], -1), num_neighbors=8, mean=mean),
    "NPVI": lambda mean: NPVI(X, Y, num_neighbors=8, mean=mean),
    "SVGP": lambda mean: SVGP(X, Y, inducing=20, mean=mean),
    "inducing": lambda mean: VNNGP(X, Y, inducing=X[:100], num_neighbors=8, guide=MeanField(), mean=mean),
    "priors": lambda mean: LOO(
        X, Y, Matern52(2, lengthscale=PyroSample(LogNormal(0.0, 1.0))), num_neighbors=8, mean=mean
    ),
    "SWSGP": lambda mean: SWSGP(X, Y, inducing=40, num_neighbors=8, mean=mean),
}


class Mean:
    """A mean function that counts its calls."""

    calls, level = 0, 0.0

    def __call__(self, x):
        self.calls += 1
        return 0.1 * x[:, 0] + self.level


def run(name, replays, num_steps=STEPS, mean=None, **options):
    """Losses and tensors after some steps, the number of calls of the mean function in these, and the first replay."""
    mean = Mean() if mean is None else mean
    gp = METHODS[name](mean)
    before = mean.calls
    options = {"batch_size": 64, "solve_every": SOLVE_EVERY.get(name, 0), "progress": False} | options
    result = fit(gp, num_steps, replay=replays, **options)
    return result.losses, gp.state_dict(), mean.calls - before, result.replayed_from


def assert_same(one, two):
    assert torch.equal(one[0], two[0])
    for name, value in one[1].items():
        assert torch.equal(value, two[1][name]), name


@pytest.mark.parametrize("name", slow_except(METHODS, "mean-field", "priors"))
@pytest.mark.slow
def test_replays_are_the_steps_of_the_program(name):
    replayed, usual = (run(name, replays) for replays in (True, False))
    assert_same(replayed, usual)
    assert (replayed[2] < usual[2]) == (replayed[3] is not None) == (name not in RUN_ALWAYS)
    assert usual[3] is None


@pytest.mark.slow
def test_losses_with_draws_are_those_of_the_program():
    replayed, usual = (run("mean-field", replays, elbo=Trace_ELBO()) for replays in (True, False))
    assert_same(replayed, usual)


@pytest.mark.slow
def test_changes_of_data_are_seen_at_once():
    METHODS["changed"] = lambda mean: built.append(METHODS["Vecchia"](mean)) or built[-1]
    results = []
    for replays in (True, False):
        built = []

        def change(step, loss, built=built):
            if step == 40:
                built[0].y.mul_(2)

        results.append(run("changed", replays, callback=change))
    assert_same(*results)


@pytest.mark.slow
def test_resumed_runs_are_the_same(tmp_path):
    path, rest = tmp_path / "run.pt", {"schedule": Schedule(()), "refresh_every": 0}
    run("mean-field", True, 35, checkpoint=path, **rest)
    resumed = run("mean-field", True, checkpoint=path, **rest)
    assert_same(resumed, run("mean-field", True, **rest))


@pytest.mark.slow
def test_a_program_that_changes_by_itself_is_run_again_with_a_warning():
    mean = Mean()

    def shift(step, _):
        mean.level = float(step > 40)

    with pytest.warns(UserWarning, match="the loss at the same rows and parameters has changed during the run"):
        run("Vecchia", True, 230, mean, callback=shift, refresh_every=0)


def test_larger_results_than_wanted_are_not_kept():
    with pytest.raises(ValueError, match="got one that has larger intermediate results than are to be kept"):
        Tape("test", lambda x: (2 * x,), torch.ones(1000), most_bytes=100)


@pytest.mark.slow
def test_the_result_says_which_step_was_replayed_first():
    gp, options = METHODS["mean-field"](None), {"solve_every": 0, "refresh_every": 0, "progress": False}
    result = fit(gp, 25, batch_size=64, **options)
    assert result.replayed_from == 22
    assert "replayed from step 22" in repr(result)
    for other in (fit(gp, 25, **options), fit((gp.model, gp.guide), 25, num_data=300, batch_size=64, progress=False)):
        assert other.replayed_from is None
        assert "replayed" not in repr(other)
