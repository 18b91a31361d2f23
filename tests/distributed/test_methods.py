"""Methods on several processes: killed ones, refused checkpoints, errors. Laws of their results are in test_laws."""

import os
import signal

import pytest
import torch

from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.training_state import load_training_state, training_state
from pyro_nngp.inference import Checkpoint, CheckpointError, DivergenceError, Validation, fit, to_arviz
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, NegativeBinomial, Poisson
from pyro_nngp.means import LinearMean
from pyro_nngp.models import LMC, LOO, Vecchia
from pyro_nngp.models.base import response
from pyro_nngp.models.base.intervals import information_of
from tests.builders import surface
from tests.oracles.processes import on_processes

N = 200


def with_trend(shift=0.0):
    x, y, _ = surface(Gaussian)
    return Vecchia(ShardedData(x, y + shift), num_neighbors=8, mean=LinearMean(2))


def test_numbers_of_neighbors_that_are_not_given_are_chosen_after_the_rows_are_distributed(monkeypatch):
    chosen = []
    monkeypatch.setattr(response, "choose_neighbors", lambda method, **_: chosen.append(method.rows.is_whole))
    x, y, _ = surface(Gaussian)
    Vecchia(ShardedData(x, y), num_neighbors=8)
    assert chosen == []
    Vecchia(ShardedData(x, y))
    assert chosen == [True, False]  # on the sample that it is built on first


def test_the_state_of_training_is_restored():
    gp = with_trend()
    before, state = gp.log_prob(), training_state(gp)
    fit(gp, 3, progress=False)
    gp.refresh_neighbors()
    assert gp.log_prob() != before
    load_training_state(gp, state)
    torch.testing.assert_close(gp.log_prob(), before, rtol=1e-12, atol=0)


def killed(path, rank, step):
    def kill(now, loss):
        if now == step and torch.distributed.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    gp = with_trend()
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
    fit(with_trend(), 30, batch_size=80, checkpoint=tmp_path / "checkpoint", progress=False)
    with pytest.raises(CheckpointError, match="data = "):
        fit(with_trend(1.0), 30, batch_size=80, checkpoint=tmp_path / "checkpoint", progress=False)


def in_a_group():
    x, y, _ = surface(Gaussian)
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
    x, y, _ = surface(Gaussian)
    data = ShardedData(x, y)
    gp = Vecchia(data, num_neighbors=4, kernel=Matern52(2, 1.0, 0.3), likelihood=Gaussian(0.1))
    for name, call in {
        "extend": lambda: gp.extend(x, y),
        "condition_on": lambda: gp.condition_on(x, y),
        "subset": lambda: gp.subset(torch.arange(5)),
        "save": lambda: gp.save("model.safetensors"),
        "to_arviz": lambda: to_arviz(gp),
    }.items():
        with pytest.raises(TypeError, match=rf"Vecchia.{name}: expected method with all rows, got one of ShardedData"):
            call()
    assert information_of(gp) == "no interval on several processes"
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
    gp = Vecchia(
        ShardedData(*surface(Gaussian)[:2]), num_neighbors=4, kernel=Matern52(2, 1.0, 0.3), likelihood=Gaussian(0.1)
    )
    scores = iter([3.0, 2.0, 1.0])
    result = fit(gp, 3, validation=Validation(lambda: next(scores), every=1), progress=False)
    assert result.scores == [(1, 3.0), (2, 2.0), (3, 1.0)]


@pytest.mark.slow
def test_parameters_per_datum_are_not_trained_by_gradients():
    data = ShardedData(*surface(Poisson)[:2])
    with pytest.raises(ValueError, match="expected parameters of the hyperparameters alone with ShardedData"):
        fit(LOO(data, likelihood=NegativeBinomial(), num_neighbors=8), 3, solve_every=0)
