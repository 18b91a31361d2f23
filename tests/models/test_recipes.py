"""Recipes of docs/howto/point_patterns.md on simulated truth: point patterns, preferential sampling, averages."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from pyro.optim import ClippedAdam

import pyro_nngp as nngp
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Poisson


def grid(side):
    middle = (torch.arange(side) + 0.5) / side
    return torch.cartesian_prod(middle, middle)


def test_intensity_of_a_log_gaussian_cox_process():
    """Cells of two sizes, whose areas are offsets: the intensity per unit of area is that of the truth."""
    cells = grid(14)
    area = torch.where(cells[:, 0] < 0.5, 0.4, 1.6)
    truth = torch.sin(6 * cells[:, 0]) + torch.cos(5 * cells[:, 1])
    number = torch.poisson(area * torch.exp(1.5 + truth))
    kernel = Matern32(2, variance=torch.tensor(1.0), lengthscale=torch.tensor([0.4, 0.4]))
    gp = nngp.VNNGP(cells, number, kernel, Poisson(), offset=area.log(), num_neighbors=12)
    gp.solve()
    mean, variance = (value.detach() for value in gp(cells))
    z = (mean - 1.5 - truth) / variance.sqrt()
    assert (mean - 1.5 - truth).square().mean().sqrt() < 0.35
    assert 0.2 < z.square().mean() < 1.6


@pytest.mark.slow
def test_averages_over_areas_have_the_exact_posterior():
    """Four averages of 16 cells: moments of f by NUTS beside those of a dense normal distribution."""
    cells = grid(4)
    kernel = Matern32(2, variance=torch.tensor(1.0), lengthscale=torch.tensor([0.5, 0.5]))
    graph = nngp.NeighborGraph(cells, 15)
    area_of = (torch.arange(16) // 8) * 2 + torch.arange(16) % 4 // 2
    share = torch.nn.functional.one_hot(area_of).T / 4.0
    average, noise = torch.tensor([1.0, -0.5, 0.3, 2.0]), 0.3

    def areas():
        f = pyro.sample("f", nngp.NNGP(kernel, graph))
        with pyro.plate("areas", 4):
            pyro.sample("y", dist.Normal(share @ f, noise), obs=average)

    quick = nngp.inference.QuickNUTS(areas)
    mcmc = MCMC(quick, num_samples=400, warmup_steps=150, disable_progbar=True)
    mcmc.run()
    f = Predictive(quick.model, mcmc.get_samples(), return_sites=["f"])()["f"].reshape(-1, 16)
    prior = kernel(cells).detach()
    gain = torch.linalg.solve(share @ prior @ share.T + noise**2 * torch.eye(4), share @ prior).T
    mean, cov = gain @ average, prior - gain @ share @ prior
    error = (f.mean(0) - mean).abs() / cov.diagonal().sqrt()
    assert error.max() < 6 / 100**0.5  # draws are less than independent
    torch.testing.assert_close(f.std(0), cov.diagonal().sqrt(), rtol=0.25, atol=0.0)


@pytest.mark.slow
def test_preferential_sampling():
    """The joint model finds the preference, and a mean of the surface that kriging of the stations misses."""
    cells = grid(12)
    truth = torch.sin(8 * cells[:, 0]) + torch.cos(7 * cells[:, 1])
    number = torch.poisson(torch.exp(1.2 * truth - 1.5))
    cell_of = torch.repeat_interleave(torch.arange(len(cells)), number.long())
    y = 3 + truth[cell_of] + 0.3 * torch.randn(len(cell_of))
    graph = nngp.NeighborGraph(cells, num_neighbors=10)

    def model():
        lengthscale = pyro.sample("lengthscale", dist.LogNormal(-1.0, 0.5))
        sd, noise = pyro.sample("sd", dist.HalfNormal(2.0)), pyro.sample("noise", dist.HalfNormal(1.0))
        preference, rate = pyro.sample("preference", dist.Normal(0.0, 1.0)), pyro.sample("rate", dist.Normal(0.0, 3.0))
        level = pyro.sample("level", dist.Normal(0.0, 10.0))
        f = pyro.sample("f", nngp.NNGP(Matern32(2, variance=sd**2, lengthscale=lengthscale), graph))
        with pyro.plate("cells", len(cells)):
            pyro.sample("number", dist.Poisson((rate + preference * f).exp()), obs=number)
        with pyro.plate("stations", len(y)):
            pyro.sample("y", dist.Normal(level + f[cell_of], noise), obs=y)

    guide = nngp.inference.AutoNNGP(model)
    svi = SVI(model, guide, ClippedAdam({"lr": 0.02}), Trace_ELBO())
    for _ in range(5):
        svi.step()
    draws = Predictive(model, guide=guide, num_samples=200, return_sites=["level", "f", "preference"])()
    low, high = draws["preference"].quantile(torch.tensor([0.01, 0.99])).tolist()
    assert low < 1.2 < high
    assert low > 0.3
    surface = (draws["level"].reshape(-1, 1) + draws["f"].reshape(200, -1)).mean(0)
    alone = nngp.Vecchia(cells[cell_of], y, num_neighbors=10)
    nngp.fit(alone, progress=False)
    kriged, exact = alone(cells)[0].detach(), 3 + truth
    assert (surface - exact).square().mean() < 0.7 * (kriged - exact).square().mean()
    assert (surface.mean() - exact.mean()).abs() < (kriged.mean() - exact.mean()).abs()
