"""Draws of loadings, factors and kernels: they keep the prior of state and data, and have dense conditionals."""

import pytest
import torch
from builders import F64, matern, normal, uniform
from torch import nn
from torch.distributions import Gamma

from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.linalg.nested_dissection import families_of, nested_dissection
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.models import LMC
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.loadings_draws import LoadingsChain

N, T, F, REPEATS = 7, 3, 2, 400
UNIT, SHAPES = torch.tensor([1.0, 0.5, 2.0], dtype=F64), torch.tensor([1.0, 2.0], dtype=F64)


def chain_of(kernels, is_sparse, precision=2.0):
    torch.manual_seed(0)
    loadings, graph = FactorLoadings(T, F).to(F64), NeighborGraph(uniform(N), N - 1)
    loadings.start(normal(T, F), UNIT)
    kernels = nn.ModuleList(kernels)
    basis = torch.cat([torch.ones(N, 1, dtype=F64), graph.x[:, :1]], -1)
    prior = normal(T, 2), torch.full((T, 2), 4.0, dtype=F64)
    precision = torch.full((T, N), precision, dtype=F64)
    precision[0, 2] = 0.0
    plan = nested_dissection(graph.x, [families_of(graph.neighbors.long())], 1e9) if is_sparse else None
    parts = normal(F, N), normal(T, N), precision, basis, prior, plan
    chain = LoadingsChain(loadings, kernels, {}, graph, 1e-6, *parts)
    return chain, precision, prior


def kernel(lengthscale):
    new = matern(lengthscale, 1.0)
    new.variance_unconstrained.requires_grad_(False)
    return new


def put_draw_of_the_prior(chain, precision, center, weight, first):
    """Set a chain to a draw of all from the prior, with data."""
    for each, start in zip(chain.kernels, first, strict=True):
        place = start + normal(len(start))
        each.move(place - each.place, each.at(place))
        chain.u[each.factors] = each.prior.color(normal(len(each.factors), N))
    chain.ratios = Gamma(SHAPES, 1.0).sample()
    chain.weights = chain.ratios.cumprod(0) / UNIT.square()[:, None] * Gamma(1.5, 1.5).sample((T, F)).to(F64)
    chain.loading = normal(T, F) / chain.weights.sqrt()
    chain.coefficients = center + normal(T, 2) / weight.sqrt()
    chain.target = chain.mean() + torch.where(precision > 0, precision, 1.0).rsqrt() * normal(T, N)


@pytest.mark.parametrize("is_shared", [False, True])
def test_rounds_keep_the_prior_where_state_and_data_are_drawn_from_it(is_shared):
    chain, precision, (center, weight) = chain_of([kernel(0.5)] if is_shared else [kernel(0.4), kernel(0.8)], is_shared)
    first, found = [each.place.clone() for each in chain.kernels], []
    for each in chain.kernels:
        each.root = 0.8 * torch.eye(2, dtype=F64)
    for _ in range(REPEATS):
        put_draw_of_the_prior(chain, precision, center, weight, first)
        for _ in range(3):
            chain.round(adapts=False)
        white = [each.prior.whiten(chain.u[each.factors]) for each in chain.kernels]
        moved = [each.place - start for each, start in zip(chain.kernels, first, strict=True)]
        standard = [torch.cat(white), chain.loading * chain.weights.sqrt(), torch.cat(moved)]
        standard.append((chain.coefficients - center) * weight.sqrt())
        t = chain.weights * UNIT.square()[:, None] / chain.ratios.cumprod(0)
        parts = [part.mean() for each in standard for part in (each, each.square())]
        found.append(torch.stack([*parts, *torch.exp(-chain.ratios), *torch.exp(-1.5 * t).mean(0)]))
    found = torch.stack(found)
    expected = [0.0, 1.0] * 4 + [0.5, 0.25] + [0.5**1.5] * 2  # E exp(-b Gamma(a, b)) = 2^-a
    error = (found.mean(0) - torch.tensor(expected, dtype=F64)) / (found.std(0) / REPEATS**0.5)
    assert error.abs().max() < 4, error


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_factor_is_drawn_from_its_posterior_given_all_else(is_sparse):
    chain, precision, _ = chain_of([kernel(0.4), kernel(0.8)], is_sparse)
    factor = chain.kernels[1].prior
    own = torch.linalg.inv(factor.dense() + torch.diag((precision * chain.loading[:, 1, None].square()).sum(0)))
    rest = chain.target - chain.mean() + chain.loading[:, 1, None] * chain.u[1]
    mean, draws = own @ (chain.loading[:, 1, None] * precision * rest).sum(0), []
    start = {name: getattr(chain, name).clone() for name in ("u", "loading", "coefficients", "ratios", "weights")}
    for _ in range(400):
        for name, value in start.items():
            setattr(chain, name, value.clone())
        chain.draw_factors(chain.kernels[1])
        draws.append(chain.u[1])
    draws = torch.stack(draws)
    assert ((draws.mean(0) - mean) / (own.diagonal() / 400).sqrt()).abs().max() < 4
    assert (torch.linalg.solve(own, torch.cov(draws.mT)) - torch.eye(N)).abs().max() < 0.6


def test_intervals_of_correlations_stay_until_the_method_changes():
    torch.manual_seed(1)
    x, a = uniform(60), normal(5, 2)
    u = torch.stack([torch.sin(6 * x[:, 0]), torch.cos(5 * x[:, 1])])
    y = torch.bernoulli(torch.sigmoid(2 * a @ u)).mT
    gp = LMC(x, y, [matern(0.3, 1.0), matern(0.5, 1.0)], Bernoulli(), mixing=FactorLoadings(5, 2), num_neighbors=10)
    state = torch.get_rng_state()
    found = gp.correlations(progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(gp.correlations(progress=False).lower, found.lower)
    assert ((found.lower <= found.estimate) & (found.estimate <= found.upper)).all()
    gp.kernel[0].lengthscale = torch.tensor(0.1, dtype=F64)
    assert not torch.equal(gp.correlations(progress=False).lower, found.lower)


def test_missing_outputs_and_gaussian_noise(capsys):
    torch.manual_seed(2)
    x = uniform(40)
    f = torch.sin(6 * x[:, 0])
    y = torch.stack([f, -f, f + x[:, 1]], -1) + 0.1 * normal(40, 3)
    y[:5, 1] = torch.nan
    gp = LMC(x, y, matern(0.4, 1.0), Gaussian(), mixing=FactorLoadings(3, 1), num_neighbors=8)
    gp.solve()
    found = gp.correlations(progress=False)
    assert float(found.upper[0, 1]) < -0.9
    assert capsys.readouterr().err == ""
    with pytest.raises(TypeError, match=r"LMC.correlations: expected progress to be True or False, got int"):
        gp.correlations(progress=1)
