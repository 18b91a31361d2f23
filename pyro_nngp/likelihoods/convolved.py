r"""The likelihood of a projection of f: :math:`p(y \mid f)` with independent normal noise integrated out.

.. math:: p(y \mid g) = \int p(y \mid f)\, N(f \mid g, v)\, df

With g the projection of f on inducing values and v its conditional variance this is the FITC likelihood (Snelson and
Ghahramani 2006). Cost: one marginal of the likelihood, or Q of them per expectation without a closed form.
"""

import copy

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp.likelihoods.base import Likelihood
from pyro_nngp.likelihoods.continuous import Gaussian, LogNormal
from pyro_nngp.likelihoods.quadrature import Focus


def convolved(likelihood: Likelihood, var: Float[Tensor, "..."]) -> Likelihood:
    """Return the likelihood of g, bound.

    Args:
        likelihood: p(y | f), as :meth:`Likelihood.bind` returns it.
        var: variance v of f given g, broadcastable to g.

    Returns:
        A likelihood of the same class with more noise where the integral has that form (:class:`Gaussian`,
        :class:`LogNormal`); quadrature otherwise.
    """
    if isinstance(likelihood, (Gaussian, LogNormal)):
        noisier = copy.copy(likelihood)
        noisier.__dict__["variance"] = likelihood.variance.to(var.dtype) + var
        return noisier
    return Convolved(likelihood, var)


class Convolved(Likelihood):
    """The likelihood of g by quadrature."""

    def __init__(self, likelihood: Likelihood, var: Tensor) -> None:
        super().__init__(likelihood.num_quadrature)
        self.num_latents, self.weights = likelihood.num_latents, likelihood.weights
        self.__dict__["likelihood"], self.var = likelihood, var  # a bound likelihood is not registered as a submodule

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return self.marginal(f, torch.zeros_like(f))

    def focus(self, y: Tensor) -> Focus | None:
        """The focus of the likelihood, widened by the noise."""
        focus = self.likelihood.focus(y)
        return None if focus is None else (focus[0], (focus[1].square() + self.var).sqrt())

    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        loc, var = torch.broadcast_tensors(loc, var + self.var)
        return self.likelihood.marginal(loc, var)
