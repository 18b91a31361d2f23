"""Predictions from posterior draws: against dense Gaussian conditionals, and against the guide where it is a point."""

import copy

import pyro.distributions as dist
import pytest
import torch
from builders import AUGMENTED, scalar, uniform
from oracles.dense import dense_covariance
from pyro.infer import MCMC, NUTS, Predictive
from pyro.nn import PyroSample
from pyro.poutine import reparam

from pyro_nngp._memory import block_limit
from pyro_nngp.distributions import NNGPReparam
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Kernel, Matern32
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from pyro_nngp.means import ConstantMean
from pyro_nngp.models import BSGP, LMC, LOO, SVGP, SWSGP, VNNGP, CoregionalizedLOO, Vecchia
from pyro_nngp.models.base import Method, Posterior
from pyro_nngp.models.base.joint import joint_posterior
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational import MeanField

F64 = torch.float64
N, P = 15, 4
X = torch.rand(N, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
X_NEW = torch.rand(P, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
Y = torch.sin(5 * X[:, 0])
LENGTHSCALES = torch.tensor([0.4, 0.9], dtype=F64)


def prior():
    return PyroSample(dist.LogNormal(torch.tensor(0.0, dtype=F64), 1.0))


def build(method, y=Y, likelihood=None, **settings):
    likelihood = Gaussian(torch.tensor(0.1, dtype=F64)) if likelihood is None else likelihood
    kernel = Matern32(2, variance=torch.tensor(1.0, dtype=F64), lengthscale=prior())
    return method(X, y, kernel, likelihood, mean=lambda x: 0.5 + x[:, 0], **settings)


def exact(u, lengthscale):
    """Mean and covariance of f at the new points given its values at the data, without the mean function."""
    cov = dense_covariance(Matern32(2, lengthscale=lengthscale).double(), torch.cat([X, X_NEW])).detach()
    gain = torch.cholesky_solve(cov[:N, N:], torch.linalg.cholesky(cov[:N, :N])).mT
    return gain @ u, cov[N:, N:] - gain @ cov[:N, N:]


def draws_for(site):
    """A method that is exact with all points as neighbors or inducing points, posterior draws, and u at them."""
    values = torch.randn(2, N, dtype=F64)
    samples = {site: values, "kernel.lengthscale": LENGTHSCALES}
    if site == "u":
        return build(VNNGP, num_neighbors=N - 1), samples, values, N
    u = []
    for nu, lengthscale in zip(values, LENGTHSCALES, strict=True):
        cov = dense_covariance(Matern32(2, lengthscale=lengthscale).double(), X).detach()
        u.append(torch.linalg.cholesky(cov) @ nu)
    return build(SVGP, inducing=X), samples, torch.stack(u), None


@pytest.mark.parametrize("site", ["u", "nu"])
def test_moments_and_predictions_are_those_of_the_mixture_over_draws(site):
    gp, samples, u, k = draws_for(site)
    each = [exact(*pair) for pair in zip(u, LENGTHSCALES, strict=True)]
    locs = torch.stack([loc for loc, _ in each]) + 0.5 + X_NEW[:, 0]
    variances = torch.stack([cov.diagonal() for _, cov in each])
    loc, var = gp(X_NEW, num_neighbors=k, samples=samples)
    torch.testing.assert_close(loc, locs.mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(var, variances.mean(0) + locs.var(0, correction=0), rtol=1e-8, atol=1e-10)
    target = torch.randn(P, dtype=F64)
    densities = dist.Normal(locs, (variances + 0.1).sqrt()).log_prob(target).exp()
    predictive = gp.predict(X_NEW, num_neighbors=k, samples=samples)
    torch.testing.assert_close(predictive.log_prob(target).detach(), densities.mean(0).log(), rtol=1e-8, atol=1e-8)
    near, _ = gp(X_NEW, num_neighbors=N // 2, samples=samples)  # half of the points say nearly the same
    assert (near - loc).abs().max() < 0.5
    assert not torch.allclose(near, loc)


@pytest.mark.parametrize("site", ["u", "nu"])
def test_joint_draws_are_those_of_the_process_given_each_draw(site):
    (gp, samples, u, _), k = draws_for(site), None if site == "nu" else N + P - 1
    draws = gp.sample(X_NEW, 20_000, num_neighbors=k, samples={name: value[:1] for name, value in samples.items()})
    loc, cov = exact(u[0], LENGTHSCALES[0])
    assert ((draws.mean(0) - loc - 0.5 - X_NEW[:, 0]) / (cov.diagonal() / 20_000).sqrt()).abs().max() < 6
    error = (cov.square() + cov.diagonal()[:, None] * cov.diagonal()).div(20_000).sqrt()
    assert ((draws.mT.cov() - cov) / error).abs().max() < 6
    # the first half from the first draw, the second from the other
    both = gp.sample(X_NEW, 5000, num_neighbors=k, samples=samples)
    for half, pair in zip(both.split(2500), zip(u, LENGTHSCALES, strict=True), strict=True):
        loc, cov = exact(*pair)
        assert ((half.mean(0) - loc - 0.5 - X_NEW[:, 0]) / (cov.diagonal() / 2500).sqrt()).abs().max() < 6


@pytest.mark.filterwarnings("ignore:VNNGP. intervals of f")
@pytest.mark.parametrize(
    ("method", "site", "likelihood", "settings"),
    [
        (VNNGP, "u", lambda: Categorical(3), {"num_neighbors": 5, "guide": MeanField()}),
        (VNNGP, "u", Bernoulli, {"num_neighbors": 5, "inducing": 8}),
        (SVGP, "nu", lambda: Categorical(3), {"inducing": 8}),
        (LOO, "omega", Bernoulli, {"num_neighbors": 5}),
        (LOO, "omega", lambda: Categorical(3), {"num_neighbors": 5}),
    ],
)
def test_draws_at_the_center_of_the_guide_predict_as_a_guide_that_is_a_point(method, site, likelihood, settings):
    y = torch.arange(N) % (3 if likelihood is not Bernoulli else 2)
    gp = build(method, y.to(F64), likelihood(), **settings)
    if site == "omega":
        q = gp.q.distribution(gp.likelihood, y.to(F64), torch.arange(N))
    else:
        gp.q.loc.data.normal_()
        gp.q.log_scale.data.fill_(-40)
        q = gp.q.distribution()
    samples = {
        site: q.mean.detach().expand(2, *q.mean.shape),
        "kernel.lengthscale": gp.bound().kernel.lengthscale.detach().expand(2),
    }
    for got, want in zip(gp(X_NEW, samples=samples), gp(X_NEW), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=1e-12)
    got, want = (gp.predict(X_NEW, samples=given).log_prob(y[:P].to(F64)) for given in (samples, None))
    torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=1e-12)
    assert gp.sample(X_NEW, 3, samples=samples).shape == (3, *gp.latent_shape, P)


def test_whitened_values_under_nuts_predict():
    gp = build(VNNGP, num_neighbors=6)
    white = reparam(gp.model, config={"u": NNGPReparam()})
    mcmc = MCMC(NUTS(white, max_tree_depth=3), num_samples=3, warmup_steps=3, disable_progbar=True)
    mcmc.run()
    samples = mcmc.get_samples()
    with pytest.raises(ValueError, match=r"expected samples to hold the site 'u', got .*u_white.*return_sites=\['u'\]"):
        gp.predict(X_NEW, samples=samples)
    samples |= Predictive(white, samples, return_sites=["u"])()
    assert samples["u"].shape == (3, 1, N)
    want = gp(X_NEW, samples=samples | {"u": samples["u"][:, 0]})
    torch.testing.assert_close(gp(X_NEW, samples=samples), want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"u": torch.zeros(2, 3, dtype=F64)},
            r"expected samples\['u'\] of shape \(S, 15\), got \('S', 3\)\. Pass",
        ),
        ({"u": torch.zeros(3, N, dtype=F64)}, r"expected samples to hold the same number >= 1 of draws of each site"),
        ({"kernel.lengthscale": None}, r"expected samples to hold the site 'kernel.lengthscale', got \['u'\]"),
    ],
)
def test_wrong_draws(change, message):
    gp = build(VNNGP, num_neighbors=5)
    samples = {"u": torch.zeros(2, N, dtype=F64), "kernel.lengthscale": LENGTHSCALES} | change
    samples = {name: value for name, value in samples.items() if value is not None}
    for call in (gp, gp.predict, lambda x, samples: gp.sample(x, 2, samples=samples)):
        with pytest.raises(ValueError, match=message):
            call(X_NEW, samples=samples)
        with pytest.raises(
            TypeError, match=r"samples to be a dictionary of draws by site, got list\. Pass mcmc\.get_s"
        ):
            call(X_NEW, samples=[samples])


def test_copies_of_inducing_values_predict_nothing():
    gp = build(SWSGP, inducing=8, num_neighbors=3)
    samples = {"u": torch.zeros(2, N, 3, dtype=F64), "kernel.lengthscale": LENGTHSCALES}
    for call in (gp, gp.predict, lambda x, samples: gp.sample(x, 2, samples=samples)):
        with pytest.raises(ValueError, match=r"SWSGP: expected samples None, got posterior draws of each datum's own"):
            call(X_NEW, samples=samples)


def test_draws_that_cannot_fit_into_memory_are_refused_at_once():
    gp, _, _, _ = draws_for("u")
    with pytest.raises(
        MemoryError, match=r"VNNGP\.sample: expected draws to fit into memory, got 29802322 GiB\. The machine"
    ):
        gp.sample(X_NEW, 10**15)
    for num_samples in (0, -1):
        with pytest.raises(ValueError, match=r"VNNGP\.sample: expected num_samples >= 1, got"):
            gp.sample(X_NEW, num_samples)
    with pytest.raises(TypeError, match=r"VNNGP\.sample: expected num_samples to be an int, got nan"):
        gp.sample(X_NEW, float("nan"))
    with pytest.raises(TypeError, match=r"VNNGP\.sample: expected seed to be an int, got 'a'"):
        gp.sample(X_NEW, 2, seed="a")


def test_samples_that_are_no_draws_are_refused():
    gp, samples, _, _ = draws_for("u")
    for wrong in (3.0, torch.tensor(1.0)):
        with pytest.raises(
            TypeError, match=r"expected samples\['u'\] to be a tensor of draws, got .*Pass mcmc\.get_samples"
        ):
            gp(X_NEW, samples=samples | {"u": wrong})


def test_parts_that_are_not_defined_are_named():
    class Bare(Method):
        def __init__(self):
            super().__init__(X, Y, Matern32(2, variance=1.0, lengthscale=1.0), Gaussian(0.1), lambda x: 0 * x[:, 0])
            self._start()  # as constructors of methods do

    class Part(Bare):
        def posterior(self, bound, draw=None, part=None):
            return Posterior(self.rows, NeighborGraph(X, 3), bound)

    with pytest.raises(NotImplementedError, match="Bare: expected posterior to be defined by the method, got nothing"):
        Bare().predict(X_NEW)
    for hook, call in {
        "moments": lambda gp: gp.predict(X_NEW),
        "joint": lambda gp: gp.sample(X_NEW, 2),
        "leave_one_out": lambda gp: gp.loo(),
    }.items():
        with pytest.raises(NotImplementedError, match=f"Posterior: expected {hook} to be defined by the posterior"):
            call(Part())


class OneByOne:
    """A method that has no room for two posterior draws at a time."""

    def __init__(self, gp):
        self.gp = gp

    def __call__(self, *args, **options):
        with block_limit(1):
            return self.gp(*args, **options)

    def __getattr__(self, name):
        def call(*args, **options):
            with block_limit(1):
                return getattr(self.gp, name)(*args, **options)

        return call


def vector_prior(*shape):
    return PyroSample(dist.LogNormal(torch.zeros(shape, dtype=F64), 0.3).to_event(len(shape)))


@pytest.mark.parametrize("outputs", [(), (2,)])
@pytest.mark.parametrize("method", [VNNGP, Vecchia, LOO])
@pytest.mark.parametrize(
    ("size", "mean"),
    [(5, "prior"), (2, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, None), (2, "prior")))],
)
def test_draws_together_are_draws_one_by_one(outputs, size, method, mean, monkeypatch):
    y = torch.stack([Y, -Y], 1) if outputs else Y
    built = []
    level = ConstantMean(0.3)
    if mean == "prior":
        del level.value
        level.value = PyroSample(dist.Normal(torch.zeros((), dtype=F64), 1.0))
    noise = vector_prior(2, 1) if outputs else vector_prior()
    kernel = Matern32(2, variance=vector_prior(), lengthscale=vector_prior(2))
    built.append(method(X, y, kernel, Gaussian(noise), num_neighbors=5, mean=level))
    built.append(OneByOne(built[0]))
    draws = Predictive(built[0].model, num_samples=size)()
    samples = {name: value for name, value in draws.items() if name.startswith(("kernel", "likelihood", "mean"))}
    if method is VNNGP:
        samples["u"] = draws["u"]
    moments = [gp(X_NEW, samples=samples) for gp in built]
    torch.testing.assert_close(*moments, rtol=1e-12, atol=1e-12)
    assert moments[0][0].shape == (*outputs, P)
    y_new = torch.randn(*outputs, P, dtype=F64)
    densities = [gp.predict(X_NEW, samples=samples).log_prob(y_new) for gp in built]
    torch.testing.assert_close(*densities, rtol=1e-12, atol=1e-12)
    with block_limit(1):  # no room for two draws
        torch.testing.assert_close(built[0](X_NEW, samples=samples), moments[0], rtol=1e-12, atol=1e-12)
    with block_limit(2 * P * 5):
        torch.testing.assert_close(built[0](X_NEW, samples=samples), moments[0], rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(torch, "randn_like", lambda value: torch.full_like(value, 0.5))
    for count in (1, size, 2 * size + 1):
        joint = [gp.sample(X_NEW, count, samples=samples, seed=0) for gp in built]
        torch.testing.assert_close(*joint, rtol=1e-12, atol=1e-12)
        assert joint[0].shape == (count, *outputs, P)
    if method is not VNNGP:
        scores = [gp.loo(samples=samples) for gp in built]
        torch.testing.assert_close(*scores, rtol=1e-12, atol=1e-12)
        assert scores[0].shape == (size, *outputs, N)
        some = built[0].loo(torch.arange(4), num_neighbors=3, samples=samples)
        torch.testing.assert_close(some, built[1].loo(torch.arange(4), num_neighbors=3, samples=samples))


@pytest.mark.parametrize("shared", [True, False])
def test_draws_together_of_coupled_outputs(shared, monkeypatch):
    mixing = PyroSample(dist.Normal(torch.zeros(2, 2, dtype=F64), 1.0).to_event(2))
    built = []
    kernels = [Matern32(2, variance=vector_prior(), lengthscale=vector_prior(2)) for _ in range(1 if shared else 2)]
    kernels, latents = (kernels[0], 2) if shared else (kernels, None)
    parts = [Gaussian(vector_prior()), Poisson()]
    y = torch.stack([Y, torch.poisson(Y.abs())], 1)
    built.append(LMC(X, y, kernels, parts, num_latents=latents, mixing=mixing, num_neighbors=5))
    built.append(OneByOne(built[0]))
    draws = Predictive(built[0].model, num_samples=4)()
    names = ("kernel", "likelihood", "mixing")
    samples = {name: value for name, value in draws.items() if name.startswith(names)} | {"u": draws["u"]}
    moments = [gp(X_NEW, samples=samples) for gp in built]
    torch.testing.assert_close(*moments, rtol=1e-12, atol=1e-12)
    y_new = torch.ones(2, P, dtype=F64)
    torch.testing.assert_close(*(gp.predict(X_NEW, samples=samples).log_prob(y_new) for gp in built))
    monkeypatch.setattr(torch, "randn_like", lambda value: torch.full_like(value, 0.5))
    torch.testing.assert_close(*(gp.sample(X_NEW, 9, samples=samples, seed=0) for gp in built))


@pytest.mark.parametrize("likelihood", [Categorical(3), Bernoulli()])
def test_draws_together_of_auxiliary_variables(likelihood, monkeypatch):
    y = torch.arange(N) % 3 if isinstance(likelihood, Categorical) else (Y > 0).double()
    built = []
    kernel = Matern32(2, lengthscale=vector_prior())
    built.append(LOO(X, y, kernel, copy.deepcopy(likelihood), num_neighbors=5))
    built.append(OneByOne(built[0]))
    shape = (3, N) if isinstance(likelihood, Categorical) else (N,)
    samples = {"kernel.lengthscale": LENGTHSCALES, "omega": torch.rand(2, *shape, dtype=F64)}
    for result in (lambda gp: gp(X_NEW, samples=samples), lambda gp: gp.loo(samples=samples)):
        torch.testing.assert_close(*map(result, built), rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(torch, "randn_like", lambda value: torch.full_like(value, 0.5))
    torch.testing.assert_close(*(gp.sample(X_NEW, 5, samples=samples, seed=0) for gp in built))


def test_draws_together_of_several_classes():
    y = torch.arange(N) % 3
    gp = VNNGP(X, y, Matern32(2, lengthscale=vector_prior()), Categorical(3), num_neighbors=5)
    built = gp, OneByOne(gp)
    samples = {"kernel.lengthscale": LENGTHSCALES, "u": torch.randn(2, 3, N, dtype=F64)}
    together, apart = (gp.predict(X_NEW, samples=samples).log_prob(torch.arange(P) % 3) for gp in built)
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"expected samples\['u'\] of shape \(S, 3, 15\), got \('S', 3, 9\)"):
        built[0](X_NEW, samples=samples | {"u": torch.randn(2, 3, 9, dtype=F64)})


def constant_noise(monkeypatch):
    """Let draws use the same standard normal noise whatever their order."""
    monkeypatch.setattr(torch, "randn_like", lambda value: torch.full_like(value, 0.5))
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: torch.full(*_shape(shape), 0.5, **options))


def _shape(shape):
    return shape if isinstance(shape[0], tuple) else (shape,)


class Looking(Matern32):
    """A kernel that looks at its values, which torch.vmap cannot follow."""

    def forward(self, x, z):
        assert bool(self.read("lengthscale").max() > 0)
        return super().bind()(x, z)

    bind = Kernel.bind


@pytest.mark.parametrize(
    ("method", "outputs", "size", "kernel_class"),
    [
        ("SVGP", (), 6, Matern32),
        pytest.param("SVGP", (2,), 5, Matern32, marks=pytest.mark.slow),
        ("SVGP", (), 2, Looking),
        ("CoregionalizedLOO", (2,), 3, Matern32),
        ("BSGP", (), 6, Matern32),
        pytest.param("BSGP", (2,), 5, Matern32, marks=pytest.mark.slow),
        pytest.param("BSGP", (), 2, Looking, marks=pytest.mark.slow),
    ],
)
def test_draws_mapped_are_draws_one_by_one(method, outputs, size, kernel_class, monkeypatch):
    y, built = torch.stack([Y, -Y], 1) if outputs else Y, []
    known = {"SVGP": SVGP, "CoregionalizedLOO": CoregionalizedLOO, "BSGP": BSGP}[method]
    noise = Gaussian(vector_prior(2, 1) if outputs else vector_prior())
    kernel = kernel_class(2, variance=vector_prior(), lengthscale=vector_prior(2))
    if method == "CoregionalizedLOO":
        mixing = PyroSample(dist.Normal(torch.zeros(2, 1, dtype=F64), 1.0).to_event(2))
        built.append(known(X, y, [kernel], noise, num_neighbors=4, mixing=mixing))
    else:
        built.append(known(X, y, kernel, noise, inducing=X[:7].clone()))
    built.append(OneByOne(built[0]))
    samples = Predictive(built[0].model, num_samples=size)()  # with dimensions of one in front
    samples = {name: value for name, value in samples.items() if name not in ("f", "y")}

    def ask(gp, call, *args, **options):
        return getattr(gp, call)(*args, **options, samples=samples)

    def agree(call, *args, **options):
        results = [ask(gp, call, *args, **options) for gp in built]
        torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
        return results[0]

    mean, _ = agree("__call__", X_NEW)
    assert mean.shape == (*outputs, P)
    y_new = torch.randn(P, 2, dtype=F64) if method == "CoregionalizedLOO" else torch.randn(*outputs, P, dtype=F64)
    torch.testing.assert_close(*(ask(gp, "predict", X_NEW).log_prob(y_new) for gp in built), rtol=1e-11, atol=1e-11)
    scores = agree("loo")
    assert len(scores) == size
    assert scores.shape[-1] == N
    agree("loo", torch.tensor([3, 1]))
    with block_limit(1):
        torch.testing.assert_close(ask(built[0], "__call__", X_NEW)[0], mean, rtol=1e-11, atol=1e-11)
    constant_noise(monkeypatch)
    for count in (1, size, 2 * size + 1):
        assert agree("sample", X_NEW, count, seed=0).shape == (count, *outputs, P)
    if method == "SVGP":
        agree("__call__", X_NEW, num_neighbors=3)
        agree("sample", X_NEW, 4, seed=0, num_neighbors=3)


def test_mapped_draws_have_noise_of_their_own():
    gp = build(SVGP, inducing=X[:3].clone())
    same = {"kernel.lengthscale": torch.full((400,), 0.4, dtype=F64), "nu": torch.zeros(400, 3, dtype=F64)}
    draws = gp.sample(X_NEW, 400, samples=same, seed=0)
    _, variance = gp(X_NEW, samples=same)
    torch.testing.assert_close(draws.var(0), variance, rtol=0.3, atol=0.0)
    torch.testing.assert_close(draws, gp.sample(X_NEW, 400, samples=same, seed=0))


@pytest.mark.slow
def test_mapped_draws_of_layers_have_hidden_values_of_their_own():
    gp = BSGP(X, Y, Matern32(2, lengthscale=vector_prior()), inducing=5, num_layers=2, num_draws=2)
    one = {name: value for name, value in Predictive(gp.model, num_samples=1)().items() if name != "y"}
    many = {name: value.expand(300, *value.shape[1:]) for name, value in one.items()}
    loc, _ = gp.moments_by_draw(X_NEW, samples=many)
    assert bool((loc.std(0) > 0).all())
    slow = OneByOne(gp)
    other, _ = slow.moments_by_draw(X_NEW, samples=many)
    error = (loc.std(0).square() + other.std(0).square()).div(300).sqrt()
    assert bool(((loc.mean(0) - other.mean(0)).abs() < 5 * error).all())


def with_gradients(case):
    """A method whose predictions depend on all of its parameters, and targets at new points."""
    if case == "CoregionalizedLOO":
        y = torch.stack([Y, Y.cos(), Y - X[:, 0]], 1)
        return CoregionalizedLOO(X, y, [Matern32(2, 1.2, 0.4), Matern32(2, 0.8, 0.7)], num_neighbors=5), torch.zeros(
            P, 3, dtype=F64
        )
    likelihood, make = {"Gaussian": (Gaussian, lambda f: f)}.get(case) or next(
        pair for pair in AUGMENTED if type(pair[0]()).__name__ == case
    )
    gp = LOO(X, make(Y), Matern32(2, 1.2, 0.4), likelihood(), num_neighbors=5)
    return gp, make(X_NEW[:, 0] - 0.5)


@pytest.mark.parametrize(
    "case", ["Gaussian", "Bernoulli", "Binomial", "NegativeBinomial", "StudentT", "Categorical", "CoregionalizedLOO"]
)
def test_gradients_of_predictions_are_those_of_differences(case):
    """In a random direction for each parameter: hyperparameters, and those of q."""
    gp, y_new = with_gradients(case)

    def value():
        loc, var = gp(X_NEW)
        return loc.sin().sum() + var.log().sum() + gp.predict(X_NEW).log_prob(y_new).sum()

    value().backward()
    for name, parameter in gp.named_parameters():
        start, direction, step = parameter.detach().clone(), torch.randn_like(parameter), 1e-5
        ends = []
        for sign in (1, -1):
            parameter.data.copy_(start + sign * step * direction)
            ends.append(float(value().detach()))
        parameter.data.copy_(start)
        slope = 0.0 if parameter.grad is None else float((parameter.grad * direction).sum())
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-7), name


def test_entries_out_of_memory_name_the_argument_that_lowers_it():
    room = {"is_left": True}
    gp = Vecchia(X, Y, num_neighbors=3, mean=lambda x: 0 * x[:, 0] if room["is_left"] else torch.empty(2**50))
    room["is_left"] = False
    for name, call in {
        "Vecchia.forward.*x_new": lambda: gp(X_NEW),
        "Vecchia.predict.*x_new": lambda: gp.predict(X_NEW),
        "Vecchia.sample.*num_samples": lambda: gp.sample(X_NEW, 2),
        "Vecchia.loo.*idx": lambda: gp.loo(),
        "Vecchia.joint.*x_new": lambda: gp.joint(X_NEW),
        "fit.*batch_size": lambda: fit(gp, 1, progress=False),
    }.items():
        where, arg = name.split(".*")
        with pytest.raises(MemoryError, match=rf"^{where}: expected .* memory that is left, got 4.19e\+06 GiB.*{arg}"):
            call()


def test_joint_covariances_have_the_nugget_at_old_and_new_points():
    kernel, x = Matern32(2, scalar(1.3), scalar(0.4)), uniform(9, seed=4)
    noise, real = torch.full((6,), 0.1, dtype=F64), torch.ones(6, dtype=torch.bool)
    weights, cov = joint_posterior(kernel.bind(), x[:3], x[3:], noise, real, 0.3)
    dense = (kernel(x) + 0.3 * 1.3 * torch.eye(9, dtype=F64)).detach()
    old = dense[3:, 3:] + torch.diag(noise)
    expected = torch.cholesky_solve(dense[3:, :3], torch.linalg.cholesky(old)).mT
    torch.testing.assert_close(weights.detach(), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(cov.detach(), dense[:3, :3] - expected @ dense[3:, :3], rtol=1e-9, atol=1e-9)
