"""The two graph convolutional networks of NPVI-NN (Liu and Liu 2019, section 3.3, eq. 13).

Cost: :math:`O(U n^2)`. Symbols: as in :mod:`pyro_nngp.variational.encoders.base`.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.variational.encoders.base import Neighborhood, Row, bounded, check_widths, normalized, rough_latent


class GraphConvolutionEncoder(nn.Module):
    r"""The two graph convolutional networks of the paper, in units of the prior.

    With :math:`A_i = [k_{ii}, 0;\, k_{\alpha(i),i}, K_{\alpha(i),\alpha(i)}]` and D its row sums, both compute
    :math:`H^{l+1} = \mathrm{ReLU}(D^{-1/2} A_i D^{-1/2} (H^l W^l + b^l))` without ReLU in the last layer, whose node
    values are :math:`g` in the first network and :math:`h` in the second. With the responses :math:`r_j` of the nodes,
    the mean function :math:`\mu` and the prior's conditional variance :math:`v_i` of :math:`u_i` given its parents, and
    the own :math:`h_i` kept within 8 of zero,

    .. math:: H^0_j = \frac{r_j - \mu(x_j)}{k_{jj}^{1/2}}, \quad m_i = k_{ii}^{1/2} \bar g, \quad
       R_{ii} = v_i^{1/2} e^{h_i}, \quad R_{ij} = v_i^{1/2} h_j .

    Differs from the paper, where :math:`H^0 = y`, the outputs are :math:`m_i = \bar g` and :math:`R_{ij} = h_j`, and
    layers have no biases, as they do in the authors' public code. Without, :math:`h_i` is proportional to :math:`y_i`
    on either side of zero, since the row of :math:`A_i` for point i has one entry. That code also takes D from the
    whole covariance, which loses .2 nats on precipitation (``benchmarks/results/npvi.md``).

    Args:
        widths: of the hidden layers.
        response: rough values of f, ``(likelihood, y) -> (N,)`` or (L, N); None is
            :func:`~pyro_nngp.variational.encoders.base.rough_latent`.

    Raises:
        TypeError: if `widths` are not positive ints.

    Reference: Liu, Liu (2019), "Amortized variational inference with graph convolutional networks for Gaussian
    processes", AISTATS.
    """

    num_context = 0

    def __init__(
        self, widths: tuple[int, ...] = (20, 10), response: Callable[[Likelihood, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        check_widths("GraphConvolutionEncoder", widths)
        self.response = rough_latent if response is None else response
        sizes = (1, *widths, 1)
        self.loc, self.row = (nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes)) for _ in range(2))

    def forward(self, near: Neighborhood) -> Row:
        cov = near.covariance(near.x, near.x) * (near.mask[:, :, None] & near.mask[:, None, :])
        away = torch.ones_like(cov)
        away[:, 0, 1:] = 0
        adjacency = normalized(cov * away)
        spread = torch.where(near.mask, cov.diagonal(dim1=-2, dim2=-1), 1.0).sqrt()
        start = ((near.response - near.mean) / spread * near.mask)[..., None]
        loc, row = (_convolve(layers, adjacency, start)[..., 0] for layers in (self.loc, self.row))
        own, average = near.var.sqrt(), (loc * near.mask).sum(-1) / near.mask.sum(-1)
        return spread[:, 0] * average, own * bounded(row[..., 0]).exp(), own[:, None] * row[..., 1:]


def _convolve(layers: nn.ModuleList, adjacency: Tensor, hidden: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        hidden = adjacency @ layer(hidden)
        hidden = F.relu(hidden) if i + 1 < len(layers) else hidden
    return hidden
