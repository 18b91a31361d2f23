r"""FITC and VFE: the two ways to integrate f out of p(y | f) given the inducing values, as distributions of y.

.. math::
   \text{FITC:}\ \log \int p(y \mid f)\, N(f \mid m, v)\, df, \qquad
   \text{VFE:}\ \int \log p(y \mid f)\, N(f \mid m, v)\, df

Several draws of the moments m and v, as in a deep process, are averaged inside the logarithm by FITC and outside by
VFE.

Differs from Rossi et al. (2021, equations 3, 4 and 24): several draws, by their log-mean-exp.
Cost: one marginal or expected log density of the likelihood per draw. Symbols: S draws, T outputs, B data.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp.distributions import Mixture
from pyro_nngp.likelihoods.base import Likelihood

Objective: TypeAlias = Callable[[Likelihood, Tensor, Tensor], Distribution]
"""(likelihood, means, variances), draws first, to the distribution of the site y."""


class Expected(Mixture):
    """The distribution of y, with the expected log density of VFE, averaged over draws, as its log density.

    Draws and moments refer to y itself. The exponential of the log density is not normalized: it integrates to less
    than 1.

    Args:
        likelihood: as :meth:`~pyro_nngp.likelihoods.Likelihood.bind` returns it.
        loc: means of f.
        var: variances of f.
    """

    def __init__(self, likelihood: Likelihood, loc: Float[Tensor, "S *T B"], var: Float[Tensor, "S *T B"]) -> None:
        self.likelihood, self.loc, self.var = likelihood, loc, var
        super().__init__(marginals(likelihood, loc, var))

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Expected":
        new = super().expand(batch_shape, _instance)
        own, extra = 1 + (self.likelihood.num_latents is not None), len(batch_shape) - len(self.batch_shape)
        old = (*self.loc.shape[:own], *[1] * extra, *self.batch_shape)
        new.loc, new.var = (v.reshape(old).expand(*self.loc.shape[:own], *batch_shape) for v in (self.loc, self.var))
        return new

    def _log_prob(self, value: Tensor) -> Tensor:
        terms = [self.likelihood.expected_log_prob(value, *pair) for pair in zip(self.loc, self.var, strict=True)]
        return torch.stack(terms).mean(0)


def fitc(likelihood: Likelihood, loc: Float[Tensor, "S *T B"], var: Float[Tensor, "S *T B"]) -> Distribution:
    """The distribution of y with f integrated out, averaged over draws."""
    components = marginals(likelihood, loc, var)
    return components[0] if len(components) == 1 else Mixture(components)


def marginals(likelihood: Likelihood, loc: Float[Tensor, "S *T B"], var: Float[Tensor, "S *T B"]) -> list[Distribution]:
    """The distribution of y with f integrated out, for each draw."""
    return [likelihood.marginal(*pair) for pair in zip(loc, var, strict=True)]


OBJECTIVES: dict[str, Objective] = {"fitc": fitc, "vfe": Expected}
