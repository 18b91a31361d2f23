"""The input and output of encoders, and their shared functions.

Symbols: U points, n nodes each, K parents, D inputs, L latent functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_nngp._checks import fail
from pyro_nngp.kernels import Covariance
from pyro_nngp.likelihoods import Bernoulli, Binomial, Categorical, Likelihood, Poisson

Row: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Mean (L, U), diagonal (L, U) and off-diagonal entries (L, U, K) of rows of q(u); L may be absent."""


@dataclass(frozen=True)
class Neighborhood:
    """Some points and the nodes around them; node 0 is the point itself, nodes 1..K are its parents.

    Attributes:
        response: values of ``encoder.response`` for y, (L, U, n) or (U, n).
        mean: mean function, (U, n), or (*L, U, n) with one for each latent function.
        x: inputs, (U, n, D).
        mask: which nodes exist.
        covariance: the kernel.
        rank: positions of the nodes in the ordering, (U, n).
        w: weights of the prior's conditional of the point given its parents, (U, K).
        var: its variance, (U,).
        jitter: relative nugget of the prior.
        target: value of the Gaussian observation of f that replaces the likelihood of each node at `response`,
            (L, U, n) or (U, n).
        precision: its precision, positive.
    """

    response: Float[Tensor, "*L U n"]
    mean: Float[Tensor, "*#L U n"]
    x: Float[Tensor, "U n D"]
    mask: Bool[Tensor, "U n"]
    covariance: Covariance
    rank: Int[Tensor, "U n"]
    w: Float[Tensor, "U K"]
    var: Float[Tensor, " U"]
    jitter: float
    target: Float[Tensor, "*L U n"]
    precision: Float[Tensor, "*L U n"]


def bounded(logs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Logarithms kept within 8 of zero, near which they hardly change: no exponential overflows."""
    return 8 * (logs / 8).tanh()


def observed(likelihood: Likelihood, y: Tensor) -> Tensor:
    """y unchanged, (N,) or (L, N); labels of C classes as C indicators."""
    if isinstance(likelihood, Categorical) and likelihood.num_latents is not None:
        return F.one_hot(y.long(), likelihood.num_latents).movedim(-1, 0)
    if likelihood.num_latents is not None:
        cure = "Give the encoder a `response` that maps (likelihood, y) to values of all latent functions."
        fail("encoder", "likelihood", "with one latent function per output", type(likelihood).__name__, cure)
    return y.movedim(0, -1)


def rough_latent(likelihood: Likelihood, y: Tensor) -> Tensor:
    """A rough f from y alone: the inverse of the link, with half a count added to counts; labels become -1 and 1."""
    values = observed(likelihood, y).to(torch.get_default_dtype() if not y.is_floating_point() else y.dtype)
    if isinstance(likelihood, (Bernoulli, Categorical)):
        return 2 * values - 1
    if isinstance(likelihood, Binomial):
        return torch.logit((values + 0.5) / (likelihood.total_count + 1))
    if isinstance(likelihood, Poisson) and likelihood.link == "softplus":
        raised = values + 0.5
        return raised + torch.log(-torch.expm1(-raised))
    if likelihood.support is constraints.nonnegative_integer:
        return (values + 0.5).log()
    return values.log() if likelihood.support is constraints.positive else values


def check_encoder(where: str, encoder: Any) -> None:
    """Raise ``TypeError`` unless `encoder` is a torch module with ``response`` and ``num_context``."""
    if isinstance(encoder, nn.Module) and all(hasattr(encoder, name) for name in ("response", "num_context")):
        return
    expectation = "to be a torch module with `response` and `num_context`"
    cure = "Pass an instance of an encoder of pyro_nngp.variational.encoders, such as SiteEncoder(D)."
    fail(where, "guide.encoder", expectation, f"{encoder!r:.60}", cure, TypeError)


def check_widths(where: str, widths: Any) -> None:
    """Raise unless `widths` is a sequence of positive ints."""
    if not isinstance(widths, Sequence) or not all(isinstance(width, int) and width > 0 for width in widths):
        cure = "Give the widths of the hidden layers; only SiteEncoder takes the number of inputs, first."
        fail(where, "widths", "to be a sequence of ints >= 1", repr(widths), cure, TypeError)


def normalized(adjacency: Float[Tensor, "U n n"]) -> Float[Tensor, "U n n"]:
    """D^-1/2 A D^-1/2 for the row sums D; of absolute values, for kernels with negative ones."""
    degree = adjacency.abs().sum(-1)
    root = torch.where(degree > 0, degree, 1.0).rsqrt()
    return root[:, :, None] * adjacency * root[:, None, :]
