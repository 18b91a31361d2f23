"""NNGP sites with batches of hyperparameters: against one set after the other, and in vectorized Pyro programs."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import tensor
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroSample
from pyro.optim import Adam
from torch.distributions import kl_divergence

from pyro_nngp.distributions import NNGP, NNGPReparam, SparseCholeskyNormal, in_plate
from pyro_nngp.kernels import Matern32, Matern52, RationalQuadratic
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
N = 25
X = torch.rand(N, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = torch.poisson(torch.ones(N, dtype=F64), generator=torch.Generator().manual_seed(0))
GRAPH = NeighborGraph(X, 4)
SCALES, VARIANCES = (
    torch.tensor([[0.2, 0.5], [0.4, 0.3], [0.7, 0.9]], dtype=F64),
    torch.tensor([1.0, 2.0, 0.5]).double(),
)


def hyperparameters():
    return SCALES.clone().requires_grad_(), VARIANCES.clone().requires_grad_()


def priors(batch, make=Matern32):
    """The distribution of all sets, and those of one set each, with their hyperparameters."""
    scales, variances = hyperparameters()
    together = NNGP(make(2, variances, scales), GRAPH, batch)
    return together, [NNGP(make(2, variances[i], scales[i]), GRAPH, batch) for i in range(3)], (scales, variances)


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("make", [Matern32, RationalQuadratic])
@pytest.mark.parametrize("rows", [None, torch.tensor([3, 20, 7])])
def test_a_batch_is_a_loop(make, rows, native, monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", native)
    batch = GRAPH.batch(rows)
    together, each, leaves = priors(batch, make)
    assert together.batch_shape == (3,)
    f = torch.randn(5, 3, len(batch.rows), dtype=F64)
    for value in (f, f[0], f[0, 0]):
        looped = [one.log_prob(value[..., i, :] if value.dim() > 1 else value) for i, one in enumerate(each)]
        values = together.log_prob(value), torch.stack(looped, -1)
        torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)
        slopes = [torch.autograd.grad(found.square().sum(), leaves, retain_graph=True) for found in values]
        torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)  # of densities up to 1e13
    white = torch.randn(2, 3, N, dtype=F64)
    colored = together.color(white), torch.stack([one.color(white[:, i]) for i, one in enumerate(each)], 1)
    torch.testing.assert_close(*colored, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(together.whiten(colored[0]), white, rtol=1e-10, atol=1e-10)
    slopes = [torch.autograd.grad(found.square().sum(), leaves, retain_graph=True) for found in colored]
    torch.testing.assert_close(*slopes, rtol=1e-11, atol=1e-11)
    torch.manual_seed(0)
    draws = together.rsample((2,))
    torch.manual_seed(0)
    assert torch.equal(draws, together.color(torch.randn(2, 3, N, dtype=F64))[..., batch.rows])


def test_shapes_are_those_of_a_distribution():
    together, _, _ = priors(None)
    wide = together.expand((2, 3))
    assert wide.batch_shape == (2, 3)
    assert wide.rsample((4,)).shape == (4, 2, 3, N)
    f = torch.randn(2, 3, N, dtype=F64)
    torch.testing.assert_close(wide.log_prob(f), together.log_prob(f))
    assert wide.to_event(1).log_prob(f).shape == (2,)
    assert wide.mean.shape == (2, 3, N)
    assert "batch_shape=(3,)" in repr(together)


@pytest.mark.parametrize("columns", [0, 3])
def test_divergences_are_a_loop(columns):
    together, each, _ = priors(None)
    weights = 0.2 * torch.randn(3, N, columns, dtype=F64)
    loc, scale = torch.randn(3, N, dtype=F64), torch.rand(3, N, dtype=F64) + 0.1
    pattern = GRAPH.neighbors[:, :columns]
    q = SparseCholeskyNormal(loc, scale, weights, pattern)
    alone = [SparseCholeskyNormal(loc[i], scale[i], weights[i], pattern) for i in range(3)]
    looped = torch.stack([kl_divergence(one, p) for one, p in zip(alone, each, strict=True)])
    torch.testing.assert_close(kl_divergence(q, together), looped, rtol=1e-12, atol=1e-12)
    one = torch.stack([kl_divergence(alone[0], p) for p in each])  # one guide, three priors
    torch.testing.assert_close(kl_divergence(alone[0], together), one, rtol=1e-12, atol=1e-12)


def test_new_points_are_a_loop():
    together, each, _ = priors(None)
    new, f = torch.rand(6, 2, dtype=F64), torch.randn(2, 3, N, dtype=F64)
    found = together.predict(new, f)
    looped = [one.predict(new, f[:, i]) for i, one in enumerate(each)]
    torch.testing.assert_close(found.mean, torch.stack([one.mean for one in looped], 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.variance[0], torch.stack([one.variance[0] for one in looped]))
    torch.manual_seed(0)
    draws = together.sample_new(new, f)
    torch.manual_seed(0)
    noise = torch.randn(2, 3, 6, dtype=F64)
    for i, one in enumerate(each):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn_like", lambda like, i=i: noise[:, i])
            torch.testing.assert_close(draws[:, i], one.sample_new(new, f[:, i]), rtol=1e-11, atol=1e-11)


def test_the_factor_of_a_batch():
    together, each, _ = priors(None)
    factor, right = together.factor, torch.rand(3, N, dtype=F64)
    assert factor.batch_shape == (3,)
    assert len(factor) == N
    alone = [one.factor for one in each]
    torch.testing.assert_close(factor.log_det(), torch.stack([one.log_det() for one in alone]), rtol=1e-13, atol=0)
    for name in ("color", "color_transposed", "whiten", "residual"):
        looped = torch.stack([getattr(one, name)(right[i]) for i, one in enumerate(alone)])
        torch.testing.assert_close(getattr(factor, name)(right), looped, rtol=1e-12, atol=1e-12)
    solved = factor.prepared().solve(right, right + 0.5, tolerance=1e-12)
    looped = torch.stack(
        [one.prepared().solve(right[i], right[i] + 0.5, tolerance=1e-12) for i, one in enumerate(alone)]
    )
    torch.testing.assert_close(solved, looped, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"expected the precision of one set, got batch_shape \(3,\)"):
        factor.diagonal()
    with pytest.raises(ValueError, match=r"expected w, var, neighbors of shapes \(N, K\), \(N,\), \(N, K\)"):
        VecchiaFactor(factor.w, factor.var[0], GRAPH.neighbors)


def test_in_plate_takes_the_place_of_a_plate():
    f = torch.rand(3, 1, N)
    assert in_plate(f[0, 0]) is not None
    assert in_plate(f[0, 0]).shape == (N,)
    assert torch.equal(in_plate(f), f[:, 0])
    assert in_plate(f[:, None]).shape == (3, 1, N)
    with pytest.raises(
        ValueError, match=r"in_plate: expected value of shape \(N,\) or \(\.\.\., 1, N\), got \(3, 25\)"
    ):
        in_plate(f[:, 0])


# Programs


def normal(*shape):
    return dist.Normal(torch.zeros(shape, dtype=F64), 1.0).to_event(len(shape))


def lognormal(*shape):
    return dist.LogNormal(torch.zeros(shape, dtype=F64), 0.5).to_event(len(shape))


def built(own):
    """A program that builds its kernel from sampled values."""
    return Matern32(2, pyro.sample("variance", lognormal()), pyro.sample("lengthscale", lognormal(*own)))


def owned(own):
    """A kernel with priors on its attributes."""
    return Matern52(2, PyroSample(lognormal()), PyroSample(lognormal(*own)))


def program(make, own, plate):
    def model(y=Y):
        f = pyro.sample("f", NNGP(make(own), GRAPH))
        level = pyro.sample("level", normal())
        if plate:
            with pyro.plate("sites", N):
                return pyro.sample("y", dist.Poisson((level + in_plate(f)).exp()), obs=y)
        return pyro.sample("y", dist.Poisson((level[..., None] + f).exp()).to_event(1), obs=y)

    return model


PROGRAMS = {
    f"{make.__name__}-{own}-{'plate' if plate else 'event'}": program(make, own, plate)
    for make in (built, owned)
    for own in ((), (2,))
    for plate in (True, False)
}


@pytest.fixture(params=PROGRAMS)
def model(request):
    return PROGRAMS[request.param]


def log_joint(model, values):
    trace = pyro.poutine.trace(pyro.poutine.condition(model, values)).get_trace()
    return trace.log_prob_sum().item()


@pytest.mark.parametrize("white", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_parallel_predictions_are_those_of_each_draw(request, model, white, size):
    """`f` is given in one case, and in the other a function of white values and hyperparameters."""
    if size == 2 and "built-()-event" in request.node.name:
        with pytest.raises(ValueError, match=r"a vector of 2 columns or a batch of 2 numbers, got what may be either"):
            Predictive(model, num_samples=size, parallel=True)()
        return
    run = pyro.poutine.reparam(model, config={"f": NNGPReparam()}) if white else model
    prior = Predictive(run, num_samples=size, parallel=True)()
    names = ("variance", "lengthscale", "level", "f_white" if white else "f")
    draws = {
        name: prior[name].squeeze(1) if prior[name].dim() > 1 and prior[name].shape[1] == 1 else prior[name]
        for name in names
    }
    sites = ["f", "y"]
    together, apart = (Predictive(run, draws, return_sites=sites, parallel=way)(None) for way in (True, False))
    for name in sites:
        assert together[name].shape[-1] == N
        assert together[name].numel() == size * N
    torch.testing.assert_close(together["f"].reshape(size, N), apart["f"].reshape(size, N), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("white", [False, True])
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO])
def test_particles_together_are_particles_apart(model, elbo, white):
    run = pyro.poutine.reparam(model, config={"f": NNGPReparam()}) if white else model
    pyro.clear_param_store()
    guide = AutoNormal(run, init_scale=0.1)
    nesting = 1 if "sites" in pyro.poutine.trace(model).get_trace().nodes else 0
    loss = elbo(num_particles=3, vectorize_particles=True, max_plate_nesting=nesting)
    found = loss.differentiable_loss(run, guide)
    with pyro.plate("num_particles_vectorized", 3, dim=-nesting - 1):
        trace = pyro.poutine.trace(guide).get_trace()
    torch.manual_seed(0)
    guided = pyro.poutine.replay(pyro.plate("num_particles_vectorized", 3, dim=-nesting - 1)(run), trace)
    joint = pyro.poutine.trace(guided).get_trace()
    joint.compute_log_prob()
    each = []
    for i in range(3):
        values = {
            n: s["value"]
            for n, s in trace.nodes.items()
            if s["type"] == "sample" and not s["infer"].get("is_auxiliary")
        }
        one = {n: v.reshape(3, -1)[i].reshape(v.shape[1 + nesting :]) for n, v in values.items() if n in joint.nodes}
        each.append(log_joint(run, one))
    torch.testing.assert_close(joint.log_prob_sum(), torch.tensor(sum(each), dtype=F64), rtol=1e-11, atol=1e-9)
    slopes = torch.autograd.grad(found, list(guide.parameters()))
    assert all(slope.isfinite().all() for slope in slopes)
    assert all(slope.abs().sum() > 0 for slope in slopes)


def test_an_enumerated_site_chooses_between_two_kernels():
    scales, weights = tensor(0.2, 0.8), tensor(0.3, 0.7)

    def mixture(f, plate):
        k = pyro.sample("k", dist.Categorical(weights), infer={"enumerate": "parallel"})
        made = Matern32(2, lengthscale=scales[k][..., None].expand(*k.shape, 2))
        value = pyro.sample("f", NNGP(made, GRAPH), obs=f)
        if plate:
            with pyro.plate("sites", N):
                pyro.sample("y", dist.Poisson(in_plate(value).exp()), obs=Y)

    f = torch.randn(N, dtype=F64)
    densities = torch.stack([NNGP(Matern32(2, lengthscale=s), GRAPH).log_prob(f) for s in scales])
    want = (densities + weights.log()).logsumexp(0)
    for plate in (True, False):
        loss = TraceEnum_ELBO(max_plate_nesting=int(plate)).loss(mixture, lambda *_: None, f, plate)
        data = dist.Poisson(f.exp()).log_prob(Y).sum() if plate else torch.zeros(())
        torch.testing.assert_close(-loss, (want + data).item(), rtol=1e-12, atol=0)


def test_enumeration_within_particles():
    scales = tensor(0.2, 0.8)

    def model():
        variance = pyro.sample("variance", lognormal())
        k = pyro.sample("k", dist.Categorical(torch.ones(2, dtype=F64)))
        made = Matern32(2, variance, scales[k][..., None].expand(*k.shape, 2))
        f = pyro.sample("f", NNGP(made, GRAPH))
        with pyro.plate("sites", N):
            pyro.sample("y", dist.Poisson(in_plate(f).exp()), obs=Y)

    pyro.clear_param_store()
    guide = AutoNormal(pyro.poutine.block(model, hide=["k"]))
    loss = TraceEnum_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(config_enumerate(model), guide, Adam({"lr": 0.01}), loss)
    assert all(torch.isfinite(torch.tensor(svi.step())) for _ in range(2))


def test_vmap_over_densities_and_draws():
    scales, variances = hyperparameters()

    def value(scale, variance, f):
        prior = NNGP(Matern32(2, variance, scale), GRAPH)
        return prior.log_prob(f), prior.color(f)

    f = torch.randn(3, N, dtype=F64)
    with pyro.validation_enabled(False):  # torch 2.6 cannot check arguments under vmap
        found = torch.vmap(value)(scales, variances, f)
    looped = [value(scales[i], variances[i], f[i]) for i in range(3)]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*looped, strict=True))), rtol=1e-12, atol=1e-12)
