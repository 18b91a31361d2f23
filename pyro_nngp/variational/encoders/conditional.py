"""An encoder that is one nearest-neighbor regression on sites, corrected by a network.

Cost: :math:`O(U n^3)` in compiled code. Symbols: as in :mod:`pyro_nngp.variational.encoders.base`.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.variational.encoders.base import Neighborhood, Row, bounded, check_widths, rough_latent

_FEATURES = 7  # of a node


class ConditionalEncoder(nn.Module):
    r"""One nearest-neighbor regression on sites, corrected by a network; as quick as the prior's conditional.

    Node j has a Gaussian observation :math:`N(t_j, 1 / \tau_j)` of :math:`f_j`: the site of its likelihood at a rough
    value of f; for Gaussian noise, y and its precision, which are exact. A network of the node alone
    shifts :math:`t_j` by some standard deviations :math:`\tau_j^{-1/2}` and scales :math:`\tau_j`. With weights
    :math:`a` and variance c of :math:`u_i` given the noisy :math:`u_j`, :math:`j \ne i`, and w, v of the prior
    given its parents,

    .. math:: m_i = \frac{a^\top t / c + \tau_i t_i}{1 / c + \tau_i}, \qquad
       R_{ii} = \frac{e^{s_i}}{\sqrt{1 / v + \tau_i}}, \qquad
       R_{ij} = g_{j} \frac{w_j}{1 + v \tau_i} R_{ii} .

    :math:`m_i` is the posterior mean of :math:`u_i` on the nodes given the sites; :math:`R_{ii}`, for :math:`s_i = 0`,
    is the standard deviation of :math:`u_i` given its parents and its site. :math:`s_i` and :math:`g_j` start at 0,
    as do the corrections of the sites, so that for Gaussian noise training begins near the optimum. A node's features
    are its target in units of the prior, the logarithm of its precision in them, its correlation with point i, its
    weight w, the relative standard deviation :math:`v^{1/2}`, and which kind of node it is.

    Args:
        widths: of the hidden layers.
        num_context: number of nearest other points in the neighborhood, in addition to the parents.
        response: rough values of f, ``(likelihood, y) -> (N,)`` or (L, N); None is :func:`rough_latent`.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (20, 10),
        num_context: int = 10,
        response: Callable[[Likelihood, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if num_context < 0:
            fail("ConditionalEncoder", "num_context", ">= 0", num_context, "Give 0 for the parents alone.")
        check_widths("ConditionalEncoder", widths)
        self.num_context, self.response = num_context, rough_latent if response is None else response
        sizes = (_FEATURES, *widths)
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        head = nn.Linear(sizes[-1], 3)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.network = nn.Sequential(*layers, head)

    def forward(self, near: Neighborhood) -> Row:
        k, mask, own = near.w.shape[1], near.mask, near.x[:, :1]
        moved, grown, shape = self._corrections(near, near.covariance(own, near.x)[:, 0]).unbind(-1)
        tau = near.precision * grown.exp()
        target = (near.target - near.mean + moved * near.precision.rsqrt()) * mask
        noise, points = tau.reciprocal()[..., 1:].flatten(-2), near.x[:, 1:].flatten(0, 1)
        rows = torch.where(mask[:, 1:], torch.arange(len(points), device=mask.device).view(mask[:, 1:].shape), -1)
        a, var = graph_conditional(near.covariance, own[:, 0], points, rows, noise, near.jitter)
        others, tau = (a * target[..., 1:]).sum(-1), tau[..., 0]
        loc = (others / var + tau * target[..., 0]) / (1 / var + tau)
        scale = shape[..., 0].exp() * (1 / near.var + tau).rsqrt()
        return loc, scale, shape[..., 1 : 1 + k] * near.w * (scale / (1 + near.var * tau))[..., None]

    def _corrections(self, near: Neighborhood, cov: Tensor) -> Tensor:
        """Shift, growth of the precision, shape of the row, for each node, (..., U, n, 3)."""
        n, k = near.mask.shape[1], near.w.shape[1]
        node, own = torch.arange(n, device=cov.device), cov[:, :1]
        of_row = [
            cov / own,
            F.pad(near.w, (1, n - 1 - k)),
            (near.var / own[:, 0]).sqrt()[:, None].expand(-1, n),
            (node == 0).to(cov).expand(len(cov), -1),
            ((node > 0) & (node <= k)).to(cov).expand(len(cov), -1),
        ]
        of_site = [(near.target - near.mean) / own.sqrt(), (near.precision * own).log() / 4]
        features = torch.stack([part.expand(near.target.shape) for part in (*of_site, *of_row)], -1)
        return bounded(self.network(features * near.mask[..., None]))
