import math
import warnings
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from dense import dense_covariance
from pyro import poutine
from pyro.infer import MCMC
from pyro.nn import PyroSample
from pyro.ops.stats import effective_sample_size

from pyro_nngp.distributions import NNGP, PolyaGamma
from pyro_nngp.inference import PolyaGammaGibbs, sbc_ranks, to_arviz, uniformity
from pyro_nngp.kernels import Matern32, Matern52
from pyro_nngp.likelihoods import Bernoulli
from pyro_nngp.models import VNNGP
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
X = torch.tensor([0.0, 0.15, 0.4, 0.55, 0.8, 1.0], dtype=F64)[:, None]
N = len(X)
GRAPH = NeighborGraph(X, 2)


def real(value):
    return torch.tensor(value, dtype=F64)


def fixed_kernel():
    return Matern32(1, variance=real(2.0), lengthscale=real(0.5))


def random_kernel():
    kernel = Matern32(1).double()
    kernel.lengthscale = PyroSample(dist.LogNormal(real(-1.0), 0.7))
    kernel.variance = PyroSample(dist.LogNormal(real(0.5), 0.7))
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


@pytest.mark.parametrize("likelihood", ["bernoulli", "binomial", "negative binomial"])
def test_latent_values_have_the_law_that_weighted_prior_draws_give(likelihood):
    make, y = {
        "bernoulli": (lambda f: dist.Bernoulli(logits=f), (COUNTS > 1).to(F64)),
        "binomial": (lambda f: dist.Binomial(torch.arange(4.0, 10.0, dtype=F64), logits=f), COUNTS),
        "negative binomial": (lambda f: dist.NegativeBinomial(real(0.7), logits=f), COUNTS),
    }[likelihood]

    def model():
        f = pyro.sample("f", NNGP(fixed_kernel(), GRAPH))
        with pyro.plate("rows", N):
            pyro.sample("y", make(f - 0.8), obs=y)

    got = moments(run(model, num_samples=1000).get_samples()["f"])
    f = NNGP(fixed_kernel(), GRAPH).sample((200_000,)).detach()
    weight = make(f - 0.8).log_prob(y).sum(-1).softmax(0)
    want = weight @ moments(f)
    error = (weight.square() @ (moments(f) - want).square()).sqrt()  # of importance sampling
    assert ((got.mean(0) - want).abs() < 6 * (error_of_mean(got).square() + error.square()).sqrt()).all()


def geweke_chain(steps):
    """Alternate a sweep of the kernel and new data: every site keeps its prior (Geweke 2004)."""
    data, kernel = SimpleNamespace(y=None, count=None), random_kernel()

    def model():
        a = pyro.sample("a", dist.Normal(real(0.5), 1.0))
        r = pyro.sample("r", dist.Gamma(real(2.0), 1.0))
        f = pyro.sample("f", NNGP(kernel, GRAPH))
        with pyro.plate("rows", N):
            y = pyro.sample("y", dist.Binomial(5, logits=f + a), obs=data.y)
        with pyro.plate("counted", 4):
            count = pyro.sample("count", dist.NegativeBinomial(r, logits=f[[0, 2, 2, 5]] - a - 0.5), obs=data.count)
        return y, count

    data.y, data.count = model()
    gibbs = PolyaGammaGibbs(model)
    gibbs.setup(steps // 10)
    assert gibbs._moves == {
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
        with poutine.condition(data=values):
            data.y, data.count = poutine.condition(model, values)()
        if step >= steps // 10:
            chain.append(torch.stack([params[name] for name in ("a", "lengthscale", "variance")] + [values["r"]]))
            chain[-1] = torch.cat([chain[-1], (values["f"] / values["variance"].sqrt())[[0, 3]]])
    return torch.stack(chain)
