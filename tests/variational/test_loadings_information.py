"""Information on loadings against dense formulas for the variance of their score."""

import pytest
import torch
from builders import F64, matern, normal, scalar, uniform

from pyro_nngp.bound import Bound
from pyro_nngp.kernels import Matern52
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.loadings_information import (
    blocks_of,
    complete_information,
    information_of_means,
    information_of_variances,
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
    torch.testing.assert_close(information_of_means(block, posterior, basis, loc), lines @ cov @ lines.mT)
    torch.testing.assert_close(information_of_variances(posterior), want)


def test_information_with_gradients_is_that_of_the_solution():
    """At the moments of the sites, and by differences in a kernel."""
    block, a, tau, basis, _ = problem()
    posterior, linear = block.posterior(a, tau), normal(F, N)

    def found(lengthscale):
        kernels = [Matern52(2, scalar(1.0), lengthscale).bind(), matern(0.7, 1.0).bind()]
        bound = Bound(None, tuple(kernels), None, None, 1e-6)
        return block.information(bound, a, basis, linear, tau)

    loc = posterior.solve(linear)
    want = torch.block_diag(*complete_information(basis, loc, posterior.covariances(), tau))
    want = want - information_of_means(block, posterior, basis, loc)
    torch.testing.assert_close(found(scalar(0.3)), want, rtol=1e-5, atol=1e-6)
    here = torch.tensor(0.3, dtype=F64, requires_grad=True)
    weight = normal(*want.shape)
    (slope,) = torch.autograd.grad((weight * found(here)).sum(), here)
    with torch.no_grad():
        moved = [(weight * found(scalar(0.3 + step))).sum() for step in (1e-5, -1e-5)]
    assert float(slope) == pytest.approx(float(moved[0] - moved[1]) / 2e-5, rel=1e-5)


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
