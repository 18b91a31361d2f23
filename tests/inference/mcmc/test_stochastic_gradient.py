"""The kernels in Pyro's MCMC: interface, burn-in, partly optimized models, snapshots, errors."""

import io
import math
import pickle
import warnings
from itertools import pairwise

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import slow_except
from pyro.infer import MCMC
from pyro.infer.autoguide.initialization import init_to_value
from pyro.infer.mcmc import StreamingMCMC
from pyro.nn import PyroModule, PyroParam, PyroSample

from pyro_nngp.inference import SGHMC, SGLD, SGNHT, Cyclical, DivergenceError, Minibatch, PolynomialDecay
from pyro_nngp.inference.mcmc.adaptation import update_scale

F64 = torch.float64
Y = torch.linspace(-1, 3, 30, dtype=F64)
NEAR = init_to_value(values={"loc": torch.tensor([0.6, 0.4], dtype=F64), "scale": torch.tensor(1.2, dtype=F64)})
KERNELS = {
    "SGHMC": lambda model, **kw: SGHMC(model, 0.05, init_strategy=NEAR, **kw),
    "plain SGHMC": lambda model, **kw: SGHMC(model, 0.02, friction=0.3, adapt=False, init_strategy=NEAR, **kw),
    "SGLD": lambda model, **kw: SGLD(model, 0.005, init_strategy=NEAR, **kw),
    "preconditioned SGLD": lambda model, **kw: SGLD(model, 0.01, adapt=True, init_strategy=NEAR, **kw),
    "SGNHT": lambda model, **kw: SGNHT(model, 0.05, init_strategy=NEAR, **kw),
}


def model(idx=None):
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(torch.tensor(0.0, dtype=F64), 1.0))
    with pyro.plate("data", 30, subsample=idx) as i:
        pyro.sample("y", dist.Normal(loc.sum(), scale), obs=Y[i])


def run(kernel, *args, num_samples=8, warmup_steps=12, seed=3, **options):
    pyro.set_rng_seed(seed)
    mcmc = MCMC(kernel, num_samples, warmup_steps, disable_progbar=True, **options)
    mcmc.run(*args)
    return mcmc


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_kernels_serve_pyro_mcmc(make, capsys):
    mcmc = run(make(model), Minibatch(30, 10))
    samples = mcmc.get_samples(group_by_chain=True)
    assert {name: tuple(value.shape) for name, value in samples.items()} == {"loc": (1, 8, 2), "scale": (1, 8)}
    assert (samples["scale"] > 0).all()
    mcmc.summary()
    assert "loc[1]" in capsys.readouterr().out
    found = mcmc.diagnostics()
    names = {"step size", "configurational temperature", "gradient noise", "gradient noise share"}
    assert names <= set(found)
    assert ("kinetic temperature" in found) == ("SGLD" not in type(mcmc.kernel).__name__)
    assert all(math.isfinite(found[name]["chain 0"]) for name in names)
    text = mcmc.kernel.logging()
    assert list(text) == ["step size", "potential", "temperature"]
    assert float(text["step size"]) == mcmc.kernel.step_size(0)
    mcmc.kernel.step_size = lambda update: 1
    assert float(mcmc.kernel.logging()["step size"]) == 1


def test_chains_in_worker_processes_have_seeds_of_their_own(monkeypatch):
    monkeypatch.setattr("torch.multiprocessing.cpu_count", lambda: 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons dislike fork beside threads
        mcmc = run(KERNELS["SGHMC"](model), Minibatch(30, 10), num_chains=2)
    samples = mcmc.get_samples(group_by_chain=True)
    assert samples["loc"].shape == (2, 8, 2)
    assert (samples["scale"] > 0).all()
    assert (samples["loc"][0] != samples["loc"][1]).all()
    assert len(set(mcmc.diagnostics()["kinetic temperature"].values())) == 2


def test_chains_one_after_the_other_start_afresh(monkeypatch):
    monkeypatch.setattr("torch.multiprocessing.cpu_count", lambda: 1)
    with pytest.warns(UserWarning, match="Chains will be drawn sequentially"):
        mcmc = run(SGLD(model, 1e-9), num_chains=2)
    samples = mcmc.get_samples(group_by_chain=True)["loc"]
    assert (samples[:, 0] - samples[:, -1]).abs().max() < 1e-2  # such steps stay where they start
    assert (samples[0] - samples[1]).abs().max() > 1e-1


def test_starting_values_of_the_user():
    start = {"loc": torch.tensor([3.0, 4.0], dtype=F64), "scale": torch.tensor(-1.0, dtype=F64)}
    samples = run(SGLD(model, 1e-12), initial_params=start).get_samples()
    torch.testing.assert_close(samples["loc"][0], start["loc"], atol=1e-3, rtol=0)
    torch.testing.assert_close(samples["scale"][0], start["scale"].exp(), atol=1e-3, rtol=0)


def test_starting_values_serve_one_run():
    start = {"loc": torch.tensor([30.0, 40.0], dtype=F64), "scale": torch.tensor(-1.0, dtype=F64)}
    kernel = SGLD(model, 1e-12)
    run(kernel, initial_params=start)
    assert run(kernel).get_samples()["loc"].abs().max() < 3  # the default strategy starts in (-2, 2)


def test_streaming_mcmc_and_saved_sites():
    mcmc = StreamingMCMC(SGLD(model, 0.001), 5, 5, disable_progbar=True)
    mcmc.run()
    assert mcmc.get_statistics()[0, "loc"]["count"] == 5
    assert run(SGLD(model, 0.001), save_params=["scale"]).get_samples().keys() == {"scale"}


@pytest.mark.parametrize(
    "kernel",
    [
        SGHMC(model, Cyclical(0.1, 5), optim={"lr": 0.1}),
        SGLD(model, PolynomialDecay(0.1, 5)),
        SGNHT(model, 0.1),
    ],
)
def test_kernels_pickle_for_worker_processes(kernel):
    copy = pickle.loads(pickle.dumps(kernel))
    assert copy.step_size == kernel.step_size
    run(kernel) if isinstance(kernel, SGLD) else None
    pickle.dumps(kernel)


def test_num_steps_counts_updates_between_draws_and_one_update_is_a_step_of_burn_in():
    seen = []

    def counted():
        seen.append(1)
        model()

    kernel = SGLD(counted, 0.001, num_steps=7, gradient_noise=0.0)
    run(kernel, num_samples=3, warmup_steps=5)
    assert kernel.state_dict()["updates"] == 5 + 3 * 7
    assert len(seen) == 5 + 3 * 7 + 3  # the first look at the model, and the draw and check of a start


def test_scale_follows_springenberg_and_ends_as_a_mean():
    gradients = torch.tensor([4.0, -2.0, 3.0, 1.0, -1.0, 2.0], dtype=F64)
    state = {name: torch.ones(1, dtype=F64) for name in ("window", "mean", "square", "inverse_mass")}
    tau, g, v = 1.0, 1.0, 1.0
    for i, gradient in enumerate(gradients.tolist()):
        state = update_scale(state, torch.tensor([gradient], dtype=F64), settled=i >= 3)
        rate, forget = 1 / (tau + 1), g * g / v if i < 3 else 0.0
        tau, g, v = 1 + tau * (1 - forget), g + rate * (gradient - g), v + rate * (gradient**2 - v)
        found = [float(state[name]) for name in ("window", "mean", "square", "inverse_mass")]
        assert found == pytest.approx([tau, g, v, v**-0.5], rel=1e-12)
        if i == 2:
            total = tau * v
    assert v == pytest.approx((total + float((gradients[3:] ** 2).sum())) / tau, rel=1e-12)


def test_preconditioner_is_frozen_after_burn_in_and_one_without_adaptation():
    kernel = SGHMC(model, 0.02)
    run(kernel, Minibatch(30, 10), num_samples=1, warmup_steps=30)
    frozen = kernel.state_dict()
    run(kernel, Minibatch(30, 10), num_samples=9, warmup_steps=30)
    later = kernel.state_dict()
    for name in ("inverse_mass", "gradient_variance"):
        assert torch.equal(frozen["state"][name], later["state"][name])
        assert (later["state"][name] > 0).all()
    plain = SGHMC(model, 0.02, adapt=False)
    run(plain)
    assert (plain.state_dict()["state"]["inverse_mass"] == 1).all()


@pytest.mark.slow
def test_preconditioner_follows_the_units_of_a_site():
    masses = []
    for unit in (0.01, 1.0):
        prior = dist.Normal(torch.zeros(300, dtype=F64), unit).to_event(1)
        start = init_to_value(values={"z": unit * torch.ones(300, dtype=F64)})
        kernel = SGHMC(lambda prior=prior: pyro.sample("z", prior), 0.05, init_strategy=start)
        run(kernel, num_samples=2, warmup_steps=400)
        masses.append(kernel.state_dict()["state"]["inverse_mass"].mean())
    assert masses[0] / masses[1] == pytest.approx(0.01, rel=0.2)


def test_temperatures_are_means_over_the_updates_after_burn_in():
    states = []
    kernel = SGHMC(model, 0.02, init_strategy=NEAR)
    mcmc = run(kernel, hook_fn=lambda kernel, *_: states.append(kernel.state_dict()["state"]))
    kinetic, configurational = [], []
    for before, after in pairwise(states[11:]):
        gradient = kernel.potential.gradient(before["position"])[1]
        configurational.append(((before["position"] - before["center"]) * gradient).mean())
        kinetic.append(((before["velocity"] + after["velocity"]) ** 2 / 4 / before["inverse_mass"]).mean())
    found = mcmc.diagnostics()
    assert found["kinetic temperature"]["chain 0"] == pytest.approx(float(sum(kinetic)) / 8)
    assert found["configurational temperature"]["chain 0"] == pytest.approx(float(sum(configurational)) / 8)
    center = torch.stack([state["position"] for state in states[5:11]]).mean(
        0
    )  # positions 6 to 11 start its second half
    torch.testing.assert_close(states[-1]["center"], center)


def test_thermostat_takes_the_step_of_its_docstring():
    kernel = SGNHT(model, 0.1, diffusion=2.0)
    state = {
        "position": torch.tensor([1.0, -2.0], dtype=F64),
        "velocity": torch.tensor([0.5, 0.25], dtype=F64),
        "friction": torch.tensor([3.0], dtype=F64),
        "inverse_mass": torch.tensor([2.0, 0.5], dtype=F64),
        "gradient_variance": torch.zeros(2, dtype=F64),
    }
    gradient = torch.tensor([4.0, 8.0], dtype=F64)
    changed = kernel.update(state, gradient, 0.1, 0.0)  # at T = 0 nothing is injected
    velocity = torch.tensor([0.7 * 0.5 - 0.1 * 2 * 4, 0.7 * 0.25 - 0.1 * 0.5 * 8], dtype=F64)
    middle = (velocity + state["velocity"]) / 2
    torch.testing.assert_close(changed["velocity"], velocity)
    torch.testing.assert_close(changed["position"], state["position"] + 0.1 * velocity)
    torch.testing.assert_close(changed["friction"], 3 + 0.1 * (middle**2 / state["inverse_mass"]).mean()[None])
    still = kernel.update(state, gradient, 0.0, 0.0)  # as a schedule may say at its end
    assert all(torch.equal(still[name], state[name]) for name in ("position", "velocity", "friction"))


def test_cycle_explores_by_plain_gradient_descent():
    schedule = Cyclical(0.01, period=10, explore=0.5)
    kernel = SGLD(model, schedule, temperature=schedule.temperature, gradient_noise=1.0)
    pyro.set_rng_seed(0)
    kernel.setup(0)
    params = kernel.initial_params
    for t in range(5):
        position = kernel.potential.pack(params)
        expected = position - schedule(t) * kernel.potential.gradient(position)[1]
        params = kernel.sample(params)
        torch.testing.assert_close(kernel.potential.pack(params), expected)
    position = kernel.potential.pack(params)
    drift = schedule(5) * kernel.potential.gradient(position)[1]
    assert ((kernel.potential.pack(kernel.sample(params)) - position + drift).abs() > 1e-6).all()


class PartlyOptimized(PyroModule):
    """y ~ N(z + shift, 1), z ~ N(0, 1): the shift has its maximum likelihood at y, where z has mean 0, variance 1/2."""

    def __init__(self):
        super().__init__()
        self.shift = PyroParam(torch.tensor(1.0, dtype=F64), constraint=dist.constraints.positive)
        self.z = PyroSample(dist.Normal(torch.tensor(0.0, dtype=F64), 1.0))

    def forward(self):
        pyro.sample("y", dist.Normal(self.z + self.shift, 1.0), obs=torch.tensor(3.0, dtype=F64))


@pytest.mark.slow
@pytest.mark.parametrize("optim", [{"lr": 0.05}, lambda params: torch.optim.SGD(params, lr=0.01)])
def test_parameters_are_optimized_during_burn_in_and_then_frozen(optim):
    module = PartlyOptimized()
    kernel = SGHMC(module, 0.2, friction=0.2, optim=optim)
    values = []
    options = {"hook_fn": lambda *_: values.append(float(module.shift.detach()))}
    mcmc = run(kernel, num_samples=200, warmup_steps=400, **options)
    assert abs(values[399] - 3) < 0.7
    assert len(set(values[200:400])) == 200
    assert set(values[400:]) == {values[399]}
    assert float(mcmc.diagnostics()["params"]["chain 0"]["shift"]) == pytest.approx(values[399])
    assert module.shift_unconstrained.grad is None


def test_parameters_without_optim_keep_their_values():
    module = PartlyOptimized()
    mcmc = run(SGHMC(module, 0.05))
    assert float(module.shift.detach()) == 1.0
    assert "params" not in mcmc.diagnostics()


def test_parameters_that_require_no_gradient_are_not_optimized():
    class WithScale(PartlyOptimized):
        def forward(self):
            super().forward()
            pyro.sample("again", dist.Normal(self.shift, self.scale), obs=torch.tensor(3.0, dtype=F64))

    module = WithScale()
    module.scale = PyroParam(torch.tensor(2.0, dtype=F64), constraint=dist.constraints.positive)
    module.scale_unconstrained.requires_grad_(False)
    run(SGHMC(module, 0.05, optim={"lr": 0.05}), num_samples=4, warmup_steps=3)
    assert float(module.shift.detach()) != 1.0
    assert float(module.scale) == 2.0
    module.requires_grad_(False)
    with pytest.raises(ValueError, match="expected optim to come with parameters that require gradients, got none"):
        run(SGHMC(module, 0.05, optim={"lr": 0.05}))


def reload(snapshot):
    """Through a file as ``torch.save`` writes and ``torch.load(weights_only=True)`` reads it."""
    buffer = io.BytesIO()
    torch.save(snapshot, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


STOPS = [
    pytest.param(4, id="in burn-in", marks=pytest.mark.slow),
    pytest.param(12, id="after burn-in"),
    pytest.param(20, id="in sampling", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", slow_except(KERNELS, "SGHMC", "preconditioned SGLD", "SGNHT"))
def test_a_resumed_chain_equals_the_uninterrupted_one_bit_for_bit(name, stop):
    whole, snapshots = [], []

    def keep(kernel, params, stage, i):
        whole.append({n: value.clone() for n, value in params.items()})
        snapshots.append(reload(kernel.state_dict()))

    first = KERNELS[name](model, num_steps=3)
    run(first, Minibatch(30, 10), num_samples=15, warmup_steps=12, hook_fn=keep)
    again = KERNELS[name](model, num_steps=3)
    again.load_state_dict(snapshots[stop - 1])
    resumed = []
    left = max(12 - stop, 0)
    run(
        again,
        Minibatch(30, 10),
        num_samples=15 - max(stop - 12, 0),
        warmup_steps=left,
        seed=99,
        hook_fn=lambda k, params, *_: resumed.append({n: value.clone() for n, value in params.items()}),
    )
    assert len(resumed) == len(whole) - stop
    for a, b in zip(resumed, whole[stop:], strict=True):
        assert all(torch.equal(a[n], b[n]) for n in b)
    assert again.diagnostics() == first.diagnostics()


def test_resuming_restores_parameters_and_their_optimizer():
    values, snapshots = [], []
    module = PartlyOptimized()

    def keep(kernel, *_):
        values.append(float(module.shift.detach()))
        snapshots.append(reload(kernel.state_dict()))

    run(SGHMC(module, 0.1, optim={"lr": 0.05}), num_samples=5, warmup_steps=20, hook_fn=keep)
    fresh, resumed = PartlyOptimized(), []
    again = SGHMC(fresh, 0.1, optim={"lr": 0.05})
    again.load_state_dict(snapshots[6])
    pyro.clear_param_store()
    run(again, num_samples=5, warmup_steps=13, seed=99, hook_fn=lambda *_: resumed.append(float(fresh.shift.detach())))
    assert resumed == values[7:]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: SGLD(model, 0.1), "SGLD: expected snapshot of .*got .*'kernel': 'SGHMC'"),
        (lambda: SGHMC(PartlyOptimized(), 0.1), "SGHMC: expected snapshot of .*got .*'sites'"),
    ],
)
def test_snapshots_of_other_runs_are_refused(other, message):
    kernel = SGHMC(model, 0.01)
    run(kernel)
    again = other()
    again.load_state_dict(kernel.state_dict())
    with pytest.raises(ValueError, match=message):
        run(again)


def test_a_potential_that_is_not_finite_names_update_and_site():
    def cliff():
        z = pyro.sample("z", dist.Normal(torch.tensor(0.0, dtype=F64), 1.0))
        pyro.factor("cliff", torch.where(z > -50, z, torch.tensor(float("nan"), dtype=F64)))

    kernel = SGLD(cliff, 30.0, init_strategy=init_to_value(values={"z": torch.tensor(5.0, dtype=F64)}))
    message = r"SGLD, update [12]: expected potential and gradient to be finite, got potential nan .*site 'cliff' has"
    with pytest.raises(DivergenceError, match=message):
        run(kernel)


def test_minibatches_that_bring_too_much_noise_are_reported():
    message = r"more noise than a step needs to 3 of 3 coordinates, of the sites \['loc', 'scale'\]"
    with pytest.warns(RuntimeWarning, match=message):
        mcmc = run(SGHMC(model, 0.05, gradient_noise=1e6))
    assert mcmc.diagnostics()["gradient noise share"]["chain 0"] > 1


def test_adaptation_needs_burn_in():
    with pytest.raises(ValueError, match="SGHMC: expected warmup_steps >= 1 with adapt=True, got 0"):
        run(SGHMC(model, 0.01), warmup_steps=0)
    with pytest.raises(ValueError, match="SGHMC: expected warmup_steps >= 1 with adapt=True, got 0"):
        run(SGHMC(model), warmup_steps=0)
    assert run(SGHMC(model, adapt=False, step_size=0.01), warmup_steps=0).get_samples()["scale"].shape == (8,)


def test_optimization_needs_parameters():
    with pytest.raises(ValueError, match="expected optim to come with parameters that require gradients, got none"):
        run(SGHMC(model, optim={"lr": 0.1}))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SGLD("model", 0.1), TypeError, "SGLD: expected model to be callable, got str"),
        (lambda: SGLD(model, 0.1, num_steps=0), ValueError, "SGLD: expected num_steps >= 1, got 0"),
        (
            lambda: SGLD(model, 0.1, gradient_noise=-1.0),
            ValueError,
            "SGLD: expected gradient_noise to be finite and >= 0, got -1.0",
        ),
        (
            lambda: SGLD(model, adapt=False),
            ValueError,
            "SGLD: expected step_size to be given with adapt=False, got None",
        ),
        (lambda: SGLD(model, -0.1), ValueError, "SGLD: expected step_size to be finite and > 0, got -0.1"),
        (lambda: SGLD(model, 0.1, temperature=0), ValueError, "SGLD: expected temperature to be finite and > 0, got 0"),
        (lambda: SGHMC(model, friction=0.0), ValueError, r"SGHMC: expected friction .* > 0 and <= 1, got 0.0"),
        (
            lambda: SGNHT(model, 0.1, diffusion=0.0),
            ValueError,
            "SGNHT: expected diffusion to be finite and > 0",
        ),
        (lambda: SGHMC(model, frction=0.1), TypeError, "unexpected keyword argument 'frction'"),
    ],
)
def test_arguments_are_checked(make, error, message):
    with pytest.raises(error, match=message):
        make()
