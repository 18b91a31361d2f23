import math
import warnings
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar, slow_except
from pyro import poutine
from pyro.infer import MCMC
from pyro.nn import PyroSample
from pyro.ops.stats import effective_sample_size

from pyro_nngp.distributions import NNGP, PolyaGamma
from pyro_nngp.inference import PolyaGammaGibbs, sbc_ranks, to_arviz, uniformity
from pyro_nngp.inference.mcmc.conditional_moves import slice_coordinate
from pyro_nngp.kernels import Matern32, Matern52
from pyro_nngp.likelihoods import Bernoulli, NegativeBinomial
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.models import VNNGP
from pyro_nngp.neighbors.graph import NeighborGraph

F64 = torch.float64
X = torch.tensor([0.0, 0.15, 0.4, 0.55, 0.8, 1.0], dtype=F64)[:, None]
N = len(X)
GRAPH = NeighborGraph(X, 2)


def fixed_kernel():
    return Matern32(1, variance=scalar(2.0), lengthscale=scalar(0.5))


def random_kernel():
    kernel = Matern32(1, variance=scalar(2.0))
    kernel.lengthscale = PyroSample(dist.LogNormal(scalar(-1.0), 0.7))
    return kernel


def run(model, *args, num_samples=500, warmup_steps=0, **kwargs):
    kernel = PolyaGammaGibbs(model, **kwargs)
    mcmc = MCMC(kernel, num_samples=num_samples, warmup_steps=warmup_steps, disable_progbar=True)
    mcmc.run(*args)
    return mcmc


def error_of_mean(draws):
    """Standard error of the mean of each column of a chain."""
    size = effective_sample_size(draws[None], chain_dim=0, sample_dim=1).clamp(max=float(len(draws)))
    return draws.std(0) / size.sqrt()


def moments(draws):
    return torch.cat([draws, draws.square()], -1)


COUNTS = torch.tensor([3.0, 4.0, 1.0, 0.0, 0.0, 2.0], dtype=F64)


@pytest.mark.slow
def test_latent_values_have_the_distribution_that_weighted_prior_draws_give():
    def likelihoods(f):
        return {
            "y": dist.Binomial(torch.arange(4.0, 10.0, dtype=F64), logits=f - 0.8),
            "z": dist.NegativeBinomial(scalar(0.7), logits=f),
        }

    def model():
        f = pyro.sample("f", NNGP(fixed_kernel(), GRAPH))
        with pyro.plate("rows", N):
            for name, likelihood in likelihoods(f).items():
                pyro.sample(name, likelihood, obs=COUNTS)

    got = moments(run(model, num_samples=300).get_samples()["f"])
    f = NNGP(fixed_kernel(), GRAPH).sample((200_000,)).detach()
    weight = sum(likelihood.log_prob(COUNTS).sum(-1) for likelihood in likelihoods(f).values()).softmax(0)
    want = weight @ moments(f)
    error = (weight.square() @ (moments(f) - want).square()).sqrt()  # of importance sampling
    assert ((got.mean(0) - want).abs() < 6 * (error_of_mean(got).square() + error.square()).sqrt()).all()


def test_the_likelihood_of_the_mean_has_the_observations_that_leave_one_out_training_has(monkeypatch):
    monkeypatch.setattr(PolyaGamma, "sample", lambda likelihood: likelihood.mean)
    counts = NegativeBinomial(scalar(2.5))

    def model():
        f = pyro.sample("f", NNGP(fixed_kernel(), GRAPH))
        with pyro.plate("rows", N):
            pyro.sample("y", counts(f), obs=COUNTS)

    kernel = PolyaGammaGibbs(model)
    kernel.setup(0)
    f = torch.randn(N, dtype=F64)
    linear, precision = kernel.moves.data.draw_terms(kernel.moves.trace({"f": f}))
    target, _noise = gaussian_observations(counts.bind(), COUNTS, precision.detach(), F64)
    torch.testing.assert_close(precision, PolyaGamma(COUNTS + 2.5, f - math.log(2.5)).mean, rtol=1e-9, atol=0)
    torch.testing.assert_close(linear / precision, target, rtol=1e-9, atol=1e-9)


def test_terms_are_those_of_the_augmentation(monkeypatch):
    """Each observation by itself: offsets, repeated and missing rows, masks inside and outside, scales."""
    monkeypatch.setattr(PolyaGamma, "sample", lambda likelihood: likelihood.mean)
    offset, seen = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=F64), torch.tensor([True, False, True, True])
    rows, y, n = torch.tensor([4, 0, 4, 2]), torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=F64), torch.arange(3.0, 7.0)
    r = scalar(1.3)

    def model():
        f = pyro.sample("f", NNGP(fixed_kernel(), GRAPH))
        logits = f[rows] + offset
        with poutine.scale(scale=2.0), poutine.mask(mask=seen):
            pyro.sample("binary", dist.Bernoulli(logits=logits).mask(seen.flip(0)), obs=y)
        pyro.sample("successes", dist.Binomial(n, logits=logits).mask(seen).to_event(1), obs=2 * y)
        with pyro.plate("counted", 4):
            pyro.sample("count", dist.NegativeBinomial(r, logits=logits), obs=3 * y)

    kernel = PolyaGammaGibbs(model)
    kernel.setup(0)
    f = torch.randn(N, dtype=F64)
    linear, precision = kernel.moves.data.draw_terms(kernel.moves.trace({"f": f}))
    want_linear, want_precision = torch.zeros(2, N, dtype=F64)
    for i, row in enumerate(rows):
        logit = f[row] + offset[i]
        parts = [
            (2.0 * float(seen[i] & seen.flip(0)[i]), y[i], 1.0),
            (float(seen[i]), 2 * y[i], n[i]),
            (1.0, 3 * y[i], 3 * y[i] + r),
        ]
        for times, successes, trials in parts:
            omega = times * trials / (2 * logit) * (logit / 2).tanh()
            want_linear[row] += times * (successes - trials / 2) - omega * offset[i]
            want_precision[row] += omega
    torch.testing.assert_close(linear, want_linear, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(precision, want_precision, rtol=1e-9, atol=1e-12)
    assert (precision[[1, 3, 5]] == 0).all()


def geweke_chain(steps):
    """Alternate a sweep of the kernel and new data: every site keeps its prior (Geweke 2004)."""
    data, kernel = SimpleNamespace(y=None, count=None), random_kernel()
    kernel.variance = PyroSample(dist.LogNormal(scalar(0.5), 0.7))

    def model():
        a = pyro.sample("a", dist.Normal(scalar(0.5), 1.0))
        r = pyro.sample("r", dist.Gamma(scalar(2.0), 1.0))
        f = pyro.sample("f", NNGP(kernel, GRAPH))
        with pyro.plate("rows", N):
            y = pyro.sample("y", dist.Binomial(5, logits=f + a), obs=data.y)
        with pyro.plate("counted", 4):
            count = pyro.sample("count", dist.NegativeBinomial(r, logits=f[[0, 2, 2, 5]] - a - 0.5), obs=data.count)
        return y, count

    data.y, data.count = model()
    gibbs = PolyaGammaGibbs(model)
    gibbs.setup(steps // 10)
    assert gibbs.kinds == {
        "lengthscale": ["values", "white"],
        "variance": ["values", "white"],
        "a": ["values", "logits"],
        "r": ["values"],
    }
    params, chain = gibbs.initial_params, []
    for step in range(steps):
        params = gibbs.sample(params)
        values = {name: gibbs.transforms[name].inv(z) for name, z in params.items()}
        data.y = data.count = None
        data.y, data.count = poutine.condition(model, values)()
        if step >= steps // 10:
            chain.append(torch.stack([params[name] for name in ("a", "lengthscale", "variance")] + [values["r"]]))
            chain[-1] = torch.cat([chain[-1], (values["f"] / values["variance"].sqrt())[[0, 3]]])
    return torch.stack(chain)


@pytest.mark.slow
def test_every_site_keeps_its_prior_when_data_are_redrawn():
    chain = moments(geweke_chain(400))
    want = torch.tensor([0.5, -1.0, 0.5, 2.0, 0.0, 0.0, 1.25, 1.49, 0.74, 6.0, 1.0, 1.0], dtype=F64)
    assert ((chain.mean(0) - want).abs() < 6 * error_of_mean(chain)).all()


def hierarchical(y=None):
    """A random lengthscale, an intercept, and the data drawn if they are not given."""
    intercept = pyro.sample("intercept", dist.Normal(scalar(0.0), 1.0))
    f = pyro.sample("f", NNGP(HYPER, GRAPH))
    with pyro.plate("rows", N):
        return pyro.sample("y", dist.Binomial(3, logits=f + intercept), obs=y)


HYPER = random_kernel()


def started(model, *args):
    kernel = PolyaGammaGibbs(model)
    kernel.setup(0, *args)
    return kernel, kernel.initial_params


def test_moves_weigh_a_coordinate_by_its_conditional_density():
    """The density of the whitened values is that of the values times |df / dwhite| = product of v^(1/2)."""
    kernel, params = started(hierarchical, COUNTS.clamp(max=3))
    moves = kernel.moves

    def joint(p):
        return -float(moves.potential.energy(moves.potential.pack(p)))

    moved = {**params, "lengthscale": params["lengthscale"] + 0.7}
    with torch.no_grad():
        log_density, follow = moves.hold("white", params)
        new = follow(moved)
        half_log_var = [0.5 * float(moves.prior(p).conditionals[1].log().sum()) for p in (params, new)]
        torch.testing.assert_close(moves.prior(new).whiten(new["f"]), moves.prior(params).whiten(params["f"]))
    got = log_density(moved) - log_density(params)
    assert got == pytest.approx(joint(new) - joint(params) + half_log_var[1] - half_log_var[0], rel=1e-9)

    moved = {**params, "intercept": params["intercept"] + 0.7}
    log_density, follow = moves.hold("logits", params)
    torch.testing.assert_close(follow(moved)["f"], params["f"] - 0.7)
    assert log_density(moved) == pytest.approx(joint(follow(moved)), rel=1e-12)
    log_density, follow = moves.hold("values", params)
    assert follow(moved) is moved
    assert log_density(moved) == pytest.approx(joint(moved), rel=1e-12)


@pytest.mark.parametrize("width", slow_except([0.1, 1.0, 30.0], 30.0))
def test_slices_keep_the_density_whatever_their_width(width):
    """The logarithm of a Gamma(2, 1) variable, which is skewed; the second coordinate must not move."""

    def log_density(moved):
        z = float(moved["z"][0])
        return 2 * z - math.exp(z)

    params, chain = {"z": torch.tensor([0.0, 7.0], dtype=F64)}, []
    for _ in range(1500):
        params, _ = slice_coordinate((log_density, lambda moved: moved), params, "z", 0, width)
        chain.append(params["z"])
    chain = torch.stack(chain)
    assert (chain[:, 1] == 7).all()
    got, mean = moments(chain[:, :1]), scalar(2.0).digamma()
    want = torch.stack([mean, mean.square() + torch.polygamma(1, scalar(2.0))])
    assert ((got.mean(0) - want).abs() < 6 * error_of_mean(got)).all()


def test_widths_adapt_during_burn_in_only():
    kernel = PolyaGammaGibbs(hierarchical)
    kernel.setup(1, COUNTS.clamp(max=3))
    params = kernel.sample(kernel.initial_params)
    widths = dict(kernel.widths)
    assert len(widths) == 4
    kernel.sample(params)
    assert kernel.widths == widths


@pytest.mark.slow
def test_a_method_runs_and_exports():
    gp = VNNGP(X, (COUNTS > 1).to(F64), Matern52(1), Bernoulli(), num_neighbors=2)
    gp.kernel.lengthscale = PyroSample(dist.LogNormal(scalar(-1.0), 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        mcmc = run(gp.model, num_samples=8, warmup_steps=4)
        idata = to_arviz(mcmc, progress=False)
    samples = mcmc.get_samples()
    assert samples["u"].shape == (8, N)
    assert samples["kernel.lengthscale"].unique().numel() == 8
    assert idata.posterior["f"].shape == (1, 8, N)
    assert idata.log_likelihood["y"].shape == (1, 8, N)
    assert idata.sample_stats["model_runs"].values[0] > 4


@pytest.mark.slow
def test_single_precision_and_starting_values():
    graph = NeighborGraph(X.float(), 2)

    def model():
        scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", NNGP(Matern32(1), graph))
        pyro.sample("y", dist.Bernoulli(logits=f + scale).to_event(1), obs=torch.ones(N))

    kernel, start = PolyaGammaGibbs(model), {"f": torch.full((N,), 3.0), "scale": torch.tensor(-2.0)}
    mcmc = MCMC(kernel, num_samples=3, initial_params=start, disable_progbar=True)
    mcmc.run()
    assert mcmc.get_samples()["f"].dtype == torch.float32
    assert kernel.initial_params is None
    pyro.set_rng_seed(5)
    one = run(model, num_samples=3).get_samples()["f"]
    pyro.set_rng_seed(5)
    assert torch.equal(run(model, num_samples=3).get_samples()["f"], one)


@pytest.mark.slow
def test_simulation_based_calibration():
    def simulate():
        trace = poutine.trace(hierarchical).get_trace()
        latent = ("intercept", "lengthscale", "f")
        return {name: trace.nodes[name]["value"].detach() for name in latent}, trace.nodes["y"]["value"]

    def infer(y):
        draws = run(hierarchical, y, num_samples=48, warmup_steps=10).get_samples()
        return {name: values[5::6] for name, values in draws.items()}

    ranks = sbc_ranks(simulate, infer, 60, progress=False)
    for values in (*(ranks[name] for name in ("intercept", "lengthscale")), *ranks["f"].mT):
        assert uniformity(values, 10) > 1e-4


def observed(likelihood):
    """A model whose latent vector f enters through likelihood(f)."""

    def model():
        f = pyro.sample("f", NNGP(fixed_kernel(), GRAPH))
        with pyro.plate("rows", N):
            pyro.sample("y", likelihood(f), obs=torch.ones(N, dtype=F64))

    return model


def two_latents():
    f, g = (pyro.sample(name, NNGP(fixed_kernel().named(name), GRAPH)) for name in "fg")
    pyro.sample("y", dist.Bernoulli(logits=f + g).to_event(1), obs=torch.ones(N, dtype=F64))


def discrete():
    pyro.sample("k", dist.Bernoulli(scalar(0.5)))
    observed(lambda f: dist.Bernoulli(logits=f))()


def on_top():
    f = pyro.sample("f", NNGP(fixed_kernel(), GRAPH))
    g = pyro.sample("g", dist.Normal(f, 1.0).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=f + g).to_event(1), obs=torch.ones(N, dtype=F64))


def expanded():
    f = pyro.sample("f", NNGP(fixed_kernel(), GRAPH).expand([2]).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=f).to_event(2), obs=torch.ones(2, N, dtype=F64))


def permuted():
    f = pyro.sample("f", NNGP(fixed_kernel(), GRAPH, GRAPH.batch(torch.arange(N).flip(0))))
    pyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=torch.ones(N, dtype=F64))


def scaled():
    with poutine.scale(scale=0.5):
        f = pyro.sample("f", NNGP(fixed_kernel(), GRAPH))
    pyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=torch.ones(N, dtype=F64))


def subsampled():
    f = pyro.sample("f", NNGP(fixed_kernel(), GRAPH))
    with pyro.plate("rows", N, subsample_size=2) as idx:
        pyro.sample("y", dist.Bernoulli(logits=f[idx]), obs=torch.ones(2, dtype=F64))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            observed(lambda f: dist.Normal(f, 1.0)),
            r"site 'y' given 'f' to be observed Bernoulli, .*got an observed Normal",
        ),
        (observed(lambda f: dist.Poisson(f.exp())), r"got an observed Poisson"),
        (observed(lambda f: dist.Bernoulli(logits=2 * f)), r"the logits of 'y' to be entries of 'f' plus offsets"),
        (observed(lambda f: dist.Bernoulli(logits=f + 0.1 * f**3)), r"the logits of 'y' to be entries of 'f'"),
        (observed(lambda f: dist.Bernoulli(logits=(f + f.flip(0)) / 2)), r"the logits of 'y' to be entries of 'f'"),
        (observed(lambda f: Bernoulli("probit").forward(f)), r"the logits of 'y' to be entries of 'f'"),
        (observed(lambda f: dist.Bernoulli(logits=torch.zeros_like(f))), r"expected observed sites that depend on 'f'"),
        (two_latents, r"expected model with one latent NNGP site, got \['f', 'g'\]"),
        (
            lambda: pyro.sample("f", dist.Normal(scalar(0.0), 1.0)),
            r"expected model with one latent NNGP site, got none",
        ),
        (discrete, r"expected site 'k' to be continuous"),
        (on_top, r"site 'g' given 'f' .*got a latent Normal"),
        (expanded, r"expected site 'f' to be one NNGP over all points"),
        (permuted, r"expected site 'f' to be one NNGP over all points"),
        (scaled, r"expected site 'f' without mask and scale"),
        (subsampled, r"to take all rows of its plates, got some of \['rows'\]"),
    ],
)
def test_models_of_other_kinds_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        started(model)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"expected model to be callable, got int"):
        PolyaGammaGibbs(3)
    with pytest.raises(ValueError, match=r"expected latent among the latent NNGP sites \['f'\], got 'u'"):
        PolyaGammaGibbs(hierarchical, latent="u").setup(0, COUNTS.clamp(max=3))
    with pytest.raises(TypeError, match=r"expected init_strategy to be callable with 1 arguments"):
        PolyaGammaGibbs(hierarchical, init_strategy=lambda: None)
