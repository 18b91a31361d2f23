"""Rows that a model is run on."""

import pyro.distributions as dist
import pytest
import torch
from builders import build
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroSample
from pyro.optim import Adam

from pyro_nngp.inference import SGHMC, Minibatch


def run(kernel, *args):
    MCMC(kernel, num_samples=1, warmup_steps=1, disable_progbar=True).run(*args)


@pytest.mark.parametrize("name", ["VNNGP", "Vecchia", "SVGP"])
def test_nuts_on_a_part_of_the_rows_warns(name):
    gp = build(name)
    part = f"HMC and NUTS on 5 of {gp.num_data} rows draw from the posterior of these rows, each counted 12 times"
    with pytest.warns(UserWarning, match=part) as found:
        NUTS(gp.model, max_tree_depth=1).setup(1, torch.arange(5))
    assert len([each for each in found if "rows draw from" in str(each.message)]) == 1


def test_all_rows_and_other_algorithms_do_not_warn():
    gp, idx = build("VNNGP"), torch.arange(5)
    run(NUTS(gp.model, max_tree_depth=1))
    run(NUTS(gp.model, max_tree_depth=1), torch.arange(gp.num_data))
    one = torch.tensor(1.0, dtype=torch.float64)
    vecchia = build("Vecchia", variance=one, lengthscale=PyroSample(dist.LogNormal(0 * one, one)))
    run(SGHMC(vecchia.model, step_size=1e-4), Minibatch(gp.num_data, 5))
    SVI(gp.model, AutoNormal(gp.model), Adam({}), Trace_ELBO()).step(idx)
    Predictive(gp.model, num_samples=2)(idx)
