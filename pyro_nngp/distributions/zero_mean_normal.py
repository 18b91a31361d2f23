r"""Normal distributions N(0, K) of a few values each, whose divergences do not differentiate a factorization.

With a diagonal q = N(m, diag s) and :math:`P = K^{-1}`, :math:`\alpha = P m`,

.. math:: KL(q \,\|\, N(0, K)) = \tfrac12 \Big[\sum_j (P_{jj} s_j - \log s_j) + m^\top \alpha - H + \log |K|\Big],
   \qquad \frac{\partial KL}{\partial K} = \tfrac12 \big[P - P \,\mathrm{diag}(s)\, P - \alpha \alpha^\top\big] .

Cost: O(H^3) for each matrix. Symbols: H values, *B batch dimensions.
"""

from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal, constraints, kl_divergence, register_kl

from pyro_nngp._autograd import apply
from pyro_nngp.distributions.expandable import Expandable
from pyro_nngp.linalg import cholesky, factor_log_det, half_solve


class ZeroMeanNormal(Expandable):
    """N(0, K), which factorizes K when a draw or a density first needs it.

    Args:
        cov: K, (*B, H, H), without a nugget.
        jitter: relative nugget; a matrix that has no factor gets more, with a warning.

    Raises:
        NotPositiveDefiniteError: when K has no factor, not even with a nugget of 1e-2.
    """

    arg_constraints = {"cov": constraints.square}
    support = constraints.real_vector
    has_rsample = True
    batched = ("cov",)

    def __init__(self, cov: Float[Tensor, "*B H H"], jitter: float = 0.0, *, validate_args: bool | None = None) -> None:
        self.cov, self.jitter = cov, jitter
        self._full: MultivariateNormal | None = None
        super().__init__(cov.shape[:-2], cov.shape[-1:], validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "ZeroMeanNormal":
        new = super().expand(batch_shape, _instance)
        new._full = None  # of another shape
        return new

    @property
    def full(self) -> MultivariateNormal:
        """The distribution with its factor, which is computed again if gradients of K are wanted that it lacks."""
        wanted = torch.is_grad_enabled() and self.cov.requires_grad
        if self._full is None or (wanted and not self._full.scale_tril.requires_grad):
            tril = cholesky(self.cov, self.jitter, escalate=True)
            self._full = dist.MultivariateNormal(tril.new_zeros(tril.shape[-1]), scale_tril=tril)
        return self._full

    @property
    def mean(self) -> Float[Tensor, "*B H"]:
        """Zero."""
        return self.cov.new_zeros(self.cov.shape[:-1])

    @property
    def variance(self) -> Float[Tensor, "*B H"]:
        """The diagonal of K with its nugget."""
        return self.cov.diagonal(dim1=-2, dim2=-1) * (1 + self.jitter)

    def rsample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "..."]:
        return self.full.rsample(sample_shape)

    def _log_prob(self, value: Float[Tensor, "... H"]) -> Float[Tensor, "..."]:
        return self.full.log_prob(value)


@register_kl(Independent, ZeroMeanNormal)
def _kl_diagonal(q: Independent, p: ZeroMeanNormal) -> Tensor:
    if not isinstance(q.base_dist, Normal) or q.reinterpreted_batch_ndims != 1:
        raise NotImplementedError("no closed form: known for Normal(...).to_event(1) only")
    return apply(_Divergence, p.cov, q.base_dist.loc, q.base_dist.scale.square(), p.jitter)[0]


@register_kl(MultivariateNormal, ZeroMeanNormal)
def _kl_dense(q: MultivariateNormal, p: ZeroMeanNormal) -> Tensor:
    return kl_divergence(q, p.full)


class _Divergence(torch.autograd.Function):
    """(K, m, s, jitter) -> (KL, P), of which KL has a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(cov: Tensor, loc: Tensor, var: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
        return _divergence(cov, loc, var, jitter)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.jitter = inputs[3]
        ctx.save_for_backward(*inputs[:3], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        cov, loc, var, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            inverse = _divergence(cov, loc, var, ctx.jitter)[1]
        half, alpha = grad[..., None] / 2, (inverse @ loc[..., None])[..., 0]
        grad_cov = inverse - (inverse * var[..., None, :]) @ inverse - alpha[..., None] * alpha[..., None, :]
        nugget = 1 + ctx.jitter * torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
        grad_cov = grad_cov * (half[..., None] * nugget)
        grad_var = half * (inverse.diagonal(dim1=-2, dim2=-1) - 1 / var)
        grads = grad_cov, 2 * half * alpha, grad_var
        return *(each.sum_to_size(x.shape) for each, x in zip(grads, (cov, loc, var), strict=True)), None


def _divergence(cov: Tensor, loc: Tensor, var: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Divergence and P."""
    tril = cholesky(cov, jitter, escalate=True)
    eye = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
    root = half_solve(tril, eye.expand_as(tril))
    white = (root @ loc[..., None])[..., 0]
    spread = (root.square().sum(-2) * var + white.square() - 1 - var.log()).sum(-1)
    return (spread + factor_log_det(tril)) / 2, root.mT @ root
