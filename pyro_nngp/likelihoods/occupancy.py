r"""Detections among repeated visits of sites that are occupied or not, with the state of each site summed out.

Reference: MacKenzie, Nichols, Lachman, Droege, Royle, Langtimm (2002), "Estimating site occupancy rates when detection
probabilities are less than one", Ecology 83. Cost: O(1) per value and quadrature node.
"""

from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.nn import pyro_method
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import check_int
from pyro_nngp.hyperparameters import Hyperparameter, between
from pyro_nngp.likelihoods.counts import SuccessCounts
from pyro_nngp.likelihoods.labels import Bernoulli
from pyro_nngp.likelihoods.observations import PseudoObservations

_ROUNDS = 100  # of a fixed point that contracts by half or more where two visits and more tell it


class Occupancy(SuccessCounts):
    r"""Detections y among n visits: :math:`p(y) = \psi\, Binomial(y \mid n, p) + (1 - \psi)\, 1[y = 0]`.

    A site is occupied with probability :math:`\psi = \sigma(f)`, and a visit of an occupied site detects with
    probability p; there are no false detections. So f is the logit of occupancy, not of detection, and a site without
    detections may be occupied. The mean is :math:`n p \psi`.

    Args:
        total_count: number n of visits, if it is the same for all sites, at least 2: one visit does not tell a missed
            detection from an empty site. None where the method gets one per site, as ``trials``.
        detection: probability p of a detection per visit of an occupied site, the same for all.

    Raises:
        ValueError, TypeError: if ``total_count`` is not an integer >= 2, or ``detection`` not between 0 and 1.
    """

    cure = "Pass the number of visits with a detection, and the visits of each site as trials."

    def __init__(self, total_count: int | None = None, detection: Hyperparameter | None = None) -> None:
        if total_count is not None:
            check_int("Occupancy", "total_count", total_count, 2, "One visit does not tell absence from a miss.")
        super().__init__(total_count)
        self.detection = between("Occupancy", "detection", detection, 0.0, 1.0, 0.4)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return self._distribution(-f)

    @pyro_method
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        """The density is linear in the probability of occupancy, whose mean a logistic label has."""
        occupied: Any = Bernoulli().marginal(loc, var)
        return self._distribution(-occupied.logits)

    def _distribution(self, empty: Float[Tensor, "..."]) -> Distribution:
        """Detections where the logits of an empty site are given."""
        visits = dist.Binomial(self.total_count, probs=self.detection.to(empty.dtype))
        return dist.ZeroInflatedDistribution(visits, gate_logits=empty)

    def observations(self, y: Tensor) -> PseudoObservations | None:
        """One step of Fisher scoring from f = 0 where sites differ in their numbers of visits."""
        if not isinstance(self.total_count, Tensor):
            return None
        missed = (1 - self.detection.to(y.dtype)) ** self.total_count  # probability of no detection if occupied
        slope = torch.where(y > 0, 0.5, missed / (1 + missed) - 0.5)
        information = (1 - missed) / (4 + 4 * missed)
        return PseudoObservations.of(slope / information, 1 / information)

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor | None:
        """The probability with which detections at sites with any have their mean share."""
        seen = y[y > 0]
        if name != "detection" or self.takes_trials or not len(seen):
            return None
        share = seen.mean() / self.total_count
        detection = share
        for _ in range(_ROUNDS):
            detection = share * (1 - (1 - detection) ** self.total_count)
        return detection.clamp(0.02, 0.98)
