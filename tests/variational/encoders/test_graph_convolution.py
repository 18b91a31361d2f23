"""The graph convolutional encoder against the paper's formulas."""

import torch
from oracles.waves import data, kernel

from pyro_nngp.likelihoods import (
    Gaussian,
)
from pyro_nngp.models import NPVI
from pyro_nngp.variational.encoders import (
    GraphConvolutionEncoder,
)

F64 = torch.float64


def test_graph_convolution_is_that_of_the_paper():
    """Equation 13 written out for single points."""
    x, y = data()
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=5, encoder=GraphConvolutionEncoder((4, 3)))
    q, encoder = gp.local.distribution(), gp.local.encoder
    for i in (int(gp.graph.order[2]), 7, 20):
        near = gp.graph.neighbors[i][gp.graph.neighbors[i] >= 0]
        nodes = torch.cat([torch.tensor([i]), near])
        adjacency = gp.kernel(x[nodes]).detach().clone()
        adjacency[0, 1:] = 0
        root = torch.diag(adjacency.sum(-1).rsqrt())
        outputs = []
        for layers in (encoder.loc, encoder.row):
            hidden = y[nodes, None]
            for number, layer in enumerate(layers):
                hidden = root @ adjacency @ root @ hidden @ layer.weight.mT
                hidden = hidden if number == 2 else hidden.relu()
            outputs.append(hidden[:, 0])
        torch.testing.assert_close(q.loc[i], outputs[0].mean())
        torch.testing.assert_close(q.scale[i], torch.nn.functional.softplus(outputs[1][0]))
        torch.testing.assert_close(q.weights[i, : len(near)], outputs[1][1:])
