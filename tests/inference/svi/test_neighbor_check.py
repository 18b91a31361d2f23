"""Trained methods with too few neighbors, or a lengthscale that connects no points, are found out."""

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample
from training import bumps, vecchia

from pyro_nngp.inference import ConvergenceWarning, fit
from pyro_nngp.inference.svi.neighbor_check import nearest_correlation, neighbor_disagreement
from pyro_nngp.kernels import Matern12, Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.models import SVGP, VNNGP, CoregionalizedLOO, Vecchia
from pyro_nngp.variational import MeanField


def rough(kernel):
    """Smooth data under a kernel of other data."""
    x = torch.rand(1500, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Vecchia(x, 5 * x.sum(-1), kernel, Gaussian(1e-6), num_neighbors=4)


def test_neighbors_that_are_too_few_are_found_out():
    fine = vecchia()
    fit(fine, progress=False)
    assert neighbor_disagreement(fine) < 1.2
    kernel = Matern52(2, variance=torch.tensor(1e-6), lengthscale=torch.full((2,), 0.3))
    bad = rough(kernel)
    assert neighbor_disagreement(bad) > 1.5
    with pytest.warns(ConvergenceWarning, match=r"from 4 and from up to 32 neighbors to agree .* compare_to_exact"):
        fit(bad, 1, lr=1e-6, progress=False)
    x, y = bumps(60)
    assert neighbor_disagreement(SVGP(x, y, Matern52(2), Gaussian(), inducing=5)) is None
    assert neighbor_disagreement(Vecchia(x, y, Matern12(2), Gaussian(), num_neighbors=40)) is None


def test_checks_do_not_warn_as_predictions_do():
    x, y = bumps(60)
    gp = VNNGP(x, (y > 0).double(), likelihood=Poisson(), num_neighbors=4, guide=MeanField())
    fit(gp, 2, progress=False)
    with pytest.warns(UserWarning, match="intervals of f from Poisson data"):
        gp(x[:2])


def at_lengthscale(method, lengthscale, **options):
    x, y = bumps(60)
    return method(x, y, Matern52(2, 1.0, lengthscale), Gaussian(0.1), **options)


@pytest.mark.parametrize(
    ("method", "options"),
    [(Vecchia, {"num_neighbors": 5}), (VNNGP, {"num_neighbors": 5}), (SVGP, {"inducing": 10})],
)
def test_points_that_no_lengthscale_connects_are_found_out(method, options):
    assert nearest_correlation(at_lengthscale(method, 0.5, **options)) > 0.5
    stuck = at_lengthscale(method, 1e-4, **options)
    assert nearest_correlation(stuck) < 1e-6
    with pytest.warns(ConvergenceWarning, match=r"a median correlation of 0: .* Leave the lengthscale unset"):
        fit(stuck, 2, progress=False)


def test_a_lengthscale_that_was_unset_is_no_cure():
    x, y = bumps(60)
    gp = Vecchia(x, y, Matern52(2, variance=1.0), Gaussian(0.1), num_neighbors=5)
    with torch.no_grad():
        gp.kernel.lengthscale = torch.full((2,), 1e-4)
    with pytest.warns(ConvergenceWarning, match=r"away from the data points are the mean .* y shows no structure"):
        fit(gp, 2, progress=False)


def test_correlations_are_those_of_the_nearest_points():
    gp = at_lengthscale(Vecchia, 0.3, num_neighbors=5)
    distance = torch.cdist(gp.x, gp.x).fill_diagonal_(torch.inf).min(-1).values
    s = 5**0.5 * distance / 0.3
    assert nearest_correlation(gp) == pytest.approx(((1 + s + s**2 / 3) * (-s).exp()).median().item(), rel=1e-4)
    prior = PyroSample(dist.LogNormal(torch.tensor(-7.0), 1e-3))
    assert nearest_correlation(at_lengthscale(Vecchia, prior, num_neighbors=5)) < 1e-6
    for lengthscales, least, most in (((0.5, 1e-4), 0.5, 1.0), ((1e-4, 1e-4), 0.0, 1e-6)):
        kernels = [Matern52(2, lengthscale=lengthscale) for lengthscale in lengthscales]
        joint = CoregionalizedLOO(gp.x, gp.y[:, None].repeat(1, 2), kernels, num_neighbors=5)
        assert least <= nearest_correlation(joint) <= most
