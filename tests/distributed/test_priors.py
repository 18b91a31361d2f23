"""Priors on several processes: each counts them with its share. Further laws of methods are in test_laws."""

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_nngp.distributed import ShardedData
from pyro_nngp.inference import Schedule, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import SVGP
from tests.builders import surface
from tests.oracles.processes import on_processes

N = 200


def with_priors(sharded, count):
    """Losses at draws of the lengthscale, whose prior and guide each process counts with its share."""
    x, y, _ = surface(Gaussian)
    kernel = Matern52(2, 1.0)
    kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2).double() - 1, 0.3).to_event(1))
    options = {"kernel": kernel, "likelihood": Gaussian(0.1), "inducing": 10, "learn_inducing": False}
    gp = SVGP(ShardedData(x, y), **options) if sharded else SVGP(x, y, **options)
    steps = {"solve_every": 0, "lr": 1e-30, "schedule": Schedule(()), "progress": False}
    return {"losses": fit(gp, count, batch_size=N, **steps).losses}


@pytest.mark.slow
def test_priors_count_once(tmp_path):
    expected = with_priors(False, 400)["losses"].double()
    found = on_processes(2, tmp_path, with_priors, True, 400)[0]["losses"].double()
    error = (expected.var() / 400 + found.var() / 400).sqrt()
    assert error < 0.1
    assert (found.mean() - expected.mean()).abs() < 4 * error
