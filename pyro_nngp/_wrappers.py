"""Distributions behind their wrappers: independent dimensions, as of ``to_event``, and masks.

Cost: O(1).
"""

from typing import Any

from pyro.distributions import MaskedDistribution
from torch.distributions import Independent


def base_distribution(fn: Any, unmask: bool = True) -> Any:
    """The distribution without independent dimensions, and without masks if `unmask`."""
    wrappers = (Independent, MaskedDistribution) if unmask else Independent
    while isinstance(fn, wrappers):
        fn = fn.base_dist
    return fn
