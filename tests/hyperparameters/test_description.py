"""What ``print`` shows of kernels, graphs and distributions."""

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroSample

import pyro_nngp as nngp
from pyro_nngp.kernels import RBF, Matern32, Matern52

X = torch.linspace(0, 1, 40, dtype=torch.float64)[:, None].expand(-1, 2).clone()


def test_values_priors_and_what_is_unset():
    assert repr(Matern52(2)) == "Matern52(2, variance unset, lengthscale unset)"
    kernel = Matern52(3, variance=0.25, lengthscale=torch.tensor([0.1, 2.0, 30.0]), active_dims=[0, 2, 3])
    assert repr(kernel) == "Matern52(active_dims=[0, 2, 3], variance=0.25, lengthscale=[0.1, 2, 30])"
    kernel.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
    assert repr(kernel) == "Matern52(active_dims=[0, 2, 3], variance~LogNormal, lengthscale~LogNormal)"
    kernel.variance = PyroSample(lambda _: dist.Gamma(1.0, 1.0))
    assert "variance~a function of the module" in repr(kernel)


def test_long_vectors_show_range_and_shape():
    kernel = RBF(8, variance=1.0, lengthscale=torch.arange(1.0, 9.0))
    assert repr(kernel) == "RBF(8, variance=1, lengthscale=1..8 (8,))"


def test_sums_show_their_parts():
    text = repr(RBF(1, 1.0, 0.5) + Matern32(1, 2.0, 0.1))
    assert "RBF(1, variance=1, lengthscale=0.5)" in text
    assert "Matern32(1, variance=2, lengthscale=0.1)" in text


def test_printing_within_a_program_has_no_effects():
    kernel = Matern52(2, lengthscale=0.5)
    kernel.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    with pyro.poutine.trace() as traced:
        repr(kernel)
    assert not traced.trace.nodes


def test_graphs_and_distributions_show_sizes():
    graph = nngp.NeighborGraph(X, 5)
    assert repr(graph) == "NeighborGraph(N=40, D=2, K=5, float64 on cpu)"
    prior = nngp.NNGP(Matern52(2, 1.0, 0.5).double(), graph)
    assert repr(prior) == f"NNGP(Matern52(2, variance=1, lengthscale=0.5), {graph})"
    rows = torch.arange(7)
    part = nngp.NNGP(Matern52(2, 1.0, 0.5).double(), graph, graph.batch(rows)).expand([3])
    assert repr(part) == f"NNGP(Matern52(2, variance=1, lengthscale=0.5), 7 rows of {graph}, batch_shape=(3,))"
