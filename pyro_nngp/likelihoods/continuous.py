r"""Likelihoods of real and of positive data.

Closed forms: expected log-densities of all but the Student-t; the marginals of the normal and the log-normal. The
marginals of the Student-t and of the heteroskedastic normal are mixtures of normals over one scale variable, which
stays accurate however small the noise is relative to the variance of f.

Reference: Lazaro-Gredilla and Titsias (2011) for the heteroskedastic normal. Cost: O(1) per value unless stated.
"""

import math
from collections.abc import Callable

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.nn import pyro_method
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.special import ndtr

from pyro_nngp._checks import check_fraction
from pyro_nngp.distributions.normal_laplace import NormalLaplace, asymmetric_laplace
from pyro_nngp.hyperparameters import Hyperparameter, positive
from pyro_nngp.likelihoods.base import Likelihood, bounded
from pyro_nngp.likelihoods.observations import PseudoObservations
from pyro_nngp.likelihoods.quadrature import Focus

_NODES = 64  # components of the mixtures of normals
_EVEN = 10.0  # log precisions of Student-t noise up to which its nodes are about equally spaced
_RANGE = 8.0  # half width of the grid of log noise variances, in standard deviations


class _NormalNoise(Likelihood):
    """f plus normal noise, or an increasing function of that: ``family`` takes the mean and scale of the sum."""

    family: Callable[[Tensor, Tensor], Distribution]

    def __init__(self, variance: Hyperparameter | None = None) -> None:
        super().__init__()
        self.variance = positive(type(self).__name__, "variance", variance)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return self.family(f, self.variance.to(f.dtype).sqrt())

    @pyro_method
    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Tensor:
        noise = self.variance.to(loc.dtype)
        return self.family(loc, noise.sqrt()).log_prob(y) - var / (2 * noise)

    @pyro_method
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        return self.family(loc, (var + self.variance.to(loc.dtype)).sqrt())


class Gaussian(_NormalNoise):
    r""":math:`y \sim N(f, \sigma^2)`.

    Args:
        variance: noise variance :math:`\sigma^2`, any shape that broadcasts against the batch, such as (T, 1).
    """

    family = dist.Normal
    is_gaussian = True


class HeteroskedasticGaussian(Likelihood):
    r""":math:`y \sim N(f_0, \exp f_1)`: the logarithm of the noise variance is a second latent function."""

    num_latents = 2

    def observations(self, y: Tensor) -> PseudoObservations:
        """Data as observations of the mean; the log noise has the level of their median absolute deviation."""
        residual = (y - y.median()).abs().median().clamp(min=torch.finfo(y.dtype).tiny)
        return PseudoObservations(torch.stack([y.median(), 2 * (residual / 0.6745).log()]), y[None], None)

    def forward(self, f: Float[Tensor, "2 ..."]) -> Distribution:
        return dist.Normal(f[0], (bounded(f[1]) / 2).exp())

    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "2 ..."], var: Float[Tensor, "2 ..."]) -> Tensor:
        misfit = ((y - loc[0]).square() + var[0]) * bounded(var[1] / 2 - loc[1]).exp()
        return -(math.log(2 * math.pi) + loc[1] + misfit) / 2

    def marginal(self, loc: Float[Tensor, "2 ..."], var: Float[Tensor, "2 ..."]) -> Distribution:
        """A mixture of normals over the noise variance, integrated over the mean."""
        t = torch.linspace(-_RANGE, _RANGE, _NODES, dtype=loc.dtype, device=loc.device)
        log_noise = bounded(loc[1, ..., None] + var[1, ..., None].sqrt() * t)
        return _normal_mixture(-t.square() / 2, loc[0], var[0], log_noise.exp())


class StudentT(Likelihood):
    r""":math:`y = f + s\,\epsilon` with :math:`\epsilon` Student-t with :math:`\nu` degrees of freedom.

    Args:
        df: degrees of freedom :math:`\nu`, default 4.
        scale: :math:`s`, default 1.
    """

    sd_per_scale = 1.2

    def __init__(self, df: Hyperparameter | None = None, scale: Hyperparameter | None = None) -> None:
        super().__init__()
        self.df = positive("StudentT", "df", df, 4.0)
        self.scale = positive("StudentT", "scale", scale)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return dist.StudentT(self.df.to(f.dtype), f, self.scale.to(f.dtype))

    def focus(self, y: Tensor) -> Focus:
        return y, self.scale * self.df.sqrt()

    @pyro_method
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        r"""A mixture of normals: y has noise :math:`s^2 / \lambda` given :math:`\lambda \sim Gamma(\nu/2, \nu/2)`.

        Nodes are equally spaced in :math:`\mathrm{arsinh}(\log(\lambda) / 10)`: for small :math:`\nu` the density of
        :math:`\log \lambda` has a long tail, but most y depend on values near its peak.
        """
        a = self.df.to(loc.dtype)[..., None] / 2
        with torch.no_grad():  # from its peak, the density of log(lambda) falls by e^-45 to `low`, by e^-21 to `high`
            c, tail = 21 / a, 45 / a
            low, high = -(tail + (2 * tail).sqrt().clamp(max=1)), torch.minimum((2 * c).sqrt(), 1 + torch.log1p(2 * c))
            low, high = torch.asinh(low / _EVEN), torch.asinh(high / _EVEN)
            unit = torch.linspace(0, 1, 2 * _NODES, dtype=loc.dtype, device=loc.device)
            place = low + (high - low) * unit
            log_precision, log_spacing = _EVEN * place.sinh(), place.cosh().log()
        noise = self.scale.to(loc.dtype)[..., None].square() * bounded(-log_precision).exp()
        return _normal_mixture(a * (log_precision - log_precision.exp()) + log_spacing, loc, var, noise)


class AsymmetricLaplace(Likelihood):
    r"""Quantile regression: f is the quantile of y of level :math:`\tau`.

    .. math:: p(y \mid f) = \frac{\tau (1 - \tau)}{s} \exp\Big(-\frac{y - f}{s} (\tau - [y < f])\Big)

    The mode of f minimizes the check loss of Koenker and Bassett (1978); the density only serves to pose this as
    inference (Yu and Moyeed 2001), so intervals of f come from a pseudo-likelihood.

    Args:
        quantile: level :math:`\tau` in (0, 1), a constant.
        scale: s.

    Raises:
        ValueError: if ``quantile`` is not between 0 and 1.
    """

    def __init__(self, quantile: float = 0.5, scale: Hyperparameter | None = None) -> None:
        super().__init__()
        check_fraction("AsymmetricLaplace", "quantile", quantile, "Pass a level such as 0.9.")
        self.quantile = float(quantile)
        self.scale = positive("AsymmetricLaplace", "scale", scale)
        self.sd_per_scale = math.sqrt(1 - 2 * quantile * (1 - quantile)) / (quantile * (1 - quantile))

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return asymmetric_laplace(f, f.new_tensor(self.quantile), self.scale.to(f.dtype))

    def focus(self, y: Tensor) -> Focus:
        return y, torch.zeros_like(y)

    @pyro_method
    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Tensor:
        tau, scale, distance = self.quantile, self.scale.to(loc.dtype), y - loc
        sd = var.clamp(min=torch.finfo(loc.dtype).tiny).sqrt()
        z = distance / sd
        below = sd * (-z.square() / 2).exp() / math.sqrt(2 * math.pi) - distance * ndtr(-z)  # E max(f - y, 0)
        return math.log(tau * (1 - tau)) - scale.log() - (tau * distance + below) / scale

    @pyro_method
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        return NormalLaplace(loc, var, loc.new_tensor(self.quantile), self.scale.to(loc.dtype))


class LogNormal(_NormalNoise):
    r""":math:`\log y \sim N(f, \sigma^2)`, for y > 0.

    Args:
        variance: variance :math:`\sigma^2` of the logarithm.
    """

    support = constraints.positive
    expectation = "to be positive"
    cure = "Drop them, or use another likelihood for data with zeros."
    family = dist.LogNormal

    def observations(self, y: Tensor) -> PseudoObservations:
        return PseudoObservations.of(y.log())


class Gamma(Likelihood):
    r""":math:`y \sim Gamma(a, a e^{-f})`, with mean :math:`e^f` and relative variance 1/a, for y > 0.

    Args:
        concentration: a.
    """

    support = constraints.positive
    expectation = "to be positive"
    cure = "Drop them, or use another likelihood for data with zeros."

    def __init__(self, concentration: Hyperparameter | None = None) -> None:
        super().__init__()
        self.concentration = positive("Gamma", "concentration", concentration)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        a = self.concentration.to(f.dtype)
        return dist.Gamma(a, a * (-bounded(f)).exp())

    def focus(self, y: Tensor) -> Focus:
        return y.log(), torch.ones_like(y)

    @pyro_method
    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Tensor:
        a = self.concentration.to(loc.dtype)
        log_y = y.log()
        mean_ratio = bounded(log_y - loc + var / 2).exp()  # E y exp(-f)
        return a * (a.log() + log_y - loc - mean_ratio) - log_y - torch.lgamma(a)

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor | None:
        if name != "concentration":
            return None
        residual = y.log() - near.log().mean(-1)
        return (1 / residual.square().mean().clamp(min=1e-4)).clamp(0.1, 1e4)


def _normal_mixture(log_weights: Tensor, loc: Tensor, var: Tensor, noise: Tensor) -> Distribution:
    """Mixture of N(loc, var + noise_q), unnormalized log-weights; q is the last dimension of weights and noise."""
    scale = (var[..., None] + noise).sqrt()
    weights = dist.Categorical(logits=log_weights).expand(scale.shape[:-1])
    return dist.MixtureSameFamily(weights, dist.Normal(loc[..., None].expand(scale.shape), scale))
