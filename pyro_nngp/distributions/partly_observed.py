r"""A multivariate normal distribution that scores vectors of which some entries are missing.

Missing entries are integrated out: they are left out of the mean and the covariance. Cost: O(B T^3). Symbols: B vectors
of T entries.
"""

import math

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nngp.linalg import add_diagonal, cholesky


class PartlyObservedNormal(dist.MultivariateNormal):
    """A multivariate normal distribution whose log density ignores entries that are NaN."""

    def log_prob(self, value: Tensor) -> Tensor:
        missing = value.isnan()
        if not bool(missing.any()):
            return super().log_prob(value)
        cov = self.scale_tril @ self.scale_tril.mT
        both = ~missing[..., :, None] & ~missing[..., None, :]
        unit = missing.to(cov) / (2 * math.pi)  # a variance with which the density at the mean is 1
        tril = cholesky(add_diagonal(torch.where(both, cov, 0.0), unit), 0.0)
        loc = torch.where(missing, 0.0, self.loc)
        return dist.MultivariateNormal(loc, scale_tril=tril).log_prob(value.nan_to_num())
