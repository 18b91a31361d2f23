r"""Networks that read a point's neighborhood and say its row of q(u): the recognition models of NPVI-NN.

Each point i is seen with n nodes: itself, its K parents in the graph and, for some encoders, further near points. All
layers are equivariant under permutations of the nodes beside i, so the outputs do not depend on how neighbors are
listed. Nothing has the size of the data: one trained encoder serves any number of points and any data set.

- :class:`GraphConvolutionEncoder` is that of Liu and Liu (2019, section 3.3, eq. 13).
- :class:`SiteEncoder` is ours. The network replaces each node's observation by a Gaussian one (a site); mean and row of
  R then follow from the exact posterior on the nodes given the sites. For a Gaussian likelihood the right sites are
  known (y and its noise variance) and the network has only to find them.
- :class:`ConditionalEncoder`, ours too, starts with the likelihood's own sites and makes the mean and the row by the
  compiled conditional of the prior. It takes about an eighth of the time of the other, and learns in fewer steps.

A step computes the rows of a batch and of its parents, up to (K + 1) times as many as a batch has points, where points
lie in many dimensions nearly that. Small batches, such as the 50 of the paper, therefore cost no more per epoch than
large ones and take many more steps.

All suit data whose lengthscales span few neighborhoods. Where the kernel is smooth at the distance between points, the
prior allows a point to differ from its parents' forecast by very little, and means that were found one neighborhood at
a time differ by more: the divergence is then large. A nugget (`jitter` of a percent or so) or a table of parameters (no
encoder) helps.

Cost: :math:`O(U n^2)` for the graph convolution, :math:`O(U n^3)` for the sites.
Symbols: as in :mod:`pyro_nngp.variational.encoders.base`.
"""

from pyro_nngp.variational.encoders.base import Neighborhood, Row, observed, rough_latent
from pyro_nngp.variational.encoders.conditional import ConditionalEncoder
from pyro_nngp.variational.encoders.graph_convolution import GraphConvolutionEncoder
from pyro_nngp.variational.encoders.site import SiteEncoder

__all__ = [
    "ConditionalEncoder",
    "GraphConvolutionEncoder",
    "Neighborhood",
    "Row",
    "SiteEncoder",
    "observed",
    "rough_latent",
]
