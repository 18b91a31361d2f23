r"""Networks that map a point's neighborhood to its row of q(u): the recognition models of NPVI-NN.

The neighborhood of point i has n nodes: i, its K parents in the graph and, for some encoders, further near points. All
layers are equivariant under permutations of the nodes other than i, so the outputs do not depend on the order of the
neighbors. No parameter has the size of the data: a trained encoder applies to any number of points and any data set.

- :class:`GraphConvolutionEncoder`: Liu and Liu (2019, section 3.3, eq. 13).
- :class:`SiteEncoder`: new here. The network replaces each node's observation by a Gaussian one (a site); mean and row
  of R then follow from the exact posterior on the nodes given the sites. For a Gaussian likelihood the right sites are
  known (y and its noise variance), and the network only has to learn them.
- :class:`ConditionalEncoder`: new here. It starts with the likelihood's sites and computes the mean and the row by
  the compiled conditional of the prior. It is about eight times as fast as :class:`SiteEncoder` and learns in fewer
  steps.

A step computes the rows of a batch and of its parents: up to K + 1 rows per point of the batch, and nearly that many
where points lie in many dimensions. Small batches, such as the 50 of the paper, therefore cost about as much per epoch
as large ones and take many more steps.

All suit data whose lengthscales span few neighborhoods. Where the kernel is smooth at the distance between points, the
prior allows a point to deviate very little from the prediction of its parents. Means that are computed one neighborhood
at a time deviate by more, and the divergence is large. That is why the nugget is a percent of the variance by default
where there is an encoder; a table of parameters (no encoder) needs none.

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
