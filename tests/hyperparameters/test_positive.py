"""Log-normal priors of positive hyperparameters."""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_nngp.hyperparameters.positive import lognormal_priors
from pyro_nngp.kernels import RBF, Matern32
from pyro_nngp.likelihoods import (
    Bernoulli,
)

F64 = torch.float64


def test_lognormal_priors():
    k = lognormal_priors(RBF(2, lengthscale=torch.ones(2)) * Matern32(2), like=torch.empty(0, dtype=F64))
    priors = [part._pyro_samples for part in (k.kern0, k.kern1)]
    for prior, shape in zip(priors, ((2,), ()), strict=True):
        assert prior["lengthscale"].event_shape == shape
        assert prior["lengthscale"].sample().dtype == F64
        draws = prior["variance"].sample((2000,)).log()
        assert abs(float(draws.mean()) - math.log(0.05)) < 6 / 2000**0.5
        assert abs(float(draws.std()) - 1) < 6 / (2 * 2000) ** 0.5
    given = RBF(2)
    given.variance = PyroSample(dist.Gamma(2.0, 2.0))
    assert isinstance(lognormal_priors(given)._pyro_samples["variance"], dist.Gamma)
    with pytest.raises(ValueError, match=r"lognormal_priors: expected medians of hyperparameters of Bernoulli"):
        lognormal_priors(Bernoulli())
