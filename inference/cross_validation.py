r"""Cross-validation: scores of the predictions of each fold of the rows from all others.

With the rows of fold k left out, :math:`p_i = p(y_i \mid y_{-k}, \theta)` for i in k, the scores are

.. math:: \mathrm{NLL} = -\tfrac1N \textstyle\sum_i \log p_i(y_i), \quad
   \mathrm{CRPS} = \tfrac1N \sum_i \int (F_i(t) - 1[t \ge y_i])^2 dt, \quad
   \mathrm{RMSE}^2 = \tfrac1N \sum_i (y_i - E_i y)^2

and the share of :math:`y_i` inside the central 95 % intervals of :math:`p_i`; of labels NLL, Brier score and the share
of wrong ones. A score s that is a mean of :math:`s_i` has the standard error by folds

.. math:: \frac1N \Big( \frac{F}{F - 1} \sum_k \big( \textstyle\sum_{i \in k} (s_i - s) \big)^2 \Big)^{1/2},

RMSE the error of its linearization. Rows of a fold depend on each other, which this takes account of; folds that share
training rows are correlated, too, for which no unbiased estimate exists (Bengio and Grandvalet 2004).

Cost: F times :meth:`~pyro_nngp.models.base.Method.subset`, which includes a solution for q, and predictions
at N / F points. Symbols: N rows, F folds, T outputs, P rows of a fold, S draws.

Reference: Roberts et al. (2017), "Cross-validation strategies for data with temporal, spatial, hierarchical, or
phylogenetic structure", Ecography; Bengio, Grandvalet (2004), "No unbiased estimator of the variance of K-fold
cross-validation", JMLR.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, Normal
from tqdm.auto import tqdm

from pyro_nngp._checks import fail, import_extra
from pyro_nngp._kinds import check_flags
from pyro_nngp._random import seeded
from pyro_nngp.data.folds import assign_folds
from pyro_nngp.data.metrics import crps_gaussian_by_row, crps_sample_by_row
from pyro_nngp.distributions.outputs import missing_values
from pyro_nngp.distributions.partly_observed import PartlyObservedNormal
from pyro_nngp.inference.svi.loop import fit
from pyro_nngp.likelihoods import Bernoulli, Categorical, IntervalCensored, Multinomial

if TYPE_CHECKING:
    from pandas import DataFrame

_LEVELS = 0.025, 0.975
_DRAWS, _ENTRIES = (200, 2_000), 2**24  # fewest and most draws of predictions without formulas; entries at once


class Score(NamedTuple):
    """A score and its standard error, () or (T,)."""

    value: Float[Tensor, " *T"]
    standard_error: Float[Tensor, " *T"]


@dataclass(frozen=True)
class CrossValidation:
    """Predictions of each row from the rows of other folds, and their scores.

    Attributes:
        fold: the fold of each row, 0..F-1.
        by_row: scores of each row, NaN where y is missing: ``nll``, ``crps``, ``squared_error`` and ``covered``, of
            labels ``nll``, ``brier`` and ``error``.
        mean, sd: moments of the predictive distribution of each row; None for labels.
        x, y: the data.
        weights: of the rows; the scores are weighted means.
        columns, outputs: names of the columns of x and of the outputs.
        refitted: whether hyperparameters were trained on the other folds.
    """

    fold: Int[Tensor, " N"]
    by_row: Mapping[str, Float[Tensor, "N ..."]]
    mean: Float[Tensor, "N ..."] | None
    sd: Float[Tensor, "N ..."] | None
    x: Float[Tensor, "N D"]
    y: Tensor
    weights: Float[Tensor, " N"]
    columns: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    refitted: bool = False

    @property
    def num_folds(self) -> int:
        """F."""
        return int(self.fold.max()) + 1

    @property
    def scores(self) -> dict[str, Score]:
        """Each score with its standard error: ``nll``, ``crps``, ``rmse`` and ``coverage``, or the scores of labels."""
        return {name: Score(value, self._error(parts)) for name, (value, parts) in self._parts().items()}

    def difference(self, other: "CrossValidation") -> dict[str, Score]:
        """These scores less the scores of another model on the same folds, row by row.

        The standard errors belong to the differences, and are much smaller than the errors of the scores themselves,
        since both models err at the same rows.

        Raises:
            ValueError, TypeError: unless the other has the same rows, folds and kinds of scores.
        """
        where = "CrossValidation.difference"
        if not isinstance(other, CrossValidation):
            cure = "Pass what cross_validate returned for another model."
            fail(where, "other", "to be a CrossValidation", type(other).__name__, cure, TypeError)
        if not torch.equal(self.fold, other.fold):
            cure = "Pass the same folds, blocks or groups, and seed, or folds=first.fold."
            fail(where, "other", "with the folds of this one", "others", cure)
        mine, theirs = self._parts(), other._parts()
        if mine.keys() != theirs.keys():
            fail(where, "other", f"with the scores {', '.join(mine)}", ", ".join(theirs), "Compare models of one kind.")
        results = {}
        for name, (value, parts) in mine.items():
            its_value, its_parts = theirs[name]
            results[name] = Score(value - its_value, self._error(parts - its_parts))
        return results

    def to_frame(self) -> "DataFrame":
        """A frame with a row for each score, and output, and the columns ``score`` and ``standard_error``."""
        pandas = import_extra("CrossValidation.to_frame", "pandas", "maps")
        rows = [row for name, score in self.scores.items() for row in self._rows(name, score)]
        return pandas.DataFrame(rows, columns=["name", "score", "standard_error"]).set_index("name")

    def by_fold(self) -> "DataFrame":
        """A frame with a row for each fold: its number of rows, and each score, averaged over outputs."""
        pandas = import_extra("CrossValidation.by_fold", "pandas", "maps")
        folds = []
        for k in range(self.num_folds):
            held = self.fold == k
            parts = _linearized({name: values[held] for name, values in self.by_row.items()}, self.weights[held])
            folds.append({"rows": int(held.sum()), **{name: float(value.mean()) for name, (value, _) in parts.items()}})
        return pandas.DataFrame(folds).rename_axis("fold")

    def __str__(self) -> str:
        how = "refitted for each" if self.refitted else "hyperparameters kept"
        lines = [f"CrossValidation of {len(self.fold)} rows in {self.num_folds} folds, {how}"]
        for name, score in self.scores.items():
            lines += [f"  {label:<12} {value:>10.4g} +- {error:.2g}" for label, value, error in self._rows(name, score)]
        return "\n".join(lines)

    __repr__ = __str__

    def _rows(self, name: str, score: Score) -> list[tuple[str, float, float]]:
        value, error = (torch.atleast_1d(part) for part in score)
        count = len(value)
        names = self.outputs if self.outputs is not None and len(self.outputs) == count else range(count)
        labels = [name] if score.value.dim() == 0 else [f"{name}[{output}]" for output in names]
        return list(zip(labels, value.tolist(), error.tolist(), strict=True))

    def _parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        return _linearized(self.by_row, self.weights)

    def _error(self, parts: Float[Tensor, "N ..."]) -> Float[Tensor, " *T"]:
        by_fold = parts.new_zeros(self.num_folds, *parts.shape[1:]).index_add(0, self.fold, parts)
        return (by_fold.square().sum(0) * self.num_folds / (self.num_folds - 1)).sqrt()


_NAMES = {"squared_error": "rmse", "covered": "coverage"}


def _linearized(
    by_row: Mapping[str, Float[Tensor, "N ..."]], weights: Float[Tensor, " N"]
) -> dict[str, tuple[Float[Tensor, " *T"], Float[Tensor, "N *T"]]]:
    """Each score, and what each row adds to its deviation from the expected score; the sum over rows is 0."""
    results = {}
    for name, values in by_row.items():
        seen = ~values.isnan()
        share = weights.reshape(-1, *[1] * (values.dim() - 1)) * seen
        share = share / share.sum(0)
        values = values.nan_to_num()
        value = (share * values).sum(0)
        parts = share * (values - value)
        if name == "squared_error":
            value = value.sqrt()
            parts = parts / (2 * value.clamp(min=torch.finfo(value.dtype).tiny))
        results[_NAMES.get(name, name)] = value, parts
    return results


def cross_validate(
    gp: Any,
    folds: int | Sequence[int] | Int[Tensor, " N"] | None = None,
    *,
    blocks: float | Sequence[float] | None = None,
    num_blocks: int | None = None,
    groups: Any = None,
    refit: bool = False,
    num_neighbors: int | None = None,
    seed: int = 0,
    progress: bool = True,
    **training: Any,
) -> CrossValidation:
    """Scores of the predictions of each fold of the rows from all other rows.

    Hyperparameters, the level of the mean among them, are the present ones unless `refit`. Everything else that follows
    from the data follows from the other folds alone: neighbors, pseudo-observations, q(u), coefficients of the mean
    with a joint posterior. To compare models, take the same folds, and :meth:`CrossValidation.difference`.

    Args:
        gp: a trained method with a likelihood, any but ``BSGP``.
        folds: their number, or the fold of each row; None is 10, or as many as there are blocks or groups if those are
            fewer. Rows are dealt to folds at random.
        blocks: side of the blocks of a regular grid, in the units of x [km for places on the globe], or a side for each
            column, ``inf`` for those that do not count. All rows of a block are in one fold. It should be about as wide
            as the gaps that are to be predicted.
        num_blocks: number of blocks instead, each with about as many rows.
        groups: a label for each row, of any kind; all rows with one label are in one fold.
        refit: whether hyperparameters are trained on the other rows for each fold, from the present ones. It shows what
            their uncertainty costs, and takes as long as F trainings.
        num_neighbors: as in ``gp.predict``.
        seed: seed of the folds, of draws where a predictive distribution has no formula for a score, and of training.
        progress: whether a run of more than three seconds shows a progress bar.
        training: with `refit`, further arguments of :func:`~pyro_nngp.inference.fit`.

    Returns:
        Scores with standard errors, as numbers and as a frame, and all scores by row.

    Raises:
        ValueError: for malformed folds, or q(u) that only training can change, without `refit`.
        TypeError: for ``BSGP``, a method on several processes, arguments of ``fit`` without `refit`.
    """
    where = "cross_validate"
    check_flags(where, refit=refit, progress=progress)
    if getattr(gp, "likelihood", None) is None or not hasattr(gp, "subset"):
        cure = "Pass a trained method with y and a likelihood."
        fail(where, "gp", "to be a method with a likelihood", type(gp).__name__, cure, TypeError)
    if not hasattr(gp, "guide"):
        cure = "Run its inference on gp.subset(rows), and score gp.predict(x_new, samples=...)."
        fail(where, "gp", "with a guide", type(gp).__name__, cure, TypeError)
    if training and not refit:
        cure = "They are arguments of fit: pass refit=True."
        fail(where, f"{', '.join(training)}", "to be left out without refit", "values", cure, TypeError)
    if not (refit or gp.follows_rows):
        cure = "Pass refit=True, which trains for each fold."
        fail(where, "gp", "with q(u) that has an optimum in closed form, without refit", type(gp).__name__, cure)
    fold = assign_folds(where, gp.x, folds, blocks, num_blocks, groups, seed).to(gp.x.device)
    held = [(fold == k).nonzero()[:, 0] for k in range(int(fold.max()) + 1)]
    parts = []
    for number, rows in enumerate(tqdm(held, desc="cross_validate", unit="fold", delay=3, disable=not progress)):
        rest = (fold != number).nonzero()[:, 0]
        if len(rest) < 2:
            fail(where, "folds", "to leave two rows or more", len(rest), "Take more folds.")
        part = gp.subset(rest)
        if refit:
            fit(part, progress=False, seed=seed, **training)
        parts.append(_scored(gp, part, rows, num_neighbors, seed + number))
    order = torch.cat(held).argsort()
    by_row = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
    moments = by_row.pop("mean", None), by_row.pop("sd", None)
    weights = torch.ones_like(gp.x[:, 0]) if gp.weights is None else gp.weights
    return CrossValidation(fold, by_row, *moments, gp.x, gp.y, weights, gp.columns, gp.outputs, refit)


@torch.no_grad()
def _scored(gp: Any, part: Any, rows: Int[Tensor, " P"], num_neighbors: int | None, seed: int) -> dict[str, Tensor]:
    """Scores of some rows of a method by row, predicted by its part without them."""
    given = {name: getattr(gp, name) for name in ("offset", "trials", "limits")}
    given = {name: None if value is None else value[rows] for name, value in given.items()}
    with seeded(seed, gp.x):
        predictive = part.predict(gp.x[rows], num_neighbors=num_neighbors, **given)
        y = gp.rows.targets(rows)
        if isinstance(gp.likelihood, Bernoulli | Categorical | IntervalCensored):
            return _of_labels(gp, predictive, y)
        return _of_values(gp, predictive, y)


def _of_labels(gp: Any, predictive: Distribution, y: Shaped[Tensor, "*T P"]) -> dict[str, Float[Tensor, "P ..."]]:
    count = 2 if isinstance(gp.likelihood, Bernoulli) else int(gp.likelihood.support.upper_bound) + 1
    labels = torch.arange(count, device=gp.x.device).to(gp.x.dtype if y.is_floating_point() else torch.int64)
    probs = torch.stack([predictive.log_prob(label.expand(y.shape)).exp() for label in labels], -1).to(gp.x.dtype)
    hits = (y[..., None] == labels).to(probs)
    brier = (probs - hits).square().sum(-1) / (2 if count == 2 else 1)
    scores = {
        "nll": -predictive.log_prob(y),
        "brier": brier,
        "error": 1 - hits.gather(-1, probs.argmax(-1)[..., None])[..., 0],
    }
    return {name: value.movedim(-1, 0).to(gp.x.dtype) for name, value in scores.items()}


def _of_values(gp: Any, predictive: Distribution, y: Shaped[Tensor, "*T P"]) -> dict[str, Float[Tensor, "P ..."]]:
    is_joint = bool(predictive.event_shape)  # over the outputs of a row
    value, missing = (y.mT if is_joint else y), missing_values(y.mT if is_joint else y)
    if isinstance(predictive, MultivariateNormal):
        nll = -PartlyObservedNormal(predictive.loc, scale_tril=predictive.scale_tril, validate_args=False).log_prob(
            value
        )
        predictive = Normal(predictive.mean, predictive.variance.sqrt())
    else:
        nll = -predictive.log_prob(value)
    if isinstance(gp.likelihood, Multinomial):
        nll = nll.sum(0)  # the density of a row stands in the place of its first kind
    real, mean, sd = value.to(gp.x.dtype), predictive.mean, predictive.variance.sqrt()
    if isinstance(predictive, Normal):
        crps = crps_gaussian_by_row(real, mean, sd)
        low, high = (predictive.icdf(torch.full_like(mean, level)) for level in _LEVELS)
    else:
        least, most = _DRAWS
        draws = predictive.sample(torch.Size((max(least, min(most, _ENTRIES // real.numel())),))).to(real)
        crps, (low, high) = crps_sample_by_row(real, draws), _interval(draws)
    scores = {"nll": nll, "crps": crps, "squared_error": (real - mean).square()}
    scores["covered"] = ((low <= real) & (real <= high)).to(real)
    scores = {
        name: score.masked_fill(missing, torch.nan) if score.shape == missing.shape else score
        for name, score in scores.items()
    }
    scores |= {"mean": mean, "sd": sd}
    return scores if is_joint else {name: score.movedim(-1, 0) for name, score in scores.items()}


def _interval(draws: Float[Tensor, "S ..."]) -> tuple[Tensor, Tensor]:
    """Ends of the central 95 % interval, each one of the draws: counts stay counts."""
    low, high = _LEVELS
    ordered, last = draws.sort(0).values, len(draws) - 1
    return ordered[int(low * last)], ordered[-1 - int((1 - high) * last)]


__all__ = ["CrossValidation", "Score", "cross_validate"]
