r"""Covariances of estimated hyperparameters, from the information that Gaussian data have of them.

The hyperparameters :math:`\theta` are on their unconstrained scales, where positive ones are logarithms. For a product
of conditional densities :math:`N(y_i \mid w_i^\top y_{n(i)}, v_i)` of data less the mean function, the information is

.. math:: H_{kl} = \sum_i \tfrac12\, \partial_k \log v_i\, \partial_l \log v_i
   + \partial_k w_i^\top C_{n(i) n(i)}\, \partial_l w_i / v_i,

C the covariance of the data. It is the expectation of minus the Hessian, and has no noise. If the neighbors precede i
(:class:`~pyro_nngp.models.Vecchia`), scores of different i are uncorrelated, and the covariance of the estimate is
:math:`H^{-1}`. In a pseudo-likelihood they are correlated: the total score is a quadratic form
:math:`y^\top A_k y`, and

.. math:: \mathrm{Cov}\, \hat\theta = H^{-1} J H^{-1}, \qquad J_{kl} = 2\, \mathrm{tr}(A_k C A_l C)

(Godambe's sandwich; Varin, Reid, Firth 2011, section 2.3). Coefficients of the mean have the covariance of generalized
least squares. Derivatives by :math:`\theta` are central differences in double precision.

Of more than 2,048 rows, 2,048 random ones count for all, with all of their neighbors; of a pseudo-likelihood, whose
scores are correlated nearby, more than 1,024 are represented by the 1,024 around a random one.

Estimated coefficients of the mean take information away: data less their estimate :math:`X \hat\beta` have the
covariance :math:`C - X S X^\top`, S that of :math:`\hat\beta`, and scores have the expectation
:math:`-\mathrm{tr}(S X^\top A_k X)`, so that variances are underestimated. Intervals are centered where a step of
Newton's method to the zero of the scores less this leads, and have the information there. For conditional densities
this is the restricted likelihood (Harville 1977), whose information is

.. math:: H_{kl} - \mathrm{tr}(S\, X^\top \partial_k C^{-1}\, C\, \partial_l C^{-1} X)
   + \tfrac12\, \mathrm{tr}(S\, X^\top \partial_k C^{-1} X\, S\, X^\top \partial_l C^{-1} X) .

Standard errors of coefficients are averaged over the distribution of :math:`\theta` around that center, for counts and
labels with pseudo-observations that are solved for there.

Cost: O(p B K^3), of a pseudo-likelihood O(p U^3). Symbols: p hyperparameters, B rows, U of them and their neighbors.

Reference: Varin, Reid, Firth (2011), "An overview of composite likelihood methods", Statistica Sinica; Harville (1977),
"Maximum likelihood approaches to variance component estimation and to related problems", JASA.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._random import shuffled
from pyro_nngp.bound import Bound
from pyro_nngp.means import BasisMean
from pyro_nngp.models.base.densities import Gaussians, Places, each_noise
from pyro_nngp.models.base.estimates import Estimates, Information, around_center, free_parameters
from pyro_nngp.models.base.trend import POINTS, conditionals

SOME_ROWS = 2048
_STEP, _TOLERANCE = 0.02, 1e-5  # of the gradient of the evidence, and of the solutions for q(u)
MOST_ROWS = 10_000
"""Rows up to which the evidence is solved for at changed hyperparameters."""
_WEAK = 1e-4  # least information of a direction
_MOST = 0.8  # of the information of a direction that coefficients of the mean take: neighbors approximate both


def of_conditionals(method: Any) -> Information:
    """Inverse information of conditional densities given preceding neighbors."""
    count = min(method.num_data, SOME_ROWS)

    def find(places: Places) -> tuple[Tensor, Tensor | None]:
        bread = sum(times * one.fisher() for one, times in each_noise(places)) * (method.num_data / count)
        if places.root is None:
            return _inverse(bread), None
        return _without_mean(bread, *_restriction(places, places.root))

    return around_center(Places.of(method, shuffled(method.num_data, 0, method.x.device)[:count]), find)


def _without_mean(
    information: Float[Tensor, "p p"], lost: Float[Tensor, "p p"], slopes: Float[Tensor, " p"]
) -> tuple[Float[Tensor, "p p"], Float[Tensor, " p"]]:
    """The covariance of the estimates where coefficients take some information, and the step to the center."""
    root = _inverse_root(information)
    shares, axes = torch.linalg.eigh(root.mT @ lost @ root)
    cov = root @ (axes / (1 - shares.clamp(0, _MOST))) @ (root @ axes).mT
    return cov, cov @ slopes


def _restriction(
    places: Estimates, root: Float[Tensor, "*own c c"]
) -> tuple[Float[Tensor, "p p"], Float[Tensor, " p"]]:
    """The information that the coefficients of the mean take, and slopes of their part of the restricted likelihood."""
    bound = places.present
    now = conditionals(places.observed(bound), POINTS)
    every = list(now.factor.sets(now.factor.batch_shape))
    count = places.num_outputs // len(every)  # of outputs with the same conditionals
    has_own = root.dim() > 2  # coefficients of each output
    times, within = (count, 1) if has_own else (1, count)
    basis = cast(BasisMean, bound.mean_function).basis(now.x).double().mT
    roots = root.reshape(-1, *root.shape[-2:])[::count] if has_own else root.expand(len(every), *root.shape)
    white = roots.mT @ basis  # (S, c, n)

    def products(bound: Bound) -> Float[Tensor, "S c n"]:
        """Rows of C^-1 X S^1/2 for each set of conditionals."""
        factor = conditionals(places.observed(bound), POINTS).factor
        sets = zip(factor.sets(factor.batch_shape), white, strict=True)
        return torch.stack([one.whiten_transposed(one.whiten(columns)) for one, columns in sets])

    changes = torch.stack(list(places.changes(products)))  # (p, S, c, n)
    outer = [one.color_transposed(changes[:, number]).flatten(1) for number, one in enumerate(every)]
    inner = within * torch.einsum("sin,ksjn->skij", white, changes)
    inner = inner if has_own else inner.sum(0, keepdim=True)
    both = torch.einsum("skij,slji->kl", inner, inner)
    lost = within * sum(part @ part.mT for part in outer) - both / 2
    return times * lost, -times / 2 * torch.einsum("skii->k", inner)


def of_leave_one_out(method: Any) -> Information:
    """Godambe's sandwich for densities given the nearest others, which hardly depend on the coefficients."""
    return around_center(Places.around(method), lambda places: _sandwich(places, Gaussians.forms, restricted=False))


def of_blocks(method: Any) -> Information:
    """Godambe's sandwich for joint densities of points with their neighbors, each divided by their number."""
    return around_center(
        Places.around(method), lambda places: _sandwich(places, Gaussians.joint_forms, restricted=True)
    )


def _sandwich(
    places: Places, forms_of: Callable[[Gaussians], list[Float[Tensor, "U U"]]], restricted: bool
) -> tuple[Float[Tensor, "p p"], Float[Tensor, " p"] | None]:
    """Godambe's covariance of the estimates, and the step to where scores of data less an estimated mean are zero.

    Args:
        places: all rows, or some that are next to each other.
        forms_of: A for each hyperparameter, with the total score y' A y less its mean.
        restricted: whether the mean is taken as estimated.
    """
    bread: Any = 0.0
    meat: Any = 0.0
    slopes: Any = 0.0
    for one, times in each_noise(places):
        forms, left = forms_of(one), one.without_mean(one.cov) if restricted else one.cov
        changes = [one.without_mean(part) if restricted else part for part in places.changes(one.covariance)]
        bread = bread + times * torch.stack(forms).flatten(1) @ torch.stack(changes).flatten(1).mT
        meat = meat + times * _traces([form @ left for form in forms])
        slopes = slopes + times * torch.stack([(form * (one.cov - left)).sum() for form in forms])
    slices = _inverse(bread)
    cov = slices @ meat @ slices * (len(places.own) / places.method.num_data)
    return cov, slices @ slopes if restricted else None


def of_evidence(method: Any) -> Information:
    """Inverse of minus the Hessian of the largest bound of all q(u), by differences of its gradient, O(p) solutions."""
    copied = copy.deepcopy(method)

    def slopes(now: Estimates) -> Float[Tensor, " p"]:
        tensors = now.put()
        with copied.profile.optimum(_TOLERANCE), torch.enable_grad():
            found = torch.autograd.grad(copied.profile.bound(), tensors)
        return torch.cat([slope.flatten().double().cpu() for slope in found])

    def find(now: Estimates) -> tuple[Float[Tensor, "p p"], Tensor | None]:
        steps = _STEP * torch.eye(sum(each.value.numel() for each in now.free)).double()
        hessian = torch.stack([(slopes(now.moved(-step)) - slopes(now.moved(step))) / (2 * _STEP) for step in steps])
        solve(now)
        if now.root is None:
            return _inverse(hessian), None
        return _without_mean(hessian, *_restriction(now, now.root))

    def solve(now: Estimates) -> None:
        now.put()
        with copied.profile.optimum(_TOLERANCE):
            pass

    found = around_center(Estimates(copied, free_parameters(copied)), find, solve)
    return found._replace(free=free_parameters(method))


def _traces(forms: list[Float[Tensor, "U U"]]) -> Float[Tensor, "p p"]:
    """Covariances of quadratic forms of normal values."""
    flat, turned = (torch.stack([part.flatten() for part in parts]) for parts in (forms, [form.mT for form in forms]))
    return 2 * flat @ turned.mT


def _inverse_root(information: Float[Tensor, "p p"]) -> Float[Tensor, "p p"]:
    """A root of the inverse, with a large variance in directions of which data have no information."""
    strengths, axes = torch.linalg.eigh((information + information.mT) / 2)
    return axes / strengths.clamp(min=_WEAK).sqrt()


def _inverse(information: Float[Tensor, "p p"]) -> Float[Tensor, "p p"]:
    root = _inverse_root(information)
    return root @ root.mT


__all__ = ["MOST_ROWS", "Information", "of_blocks", "of_conditionals", "of_evidence", "of_leave_one_out"]
