r"""The loss of a nearest-neighbor prior relative to the exact Gaussian process, as a function of K.

For the exact prior :math:`N(0, \Sigma)` and the nearest-neighbor prior with conditional variances :math:`v_j`,

.. math:: KL[\text{exact} \,\|\, \text{NN}] = \tfrac12 \Big( \sum_j \log v_j - \log\det \Sigma \Big),

since each conditional of the latter is one of the exact process. Leave-one-out predictions of both follow from the
inverse of the covariance C of the data,

.. math:: y_i \mid y_{-i} \sim N\big(y_i - [C^{-1} y]_i / [C^{-1}]_{ii},\; 1 / [C^{-1}]_{ii}\big).

Cost: O(N^3) per K, so use subsets.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from pyro import poutine
from torch import Tensor

from pyro_nngp._checks import (
    check_finite,
    check_inputs,
    check_num_neighbors,
    check_positive,
    check_same_kind,
    check_tensor,
    fail,
)
from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels.binding import bind_double, check_covariance
from pyro_nngp.linalg import DEFAULT_JITTER, add_diagonal, cholesky, factor_inverse, factor_log_det, factor_solve
from pyro_nngp.neighbors import NeighborGraph

_MAX_POINTS = 2000


class NNReport(NamedTuple):
    """The loss at each K. ``pandas.DataFrame(report._asdict())`` is a table.

    Attributes:
        num_neighbors: K.
        kl: divergence of the nearest-neighbor prior from the exact one, in nats.
        score_loss: mean log density of y_i predicted from all others, exact minus nearest-neighbor, in nats per point.
    """

    num_neighbors: Int[Tensor, " R"]
    kl: Float[Tensor, " R"]
    score_loss: Float[Tensor, " R"]


@torch.no_grad()
def compare_to_exact(
    kernel: Any,
    x: Float[Tensor, "N D"],
    y: Float[Tensor, " N"],
    num_neighbors: Iterable[int],
    noise_var: float | Float[Tensor, ""],
    **graph_options: Any,
) -> NNReport:
    """Compare nearest-neighbor priors with the exact process on a subset of the data, in double precision.

    Args:
        kernel: a kernel, at the hyperparameters of interest.
        x: inputs, at most 2,000 of them.
        y: targets minus the mean function.
        num_neighbors: the numbers K to try, each in 1..N-1.
        noise_var: variance of the noise on y, positive.
        **graph_options: arguments of :class:`~pyro_nngp.neighbors.graph.NeighborGraph`: ordering, seed, metric.

    Raises:
        ValueError: for more than 2,000 points, shapes that differ, K out of range, noise that is not positive, or a
            kernel whose hyperparameters have priors instead of values.

    Cost: O(N^3) time and O(N^2) memory for each K.
    """
    where = "compare_to_exact"
    check_inputs(where, "x", x)
    check_tensor(where, "y", y)
    if len(x) > _MAX_POINTS:
        fail(where, "x", f"to have at most {_MAX_POINTS} points", len(x), "Take a subset, near together or at random.")
    if y.shape != x.shape[:1]:
        fail(where, "y", f"of shape ({len(x)},)", tuple(y.shape), "One target per row of x.")
    check_same_kind(where, x=x, y=y)
    check_covariance(where, kernel, x)
    check_finite(where, "y", y)
    if isinstance(noise_var, Tensor) and noise_var.numel() == 1:
        noise_var = noise_var.item()
    check_positive(where, "noise_var", noise_var, "It is a variance: predictions of y need noise.")
    if not isinstance(num_neighbors, Iterable) or isinstance(num_neighbors, str | bytes | Tensor):
        fail(where, "num_neighbors", "to be a list of ints", f"{num_neighbors!r:.40}", "List them.", TypeError)
    ks = list(num_neighbors)
    if not ks:
        fail(where, "num_neighbors", "to hold a number", "none", "List them.")
    for k in ks:
        check_num_neighbors(where, k, len(x) - 1)
    dtype, x, y = x.dtype, x.double(), y.double()
    with poutine.trace() as program:
        cov = bind_double(kernel, dtype)
        prior = cov(x, x)
    if program.trace.stochastic_nodes:
        cure = "Build the kernel anew with the values of interest, such as posterior medians."
        fail(where, "kernel", "to have values", f"priors on {program.trace.stochastic_nodes}", cure)
    prior = add_diagonal(prior, DEFAULT_JITTER * prior.diagonal())
    log_det = factor_log_det(cholesky(prior, 0.0))
    exact = _leave_one_out(prior, y, noise_var)
    kls, losses = [], []
    for k in ks:
        approximate = NNGP(cov, NeighborGraph(x, k, **graph_options))
        root = approximate.color(torch.eye(len(x), dtype=x.dtype, device=x.device)).mT
        kls.append(0.5 * (approximate.conditionals[1].log().sum() - log_det))
        losses.append(exact - _leave_one_out(root @ root.mT, y, noise_var))
    return NNReport(torch.tensor(ks), torch.stack(kls), torch.stack(losses))


def _leave_one_out(cov: Tensor, y: Tensor, noise_var: float | Tensor) -> Tensor:
    """Mean log density of each y given all others."""
    tril = cholesky(cov + noise_var * torch.eye(len(y), dtype=y.dtype, device=y.device), 0.0)
    precision = factor_inverse(tril).diagonal()
    residual = factor_solve(tril, y[:, None])[:, 0] / precision
    return torch.distributions.Normal(torch.zeros_like(y), precision.rsqrt()).log_prob(residual).mean()
