r"""Variational families for auxiliary variables, one row of parameters per datum.

The variables are as in :mod:`pyro_nngp.likelihoods.augmentation`. :class:`LogNormal` and :class:`Conjugate` name a
family for :class:`~pyro_nngp.models.LOO`; :class:`LocalLogNormal` and :class:`LocalConjugate` are its parameters.

Divergences from the prior: closed forms for PG(b, c) from PG(b, 0) and between Gamma distributions; a Gauss-Hermite sum
in :math:`\log \omega` for a log-normal from a Polya-Gamma distribution.

Cost: O(1) per value; 16 densities for the sum. Symbols: N rows of data, U of them, L latent functions.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Distribution, register_kl

from pyro_nngp.distributions import PolyaGamma
from pyro_nngp.likelihoods import Likelihood, NegativeBinomial, StudentT
from pyro_nngp.likelihoods.augmentation import auxiliary_prior
from pyro_nngp.likelihoods.polya_gamma import even_odds, polya_gamma_terms
from pyro_nngp.likelihoods.pseudo_observations import pseudo_observations
from pyro_nngp.likelihoods.quadrature import gauss_hermite
from pyro_nngp.variational.gaussian import LocalTables

_NODES = 16
_WIDEST = 4.0  # largest variance of an observation of f at which q of a count starts


class LocalLogNormal(LocalTables):
    """Independent log-normal auxiliary variables.

    Args:
        prior: of batch shape (N,) or (L, N); its means and variances are the start.
    """

    def __init__(self, prior: Distribution) -> None:
        super().__init__()
        square = torch.log1p(prior.variance / prior.mean.square())
        self.loc = nn.Parameter(_table(prior.mean.log() - square / 2))
        self.log_scale = nn.Parameter(_table(square.log() / 2))
        self._single = len(prior.batch_shape) == 1

    def distribution(self, likelihood: Likelihood, y: Tensor, rows: Int[Tensor, " U"]) -> Distribution:
        """q at some rows, batch shape (U,) or (L, U).

        Args:
            likelihood: bound, of these rows; the conjugate family needs it and `y`.
            y: targets at `rows`, outputs first.
            rows: rows of the data.
        """
        loc, scale = (self._read(table, rows).mT for table in (self.loc, self.log_scale))
        return dist.LogNormal(loc[0], scale[0].exp()) if self._single else dist.LogNormal(loc, scale.exp())

    @torch.no_grad()
    def put(self, likelihood: Likelihood, y: Tensor, square: Float[Tensor, "*L N"]) -> None:
        """Set means and variances to the optimum of the conjugate family.

        Args:
            likelihood: bound.
            y: all targets, outputs first.
            square: values of :func:`~pyro_nngp.likelihoods.augmentation.squared_latent`.
        """
        like = LocalLogNormal(conjugate_posterior(likelihood, y, square))
        self.loc.copy_(like.loc)
        self.log_scale.copy_(like.log_scale)


class LocalConjugate(LocalTables):
    r"""The families of coordinate ascent: PG(b, c) with free c, and Gamma((\nu + 1)/2, .) with free rate.

    Polya-Gamma variables cannot be reparameterized; the guide's value is their mean, the only statistic that the
    optimal mean-field q(f) depends on. Their divergence from the prior is exact.

    Args:
        prior: of batch shape (N,) or (L, N).
    """

    def __init__(self, prior: Distribution) -> None:
        super().__init__()
        self.log_square = nn.Parameter(_table(torch.zeros_like(prior.mean)))
        self._single = len(prior.batch_shape) == 1

    def distribution(self, likelihood: Likelihood, y: Tensor, rows: Int[Tensor, " U"]) -> Distribution:
        """q at some rows; arguments as in :meth:`LocalLogNormal.distribution`."""
        square = self._read(self.log_square, rows).mT.exp()
        square = square[0] if self._single else square
        return conjugate_posterior(likelihood, y, square)

    @torch.no_grad()
    def put(self, likelihood: Likelihood, y: Tensor, square: Float[Tensor, "*L N"]) -> None:
        """Set the parameters to the optimum; arguments as in :meth:`LocalLogNormal.put`."""
        self.log_square.copy_(_table(square.log()))


@dataclass(frozen=True)
class AuxiliaryFamily:
    """Base of the families of q(omega) by name."""

    _tables: ClassVar[Any]

    @torch.no_grad()
    def build(self, likelihood: Likelihood, y: Tensor, dtype: torch.dtype, sample: Tensor | None = None) -> Any:
        """The start of q(omega): the prior; for counts the optimum for the most likely f.

        Starting at the prior, 48 sweeps of coordinate ascent do not suffice for counts of many times r.

        Args:
            likelihood: bound, of the rows of y.
            y: targets, outputs first.
            dtype: dtype of the parameters.
            sample: targets of other rows whose level counts start from; None is y.
        """
        q = self._tables(auxiliary_prior(likelihood, y, dtype))
        if isinstance(likelihood, NegativeBinomial):
            level = None if sample is None else pseudo_observations(likelihood, sample).level
            found: Any = pseudo_observations(likelihood, y, level)
            logits = found.obs - even_odds(likelihood, found.obs)
            q.put(likelihood, y, (logits.square() + found.noise.clamp(max=_WIDEST)).to(dtype))
        return q


@dataclass(frozen=True)
class LogNormal(AuxiliaryFamily):
    """Log-normal q(omega), independent of each other, as in Jankowiak and Pleiss (2021)."""

    _tables = LocalLogNormal


@dataclass(frozen=True)
class Conjugate(AuxiliaryFamily):
    """PG(b, c) with free c, or Gamma with free rate, independent of each other; see :class:`LocalConjugate`."""

    _tables = LocalConjugate


class MeanPolyaGamma(PolyaGamma):
    """PG(b, c) whose reparameterized draw is its mean: for guides, where only E[omega] matters."""

    has_rsample = True

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """The mean, of shape ``sample_shape + batch_shape``."""
        return self.mean.expand(torch.Size(sample_shape) + self.batch_shape)


@register_kl(dist.LogNormal, PolyaGamma)
def _kl_lognormal_polya_gamma(q: dist.LogNormal, p: PolyaGamma) -> Tensor:
    """The divergence by Gauss-Hermite quadrature in log(omega)."""
    nodes, weights = gauss_hermite(_NODES, q.loc.dtype, q.loc.device)
    values = (q.loc + q.scale * nodes.reshape(-1, *[1] * q.loc.dim())).exp()
    return -q.entropy() - torch.tensordot(weights, p.log_prob(values), 1)


@register_kl(dist.LogNormal, dist.Gamma)
def _kl_lognormal_gamma(q: dist.LogNormal, p: dist.Gamma) -> Tensor:
    a, rate = p.concentration, p.rate
    return -q.entropy() - (a * rate.log() - torch.lgamma(a) + (a - 1) * q.loc - rate * q.mean)


def conjugate_posterior(likelihood: Likelihood, y: Tensor, square: Float[Tensor, "*L U"]) -> Distribution:
    """The posterior of auxiliary variables given `square`, which ``augmentation.squared_latent`` returns."""
    if isinstance(likelihood, StudentT):
        df = likelihood.df.to(square.dtype)
        return dist.Gamma(((df + 1) / 2).expand(square.shape), (df + square) / 2)
    return MeanPolyaGamma(polya_gamma_terms(likelihood, y, square.dtype)[0], square.sqrt())


def _table(values: Tensor) -> Tensor:
    """(N,) or (L, N) as a table with one row per point, (N, L); contiguous, or Pyro would train a copy."""
    return (values[None] if values.dim() == 1 else values).mT.detach().clone(memory_format=torch.contiguous_format)
