"""Sums over discrete sites, beside sums over all their values in a loop."""

from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_nngp.inference.autoguide.discrete_sums import enumerated, summed

Y = torch.sin(torch.arange(12.0)).reshape(3, 4)


def program(rows=None):
    """Two discrete sites for each of 4 places, 3 measurements of each, and a label that nothing depends on."""
    pyro.sample("label", dist.Bernoulli(0.3))
    with pyro.plate("places", 4):
        a = pyro.sample("a", dist.Bernoulli(torch.tensor([0.1, 0.2, 0.3, 0.4])))
        b = pyro.sample("b", dist.Categorical(logits=torch.stack([a, 1 - a, 0.5 * a], -1)))
        pyro.sample("x", dist.Normal(a, 1.0), obs=Y[0])
        with pyro.plate("times", 3):
            pyro.sample("y", dist.Normal(b - a, 1.0), obs=Y)


def trace_of(model, nesting):
    return summed(poutine.trace(enumerated(model, nesting)).get_trace(), nesting)


def test_the_factor_is_the_sum_over_all_values():
    nodes = trace_of(program, 2).nodes
    terms = []
    for a, b in product(range(2), range(3)):
        values = {"a": torch.full((4,), float(a)), "b": torch.full((4,), b), "label": torch.tensor(1.0)}
        trace = poutine.trace(poutine.condition(program, values)).get_trace()
        terms.append(sum(trace.nodes[n]["fn"].log_prob(trace.nodes[n]["value"]).reshape(-1, 4).sum(0) for n in "abxy"))
    found = nodes["x and y over a and b"]["fn"].log_factor
    torch.testing.assert_close(found, torch.stack(terms).logsumexp(0))
    assert abs(nodes[" over label"]["fn"].log_factor) < 1e-6
    assert not {"a", "b", "x", "y", "label"} & set(nodes)


def other_plates():
    z = pyro.sample("z", dist.Bernoulli(0.5))
    with pyro.plate("places", 4):
        k = pyro.sample("k", dist.Bernoulli(0.2 + 0.5 * z))
        pyro.sample("x", dist.Normal(k, 1.0), obs=Y[0])


def continuous():
    k = pyro.sample("k", dist.Bernoulli(0.2))
    pyro.sample("t", dist.Normal(k, 1.0))


@pytest.mark.parametrize("model", [other_plates, continuous, poutine.scale(program, 2.0)])
def test_sums_that_are_not_by_rows(model):
    with pytest.raises(ValueError, match=r"AutoNNGP: expected sites of a sum over discrete ones .* Draw .* QuickNUTS"):
        trace_of(model, 2)
