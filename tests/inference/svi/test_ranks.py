"""Processes that do not train the same model, or do not answer, are an error on all of them."""

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pyro_nngp.distributed import ShardedData, World
from pyro_nngp.distributed.world import ProcessError
from pyro_nngp.inference import fit, identity
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import VNNGP
from tests.builders import surface
from tests.oracles.processes import on_processes


class Network(torch.nn.Module):
    """A mean function that begins anywhere."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)[..., 0]


class Beside:
    """The first of two processes, of which the second has other descriptions."""

    rank, size = 0, 2

    def __init__(self, other):
        self.other = other

    def gather(self, values):
        return torch.cat([values, torch.tensor([identity.code_of(f"{k} = {v}") for k, v in self.other.items()])])


def test_what_differs_is_named():
    same = {"lr": "0.1", "kernel": "RBF"}
    identity.check_same_run("fit", Beside(same), dict(reversed(same.items())))
    for other, named in (
        (same | {"lr": "0.2"}, "and not on all, lr = 0.1. "),
        ({"lr": "0.1"}, "kernel = RBF. "),
        (same | {"mean": "0"}, "less than on others. "),
        (dict(zip(same, reversed(same.values()), strict=True)), "lr = 0.1, kernel = RBF. "),
    ):
        with pytest.raises(ProcessError, match=f"to be those of all processes, got on process 0 .*{named}Give"):
            identity.check_same_run("fit", Beside(other), same)


def differing():
    """The error of each way in which the second process differs."""
    x, y, _ = surface(Gaussian)
    odd, errors = dist.get_rank() == 1, {}

    def attempt(name, kernel=None, mean=None, **options):
        kernel = Matern52(2, 1.0, 0.3) if kernel is None else kernel
        gp = VNNGP(ShardedData(x, y), kernel=kernel, likelihood=Gaussian(0.1), num_neighbors=4, mean=mean)
        try:
            fit(gp, **{"num_steps": 2, "lr": 0.01, "batch_size": 20, "refresh_every": 0, "progress": False} | options)
            errors[name] = "fine"
        except ProcessError as error:
            errors[name] = str(error)

    attempt("nothing", mean=Network(3))
    attempt("lengthscale", Matern52(2, 1.0, 0.31 if odd else 0.3))
    attempt("kernel", (RBF if odd else Matern52)(2, 1.0, 0.3))
    attempt("mean", mean=Network(dist.get_rank()))
    attempt("lr", lr=0.02 if odd else 0.01)
    attempt("batch_size", batch_size=30 if odd else 20)
    attempt("num_steps", num_steps=3 if odd else 2)
    return errors


@pytest.mark.slow
def test_a_process_that_differs_is_an_error_on_all(tmp_path):
    named = {"lengthscale": "kernel", "lr": "rates", "mean": "layer.weight"}
    for errors in on_processes(2, tmp_path, differing):
        assert errors.pop("nothing") == "fine"
        for name, error in errors.items():
            assert "fit: expected settings and starting values to be those of all processes, got on process" in error
            assert named.get(name, name) in error


def stopped(folder):
    """What the first process says of the second one, which stops."""
    if dist.get_rank() == 1:
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}
    group = dist.group.WORLD
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    with pytest.raises(ProcessError) as found:
        World().sum(torch.ones(1))
    (folder / "error").write_text(str(found.value))
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    os._exit(0)  # without the barrier at the end


@pytest.mark.slow
def test_a_process_that_is_stopped_ends_the_others(tmp_path):
    (tmp_path / "group").mkdir()
    with pytest.raises(FileNotFoundError, match="result"):  # neither has one
        on_processes(2, tmp_path / "group", stopped, tmp_path)
    error = (tmp_path / "error").read_text()
    message = "process 0 of 2: expected all processes to take part in time, got RuntimeError: .*([Tt]imed out|closed)"
    assert re.match(message, error), error
