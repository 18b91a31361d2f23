"""What all methods promise alike: arguments, sites, shapes, training by plain Pyro, export, saving, devices."""

import copy
import inspect

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import METHODS, K, N, P, build, data, fresh, methods
from pyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from torch import nn

from pyro_nngp.inference import IntegratedELBO, fit, to_arviz
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, Poisson
from pyro_nngp.means import LinearMean
from pyro_nngp.models import BSGP, LMC, LOO, NPVI, SVGP, SWSGP, VNNGP, CoregionalizedLOO, MLLk, Vecchia
from pyro_nngp.variational import Amortized
from pyro_nngp.variational.encoders import GraphConvolutionEncoder, SiteEncoder

VOCABULARY = {
    *("x", "y", "kernel", "likelihood", "num_neighbors", "inducing", "learn_inducing", "mean", "ordering", "objective"),
    *("divergence", "guide", "coupling", "jitter", "metric", "start", "offset", "weights", "trials", "limits", "seed"),
}


@pytest.fixture(params=methods())
def name(request):
    return request.param


def test_arguments_have_the_same_names_and_order(name):
    parameters = inspect.signature(METHODS[name][0].__init__).parameters
    assert list(parameters)[1:5] == ["x", "y", "kernel", "likelihood"]
    assert set(list(parameters)[1:]) <= VOCABULARY
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[5:])
    with pytest.raises(TypeError, match="expected keyword arguments among x, y, .*, got 'neighbours'"):
        METHODS[name][0](*data(), Matern52(2), Gaussian(), neighbours=3)


@pytest.mark.parametrize("method", [BSGP, CoregionalizedLOO, LMC, LOO, MLLk, NPVI, SVGP, SWSGP, VNNGP, Vecchia])
def test_all_begin_with_the_same_seed(method):
    assert inspect.signature(method.__init__).parameters["seed"].default == 0


@pytest.mark.parametrize("method", [BSGP, CoregionalizedLOO, LOO, NPVI, SVGP, SWSGP, VNNGP, Vecchia])
def test_predictions_take_their_options_by_name(method):
    for call, given in (("forward", ["x_new"]), ("predict", ["x_new"]), ("sample", ["x_new", "num_samples"])):
        parameters = list(inspect.signature(getattr(method, call)).parameters.values())[1:]
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == given
        others = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert others <= {"num_neighbors", "samples", "seed", "offset", "trials", "limits"}
        assert len(others) + len(given) == len(parameters)


def test_sites_of_model_and_guide_match(name):
    gp, idx = build(name, lengthscale=PyroSample(dist.LogNormal(torch.tensor(0.0, dtype=torch.float64), 1.0))), None
    for idx in (None, torch.arange(5, 25)):
        model, guide = (pyro.poutine.trace(f).get_trace(idx) for f in (gp.model, gp.guide))
        latent, guided = (set(trace.stochastic_nodes) - {"data", "latents"} for trace in (model, guide))
        auxiliary = {n for n in guided if guide.nodes[n]["infer"].get("is_auxiliary")}
        assert guided - auxiliary == latent
        assert "kernel.lengthscale" in latent
        assert model.nodes["y"]["is_observed"]
        for site in latent:
            assert model.nodes[site]["fn"].shape() == guide.nodes[site]["fn"].shape()


def test_predictions_have_the_same_shapes_and_meaning(name):
    gp, x_new = build(name), data()[0][:P] + 0.01
    loc, var = gp(x_new)
    assert loc.shape == var.shape == (P,)
    assert (var > 0).all()
    predictive = gp.predict(x_new)
    assert predictive.batch_shape == (P,)
    torch.testing.assert_close(predictive.mean, loc)
    torch.testing.assert_close(predictive.variance, var + gp.likelihood.variance)
    draws = gp.sample(x_new, 4000)
    assert draws.shape == (4000, P)
    assert ((draws.mean(0) - loc).abs() < 6 * (draws.var(0) / 4000).sqrt() + 1e-2).all()


def test_plain_svi_trains(name):
    gp = build(name)
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.02}), TraceMeanField_ELBO())
    losses = torch.tensor([svi.step() for _ in range(24)])
    assert losses.isfinite().all()
    assert losses[-6:].mean() < losses[:6].mean()


def test_minibatches_train_and_the_result_exports_and_reloads(name, tmp_path):
    gp, x_new = build(name), data()[0][:P]
    fit(gp, 5, batch_size=20, progress=False)
    idata = to_arviz(gp, num_samples=3)
    event = (K + 1,) if name == "MLLk" else ()  # a point together with its neighbors
    assert idata.observed_data["y"].shape == (N, *event)
    assert idata.posterior_predictive["y"].shape == (1, 3, N, *event)
    torch.save(gp.state_dict(), tmp_path / "state.pt")
    fresh = build(name, seed=1)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    rounding = 1e-12 if name == "Vecchia-inducing" else 0  # of sums over all data
    for got, expected in zip(fresh(x_new), gp(x_new), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=rounding)


def test_single_precision_stays_single(name):
    gp, (x, _) = build(name, torch.float32), data(torch.float32)
    assert gp(x[:P])[0].dtype is gp.sample(x[:P], 2).dtype is torch.float32
    fit(gp, 2, progress=False)
    assert all(p.dtype is torch.float32 for p in gp.parameters())


def test_a_seed_makes_draws_reproducible_and_leaves_the_random_state_alone(name):
    gp, x_new = build(name), data()[0][:P] + 0.01
    state = torch.get_rng_state()
    first, again, other = (gp.sample(x_new, 3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(gp.sample(x_new, 3), gp.sample(x_new, 3))


def test_priors_neither_use_the_random_state_nor_make_the_start_random(name):
    prior = dist.LogNormal(torch.tensor(0.0, dtype=torch.float64), 1.0)

    def with_priors(count):
        method, settings = METHODS[name]
        torch.manual_seed(0)
        settings = fresh(settings)
        torch.rand(count)
        kernel, noise = Matern52(2, lengthscale=PyroSample(prior)), Gaussian(PyroSample(prior))
        state = torch.get_rng_state()
        gp = method(*data(), kernel, noise, **settings)
        assert torch.equal(torch.get_rng_state(), state)
        return gp.state_dict()

    first = with_priors(1)
    assert {"hyper_guide.loc_0", "hyper_guide.loc_1"} <= first.keys()
    for one, two in zip(first.values(), with_priors(2).values(), strict=True):
        assert torch.equal(one, two)


def test_priors_assigned_too_late_are_no_silent_randomness(name):
    gp, x_new = build(name), data()[0][:P] + 0.01
    prior = PyroSample(dist.LogNormal(torch.tensor(0.0, dtype=torch.float64), 1.0))
    gp.kernel.lengthscale = prior
    calls = {"call": lambda: gp(x_new), "predict": lambda: gp.predict(x_new), "sample": lambda: gp.sample(x_new, 2)}
    for optional in ("refresh_neighbors", "log_prob"):
        if hasattr(gp, optional):
            calls[optional] = getattr(gp, optional)
    if getattr(gp, "can_solve", False):
        calls["solve"] = gp.solve
    for call in (*calls.values(), gp.guide):
        with pytest.raises(ValueError, match=r"priors to be assigned before the model is built, got \['lengthscale'\]"):
            call()


def test_what_becomes_of_the_data_afterwards_does_not_matter(name):
    gp, x_new = build(name), data()[0][:P] + 0.01
    method, settings = METHODS[name]
    torch.manual_seed(0)
    x, y = data()
    changed = method(x, y, Matern52(2, lengthscale=0.5), Gaussian(0.05), seed=0, **fresh(settings))
    changed.load_state_dict(gp.state_dict())
    x.add_(1.0), y.mul_(10.0)
    for got, expected in zip(changed(x_new), gp(x_new), strict=True):
        assert torch.equal(got, expected)
    assert IntegratedELBO().loss(changed.model, changed.guide) == IntegratedELBO().loss(gp.model, gp.guide)


def test_two_in_one_program_need_names(name):
    one, two = build(name), build(name, seed=1)
    apart = sum(IntegratedELBO().loss(gp.model, gp.guide) for gp in (one, two))
    model, guide = lambda: (one.model(), two.model()), lambda: (one.guide(), two.guide())
    with pytest.raises(
        RuntimeError, match=r"with names that the program has not used, got \['[\w.]+'\] twice\. Name one"
    ):
        pyro.poutine.trace(model).get_trace()
    one.named("first")
    sites = pyro.poutine.trace(model).get_trace().nodes
    assert {"y", "first.y", "data", "first.data"} <= sites.keys()
    torch.testing.assert_close(IntegratedELBO().loss(model, guide), apart, rtol=1e-9, atol=0)


def test_a_larger_module_gives_its_names(name):
    larger = PyroModule()
    larger.gp = build(name)
    sites = pyro.poutine.trace(larger.gp.model).get_trace().nodes
    assert {"gp.y", "gp.data", "gp.kernel.lengthscale"} <= sites.keys()


@pytest.mark.parametrize("method", [Vecchia, LOO, VNNGP, SWSGP])
def test_what_is_found_from_the_data_at_first_leaves_names_open(method):
    """The number of neighbors, and where q(u) starts."""
    x, _ = data()
    larger = PyroModule()
    larger.gp = method(x, x.sum(-1).cos())
    assert "gp.kernel.lengthscale" in pyro.poutine.trace(larger.gp.model).get_trace().nodes


def test_data_leave_their_graph_behind():
    x, y = (value.requires_grad_() for value in data())
    offset = (2 * y).clone()
    weights = y.detach().exp().requires_grad_()
    settings = {"kernel": Matern52(2, 1.0, 0.5), "likelihood": Gaussian(0.05), "inducing": x[:9] + 0}
    sparse = SVGP(x, y, **settings, offset=offset, weights=weights, learn_inducing=False)
    for gp in (sparse, VNNGP(x, y, **settings, num_neighbors=3, learn_inducing=True)):
        assert not any(value.requires_grad for value in gp.buffers())
        copy.deepcopy(gp)
        IntegratedELBO().loss_and_grads(gp.model, gp.guide)
    sparse.extend(x[:2], y[:2], offset=offset[:2], weights=weights[:2])
    assert not any(value.requires_grad for value in sparse.buffers())
    assert x.grad is None
    assert y.grad is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.tensor([3, 1, 3]), r"expected idx without repeats, got 1 repeats"),
        (torch.tensor([-1, 2]), r"expected idx in 0\.\.59, got -1\.\.2"),
        (torch.tensor([0, 60]), r"expected idx in 0\.\.59, got 0\.\.60"),
        (torch.empty(0, dtype=torch.long), r"expected idx"),
        (torch.tensor([1.0]), r"expected idx of dtype torch.int64, got torch.float32"),
        ([1, 2], r"expected idx to be a torch.Tensor, got list"),
    ],
)
def test_wrong_rows_are_refused(name, rows, message):
    gp = build(name)
    for call in (gp.model, gp.guide):
        with pytest.raises((ValueError, TypeError), match=message):
            call(rows)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kernel": Matern52(3)}, ValueError, r"with input_dim = 3 columns, got \(\d+, 2\)\. Set input_dim"),
        ({"kernel": RBF(1, active_dims=[2])}, ValueError, r"expected inputs with columns \[2\], got \(\d+, 2\)"),
        ({"kernel": Matern52}, TypeError, r"expected kernel to be a Kernel or a callable, got Matern52\. Pass an ins"),
        ({"kernel": Gaussian()}, TypeError, r"to be a cov.* got Gaussian, a likelihood\. Write likelihood=Gaussian\("),
        ({"kernel": LinearMean(2)}, TypeError, r"got LinearMean, a mean function\. Write mean=LinearMean\("),
        ({"kernel": nn.Linear(2, 1)}, TypeError, r"of x and z, got Linear, which does not take two arguments"),
        ({"kernel": lambda x: x}, TypeError, r"of x and z, got function, which does not take two arguments"),
        ({"mean": nn.Linear(3, 1)}, RuntimeError, r"expected mean to take inputs of shape \(2, 2\), got RuntimeError"),
        ({"mean": nn.Linear(2, 3)}, ValueError, r"expected mean\(x\) of shape \(2,\) or \(2, 1\), got \(2, 3\)"),
        ({"mean": lambda x: x.sum()}, ValueError, r"expected mean\(x\) of shape \(2,\) or \(2, 1\), got \(\)"),
        ({"mean": lambda x: 0.0}, ValueError, r"expected mean\(x\) of shape \(2,\) or \(2, 1\), got float"),
        ({"mean": 0.0}, TypeError, r"expected mean to be callable, got float"),
        ({"mean": LinearMean(3)}, ValueError, r"x with input_dim = 3 columns, got \d\. .* its columns by active_dims"),
        ({"likelihood": 0.05}, TypeError, r"expected likelihood to be a Likelihood, got 0\.05"),
        ({"likelihood": Poisson}, TypeError, r"a Likelihood, got the class Poisson\. .* such as Poisson\(\)"),
        ({"jitter": -1.0}, ValueError, r"expected jitter to be finite and >= 0, got -1\.0"),
        ({"x": torch.full((N, 2), torch.nan)}, ValueError, r"expected x to be finite"),
        ({"x": torch.zeros(N)}, ValueError, r"expected x of shape \(N, D\)"),
        ({"x": torch.zeros(N, 2, dtype=torch.bool)}, TypeError, r"expected x of a floating-point dtype"),
        ({"x": [[0.0]]}, TypeError, r"expected x to be a torch.Tensor, got list"),
        ({"y": [0.0]}, TypeError, r"expected y to be a torch.Tensor"),
        ({"y": torch.full((N,), torch.inf)}, ValueError, r"expected y to be finite"),
        ({"y": torch.zeros(N - 1)}, ValueError, r"expected y of shape \(60,\) or \(60, T\)"),
        ({"y": torch.zeros(N, device="meta")}, TypeError, r"expected y to have values, got a meta tensor"),
        ({"y": torch.full((N,), torch.nan)}, ValueError, r"expected y with values, got NaN in all rows"),
        ({"y": torch.zeros(N, dtype=torch.float64)}, TypeError, r"expected y of the dtype of x \(torch.float32\), got"),
    ],
)
def test_wrong_parts_are_refused_at_construction(name, change, error, message):
    method, settings = METHODS[name]
    x, y = data(torch.float32)
    parts = {"x": x, "y": y, "kernel": Matern52(2), "likelihood": Gaussian()} | fresh(settings) | change
    with pytest.raises(error, match=message):
        method(**parts)


def test_one_row_is_refused(name):
    method, settings = METHODS[name]
    x, y = data(torch.float32)
    with pytest.raises(ValueError, match="expected x with at least 2 rows, got 1"):
        method(**{"x": x[:1], "y": y[:1], "kernel": Matern52(2), "likelihood": Gaussian()} | fresh(settings))


def test_wrong_encoders_are_refused():
    with pytest.raises(TypeError, match=r"GraphConvolutionEncoder: expected widths to be a sequence of ints >= 1"):
        GraphConvolutionEncoder(2)
    with pytest.raises(TypeError, match=r"SiteEncoder: expected widths to be a sequence of ints >= 1, got \(4, 0\)"):
        SiteEncoder(2, (4, 0))
    with pytest.raises(TypeError, match=r"expected guide\.encoder to be a torch module .* got .*Pass an instance"):
        NPVI(*data(), Matern52(2), Gaussian(), num_neighbors=K, guide=Amortized(SiteEncoder))
    with pytest.raises(ValueError, match=r"SiteEncoder: expected x with input_dim = 3 columns, got 2\. Write Site"):
        NPVI(*data(), Matern52(2), Gaussian(), num_neighbors=K, guide=Amortized(SiteEncoder(3)))
    gp = NPVI(*data(), Matern52(2), Gaussian(), num_neighbors=K, guide=Amortized(SiteEncoder(2)))
    with pytest.raises(ValueError, match=r"NPVI.amortize: expected x with 2 columns, as the model has, got 4"):
        gp.amortize(torch.rand(9, 4, dtype=gp.x.dtype), gp.y[:9])


def test_labels_are_no_observations_of_a_normal():
    x, y = data()
    with pytest.raises(TypeError, match=r"Gaussian: expected y of a numeric dtype, got torch.bool. Use Bernoulli\(\)"):
        VNNGP(x, y > 0, Matern52(2), Gaussian(), num_neighbors=K)
    counted = VNNGP(x, (5 * y).round().long(), Matern52(2), Gaussian(), num_neighbors=K)
    as_floats = VNNGP(x, (5 * y).round(), Matern52(2), Gaussian(), num_neighbors=K)
    for gp in (counted, as_floats):
        fit(gp, 3, progress=False)
    torch.testing.assert_close(counted(x)[0], as_floats(x)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", ["forward", "predict", "sample"])
def test_one_point_is_a_row(name, call):
    gp, (x, _) = build(name), data()
    more = (2,) if call == "sample" else ()
    with pytest.raises(ValueError, match=rf"{call}: expected x_new of shape .* got \(2,\)\. Use x_new\[None\] for"):
        getattr(gp, call)(x[0], *more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, [0, 1, 1]], r"\w+\.forward: expected x_new with 2 columns, as x has, got 3"),
        (lambda x: x.float(), r"\w+\.forward: expected x_new of the dtype of x"),
        (lambda x: x / 0, r"\w+\.forward: expected x_new to be finite"),
    ],
)
def test_wrong_places_are_refused(name, change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build(name)(change(data()[0]))


def test_no_points_are_no_single_point():
    gp, (x, _) = build("Vecchia"), data()
    empty = r"expected x_new of shape \(N, D\) .* got \(0, 2\)\. Give at least one row and one column"
    for call in (gp, gp.joint):
        with pytest.raises(ValueError, match=empty):
            call(x[:0])
    with pytest.raises(TypeError, match="joint: expected x_new to be a torch.Tensor, got NoneType"):
        gp.joint(None)
    with pytest.raises(ValueError, match=r"joint: expected x_new of shape \(..., q, D\), got \(2,\)"):
        gp.joint(x[0])
    with pytest.raises(ValueError, match=r"joint: expected x_new of shape \(N, D\) with N, D >= 1, got \(2, 0\)"):
        gp.joint(x[:2, :0])


def test_two_instances_share_no_parameters(name):
    one, two = build(name), build(name)
    before = {key: value.clone() for key, value in two.named_parameters()}
    fit(one, 2, progress=False)
    two.model()
    two.guide()
    assert all(torch.equal(value, before[key]) for key, value in two.named_parameters())
    assert not torch.equal(one.kernel.lengthscale, two.kernel.lengthscale)
    assert not set(pyro.get_param_store())


@pytest.mark.parametrize("name", ["VNNGP", "LOO", "Vecchia", "SVGP"], indirect=False)
def test_hyperparameters_with_priors_run_under_nuts(name):
    gp = build(name, lengthscale=PyroSample(dist.LogNormal(torch.tensor(0.0, dtype=torch.float64), 1.0)))
    mcmc = MCMC(NUTS(gp.model, max_tree_depth=3), num_samples=3, warmup_steps=2, disable_progbar=True)
    mcmc.run()
    assert (mcmc.get_samples()["kernel.lengthscale"] > 0).all()
    drawn = Predictive(gp.model, mcmc.get_samples())(torch.arange(N))
    assert drawn["y"].shape[0] == 3


@pytest.mark.filterwarnings("ignore:SWSGP. intervals of f")
@pytest.mark.parametrize(
    "name", ["VNNGP", "LOO", *(pytest.param(name, marks=pytest.mark.slow) for name in ("NPVI", "SWSGP", "SVGP"))]
)
def test_labels_are_classified(name):
    method, settings = METHODS[name]
    x, y = data()
    gp = method(x, (y > y.mean()).double(), Matern52(2, lengthscale=0.5), Bernoulli(), **settings)
    fit(gp, 30, lr=0.1, progress=False)
    wrong = (gp.predict(x).mean > 0.5) != (y > y.mean())
    assert wrong.double().mean() < 0.15


def test_sampled_posteriors_keep_the_protocol():
    x, y = data()
    gp = BSGP(x, y, Matern52(2, lengthscale=0.5), Gaussian(0.05), inducing=10)
    mcmc = MCMC(NUTS(gp.model, max_tree_depth=3), num_samples=3, warmup_steps=2, disable_progbar=True)
    mcmc.run()
    samples = mcmc.get_samples()
    loc, var = gp(x[:P], samples=samples)
    assert loc.shape == var.shape == gp.predict(x[:P], samples=samples).batch_shape == (P,)
    assert gp.sample(x[:P], 6, samples=samples).shape == (6, P)
    assert torch.equal(gp.sample(x[:P], 6, samples=samples, seed=1), gp.sample(x[:P], 6, samples=samples, seed=1))
    assert not torch.equal(gp.sample(x[:P], 6, samples=samples), gp.sample(x[:P], 6, samples=samples))
    with pytest.raises(ValueError, match=r"with input_dim = 3 columns, got \(10, 2\)"):
        BSGP(x, y, Matern52(3), Gaussian(0.05), inducing=10)
    assert to_arviz(mcmc).posterior.sizes["draw"] == 3


@pytest.mark.parametrize("method", [Vecchia, SVGP, BSGP, CoregionalizedLOO])
def test_parts_of_another_method_are_not_cast(method):
    (x, y), k = data(), Matern52(2, 1.0, 0.5)
    settings = {"inducing": 5} if method in (SVGP, BSGP) else {"num_neighbors": 5}
    several = method is CoregionalizedLOO

    def made(x, y, k):
        return method(x, torch.stack([y, -y], -1) if several else y, [k] if several else k, **settings)

    made(x, y, k)
    with pytest.raises(ValueError, match=rf"{method.__name__}: expected kernels? in torch.float32 .* copy.deepcopy"):
        made(x.float(), y.float(), k)
    assert k.variance.dtype == torch.float64
    made(x.float(), y.float(), copy.deepcopy(k).to(x.float()))
    made(x, y, k)


@pytest.mark.parametrize("method", [SVGP, SWSGP, BSGP])
def test_few_rows_are_few_inducing_points(method):
    x, y = data()
    gp = method(x[:12], y[:12], Matern52(2, 1.0, 0.5), Gaussian(0.05))
    start = gp.layers[0].start if method is BSGP else gp.z
    torch.testing.assert_close(start.detach().sort(0).values, x[:12].sort(0).values)
    assert gp.model().isfinite().all()


@pytest.mark.gpu
def test_methods_move_to_the_gpu(name):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    gp, x_new = build(name), data()[0][:P] + 0.01
    there = build(name).to("cuda")
    for got, expected in zip(there(x_new.cuda()), gp(x_new), strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=1e-8)
    fit(there, 3, batch_size=20, progress=False)
    assert there.sample(x_new.cuda(), 2).is_cuda
