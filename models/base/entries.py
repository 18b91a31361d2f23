"""Entries of a method: predictions of f and y at new points, and leave-one-out densities.

Each checks its arguments, reads the hyperparameters once, and passes them down. They are functions of a method, whose
class :class:`~pyro_nngp.models.base.Method` has them under their names.

Symbols as in :mod:`pyro_nngp.models.base.method`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import check_int, check_memory, check_new_inputs, check_seed, fail
from pyro_nngp._locks import shared
from pyro_nngp._memory import names_memory
from pyro_nngp._random import seeded
from pyro_nngp.data.tables import Table, at_tables
from pyro_nngp.distributions import Mixture
from pyro_nngp.distributions.mixture import mixture_moments
from pyro_nngp.models.base import predictions
from pyro_nngp.models.base.draws import Draw, Samples
from pyro_nngp.models.base.joint import Fantasies, joint_moments

_FEWER_POINTS = "Pass fewer points x_new at a time, or a smaller num_neighbors."
_FEWER_DRAWS = "Ask for fewer draws by num_samples, or pass fewer points x_new at a time."
_FEWER_ROWS = "Pass fewer rows idx at a time."


@shared
@names_memory(_FEWER_POINTS)
@at_tables
def forward(
    self: Any,
    x_new: Float[Tensor, "P D"] | Table,
    *,
    num_neighbors: int | None = None,
    samples: Samples | None = None,
    offset: Float[Tensor, "P *L"] | Table | None = None,
) -> tuple[Float[Tensor, "*L P"], Float[Tensor, "*L P"]]:
    r"""Posterior mean and variance of f at new points.

    Given posterior draws :math:`\theta_s` of hyperparameters and latent values, such as draws of NUTS on ``model``,
    they are the moments of the mixture :math:`\frac1S \sum_s p(f \mid x, \theta_s)`. Without draws, predictions
    integrate over the guide, with hyperparameters that have priors at the median of their guide.

    Args:
        x_new: new inputs, a tensor or any table that the method takes as data.
        num_neighbors: neighbors per new point, among the points that the method conditions on; None is the method's
            choice. More neighbors than in training often help.
        samples: posterior draws of all sites, such as ``mcmc.get_samples()`` after NUTS on ``model``, to average
            over.
        offset: known part of f at the new points, as the constructor takes it; None is 0.

    Returns:
        Mean and variance, (P,), or (L, P) for L latent functions: tensors for a tensor; for a table the caller's
        kind, such as two Series with the index of a DataFrame.

    Raises:
        ValueError, TypeError: for malformed arguments, or a site that is missing in `samples`.
    """
    added = self._new_offset("forward", x_new, offset)
    moments = predictions.moments(self, "forward", x_new, num_neighbors, samples, "moments")
    if samples is None:
        ((_, mean, variance),) = moments
    else:
        with torch.no_grad():
            pairs = [pair for _, *pair in moments]
            mean, variance = mixture_moments(*(torch.stack(values) for values in zip(*pairs, strict=True)))
    return mean + added, variance


@shared
@names_memory(_FEWER_POINTS)
@at_tables
def predict(
    self: Any,
    x_new: Float[Tensor, "P D"] | Table,
    *,
    num_neighbors: int | None = None,
    samples: Samples | None = None,
    offset: Float[Tensor, "P *L"] | Table | None = None,
    trials: Float[Tensor, " P"] | Int[Tensor, " P"] | Table | None = None,
    limits: Float[Tensor, " P"] | Table | None = None,
) -> Distribution:
    """Predictive distribution of y at new points, batch shape (P,), or (T, P) for T outputs.

    The distribution of ``CoregionalizedLOO`` is joint over the outputs of a point: batch shape (P,), event shape
    (T,), so that its mean is (P, T).

    Args:
        x_new: new inputs.
        num_neighbors: as in :meth:`forward`.
        samples: as in :meth:`forward`; the result is then the mixture over the draws.
        offset: as in :meth:`forward`.
        trials: numbers of trials at the new points, of ``Binomial()``; None is one each.
        limits: limits of detection at the new points, of ``Censored()``; None predicts values that nothing limits.

    Returns:
        The marginal of the likelihood, f integrated out.

    Raises:
        ValueError, TypeError: as in :meth:`forward`, and if the model has no likelihood.
    """
    if self.likelihood is None:
        where, cure = f"{type(self).__name__}.predict", "Call the model for the moments of f instead."
        fail(where, "a likelihood", "in the model", None, cure)
    added, by_row = self._new_offset("predict", x_new, offset), self._new_by_row(x_new, trials, limits)
    moments = predictions.moments(self, "predict", x_new, num_neighbors, samples, "response_moments")
    if samples is None:
        ((posterior, loc, spread),) = moments
        return posterior.response(posterior.shifted(loc, added), spread, by_row)
    with torch.no_grad():
        parts = [each.response(each.shifted(loc, added), spread, by_row) for each, loc, spread in moments]
    return Mixture(parts)


@shared
@names_memory(_FEWER_DRAWS)
@at_tables
@torch.no_grad()
def sample(
    self: Any,
    x_new: Float[Tensor, "P D"] | Table,
    num_samples: int,
    *,
    num_neighbors: int | None = None,
    seed: int | None = None,
    samples: Samples | None = None,
    offset: Float[Tensor, "P *L"] | Table | None = None,
) -> Float[Tensor, "S *L P"]:
    """Joint posterior draws of f at new points, correlated within a draw.

    Args:
        x_new: new inputs.
        num_samples: S.
        num_neighbors: neighbors per new point, among the points that the method conditions on and the new ones;
            None is the method's choice.
        seed: makes the draws reproducible and leaves the global random state alone; None uses the global state.
        samples: as in :meth:`forward`; evenly spaced draws are used, some repeatedly if there are fewer than S.
        offset: as in :meth:`forward`.

    Raises:
        ValueError, TypeError: as in :meth:`forward`.

    Cost: once for all draws, or for each draw where hyperparameters differ between them, several at once where the
    method can.
    """
    self._check_new("sample", x_new, samples is None)
    where = f"{type(self).__name__}.sample"
    check_int(where, "num_samples", num_samples, 1, "It is a number of draws.")
    if seed is not None:
        check_seed(where, seed)
    check_memory(where, "draws", num_samples * len(x_new) * math.prod(self.latent_shape), x_new.dtype)
    added = self._new_offset("sample", x_new, offset)
    with seeded(seed, x_new):
        return predictions.joint_draws(self, where, x_new, num_samples, num_neighbors, seed, samples) + added


@shared
@names_memory(_FEWER_DRAWS)
@at_tables
@torch.no_grad()
def sample_y(
    self: Any,
    x_new: Float[Tensor, "P D"] | Table,
    num_samples: int,
    *,
    seed: int | None = None,
    samples: Samples | None = None,
    offset: Float[Tensor, "P *L"] | Table | None = None,
    trials: Float[Tensor, " P"] | Int[Tensor, " P"] | Table | None = None,
    limits: Float[Tensor, " P"] | Table | None = None,
    **options: Any,
) -> Float[Tensor, "S *T P"] | Int[Tensor, "S *T P"]:
    r"""Joint posterior predictive draws of y at new points, correlated within a draw as f is.

    .. math:: f^{(s)} \sim p(f \mid \text{data}), \qquad y^{(s)}_p \sim p(y \mid f^{(s)}_p, \theta)

    with :math:`\theta` as in :meth:`predict`: of each posterior draw, or the medians of the guide.

    Args:
        x_new: new inputs.
        num_samples: S.
        seed: makes the draws reproducible and leaves the global random state alone; None uses the global state.
        samples: posterior draws of all sites, as :meth:`sample` takes them.
        offset: known part of f at the new points, as the constructor takes it; None is 0.
        trials: numbers of trials at the new points, of ``Binomial()``; None is one each.
        limits: limits of detection at the new points, of ``Censored()``; None draws values that nothing limits.
        options: further arguments of :meth:`sample`, such as `num_neighbors`.

    Raises:
        ValueError, TypeError: as :meth:`sample`, and if the model has no likelihood.

    Cost: as :meth:`sample`.
    """
    where = f"{type(self).__name__}.sample_y"
    check_new_inputs(where, x_new, self.x)
    if seed is not None:
        check_seed(where, seed)
    if self.likelihood is None:
        fail(where, "a likelihood", "in the model", None, "Take sample for draws of f.")
    with seeded(seed, x_new):
        f = self.sample(x_new, num_samples, samples=samples, offset=offset, **options)
        return predictions.draws_of_y(self, where, f, self._new_by_row(x_new, trials, limits), samples)


@shared
@at_tables
@torch.no_grad()
def predictions_by_draw(
    self: Any,
    x_new: Float[Tensor, "P D"] | Table,
    *,
    num_neighbors: int | None = None,
    seed: int = 0,
    offset: Float[Tensor, "P *L"] | Table | None = None,
    trials: Float[Tensor, " P"] | Int[Tensor, " P"] | Table | None = None,
    limits: Float[Tensor, " P"] | Table | None = None,
    from_guide: bool = False,
) -> Callable[[Draw], tuple[Tensor, Tensor | None]]:
    """Joint draws of f and y at new points as a function of one posterior draw at a time, for streaming.

    Args:
        x_new: new inputs.
        num_neighbors: as in :meth:`sample`.
        seed: seed of the order of the new points; the draws use the global random state.
        offset: as in :meth:`forward`.
        trials: as in :meth:`predict`.
        limits: as in :meth:`predict`.
        from_guide: whether the posterior draws are from the guide. A method whose sites determine no f at new
            points then draws f from its guide, at the hyperparameters of each draw.

    Returns:
        A function from the values of all sites to f, (*L, P), and y, (*T, P); None for y without a likelihood.

    Raises:
        ValueError, TypeError: as in :meth:`sample`.
    """
    added, by_row = self._new_offset("predict", x_new, offset), self._new_by_row(x_new, trials, limits)
    f_at = predictions.draws_by_draw(self, x_new, num_neighbors, seed, from_guide)

    @torch.no_grad()
    def at(draw: Draw) -> tuple[Tensor, Tensor | None]:
        posterior, f = f_at(draw)
        f = f + added
        return f, None if self.likelihood is None else predictions.given_f(posterior, f, by_row)

    return at


@shared
@names_memory(_FEWER_POINTS)
def joint(
    self: Any,
    x_new: Float[Tensor, "... q D"],
    *,
    num_neighbors: int | None = None,
    fantasies: Fantasies | None = None,
) -> tuple[Float[Tensor, "... q"], Float[Tensor, "... q q"]]:
    r"""Joint posterior of f at sets of a few points: means and covariance matrices, differentiable in `x_new`.

    Of methods with Gaussian observations or pseudo-observations of one output, at the present hyperparameters (with
    priors, the median of their guide). Coefficients of the mean whose joint posterior the method has are integrated
    over. For many points at once take :meth:`sample`.

    Args:
        x_new: sets of q points; each set is predicted jointly, from the neighbors of all its points.
        num_neighbors: as in :meth:`forward`.
        fantasies: observations to condition on in addition, with batch dimensions that broadcast against the ones
            of `x_new`.

    Returns:
        Means (\*B, q) and covariances (\*B, q, q).

    Raises:
        ValueError, TypeError: for malformed arguments, several outputs, or a method without such observations.

    Cost: O((q K)^3) for each set.
    """
    return joint_moments(self, x_new, num_neighbors, fantasies)


@shared
@names_memory(_FEWER_ROWS)
@torch.inference_mode(False)  # pseudo-observations come from gradients
@torch.no_grad()
def loo(
    self: Any,
    idx: Int[Tensor, " I"] | None = None,
    *,
    num_neighbors: int | None = None,
    samples: Samples | None = None,
) -> Float[Tensor, "... I"]:
    r"""Log density of each datum given all others, with latent values integrated out.

    .. math:: \log p(y_i \mid y_{-i}, \theta), \qquad i = 1..N

    Over posterior draws of :math:`\theta`, the weights that leave out a datum are proportional to
    :math:`1 / p(y_i \mid y_{-i}, \theta)`, which is what ``az.loo`` computes if these densities are the log
    likelihood, however the data depend on each other (Burkner, Gabry, Vehtari 2021). Densities given a draw of the
    latent values are no substitute: the draws depend on y_i, and one weight per draw has to account for all latent
    values at once. The sum estimates the log density of N new data if hyperparameters are few relative to the data.
    Neighbors and inducing points are not changed.

    Args:
        idx: rows of the data; None is all. On several processes local rows, different ones on each; all processes
            must call it at the same time.
        num_neighbors: neighbors of each datum, among the others; None is the method's choice. Methods with inducing
            points take None.
        samples: posterior draws of the hyperparameters, such as ``mcmc.get_samples()``. None takes the
            present hyperparameters, and those with priors at the median of their guide.

    Returns:
        Log densities (I,), (T, I) for T outputs with independent latent functions; with S posterior draws one such
        tensor for each, draws first, as Pareto-smoothed importance sampling takes them.

    Raises:
        ValueError, TypeError: for malformed rows, a number of neighbors out of range, a model without likelihood,
            or a hyperparameter that is missing in `samples`.

    Cost: O(N K^3), for latent values under a likelihood that is not Gaussian per natural-gradient step;
    O(N M^2 + M^3) with M inducing points. Once, or for each draw.

    Reference: Burkner, Gabry, Vehtari (2021), "Efficient leave-one-out cross-validation for Bayesian non-factorized
    normal and Student-t models", Computational Statistics.
    """
    return predictions.leave_one_out(self, idx, num_neighbors, samples)


@torch.inference_mode(False)
@torch.no_grad()
def loo_by_draw(
    self: Any, idx: Int[Tensor, " I"] | None = None, *, num_neighbors: int | None = None, from_guide: bool = False
) -> Callable[[Draw], Float[Tensor, "*T I"]]:
    """:meth:`loo` as a function of one posterior draw at a time, for streaming.

    Args:
        idx: rows of the data; None is all.
        num_neighbors: as in :meth:`loo`.
        from_guide: whether the draws are from the method's guide instead of a posterior of its model. Latent values
            other than hyperparameters are then integrated over the guide.

    Raises:
        ValueError, TypeError: as in :meth:`loo`.
    """
    return predictions.leave_one_out_by_draw(self, idx, num_neighbors, from_guide)


__all__ = ["forward", "joint", "loo", "loo_by_draw", "predict", "predictions_by_draw", "sample", "sample_y"]
