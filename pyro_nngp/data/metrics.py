r"""Scores of predictions: errors, proper scoring rules, intervals, classification.

Every score takes the observed `y` first and returns one scalar, the mean over all points; lower is better but for
`coverage` (nominal is best) and `auc` (higher is better). Shapes must agree exactly: nothing is broadcast, because
`(N,)` against `(N, 1)` would silently compare every pair.

References:
    Gneiting and Raftery (2007), "Strictly proper scoring rules, prediction, and estimation": CRPS in eq. (20) and (21),
    interval score in eq. (43), Brier score in section 3.

Cost: O(N), but O(S N log S) for `crps_sample` with S draws and O(N log N) for `auc`.
Symbols: y observation, loc predictive mean, scale predictive standard deviation, Phi and phi the standard normal
distribution function and density.
"""

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import check_fraction, check_same_kind, check_tensor, fail


def rmse(y: Float[Tensor, "*N"], loc: Float[Tensor, "*N"]) -> Float[Tensor, ""]:
    r"""Root mean squared error, :math:`\sqrt{\frac1N \sum_i (y_i - m_i)^2}`.

    Args:
        y: observations, any shape.
        loc: point predictions, the shape of `y`.

    Raises:
        ValueError: if shapes differ or there is no point.
    """
    _check_real("rmse", y=y, loc=loc)
    return (y - loc).square().mean().sqrt()


def nll(y: Shaped[Tensor, "*N"], predictive: Distribution) -> Float[Tensor, ""]:
    r"""Negative log predictive density, :math:`-\frac1N \sum_i \log p(y_i)`.

    Args:
        y: observations, of shape `predictive.batch_shape + predictive.event_shape`.
        predictive: a distribution over `y`; a mean is taken over its batch, a joint one counts whole.

    Raises:
        ValueError: if the shape of `y` is not the shape of one draw, or there is no point.
    """
    _check("nll", y=y)
    if not isinstance(predictive, Distribution):
        cure = "Pass gp.predict(x_new)."
        fail("nll", "predictive", "to be a Distribution", type(predictive).__name__, cure, TypeError)
    shape = predictive.batch_shape + predictive.event_shape
    if y.shape != shape:
        fail("nll", "y", f"of the shape of one draw {tuple(shape)}", tuple(y.shape), "Reshape one of them.")
    if y.dtype == torch.bool:
        fail("nll", "y", "of a numeric dtype", y.dtype, "Call .float() on it.", TypeError)
    return -predictive.log_prob(y).mean()


def crps_gaussian(y: Float[Tensor, "*N"], loc: Float[Tensor, "*N"], scale: Float[Tensor, "*N"]) -> Float[Tensor, ""]:
    r"""Continuous ranked probability score of normal predictions, in the units of `y`.

    With :math:`z = (y - m)/s`, the mean of :math:`s\,\{z\,(2\Phi(z) - 1) + 2\varphi(z) - \pi^{-1/2}\}`.

    Args:
        y: observations, any shape.
        loc: predictive means, the shape of `y`.
        scale: predictive standard deviations of the observations, positive, the shape of `y`.

    Raises:
        ValueError: if shapes differ, there is no point, or a scale is not positive.
    """
    _check_real("crps_gaussian", y=y, loc=loc, scale=scale)
    if not bool((scale > 0).all()):
        fail("crps_gaussian", "scale", "to be positive", float(scale.min()), "Pass standard deviations.")
    return crps_gaussian_by_row(y, loc, scale).mean()


def crps_gaussian_by_row(y: Float[Tensor, "*N"], loc: Float[Tensor, "*N"], scale: Float[Tensor, "*N"]) -> Tensor:
    """The terms of :func:`crps_gaussian`, of the shape of y."""
    z = (y - loc) / scale
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return scale * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))


def crps_sample(y: Float[Tensor, "*N"], draws: Float[Tensor, "S *N"]) -> Float[Tensor, ""]:
    r"""Continuous ranked probability score from predictive draws, in the units of `y`.

    The mean over points of :math:`\frac1S\sum_s|x_s - y| - \frac{1}{2S(S-1)}\sum_{s,t}|x_s - x_t|`, the fair form: for
    independent draws its expectation is the score of the distribution they come from, whatever their number. The double
    sum is read off the sorted draws as :math:`2\sum_k (2k - S - 1)\,x_{(k)}`.

    Args:
        y: observations, any shape.
        draws: at least two independent draws from the prediction along the first dimension.

    Raises:
        ValueError: if shapes differ, there is no point, or fewer than two draws are given.
    """
    check_tensor("crps_sample", "draws", draws)
    if draws.dim() == 0 or draws.shape[0] < 2:
        fail("crps_sample", "draws", "of shape (S, *y.shape) with S >= 2", tuple(draws.shape), "Draw more samples.")
    _check_real("crps_sample", y=y, **{"draws[0]": draws[0]})
    return crps_sample_by_row(y, draws).mean()


def crps_sample_by_row(y: Float[Tensor, "*N"], draws: Float[Tensor, "S *N"]) -> Float[Tensor, "*N"]:
    """The terms of :func:`crps_sample`, of the shape of y."""
    num_draws = draws.shape[0]
    # Centered on the observation, so that large offsets do not cancel in the weighted sum.
    ordered = (draws - y).sort(dim=0).values
    weight = 2 * torch.arange(1, num_draws + 1, dtype=y.dtype, device=y.device) - num_draws - 1
    spread = torch.tensordot(weight, ordered, dims=1) / (num_draws * (num_draws - 1))
    return ordered.abs().mean(0) - spread


def gaussian_interval(
    loc: Float[Tensor, "*N"], scale: Float[Tensor, "*N"], alpha: float = 0.05
) -> tuple[Float[Tensor, "*N"], Float[Tensor, "*N"]]:
    r"""Central interval of normal predictions, :math:`m \pm s\,\Phi^{-1}(1 - \alpha/2)`.

    Args:
        loc: predictive means, any shape.
        scale: predictive standard deviations, the shape of `loc`.
        alpha: probability outside the interval, in (0, 1).

    Returns:
        Lower and upper ends, the shape of `loc`.

    Raises:
        ValueError: if shapes differ, there is no point, or alpha lies outside (0, 1).
    """
    check_fraction("gaussian_interval", "alpha", alpha, "Use 0.05 for 95 % intervals.")
    _check_real("gaussian_interval", loc=loc, scale=scale)
    half = scale * torch.special.ndtri(loc.new_tensor(1 - alpha / 2))
    return loc - half, loc + half


def interval_score(
    y: Float[Tensor, "*N"], lower: Float[Tensor, "*N"], upper: Float[Tensor, "*N"], alpha: float = 0.05
) -> Float[Tensor, ""]:
    r"""Score of central intervals, the mean of :math:`(u-l) + \frac2\alpha(l-y)_+ + \frac2\alpha(y-u)_+`.

    Args:
        y: observations, any shape.
        lower: lower ends, the shape of `y`.
        upper: upper ends, the shape of `y`, not below `lower`.
        alpha: probability that the intervals leave outside, in (0, 1).

    Raises:
        ValueError: if shapes differ, there is no point, a value is NaN, alpha is outside (0, 1), or an upper end is
            below `lower`.
    """
    check_fraction("interval_score", "alpha", alpha, "Use 0.05 for 95 % intervals.")
    _check_interval("interval_score", y, lower, upper)
    outside = (lower - y).clamp(min=0) + (y - upper).clamp(min=0)
    return (upper - lower + 2 / alpha * outside).mean()


def coverage(y: Float[Tensor, "*N"], lower: Float[Tensor, "*N"], upper: Float[Tensor, "*N"]) -> Float[Tensor, ""]:
    """Share of observations inside their closed intervals.

    Args:
        y: observations, any shape.
        lower: lower ends, the shape of `y`.
        upper: upper ends, the shape of `y`, not below `lower`.

    Raises:
        ValueError: if shapes differ, there is no point, a value is NaN, or an upper end is below `lower`.
    """
    _check_interval("coverage", y, lower, upper)
    return ((lower <= y) & (y <= upper)).to(y.dtype).mean()


def error_rate(y: Shaped[Tensor, "*N"], label: Shaped[Tensor, "*N"]) -> Float[Tensor, ""]:
    """Share of wrongly predicted labels.

    Args:
        y: observed labels, any shape.
        label: predicted labels, the shape of `y`.

    Raises:
        ValueError: if shapes differ, there is no point, or a label is NaN.
    """
    _check("error_rate", y=y, label=label)
    _check_known("error_rate", y=y, label=label)
    return (y != label).to(torch.get_default_dtype()).mean()


def auc(y: Shaped[Tensor, "*N"], score: Float[Tensor, "*N"]) -> Float[Tensor, ""]:
    """Area under the ROC curve: the chance that a positive outscores a negative, ties counting one half.

    Args:
        y: observed labels, 0 or 1 (or booleans), any shape.
        score: any increasing function of the predicted probability of label 1, the shape of `y`.

    Raises:
        ValueError: if shapes differ, a label is neither 0 nor 1, or one of the two classes is absent.
    """
    _check("auc", y=y, score=score)
    check_labels("auc", y, 2)
    _check_known("auc", score=score)
    positive = y.bool()
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if num_positive == 0 or num_negative == 0:
        fail("auc", "y", "to hold both labels", f"{num_positive} ones in {y.numel()}", "One class has no such area.")
    _, group, count = torch.unique(score, return_inverse=True, return_counts=True)
    twice_rank = (2 * count.cumsum(0) - count + 1)[group]  # a group of ties shares the mean of its ranks in 1..N
    twice_wins = twice_rank[positive].sum() - num_positive * (num_positive + 1)
    return twice_wins.to(score.dtype) / (2 * num_positive * num_negative)


def brier(y: Shaped[Tensor, " N"], prob: Float[Tensor, " N"] | Float[Tensor, "N C"]) -> Float[Tensor, ""]:
    r"""Brier score: the mean of :math:`(p - y)^2`, or of :math:`\sum_c (p_c - 1[y = c])^2` for C classes.

    For two classes the second form is twice the first.

    Args:
        y: observed labels, shape (N,): 0 or 1 (or booleans) with `prob` of shape (N,), else integers in 0..C-1.
        prob: predicted probabilities of label 1, shape (N,), or of each class, shape (N, C).

    Raises:
        ValueError: if the shapes do not match as above, there is no point, or a label is outside its range.
    """
    check_tensor("brier", "prob", prob)
    if prob.dim() != 2:
        _check("brier", y=y, prob=prob)
        check_labels("brier", y, 2)
        _check_probabilities("brier", prob)
        return (prob - y.to(prob.dtype)).square().mean()
    _check("brier", y=y, **{"prob[:, 0]": prob[:, 0]})
    _check_probabilities("brier", prob)
    check_labels("brier", y, prob.shape[1])
    return (prob - torch.nn.functional.one_hot(y.long(), prob.shape[1])).square().sum(-1).mean()


def check_labels(where: str, y: Tensor, num_labels: int) -> None:
    """Raise ``ValueError`` unless y holds labels 0, 1, ..."""
    if not bool(((y >= 0) & (y < num_labels) & (y == y.long())).all()):
        fail(where, "y", f"to hold labels in 0..{num_labels - 1}", sorted(set(y.tolist()))[:5], "Recode the labels.")


def _check(where: str, **tensors: Tensor) -> None:
    """Raise unless all tensors have one shape, with a point in it, one device and one floating-point dtype."""
    (first, ref), *rest = tensors.items()
    for arg, value in tensors.items():
        check_tensor(where, arg, value)
    if ref.numel() == 0:
        fail(where, first, "to hold at least one point", f"shape {tuple(ref.shape)}", "Check the test mask.")
    for arg, value in rest:
        if value.shape != ref.shape:
            cure = "Nothing is broadcast: squeeze or reshape one of them."
            fail(where, arg, f"of the shape of {first} {tuple(ref.shape)}", tuple(value.shape), cure)
    check_same_kind(where, **tensors)


def _check_real(where: str, **tensors: Tensor) -> None:
    """Raise unless the tensors pass `_check` and are floating-point."""
    _check(where, **tensors)
    for arg, value in tensors.items():
        if not value.is_floating_point():
            fail(where, arg, "of a floating-point dtype", value.dtype, "Call .float() or .double() on it.", TypeError)


def _check_known(where: str, **tensors: Tensor) -> None:
    """Raise if a value is NaN, which would count as a miss; infinite values are ordered and allowed."""
    for arg, value in tensors.items():
        if missing := int(value.isnan().sum()):
            fail(where, arg, "to be known", f"{missing} NaN", "Drop or impute them first.")


def _check_interval(where: str, y: Tensor, lower: Tensor, upper: Tensor) -> None:
    _check_real(where, y=y, lower=lower, upper=upper)
    _check_known(where, y=y, lower=lower, upper=upper)
    if bool((upper < lower).any()):
        fail(where, "upper", "not below lower", f"{int((upper < lower).sum())} such points", "Swap the two ends.")


def _check_probabilities(where: str, prob: Tensor) -> None:
    real = prob.is_floating_point()
    rounding = 8 * torch.finfo(prob.dtype).eps if real else 0.0
    if not real or not bool(((prob >= -rounding) & (prob <= 1 + rounding)).all()):
        actual = f"{float(prob.min()):g}..{float(prob.max()):g} of {prob.dtype}"
        fail(where, "prob", "to be numbers in [0, 1]", actual, "Pass probabilities.")
