r"""A second start of quasi-Newton training, where the first run ended at an edge of what few noisy data can say.

The likelihood of a few hundred rows under much noise has several maxima: f may be noise with a lengthscale below the
distances between points, noise may be absent, or f may be all but constant over the data. The first start is the best
of a grid of predictions from few neighbors (:mod:`pyro_nngp.starts.from_data`), and can lie on the wrong side. So a run
that ends at such an edge, or with more noise than f, is followed by one from the middle: lengthscales of the size of
the data, or of a quarter after a run that ended with all points alike, and half of the variance of the residuals each
for f and for noise. The parameters with the smaller loss over all rows are kept, unless they alone err far beyond what
they predict (:mod:`pyro_nngp.inference.svi.residual_check`): where targets follow from the inputs, as on bike,
leave-one-out densities grow without bound (NLL 92 after a second run that gained 3,600 nats, -2.1 after the first).
Where the two are within a nat and one alone takes f for noise, data cannot tell, and a warning says so; another does
where both leave f all but constant.

For one output of Gaussian noise with up to 2,000 rows whose lengthscales were not set, trained to convergence.

Cost: a second run.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pyro_nngp.hyperparameters.priors import has_unsolved_priors
from pyro_nngp.inference.protocols import Refreshable, Solvable, graph_of, single_output
from pyro_nngp.inference.svi.neighbor_check import nearest_correlation, some_rows
from pyro_nngp.inference.svi.residual_check import is_overconfident
from pyro_nngp.inference.svi.result import warn_of
from pyro_nngp.kernels.metric import column_scale

_ROWS, _POINTS = 2000, 256
_NOISE, _SIGNAL, _TREND = 0.3, 1e-3, 0.9  # correlations of neighbors, noise over variance, correlations of any points
_WEAK, _STRONG = 0.01, 10.0  # variance of f, and its part within the data, over variance of noise
_SMOOTHNESS, _NAT = 1.5, 1.0
_KINDS = {
    "noise": "f is noise that neighbors do not share",
    "signal": "there is no noise",
    "trend": "f is all but constant or linear over the data",
    "weak": "f is there, with less variance than noise",
    "middle": "f and noise are both there",
}
_SHOWN = {"weak", "middle"}


class SecondStart(NamedTuple):
    """Comparison of two starts.

    Attributes:
        gain: log likelihood of all rows at the end of the second run less the log likelihood at the end of the first,
            in nats; minus infinity where the second alone is overconfident, infinity where the first is.
        kinds: what f is at the ends of the first and the second run.
    """

    gain: float
    kinds: tuple[str, str]


@torch.no_grad()
def kind_of(method: Any) -> str | None:
    """Kind of f by its hyperparameters, one of _KINDS; None without a second start."""
    y = single_output(method, 3)
    if y is None or len(y) > _ROWS or graph_of(method) is None or not method.likelihood.is_gaussian:
        return None
    has_kernel = isinstance(method.kernel, torch.nn.Module) and not isinstance(method.kernel, torch.nn.ModuleList)
    if not has_kernel or has_unsolved_priors(method) or bool(y.min() == y.max()):
        return None
    if not {"kernel.lengthscale", "kernel.variance", "likelihood.variance"} <= set(method.started_hyperparameters):
        return None
    bound, x = method.bound(), method.x[some_rows(method.x, _POINTS)]
    variance, noise = float(bound.covariance.diag(x).mean()), float(bound.likelihood.variance.mean())
    correlation = nearest_correlation(method)
    if variance < _WEAK * noise or (correlation is not None and correlation < _NOISE):
        return "noise"
    shared = float(bound.covariance(x, x).mean())  # what all points have in common
    if shared > _TREND * variance and variance - shared < _STRONG * noise:
        return "trend"
    if noise < _SIGNAL * (variance - shared):
        return "signal"
    return "weak" if noise > variance - shared else "middle"


@torch.no_grad()
def place_second_start(method: Any, kind: str) -> None:
    """Set the started hyperparameters of a method for a second run, in place, and find its neighbors again."""
    kernel, bound = method.kernel, method.bound()
    half = (method.rows.targets() - method.rows.mean(bound)).square().mean() / 2
    length = column_scale(method.x.double()) * method.x.shape[1] ** 0.5 * (0.25 if kind == "trend" else 1.0)
    columns = kernel.active_dims or range(method.x.shape[1])
    length = length[list(columns)]
    now = kernel.lengthscale
    kernel.lengthscale = (length if now.numel() > 1 else length.log().mean().exp()).to(now).expand(now.shape).clone()
    kernel.variance = half.to(kernel.variance).expand_as(kernel.variance).clone()
    noise = method.likelihood.variance
    method.likelihood.variance = half.to(noise).expand_as(noise).clone()
    if "kernel.smoothness" in method.started_hyperparameters:
        kernel.smoothness = torch.full_like(kernel.smoothness, _SMOOTHNESS)
    if isinstance(method, Refreshable):
        method.refresh_neighbors()
    if isinstance(method, Solvable) and method.can_solve:
        method.solve()


def with_second_start(trainer: Any, run: Callable[[], Any]) -> tuple[Any, SecondStart | None]:
    """The better of a finished run and a second one, to whose parameters the method is brought.

    Args:
        trainer: the finished run.
        run: trains the method again from its present parameters.

    Returns:
        The better run, and the comparison; None if there was no second run.
    """
    method = trainer.method
    suits = trainer.automatic and trainer.optimizer == "lbfgs" and trainer.converged
    suits = suits and trainer.validation is None and trainer.checkpoint is None
    kind = kind_of(method) if suits else None
    if kind is None or kind == "middle":
        return trainer, None
    kept, loss, was = trainer.state.snapshot(), trainer.state.objective(_ROWS), is_overconfident(method)
    place_second_start(method, kind)
    second = run()
    end = second.state.objective(_ROWS)
    gain = (loss - end) * trainer.state.num_data
    if is_overconfident(method) != was:
        gain = math.inf if was else -math.inf
    comparison = SecondStart(gain, (kind, kind_of(method) or "middle"))
    if second.converged and math.isfinite(end) and gain > 0:
        return second, comparison
    trainer.state.restore(kept)
    if isinstance(method, Refreshable):
        method.refresh_neighbors()
    return trainer, comparison


@torch.no_grad()
def check_signal(method: Any, comparison: SecondStart | None) -> None:
    """Warn if both starts leave f all but constant: its intervals are then those of a constant alone."""
    if comparison is None or not _SHOWN.isdisjoint(comparison.kinds):
        return
    bound, x = method.bound(), method.x[some_rows(method.x, _POINTS)]
    share = float(bound.covariance.diag(x).mean() / bound.likelihood.variance.mean())
    if share < _WEAK:
        warn_of(
            f"data that show f among the noise, got a variance of f of {share:.1g} times that of the "
            "noise, from two starts: predictions of f are the mean function, and their intervals have no room for a "
            "signal that the noise hides. Where one is expected, set the kernel's variance and lengthscale, sample "
            "them by NUTS with lognormal_priors(kernel), or collect more rows."
        )


def check_second_start(comparison: SecondStart | None) -> None:
    """Warn if two starts end within a nat, and one of them alone takes f for noise."""
    if comparison is None or abs(comparison.gain) > _NAT or comparison.kinds.count("noise") != 1:
        return
    first, second = (_KINDS[kind] for kind in comparison.kinds)
    better, worse = (second, first) if comparison.gain > 0 else (first, second)
    warn_of(
        f"data that determine the kernel, got two optima within {abs(comparison.gain):.1g} nats: {better}"
        f" (kept), or {worse}. Predictions of f depend on the choice. Average over both by NUTS with "
        "lognormal_priors(kernel), set the lengthscale, or collect more rows."
    )
