"""Densities that are read from the operations of a program, beside densities of distributions by their parameters."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_nngp.inference.autoguide.observations import observed_sites

Y = torch.tensor([0.0, 1.0, 4.0, 2.0], dtype=torch.float64)
F = torch.tensor([0.1, -0.3, 0.7, 0.2], dtype=torch.float64)
LEVEL = torch.tensor(0.4, dtype=torch.float64)


def sites(program):
    """The observations of a program of f and a level."""
    leaves = [leaf.clone().requires_grad_() for leaf in (F, LEVEL)]

    def run(*at):
        return poutine.trace(program).get_trace(*at)

    return observed_sites(run(*leaves), leaves, run), leaves


def poisson(f, level):
    return dist.Poisson((level + 2 * f).exp())


def in_plate(f, level):
    with pyro.plate("rows", 4):
        pyro.factor("y", poisson(f, level).log_prob(Y))


def summed(f, level):
    pyro.factor("y", -poisson(f, level).log_prob(Y).neg().sum() * 2 / 2)


def mixture(f, level):
    parts = poisson(f[:, None], level)
    weights = dist.Categorical(torch.tensor([0.3, 0.7], dtype=F.dtype).expand(4, 2))
    pyro.sample("y", dist.MixtureSameFamily(weights, dist.Poisson(parts.rate.expand(4, 2))).to_event(1), obs=Y)


@pytest.mark.parametrize("program", [in_plate, summed, mixture])
def test_densities_are_functions_of_one_predictor(program):
    (found,), leaves = sites(program)
    (want,), others = sites(lambda f, level: pyro.sample("y", poisson(f, level).to_event(1), obs=Y))
    assert (found.name, found.phi.shape) == ("y", (4, 1))
    shift = torch.tensor([[[0.0], [1.0], [-1.0], [0.5]], [[2.0], [0.0], [0.3], [0.1]]], dtype=F.dtype)
    torch.testing.assert_close(found.log_prob(found.phi + shift).detach(), want.log_prob(want.phi + shift).detach())
    for a, b in zip(leaves, others, strict=True):
        torch.testing.assert_close(
            *(torch.autograd.grad(s.phi.sum(), x, retain_graph=True)[0] for s, x in ((found, a), (want, b)))
        )


def test_scales_and_masks_weigh_a_factor():
    def program(f, level):
        with poutine.scale(scale=2.0), poutine.mask(mask=Y > 0):
            in_plate(f, level)

    (found,), _ = sites(program)
    want = torch.where(Y > 0, 2 * poisson(F, LEVEL).log_prob(Y), 0.0)
    torch.testing.assert_close(found.log_prob(found.phi).detach(), want)


def in_place(f, level):
    density = poisson(f, level).log_prob(Y)
    density[0] = 0.0
    pyro.factor("y", density)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda f, level: pyro.factor("y", f.exp().cumsum(0)), "rows that depend on other rows"),
        (lambda f, level: pyro.factor("y", f.exp().prod()), "rows that depend on several values of a site"),
        (in_place, "operations that change tensors in place"),
        (lambda f, level: pyro.factor("y", dist.Poisson(0 * f.exp()).log_prob(Y)), "a gradient that is not finite"),
        (lambda f, level: pyro.factor("y", f.exp() if level > 0 else 2 * f.exp()), "a branch on values"),
        (lambda f, level: pyro.factor("y", f.exp() * level.item()), "reads a number out of a tensor"),
    ],
)
def test_densities_without_predictors(program, message):
    with pytest.raises(ValueError, match=message):
        sites(program)
