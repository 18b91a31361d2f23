"""Identity of a run: equal for runs that may continue each other, different for all others."""

import dataclasses
import functools

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import slow_except
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroSample
from torch import nn

from pyro_nngp.inference import CheckpointError, Schedule, fit
from pyro_nngp.inference.identity import differences, identity
from pyro_nngp.inference.mcmc.schedules import PolynomialDecay, Refined
from pyro_nngp.kernels import Matern32, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import LOO, NPVI, SVGP, SWSGP, VNNGP, Vecchia
from pyro_nngp.variational import MeanField

X = torch.rand(40, 2, generator=torch.Generator().manual_seed(0))
Y = torch.sin(5 * X[:, 0])
LABELS = (Y > 0.5).float()
SETTINGS = {"batch_size": 10, "progress": False}


def vnngp(x=X, y=Y, kernel=Matern52, likelihood=lambda: Gaussian(0.1), num_neighbors=4, **options):
    return VNNGP(x, y, kernel(2, variance=1.0), likelihood(), num_neighbors=num_neighbors, **options)


def prior(scale):
    return functools.partial(Matern52, lengthscale=PyroSample(dist.LogNormal(torch.zeros(2), scale).to_event(1)))


def of(gp):
    return identity(model=gp.model, guide=gp.guide)


METHODS = {
    "vnngp": vnngp,
    "bernoulli": lambda: vnngp(y=LABELS, likelihood=Bernoulli),
    "mean-field": lambda: vnngp(guide=MeanField()),
    "sum": lambda: VNNGP(X, Y, Matern52(2, 1.0, 0.5) + Matern52(2, 1.0, 0.5), Gaussian(0.1), num_neighbors=4),
    "prior": lambda: vnngp(kernel=prior(1.0)),
    "vecchia": lambda: Vecchia(X, Y, Matern52(2, 1.0, 0.5), Gaussian(0.1), num_neighbors=4),
    "loo": lambda: LOO(X, LABELS, Matern52(2, 1.0, 0.5), Bernoulli(), num_neighbors=4),
    "npvi": lambda: NPVI(X, Y, Matern52(2, 1.0, 0.5), Gaussian(0.1), num_neighbors=4),
    "swsgp": lambda: SWSGP(X, Y, Matern52(2, 1.0, 0.5), Gaussian(0.1), inducing=8, num_neighbors=3),
    "svgp": lambda: SVGP(X, LABELS, Matern52(2, 1.0, 0.5), Bernoulli(), inducing=8),
    "net": lambda: vnngp(mean=nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))),
}


@pytest.mark.parametrize("name", slow_except(METHODS, "vnngp", "prior", "loo", "net"))
def test_the_same_program_has_the_same_identity_before_and_after_training(name):
    gp = METHODS[name]()
    before = of(gp)
    assert differences(before, of(METHODS[name]())) == ""
    every = {"refresh_every": 2} if hasattr(gp, "refresh_neighbors") else {}
    fit(gp, 3, **every, **SETTINGS)
    gp(X[:2])
    assert differences(before, of(gp)) == ""


OTHERS = {
    "data": lambda: vnngp(y=Y + 1e-6),
    "inputs": lambda: vnngp(x=X.roll(1, 0)),
    "kernel": lambda: vnngp(kernel=Matern32),
    "prior": lambda: vnngp(kernel=prior(1.0)),
    "likelihood": lambda: vnngp(y=LABELS, likelihood=Bernoulli),
    "link": lambda: vnngp(y=LABELS, likelihood=lambda: Bernoulli("probit")),
    "jitter": lambda: vnngp(jitter=1e-4),
    "ordering": lambda: vnngp(ordering="maximin"),
    "neighbors": lambda: vnngp(num_neighbors=5),
    "mean": lambda: vnngp(mean=lambda x: x[:, 0]),
    "mean function's code": lambda: vnngp(mean=lambda x: 2 * x[:, 0]),
    "mean function's closure": lambda: (lambda slope: vnngp(mean=lambda x: slope * x[:, 0]))(0.5),
    "mean function's other closure": lambda: (lambda slope: vnngp(mean=lambda x: slope * x[:, 0]))(0.25),
    "a wider net": lambda: vnngp(mean=nn.Linear(2, 1)),
    "no learning of it": lambda: vnngp(mean=nn.Linear(2, 1).requires_grad_(False).eval()),
    "another method": METHODS["vecchia"],
    "precision": lambda: vnngp(x=X.double(), y=Y.double()),
}


@pytest.mark.slow
def test_other_programs_have_other_identities():
    assert differences(of(vnngp(kernel=prior(1.0))), of(vnngp(kernel=prior(2.0))))
    identities = [of(vnngp())] + [of(other()) for other in OTHERS.values()]
    names = ["the first", *OTHERS]
    for i, one in enumerate(identities):
        for j, other in enumerate(identities[:i]):
            assert differences(one, other), (names[i], names[j])


RUNS = {
    "clip_norm": ({"schedule": Schedule(clip_norm=1.0)}, {}),
    "refresh_every": ({"refresh_every": 1}, {}),
    "solve_every": ({"solve_every": 3}, {}),
    "elbo.num_particles": ({"elbo": Trace_ELBO(num_particles=2)}, {"elbo": Trace_ELBO()}),
    "model.kernel": ({}, {}),
}


@pytest.mark.parametrize("name", slow_except(RUNS, "refresh_every", "model.kernel"))
def test_fit_refuses_the_checkpoint_of_another_run(tmp_path, name):
    one, other = RUNS[name]
    fit(vnngp(), 2, checkpoint=tmp_path / "a.pt", **one, **SETTINGS)
    again = vnngp(kernel=Matern32) if name == "model.kernel" else vnngp()
    with pytest.raises(CheckpointError, match=rf"fit: expected a checkpoint of this run, got one with .*{name} = "):
        fit(again, 4, checkpoint=tmp_path / "a.pt", **other, **SETTINGS)
    fit(vnngp(), 4, checkpoint=tmp_path / "a.pt", **one, **SETTINGS)


def pair(x, y):
    """A model and a guide that hold their data in closures, as users write them."""

    def model(idx=None):
        slope = pyro.sample("slope", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", len(x), subsample=idx) as rows:
            pyro.sample("y", dist.Normal(slope * x[rows], 0.1), obs=y[rows])

    return model, AutoNormal(model)


def test_a_pair_of_functions_with_other_data_is_refused(tmp_path):
    settings = SETTINGS | {"num_data": 40, "elbo": Trace_ELBO(), "checkpoint": tmp_path / "a.pt"}
    fit(pair(X[:, 0], Y), 2, **settings)
    pyro.clear_param_store()
    fit(pair(X[:, 0], Y), 4, **settings)
    pyro.clear_param_store()
    with pytest.raises(
        CheckpointError, match=r"got one with model\.y = torch.float32 \(40,\) \w+ and not torch.float32"
    ):
        fit(pair(X[:, 0], Y + 1), 6, **settings)


SCALE = 2.0


def uses_a_global():
    return SCALE * helper()


def helper():
    return 3


@dataclasses.dataclass
class Settings:
    degree: int
    table: np.ndarray


def test_functions_count_with_code_closures_and_globals(monkeypatch):
    def value(v):
        def inner():
            return v

        return inner

    assert identity(f=value(1)) == identity(f=value(1)) != identity(f=value(2))
    assert identity(f=functools.partial(max, 1)) != identity(f=functools.partial(max, 2))
    before = identity(f=uses_a_global)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert "f.SCALE = 2.0 and not 3.0" in differences(before, identity(f=uses_a_global))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    monkeypatch.setitem(globals(), "helper", lambda: 4)
    assert "f.helper" in differences(before, identity(f=uses_a_global))


def test_objects_count_with_what_they_hold():
    one = identity(s=Settings(1, np.arange(3)), k={"a": {1, 2}})
    assert one == identity(s=Settings(1, np.arange(3)), k={"a": {2, 1}})
    assert one != identity(s=Settings(2, np.arange(3)), k={"a": {1, 2}})
    assert one != identity(s=Settings(1, np.arange(3) + 1), k={"a": {1, 2}})
    loop = []
    loop.append(loop)
    assert identity(loop=loop)["loop.0"] == "the same as loop"


class Fresh(dist.Normal):
    """A distribution whose argument is a new tensor at each look."""

    arg_constraints = {"fresh": dist.constraints.real}

    @property
    def fresh(self):
        return self.loc.clone()


def test_objects_made_on_the_way_are_not_taken_for_each_other():
    found = identity(priors=[Fresh(torch.tensor(float(i)), 1.0) for i in range(20)])
    assert not [value for value in found.values() if "the same" in value]


def test_a_schedule_counts_with_the_one_that_it_refines():
    one, other = (Refined(PolynomialDecay(rate, 10.0), 0.5) for rate in (0.1, 0.2))
    assert differences(identity(step=one), identity(step=other)) == "step.schedule.initial = 0.1 and not 0.2"


def test_differences_name_at_most_four():
    one, other = {str(i): "a" for i in range(9)}, {str(i): "b" for i in range(1, 10)}
    assert differences(one, other).endswith("3 = a and not b, and 6 more")
    assert differences(one, other).startswith("0 = a and not nothing, ")
    assert differences(one, one) == ""
