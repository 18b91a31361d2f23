"""Programs in the coordinates of a guide have the posterior that they had, with a better shape."""

import time

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar
from pyro import poutine
from pyro.infer import MCMC, Predictive
from pyro.infer.autoguide import AutoNormal
from pyro.infer.mcmc.util import initialize_model
from torch.distributions import biject_to

from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import AutoNNGP, QuickNUTS, Recorder, to_arviz
from pyro_nngp.inference.autoguide.transport import SITE, Transported
from pyro_nngp.kernels import Matern32
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
N, GROUPS = 30, 12
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(N, 2, dtype=F64, generator=GENERATOR)
GRAPH = NeighborGraph(X, 5)
Y = torch.poisson(6 * X.sum(-1), generator=GENERATOR)
GROUP = torch.arange(N) % GROUPS


def counts(y=Y):
    variance = pyro.sample("variance", dist.LogNormal(scalar(0.0), 0.5))
    slopes = pyro.sample("slopes", dist.Normal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(scalar(-1.0), 0.5))
    f = pyro.sample("f", NNGP(Matern32(2, variance=variance, lengthscale=lengthscale), GRAPH))
    pyro.deterministic("rate", f.exp())
    with pyro.plate("data", N):
        return pyro.sample("y", dist.Poisson((X @ slopes + f).exp()), obs=y)


def groups_and_two_processes(y=Y):
    scale = pyro.sample("scale", dist.HalfNormal(scalar(1.0)))
    prior = NNGP(Matern32(2, variance=scale.square(), lengthscale=0.3), GRAPH)
    f = pyro.sample("f", prior.expand([2]).to_event(1))
    with pyro.plate("coefficients", 2):
        slopes = pyro.sample("slopes", dist.Normal(scalar(0.5), 2 * scale))
    with pyro.plate("groups", GROUPS):
        effect = pyro.sample("effect", dist.Normal(slopes[0], scale))
    joint = pyro.sample("joint", dist.MultivariateNormal(torch.ones(9, dtype=F64), scale_tril=3 * torch.eye(9).to(F64)))
    loc = slopes[1] * X[:, 0] + f[0] + X[:, 1] * f[1] + effect[GROUP] + joint[torch.arange(N) % 9]
    with pyro.plate("data", N):
        return pyro.sample("y", dist.Normal(loc, 0.5), obs=y.log1p())


def one_process(y=Y):
    f = pyro.sample("f", NNGP(Matern32(2, lengthscale=0.3), GRAPH))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(f, 0.3), obs=y.log1p())


def transported(program):
    pyro.set_rng_seed(0)
    found = Transported("QuickNUTS", program, AutoNNGP(program))
    found.prepare()
    return found


def latent_sites(program):
    nodes = poutine.trace(program).get_trace().iter_stochastic_nodes()
    return {name: site for name, site in nodes if name not in ("data", "groups", "coefficients")}


def run(program, names, white):
    """Values of the latent sites of the original program, and the log density of the new one."""
    trace = poutine.trace(poutine.condition(program, {SITE: white})).get_trace()
    return {name: trace.nodes[name]["value"] for name in names}, trace.log_prob_sum()


@pytest.mark.parametrize(
    "program", [pytest.param(p, marks=pytest.mark.slow) for p in (counts, groups_and_two_processes)] + [one_process]
)
def test_the_density_is_that_of_the_program_times_the_volume_of_the_map(program):
    new, sites = transported(program), latent_sites(program)
    transforms = {name: biject_to(site["fn"].support) for name, site in sites.items()}

    def latent(white):
        values, _ = run(new, sites, white)
        return torch.cat([transforms[name].inv(value).flatten() for name, value in values.items()])

    shape, differences = initialize_model(new)[0][SITE].shape, []
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        white = torch.randn(shape, dtype=F64, generator=generator)
        values, found = run(new, sites, white)
        want = poutine.trace(poutine.condition(program, values)).get_trace().log_prob_sum()
        for name, value in values.items():
            want = want + transforms[name].log_abs_det_jacobian(transforms[name].inv(value), value).sum()
        want = want + torch.linalg.slogdet(torch.autograd.functional.jacobian(latent, white))[1]
        differences.append((want - found).item())
    assert differences[1] == pytest.approx(differences[0], abs=1e-7)


def test_a_gaussian_posterior_is_standard_normal():
    graph = NeighborGraph(X, N - 1)

    def all_neighbors(y=Y):
        f = pyro.sample("f", NNGP(Matern32(2, lengthscale=0.3), graph))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y.log1p())

    for program, tolerance in ((all_neighbors, 1e-8), (one_process, 0.3)):
        new = transported(program)
        hessian = torch.autograd.functional.hessian(lambda w, p=new: -run(p, [], w)[1], torch.ones(N, dtype=F64))
        torch.testing.assert_close(hessian, torch.eye(N, dtype=F64), rtol=0, atol=tolerance)


def test_runs_with_a_guide_are_exported_with_the_sites_of_the_program():
    pyro.set_rng_seed(0)
    kernel = QuickNUTS(counts, guide=AutoNNGP(counts), max_tree_depth=2)
    mcmc = MCMC(kernel, 4, 3, disable_progbar=True, hook_fn=Recorder(warmup=True))
    mcmc.run()
    draws = Predictive(kernel.model, mcmc.get_samples())()
    kept = to_arviz(mcmc, log_prior=True, unconstrained=True, progress=False)
    assert set(kept.posterior) == {"variance", "lengthscale", "slopes", "f", "rate"}
    assert {"variance", "slopes", "f"} <= set(kept.warmup_posterior)
    assert kept.warmup_posterior["f"].shape == (1, 3, N)
    assert {"variance", "lengthscale"} <= set(kept.unconstrained_posterior)
    for name in ("variance", "lengthscale", "slopes", "f", "rate"):
        want = draws[name].reshape(1, 4, *kept.posterior[name].shape[2:]).numpy()
        np.testing.assert_allclose(kept.posterior[name].values, want)
    want = dist.LogNormal(0.0, 0.5).log_prob(torch.from_numpy(kept.posterior["variance"].values))
    np.testing.assert_allclose(kept.log_prior["variance"].values, want.numpy())


def test_data_and_new_places_are_drawn_from_the_program():
    """Given the latent values, y without data and values at new places are those of the program."""

    def program(y=Y, x_new=None):
        prior = NNGP(Matern32(2, lengthscale=scalar(0.3)), GRAPH)
        f = pyro.sample("f", prior)
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(f, 0.3), obs=None if y is None else y.log1p())
        if x_new is not None:
            pyro.sample("y_new", dist.Normal(prior.sample_new(x_new, f), 0.3).to_event(1))

    new = transported(program)
    zero = initialize_model(new)[0][SITE]
    draws = Predictive(new, {SITE: zero.expand(8, -1)})(None, X[:3] + 1e-6)
    for name, f in (("y", draws["f"][:1]), ("y_new", draws["f"][:1, ..., :3])):
        noise = (draws[name] - f) / 0.3
        assert noise.std() == pytest.approx(1.0, abs=6 / (2 * noise.numel()) ** 0.5)
    assert draws["f"].std(0).max() < 1e-9
    with pytest.raises(ValueError, match=r"QuickNUTS: expected latent sites to be \['f'\], got \['y'\] too"):
        new.prepare(None)


@pytest.mark.slow
def test_nuts_with_a_guide_draws_from_the_same_posterior_in_shorter_trajectories():
    found, seconds = [], []
    for guide in (None, AutoNNGP(counts)):
        pyro.set_rng_seed(0)
        kernel = QuickNUTS(counts, guide=guide)
        mcmc = MCMC(kernel, 500, 200, disable_progbar=True)
        start = time.process_time()
        mcmc.run()
        seconds.append(time.process_time() - start)
        found.append(to_arviz(mcmc, progress=False).posterior)
    for name in ("variance", "lengthscale", "slopes"):
        (plain, guided), errors = found, [az.mcse(each, method="mean")[name].values for each in found]
        error = np.hypot(*errors)
        np.testing.assert_array_less(
            abs(plain[name].mean(("chain", "draw")) - guided[name].mean(("chain", "draw"))), 6 * error
        )
        rates = [az.ess(each)[name].values.min() / each_time for each, each_time in zip(found, seconds, strict=True)]
        assert rates[1] > 1.5 * rates[0]  # 2.5 to 5 times


def test_errors():
    with pytest.raises(TypeError, match=r"QuickNUTS: expected guide to be an AutoNNGP, got AutoNormal\. Pass AutoNNGP"):
        QuickNUTS(counts, guide=AutoNormal(counts))
    new = transported(one_process)
    with pytest.raises(
        ValueError, match=r"outside vectorized plates, got \['_num_predictive_samples'\]\. Take parallel"
    ):
        Predictive(new, num_samples=2, parallel=True)()
    more = [False]

    def changing():
        one_process()
        if more[0]:
            pyro.sample("late", dist.Normal(0.0, 1.0))

    new = transported(changing)
    more[0] = True
    with pytest.raises(
        ValueError, match=r"QuickNUTS: expected latent sites to be \['f'\], got \['late'\] too\. Run the"
    ):
        new.prepare()
