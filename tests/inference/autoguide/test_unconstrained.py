"""The map between hyperparameters and one vector, against transformed distributions of torch."""

import pyro
import pyro.distributions as dist
import torch
from builders import F64, normal
from torch.distributions import biject_to

from pyro_nngp.inference.autoguide.unconstrained import Unconstrained


def program():
    zero = torch.zeros((), dtype=F64)
    pyro.sample("scale", dist.LogNormal(zero, 1.0).expand([3]).to_event(1))
    with pyro.plate("rows", 2):
        pyro.sample("shares", dist.Dirichlet(torch.ones(2, 4, dtype=F64)))
        pyro.sample("level", dist.Normal(zero, 1.0))


def test_values_have_the_density_of_the_transformed_vector():
    sites = dict(pyro.poutine.trace(program).get_trace().iter_stochastic_nodes())
    space, start = Unconstrained.of(sites, ["scale", "shares", "level"])
    for name, value in space.values(start).items():
        torch.testing.assert_close(value, sites[name]["value"])
    u = normal(len(start))
    parts, values, densities = list(space.unpack(u)), space.values(u), space.densities(u)
    for name, part, value in parts:
        support = sites[name]["fn"].support
        base = dist.Normal(torch.zeros_like(part), 1.0)
        base = base.to_event(part.dim() - len(sites[name]["fn"].batch_shape))
        want = dist.TransformedDistribution(base, [biject_to(support)]).log_prob(values[name])
        torch.testing.assert_close(base.log_prob(part) + densities[name], want)
        assert torch.equal(value, values[name])
    assert space.volume(u) == -sum(float(each.sum()) for each in densities.values())
