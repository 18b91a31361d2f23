"""Methods within vectorized plates, hyperparameters with priors: against one set of hyperparameters after the other."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import METHODS, K, data, fresh
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroSample
from pyro.optim import Adam

from pyro_nngp.inducing import Determinantal
from pyro_nngp.inference import IntegratedELBO
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, Hurdle, NegativeBinomial, Ordinal, Poisson, StudentT
from pyro_nngp.means import ConstantMean, LinearMean
from pyro_nngp.models import BSGP, LMC, LOO, VNNGP, CoregionalizedLOO, Vecchia
from pyro_nngp.variational import Conjugate

F64 = torch.float64
X, Y = data()
ROWS = torch.arange(5, 25)
S = 3


def prior(*shape):
    return PyroSample(dist.LogNormal(torch.zeros(shape, dtype=F64), 0.3).to_event(len(shape)))


DATA = {
    "gaussian": (lambda: Gaussian(prior()), Y),
    "two outputs": (lambda: Gaussian(prior(2, 1)), torch.stack([Y, -Y], 1)),
    "two measurements": (lambda: Gaussian(prior()), torch.stack([Y, -Y.where(Y < 1.5, torch.nan)], 1)),
    "poisson": (Poisson, torch.poisson(Y.abs())),
    "bernoulli": (Bernoulli, (Y > 1).double()),
    "student": (lambda: StudentT(scale=prior()), Y),
    "categorical": (lambda: Categorical(3), (Y.abs() * 1.5).long().clamp(max=2)),
    "count and measurement": (
        lambda: [Hurdle(NegativeBinomial(prior())), Gaussian(prior())],
        torch.stack([torch.poisson(Y.abs()), Y.where(Y > 0, torch.nan)], 1),
    ),
}
CASES = {
    "gaussian": [
        *("Vecchia-trend", "LOO-trend"),
        *("VNNGP", "VNNGP-sparse", "VNNGP-inducing", "LOO", "Vecchia", "MLLk", "NPVI", "SWSGP", "SVGP"),
        *("NPVI-NN", "NPVI-conditional", "NPVI-sites", "BSGP", "BSGP-fixed", "BSGP-deep"),
    ],
    "two outputs": [
        *("VNNGP-trend", "Vecchia-trend"),
        *("VNNGP", "VNNGP-inducing", "LOO", "Vecchia", "MLLk", "NPVI", "SWSGP", "SVGP"),
        *("NPVI-conditional", "NPVI-sites", "BSGP", "CoregionalizedLOO"),
    ],
    "two measurements": ["LMC", "CoregionalizedLOO"],
    "poisson": ["VNNGP", "VNNGP-trend", "SVGP"],
    "count and measurement": ["LMC"],
    "bernoulli": ["LOO", "SWSGP", "NPVI-conditional"],
    "student": ["LOO", "NPVI", "BSGP"],
    "categorical": ["VNNGP", "SVGP", "LOO", "LOO-posterior", "LOO-conjugate", "BSGP", "NPVI-sites"],
}
OWN_DRAW = ("VNNGP-sparse", "NPVI", "NPVI-NN", "NPVI-conditional", "NPVI-sites")  # the density of their own draw alone
ALIKE = {  # the method has other cases with one output, with two outputs, and with this likelihood
    *(("two outputs", name) for name in ("NPVI-conditional", "NPVI-sites", "BSGP")),
    *(("poisson", "SVGP"), ("bernoulli", "NPVI-conditional"), ("student", "NPVI"), ("categorical", "LOO-posterior")),
}
MORE = {
    "BSGP": (BSGP, {"inducing": 12, "objective": "vfe"}),
    "BSGP-fixed": (BSGP, {"inducing": 12, "inducing_prior": None}),
    "BSGP-deep": (BSGP, {"inducing": 12, "num_layers": 2, "num_draws": 2, "fixed_draws": True}),
    "LMC": (LMC, {"num_neighbors": K}),
    "CoregionalizedLOO": (CoregionalizedLOO, {"num_neighbors": 5}),
    **{
        f"{name}-trend": (METHODS[name][0], METHODS[name][1] | {"mean": lambda: LinearMean(2, prior="weak")})
        for name in ("VNNGP", "Vecchia", "LOO")
    },
    "LOO-posterior": (LOO, {"num_neighbors": K, "divergence": "posterior"}),
    "LOO-conjugate": (LOO, {"num_neighbors": K, "guide": Conjugate(), "divergence": "posterior"}),
}


def kernel():
    return Matern52(2, variance=prior(), lengthscale=prior(2))


def built(kind, name):
    method, settings = (METHODS | MORE)[name]
    likelihood, y = DATA[kind]
    torch.manual_seed(0)
    settings = fresh(settings)
    if method in (LMC, CoregionalizedLOO):
        settings["mixing"] = PyroSample(dist.Normal(torch.zeros(2, 2, dtype=F64), 1.0).to_event(2))
        gp = method(X, y, [kernel(), kernel()], likelihood(), **settings)
    else:
        gp = method(X, y, kernel(), likelihood(), **settings)
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


@pytest.mark.parametrize("idx", [pytest.param(None, marks=pytest.mark.slow), ROWS], ids=["all", "rows"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.slow] if (kind, name) in ALIKE else [])
        for kind, names in CASES.items()
        for name in names
    ],
)
def test_model_and_guide_are_a_loop(kind, name, idx):
    gp = built(kind, name)
    particles = pyro.plate("particles", S, dim=-1 - gp.num_plates)
    guided_by = gp.guide if hasattr(gp, "guide") else pyro.poutine.block(gp.model, hide=["y"])  # BSGP has no guide
    guide = pyro.poutine.trace(particles(guided_by)).get_trace(idx)
    model = pyro.poutine.trace(pyro.poutine.replay(particles(gp.model), guide)).get_trace(idx)
    for trace in (guide, model):
        trace.compute_log_prob()
    joint, guided = 0.0, 0.0
    for values in latent_values(guide, {"data", "latents", "halo"}):
        one = pyro.poutine.trace(pyro.poutine.condition(gp.model, values)).get_trace(idx)
        joint += one.log_prob_sum().item()
        if hasattr(gp, "guide") and name not in OWN_DRAW:
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
        ("count and measurement", "LMC", IntegratedELBO),
        ("two measurements", "CoregionalizedLOO", TraceMeanField_ELBO),
        ("categorical", "LOO-conjugate", TraceMeanField_ELBO),
        ("bernoulli", "NPVI-conditional", IntegratedELBO),
    ],
)
def test_particles_that_agree_have_the_loss_of_one(kind, name, elbo):
    """With closed forms, and hyperparameters that are given, the loss is no random number."""
    gp = built(kind, name)
    nesting = gp.num_plates
    sites = pyro.poutine.trace(gp.guide).get_trace(ROWS).nodes
    one = {
        name: site["value"].detach()
        for name, site in sites.items()
        if name.startswith(("kernel.", "likelihood.", "mixing"))
    }
    five = {name: value.expand(5, *[1] * nesting, *value.shape) for name, value in one.items()}
    losses = []
    for values, size in ((one, 1), (five, 5)):
        loss = elbo(num_particles=size, vectorize_particles=size > 1, max_plate_nesting=nesting)
        losses.append(loss.loss(*(pyro.condition(part, values) for part in (gp.model, gp.guide)), ROWS))
    torch.testing.assert_close(*losses, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "elbo", [Trace_ELBO, pytest.param(TraceMeanField_ELBO, marks=pytest.mark.slow), IntegratedELBO]
)
@pytest.mark.parametrize(
    ("kind", "name"),
    [("gaussian", "Vecchia"), ("two outputs", "VNNGP"), ("poisson", "SVGP"), ("count and measurement", "LMC")],
)
def test_particles_train(kind, name, elbo):
    gp = built(kind, name)
    before = gp.hyper_guide.loc_0.clone()
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.01}), elbo(num_particles=4, vectorize_particles=True))
    assert torch.isfinite(torch.tensor(svi.step(ROWS)))
    assert not torch.equal(before, gp.hyper_guide.loc_0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("gaussian", "VNNGP"), ("two outputs", "VNNGP"), ("categorical", "VNNGP"), ("poisson", "SVGP")),
        *(("count and measurement", "LMC"), ("categorical", "NPVI-sites")),
    ],
)
def test_predictive_runs_in_parallel(kind, name):
    gp = built(kind, name)
    draws = Predictive(gp.model, guide=gp.guide, num_samples=S, parallel=True)()
    assert draws["y"].squeeze(1).shape == (S, *gp.y.movedim(0, -1).shape)
    samples = Predictive(gp.guide, num_samples=S)()
    samples = {
        site: value for site, value in samples.items() if site.startswith(("kernel.", "likelihood", "mix", "u", "nu"))
    }
    samples = {site: value.reshape(S, *gp_event(gp, site)) for site, value in samples.items()}
    together, apart = (Predictive(gp.model, samples, return_sites=["f"], parallel=way)() for way in (True, False))
    if name != "SVGP":  # f is a function of u
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


def test_predictive_of_a_method_without_a_guide_runs_in_parallel():
    gp = built("two outputs", "BSGP")
    prior = Predictive(gp.model, num_samples=S, parallel=True)()
    samples = {site: prior[site].reshape(S, *gp_event(gp, site)) for site in prior if site != "y"}
    given = gp.moments_by_draw(X, samples=samples)
    with pyro.plate("particles", S, dim=-3), pyro.condition(data={k: v[:, None, None] for k, v in samples.items()}):
        y = pyro.poutine.trace(gp.model).get_trace().nodes["y"]["fn"]
    assert y.batch_shape == given[0].shape == (S, 2, len(X))


@pytest.mark.filterwarnings("ignore:Found vars in model but not guide")  # the lengthscale, a function of another site
@pytest.mark.parametrize("name", ["CoregionalizedLOO", "LMC", "BSGP"])
def test_a_mixture_of_two_lengthscales(name):
    """An enumerated site upstream of a hyperparameter: the evidence is that of a loop over its values."""
    values = torch.tensor([0.2, 0.7], dtype=F64)

    def chosen(_):
        which = pyro.sample("which", dist.Categorical(torch.tensor([0.3, 0.7], dtype=F64)))
        return dist.Delta(values[which])

    torch.manual_seed(0)
    kernel, y = Matern52(2, lengthscale=PyroSample(chosen)), torch.stack([Y, -Y], 1)
    settings = {"BSGP": {"inducing": 12, "inducing_prior": None}}.get(name, {"num_neighbors": 5})
    method = (METHODS | MORE)[name][0]
    gp = method(X, y, kernel if name == "BSGP" else [kernel], Gaussian(0.1), **settings)
    latent = {"LMC": {"u": torch.randn(1, len(X), dtype=F64)}, "BSGP": {"layers.0.nu": torch.randn(2, 12, dtype=F64)}}
    model = pyro.condition(gp.model, latent.get(name, {}))
    elbo = TraceEnum_ELBO(max_plate_nesting=gp.num_plates)
    found = elbo.loss(pyro.infer.config_enumerate(model), lambda: None)
    each = []
    for i in range(2):
        trace = pyro.poutine.trace(pyro.condition(model, {"which": torch.tensor(i)})).get_trace()
        each.append(trace.log_prob_sum())
    torch.testing.assert_close(torch.tensor(-found, dtype=F64), torch.stack(each).logsumexp(0), rtol=1e-10, atol=0)


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


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_cutpoints_with_a_prior(link):
    likelihood = Ordinal(torch.tensor([0.0, 1.0], dtype=F64), link)
    gp = VNNGP(X, Y.clamp(0, 2).long(), Matern52(2), likelihood, num_neighbors=K)
    del likelihood.cutpoints
    likelihood.cutpoints = PyroSample(dist.Normal(torch.tensor([0.0, 1.0], dtype=F64), 0.1).to_event(1))
    with pyro.plate("particles", S, dim=-2):
        trace = pyro.poutine.trace(gp.model).get_trace()
    trace.compute_log_prob()
    loc, var = torch.randn(S, len(X), dtype=F64), torch.rand(S, len(X), dtype=F64)
    y = gp.y
    bound = trace.nodes["y"]["infer"]["integrate"][1]
    together = bound.marginal(loc, var).log_prob(y), bound.expected_log_prob(y, loc, var)
    assert trace.nodes["likelihood.cutpoints"]["value"].shape == (S, 1, 2)
    for i, values in enumerate(latent_values(trace, {"data"})):
        one = pyro.poutine.trace(pyro.condition(gp.model, values)).get_trace()
        one.compute_log_prob()
        torch.testing.assert_close(trace.nodes["y"]["log_prob"][i], one.nodes["y"]["log_prob"])
        alone = one.nodes["y"]["infer"]["integrate"][1]
        apart = alone.marginal(loc[i], var[i]).log_prob(y), alone.expected_log_prob(y, loc[i], var[i])
        torch.testing.assert_close([value[i] for value in together], list(apart))


@pytest.mark.parametrize("dim", [-1, -2])
def test_plates_of_the_model_are_to_the_right(dim):
    gp = built("two outputs", "Vecchia")
    with pytest.raises(
        ValueError, match=rf"to the left of dimension -2, got \['groups \(dim={dim}\)'\]. Give the plate"
    ):
        pyro.plate("groups", 3, dim=dim)(gp.model)()


@pytest.mark.parametrize("correlation", [True, False])
def test_a_determinantal_prior_of_inducing_points_takes_the_kernel_of_its_set(correlation):
    def prior_of_z(kernel, z):
        return Determinantal(kernel, dist.Normal(torch.zeros_like(z), 1.0).to_event(2), correlation)

    gp = BSGP(X, Y, kernel(), Gaussian(0.1), inducing=6, inducing_prior=prior_of_z)
    sites = ("layers.0.kernel.variance", "layers.0.kernel.lengthscale", "layers.0.nu", "layers.0.z")
    own = ((), (2,), (6,), (6, 2))
    values = {site: torch.rand(S, *shape, dtype=F64) for site, shape in zip(sites, own, strict=True)}
    together = {site: value[:, None] for site, value in values.items()}
    with pyro.plate("particles", S, dim=-2):
        trace = pyro.poutine.trace(pyro.condition(gp.model, together)).get_trace()
    trace.compute_log_prob()
    for i in range(S):
        one = pyro.poutine.trace(
            pyro.condition(gp.model, {site: value[i] for site, value in values.items()})
        ).get_trace()
        one.compute_log_prob()
        for site in ("layers.0.z", "y"):
            torch.testing.assert_close(trace.nodes[site]["log_prob"][i].squeeze(), one.nodes[site]["log_prob"])
