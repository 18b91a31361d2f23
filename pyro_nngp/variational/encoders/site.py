"""An encoder whose network replaces observations by Gaussian sites and conditions on them exactly.

Cost: :math:`O(U n^3)`. Symbols: as in :mod:`pyro_nngp.variational.encoders.base`.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.linalg import add_diagonal, cholesky, half_solve, reverse_cholesky
from pyro_nngp.variational.encoders.base import Neighborhood, Row, bounded, check_widths, normalized, rough_latent

_FEATURES = 6  # of a node, beside its D relative coordinates


class SiteEncoder(nn.Module):
    r"""Sites by a graph network, q(u_i) by conditioning on them.

    A node's features are its response (a rough inverse of the likelihood's link, less the mean function), its
    correlation with point i, its weight in the prior's conditional of :math:`u_i`, the relative standard deviation of
    that conditional, its place relative to i and which kind of node it is. Layers are
    :math:`H^{l+1} = \mathrm{ReLU}(H^l W^l + \tilde A H^l U^l + b^l)`, with the normalized correlations of all nodes for
    :math:`\tilde A`. The output of node j is a site of :math:`u_j`, target :math:`t_j` and precision
    :math:`\tau_j`, and two corrections :math:`s_j, g_j` that start at 0 and 1. With the kernel matrix :math:`G G^\top`
    of the nodes, parents first in their order, then i, then others, the posterior given the sites has

    .. math:: m = G M^{-1} G^\top \mathrm{diag}(\tau)\, t, \quad V = G M^{-1} G^\top = (G U^{-\top})(G U^{-\top})^\top,
       \quad M = I + G^\top \mathrm{diag}(\tau)\, G = U U^\top,

    U an upper triangle. The encoder gives :math:`m_i` and row i of the lower triangle :math:`G U^{-\top}`, its diagonal
    entry times :math:`e^{s_i}`, the entry of parent j times :math:`g_j`. With every point among the nodes and the right
    sites this is the exact posterior.

    Args:
        input_dim: D.
        widths: of the hidden layers.
        num_context: number of nearest other points in the neighborhood, in addition to the parents: points early in the
            ordering have no near parents.
        response: rough values of f, ``(likelihood, y) -> (N,)`` or (L, N); None is :func:`rough_latent`.
    """

    def __init__(
        self,
        input_dim: int,
        widths: tuple[int, ...] = (20, 10),
        num_context: int = 10,
        response: Callable[[Likelihood, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if input_dim < 1 or num_context < 0:
            actual = f"{input_dim} and {num_context}"
            fail("SiteEncoder", "input_dim >= 1 and num_context", ">= 0", actual, "Give the number of columns of x.")
        check_widths("SiteEncoder", widths)
        self.input_dim = input_dim
        self.num_context, self.response = num_context, rough_latent if response is None else response
        sizes = (_FEATURES + input_dim, *widths)
        self.own, self.passed = (
            nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairwise(sizes)) for bias in (True, False)
        )
        self.head = nn.Linear(sizes[-1], 4)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, near: Neighborhood) -> Row:
        k, mask = near.w.shape[1], near.mask
        cov = near.covariance(near.x, near.x)
        scale = torch.where(mask, cov.diagonal(dim1=-2, dim2=-1), 1.0).sqrt()
        correlation = cov / (scale[:, :, None] * scale[:, None, :]) * (mask[:, :, None] & mask[:, None, :])
        target = (near.response - near.mean) / scale * mask
        moved, log_precision, shrink, gate = self._sites(near, scale, correlation, target).unbind(-1)

        precision = log_precision.exp() / scale.square() * mask
        loc, row = _posterior_row(near, cov, scale * (target + moved), precision)
        return loc, row[..., -1] * shrink[..., 0].exp(), row[..., :-1] * (1 + gate[..., 1 : 1 + k])

    def _sites(self, near: Neighborhood, scale: Tensor, correlation: Tensor, target: Tensor) -> Tensor:
        """Shift, log precision, correction of the diagonal and of the row, for each node, (..., U, n, 4)."""
        n, k = near.mask.shape[1], near.w.shape[1]
        node = torch.arange(n, device=near.x.device)
        offset = (near.x - near.x[:, :1]) * near.mask[..., None]
        radius = offset.square().sum(-1).mean(-1).sqrt().clamp(min=torch.finfo(offset.dtype).tiny)
        geometry = torch.stack(
            [
                correlation[:, 0],
                F.pad(near.w, (1, n - 1 - k)),
                (near.var.sqrt() / scale[:, 0])[:, None].expand(-1, n),
                (node == 0).to(scale).expand(len(scale), -1),
                ((node > 0) & (node <= k)).to(scale).expand(len(scale), -1),
            ],
            -1,
        )
        geometry = torch.cat([geometry, offset / radius[:, None, None]], -1)
        hidden = torch.cat([target[..., None], geometry.expand(*target.shape, -1)], -1)
        adjacency = normalized(correlation)
        for own, passed in zip(self.own, self.passed, strict=True):
            hidden = F.relu(own(hidden) + adjacency @ passed(hidden))
        return bounded(self.head(hidden))


def _posterior_row(near: Neighborhood, cov: Tensor, site: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Mean at node 0 and its row of the posterior's factor, (..., U, K + 1), parents as listed, then the diagonal.

    Computed in double precision, in which the nugget keeps the kernel matrices of near duplicates positive definite.
    """
    n, k = near.mask.shape[1], near.w.shape[1]
    node = torch.arange(n, device=cov.device)
    last = int(near.rank.max()) + 1
    order = torch.where((node > 0) & (node <= k), near.rank, last + node).argsort(dim=-1)
    mask, rows = near.mask.gather(-1, order), torch.arange(len(order), device=order.device)[:, None]
    kernel = cov.double()[rows[..., None], order[:, :, None], order[:, None, :]] * (mask[:, :, None] & mask[:, None, :])
    own = kernel.diagonal(dim1=-2, dim2=-1)
    tril = cholesky(add_diagonal(kernel, torch.where(mask, near.jitter * own, 1.0)), 0.0)
    site, precision = (values.double()[..., rows, order] for values in (site, precision))
    system = tril.mT @ (precision[..., None] * tril) + torch.eye(n, dtype=tril.dtype, device=tril.device)
    triu = reverse_cholesky(system)
    right = torch.stack([tril[:, k].expand(precision.shape), ((precision * site)[..., None, :] @ tril)[..., 0, :]], -1)
    row, pulled = half_solve(triu.mT, right, transposed=True).unbind(-1)
    loc = (row * pulled).sum(-1)
    row = torch.cat([row[..., rows, order[:, :k].argsort(dim=-1)], row[..., k, None]], -1)
    return loc.to(cov.dtype), row.to(cov.dtype)
