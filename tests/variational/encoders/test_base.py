"""What encoders share: rough values of f from the data alone."""

import math

import pytest
import torch

from pyro_nngp.likelihoods import (
    Bernoulli,
    Binomial,
    Categorical,
    Gaussian,
    LogNormal,
    NegativeBinomial,
    Poisson,
)
from pyro_nngp.variational.encoders import (
    rough_latent,
)

F64 = torch.float64


@pytest.mark.parametrize(
    ("likelihood", "y", "f"),
    [
        (Gaussian(), [-1.5], [-1.5]),
        (LogNormal(), [math.exp(0.7)], [0.7]),
        (Poisson(), [0, 7], [math.log(0.5), math.log(7.5)]),
        (Poisson("softplus"), [0, 50], [math.log(math.expm1(0.5)), 50.5]),
        (NegativeBinomial(), [3], [math.log(3.5)]),
        (Bernoulli(), [0, 1], [-1, 1]),
        (Binomial(4), [0, 4], [math.log(0.1 / 0.9), math.log(0.9 / 0.1)]),
        (Categorical(3), [2], [[-1], [-1], [1]]),
    ],
)
@pytest.mark.parametrize("dtype", [F64, torch.int64])
def test_rough_latent_values(likelihood, y, f, dtype):
    if dtype is F64 or all(float(v).is_integer() for v in y):
        got = rough_latent(likelihood, torch.tensor(y, dtype=dtype))
        torch.testing.assert_close(got.double(), torch.tensor(f, dtype=F64), rtol=1e-6, atol=1e-6)
