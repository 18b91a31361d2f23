"""Training and predictions of methods on several processes equal those of one."""

import os
import signal

import pytest
import torch

from pyro_nngp.distributed import ShardedData
from pyro_nngp.inference import CheckpointError, DivergenceError, Schedule, Validation, fit, to_arviz
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Binomial, Gaussian, NegativeBinomial, StudentT
from pyro_nngp.means import LinearMean
from pyro_nngp.models import LMC, LOO, MLLk, Vecchia
from pyro_nngp.models.base import response
from pyro_nngp.variational import Conjugate
from tests.oracles.processes import on_processes

N = 200


def problem(kind="normal"):
    """Inputs, targets and new places."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(N, 2, generator=generator, dtype=torch.float64)
    f = torch.sin(6 * x[:, 0]) * torch.cos(5 * x[:, 1])
    y = f + 0.1 * torch.randn(N, generator=generator, dtype=torch.float64)
    if kind == "counts":
        y = torch.poisson((f + 1).exp(), generator=generator)
    if kind == "labels":
        y = (f > 0).double()
    return x, y, torch.rand(9, 2, generator=generator, dtype=torch.float64)


CASES = {
    "vecchia": ("normal", Vecchia, {"num_neighbors": 32}),  # one process without it has the exact process
    "vecchia with a trend": ("normal", Vecchia, {"num_neighbors": 8, "mean": LinearMean}),
    "loo": ("normal", LOO, {}),
    "loo of counts": ("counts", LOO, {"likelihood": NegativeBinomial, "num_neighbors": 8}),
    "loo of labels": ("labels", LOO, {"likelihood": Bernoulli, "num_neighbors": 8, "guide": Conjugate()}),
    "mllk": ("normal", MLLk, {"num_neighbors": 6}),
}


def build(case, data=None):
    """A method of the case, on tensors or on sharded data."""
    kind, method, options = CASES[case]
    x, y, _ = problem(kind)
    options = dict(options)
    if "likelihood" in options:
        options["likelihood"] = options["likelihood"]()
    if "mean" in options:
        options["mean"] = options["mean"](2)
    return (
        method(ShardedData(x, y) if data is None else data, **options) if data is not False else method(x, y, **options)
    )


def trained(case, sharded=True):
    """Losses, hyperparameters and predictions after the default training, and after five steps of Adam."""
    new = problem()[2]
    found = {}
    for name, options in {"default": {}, "adam": {"num_steps": 5, "batch_size": N, "refresh_every": 3}}.items():
        gp = build(case, None if sharded else False)
        result = fit(gp, progress=False, **options)
        mean, variance = gp(new)
        found[f"{name} losses"] = result.losses
        found[f"{name} predictions"] = torch.stack([mean, variance, gp.predict(new).variance]).detach()
        found[f"{name} lengthscale"] = gp.kernel.lengthscale.detach()
        if isinstance(gp, Vecchia):
            found[f"{name} log density"] = gp.log_prob()
    return found


def check_same(found, expected, rtol):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=max(rtol, 1e-5 if "losses" in name else 0), atol=rtol)


def test_numbers_of_neighbors_that_are_not_given_are_chosen_after_the_rows_are_distributed(monkeypatch):
    chosen = []
    monkeypatch.setattr(response, "choose_neighbors", lambda method, **_: chosen.append(method))
    x, y, _ = problem()
    Vecchia(ShardedData(x, y), num_neighbors=8)
    assert chosen == []
    gp = Vecchia(ShardedData(x, y))
    assert chosen == [gp]


QUICK = {"loo of labels"}  # on two processes


@pytest.mark.parametrize(
    ("case", "count"),
    [
        pytest.param(case, count, marks=() if count == 2 and case in QUICK else pytest.mark.slow)
        for case in CASES
        for count in (1, 2, 4)
    ],
)
def test_every_method_on_several_processes(case, count, tmp_path):
    expected = trained(case, sharded=False)
    for found in on_processes(count, tmp_path, trained, case) if count > 1 else [trained(case)]:
        check_same(found, expected, 1e-6)


def solved(likelihood, kind, sharded):
    """Moments and score after solving for q(omega), which takes no draws of it."""
    x, y, new = problem(kind)
    options = {"kernel": Matern52(2, 1.0, 0.3), "likelihood": likelihood(), "num_neighbors": 8}
    gp = LOO(ShardedData(x, y), **options) if sharded else LOO(x, y, **options)
    for _ in range(2):
        gp.solve()
        gp.refresh_neighbors()
    total = gp.score(torch.arange(gp.num_data)) * gp.num_data
    total = torch.tensor(total, dtype=torch.float64)
    total = gp.shard.world.sum(total) if sharded else total
    return {"moments": torch.stack(gp(new)).detach(), "score": total}


@pytest.mark.slow
@pytest.mark.parametrize(("likelihood", "kind"), [(StudentT, "normal"), (Bernoulli, "labels")])
def test_solutions_for_auxiliary_variables(likelihood, kind, tmp_path):
    expected = solved(likelihood, kind, False)
    for found in on_processes(2, tmp_path, solved, likelihood, kind, True):
        check_same(found, expected, 1e-8)


def by_row(sharded):
    x, y, new = problem()
    offset, weights = x[:, 0].exp(), 1 + (x[:, 1] > 0.5).double()
    options = {"kernel": Matern52(2, 1.0, 0.3), "likelihood": Gaussian(0.1), "num_neighbors": 8}
    if sharded:
        gp = Vecchia(ShardedData(x, y + offset, offset=offset, weights=weights), **options)
    else:
        gp = Vecchia(x, y + offset, offset=offset, weights=weights, **options)
    fit(gp, num_steps=3, batch_size=N, progress=False)
    return {"moments": torch.stack(gp(new, offset=new[:, 0].exp())).detach()}


def test_offset_and_weights_follow_their_rows(tmp_path):
    expected = by_row(False)
    for found in on_processes(2, tmp_path, by_row, True):
        check_same(found, expected, 1e-8)


def still(batch_size):
    """Losses of steps too small to move anything."""
    gp = Vecchia(ShardedData(*problem()[:2]), num_neighbors=8, kernel=Matern52(2, 1.0, 0.3), likelihood=Gaussian(0.1))
    options = {"refresh_every": 0, "solve_every": 0, "progress": False}
    return {"losses": fit(gp, 4, batch_size=batch_size, lr=1e-30, schedule=Schedule(()), **options).losses}


def test_minibatches_of_an_epoch_average_to_the_loss_of_all_rows(tmp_path):
    (tmp_path / "batches").mkdir()
    (tmp_path / "all").mkdir()
    batches = on_processes(2, tmp_path / "batches", still, N // 4)
    whole = on_processes(2, tmp_path / "all", still, N)
    assert torch.equal(batches[0]["losses"], batches[1]["losses"])
    assert batches[0]["losses"].std() > 0.01
    torch.testing.assert_close(batches[0]["losses"].mean(), whole[0]["losses"][0], rtol=1e-6, atol=0)


class Stop(Exception):
    """Ends a run in the middle."""


def stop_at(step):
    def callback(now, loss):
        if now == step:
            raise Stop

    return callback


def resumed(path, stop, case="loo of counts", batch_size=80):
    gp = build(case)
    options = {"checkpoint": None if path is None else path / "checkpoint", "batch_size": batch_size}
    try:
        result = fit(gp, 30, callback=stop_at(stop), progress=False, **options)
    except Stop:
        return {}
    return {"losses": result.losses, "lengthscale": gp.kernel.lengthscale.detach()}


@pytest.mark.slow
def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    from pyro_nngp.inference import Checkpoint

    assert Checkpoint(tmp_path).every == 1000  # the first write comes before the first step
    expected = resumed(None, -1)
    assert resumed(tmp_path, 20) == {}
    found = resumed(tmp_path, -1)
    assert torch.equal(found["losses"], expected["losses"])
    assert torch.equal(found["lengthscale"], expected["lengthscale"])


def resumed_often(path, stop, every):
    from pyro_nngp.inference import Checkpoint

    gp = build("loo of counts")
    checkpoint = None if path is None else Checkpoint(path / "checkpoint", every=every)
    try:
        result = fit(gp, 30, batch_size=N, checkpoint=checkpoint, callback=stop_at(stop), progress=False)
    except Stop:
        return {}
    folders = [] if path is None else [int(each.name) for each in (path / "checkpoint").iterdir()]
    return {
        "losses": result.losses,
        "lengthscale": gp.kernel.lengthscale.detach(),
        "folders": torch.tensor(folders),
    }


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 2), (2, 3), (4, 1), (1, 2)])
def test_a_checkpoint_continues_on_another_number_of_processes(counts, tmp_path):
    expected = resumed_often(None, -1, 10)
    for number, (count, stop) in enumerate(zip(counts, (17, -1), strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        if count == 1:
            parts = [resumed_often(tmp_path, stop, 5)]
        else:
            parts = on_processes(count, folder, resumed_often, tmp_path, stop, 5)
    for part in parts:
        torch.testing.assert_close(part["losses"], expected["losses"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(part["lengthscale"], expected["lengthscale"], rtol=1e-6, atol=0)
        assert len(part["folders"]) <= 2  # the last one, and perhaps one that is being removed


def killed(path, rank, step):
    def kill(now, loss):
        if now == step and torch.distributed.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    from pyro_nngp.inference import Checkpoint

    gp = build("vecchia with a trend")
    fit(gp, 30, batch_size=N, checkpoint=Checkpoint(path / "checkpoint", every=4), callback=kill, progress=False)
    return {"lengthscale": gp.kernel.lengthscale.detach()}


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_the_checkpoint_stands(tmp_path):
    folders = [tmp_path / name for name in ("killed", "again", "never")]
    for folder in folders:
        folder.mkdir()
    with pytest.raises(AssertionError, match="process 0 of 2: expected all processes to take part"):
        on_processes(2, folders[0], killed, tmp_path, 1, 15)
    found = on_processes(2, folders[1], killed, tmp_path, 1, -1)
    expected = on_processes(2, folders[2], killed, folders[2], 1, -1)
    assert torch.equal(found[0]["lengthscale"], expected[0]["lengthscale"])


@pytest.mark.slow
def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    resumed(tmp_path, -1, "vecchia with a trend")
    x, y, _ = problem()
    gp = Vecchia(ShardedData(x, y + 1), num_neighbors=8, mean=LinearMean(2))
    with pytest.raises(CheckpointError, match="data = "):
        fit(gp, 30, batch_size=80, checkpoint=tmp_path / "checkpoint", progress=False)


def in_a_group():
    x, y, _ = problem()
    with pytest.raises(ValueError, match="expected method with rows on 2 processes, got one with all rows on each"):
        fit(Vecchia(x, y, num_neighbors=4), 3)
    gp = Vecchia(ShardedData(x, y), num_neighbors=4, kernel=Matern52(2, 1.0, 0.3), likelihood=Gaussian(0.1))

    def spoil(step, loss):
        if gp.shard.world.rank == 1:
            gp.y.fill_(torch.inf)

    with pytest.raises(DivergenceError, match="loss nan|loss inf"):
        fit(gp, 3, batch_size=N, callback=spoil, solve_every=0, progress=False)
    return {}


@pytest.mark.slow
def test_errors_in_a_group(tmp_path):
    on_processes(2, tmp_path, in_a_group)


def test_what_is_not_there_on_several_processes():
    x, y, _ = problem()
    data = ShardedData(x, y)
    gp = Vecchia(data, num_neighbors=4, kernel=Matern52(2, 1.0, 0.3), likelihood=Gaussian(0.1))
    for name, call in {
        "extend": lambda: gp.extend(x, y),
        "condition_on": lambda: gp.condition_on(x, y),
        "save": lambda: gp.save("model.safetensors"),
        "to_arviz": lambda: to_arviz(gp),
    }.items():
        with pytest.raises(TypeError, match=rf"Vecchia.{name}: expected method with all rows, got one of ShardedData"):
            call()
    with pytest.raises(ValueError, match="expected idx with own rows on several processes, got None"):
        gp.model()
    with pytest.raises(TypeError, match="LMC: expected x to be a tensor or a table for this method"):
        LMC(data, kernels=[Matern52(2)], likelihood=[Gaussian()])
    with pytest.raises(TypeError, match="expected ShardedData without y and other positional arguments, got more"):
        Vecchia(data, y)
    with pytest.raises(ValueError, match="expected seed to be 0, that of the data, got 3"):
        Vecchia(data, seed=3)
    with pytest.raises(ValueError, match="expected ordering to be 'random' with ShardedData"):
        Vecchia(data, ordering="maximin")
    with pytest.raises(ValueError, match="expected y to be labels 0 and 1"):
        LOO(ShardedData(x, y), likelihood=Bernoulli())
    with pytest.raises(TypeError, match="missing .*argument: 'y'"):
        Vecchia(x)


def test_scores_on_held_out_data_are_those_of_the_first_process():
    gp = Vecchia(ShardedData(*problem()[:2]), num_neighbors=4, kernel=Matern52(2, 1.0, 0.3), likelihood=Gaussian(0.1))
    scores = iter([3.0, 2.0, 1.0])
    result = fit(gp, 3, validation=Validation(lambda: next(scores), every=1), progress=False)
    assert result.scores == [(1, 3.0), (2, 2.0), (3, 1.0)]


@pytest.mark.slow
def test_parameters_per_datum_are_not_trained_by_gradients():
    with pytest.raises(ValueError, match="expected parameters of the hyperparameters alone with ShardedData"):
        fit(build("loo of counts"), 3, solve_every=0)


def trials(sharded):
    x, y, new = problem("labels")
    numbers = torch.arange(1, N + 1).remainder(5) + 1.0
    counts = (y * numbers).double()
    options = {"likelihood": Binomial(), "num_neighbors": 8, "guide": Conjugate()}
    if sharded:
        gp = LOO(ShardedData(x, counts, trials=numbers), **options)
    else:
        gp = LOO(x, counts, trials=numbers, **options)
    fit(gp, num_steps=3, batch_size=N, progress=False)
    return {"moments": torch.stack(gp(new)).detach()}


@pytest.mark.slow
def test_trials_follow_their_rows(tmp_path):
    expected = trials(False)
    for found in on_processes(2, tmp_path, trials, True):
        check_same(found, expected, 1e-8)
