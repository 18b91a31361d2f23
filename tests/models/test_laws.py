"""Laws that methods obey alike: batches, outputs, precision, copies, priors, and programs around them."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import (
    AUGMENTED,
    F64,
    METHODS,
    RELATIVES,
    K,
    N,
    P,
    build,
    classes,
    data,
    fresh,
    labels,
    matern,
    methods,
    stir,
    uniform,
    waves,
)
from oracles.problems import losses_inside_a_larger_program
from oracles.waves import ENCODERS, loss
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroSample
from pyro.optim import Adam

from pyro_nngp.inference import IntegratedELBO, PredictiveLogLikelihood
from pyro_nngp.kernels import Kernel, Linear, Matern32
from pyro_nngp.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroskedasticGaussian,
    NegativeBinomial,
    Poisson,
    PolyaGammaBound,
    StudentT,
)
from pyro_nngp.likelihoods import LogNormal as LogNormalNoise
from pyro_nngp.models import LMC, LOO, NPVI, SVGP, SWSGP, VNNGP, MLLk, Vecchia
from pyro_nngp.variational import Amortized, Conjugate, FullRank, LogNormal, MeanField, SparseCholesky

F32 = torch.float32
apart = pytest.mark.parametrize("name", [name for name in methods() if "Vecchia-inducing" not in str(name)])


@apart
def test_disjoint_batches_average_exactly(name):
    gp = stir(build(name))
    parts = [loss(gp, idx) for idx in torch.randperm(N).split(10)]
    assert sum(parts) / len(parts) == pytest.approx(loss(gp), rel=1e-10)


@apart
def test_several_outputs_equal_separate_models(name):
    x, y = data()
    both, idx = torch.stack([y, y.flip(0)], -1), torch.arange(0, N, 3)
    method, settings = METHODS[name]

    def made(y):
        torch.manual_seed(0)  # networks
        mean = {"mean": lambda x: 0.3 + 0 * x[:, 0]}
        gp = method(x, y, matern(), Gaussian(torch.tensor(0.1, dtype=F64)), **fresh(settings), **mean)
        if getattr(gp, "can_solve", False):
            gp.solve()
        return gp

    together, singles = made(both), [made(both[:, t]) for t in (0, 1)]
    for args in ((), (idx,)):
        assert loss(together, *args) == pytest.approx(sum(loss(gp, *args) for gp in singles), rel=1e-6)
    assert together.predict(x[:4]).batch_shape == (2, 4)
    assert together.sample(x[:4] + 1, 3).shape == (3, 2, 4)


@pytest.mark.parametrize("method", [LOO, MLLk, Vecchia])
def test_outputs_have_noise_of_their_own(method):
    x, y = waves(40)
    both = torch.stack([y, -2 * y + 1], -1)

    def made(y, *noise):
        return method(x, y, matern(), Gaussian(torch.tensor(noise, dtype=F64)), num_neighbors=5)

    own = made(both, [0.1], [0.3])
    singles = [method(x, both[:, t], matern(), Gaussian(0.1 + 0.2 * t), num_neighbors=5) for t in (0, 1)]
    for args in ((), (torch.arange(0, 40, 3),)):
        assert loss(own, *args) == pytest.approx(sum(loss(gp, *args) for gp in singles), rel=1e-7)


class Noisy(Kernel):
    """A Matern kernel plus independent values of its variance times `share` at each place."""

    def __init__(self, share):
        super().__init__(2)
        self.share, self.smooth = share, Matern32(2, 1.0, 0.5).double()

    def forward(self, x, z):
        return self.smooth(x, z) + self.share * (x[..., :, None, :] == z[..., None, :, :]).all(-1)


NETWORKS = "NPVI-NN", "NPVI-conditional", "NPVI-sites"  # which see correlations without the nugget


@pytest.mark.parametrize("name", [*(name for name in METHODS if name not in NETWORKS), "LMC"])
def test_a_nugget_is_a_part_of_the_kernel(name):
    x, y = data()
    method, settings = METHODS.get(name, (LMC, {"num_neighbors": K}))
    settings = fresh(settings)
    y = torch.stack([y, x[:, 0] - y], -1) if name == "LMC" else y
    if name == "LMC":
        settings |= {"num_latents": 1, "mixing": torch.tensor([[1.0], [0.5]], dtype=F64)}
    if "inducing" in settings:  # points that are not the data, where f would have the same independent value
        settings["inducing"] = uniform(settings["inducing"], seed=1)
    found = []
    for kernel, jitter in ((Noisy(0.0), 0.3), (Noisy(0.3), 1e-12)):
        torch.manual_seed(0)
        metric = torch.ones(2, dtype=F64)
        gp = method(x, y, kernel, Gaussian(0.05), jitter=jitter, metric=metric, **settings)
        torch.manual_seed(0)
        if getattr(gp, "can_solve", False):
            gp.solve()
        else:
            stir(gp)
        torch.manual_seed(0)
        new = x[:P] + 0.01
        found.append([torch.as_tensor(loss(gp)), *gp(new), gp.loo(), gp.sample(new, 3, seed=0)])
        if name in ("VNNGP", "LOO", "Vecchia", "MLLk"):
            found[-1] += gp.joint(new[None])
        if isinstance(gp, (VNNGP, Vecchia, SVGP)):
            found[-1].append(torch.as_tensor(loss(gp, torch.arange(9))))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


WITH_GRAPHS = [name for name in METHODS if name not in ("SVGP", "SWSGP", *RELATIVES)]


@pytest.mark.parametrize("name", WITH_GRAPHS)
def test_a_metric_says_which_points_are_near(name):
    """By the first column alone, in training, in leave-one-out densities and at new places."""
    x, y = data()
    method, settings = METHODS[name]
    metric = torch.tensor([1.0, 1e9], dtype=F64)
    gp = method(x, y, matern(), Gaussian(0.05), metric=metric, **fresh(settings))
    points = gp.graph.x
    want = type(gp.graph)(
        points, K, metric=metric, **({"ordering": gp.graph.order} if hasattr(gp.graph, "order") else {})
    )
    assert torch.equal(gp.graph.neighbors.sort(-1).values, want.neighbors.sort(-1).values)
    assert torch.equal(gp.graph.others(K).sort(-1).values, want.others(K).sort(-1).values)
    new = uniform(P)
    near = (new[:, None, 0] - points[:, 0]).abs().argsort(-1)[:, :3]
    assert torch.equal(gp.graph.query(new, 3).long().sort(-1).values, near.sort(-1).values)
    gp.refresh_neighbors()
    assert torch.equal(gp.graph.neighbors.sort(-1).values, want.neighbors.sort(-1).values)


@pytest.mark.parametrize(
    ("method", "settings"),
    [(VNNGP, {"num_neighbors": 6}), (SWSGP, {"inducing": 12, "num_neighbors": 5}), (SVGP, {"inducing": 12})],
)
def test_single_precision_is_close_to_double(method, settings):
    x, y = waves()
    wide, single = (method(x.to(d), y.to(d), matern(), Gaussian(0.1), jitter=1e-5, **settings) for d in (F64, F32))
    single.load_state_dict(wide.state_dict())
    assert loss(single) == pytest.approx(loss(wide), rel=1e-3)


@pytest.mark.parametrize("name", methods())
def test_saving_copying_and_pickling_keep_predictions(name):
    lengthscale = torch.tensor([0.3, 0.8], dtype=F64)
    gp, x_new = stir(build(name, lengthscale=lengthscale.flip(0))), data()[0][:P] + 0.01
    gp.kernel.lengthscale = lengthscale
    if hasattr(gp, "refresh_neighbors"):
        gp.refresh_neighbors()
    fresh = build(name, seed=3, lengthscale=lengthscale)
    fresh.load_state_dict(gp.state_dict())
    for other in (fresh, copy.deepcopy(gp), pickle.loads(pickle.dumps(gp))):
        torch.testing.assert_close(other(x_new), gp(x_new), rtol=0, atol=0)
        assert loss(other) == loss(gp)


def prior(*shape):
    return PyroSample(dist.LogNormal(torch.zeros(shape), torch.ones(shape)).to_event(len(shape)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings", "site"),
    [
        (VNNGP, {"num_neighbors": 6}, "u"),
        (SVGP, {"inducing": 11}, "f"),
        (SWSGP, {"inducing": 12, "num_neighbors": 5}, "u"),
        (LOO, {"num_neighbors": 6}, "omega"),
    ],
)
def test_hyperparameters_with_priors_are_learned(method, settings, site):
    (x, y), kernel, likelihood = waves(), matern(), Gaussian(0.1)
    kernel.lengthscale, likelihood.variance = prior(2), PyroSample(dist.LogNormal(-2.0, 1.0))
    if method is LOO:
        y, likelihood = (y + 1).exp().round(), NegativeBinomial()
        likelihood.total_count = PyroSample(dist.LogNormal(1.0, 0.5))
    gp = method(x, y, kernel, likelihood, **settings)
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.05}), IntegratedELBO())
    losses = [svi.step() for _ in range(100)]
    assert sum(losses[-20:]) < sum(losses[:20])
    assert gp(x[:3])[0].equal(gp(x[:3])[0])  # the median, not a draw
    assert gp.sample(x[:3], 5).shape == (5, 3)
    posterior = Predictive(gp.model, guide=gp.guide, num_samples=4)()
    assert posterior["kernel.lengthscale"].unique(dim=0).shape[0] == 4
    assert posterior[site].shape[0] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (VNNGP, {"num_neighbors": 6, "guide": MeanField()}),
        (VNNGP, {"num_neighbors": 6, "guide": SparseCholesky(3)}),
        (SVGP, {"inducing": 11}),
        (SVGP, {"inducing": 11, "objective": "fitc"}),
        (SWSGP, {"inducing": 12, "num_neighbors": 5, "guide": MeanField(scale=0.5)}),
        (SWSGP, {"inducing": 12, "num_neighbors": 5, "guide": FullRank(scale=0.5)}),
    ],
)
def test_integrating_elbo_is_what_monte_carlo_elbos_estimate(method, settings):
    gp = stir(method(*waves(40), matern(), Gaussian(0.125), **settings))
    exact = loss(gp)
    assert loss(gp) == exact
    for elbo in (TraceMeanField_ELBO(), Trace_ELBO()):
        values = torch.tensor([loss(gp, elbo=elbo) for _ in range(100)])
        assert values.std() > 0
        assert abs(values.mean() - exact) < 6 * values.std() / 100**0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [(VNNGP, {"num_neighbors": K}), (SVGP, {"inducing": 11}), (SWSGP, {"inducing": 12, "num_neighbors": 5})],
)
def test_f_inside_a_larger_program(method, settings):
    x, y = waves()
    gp = method(x, None, lambda a, b: matern()(a, b).detach(), **settings)
    losses = losses_inside_a_larger_program(gp, y, torch.randn(len(x), dtype=F64), steps=100, batch_size=24)
    assert losses[-40:].mean() < losses[:40].mean()
    assert set(pyro.get_param_store()) == {"loc"}
    assert pyro.param("loc") != 0
    for call in (gp.predict, *([lambda x: gp.solve()] if method is SVGP else [])):
        with pytest.raises(ValueError, match=r"expected a likelihood in the model, got None"):
            call(x)


def as_they_are(f):
    return f


def two(f):
    return torch.stack([f, -2 * f], -1)


def normal():
    return Gaussian(torch.tensor(0.125, dtype=F64))


M = 11
NEAR, INDUCING = {"num_neighbors": 5}, {"inducing": M}
IN_BATCHES = [
    *((LOO, *case, NEAR | {"guide": LogNormal()}) for case in AUGMENTED),
    *(
        (LOO, *case, NEAR | {"guide": Conjugate()}) for case in AUGMENTED if not isinstance(case[0](), StudentT)
    ),  # random
    *(
        (NPVI, normal, two, NEAR | {"guide": guide})
        for guide in (SparseCholesky(), *(lambda e=e: Amortized(e()) for e in ENCODERS))
    ),
    *(
        (SVGP, *case, INDUCING | {"objective": objective})
        for case in ((normal, as_they_are), (StudentT, as_they_are), (Bernoulli, labels))
        for objective in ("vfe", "fitc")
    ),
    *(
        (SWSGP, likelihood, as_they_are, INDUCING | NEAR | settings)
        for likelihood in (normal, StudentT)
        for settings in ({}, {"learn_inducing": False}, {"guide": FullRank(scale=0.5)})
    ),
]


@pytest.mark.parametrize(("method", "likelihood", "make", "settings"), IN_BATCHES)
def test_disjoint_batches_average_exactly_for_all_likelihoods_and_families(method, likelihood, make, settings):
    x, f = waves()
    gp = stir(method(x, make(f), matern(), likelihood(), **fresh(settings)))
    if hasattr(gp.q, "log_scale") and method is LOO:
        gp.q.log_scale.data.fill_(-30.0)  # no randomness left
    for elbo in (IntegratedELBO(), *([PredictiveLogLikelihood(0.3)] if "inducing" in settings else [])):
        parts = [loss(gp, idx, elbo=elbo) for idx in torch.randperm(48).split(12)]
        assert sum(parts) / len(parts) == pytest.approx(loss(gp, elbo=elbo), rel=1e-9)


SOLVED = [
    *(
        (SVGP, *case, INDUCING | {"guide": guide})
        for guide in (FullRank(), MeanField())
        for case in (
            (normal, as_they_are),
            (Poisson, lambda f: (2 * f).exp().round()),
            (Bernoulli, labels),
            (lambda: PolyaGammaBound(Bernoulli()), labels),
            (lambda: Categorical(3), classes),
        )
    ),
    *(
        (SVGP, *case, INDUCING | {"guide": guide, "objective": "fitc"})
        for guide in (FullRank(), MeanField())
        for case in ((normal, as_they_are), (lambda: LogNormalNoise(0.1), torch.exp), (Bernoulli, labels))
    ),
    *(
        (method, *case, {"num_neighbors": 8, "guide": guide})
        for method, guide in ((VNNGP, MeanField()), (VNNGP, SparseCholesky(3)), (NPVI, SparseCholesky()))
        for case in (
            (lambda: Gaussian(0.05), as_they_are),
            (lambda: Poisson("softplus"), lambda f: (3 * torch.nn.functional.softplus(f)).round()),
            (lambda: StudentT(4.0, 0.2), as_they_are),
            (lambda: LogNormalNoise(0.01), lambda f: (0.1 * f).exp()),
            (Bernoulli, labels),
            (lambda: Categorical(3), classes),
        )
    ),
]


@pytest.mark.parametrize(("method", "likelihood", "make", "settings"), SOLVED)
def test_solving_ends_where_the_gradient_vanishes(method, likelihood, make, settings):
    x, f = waves()
    gp = method(x, make(f), matern(), likelihood(), **settings)
    gp.solve(max_steps=300, tolerance=1e-7)
    IntegratedELBO().differentiable_loss(gp.model, gp.guide).backward()
    for name, param in gp.q.named_parameters():
        unit = gp.q.log_scale.detach().exp() if name == "loc" and method is not SVGP else 1.0
        if not (isinstance(settings["guide"], SparseCholesky) and method is VNNGP) or name == "loc":
            assert (param.grad * unit).abs().max() < 1e-4, name
    assert {id(param) for param in gp.q.parameters()} <= {id(param) for param in gp.solved_parameters()}


SUM = Matern32(2, lengthscale=torch.tensor(0.4)) + Linear(2)
OTHERS = [
    (SVGP, lambda: Categorical(3), classes, INDUCING),
    (SVGP, HeteroskedasticGaussian, as_they_are, INDUCING | {"objective": "fitc"}),
    (SWSGP, lambda: Categorical(3), classes, INDUCING | NEAR | {"kernel": SUM}),
    (SWSGP, Poisson, lambda f: f.exp().round(), INDUCING | NEAR | {"guide": FullRank()}),
    (VNNGP, lambda: Categorical(3), classes, NEAR),
    (VNNGP, Poisson, lambda f: f.exp().round(), NEAR | {"guide": MeanField()}),
    (VNNGP, StudentT, as_they_are, NEAR | {"guide": MeanField()}),
]


@pytest.mark.filterwarnings("ignore:(SWSGP|VNNGP). intervals of f")
@pytest.mark.parametrize(("method", "likelihood", "make", "settings"), OTHERS)
def test_other_likelihoods_train_and_predict(method, likelihood, make, settings):
    x, f = waves()
    gp = method(x, make(f), likelihood=likelihood(), **{"kernel": matern()} | settings)
    if method is VNNGP:
        gp.solve()
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.05}), IntegratedELBO())
    losses = [svi.step(torch.arange(48)[i % 2 :: 2]) for i in range(20)]
    assert losses[-2] + losses[-1] < losses[0] + losses[1]
    for options in ({}, {"num_neighbors": 4}):
        loc, var = gp(x[:5], **options)
        assert loc.shape == var.shape == (*gp.latent_shape, 5)
        assert gp.predict(x[:5], **options).log_prob(gp.y[:5]).shape == (5,)
        assert gp.sample(x[:5], 3, **options).shape == (3, *gp.latent_shape, 5)
