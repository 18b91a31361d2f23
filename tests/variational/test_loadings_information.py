"""Information on loadings against dense formulas for the variance of their score."""

import pytest
import torch
from builders import F64, matern, normal, uniform

from pyro_nngp.linalg.coupled_posterior import CoupledPosterior, coupled_elimination
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.loadings_information import (
    blocks_of,
    complete_information,
    information_of_means,
    information_of_variances,
    volume_gradient,
)

N, T, F = 6, 3, 2


def problem():
    torch.manual_seed(0)
    graph = NeighborGraph(uniform(N), N - 1)
    kernels = [matern(0.3, 1.0).bind(), matern(0.7, 1.0).bind()]
    with torch.no_grad():
        (block,) = blocks_of(kernels, graph, F, 1e-6)
    loading, precision = normal(T, F), torch.rand(T, N, dtype=F64) + 0.3
    precision[1, 2] = 0.0  # a missing output
    return block, loading, precision, torch.cat([torch.ones(N, 1, dtype=F64), normal(N, 1)], 1), normal(F, N)


def test_missing_information_is_the_variance_of_the_score():
    """The score of theta_pk is a linear plus a quadratic form of deviations of u, whose covariances are traces."""
    block, a, tau, basis, loc = problem()
    posterior = block.posterior(a, tau)
    cov = torch.cholesky_inverse(posterior.tril)
    design, forms, lines = torch.cat([basis, loc.mT], -1), [], []
    for p in range(T):
        for k in range(4):
            line, form = torch.zeros(F, N, dtype=F64), torch.zeros(F, N, F, N, dtype=F64)
            for i in range(N):
                line[:, i] = tau[p, i] * a[p] * design[i, k]
                if k >= 2:
                    form[:, i, k - 2, i] += tau[p, i] * a[p] / 2
                    form[k - 2, i, :, i] += tau[p, i] * a[p] / 2
            lines.append(line.flatten())
            forms.append(form.view(F * N, F * N) @ cov)
    lines, forms = torch.stack(lines), torch.stack(forms)
    want = 2 * torch.einsum("aij,bji->ab", forms, forms).view(T, 4, T, 4)[:, 2:, :, 2:]
    torch.testing.assert_close(information_of_means(posterior, basis, loc), lines @ cov @ lines.mT)
    torch.testing.assert_close(information_of_variances(posterior), want)


def conditionals_of(block):
    """Weights and variances of the conditionals of each factor, with gradients."""
    return [(factor.w.clone().requires_grad_(), factor.var.clone().requires_grad_()) for factor in block.factors]


def dense_information(block, conditionals, loading, precision, linear, basis):
    """Means of the factors, and what data say of coefficients and loadings by means alone, by the definition."""
    dense, near = [], block.graph.neighbors.long()
    for w, var in conditionals:
        weights = torch.zeros(N, N, dtype=F64).scatter_add(1, near.clamp(min=0), w.masked_fill(near < 0, 0.0))
        root = (torch.eye(N, dtype=F64) - weights) / var.sqrt()[:, None]
        dense.append(root.mT @ root)
    gram = torch.einsum("tl,tn,tk->lkn", loading, precision, loading)
    total = torch.block_diag(*dense).view(F, N, F, N) + torch.diag_embed(gram).transpose(1, 2)
    cov = total.reshape(F * N, F * N).inverse()
    loc = (cov @ linear.flatten()).view(F, N)
    at_points = cov.view(F, N, F, N).diagonal(dim1=1, dim2=3).permute(2, 0, 1)
    complete = complete_information(basis, loc, at_points, precision)
    cross = torch.einsum("pn,pl,nk->lnpk", precision, loading, torch.cat([basis, loc.mT], -1)).reshape(F * N, -1)
    return loc, torch.block_diag(*complete) - cross.mT @ cov @ cross


def with_factor(block, loading, precision, sparse):
    plan = coupled_elimination(block.graph.x, block.graph.neighbors, F, float("inf")) if sparse else None
    return CoupledPosterior(block.factors, loading[None], precision, plan=plan)


@pytest.mark.parametrize("sparse", [False, True])
def test_the_gradient_of_the_volume_is_that_of_the_dense_definition(sparse):
    block, loading, precision, basis, linear = problem()
    conditionals = conditionals_of(block)
    loc, information = dense_information(block, conditionals, loading, precision, linear, basis)
    inverse = information.detach().add(torch.eye(len(information))).inverse()
    values = [part for pair in conditionals for part in pair]
    want = torch.autograd.grad(-(inverse * information).sum() / 2, values)
    sizes = len(information), F * N
    white, other = (size**0.5 * torch.eye(size, dtype=F64) for size in sizes)  # each direction once: no sampling error
    with torch.no_grad():
        posterior, loc = with_factor(block, loading, precision, sparse), loc.detach()
        found = volume_gradient(posterior, inverse, basis, loc, (white, other.view(-1, F, N)))
        complete = complete_information(basis, loc, posterior.covariances(), precision)
        missing = information_of_means(posterior, basis, loc)
    torch.testing.assert_close(torch.block_diag(*complete) - missing, information)
    for one, expected in zip([part for pair in found for part in pair], want, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-8)


def test_a_few_draws_give_about_that_gradient():
    block, loading, precision, basis, linear = problem()
    with torch.no_grad():
        loc, information = dense_information(block, conditionals_of(block), loading, precision, linear, basis)
        inverse, posterior = information.add(torch.eye(len(information))).inverse(), block.posterior(loading, precision)
        size = len(information)
        each = torch.eye(size, dtype=F64) * size**0.5, torch.eye(F * N, dtype=F64).view(-1, F, N) * (F * N) ** 0.5
        exact = volume_gradient(posterior, inverse, basis, loc, each)
        drawn = volume_gradient(posterior, inverse, basis, loc, (normal(4000, size), normal(4000, F, N)))
    for (_, one), (_, other) in zip(exact, drawn, strict=True):
        torch.testing.assert_close(one.sum(), other.sum(), rtol=0.1, atol=0.0)


def test_with_known_factors_outputs_are_regressions():
    _, _, tau, basis, loc = problem()
    cov = torch.eye(F, dtype=F64).expand(N, F, F) * 0.1
    found = complete_information(basis, loc, cov, tau)
    design = torch.cat([basis, loc.mT], -1)
    want = design.mT @ (tau[0, :, None] * design)
    want[2:, 2:] += 0.1 * tau[0].sum() * torch.eye(F, dtype=F64)
    torch.testing.assert_close(found[0], want)


def test_blocks_hold_each_point_once_and_neighbors_together():
    torch.manual_seed(1)
    x = torch.cat([uniform(40), 100 + uniform(40)])
    graph = NeighborGraph(x, 5)
    with torch.no_grad():
        blocks = blocks_of([matern(0.3, 1.0).bind()], graph, 3000 // 50, 1e-6)
    assert torch.cat([block.rows for block in blocks]).sort().values.tolist() == list(range(80))
    assert {tuple((x[block.rows] > 50).any(-1).tolist()) for block in blocks} == {(False,) * 40, (True,) * 40}
    assert isinstance(blocks[0].posterior(normal(2, 60), torch.ones(2, 80, dtype=F64)), CoupledPosterior)
