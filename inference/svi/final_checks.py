"""All checks of a trained method at the end of a run; each warns of what it finds.

Cost: that of the checks, some predictions of at most 2,000 rows.
"""

from typing import Any

from pyro_nngp.inference.svi.correlation_check import check_correlation
from pyro_nngp.inference.svi.dispersion_check import check_augmentation, check_dispersion
from pyro_nngp.inference.svi.exact_rows import exact_rows
from pyro_nngp.inference.svi.family_check import check_family
from pyro_nngp.inference.svi.neighbor_check import check_neighbors
from pyro_nngp.inference.svi.outcome_check import check_leak, check_near_duplicates, check_outcome
from pyro_nngp.inference.svi.residual_check import check_errors, check_tails
from pyro_nngp.inference.svi.result import FitResult
from pyro_nngp.inference.svi.signal_check import check_latent_signal
from pyro_nngp.inference.svi.trend_check import check_trend


def check_trained(method: Any, result: FitResult, is_first: bool) -> None:
    """Check a trained method.

    Args:
        method: the method.
        result: the result of its run.
        is_first: whether this is the only process, or the first of several, which alone makes most checks.
    """
    check_leak(method)
    check_neighbors(method)
    check_near_duplicates(method)
    if is_first:
        check_outcome(method, result)
        check_family(method, result)
        check_tails(method)
        check_correlation(method, result)
        exact = exact_rows(method)
        check_errors(method, exact)
        check_trend(exact)
        check_dispersion(method)
        check_augmentation(method)
        check_latent_signal(method)
