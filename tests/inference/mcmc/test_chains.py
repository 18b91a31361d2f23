"""Chains side by side: samples, checkpoints, Ctrl-C, death of the process, refinement of the step size."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import slow_except
from pyro.infer import NUTS
from pyro.nn import PyroSample

from pyro_nngp.distributions import NNGP, NNGPReparam
from pyro_nngp.inference import (
    SGHMC,
    SGLD,
    SGMCMC,
    SGNHT,
    CheckpointError,
    DivergenceError,
    Minibatch,
    step_size_refinement,
)
from pyro_nngp.inference._interrupt import deferred_interrupt
from pyro_nngp.inference.checkpoint import exclusive_checkpoint, save_checkpoint
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import Vecchia
from pyro_nngp.neighbors.graph import NeighborGraph

F64 = torch.float64
Y = torch.linspace(-1, 3, 30, dtype=F64)


def model(idx=None):
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(torch.tensor(0.0, dtype=F64), 1.0))
    with pyro.plate("data", 30, subsample=idx) as i:
        pyro.sample("y", dist.Normal(loc.sum(), scale), obs=Y[i])


def chains(kernel, num_samples=9, warmup_steps=10, num_chains=3, seed=3, **options):
    pyro.set_rng_seed(seed)
    return SGMCMC(kernel, num_samples, warmup_steps, num_chains, disable_progbar=True, **options)


@pytest.mark.parametrize("vectorize", [True, False])
def test_results_are_read_as_from_mcmc(vectorize, capsys):
    mcmc = chains(SGHMC(model, 0.01, friction=0.5, num_steps=2), vectorize=vectorize)
    mcmc.run(Minibatch(30, 10))
    samples = mcmc.get_samples(group_by_chain=True)
    assert {name: tuple(value.shape) for name, value in samples.items()} == {"loc": (3, 9, 2), "scale": (3, 9)}
    assert (samples["scale"] > 0).all()
    assert mcmc.get_samples()["loc"].shape == (27, 2)
    assert len(set(samples["loc"][:, -1, 0].tolist())) == 3
    mcmc.summary()
    assert "scale" in capsys.readouterr().out
    found = mcmc.diagnostics()
    assert len(set(found["kinetic temperature"].values())) == 3
    assert set(found["step size"]) == {"chain 0", "chain 1", "chain 2"}


def test_full_batch_chains_side_by_side_take_the_steps_of_chains_alone():
    start = {"loc": torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=F64), "scale": torch.tensor([0.5, 0.6], dtype=F64)}

    def silent():  # the same exact gradients, and noise too small to see
        return SGLD(model, 1e-3, temperature=lambda update: 0.0, gradient_noise=0.0)

    def draws(**options):
        mcmc = chains(silent(), num_chains=2, initial_params=start, **options)
        mcmc.run()
        return mcmc.get_samples(group_by_chain=True)

    side, looped = draws(), draws(vectorize=False)
    for c in range(2):
        alone = chains(silent(), num_chains=1, initial_params={name: value[c : c + 1] for name, value in start.items()})
        alone.run()
        for name, value in alone.get_samples(group_by_chain=True).items():
            torch.testing.assert_close(side[name][c], value[0], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(looped[name][c], value[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("white", slow_except([False, True], True))
def test_chains_of_a_nearest_neighbor_process_run_side_by_side(white):
    x, prior = torch.rand(30, 2, dtype=F64), dist.LogNormal(torch.tensor(0.0, dtype=F64), 1.0)
    graph, kernel = NeighborGraph(x, 6), Matern52(2, lengthscale=PyroSample(prior))

    def process():
        f = pyro.sample("f", NNGP(kernel, graph, jitter=0.1))
        with pyro.plate("data", 30):
            pyro.sample("y", dist.Normal(f, torch.tensor(0.5, dtype=F64)), obs=Y)

    start = {"lengthscale": torch.tensor([0.3, 0.9], dtype=F64).log(), "f": torch.randn(2, 30, dtype=F64)}
    if white:
        process = pyro.poutine.reparam(process, config={"f": NNGPReparam()})
        start["f_white"] = start.pop("f")

    def draws(**options):
        sampler = SGLD(process, 1e-4, temperature=lambda update: 0.0, gradient_noise=0.0)
        mcmc = chains(sampler, num_chains=2, initial_params=start, **options)
        mcmc.run()
        return mcmc.get_samples(group_by_chain=True)

    side, looped = draws(), draws(vectorize=False)
    assert not torch.allclose(side["lengthscale"][0], side["lengthscale"][1])
    for name in side:
        torch.testing.assert_close(side[name], looped[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("own", slow_except([False, True], True))
def test_chains_on_minibatches_of_a_nearest_neighbor_process_run_side_by_side(own):
    x, prior = torch.rand(30, 2, dtype=F64), dist.LogNormal(torch.tensor(0.0, dtype=F64), 1.0)
    kernel = Matern52(2, torch.tensor(1.0, dtype=F64), PyroSample(prior))
    graph, gp = NeighborGraph(x, 6), Vecchia(x, Y, kernel, Gaussian(0.1), num_neighbors=6)

    def process(idx):
        batch = graph.batch(idx)
        made = Matern52(2, lengthscale=pyro.sample("lengthscale", prior))
        with pyro.poutine.scale(scale=batch.scale):
            pyro.sample("y", NNGP(made, graph, batch, jitter=0.1), obs=Y[batch.rows])

    def draws(**options):
        torch.manual_seed(0)
        mcmc = SGMCMC(SGLD(process if own else gp.model, 1e-5), 4, 2, num_chains=3, disable_progbar=True, **options)
        mcmc.run(Minibatch(30, 15))
        return mcmc.get_samples(group_by_chain=True)

    side, looped = draws(), draws(vectorize=False)
    for name, value in side.items():
        assert value.std(0).min() > 0
        torch.testing.assert_close(value, looped[name], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_chains_share_the_parameters_that_are_optimized():
    def shifted():
        shift = pyro.param("shift", torch.tensor(0.0, dtype=F64))
        z = pyro.sample("z", dist.Normal(torch.tensor(0.0, dtype=F64), 1.0))
        pyro.sample("y", dist.Normal(z + shift, 1.0), obs=torch.tensor(3.0, dtype=F64))

    mcmc = chains(SGHMC(shifted, 0.3, friction=0.3, optim={"lr": 0.05}), 10, 300, num_chains=400)
    mcmc.run()
    found = mcmc.diagnostics()["params"]
    assert len(found) == 400
    shift = float(found["chain 7"]["shift"])
    assert shift == float(pyro.param("shift").detach())
    assert abs(shift - 3) < 0.2  # the maximum of the marginal likelihood N(y; shift, 2)
    z = mcmc.get_samples(group_by_chain=True)["z"][:, -1]
    assert abs(z.mean() - (3 - shift) / 2) < 6 * (0.5 / 400) ** 0.5


@pytest.fixture
def whole():
    mcmc = chains(SGHMC(model, 0.01, friction=0.5))
    mcmc.run(Minibatch(30, 10))
    return mcmc.get_samples(group_by_chain=True)


def interrupted(call):
    """The model, with Ctrl-C at one of its calls."""
    presses = iter([False] * (call - 1) + [True])  # an iterator, which is no part of a run's identity

    def interrupting(idx):
        if next(presses, False):
            os.kill(os.getpid(), signal.SIGINT)
        return model(idx)

    return interrupting


def assert_equal(samples, others):
    assert samples.keys() == others.keys()
    assert all(torch.equal(samples[name], others[name]) for name in samples)


@pytest.mark.parametrize("stop", [6, 14], ids=["in burn-in", "in sampling"])
def test_ctrl_c_keeps_the_draws_and_the_next_run_goes_on(stop, whole, tmp_path):
    path = tmp_path / "run.pt"
    mcmc = chains(SGHMC(interrupted(stop * 2), 0.01, friction=0.5), checkpoint=path, checkpoint_every=1000)
    before = signal.getsignal(signal.SIGINT)
    with pytest.warns(UserWarning, match=r"expected 9 draws of each chain, got Ctrl-C after \d+ of 19 updates, and"):
        mcmc.run(Minibatch(30, 10))
    assert signal.getsignal(signal.SIGINT) is before
    done = mcmc.kernel.state_dict()["updates"]
    assert 0 < done < 19
    if done < 10:
        for read in (mcmc.get_samples, mcmc.diagnostics, mcmc.summary):
            with pytest.raises(
                RuntimeError, match=f"{read.__name__}: expected the run to have draws, got none. Call run"
            ):
                read()
    else:
        partial = mcmc.get_samples(group_by_chain=True)
        assert_equal(partial, {name: value[:, : done - 10] for name, value in whole.items()})
    again = chains(SGHMC(interrupted(1_000), 0.01, friction=0.5), checkpoint=path, seed=99)
    again.run(Minibatch(30, 10))
    assert_equal(again.get_samples(group_by_chain=True), whole)


def test_an_error_keeps_the_draws_so_far(whole):
    calls = []

    def breaking(idx):
        calls.append(1)
        model(idx)
        if len(calls) > 30:
            pyro.factor("hole", torch.tensor(float("nan"), dtype=F64))

    mcmc = chains(SGHMC(breaking, 0.01, friction=0.5))
    with pytest.raises(DivergenceError, match="site 'hole' has log density nan"):
        mcmc.run(Minibatch(30, 10))
    partial = mcmc.get_samples(group_by_chain=True)
    count = partial["scale"].shape[1]
    assert 0 < count < 9
    assert_equal(partial, {name: value[:, :count] for name, value in whole.items()})


def test_a_finished_run_goes_on_when_asked_for_more(whole, tmp_path):
    path = tmp_path / "run.pt"
    chains(SGHMC(model, 0.01, friction=0.5), num_samples=4, checkpoint=path).run(Minibatch(30, 10))
    longer = chains(SGHMC(model, 0.01, friction=0.5), checkpoint=path, seed=99)
    longer.run(Minibatch(30, 10))
    assert_equal(longer.get_samples(group_by_chain=True), whole)
    shorter = chains(SGHMC(model, 0.01, friction=0.5), num_samples=2, checkpoint=path)
    shorter.run(Minibatch(30, 10))
    assert_equal(shorter.get_samples(group_by_chain=True), {name: value[:, :2] for name, value in whole.items()})


SCRIPT = """
    import os, signal, sys
    import pyro, pyro.distributions as dist, torch
    from pyro_nngp.inference.mcmc.chains import SGMCMC
    from pyro_nngp.inference.mcmc.sghmc import SGHMC

    calls = []

    def model():
        calls.append(1)
        if len(calls) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 50, subsample_size=10) as idx:
            pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=torch.linspace(0, 1, 50)[idx])

    for each in sys.argv[1:]:
        sys.argv[1:] = each.split(",")
        calls.clear()
        pyro.set_rng_seed(int(sys.argv[3]))
        kernel = SGHMC(model, 0.01, friction=0.5)
        mcmc = SGMCMC(kernel, 20, 20, 2, checkpoint=sys.argv[1], checkpoint_every=7, disable_progbar=True)
        mcmc.run()
        print(mcmc.get_samples()["z"].double().sum().item().hex(), flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_goes_on_with_the_same_bits_in_another(tmp_path):
    def process(*runs):
        each = [f"{tmp_path / path},{kill_at},{seed}" for path, kill_at, seed in runs]
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), *each]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    killed = process(("whole.pt", -1, 0), ("killed.pt", 40, 0))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = process(("killed.pt", -1, 99))
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == killed.stdout != ""


def test_checkpoints_of_other_runs_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    chains(SGLD(model, 1e-3), checkpoint=path).run()
    with pytest.raises(
        CheckpointError, match=r"SGMCMC: expected .*run.pt to be of this run, got one with num_chains = 3 and not 2\."
    ):
        chains(SGLD(model, 1e-3), num_chains=2, checkpoint=path).run()
    save_checkpoint(path, {"something": 1})
    with pytest.raises(
        CheckpointError, match=r"SGMCMC: expected checkpoint to be a dict with keys \['done', 'draws', .* got"
    ):
        chains(SGLD(model, 1e-3), checkpoint=path).run()


def test_one_run_at_a_time_writes_a_checkpoint(tmp_path):
    with (
        exclusive_checkpoint("fit", tmp_path / "run.pt"),
        pytest.raises(CheckpointError, match=r"SGMCMC: expected checkpoint .*run.pt to be written by this run alone"),
    ):
        chains(SGLD(model, 1e-3), checkpoint=tmp_path / "run.pt").run()


def on_data(y):
    def normal(idx):
        z = pyro.sample("z", dist.Normal(torch.tensor(0.0, dtype=F64), 1.0))
        with pyro.plate("data", 30, subsample=idx):
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[idx])

    return normal


@pytest.mark.parametrize(
    ("other", "rows", "named"),
    [
        (lambda: SGHMC(on_data(Y + 1e-9), 0.01, num_steps=2), (30, 10), r"model\.y"),
        (lambda: SGHMC(on_data(Y), 0.01, num_steps=2), (30, 11), r"args\.0\.batch_size"),
        (lambda: SGHMC(on_data(Y), 0.01, num_steps=2), (29, 10), r"args\.0\.size"),
        (lambda: SGHMC(on_data(Y), 0.02, num_steps=2), (30, 10), "step_size"),
        (lambda: SGHMC(on_data(Y), 0.01, num_steps=2, friction=0.1), (30, 10), "friction"),
        (lambda: SGHMC(on_data(Y), 0.01, num_steps=3), (30, 10), "num_steps"),
        (lambda: SGHMC(on_data(Y), 0.01, num_steps=2, temperature=0.5), (30, 10), "temperature"),
        (lambda: SGHMC(on_data(Y), num_steps=2), (30, 10), "step_size"),
        (lambda: SGHMC(on_data(Y), 0.01, num_steps=2).refined(), (30, 10), "friction"),
        (lambda: SGHMC(on_data(Y), 0.01, num_steps=2, optim={"lr": 0.1}), (30, 10), "optim"),
        (lambda: SGHMC(on_data(Y), 0.01, num_steps=2, control_variates=True), (30, 10), "control_variates"),
    ],
)
def test_checkpoints_of_runs_with_other_data_or_settings_are_refused(other, rows, named, tmp_path):
    path = tmp_path / "run.pt"
    chains(SGHMC(on_data(Y), 0.01, num_steps=2), 2, 2, 1, checkpoint=path).run(Minibatch(30, 10))
    chains(SGHMC(on_data(Y.clone()), 0.01, num_steps=2), 3, 2, 1, checkpoint=path).run(Minibatch(30, 10))
    with pytest.raises(CheckpointError, match=f"got one with {named}.* and not "):
        chains(other(), 3, 2, 1, checkpoint=path).run(Minibatch(*rows))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [SGHMC, SGLD, SGNHT, partial(SGHMC, control_variates=True)])
def test_a_run_that_finds_its_step_size_resumes_bit_for_bit(sampler, tmp_path):
    def draws(path, seed, stop=10_000):
        mcmc = chains(sampler(interrupted(stop)), 3, 80, 2, seed=seed, checkpoint=tmp_path / path)
        with pytest.warns(UserWarning, match="Ctrl-C") if stop < 10_000 else nullcontext():
            mcmc.run(Minibatch(30, 10))
        return mcmc

    whole = draws("whole.pt", 3)
    assert whole.kernel.diagnostics()["updates per draw"] > 1
    for stop in (60, 200):
        path = f"{stop}.pt"
        assert draws(path, 3, stop).kernel.state_dict()["updates"] < whole.kernel.state_dict()["updates"]
        assert_equal(draws(path, 99).get_samples(group_by_chain=True), whole.get_samples(group_by_chain=True))


def test_starting_values_must_be_one_per_chain():
    start = {"loc": torch.zeros(2, 2, dtype=F64), "scale": torch.zeros(2, dtype=F64)}
    with pytest.raises(ValueError, match=r"expected initial_params for \(3,\) chains, got \(2,\) in front"):
        chains(SGLD(model, 1e-3), initial_params=start).run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "SGMCMC: expected num_samples >= 1, got 0"),
        ({"num_chains": 0}, "SGMCMC: expected num_chains >= 1, got 0"),
        ({"checkpoint_every": 0}, "SGMCMC: expected checkpoint_every >= 1, got 0"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        chains(SGLD(model, 1e-3), **options)


def test_other_kernels_are_refused():
    with pytest.raises(TypeError, match="SGMCMC: expected kernel to be SGHMC, SGLD or SGNHT, got NUTS"):
        chains(NUTS(model))


def stiff():
    pyro.sample("z", dist.Normal(torch.zeros(2, dtype=F64), torch.tensor([0.3, 0.1], dtype=F64)).to_event(1))


@pytest.mark.slow
def test_refinement_sees_the_bias_of_coarse_steps_where_it_is():
    # Langevin steps make the variance 1 / (1 - epsilon h / 2): 2.5 and 1.43 times too large for epsilon h = 1.2, 0.6.
    pyro.set_rng_seed(0)
    kernel = SGLD(stiff, 0.012, num_steps=4, gradient_noise=0.0)
    options = {"num_samples": 150, "warmup_steps": 300, "num_chains": 40, "disable_progbar": True}
    found = step_size_refinement(kernel, **options)["z"]
    assert found.keys() == {"mean shift", "mean z", "variance ratio", "variance z"}
    assert found["variance ratio"][1] == pytest.approx(2.5 / (1 / 0.7), rel=0.1)
    assert found["variance z"][1] > 10
    assert abs(found["variance z"][0]) < 6
    assert (found["mean z"].abs() < 6).all()
    assert torch.equal(found["mean z"].sign(), found["mean shift"].sign())


def test_refinement_takes_three_times_the_updates_of_a_run():
    seen = []

    def counted():
        seen.append(1)
        stiff()

    kernel = SGLD(counted, 0.001, num_steps=3, gradient_noise=0.0)
    step_size_refinement(kernel, num_samples=4, warmup_steps=10, num_chains=2, disable_progbar=True)
    starts = 1 + 2 * 2  # a look at the model, and the draw and check of a start for each chain
    assert len(seen) == (10 + 4 * 3) * 3 + 2 * starts


def test_refined_kernels_keep_the_dynamics():
    kernel = SGHMC(stiff, 0.1, friction=0.2, num_steps=5)
    fine = kernel.refined()
    assert (fine.step_size(0), fine.friction, fine.num_steps) == (0.05, 0.1, 10)
    assert (kernel.step_size(0), kernel.friction, kernel.num_steps) == (0.1, 0.2, 5)


def test_a_second_ctrl_c_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupt() as pressed:
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_threads_cannot_be_interrupted_and_need_no_handler():
    with ThreadPoolExecutor() as pool:
        assert pool.submit(lambda: deferred_interrupt().__enter__()).result() == []


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["short", "whole"])
def test_the_first_example_of_the_documentation_runs(whole, capsys):
    page = Path(__file__).parents[3] / "docs" / "sgmcmc.md"
    example = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    if not whole:
        written = example
        example = written.replace("num_samples=50, warmup_steps=600", "num_samples=5, warmup_steps=200")
        assert example != written
    scope: dict = {}
    exec(compile(example, str(page), "exec"), scope)
    w = scope["mcmc"].get_samples()["w"]
    assert ((w.mean(0) - torch.tensor([1.0, -2.0, 0.5])).abs() < 0.25).all()
    assert "w[2]" in capsys.readouterr().out


@pytest.mark.gpu
def test_chains_on_a_gpu_resume_with_the_same_bits(tmp_path):
    y = Y.to("cuda")

    def on_gpu(idx):
        z = pyro.sample("z", dist.Normal(torch.zeros(2, device="cuda", dtype=F64), 1.0).to_event(1))
        with pyro.plate("data", 30, subsample=idx):
            pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=y[idx])

    def samples(num_samples, seed, path):
        mcmc = chains(SGHMC(on_gpu, 0.01, friction=0.5), num_samples, seed=seed, checkpoint=tmp_path / path)
        mcmc.run(Minibatch(30, 10, device="cuda"))
        return mcmc.get_samples(group_by_chain=True)["z"]

    whole = samples(9, 3, "whole.pt")
    assert whole.device.type == "cuda"
    assert torch.equal(samples(4, 3, "parts.pt"), whole[:, :4])
    assert torch.equal(samples(9, 99, "parts.pt"), whole)


def test_labels_off_the_support_are_refused():
    labels = torch.zeros(300, dtype=F64)
    labels[290] = 7.0  # in the last minibatch

    def binary(idx):
        z = pyro.sample("z", dist.Normal(torch.tensor(0.0, dtype=F64), 1.0))
        with pyro.plate("data", 300, subsample=idx):
            pyro.sample("y", dist.Bernoulli(logits=z), obs=labels[idx])

    message = r"expected data of site 'y' on the support of Bernoulli, got 1 entries off it, such as \[7.0\]"
    with pytest.raises(ValueError, match=message):
        chains(SGLD(binary, 1e-3)).run(Minibatch(300, 20))
    with pytest.raises(ValueError, match=message):  # of all rows at once
        chains(SGLD(lambda: binary(None), 1e-3)).run()
    seen = torch.arange(300) != 290
    chains(SGLD(masked(labels, seen), 1e-3)).run(Minibatch(300, 20))


def masked(labels, seen):
    def binary(idx):
        z = pyro.sample("z", dist.Normal(torch.tensor(0.0, dtype=F64), 1.0))
        with pyro.plate("data", 300, subsample=idx), pyro.poutine.mask(mask=seen[idx]):
            pyro.sample("y", dist.Bernoulli(logits=z), obs=labels[idx])

    return binary
