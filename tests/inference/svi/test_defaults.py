"""Defaults of training that depend on the method."""

from types import SimpleNamespace

import torch
from torch import nn
from training import Line, bumps, vecchia

from pyro_nngp.inference import IntegratedELBO
from pyro_nngp.inference.svi.defaults import (
    has_neighbors_of_graph,
    minibatch,
    most_rows,
    neighbor_parameters,
    suits_lbfgs,
)
from pyro_nngp.models import VNNGP, Vecchia


def test_batches_shrink_with_the_number_of_latent_functions():
    x, y = bumps(20)
    assert minibatch(VNNGP(x, y, num_neighbors=3)) == minibatch(Line()) == 1024
    assert minibatch(VNNGP(x, y[:, None].repeat(1, 4), num_neighbors=3)) == 256
    assert minibatch(VNNGP(x, y[:, None].repeat(1, 9), num_neighbors=3)) == 128


def test_the_largest_subsample_shrinks_with_the_number_of_neighbors():
    assert most_rows(vecchia(60), 10**6) == 20_000
    assert most_rows(Line(), 10**6) == 20_000
    wide = Vecchia(*bumps(102), num_neighbors=100)
    assert most_rows(wide, 10**6) == 2**26 // 100**2
    assert most_rows(wide, 60) == 60


def test_a_method_can_say_that_its_loss_is_smooth():
    line = Line()  # its guide draws a site
    assert not suits_lbfgs(line, False, IntegratedELBO())
    line.has_smooth_loss = True
    assert suits_lbfgs(line, False, IntegratedELBO())


def test_only_methods_that_find_neighbors_have_parameters_of_the_metric():
    assert neighbor_parameters(Line()) == []
    gp = vecchia(60)
    assert {id(param) for param in neighbor_parameters(gp)} >= {id(param) for param in gp.kernel.parameters()}
    assert not {id(param) for param in neighbor_parameters(gp)} & {id(param) for param in gp.likelihood.parameters()}
    assert neighbor_parameters(SimpleNamespace(refresh_neighbors=print)) == []
    assert has_neighbors_of_graph(gp, 1e-6)
    gp.kernel.lengthscale = 3 * gp.kernel.lengthscale.detach()
    assert has_neighbors_of_graph(gp, 1e-3)
    gp.kernel.lengthscale = gp.kernel.lengthscale.detach() * gp.x.new_tensor([1.0, 1.1])
    assert not has_neighbors_of_graph(gp, 0.09)
    assert not has_neighbors_of_graph(Line(), 1.0)
    inducing = nn.Module()
    inducing.refresh_neighbors, inducing.z = print, nn.Parameter(torch.zeros(1))
    assert neighbor_parameters(inducing) == [inducing.z]
