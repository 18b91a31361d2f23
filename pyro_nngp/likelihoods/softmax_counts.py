r"""Counts of several kinds out of a total: a multinomial distribution whose shares are a softmax of latent functions.

.. math:: y \mid f \sim \mathrm{Multinomial}(n, \pi), \qquad \pi_c = e^{f_c} / \textstyle\sum_j e^{f_j},

one latent function for each kind. Up to the multinomial coefficient,

.. math:: E \log p(y \mid f) = \sum_c y_c\, (m_c - E \log \textstyle\sum_j e^{f_j}), \quad f_c \sim N(m_c, v_c),

needs one integral for any number of kinds (:mod:`pyro_nngp.likelihoods.gumbel_max`), and so do the expected shares. The
predictive density of counts is an integral over f whose integrand is narrow where n is large: its nodes are spread
around its peak, with the covariance of the Laplace approximation, as importance samples: errors are .001 nats on
average, at most .01.

Cost: O(C) per expectation; O(Q C + C^3) per predictive density. Symbols: C kinds, B rows, Q nodes.
"""

from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import pyro_method
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import fail
from pyro_nngp.distributions.expandable import Expandable
from pyro_nngp.likelihoods.base import Likelihood
from pyro_nngp.likelihoods.gumbel_max import expected_logsumexp, softmax_log_probs
from pyro_nngp.likelihoods.observations import PseudoObservations
from pyro_nngp.likelihoods.quadrature import normal_nodes
from pyro_nngp.linalg import cholesky, factor_log_det, factor_solve, half_solve

_NODES, _NEWTON_STEPS = 512, 20
_WIDER = 1.1  # standard deviations of the importance samples relative to the Laplace approximation


class Multinomial(Likelihood):
    r"""Counts of C kinds of n trials, with softmax shares of C latent functions.

    Data are (N, C), one column for each kind, and the method gets the totals as ``trials``, as for :class:`Binomial`:
    ``VNNGP(x, counts, likelihood=Multinomial(), trials=counts.sum(1))``. Latent functions, means and variances of
    counts are (C, N). All kinds are alike in the prior of the shares, whereas
    :func:`~pyro_nngp.likelihoods.binomial_splits` has an order.

    The log density of a row stands in the place of the first kind, with zeros for the other kinds, so that sums and
    leave-one-out run over rows.
    """

    support = constraints.nonnegative_integer
    expectation = "to be counts 0, 1, 2, .."
    cure = "Pass numbers of cases, not shares."
    takes_trials = True
    shares_rows = True
    total_count: Any = 1

    def __init__(self) -> None:
        super().__init__(num_quadrature=32)

    def _set_rows(self, trials: Tensor | None, limits: Tensor | None) -> None:
        if trials is not None:
            self.__dict__["total_count"] = trials

    def observations(self, y: Tensor) -> PseudoObservations:
        """Logarithms of the shares, up to a constant of each row."""
        f = (y + 0.5).log()
        return PseudoObservations.of(f - f.mean(-2, keepdim=True), 1 / (y + 0.5))

    def check(self, y: Tensor) -> None:
        """Raise unless y, (C, N), are counts of at least two kinds that sum to their row's trials."""
        super().check(y)
        if y.dim() < 2:
            fail("Multinomial", "y", "of shape (N, C) with C >= 2", tuple(y.shape), "One column for each kind.")
        if not isinstance(self.total_count, Tensor):
            return
        bad = y.sum(-2) != self.total_count
        if bool(bad.any()):
            cure = "Pass trials=counts.sum(1)."
            fail("Multinomial", "y", "to sum to their row's trials", f"{int(bad.sum())} rows that do not", cure)

    def forward(self, f: Float[Tensor, "*S C B"]) -> Distribution:
        _check_kinds(f)
        return _SoftmaxCounts(f, torch.zeros_like(f), self.total_count)

    @pyro_method
    def expected_log_prob(
        self, y: Float[Tensor, "*S C B"], loc: Float[Tensor, "*S C B"], var: Float[Tensor, "*S C B"]
    ) -> Float[Tensor, "*S C B"]:
        _check_kinds(loc)
        y, loc, var = torch.broadcast_tensors(y, loc, var)
        normalizer = expected_logsumexp(loc.movedim(-2, 0), var.movedim(-2, 0), self.num_quadrature)
        value = (y * (loc - normalizer[..., None, :])).sum(-2) + _log_coefficient(y).to(loc)
        return _first_kind(value, loc.shape[-2])

    @pyro_method
    def marginal(self, loc: Float[Tensor, "*S C B"], var: Float[Tensor, "*S C B"]) -> Distribution:
        loc, var = torch.broadcast_tensors(loc, var)
        return _SoftmaxCounts(loc, var, self.total_count)


class _SoftmaxCounts(Expandable):
    r"""Multinomial counts of n trials for independent :math:`f_c \sim N(loc, var)`, batch shape (\*S, C, B)."""

    support = constraints.nonnegative_integer
    batched = "loc", "var"

    def __init__(self, loc: Tensor, var: Tensor, trials: Any) -> None:
        self.loc, self.var, self.trials = loc, var, trials
        super().__init__(loc.shape)

    @property
    def mean(self) -> Tensor:
        return self.trials * self._shares()

    @property
    def variance(self) -> Tensor:
        shares = self._shares()
        if not bool((self.var > 0).any()):
            return self.trials * shares * (1 - shares)
        with torch.enable_grad():  # d E log sum exp f / d var = E pi (1 - pi) / 2
            var = self.var.detach().movedim(-2, 0).requires_grad_()
            total = expected_logsumexp(self.loc.detach().movedim(-2, 0), var).sum()
            within = 2 * torch.autograd.grad(total, var)[0].movedim(0, -2)
        return self.trials * within + self.trials**2 * (shares * (1 - shares) - within).clamp(min=0)

    def _log_prob(self, value: Tensor) -> Tensor:
        value, loc, var = torch.broadcast_tensors(value.to(self.loc), self.loc, self.var)
        density = _log_coefficient(value).to(loc)
        if bool((var > 0).any()):
            density = density + _log_expectation(value, loc, var)
        else:
            density = density + (value * loc.log_softmax(-2)).sum(-2)
        return _first_kind(density, loc.shape[-2])

    def _draw(self, shape: torch.Size) -> Tensor:
        left = torch.as_tensor(self.trials).to(self.loc).expand(*shape[:-2], shape[-1])
        shares, rest, counts = self._latent_draw(shape).softmax(-2), torch.ones_like(left), []
        for share in shares.unbind(-2)[:-1]:  # each kind is binomial of the remainder
            counts.append(torch.binomial(left.contiguous(), (share / rest.clamp(min=1e-30)).clamp(0, 1)))
            left, rest = left - counts[-1], rest - share
        return torch.stack([*counts, left], -2)

    def _latent_draw(self, shape: tuple[int, ...]) -> Tensor:
        return self.loc + self.var.sqrt() * torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)

    def _shares(self) -> Tensor:
        if not bool((self.var > 0).any()):
            return self.loc.softmax(-2)
        return softmax_log_probs(self.loc.movedim(-2, 0), self.var.movedim(-2, 0)).exp().movedim(0, -2)


def _check_kinds(f: Tensor) -> None:
    if f.dim() < 2 or f.shape[-2] < 2:
        fail("Multinomial", "y", "of shape (N, C) with C >= 2", f"f of {tuple(f.shape)}", "One column for each kind.")


def _first_kind(values: Float[Tensor, "*S B"], count: int) -> Float[Tensor, "*S C B"]:
    """Values of rows in the place of the first of C kinds, zeros in the others."""
    rest = torch.zeros_like(values)[..., None, :].expand(*values.shape[:-1], count - 1, values.shape[-1])
    return torch.cat([values[..., None, :], rest], -2)


def _log_coefficient(y: Tensor) -> Float[Tensor, "*S B"]:
    """Logarithms of the multinomial coefficients, in double precision: they are differences of large numbers."""
    y = y.double()
    return torch.lgamma(y.sum(-2) + 1) - torch.lgamma(y + 1).sum(-2)


def _log_expectation(y: Tensor, loc: Tensor, var: Tensor) -> Float[Tensor, "*S B"]:
    """Logarithms of E prod_c pi_c^y_c, (*S, C, B) to (*S, B), in double precision."""
    dtype = loc.dtype
    y, loc, var = (part.double().movedim(-2, -1) for part in (y, loc, var))  # kinds last
    var = var.clamp(min=torch.finfo(torch.float64).tiny ** 0.25)
    mode, tril = _laplace(y, loc, var)
    nodes = normal_nodes(loc.shape[-1], _NODES, torch.float64, loc.device).mT
    t = _WIDER * nodes.reshape(-1, *[1] * (loc.dim() - 1), loc.shape[-1])
    f = mode + half_solve(tril, t[..., None], transposed=True)[..., 0]
    log_density = (y * f.log_softmax(-1)).sum(-1) + dist.Normal(loc, var.sqrt(), validate_args=False).log_prob(f).sum(
        -1
    )
    proposal = dist.Normal(0.0, 1.0, validate_args=False).log_prob(t / _WIDER).sum(-1)
    log_det = factor_log_det(tril) / 2 - loc.shape[-1] * torch.tensor(_WIDER).log().double()
    weights = log_density - proposal - log_det
    return (torch.logsumexp(weights, 0) - torch.tensor(float(len(nodes))).log()).to(dtype)


@torch.no_grad()
def _laplace(y: Tensor, loc: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """The peak of p(y | f) N(f | loc, diag var), kinds last, and the Cholesky factor of the precision there."""
    f, total = loc.clone(), y.sum(-1, keepdim=True)
    for _ in range(_NEWTON_STEPS):
        shares = f.softmax(-1)
        slope = y - total * shares - (f - loc) / var
        tril = cholesky(_precision(shares, total, var), 0.0)
        step = factor_solve(tril, slope[..., None])[..., 0]
        f = f + step / (1 + step.abs().amax(-1, keepdim=True) / 2)  # a step far beyond the peak is shortened
    return f, cholesky(_precision(f.softmax(-1), total, var), 0.0)


def _precision(shares: Tensor, total: Tensor, var: Tensor) -> Tensor:
    return torch.diag_embed(total * shares + 1 / var) - total[..., None] * shares[..., None] * shares[..., None, :]
