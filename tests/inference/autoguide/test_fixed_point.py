"""The best Gaussian of counts, beside Gaussians at other marginals and one of other starts."""

import pyro
import pyro.distributions as dist
import torch

from pyro_nngp import NNGP, AutoNNGP, NeighborGraph
from pyro_nngp.inference.autoguide.fixed_point import averaged_mode, between, fixed_point
from pyro_nngp.inference.autoguide.quadratics import Marginals
from pyro_nngp.kernels import Matern32

N = 12
NUMBER = {"dtype": torch.float64}
X = torch.linspace(0, 1, N, **NUMBER)[:, None]
COUNTS = torch.arange(N, **NUMBER) % 4 * 10


def counts():
    kernel = Matern32(1, variance=torch.tensor(2.0, **NUMBER), lengthscale=torch.tensor(0.2, **NUMBER))
    f = pyro.sample("f", NNGP(kernel, NeighborGraph(X, N - 1)))
    with pyro.plate("points", N):
        pyro.sample("y", dist.Poisson(f.exp()), obs=COUNTS)


def test_the_fixed_point_reproduces_itself_and_has_the_largest_bound():
    guide = AutoNNGP(counts)
    guide()

    def conditional(at):
        guide.phi_0, guide.tril_0 = at[0]
        return guide.conditional_at(torch.zeros(0))

    start = [Marginals(torch.zeros(N, 1, **NUMBER), torch.full((N, 1, 1), 0.3, **NUMBER))]
    q, at = fixed_point(conditional, averaged_mode(conditional, start))
    (found,), bound = q.marginals(), q.elbo(q.marginals())
    torch.testing.assert_close(found.mean, at[0].mean, rtol=0, atol=0.05)
    torch.testing.assert_close(found.tril, at[0].tril, rtol=0.05, atol=0)
    for mean, scale in ((0.3, 1.0), (-0.3, 1.0), (0.0, 2.0), (0.0, 0.3)):
        other = conditional([Marginals(at[0].mean + mean, at[0].tril * scale)])
        assert other.elbo(other.marginals()) < bound
    far = [Marginals(torch.full((N, 1), 4.0, **NUMBER), torch.full((N, 1, 1), 1.0, **NUMBER))]
    other, _ = fixed_point(conditional, far)
    assert abs(other.elbo(other.marginals()) - bound) < 0.05


def test_between_mixes_means_and_covariances():
    a = Marginals(torch.zeros(1, 2, **NUMBER), torch.eye(2, **NUMBER)[None])
    b = Marginals(torch.ones(1, 2, **NUMBER), 3 * torch.eye(2, **NUMBER)[None])
    mixed = between(a, b, 0.25)
    torch.testing.assert_close(mixed.mean, torch.full((1, 2), 0.25, **NUMBER))
    torch.testing.assert_close(mixed.tril @ mixed.tril.mT, 3 * torch.eye(2, **NUMBER)[None])
