"""Stochastic-gradient samplers on several processes: summed gradients, and noise that is drawn once."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributed as dist_of
from pyro.infer import MCMC, NUTS
from pyro.nn import PyroSample

from pyro_nngp.distributed import ProcessError, ShardedData
from pyro_nngp.inference import SGHMC, SGLD, SGMCMC, SGNHT, Minibatch
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import LOO, SWSGP, Vecchia
from tests.oracles.processes import on_processes

N = 200


def method(sharded):
    x = torch.rand(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kernel = Matern52(2, 1.0)
    kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2).double() - 1, 0.5).to_event(1))
    options = {"kernel": kernel, "likelihood": Gaussian(0.01), "num_neighbors": 8}
    return Vecchia(ShardedData(x, y), **options) if sharded else Vecchia(x, y, **options)


class SeededMinibatch(Minibatch):
    """Uses up as many random numbers as a minibatch on several processes, each of which seeds its own draw."""

    def draw(self):
        torch.randint(2**62, ())
        return super().draw()


def drawn(sharded, part, seed, size=40, sampler=SGLD, step_size=1e-5, **options):
    """Draws with batches of some part of the rows, from a random state that differs between processes."""
    gp = method(sharded)
    rank = gp.shard.world.rank if sharded else 0
    pyro.set_rng_seed(seed + rank)
    kernel = sampler(gp.model, step_size, num_steps=2, **options)
    mcmc = SGMCMC(kernel, size, 10, num_chains=1, vectorize=False, disable_progbar=True)
    kind = Minibatch if sharded else SeededMinibatch
    mcmc.run(kind(gp.num_data, round(part * gp.num_data)))
    return mcmc.get_samples()


def differing():
    """The error of each way in which the second process differs."""
    odd, errors = dist_of.get_rank() == 1, {}
    for name, gp, step_size, size, part in (
        ("step_size", method(True), 1e-5 * (1 + odd), 4, 1.0),
        ("num_samples", method(True), 1e-5, 4 + odd, 1.0),
        ("args", method(True), 1e-5, 4, 0.5 if odd else 1.0),
        ("likelihood", method(True), 1e-5, 4, 1.0),
        ("none", method(True), 1e-5, 4, 1.0),
    ):
        if name == "likelihood" and odd:
            gp.likelihood.variance = 0.02
        try:
            mcmc = SGMCMC(SGLD(gp.model, step_size), size, 2, num_chains=1, vectorize=False, disable_progbar=True)
            mcmc.run(Minibatch(gp.num_data, round(part * gp.num_data)))
            errors[name] = "fine"
        except ProcessError as error:
            errors[name] = str(error)
    return errors


@pytest.mark.slow
def test_processes_that_differ_are_named(tmp_path):
    for errors in on_processes(2, tmp_path, differing):
        assert errors.pop("none") == "fine"
        for name, message in errors.items():
            assert "SGLD: expected settings and starting values to be those of all processes" in message, name
            assert name in message


@pytest.mark.slow
def test_all_rows_give_the_draws_of_one_process(tmp_path):
    (name,), (expected,) = zip(*drawn(False, 1.0, 5).items(), strict=True)
    for found in on_processes(2, tmp_path, drawn, True, 1.0, 5):
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-9)


def anchored(sharded, part):
    """Draws of each sampler with control variates."""
    found = {}
    for sampler, step_size in ((SGLD, 1e-5), (SGHMC, 1e-3), (SGNHT, 1e-3)):
        ((_, found[sampler.__name__]),) = drawn(
            sharded, part, 5, 10, sampler=sampler, step_size=step_size, control_variates=True
        ).items()
    return found


@pytest.mark.slow
def test_control_variates_give_the_draws_of_one_process(tmp_path):
    expected = anchored(False, 1.0)
    for found in on_processes(2, tmp_path, anchored, True, 1.0):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)
            assert value.std() > 0


@pytest.mark.slow
def test_control_variates_of_own_minibatches_give_the_same_draws(tmp_path):
    one, other = on_processes(2, tmp_path, anchored, True, 0.25)
    for name, value in one.items():
        assert torch.equal(other[name], value)
        assert value.std() > 0


def test_processes_draw_the_same_from_their_own_minibatches(tmp_path):
    one, other = on_processes(2, tmp_path, drawn, True, 0.25, 5, 6)
    for name, value in one.items():
        assert torch.equal(other[name], value)
        assert value.std() > 0


def refused():
    gp = method(True)
    idx = torch.arange(gp.num_data)
    with pytest.raises(TypeError, match="Vecchia.model: expected HMC and NUTS to run on one process, got several"):
        MCMC(NUTS(gp.model), 2, 2, disable_progbar=True).run(idx)
    x = torch.rand(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = LOO(ShardedData(x, (x[:, 0] > 0.5).double()), likelihood=Bernoulli(), num_neighbors=4)
    local = SWSGP(ShardedData(x, x[:, 0]), likelihood=Gaussian(0.1), inducing=8)
    for each in (labels, local):
        with pytest.raises(ValueError, match="latent site .* without values of single rows on several processes"):
            SGMCMC(SGLD(each.model, 1e-5), 2, 2, disable_progbar=True).run(torch.arange(each.num_data))
    with pytest.raises(ValueError, match="expected model to be that of a method with rows on 2 processes, got another"):
        SGMCMC(SGLD(method(False).model, 1e-5), 2, 2, disable_progbar=True).run()
    with pytest.raises(ValueError, match="expected checkpoint to be None on 2 processes, got chain"):
        SGMCMC(SGLD(gp.model, 1e-5), 2, 2, checkpoint="chain", disable_progbar=True).run(idx)
    return {}


@pytest.mark.slow
def test_samplers_that_would_use_own_rows_alone_are_refused(tmp_path):
    on_processes(2, tmp_path, refused)
