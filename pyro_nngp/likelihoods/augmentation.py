r"""Likelihoods that are Gaussian in f given one auxiliary variable per datum.

For Bernoulli, binomial and negative binomial data with logits :math:`\psi` (Polson, Scott, Windle 2013, theorem 1),

.. math:: p(y \mid f) \propto \frac{e^{(\kappa + b/2) \psi}}{(1 + e^\psi)^b}
   = 2^{-b} e^{\kappa \psi} E_{\omega \sim PG(b, 0)}\, e^{-\omega \psi^2 / 2}

with :math:`b = 1, n, y + r`, :math:`\kappa = y - b/2` and :math:`\psi = f`, of a negative binomial
:math:`\psi = f - \log r`. Given :math:`\omega` this is, as a function of :math:`\psi`, an observation
:math:`\kappa / \omega` of noise variance :math:`1 / \omega`, and so one of f. Student-t noise is Gaussian with variance
:math:`s^2 / \omega` given :math:`\omega \sim Gamma(\nu/2, \nu/2)`. Categorical data become C binary sets, one against
all.

The factor that remains after completing the square, :math:`(2\pi/\omega)^{1/2} e^{\kappa^2 / (2\omega)}`, does not
depend on f, so it cancels in the density of f given y and :math:`\omega`. It enters the joint density of y and
:math:`\omega`: for :math:`\psi \sim N(m, v)`

.. math:: \log p(y, \omega) = \log PG(\omega \mid b, 0) + g, \quad g = \log c_y - b \log 2 - \tfrac12 \log(1 + \omega v)
   + \frac{\kappa^2 v + 2 \kappa m - \omega m^2}{2 (1 + \omega v)},

:math:`c_y` the factor in front (a binomial coefficient, or 1), so that for every q

.. math:: E_q\, g - KL(q \,\|\, PG(b, 0)) = \log p(y) - KL(q(\omega) \,\|\, p(\omega \mid y)) \le \log p(y).

Guides for the auxiliary variables are in :mod:`pyro_nngp.variational.auxiliary`.

Cost: O(1) per value. Symbols: U rows of data, T outputs, L latent functions.
"""

import math
from typing import Any, Literal, TypeAlias, cast

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from pyro_nngp._checks import fail
from pyro_nngp.distributions import PolyaGamma
from pyro_nngp.likelihoods.base import Likelihood, check_likelihood
from pyro_nngp.likelihoods.continuous import Gaussian, StudentT
from pyro_nngp.likelihoods.counts import Binomial, NegativeBinomial
from pyro_nngp.likelihoods.labels import Bernoulli, Categorical
from pyro_nngp.likelihoods.polya_gamma import even_odds, polya_gamma_terms

_AUGMENTED = (Gaussian, StudentT, Bernoulli, Binomial, NegativeBinomial, Categorical)

Coupling: TypeAlias = Literal["odds", "probabilities"]


def check_augmentable(where: str, likelihood: Likelihood) -> None:
    """Raise ``TypeError`` unless the likelihood is Gaussian, or Gaussian given an auxiliary variable."""
    check_likelihood(where, likelihood)
    names = ", ".join(kind.__name__ for kind in _AUGMENTED)
    if not isinstance(likelihood, _AUGMENTED):
        cure = "Others have no augmentation: use VNNGP."
        fail(where, "likelihood", f"to be one of {names}", type(likelihood).__name__, cure, TypeError)
    if isinstance(likelihood, Bernoulli) and likelihood.link != "logit":
        fail(where, "likelihood", "to have the logit link", repr(likelihood.link), "Polya-Gamma needs logits.")


def coded_labels(where: str, likelihood: Likelihood, y: Tensor, dtype: torch.dtype, every_class: bool = True) -> Tensor:
    """Targets in the coding of the likelihood: booleans and labels -1 and 1 become 0 and 1; others are unchanged.

    Args:
        where: name of the caller, for the error message.
        likelihood: p(y | f).
        y: targets.
        dtype: dtype of recoded labels.
        every_class: whether every class has to occur.

    Raises:
        ValueError: if a class of a categorical likelihood does not occur.
    """
    if y.dtype == torch.bool:
        return y.to(dtype)
    if isinstance(likelihood, Bernoulli) and bool((y.abs() == 1).all()):
        return (y > 0).to(dtype)
    if every_class and isinstance(likelihood, Categorical):
        classes = torch.arange(likelihood.num_latents or 0, device=y.device)
        missing = classes[~torch.isin(classes, y.long())].tolist()
        if missing:
            fail(where, "y", "to hold every class", f"none of class {missing}", "Leave it out and renumber the others.")
    return y


def auxiliary_prior(likelihood: Likelihood, y: Tensor, dtype: torch.dtype) -> Distribution:
    """Prior of the auxiliary variables of some data, one per latent value.

    Args:
        likelihood: bound, and not Gaussian.
        y: targets, outputs first, (*T, U).
        dtype: dtype of the variables.

    Returns:
        Distribution of batch shape (*T, U), or (C, U) for C classes.
    """
    if isinstance(likelihood, StudentT):
        half = likelihood.df.to(dtype) / 2
        return dist.Gamma(half, half).expand(y.shape)
    b, _ = polya_gamma_terms(likelihood, y, dtype)
    return PolyaGamma(b, torch.zeros_like(b))


def gaussian_observations(
    likelihood: Likelihood, y: Tensor, omega: Tensor | None, dtype: torch.dtype
) -> tuple[Float[Tensor, "*L U"], Float[Tensor, "*N U"]]:
    """Observations of f and their noise variances, given the auxiliary variables.

    Args:
        likelihood: bound.
        y: targets, outputs first, (*T, U).
        omega: auxiliary variables, (*L, U); None for a Gaussian likelihood.
        dtype: dtype of the result.

    Returns:
        Pseudo-targets, and noise variances that broadcast against them.
    """
    if isinstance(likelihood, Gaussian):
        noise, y = likelihood.variance.to(dtype), y.to(dtype)
        noise = noise if likelihood.weights is None else noise / likelihood.weights
        return y, noise.expand(torch.broadcast_shapes(noise.shape, y.shape[-1:]))
    omega = cast(Tensor, omega)
    if isinstance(likelihood, StudentT):
        return y.to(dtype), likelihood.scale.to(dtype).square() / omega
    return polya_gamma_terms(likelihood, y, dtype)[1] / omega + even_odds(likelihood, omega), 1 / omega


def predictive(
    likelihood: Likelihood, loc: Float[Tensor, "*L B"], var: Float[Tensor, "*L B"], coupling: Coupling = "odds"
) -> Distribution:
    r"""Distribution of y for f ~ N(loc, var).

    Args:
        likelihood: bound.
        loc: means of f; (C, B) for C classes.
        var: variances of f.
        coupling: how class probabilities follow from one-against-all probabilities :math:`\tilde p_c`: in proportion to
            :math:`\tilde p_c`, or to the odds :math:`\tilde p_c / (1 - \tilde p_c)`. The latter is the distribution of
            C independent binary labels given that exactly one of them is 1.
    """
    if not isinstance(likelihood, Categorical):
        return likelihood.marginal(loc, var)
    return _one_against_all(_binary(loc, var), coupling)


def squared_latent(
    likelihood: Likelihood, y: Tensor, omega: Tensor, loc: Float[Tensor, "*L B"], var: Float[Tensor, "*L B"]
) -> Float[Tensor, "*L B"]:
    r"""The statistic that determines q(omega): :math:`E \psi^2`, or for Student-t data :math:`E (y - f)^2 / s^2`.

    Args:
        likelihood: bound.
        y: data, as in :func:`auxiliary_prior`.
        omega: means of the auxiliary variables of these data.
        loc: means of f given other data.
        var: variances of f given other data.
    """
    obs, noise = gaussian_observations(likelihood, y, omega, loc.dtype)
    loc, var = (loc * noise + var * obs) / (noise + var), var * noise / (noise + var)
    if isinstance(likelihood, StudentT):
        return ((y - loc).square() + var) / likelihood.scale.to(loc.dtype).square()
    return (loc - even_odds(likelihood, loc)).square() + var


class AugmentedMarginal(TorchDistribution):
    r"""The distribution of y for f ~ N(loc, var), whose log density is :math:`\log p(y, \omega) - \log p(\omega)`.

    Minus the divergence of a guide from the prior of omega, it gives :math:`\log p(y)` minus the divergence from the
    posterior (see the module's docstring). Draws come from :func:`predictive`. For classes the log density is that
    of the label plus, for each class, :math:`g - \log p` of its binary set.

    Args:
        likelihood: bound, and not Gaussian.
        loc: means of f, of the batch shape; (C, \*batch) for C classes.
        var: variances of f, of the same shape.
        omega: auxiliary variables of the data, of the same shape.
        coupling: coupling of classes, as in :func:`predictive`.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(
        self, likelihood: Likelihood, loc: Tensor, var: Tensor, omega: Tensor, coupling: Coupling = "odds"
    ) -> None:
        self.likelihood, self.loc, self.var, self.omega, self.coupling = likelihood, loc, var, omega, coupling
        super().__init__(loc.shape if likelihood.num_latents is None else loc.shape[1:], validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        return self.likelihood.support

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        return predictive(self.likelihood, self.loc, self.var, self.coupling).sample(sample_shape)

    def log_prob(self, value: Tensor) -> Float[Tensor, "..."]:
        loc, var, omega, likelihood = self.loc, self.var, self.omega, self.likelihood
        if isinstance(likelihood, StudentT):
            return dist.Normal(loc, (var + likelihood.scale.to(loc.dtype).square() / omega).sqrt()).log_prob(value)
        if isinstance(likelihood, Categorical):
            value = value.expand(torch.broadcast_shapes(value.shape, self.batch_shape))
        b, kappa = polya_gamma_terms(likelihood, value, loc.dtype)
        loc = loc - even_odds(likelihood, loc)
        shrunk = 1 + omega * var
        g = (kappa.square() * var + 2 * kappa * loc - omega * loc.square()) / (2 * shrunk) - shrunk.log() / 2
        g = g - b * math.log(2) + _log_coefficient(likelihood, value.to(loc.dtype))
        if not isinstance(likelihood, Categorical):
            return g
        binary = _binary(self.loc, var)
        label = _one_against_all(binary, self.coupling).log_prob(value)
        return label + (g - binary.log_prob(kappa + 0.5)).sum(0)


def _binary(loc: Tensor, var: Tensor) -> dist.Bernoulli:
    return cast(dist.Bernoulli, Bernoulli().marginal(loc, var))


def _one_against_all(binary: dist.Bernoulli, coupling: Coupling) -> dist.Categorical:
    """Distribution of the class given one-against-all probabilities, classes first."""
    logits = binary.logits if coupling == "odds" else logsigmoid(binary.logits)
    return dist.Categorical(logits=logits.movedim(0, -1))


def _log_coefficient(likelihood: Likelihood, y: Tensor) -> Tensor | float:
    """log c_y of a binomial or negative binomial density."""
    if isinstance(likelihood, Binomial):
        n = torch.zeros_like(y) + likelihood.total_count
        return torch.lgamma(n + 1) - torch.lgamma(y + 1) - torch.lgamma(n - y + 1)
    if isinstance(likelihood, NegativeBinomial):
        r = likelihood.total_count.to(y.dtype)
        return torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
    return 0.0
