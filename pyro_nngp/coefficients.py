r"""The posterior of the coefficients of a mean function that is linear in them, :math:`\mu(x) = b(x)^\top \beta`.

Gaussian observations of f determine :math:`\beta` by generalized least squares. With the precision P and the linear
term l of their likelihood, as a normal density of :math:`\beta`, and a normal or flat prior of precision
:math:`P_0` and mean :math:`\beta_0`,

.. math:: \beta \mid y \sim N(\hat\beta, S), \qquad S^{-1} = P + P_0, \quad S^{-1} \hat\beta = l + P_0 \beta_0.

If r(x) is the derivative of the conditional mean of f(x) in :math:`\beta`, the variance of f(x) grows by
:math:`r(x)^\top S\, r(x)`: under a flat prior this is ordinary kriging with a constant, and universal kriging with
further columns (Cressie 1993, section 3.4).

Leaving out an observation :math:`y_i` with the variance :math:`s_i` given all others and :math:`\beta`, its residual
:math:`e_i` at :math:`\hat\beta` and its leverage :math:`h_i = r_i^\top S\, r_i / s_i`, S becomes
:math:`(S^{-1} - r_i r_i^\top / s_i)^{-1}`; so the mean of :math:`f_i` moves by :math:`-h_i e_i / (1 - h_i)`, and its
variance grows by :math:`s_i h_i / (1 - h_i)`.

Cost: O(p^3) for the posterior, O(B p^2) for B points. Symbols: p coefficients for each of L latent functions.

Reference: Cressie (1993), "Statistics for spatial data".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.linalg import cholesky, factor_solve, half_solve
from pyro_nngp.means import BasisMean, LinearMean

_NUGGET = 1e-9  # relative, of the precision: columns may be collinear
MOST_LEVERAGE = 1 - 1e-6  # of a datum; at 1 it alone determines a coefficient


@dataclass(frozen=True)
class Trend:
    """Coefficients of the mean that predictions integrate over.

    Attributes:
        basis: the basis functions, (B, D) -> (B, p).
        root: a root of the covariance of the coefficients, (p, q), or one for each latent function.
        is_flat: whether their prior is flat, and they are parameters.
        gain: posterior means of the latent values at the data per unit of each coefficient, (*L, p, N), of methods with
            q(u); None where f is integrated out. Coupled outputs have p coefficients for each of them, jointly.
    """

    basis: Callable[[Tensor], Tensor]
    root: Float[Tensor, "*own p q"]
    is_flat: bool
    gain: Float[Tensor, "*L C N"] | None = None

    def rest(
        self,
        x: Float[Tensor, "B D"],
        w: Float[Tensor, "... B K"],
        near: Int[Tensor, "B K"],
        values: Float[Tensor, "... U p"],
    ) -> Float[Tensor, "... B p"]:
        """The basis at points less what the weights of their neighbors make of `values`, the basis or `gain` there."""
        return self.basis(x).to(w) - self.combined(w, near, values)

    def combined(
        self, w: Float[Tensor, "... B K"], near: Int[Tensor, "B K"], values: Float[Tensor, "... U p"]
    ) -> Float[Tensor, "... B p"]:
        """What the weights of neighbors make of `values` there."""
        return (w[..., None, :] @ values.to(w)[..., near.clamp(min=0), :])[..., 0, :]

    def variance(self, rest: Float[Tensor, "... B p"]) -> Float[Tensor, "... B"]:
        """Variance of combinations of the coefficients."""
        return (rest @ self.root.to(rest)).square().sum(-1)

    def left_out(
        self, rest: Float[Tensor, "... B p"], residual: Float[Tensor, "... B"], var: Tensor, noise: Tensor
    ) -> tuple[Float[Tensor, "... B"], Float[Tensor, "... B"]]:
        """Changes of mean and variance of f at data whose observations say nothing of the coefficients.

        Args:
            rest: of the data given all others.
            residual: observations less their means given all others.
            var: variances of f given all others.
            noise: of the observations.
        """
        added = self.variance(rest)
        leverage = (added / (var + noise)).clamp(max=MOST_LEVERAGE)
        return -residual * leverage / (1 - leverage), added / (1 - leverage)

    def draws(self, count: int, latent_shape: tuple[int, ...]) -> Float[Tensor, "S *#L p 1"]:
        """Coefficients less their posterior means, as columns; with a dimension of 1 where all functions have them."""
        root = self.root.reshape(*[1] * (len(latent_shape) + 2 - self.root.dim()), *self.root.shape)
        white = torch.randn(count, *root.shape[:-2], root.shape[-1], 1, dtype=root.dtype, device=root.device)
        return root @ white

    def at(self, fetch: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> "Trend":
        """The trend with `gain` at other rows, which a function fetches from tables with a row for each point."""
        if self.gain is None:
            return self
        return replace(self, gain=fetch({"gain": self.gain.movedim(-1, 0)})["gain"].movedim(0, -1))


def posterior_of_coefficients(
    mean: BasisMean, precision: Float[Tensor, "*L p p"], linear: Float[Tensor, "*L p"]
) -> tuple[Float[Tensor, "*own p"], Float[Tensor, "*own p p"]]:
    r"""Posterior means of the coefficients, and a root of their covariance; the prior is flat where they have none.

    A coefficient of which neither data nor prior say anything gets the mean and the variance 0.

    Args:
        mean: the mean function.
        precision: P, for each latent function or for all.
        linear: l.
    """
    linear = linear.double()
    precision = precision.double().expand(*linear.shape, linear.shape[-1])
    if not mean.own_shape:  # all latent functions have the same coefficients
        precision, linear = (
            precision.reshape(-1, *precision.shape[-2:]).sum(0),
            linear.reshape(-1, linear.shape[-1]).sum(0),
        )
    elif linear.dim() == 1:
        linear = linear.expand(*mean.own_shape, -1)
        precision = precision.expand(*linear.shape, -1)
    if not mean.is_free:
        prior_loc, prior_precision = (
            part.to(linear).reshape(linear.mT.shape).mT if mean.own_shape else part.to(linear)
            for part in mean.prior_moments()
        )
        precision, linear = precision + torch.diag_embed(prior_precision), linear + prior_precision * prior_loc
    if any(mean.held):
        precision = precision * mean.free(precision)[..., None, None]
    return normal_moments(precision, linear)


def joint_trend(mean: BasisMean, information: Float[Tensor, "C C"], gain: Tensor | None = None) -> Trend:
    """The coefficients of the mean functions of coupled outputs, under a flat prior.

    Args:
        mean: the mean function.
        information: on the coefficients, output by output.
        gain: as of :class:`Trend`.
    """
    if any(mean.held):
        free = mean.free(information).repeat_interleave(len(information) // len(mean.held))
        information = information * free * free[:, None]
    root = normal_moments(information, torch.zeros_like(information[0]))[1]
    return Trend(mean.basis, root.reshape(*mean.own_shape, -1, len(root)), True, gain)


def normal_moments(
    precision: Float[Tensor, "*own p p"], linear: Float[Tensor, "*own p"]
) -> tuple[Float[Tensor, "*own p"], Float[Tensor, "*own p p"]]:
    """Mean, and a root of the covariance, of a normal density by its precision and linear term.

    A coefficient without precision gets the mean and the variance 0.
    """
    diagonal = precision.diagonal(dim1=-2, dim2=-1)
    is_known = diagonal > torch.finfo(torch.float32).tiny
    scale = torch.where(is_known, diagonal, 1.0).rsqrt()
    system = precision * scale[..., None] * scale[..., None, :]
    system = torch.where(is_known[..., None] & is_known[..., None, :], system, torch.eye(linear.shape[-1]).to(system))
    tril, scale = cholesky(system, _NUGGET), scale * is_known
    loc = scale * factor_solve(tril, (scale * linear)[..., None])[..., 0]
    identity = torch.eye(linear.shape[-1]).to(tril).expand_as(tril)
    return loc, scale[..., None] * half_solve(tril, identity, transposed=True)


def condition_coefficients(
    mean: BasisMean, precision: Float[Tensor, "*L p p"], linear: Float[Tensor, "*L p"]
) -> Float[Tensor, "p *own"]:
    """Set the coefficients to their posterior, parameters to its mean; returns the means.

    Arguments as of :func:`posterior_of_coefficients`.
    """
    loc, root = posterior_of_coefficients(mean, precision, linear)
    mean.set_posterior(loc, root @ root.mT)
    return loc.mT if mean.own_shape else loc


def normal_trend(mean: LinearMean, gain: Tensor | None = None) -> Trend:
    """Coefficients with normal priors under the posterior that a method has set."""
    tril = mean.posterior_tril
    if mean.own_shape:
        p = len(tril) // mean.own_shape[0]
        tril = tril.reshape(p, -1, p, *mean.own_shape).diagonal(dim1=1, dim2=3).movedim(-1, 0)
    return Trend(mean.basis, tril, False, gain)


__all__ = ["Trend", "condition_coefficients", "joint_trend", "normal_trend", "posterior_of_coefficients"]
