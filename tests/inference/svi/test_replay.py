"""Replayed steps are the program's, bit for bit, and stop where the program changes."""

import pytest
import torch
from pyro.distributions import LogNormal
from pyro.infer import Trace_ELBO
from pyro.nn import PyroSample

from pyro_nngp._tape import Tape
from pyro_nngp.inference import Schedule, fit
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, Poisson
from pyro_nngp.models import LOO, NPVI, SVGP, SWSGP, VNNGP, Vecchia

GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(300, 2, generator=GENERATOR)
Y = torch.sin(6 * X[:, 0]) + 0.1 * torch.randn(300, generator=GENERATOR)
STEPS = 60
QUICK = ("mean-field", "priors")
SOLVE_EVERY = {"sites": 30, "counts": 30}
RUN_ALWAYS = {"inducing"}  # the number of distinct rows among those drawn is a number read out of a tensor
METHODS = {
    "mean-field": lambda mean: VNNGP(X, Y, num_neighbors=8, posterior="mean-field", mean=mean),
    "factor": lambda mean: VNNGP(X, Y, num_neighbors=8, guide_neighbors=3, mean=mean),
    "sites": lambda mean: VNNGP(X, Y, num_neighbors=8, mean=mean),
    "counts": lambda mean: VNNGP(X, Y.exp().round(), RBF(2, 1.0, 0.5), Poisson(), num_neighbors=8, mean=mean),
    "LOO": lambda mean: LOO(X, Y, num_neighbors=8, mean=mean),
    "labels": lambda mean: LOO(X, (Y > 0).float(), None, Bernoulli(), num_neighbors=8, mean=mean),
    "Vecchia": lambda mean: Vecchia(X, Y, Matern52(2), Gaussian(), num_neighbors=8, mean=mean),
    "outputs": lambda mean: Vecchia(X, torch.stack([Y, Y.square()], -1), num_neighbors=8, mean=mean),
    "NPVI": lambda mean: NPVI(X, Y, num_neighbors=8, mean=mean),
    "SVGP": lambda mean: SVGP(X, Y, inducing=20, mean=mean),
    "inducing": lambda mean: VNNGP(X, Y, inducing=X[:100], num_neighbors=8, posterior="mean-field", mean=mean),
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


def run(monkeypatch, name, replays, num_steps=STEPS, mean=None, **options):
    """Losses and tensors after some steps, and the number of calls of the mean function in these."""
    monkeypatch.setenv("PYRO_NNGP_REPLAY", "1" if replays else "0")
    mean = Mean() if mean is None else mean
    gp = METHODS[name](mean)
    before = mean.calls
    options = {"batch_size": 64, "solve_every": SOLVE_EVERY.get(name, 0), "progress": False} | options
    found = fit(gp, num_steps, **options)
    return found.losses, gp.state_dict(), mean.calls - before


def assert_same(one, two):
    assert torch.equal(one[0], two[0])
    for name, value in one[1].items():
        assert torch.equal(value, two[1][name]), name


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_replays_are_the_steps_of_the_program(monkeypatch, name):
    replayed, usual = (run(monkeypatch, name, replays) for replays in (True, False))
    assert_same(replayed, usual)
    assert (replayed[2] < usual[2]) == (name not in RUN_ALWAYS)


@pytest.mark.slow
def test_losses_with_draws_are_those_of_the_program(monkeypatch):
    replayed, usual = (run(monkeypatch, "mean-field", replays, elbo=Trace_ELBO()) for replays in (True, False))
    assert_same(replayed, usual)


def test_changes_of_data_are_seen_at_once(monkeypatch):
    METHODS["changed"] = lambda mean: built.append(METHODS["Vecchia"](mean)) or built[-1]
    results = []
    for replays in (True, False):
        built = []

        def change(step, loss, built=built):
            if step == 40:
                built[0].y.mul_(2)

        results.append(run(monkeypatch, "changed", replays, callback=change))
    assert_same(*results)


def test_resumed_runs_are_the_same(monkeypatch, tmp_path):
    path, rest = tmp_path / "run.pt", {"schedule": Schedule(()), "refresh_every": 0}
    run(monkeypatch, "mean-field", True, 35, checkpoint=path, **rest)
    resumed = run(monkeypatch, "mean-field", True, checkpoint=path, **rest)
    assert_same(resumed, run(monkeypatch, "mean-field", True, **rest))


def test_a_program_that_changes_by_itself_is_run_again_with_a_warning(monkeypatch):
    mean = Mean()

    def shift(step, _):
        mean.level = float(step > 40)

    with pytest.warns(UserWarning, match="the loss at the same rows and parameters has changed during the run"):
        run(monkeypatch, "Vecchia", True, 230, mean, callback=shift, refresh_every=0)


def test_larger_results_than_wanted_are_not_kept():
    with pytest.raises(ValueError, match="got one that has larger intermediate results than are to be kept"):
        Tape("test", lambda x: (2 * x,), torch.ones(1000), most_bytes=100)
