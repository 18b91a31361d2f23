r"""Warnings of data that a model accepts, but that are hardly meant.

1. Outputs in different units that share a kernel and a noise: both fit the largest, whose intervals all others get.
2. An offset that is not on the scale of the link, such as an exposure in place of its logarithm.
3. Targets that are all the same: nothing can be learned from them, and predictions are certain everywhere.
4. A prior of the kernel's variance for data in other units: the function is explained away as noise.
5. Rows that come more than once, such as in a bootstrap sample: noise is learned from them, and goes to zero. Where a
   few rows come very often, as in tables of few distinct objects, new rows are likely to be among them, and the copies
   tell of these: with all copies, held-out NLLs of keggdirected are lower by .9 to 1.4.
6. A code for missing values, such as -9999, or a value in other units: a Gaussian process follows it.
7. A level so far from zero that float32 keeps little of what y does about it.

Cost: O(N (D + T)), and sorts of the offset, of y and of a number for each row.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyro_nngp._checks import warn
from pyro_nngp.kernels import Kernel
from pyro_nngp.likelihoods import Likelihood, LogNormal, PerOutput
from pyro_nngp.means import BasisMean

_RATIO = 3.0  # of spreads of outputs
_SPAN = 20.0  # of an offset, on the scale of a logarithm or logit
_LOW = 0.05  # share of smallest offsets that do not count, such as logarithms of almost no exposure
_ENOUGH = 10  # rows
_COPIES = 0.25  # share of rows; .37 in a bootstrap, .15 and less on 27 sets with real targets, but for keggdirected
_GAP, _CODES = 20.0, 0.05  # between y and codes, in spreads of y and as more than half of its range; their share
_STEPS = 200.0  # steps of the dtype within a spread of y, at least
_PRIOR = 100.0  # variance of f in the data over the median of its prior, which is 1 / 20 for lognormal_priors


def warn_of_spreads(where: str, spread: Float[Tensor, " T"]) -> None:
    """Warn if outputs that share the variance of one kernel differ in spread.

    Args:
        where: name of the caller.
        spread: spread of f of each output; 0 leaves an output out.
    """
    positive = spread[spread > 0]
    if len(positive) == 0 or float(positive.max()) <= _RATIO * float(positive.min()):
        return
    warn(
        f"{where}: outputs have spreads of {_listed(spread.tolist())}, but share the variance of one kernel and one "
        "noise, so that intervals are too wide for some outputs and too narrow for others. Take LMC, or one "
        f"{where} per output, or standardize the columns of y."
    )


def warn_of_offset(
    where: str, offset: Float[Tensor, "N *L"], y: Tensor, likelihood: Likelihood, latents: tuple[int, ...]
) -> None:
    """Warn if an offset of the logarithm or logit of something spreads too far to be on that scale.

    Args:
        where: name of the caller.
        offset: known part of f at each row.
        y: targets.
        likelihood: likelihood of the targets.
        latents: shape of the latent functions.
    """
    columns = offset.reshape(len(offset), -1).expand(-1, *(latents or (1,)))
    parts = likelihood.outputs if isinstance(likelihood, PerOutput) else [likelihood] * columns.shape[1]
    on_link = [_exponentiates(part, y) for part in parts]
    if not any(on_link):
        return
    columns = columns[:, torch.tensor(on_link)].detach().double()
    low, high = columns.sort(0).values[int(_LOW * len(columns))], columns.amax(0)
    worst = int((high - low).argmax())
    if float(high[worst] - low[worst]) <= _SPAN:
        return
    warn(
        f"{where}: offset has values of {float(low[worst]):.3g} to {float(high[worst]):.3g}. It is added to f, on the "
        f"scale of the link, where a step of {_SPAN:g} is a factor of {torch.tensor(_SPAN).exp():.0e} in the mean or "
        "the odds; did you mean offset=exposure.log()?"
    )


def constant_outputs(y: Tensor) -> list[bool]:
    """Whether each column of targets, (N,) or (N, T) with NaN where missing, holds only one value."""
    columns = y.detach().reshape(len(y), -1)
    if not columns.is_floating_point():
        return (columns == columns[:1]).all(0).tolist()
    low, high = columns.nan_to_num(torch.inf).amin(0), columns.nan_to_num(-torch.inf).amax(0)
    return (low >= high).tolist()


def warn_of_constants(where: str, y: Tensor, constant: Sequence[bool], mean: Any) -> None:
    """Warn of targets that are all the same, in some of the outputs, and of others that do not bound the level of f.

    Args:
        where: name of the caller.
        y: targets.
        constant: whether each column is constant, from :func:`constant_outputs`.
        mean: the mean function, whose levels are held where data do not bound them.
    """
    held = list(mean.held) if isinstance(mean, BasisMean) else []
    if len(y) < _ENOUGH or not any([*constant, *held]):
        return
    levels = ", ".join(f"{level:.3g}" for level in mean.value.reshape(-1)[held].tolist()) if any(held) else ""
    if not any(constant):
        which = "" if len(held) == 1 else f" of functions {[i for i, each in enumerate(held) if each]}"
        warn(
            f"{where}: the data are the more likely, the further the level of f{which} is from 0. It is held at "
            f"{levels}, and predictions there are near certain. Look for a filter, a lost class, or limits that all "
            "data are beyond."
        )
        return
    which = "" if y.dim() == 1 else f" of columns {[i for i, same in enumerate(constant) if same]}"
    column = y.reshape(len(y), -1)[:, list(constant).index(True)]
    value = float(column[~column.isnan()][0]) + 0.0
    hold = f" The level of f, which such data do not bound, is held at {levels}." if levels else ""
    warn(
        f"{where}: y is {value:g} in all rows{which}. Nothing can be learned from that: predictions will be this "
        f"value, with certainty, far from the data too.{hold} Look for a wrong column, a filter or a lost class."
    )


def warn_of_prior_variance(where: str, parts: Iterable[nn.Module], spread: Tensor) -> None:
    """Warn if the variances of all kernels have priors far below the variance of f in the data.

    Args:
        where: name of the caller.
        parts: modules, with hyperparameters that have priors at their medians.
        spread: spread of f in the data.
    """
    kernels = [part for part in parts if isinstance(part, Kernel)]
    if any("variance" in kernel._pyro_params for kernel in kernels):
        return
    medians = [float(kernel.variance.max()) for kernel in kernels if "variance" in kernel._pyro_samples]
    variance = float(spread.max()) ** 2
    if not medians or variance <= _PRIOR * max(medians):
        return
    warn(
        f"{where}: the prior of the kernel's variance has a median of about {max(medians):.1g}, and the variance of f "
        f"in the data is about {variance:.3g}, so that sampling may take the function for noise. Standardize y, or set "
        f'the median: lognormal_priors(kernel, {{"variance": {variance:.2g}}}).'
    )


def warn_of_copies(where: str, x: Float[Tensor, "N D"], y: Float[Tensor, "N *T"]) -> None:
    """Warn if many rows are exact copies of others, x and y, and none comes far more often than others.

    The numbers of times that rows come then vary no more than in a Poisson distribution: their variance is .4
    times their mean in a bootstrap, 6 to 300 times in keggdirected and keggundirected.

    Args:
        where: name of the caller.
        x: inputs.
        y: real targets, NaN where they are missing.
    """
    if len(y) < _ENOUGH:
        return
    columns = [*x.detach().unbind(-1), *y.detach().reshape(len(y), -1).unbind(-1)]
    generator = torch.Generator().manual_seed(0)
    factors = torch.rand(len(columns), dtype=torch.float64, generator=generator, device="cpu").tolist()
    marks = sum(column.double() * factor for column, factor in zip(columns, factors, strict=True))
    marks = torch.as_tensor(marks).sort().values  # equal for equal rows, and for hardly any others
    times = torch.unique_consecutive(marks, return_counts=True)[1].double()
    share = 1 - len(times) / len(y)
    if share <= _COPIES or float(times.var(correction=0)) > float(times.mean()):
        return
    warn(
        f"{where}: {share:.0%} of the rows are exact copies of others, in x and y, as in a bootstrap. They say that a "
        "value comes back without error: noise goes to zero, and predictions elsewhere are too sure, or wrong. Drop "
        "copies; where they are to count more, keep one of each and pass weights=."
    )


def warn_of_codes(where: str, y: Float[Tensor, "N *T"]) -> None:
    """Warn of a few targets that lie far away from all others, as codes of missing values do.

    Args:
        where: name of the caller.
        y: targets of Gaussian noise, NaN where they are missing.
    """
    for column in y.detach().double().reshape(len(y), -1).unbind(-1):
        values = column[~column.isnan()].sort().values
        if len(values) < _ENOUGH:
            continue
        most, gaps = max(1, int(_CODES * len(values))), values.diff()
        low, high = int(gaps[:most].argmax()), len(gaps) - most + int(gaps[-most:].argmax())
        at = low if gaps[low] > gaps[high] else high
        spread = float(values[(3 * len(values)) // 4] - values[len(values) // 4]) / 1.349
        if not spread or gaps[at] <= max(_GAP * spread, 0.5 * float(values[-1] - values[0])):
            continue
        few = values[: at + 1] if at == low else values[at + 1 :]
        shown = f"{float(few[0]):g}" if few[0] == few[-1] else f"{float(few[0]):g} to {float(few[-1]):g}"
        warn(
            f"{where}: {len(few)} of {len(values)} values of y are {shown}, {float(gaps[at]) / spread:.3g} standard "
            "deviations away from all others. A Gaussian process follows them. Set a code of missing values to NaN, "
            "correct a slip of units, or take likelihood=StudentT() for outliers."
        )
        return


def warn_of_coarse_targets(where: str, y: Float[Tensor, "N *T"]) -> None:
    """Warn if the dtype barely resolves the spread of the targets about their level, as in 1e6 +- 1 in float32.

    Args:
        where: name of the caller.
        y: real targets, NaN where they are missing.
    """
    for column in y.detach().reshape(len(y), -1).unbind(-1):
        values = column[~column.isnan()].double()
        if len(values) < _ENOUGH:
            continue
        step, spread = torch.finfo(y.dtype).eps * float(values.abs().amax()), float(values.std())
        if values.amin() < values.amax() and spread < _STEPS * step:
            warn(
                f"{where}: y is {float(values.mean()):.6g} +- {spread:.2g}, of which {y.dtype} keeps steps of "
                f"{step:.2g}: predictions lose as much. Subtract the mean before the conversion, or pass float64."
            )
            return


def _exponentiates(likelihood: Likelihood, y: Tensor) -> bool:
    """Whether f is a logarithm or a logit; not with an identity or softplus link."""
    if any(getattr(part, "link", None) == "softplus" for part in likelihood.modules()):
        return False
    if any(isinstance(part, LogNormal) for part in likelihood.modules()):
        return True
    known = likelihood.observations(y.double())
    return known is None or known.noise is not None


def _listed(values: Sequence[float]) -> str:
    """Numbers for a message, the middle ones left out where there are many."""
    shown = [f"{value:.3g}" for value in values]
    shown = shown if len(shown) <= 6 else [*shown[:3], "...", *shown[-2:]]
    return ", ".join(shown[:-1]) + f" and {shown[-1]}"
