"""The two graph convolutional networks of NPVI-NN (Liu and Liu 2019, section 3.3, eq. 13).

Cost: :math:`O(U n^2)`. Symbols: as in :mod:`pyro_nngp.variational.encoders.base`.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.variational.encoders.base import Neighborhood, Row, check_widths, normalized, observed


class GraphConvolutionEncoder(nn.Module):
    r"""The two graph convolutional networks of the paper.

    With :math:`A_i = [k_{ii}, 0;\, k_{\alpha(i),i}, K_{\alpha(i),\alpha(i)}]` and D its row sums, both compute
    :math:`H^{l+1} = \mathrm{ReLU}(D^{-1/2} A_i D^{-1/2} H^l W^l)` from the observations :math:`H^0`, without ReLU in
    the last layer. The mean of q(u_i) is the average of the first network's last layer over the nodes; the nodes'
    values of the second one's are the row of R, the diagonal one made positive by softplus.

    Args:
        widths: of the hidden layers.
        response: initial values of the nodes, ``(likelihood, y) -> (N,)`` or (L, N); None is y itself, as in the paper.

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
        self.response = observed if response is None else response
        sizes = (1, *widths, 1)
        self.loc, self.row = (nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)) for _ in range(2))

    def forward(self, near: Neighborhood) -> Row:
        cov = near.covariance(near.x, near.x) * (near.mask[:, :, None] & near.mask[:, None, :])
        away = torch.ones_like(cov)
        away[:, 0, 1:] = 0
        adjacency = normalized(cov * away)
        loc, row = (_convolve(layers, adjacency, near.response[..., None])[..., 0] for layers in (self.loc, self.row))
        average = (loc * near.mask).sum(-1) / near.mask.sum(-1)
        return average, _positive(row[..., 0]), row[..., 1:]


def _convolve(layers: nn.ModuleList, adjacency: Tensor, hidden: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        hidden = adjacency @ layer(hidden)
        hidden = F.relu(hidden) if i + 1 < len(layers) else hidden
    return hidden


def _positive(value: Tensor) -> Tensor:
    return F.softplus(value) + torch.finfo(value.dtype).eps
