import pytest
import torch
from torch.distributions import kl_divergence

from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.coregionalized import CoregionalizedPosterior, NNGPs
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
GRAPH = NeighborGraph(torch.rand(12, 2, generator=torch.Generator().manual_seed(0), dtype=F64), 4)


def prior(batch=None, count=None):
    batch = GRAPH.batch() if batch is None else batch
    kernels = [Matern52(2, lengthscale=0.5), RBF(2, lengthscale=0.7)][: 1 if count else 2]
    return NNGPs([NNGP(kernel, GRAPH, batch) for kernel in kernels], count)


def posterior(p, **changed):
    size = p.event_shape[1]
    parts = {
        "loading": torch.ones(1, 3, 2, dtype=F64),
        "target": torch.zeros(3, size, dtype=F64),
        "precision": torch.ones(3, size, dtype=F64),
        "loc": torch.zeros(2, size, dtype=F64),
        "covariance": torch.eye(2, dtype=F64).expand(size, 2, 2),
    }
    return CoregionalizedPosterior(p, **(parts | changed))


def test_priors_side_by_side_are_independent():
    both, u = prior(), torch.randn(2, 12, dtype=F64)
    torch.testing.assert_close(both.log_prob(u), sum(one.log_prob(row) for one, row in zip(both.each, u, strict=True)))
    shared = prior(count=3)
    assert shared.event_shape == (3, 12)
    assert shared.sample((2,)).shape == (2, 3, 12)
    assert len(shared.factors()) == 3


@pytest.mark.slow
def test_the_density_of_q_agrees_with_its_divergence():
    p = prior()
    q = posterior(p)
    with torch.no_grad():
        cov = torch.linalg.inv(
            torch.block_diag(*[factor.dense() for factor in p.factors()])
            + torch.kron(torch.full((2, 2), 3.0, dtype=F64), torch.eye(12, dtype=F64))
        )
        blocks = cov.view(2, 12, 2, 12).diagonal(dim1=1, dim2=3).permute(2, 0, 1)
        q, draws = posterior(p, covariance=blocks), posterior(p).sample((2000,))
        terms = torch.stack([q.log_prob(u) - p.log_prob(u) for u in draws])
    assert (terms.mean() - kl_divergence(q, p)).abs() < 6 * terms.std() / 2000**0.5


def test_wrong_parts_are_refused():
    p = prior()
    with pytest.raises(ValueError, match=r"NNGPs: expected priors on one batch, without batch dimensions, got 0"):
        NNGPs([])
    with pytest.raises(ValueError, match=r"NNGPs: expected priors 1 or 3, got 2"):
        NNGPs(p.priors, 3)
    with pytest.raises(ValueError, match=r"CoregionalizedPosterior: expected target, precision, loc of shapes"):
        posterior(p, target=torch.zeros(3, 5, dtype=F64))
    with pytest.raises(ValueError, match=r"kl_divergence: expected q and p on the same rows"):
        kl_divergence(posterior(p), prior(GRAPH.batch(torch.arange(3))))


@pytest.mark.parametrize("build", [prior, lambda: posterior(prior())])
def test_coupled_processes_in_a_plate(build):
    one = build()
    assert one.expand(()) is one
    two = one.expand((2, 1))
    with torch.no_grad():
        draws = two.sample()
    assert draws.shape == (2, 1, *one.event_shape)
    torch.testing.assert_close(two.log_prob(draws), torch.stack([one.log_prob(u[0])[None] for u in draws]))
