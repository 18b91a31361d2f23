"""Checks that chains have settled: R-hat, drift between the halves of the draws, kinetic temperature.

Cost: O(draws x dimensions x log draws), once at the end of a run.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from pyro_nngp._checks import warn

MIN_DRAWS = 50  # per chain: fewer cannot show whether a chain has settled
_RHAT = 1.1
_DRIFT = 0.2  # in posterior standard deviations: smaller drifts do no harm
_ERRORS = 5.0  # standard errors
_TEMPERATURE = 0.2  # distance of the kinetic temperature from the temperature, relative


def unsettled(draws: Float[Tensor, "C S d"]) -> Bool[Tensor, " d"]:
    """Mark coordinates whose chains disagree or drift.

    Chains disagree if R-hat of half chains exceeds 1.1, and by more than as many independent draws can by chance. The
    halves of all chains together drift if their means differ by five standard errors, and by a fifth of a standard
    deviation.
    """
    chains, size, _ = draws.shape
    draws = draws.double()
    spread = draws.std((0, 1))
    free = 2 * chains - 1
    tail = 2 / (9 * free)  # Wilson and Hilferty: of chi-squared over its degrees of freedom, at five standard errors
    chance = math.sqrt(1 + (1 - tail + _ERRORS * math.sqrt(tail)) ** 3 / (size // 2))
    differ = split_gelman_rubin(draws) > max(_RHAT, chance)
    early, late = draws[:, : size // 2], draws[:, -(size // 2) :]
    drift = (early.mean((0, 1)) - late.mean((0, 1))).abs()
    error = (spread**2 * (1 / _effective_size(early) + 1 / _effective_size(late))).sqrt()
    drifts = (drift > _ERRORS * error) & (drift > _DRIFT * spread)
    return differ | drifts


def _effective_size(draws: Float[Tensor, "C S d"]) -> Float[Tensor, " d"]:
    """Effective number of draws, at most their number."""
    total = float(draws.shape[0] * draws.shape[1])
    return effective_sample_size(draws).nan_to_num(total).clamp(1.0, total)


def warn_unsettled(
    where: str,
    draws: Float[Tensor, "C S d"],
    sites_of: Callable[[Bool[Tensor, " d"]], list[str]],
    kinetic: float | None,
    allowance: float,
) -> None:
    """Warn of chains that have not settled; does nothing for fewer than 50 draws per chain.

    Args:
        where: name of the caller.
        draws: unconstrained draws.
        sites_of: names of the sites of marked coordinates.
        kinetic: mean kinetic temperature over the temperature; None without momentum.
        allowance: standard error of `kinetic`.
    """
    if draws.shape[1] < MIN_DRAWS:
        return
    marked = unsettled(draws)
    if marked.any():
        warn(
            f"{where}: expected chains to settle, got chains that disagree or drift (R-hat above {_RHAT}, or halves of "
            f"the draws that differ) at the sites {sites_of(marked)}. Increase warmup_steps and num_steps; or start "
            "closer with init_strategy=, or take larger minibatches.",
            RuntimeWarning,
        )
    if kinetic is not None and abs(kinetic - 1) > _TEMPERATURE + _ERRORS * allowance:
        warn(
            f"{where}: expected a kinetic temperature near that of the run, got {kinetic:.2f} of it over the sites "
            f"{sites_of(torch.ones_like(marked))}. Leave step_size out so that it is found, use smaller steps or "
            "larger minibatches, or increase warmup_steps.",
            RuntimeWarning,
        )
