"""Methods within vectorized plates, hyperparameters with priors: against one set of hyperparameters after the other."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from oracles.methods import METHODS, K, data
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroSample
from pyro.optim import Adam

from pyro_nngp.inference import IntegratedELBO
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, Ordinal, Poisson, StudentT
from pyro_nngp.means import ConstantMean
from pyro_nngp.models import LOO, VNNGP, CoregionalizedLOO, Vecchia
from pyro_nngp.variational.encoders import SiteEncoder

F64 = torch.float64
X, Y = data()
ROWS = torch.arange(5, 25)
S = 3


def prior(*shape):
    return PyroSample(dist.LogNormal(torch.zeros(shape, dtype=F64), 0.3).to_event(len(shape)))


DATA = {
    "gaussian": (lambda: Gaussian(prior()), Y),
    "two outputs": (lambda: Gaussian(prior(2, 1)), torch.stack([Y, -Y], 1)),
    "poisson": (Poisson, torch.poisson(Y.abs())),
    "bernoulli": (Bernoulli, (Y > 1).double()),
    "student": (lambda: StudentT(scale=prior()), Y),
    "categorical": (lambda: Categorical(3), (Y.abs() * 1.5).long().clamp(max=2)),
}
CASES = {
    "gaussian": ["VNNGP", "VNNGP-sparse", "VNNGP-inducing", "LOO", "Vecchia", "MLLk", "NPVI", "SWSGP", "SVGP"],
    "two outputs": ["VNNGP", "VNNGP-inducing", "LOO", "Vecchia", "MLLk", "NPVI", "SWSGP", "SVGP"],
    "poisson": ["VNNGP", "SVGP"],
    "bernoulli": ["LOO", "SWSGP"],
    "student": ["LOO", "NPVI"],
    "categorical": ["VNNGP", "SVGP"],
}


def built(kind, name):
    method, settings = METHODS[name]
    likelihood, y = DATA[kind]
    torch.manual_seed(0)
    gp = method(X, y, Matern52(2, variance=prior(), lengthscale=prior(2)), likelihood(), **settings)
    if getattr(gp, "can_solve", False):
        gp.solve()
    return gp


def latent_values(trace, plates):
    """Values of the sampled sites of one set after the other; those in the plates of data have no dimension of one."""
    found = [{} for _ in range(S)]
    for name, site in trace.nodes.items():
        fn, value = site.get("fn"), site.get("value")
        if site["type"] != "sample" or site["is_observed"] or site["infer"].get("is_auxiliary") or name in plates:
            continue
        inside = any(frame.vectorized and frame.name in plates for frame in site["cond_indep_stack"])
        own = value.shape[1:] if inside else value.shape[value.dim() - len(fn.event_shape) :]
        for i in range(S):
            found[i][name] = value.reshape(S, *own)[i] if not inside else value[i]
    return found


@pytest.mark.parametrize("idx", [None, ROWS], ids=["all", "rows"])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in CASES.items() for name in names])
def test_model_and_guide_are_a_loop(kind, name, idx):
    gp = built(kind, name)
    particles = pyro.plate("particles", S, dim=-2 - len(gp.latent_shape))
    guide = pyro.poutine.trace(particles(gp.guide)).get_trace(idx)
    model = pyro.poutine.trace(pyro.poutine.replay(particles(gp.model), guide)).get_trace(idx)
    for trace in (guide, model):
        trace.compute_log_prob()
    joint, guided = 0.0, 0.0
    for values in latent_values(guide, {"data", "latents", "halo"}):
        one = pyro.poutine.trace(pyro.poutine.condition(gp.model, values)).get_trace(idx)
        joint += one.log_prob_sum().item()
        if name not in ("VNNGP-sparse", "NPVI"):  # whose density is that of their own draw
            other = pyro.poutine.trace(pyro.poutine.condition(gp.guide, values)).get_trace(idx)
            guided += other.log_prob_sum().item()
    torch.testing.assert_close(model.log_prob_sum().item(), joint, rtol=1e-11, atol=1e-7)
    if guided:
        torch.testing.assert_close(guide.log_prob_sum().item(), guided, rtol=1e-11, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Found non-auxiliary vars in guide")  # those that are given
@pytest.mark.parametrize(
    ("kind", "name", "elbo"),
    [
        ("gaussian", "Vecchia", TraceMeanField_ELBO),
        ("two outputs", "VNNGP", IntegratedELBO),
        ("poisson", "SVGP", IntegratedELBO),
    ],
)
def test_particles_that_agree_have_the_loss_of_one(kind, name, elbo):
    """With closed forms, and hyperparameters that are given, the loss is no random number."""
    gp, nesting = built(kind, name), 1 + (kind == "two outputs")
    sites = pyro.poutine.trace(gp.guide).get_trace(ROWS).nodes
    one = {name: site["value"].detach() for name, site in sites.items() if name.startswith(("kernel.", "likelihood."))}
    five = {name: value.expand(5, *[1] * nesting, *value.shape) for name, value in one.items()}
    losses = []
    for values, size in ((one, 1), (five, 5)):
        loss = elbo(num_particles=size, vectorize_particles=size > 1, max_plate_nesting=nesting)
        losses.append(loss.loss(*(pyro.condition(part, values) for part in (gp.model, gp.guide)), ROWS))
    torch.testing.assert_close(*losses, rtol=1e-9, atol=0)


@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO, IntegratedELBO])
@pytest.mark.parametrize(("kind", "name"), [("gaussian", "Vecchia"), ("two outputs", "VNNGP"), ("poisson", "SVGP")])
def test_particles_train(kind, name, elbo):
    gp = built(kind, name)
    before = gp.hyper_guide.loc_0.clone()
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.01}), elbo(num_particles=4, vectorize_particles=True))
    assert torch.isfinite(torch.tensor(svi.step(ROWS)))
    assert not torch.equal(before, gp.hyper_guide.loc_0)


@pytest.mark.parametrize(
    ("kind", "name"), [("gaussian", "VNNGP"), ("two outputs", "VNNGP"), ("categorical", "VNNGP"), ("poisson", "SVGP")]
)
def test_predictive_runs_in_parallel(kind, name):
    gp = built(kind, name)
    draws = Predictive(gp.model, guide=gp.guide, num_samples=S, parallel=True)()
    assert draws["y"].squeeze(1).shape == (S, *gp.y.movedim(0, -1).shape)
    latent = {"kernel.lengthscale", "kernel.variance", "u" if name == "VNNGP" else "nu"}
    samples = Predictive(gp.guide, num_samples=S)()
    samples = {site: value.reshape(S, *gp_event(gp, site)) for site, value in samples.items() if site in latent}
    together, apart = (Predictive(gp.model, samples, return_sites=["f"], parallel=way)() for way in (True, False))
    if name == "VNNGP":  # f is a function of u
        torch.testing.assert_close(together["f"], apart["f"])
    assert together["f"].shape == apart["f"].shape


def gp_event(gp, site):
    return pyro.poutine.trace(gp.model).get_trace().nodes[site]["fn"].event_shape


def test_some_hyperparameters_with_priors_and_others_without():
    gp = VNNGP(X, Y, Matern52(2, lengthscale=prior()), Gaussian(0.1), num_neighbors=K)
    with pyro.plate("particles", S, dim=-2):
        trace = pyro.poutine.trace(gp.model).get_trace(ROWS)
    values = latent_values(trace, {"data"})
    trace.compute_log_prob()
    each = [pyro.poutine.trace(pyro.condition(gp.model, one)).get_trace(ROWS).log_prob_sum().item() for one in values]
    torch.testing.assert_close(trace.log_prob_sum().item(), sum(each), rtol=1e-11, atol=0)


def test_a_constant_mean_with_a_prior():
    mean = ConstantMean(0.0)
    del mean.value
    mean.value = PyroSample(dist.Normal(torch.zeros((), dtype=F64), 1.0))
    gp = Vecchia(X, torch.stack([Y, -Y], 1), Matern52(2), num_neighbors=K, mean=mean)
    with pyro.plate("particles", S, dim=-3):
        trace = pyro.poutine.trace(gp.model).get_trace(ROWS)
    value = trace.nodes["mean.value"]["value"]
    assert value.shape == (S, 1, 1)
    trace.compute_log_prob()
    each = []
    for one in value.flatten():
        alone = pyro.poutine.trace(pyro.poutine.condition(gp.model, {"mean.value": one})).get_trace(ROWS)
        alone.compute_log_prob()
        each.append(alone.nodes["y"]["log_prob"])
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], torch.stack(each))


def test_cutpoints_are_one_set_at_a_time():
    likelihood = Ordinal(torch.tensor([0.0, 1.0], dtype=F64))
    gp = VNNGP(X, (Y > 1).long(), Matern52(2), likelihood, num_neighbors=K)
    del likelihood.cutpoints
    likelihood.cutpoints = prior(2)
    message = r"Ordinal: expected cutpoints of shape \(2,\), one set at a time, got \(3, 1, 2\)"
    with pytest.raises(ValueError, match=message):
        pyro.plate("particles", S, dim=-2)(gp.model)()


@pytest.mark.parametrize("dim", [-1, -2])
def test_plates_of_the_model_are_to_the_right(dim):
    gp = built("two outputs", "Vecchia")
    with pytest.raises(
        ValueError, match=rf"to the left of dimension -2, got \['groups \(dim={dim}\)'\]. Give the plate"
    ):
        pyro.plate("groups", 3, dim=dim)(gp.model)()


@pytest.mark.parametrize(
    "build",
    [
        lambda: VNNGP(X, Y, Matern52(2), Gaussian(), num_neighbors=K, encoder=SiteEncoder(2)),
        lambda: CoregionalizedLOO(X, torch.stack([Y, -Y], 1), [Matern52(2)], num_neighbors=K),
        lambda: LOO(X, DATA["categorical"][1], Matern52(2), Categorical(3), num_neighbors=K),
    ],
)
def test_methods_that_are_not_vectorized_say_so(build):
    gp = build()
    with pytest.raises(ValueError, match=r"to run outside vectorized plates, got \['_num_predictive.*parallel=False"):
        Predictive(gp.model, guide=gp.guide, num_samples=2, parallel=True)()
    for _ in pyro.plate("groups", 2):
        gp.guide()
