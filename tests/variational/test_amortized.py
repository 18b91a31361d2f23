"""Guides computed by an encoder: invariances, gradients, training, transfer to other data, state."""

import copy
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import matern, q_of, waves
from oracles.dense import dense_covariance
from oracles.waves import ENCODERS, N, factor, loss, shaken
from pyro.infer import SVI
from pyro.nn import PyroSample
from pyro.optim import Adam

from pyro_nngp._memory import block_limit
from pyro_nngp.inference import IntegratedELBO, fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import (
    Bernoulli,
    Binomial,
    Categorical,
    Gaussian,
)
from pyro_nngp.means import ConstantMean
from pyro_nngp.models import NPVI
from pyro_nngp.variational import Amortized, PseudoObservations
from pyro_nngp.variational.encoders import (
    ConditionalEncoder,
    SiteEncoder,
    observed,
)

F64 = torch.float64


@pytest.mark.parametrize("make", ENCODERS)
def test_order_of_neighbors_does_not_matter(make):
    x, y = waves()
    gp = NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=6, guide=Amortized(shaken(make())))
    before, loc = factor(gp), q_of(gp).loc
    gp.graph.neighbors.copy_(gp.graph.neighbors[:, torch.randperm(6)])
    torch.testing.assert_close(factor(gp), before, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(q_of(gp).loc, loc, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", ENCODERS)
def test_neither_row_order_nor_translation_matters(make):
    x, y = waves()
    encoder, shuffle, order = shaken(make()), torch.randperm(N), torch.randperm(N)
    settings = {"kernel": matern(), "likelihood": Gaussian(0.1), "num_neighbors": 6}
    one = NPVI(x, y, ordering=order, guide=Amortized(encoder), **settings)
    two = NPVI(
        x[shuffle] + 3,
        y[shuffle],
        ordering=torch.argsort(shuffle)[order],
        guide=Amortized(copy.deepcopy(encoder)),
        **settings,
    )
    torch.testing.assert_close(factor(two), factor(one)[shuffle][:, shuffle], rtol=1e-6, atol=1e-9)
    assert loss(two) == pytest.approx(loss(one), rel=1e-6)


@pytest.mark.parametrize("make", ENCODERS)
def test_some_rows_in_chunks_are_those_of_all(make):
    x, y = waves()
    gp = NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=6, guide=Amortized(shaken(make())))
    whole, rows = q_of(gp), torch.tensor([4, 9, 17, 30, 31])
    with block_limit(2 * 13**2):
        part = q_of(gp, rows)
    for got, want in ((part.loc, whole.loc), (part.scale, whole.scale), (part.weights, whole.weights)):
        torch.testing.assert_close(got, want[rows])
    assert torch.equal(part.pattern, whole.pattern[rows])


@pytest.mark.parametrize("make", ENCODERS)
def test_predictions_use_the_covariance_between_neighbors(make):
    x, y = waves()
    settings = {"mean": ConstantMean(0.0).requires_grad_(False), "jitter": 1e-6}
    gp = NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=N - 1, guide=Amortized(shaken(make())), **settings)
    new, _ = waves(5)
    loc, var = gp(new, num_neighbors=N)
    q, root, cov = q_of(gp), factor(gp), dense_covariance(gp.kernel, x).detach()
    cross = gp.kernel(x, new).detach()
    weights = torch.cholesky_solve(cross, torch.linalg.cholesky(cov))
    own = gp.kernel(new, diag=True).detach() * (1 + 1e-6)
    want = own - (weights * cross).sum(0) + (weights.mT @ root).square().sum(-1)
    torch.testing.assert_close(loc.detach(), q.loc.detach() @ weights, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(var.detach(), want, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("make", ENCODERS)
def test_gradients_flow_through_the_kernel_values_that_the_guide_reads(make):
    x, y = waves()
    gp = NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=5, guide=Amortized(shaken(make(), 0.1)))
    IntegratedELBO().differentiable_loss(gp.model, gp.guide).backward()
    (parameter,) = [p for name, p in gp.kernel.named_parameters() if "lengthscale" in name]
    values = []
    for step in (1e-5, -1e-5):
        parameter.data[0] += step
        values.append(loss(gp))
        parameter.data[0] -= step
    assert float(parameter.grad[0]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("make", ENCODERS)
def test_training_amortizing_and_what_is_shared(make):
    x, y = waves(200)
    k = Matern32(2, lengthscale=torch.tensor(0.1, dtype=F64))
    k.requires_grad_(False)
    gp = NPVI(x, y, k, Gaussian(0.05), num_neighbors=6, guide=Amortized(make()))
    before = loss(gp)
    assert not gp.can_solve
    fit(gp, 30, batch_size=50, lr=0.03, refresh_every=20, progress=False)
    assert loss(gp) < before

    other_x, other_y = waves(90)
    other = gp.amortize(other_x, other_y)
    untrained = NPVI(other_x, other_y, copy.deepcopy(k), Gaussian(0.05), num_neighbors=6, guide=Amortized(make()))
    assert loss(other) < loss(untrained)
    sizes = [sum(p.numel() for p in model.q.parameters()) for model in (gp, other)]
    assert sizes[0] == sizes[1] < 2 * 1000

    kept = loss(gp)
    svi = SVI(other.model, other.guide, Adam({"lr": 0.1}), IntegratedELBO())
    svi.step()
    assert loss(gp) == kept


@pytest.mark.slow
def test_the_plain_call_for_labels_has_a_nugget_that_an_encoder_can_follow():
    x, y = waves(200)
    labels = (y > 0).double()
    gp = NPVI(x, labels, likelihood=Bernoulli(), num_neighbors=8, guide=Amortized(ConditionalEncoder()))
    assert gp.jitter == 0.01
    assert NPVI(x, labels, likelihood=Bernoulli(), num_neighbors=8).jitter == 1e-6
    fit(gp, 30, progress=False)
    assert loss(gp) / len(x) < 0.9 * math.log(2)  # of a coin; with a nugget of 1e-6 it is above 2 log 2


@pytest.mark.slow
@pytest.mark.parametrize(("make", "left"), [(lambda: SiteEncoder(2), 0.15), (ConditionalEncoder, 0.25)])
def test_a_trained_encoder_is_near_the_optimum(make, left):
    x, y = waves(200)
    k = Matern32(2, variance=torch.tensor(0.5), lengthscale=torch.tensor(0.05)).requires_grad_(False)
    likelihood = Gaussian(0.05).requires_grad_(False)
    guides = Amortized(make()), PseudoObservations()
    start, best = (NPVI(x, y, k, likelihood, num_neighbors=8, guide=guide, jitter=0.01) for guide in guides)
    begun = loss(start)
    best.solve()
    fit(start, 40, batch_size=50, lr=0.05, progress=False)
    assert loss(start) - loss(best) < left * (begun - loss(best))


def test_hyperparameters_with_priors_reach_encoder_and_amortized_model():
    x, y = waves()
    k = matern()
    k.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
    metric = torch.ones(2, dtype=F64)  # one graph, whatever the lengthscale
    gp = NPVI(x, y, k, Gaussian(0.1), num_neighbors=5, guide=Amortized(shaken(SiteEncoder(2))), metric=metric)
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.05}), IntegratedELBO())
    for _ in range(5):
        svi.step()
    trace = pyro.poutine.trace(gp.guide).get_trace()
    drawn, value = trace.nodes["kernel.lengthscale"]["value"].detach(), trace.nodes["u"]["fn"].mean.detach()
    fixed = copy.deepcopy(gp.kernel)
    fixed.lengthscale = drawn
    same = NPVI(
        x,
        y,
        fixed,
        Gaussian(0.1),
        num_neighbors=5,
        guide=Amortized(copy.deepcopy(gp.q.network)),
        mean=copy.deepcopy(gp.mean),
        metric=metric,
    )
    torch.testing.assert_close(q_of(same).loc.detach(), value)
    other = gp.amortize(x, y)
    torch.testing.assert_close(other(x[:4]), gp(x[:4]))


@pytest.mark.parametrize("make", ENCODERS)
def test_saving_copying_and_pickling_keep_predictions(make):
    x, y = waves()
    gp = NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=5, guide=Amortized(shaken(make())))
    gp.refresh_neighbors()
    fresh = NPVI(x, y, matern(), Gaussian(), num_neighbors=5, guide=Amortized(make()), seed=3)
    fresh.load_state_dict(gp.state_dict())
    for other in (fresh, copy.deepcopy(gp), pickle.loads(pickle.dumps(gp))):
        torch.testing.assert_close(other(x[:5]), gp(x[:5]), rtol=0, atol=0)
        other.kernel.lengthscale = torch.tensor([0.1, 0.1], dtype=F64)
        assert not torch.equal(q_of(other).loc, q_of(gp).loc)  # it reads its own kernel


def test_several_latent_functions_are_encoded_side_by_side():
    x, f = waves()
    y = torch.bucketize(f, torch.tensor([-0.4, 0.4], dtype=F64))
    gp = NPVI(x, y, matern(), Categorical(3), num_neighbors=5, guide=Amortized(shaken(SiteEncoder(2))))
    assert len(set(gp.mean.value.tolist())) > 1
    encoder, mean = copy.deepcopy(gp.q.network), ConstantMean(gp.mean.value[1].item())
    single = NPVI(x, (y == 1).double(), matern(), Bernoulli(), num_neighbors=5, guide=Amortized(encoder), mean=mean)
    both, one = q_of(gp), q_of(single)
    assert both.batch_shape == (3,)
    torch.testing.assert_close(both.loc[1], one.loc)
    torch.testing.assert_close(both.weights[1], one.weights)
    assert observed(gp.likelihood, y).shape == (3, N)
    assert gp.predict(x[:3]).log_prob(y[:3]).shape == (3,)


def test_an_amortized_model_has_the_nugget_that_its_encoder_was_trained_with():
    x, y = waves()
    gp = NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=5, guide=Amortized(SiteEncoder(2).double()), jitter=0.02)
    other = gp.amortize(x, y)
    assert other.jitter == gp.jitter == 0.02
    torch.testing.assert_close(q_of(other).scale, q_of(gp).scale)
    torch.testing.assert_close(other(x[:5] + 0.01), gp(x[:5] + 0.01))


def test_amortizing_keeps_the_metric_and_takes_what_rows_have():
    x, y = waves(60)
    counts, by_row = (y > 0).double(), {"offset": y, "trials": 1 + torch.arange(60.0, dtype=F64)}
    settings = {
        "num_neighbors": 4,
        "guide": Amortized(ConditionalEncoder()),
        "metric": torch.tensor([1.0, 100.0], dtype=F64),
    }
    gp = NPVI(x, counts, matern(), Binomial(), **settings, **by_row)
    other = gp.amortize(x, counts, **by_row)
    assert torch.equal(other.graph.neighbors, gp.graph.neighbors)
    assert loss(other) == pytest.approx(loss(gp), rel=1e-12)
    with pytest.raises(ValueError, match=r"NPVI.amortize: expected offset of the new rows, got None"):
        gp.amortize(x, counts, trials=by_row["trials"])
    with pytest.raises(ValueError, match=r"NPVI.amortize: expected weights None, as the method has none"):
        gp.amortize(x, counts, weights=counts + 1, **by_row)
