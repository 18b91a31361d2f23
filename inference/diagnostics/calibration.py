r"""Checks of posteriors and of calibration: statistics that are uniform if both are right, and tests of uniformity.

- :func:`psis_khat`: how heavy the tail of the importance weights p/q of a guide is (Yao, Vehtari, Simpson and Gelman
  2018, section 2).
- :func:`sbc_ranks`: simulation-based calibration of any posterior (Talts, Betancourt, Simpson, Vehtari and Gelman 2018,
  algorithm 1); applied to a guide, it is variational simulation-based calibration (Yao et al., section 3).
- :func:`pit`: probability integral transforms of observations, from which :func:`coverage_curve` follows.
- :func:`reliability`: predicted probabilities of labels against their frequencies.

Differs from the papers: ranks are randomized within their cell, :math:`(r + v) / (S + 1)` with v uniform, so that they
are exactly uniform for any number of draws S and with ties, and the same test applies to ranks and transforms.
Asymmetry, the sign of bias, is tested by Wilcoxon's signed ranks, which keep their level; Yao et al. compare p and 1 -
p as if they were two samples.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped
from pyro import poutine
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor
from torch.distributions import Distribution
from tqdm.auto import tqdm

from pyro_nngp._checks import check_int, check_memory, check_tensor, fail
from pyro_nngp._kinds import check_callable, check_flags, check_kind
from pyro_nngp.data.metrics import check_labels
from pyro_nngp.inference._interrupt import deferred_interrupt
from pyro_nngp.inference._traces import check_all_rows, check_program, latent_values, run_at, total_log_prob

Sites = Mapping[str, Tensor]

_EQUAL = 1e-9  # log weights that differ by rounding


@torch.no_grad()
def psis_khat(
    model: Callable, guide: Callable, *args: Any, num_samples: int = 1000, progress: bool = True, **kwargs: Any
) -> float:
    r"""Pareto shape :math:`\hat k` of the importance weights :math:`p(\theta, y) / q(\theta)` of a guide.

    Below 0.5 the guide is close to the posterior, above 0.7 it is not. It measures the joint distribution of all latent
    sites, so it is far above 0.7 for almost any guide of thousands of sites, however good its marginals.

    Args:
        model: a Pyro model; scales of ``poutine.scale`` do not count.
        guide: its guide.
        *args: arguments of both, for all rows of the data.
        num_samples: draws from the guide, S.
        progress: show a progress bar if it takes more than a second.
        **kwargs: keyword arguments of both.

    Returns:
        The shape; -inf if all weights are equal, inf if at most four of them outweigh all others by far.

    Raises:
        ValueError: for fewer than 25 draws, latent sites without draws, or plates that used only some of their rows.

    Cost: S runs of model and guide.

    Reference: Yao, Vehtari, Simpson, Gelman (2018), "Yes, but did it work? Evaluating variational inference", ICML.
    """
    check_flags("psis_khat", progress=progress)
    check_program("psis_khat", model)
    check_callable("psis_khat", "guide", guide, "Pass its guide.")
    check_int("psis_khat", "num_samples", num_samples)
    check_memory("psis_khat", "draws", num_samples, torch.float64)
    if num_samples < 25:
        fail("psis_khat", "num_samples", ">= 25", num_samples, "A tail of five weights needs as many draws.")
    weights = []
    for _ in tqdm(range(num_samples), disable=not progress, delay=1, desc="psis_khat", unit="draw"):
        q = poutine.trace(guide).get_trace(*args, **kwargs)
        p = run_at("psis_khat", model, args, kwargs, latent_values(q))
        check_all_rows("psis_khat", p)
        weights.append(float(total_log_prob(p) - total_log_prob(q)))
    return pareto_shape(torch.tensor(weights, dtype=torch.float64))


def sbc_ranks(
    simulate: Callable[[], tuple[Sites, Any]],
    infer: Callable[[Any], Sites],
    num_simulations: int,
    *,
    progress: bool = True,
) -> dict[str, Float[Tensor, "R ..."]]:
    """Ranks of true values among posterior draws, scaled to (0, 1): uniform if the inference is right.

    Ranks pile up at 0 and 1 if the posterior is too narrow, in the middle if it is too wide, on one side if it is
    biased.

    Args:
        simulate: draws latent values from the prior and data given them; returns ({site: value}, data).
        infer: returns independent (or thinned) posterior draws {site: (S, *shape)} for such data.
        num_simulations: R.
        progress: show a progress bar. Ctrl-C returns the simulations so far.

    Returns:
        {site: ranks of shape (R, *shape)}. Each entry is uniform; different entries of one simulation are dependent.

    Raises:
        ValueError: if `infer` leaves out a site, or gives another shape.

    Cost: R times an inference.

    Reference: Talts, Betancourt, Simpson, Vehtari, Gelman (2018), "Validating Bayesian inference algorithms with
    simulation-based calibration".
    """
    check_callable("sbc_ranks", "simulate", simulate, "It returns ({site: value}, data).", 0)
    check_callable("sbc_ranks", "infer", infer, "It returns {site: draws}.", 1)
    check_flags("sbc_ranks", progress=progress)
    check_int("sbc_ranks", "num_simulations", num_simulations, 1)
    check_memory("sbc_ranks", "ranks", num_simulations, torch.get_default_dtype())
    ranks: dict[str, list[Tensor]] = {}
    with deferred_interrupt() as pressed:
        for _ in tqdm(range(num_simulations), disable=not progress, desc="sbc", unit="fit"):
            pair = simulate()
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Mapping)):
                actual, cure = type(pair).__name__, "Return the values that are to be inferred, and the data."
                fail("sbc_ranks", "simulate()", "to return ({site: value}, data)", actual, cure, TypeError)
            truth, data = pair
            draws = infer(data)
            check_kind("sbc_ranks", "infer(data)", draws, Mapping, "{site: draws}", "Return draws of each true value.")
            missing = sorted(truth.keys() - draws.keys())
            if missing:
                fail(
                    "sbc_ranks",
                    "infer(data)",
                    f"to draw {sorted(truth)}",
                    f"none of {missing}",
                    "Draw each true value.",
                )
            for name, value in truth.items():
                ranks.setdefault(name, []).append(pit(draws[name], value))
            if pressed:
                break
    return {name: torch.stack(values) for name, values in ranks.items()}


def pit(
    predictive: Distribution | Shaped[Tensor, "S *N"], y: Shaped[Tensor, "*N"], num_draws: int = 1000
) -> Float[Tensor, "*N"]:
    r"""Randomized probability integral transform: the position of each observation in its predictive distribution.

    A continuous distribution with a cumulative distribution function gives :math:`F(y)`. Any other gives the rank of y
    among draws :math:`x_s`, :math:`(\#\{x_s < y\} + v\,(1 + \#\{x_s = y\})) / (S + 1)` with v uniform: this
    covers counts and other discrete data, and values that were censored.

    Args:
        predictive: a distribution over y, or independent draws from it along the first dimension.
        y: observations.
        num_draws: S, for distributions that have to be sampled.

    Returns:
        Values in [0, 1], uniform if the predictions are calibrated.

    Raises:
        ValueError: if shapes differ, or there are no draws.
        TypeError: if `predictive` is neither a distribution nor a tensor, or y no tensor.
    """
    check_tensor("pit", "y", y)
    check_int("pit", "num_draws", num_draws, 1)
    if isinstance(predictive, Distribution):
        shape = predictive.batch_shape + predictive.event_shape
        if y.shape != shape or y.dtype == torch.bool:
            actual = f"{y.dtype} of shape {tuple(y.shape)}"
            fail("pit", "y", f"to be numbers of the shape of one draw {tuple(shape)}", actual, "Reshape one of them.")
        if not (getattr(predictive.support, "is_discrete", False) or getattr(predictive, "has_atoms", False)):
            try:
                return predictive.cdf(y)
            except NotImplementedError:
                pass
        predictive = predictive.sample((num_draws,))
    if not isinstance(predictive, Tensor):
        expectation, cure = "to be a distribution, or a tensor of draws", "Pass gp.predict(x_new)."
        fail("pit", "predictive", expectation, type(predictive).__name__, cure, TypeError)
    check_tensor("pit", "predictive", predictive)
    if predictive.dim() == 0 or len(predictive) < 1 or predictive.shape[1:] != y.shape:
        expectation = f"of shape (S, *{tuple(y.shape)}) with S >= 1"
        fail("pit", "draws", expectation, tuple(predictive.shape), "Draws come first; nothing is broadcast.")
    below, ties = (predictive < y).sum(0), (predictive == y).sum(0)
    return (below + (1 + ties) * torch.rand(y.shape, device=y.device)) / (len(predictive) + 1)


def uniformity(values: Float[Tensor, "..."], num_bins: int = 20) -> float:
    """P-value of the chi-squared test that independent values are uniform on (0, 1).

    Args:
        values: transforms of :func:`pit`, or ranks of one entry of a site of :func:`sbc_ranks`.
        num_bins: bins of equal width.

    Raises:
        ValueError: for fewer than five values per bin.
    """
    _check_transforms("uniformity", values)
    check_int("uniformity", "num_bins", num_bins, 2)
    if values.numel() < 5 * num_bins:
        fail("uniformity", "values", f"to be >= {5 * num_bins} for {num_bins} bins", values.numel(), "Use fewer bins.")
    counts = torch.histc(values.detach().cpu().double(), num_bins, 0, 1)
    from scipy import stats  # takes a second to import

    return float(stats.chisquare(counts.numpy()).pvalue)


def symmetry(values: Float[Tensor, "..."]) -> float:
    """P-value of Wilcoxon's signed-rank test that independent values are symmetric about 1/2.

    It detects bias, but not a width that is wrong in the same way on both sides.

    Args:
        values: as in :func:`uniformity`.
    """
    _check_transforms("symmetry", values)
    from scipy import stats

    return float(stats.wilcoxon((values.detach().cpu().double() - 0.5).flatten().numpy()).pvalue)


def coverage_curve(values: Float[Tensor, "..."], levels: Float[Tensor, " L"]) -> Float[Tensor, " L"]:
    """Fraction of observations in the central prediction intervals of some levels.

    Args:
        values: transforms of :func:`pit`.
        levels: probabilities of the intervals, in [0, 1].

    Returns:
        The fraction for each level; equal to it, up to sampling error, if the predictions are calibrated.
    """
    _check_transforms("coverage_curve", values)
    check_tensor("coverage_curve", "levels", levels)
    if levels.dim() != 1 or not levels.is_floating_point() or not bool(((levels >= 0) & (levels <= 1)).all()):
        actual = f"{levels.dtype} of shape {tuple(levels.shape)}"
        fail("coverage_curve", "levels", "to be a vector of numbers in [0, 1]", actual, "Give probabilities.")
    return (2 * (values - 0.5).abs().flatten() <= levels[:, None]).to(levels.dtype).mean(-1)


class Reliability(NamedTuple):
    """Predicted probabilities and observed frequencies, in bins that are not empty.

    Attributes:
        predicted: mean predicted probability.
        observed: observed frequency.
        number: number of predictions.
    """

    predicted: Float[Tensor, " J"]
    observed: Float[Tensor, " J"]
    number: Float[Tensor, " J"]

    @property
    def error(self) -> float:
        """Expected calibration error: the mean over predictions of the distance between observed and predicted."""
        return float((self.number * (self.observed - self.predicted).abs()).sum() / self.number.sum())


def reliability(
    prob: Float[Tensor, " N"] | Float[Tensor, "N C"], y: Shaped[Tensor, " N"], num_bins: int = 10
) -> Reliability:
    """Compare predicted probabilities with frequencies, in bins of equal width.

    Args:
        prob: probabilities of label 1, or of each of C classes, of which only the largest is used.
        y: labels: 0 or 1, or 0..C-1.
        num_bins: number of bins.

    Raises:
        ValueError: if shapes differ, a probability is outside [0, 1], or a label outside its range.
    """
    check_int("reliability", "num_bins", num_bins, 1)
    check_memory("reliability", "bins", 3 * num_bins, torch.get_default_dtype())
    check_tensor("reliability", "prob", prob)
    check_tensor("reliability", "y", y)
    if prob.dim() not in (1, 2) or not prob.is_floating_point() or y.shape != prob.shape[:1] or not len(y):
        shapes = (tuple(prob.shape), tuple(y.shape))
        fail("reliability", "prob, y", "of shapes (N,), (N,) or (N, C), (N,)", shapes, "One label per row of prob.")
    if not bool(((prob >= 0) & (prob <= 1)).all()):
        fail("reliability", "prob", "in [0, 1]", f"{float(prob.min())}..{float(prob.max())}", "Pass probabilities.")
    check_labels("reliability", y, 2 if prob.dim() == 1 else prob.shape[1])
    label = torch.ones_like(y) if prob.dim() == 1 else prob.argmax(-1)
    prob = prob if prob.dim() == 1 else prob.amax(-1)
    bins = (prob * num_bins).long().clamp(max=num_bins - 1)
    sums = prob.new_zeros(3, num_bins)
    sums.index_add_(1, bins, torch.stack([prob, (label == y).to(prob.dtype), torch.ones_like(prob)]))
    predicted, observed, number = sums[:, sums[2] > 0]
    return Reliability(predicted / number, observed / number, number)


def _check_transforms(where: str, values: Any) -> None:
    check_tensor(where, "values", values)
    if not values.numel() or not values.is_floating_point() or not bool(((values >= 0) & (values <= 1)).all()):
        actual = f"{values.dtype} of shape {tuple(values.shape)}"
        fail(where, "values", "to be numbers in [0, 1], at least one", actual, "Pass what pit or sbc_ranks returns.")


def pareto_shape(log_weights: Float[Tensor, " S"]) -> float:
    """Pareto shape of the largest weights; their number follows Vehtari, Simpson, Gelman, Yao and Gabry (2024)."""
    ordered = (log_weights - log_weights.max()).sort().values
    if ordered[0] > -_EQUAL:
        return -math.inf
    size = math.ceil(min(len(ordered) / 5, 3 * math.sqrt(len(ordered))))
    cutoff = ordered[-size - 1].clamp(min=math.log(torch.finfo(ordered.dtype).tiny))
    tail = ordered[ordered > cutoff]
    return float(fit_generalized_pareto(tail.exp() - cutoff.exp())[0]) if len(tail) > 4 else math.inf
