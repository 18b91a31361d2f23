"""The graph convolutional encoder against the paper's formulas, in units of the prior."""

import pytest
import torch
from builders import matern, q_of, waves

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import (
    Bernoulli,
    Gaussian,
)
from pyro_nngp.means import ConstantMean
from pyro_nngp.models import NPVI
from pyro_nngp.variational import Amortized
from pyro_nngp.variational.encoders import (
    GraphConvolutionEncoder,
)

F64 = torch.float64


def test_graph_convolution_is_that_of_the_paper_with_biases():
    """Equation 13 written out for single points."""
    x, y = waves()
    encoder = GraphConvolutionEncoder((4, 3))
    gp = NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=5, guide=Amortized(encoder), mean=ConstantMean(0.2))
    q, (_, var) = q_of(gp), NNGP(gp.kernel, gp.graph, jitter=gp.jitter).conditionals
    spread = gp.kernel.variance.sqrt()
    for i in (int(gp.graph.order[2]), 7, 20):
        near = gp.graph.neighbors[i][gp.graph.neighbors[i] >= 0]
        nodes = torch.cat([torch.tensor([i]), near])
        adjacency = gp.kernel(x[nodes]).detach().clone()
        adjacency[0, 1:] = 0
        root = torch.diag(adjacency.sum(-1).rsqrt())
        outputs = []
        for layers in (encoder.loc, encoder.row):
            hidden = (y[nodes, None] - 0.2) / spread
            for number, layer in enumerate(layers):
                hidden = root @ adjacency @ root @ (hidden @ layer.weight.mT + layer.bias)
                hidden = hidden if number == 2 else hidden.relu()
            outputs.append(hidden[:, 0])
        torch.testing.assert_close(q.loc[i], spread * outputs[0].mean())
        torch.testing.assert_close(q.scale[i], var[i].sqrt() * (8 * (outputs[1][0] / 8).tanh()).exp())
        torch.testing.assert_close(q.weights[i, : len(near)], var[i].sqrt() * outputs[1][1:])


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_other_units_of_y_change_the_units_of_q_alone(unit):
    """As for every other guide; the paper's networks, whose outputs are q itself, know no unit."""
    x, y = waves()
    encoder = GraphConvolutionEncoder()

    def q(unit, level):
        k = Matern52(2, variance=1.3 * torch.tensor(unit).square(), lengthscale=torch.tensor(0.4))
        targets, noise, mean = unit * (y + level), Gaussian(0.1 * unit**2), ConstantMean(unit * level)
        return q_of(NPVI(x, targets, k, noise, num_neighbors=5, guide=Amortized(encoder), mean=mean))

    here, there = q(1.0, 0.0), q(unit, 2.0)
    for name in ("loc", "scale", "weights"):
        torch.testing.assert_close(getattr(there, name), unit * getattr(here, name), rtol=1e-5, atol=1e-6 * unit)


def test_rows_of_labels_that_are_zero_can_be_learned():
    """A label of zero is no zero to the networks, whose outputs there would not depend on their weights."""
    x, y = waves()
    encoder = GraphConvolutionEncoder()
    gp = NPVI(
        x, (y > 0).to(y.dtype), matern(), Bernoulli(), num_neighbors=5, guide=Amortized(encoder), mean=ConstantMean(0.0)
    )
    q_of(gp).scale.log().sum().backward()
    first = encoder.row[0].weight.grad.clone()
    encoder.zero_grad()
    q_of(gp).scale[gp.y == 0].log().sum().backward()
    assert encoder.row[0].weight.grad.norm() > 0.01 * first.norm() > 0
