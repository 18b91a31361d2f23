import pytest
import torch
from builders import tensor
from torch.distributions import MultivariateNormal

from pyro_nngp.conditionals.coregionalized import latent_covariances
from pyro_nngp.conditionals.coregionalized_density import coregionalized_log_density
from pyro_nngp.kernels import RBF, Matern52, bind

F64 = torch.float64
B, J, R, L = 3, 4, 2, 3


def problem(shared):
    generator = torch.Generator().manual_seed(0)
    kernels = [Matern52(2, lengthscale=0.5), RBF(2, variance=2.0), Matern52(2, lengthscale=0.2)][: 1 if shared else L]
    places = torch.rand(B, J, 2, generator=generator, dtype=F64)
    rows, values = (torch.randn(B, J, R, *own, generator=generator, dtype=F64) for own in ((L,), ()))
    rows[0, 1, 0], values[0, 1, 0] = 0.0, 0.0  # one observation is missing
    return latent_covariances([bind(kernel) for kernel in kernels], places, 1e-4), rows, values


def dense(among, rows, values):
    """One point at a time, with one covariance of all observations."""
    found = []
    for g, h, s in zip(among.expand(-1, -1, -1, L), rows, values, strict=True):
        cov = torch.einsum("jkl,jpl,kql->jpkq", g, h, h).reshape(J * R, J * R) + torch.eye(J * R, dtype=F64)
        whole, n = s.flatten(), (J - 1) * R
        joint = MultivariateNormal(torch.zeros(J * R, dtype=F64), cov).log_prob(whole)
        others = MultivariateNormal(torch.zeros(n, dtype=F64), cov[:n, :n]).log_prob(whole[:n])
        found.append(joint - others + R * torch.tensor(2 * torch.pi, dtype=F64).log() / 2)
    return torch.stack(found)


@pytest.mark.parametrize("shared", [False, True])
def test_density_and_gradients_are_the_dense_ones(shared):
    parts = [part.requires_grad_() for part in problem(shared)]
    found, want = coregionalized_log_density(*parts), dense(*parts)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=0)
    scale = tensor(0.3, -1.0, 2.0)
    ours, theirs = (torch.autograd.grad(value @ scale, parts) for value in (found, want))
    # those of a covariance are determined up to its antisymmetric part
    symmetric = [[g[0] + g[0].transpose(1, 2), *g[1:]] for g in (ours, theirs)]
    torch.testing.assert_close(symmetric[0], symmetric[1], rtol=1e-9, atol=1e-10)


def test_second_derivatives_are_refused():
    parts = [part.requires_grad_() for part in problem(False)]
    with pytest.raises(NotImplementedError, match="coregionalized_log_density: expected a gradient of first order"):
        torch.autograd.grad(coregionalized_log_density(*parts).sum(), parts[1], create_graph=True)
