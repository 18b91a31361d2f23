r"""A lower bound of the expected log-density in place of quadrature, by Polya-Gamma augmentation.

Every logistic likelihood here is :math:`p(y \mid f) = h(y)\, e^{y \psi} / (1 + e^\psi)^b` with the logit
:math:`\psi = f - \log r` of a negative binomial of dispersion r, and :math:`\psi = f` of the others. With
:math:`\omega \mid b \sim PG(b, 0)` it is proportional to a normal density of :math:`\psi` (Polson, Scott, Windle 2013),
and the optimal :math:`q(\omega) = PG(b, c)`, :math:`c^2 = E \psi^2`, gives (Wenzel et al. 2019, eq. 8 with that q
inserted)

.. math:: E_{\psi \sim N(m, v)} \log p(y \mid \psi) \ge \log p(y \mid 0) + (y - b/2)\, m - b \log\cosh(c / 2),
   \qquad c = \sqrt{m^2 + v}.

Its natural-gradient steps of length one are the coordinate ascent of that paper, with
:math:`E\,\omega = \tfrac{b}{2c} \tanh(c/2)` as the precision of each datum. Cost: O(1) per value.
"""

from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.nn import pyro_method
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import fail
from pyro_nngp.distributions.polya_gamma import log_cosh
from pyro_nngp.likelihoods.base import Likelihood
from pyro_nngp.likelihoods.counts import Binomial, NegativeBinomial
from pyro_nngp.likelihoods.labels import Bernoulli, Categorical
from pyro_nngp.likelihoods.observations import PseudoObservations


class PolyaGammaBound(Likelihood):
    r"""A logistic likelihood with the Polya-Gamma bound as its expected log-density; all else is unchanged.

    The resulting evidence bound is the bound of PG-VI, which is lower, and ``solve()`` is PG-VI's coordinate ascent.

    Args:
        likelihood: :class:`Bernoulli` with the logit link, :class:`Binomial` or :class:`NegativeBinomial`.

    Raises:
        ValueError: for another likelihood.

    Reference: Wenzel, Galy-Fajou, Donner, Kloft, Opper (2019), "Efficient Gaussian process classification using
    Polya-Gamma data augmentation", AAAI.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        logistic = isinstance(likelihood, Bernoulli) and likelihood.link == "logit"
        if not logistic and not isinstance(likelihood, (Binomial, NegativeBinomial)):
            actual, cure = type(likelihood).__name__, "Leave the bound out: quadrature serves every likelihood."
            fail("PolyaGammaBound", "likelihood", "Bernoulli('logit'), Binomial or NegativeBinomial", actual, cure)
        super().__init__(likelihood.num_quadrature)
        self.base = likelihood
        self.support, self.expectation, self.cure = likelihood.support, likelihood.expectation, likelihood.cure
        self.takes_trials = likelihood.takes_trials

    def _set_rows(self, trials: Tensor | None, limits: Tensor | None) -> None:
        base = self.base.for_rows(trials=trials)
        self.__dict__.update(base=base, support=base.support)

    def observations(self, y: Tensor) -> PseudoObservations | None:
        return self.base.observations(y)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return self.base(f)

    @pyro_method
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        return self.base.marginal(loc, var)

    @pyro_method
    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Tensor:
        base = self.base.bind()
        b, kappa = polya_gamma_terms(base, y, loc.dtype)
        even = even_odds(base, loc)
        loc = loc - even
        c = (loc.square() + var).sqrt()
        return base(torch.zeros_like(loc) + even).log_prob(y) + kappa * loc - b * log_cosh(c / 2)


def even_odds(likelihood: Any, like: Tensor) -> Tensor | float:
    r"""f where the logit is 0: :math:`\log r` of a negative binomial, else 0; in the dtype of a tensor."""
    return likelihood.total_count.to(like.dtype).log() if isinstance(likelihood, NegativeBinomial) else 0.0


def polya_gamma_terms(likelihood: Any, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """b and kappa for targets (*T, U), or for C classes, which come first, (C, *T, U).

    Args:
        likelihood: bound; Bernoulli, Binomial, NegativeBinomial or Categorical. Or the Pyro
            distribution of one of the first three names.
        y: targets, outputs first.
        dtype: of the result.
    """
    if isinstance(likelihood, Categorical):
        classes = torch.arange(likelihood.num_latents or 0, device=y.device)
        y = y == classes.reshape(-1, *[1] * y.dim())
    y = y.to(dtype)
    b = torch.ones_like(y)
    if isinstance(likelihood, Binomial | dist.Binomial):
        b = b * likelihood.total_count
    if isinstance(likelihood, NegativeBinomial | dist.NegativeBinomial):
        r = torch.as_tensor(likelihood.total_count, dtype=dtype, device=y.device)
        return y + r, (y - r) / 2
    return b, y - b / 2
