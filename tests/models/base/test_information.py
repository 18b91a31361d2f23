"""Covariances of estimated hyperparameters, against dense matrices and simulated scores."""

import copy

import pytest
import torch
from builders import normal, tensor, uniform
from pyro import poutine
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import pyro_nngp as nngp
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.means import ConstantMean, LinearMean
from pyro_nngp.models.base.information import of_blocks, of_conditionals, of_evidence, of_leave_one_out
from pyro_nngp.models.base.intervals import information_of
from pyro_nngp.variational import MeanField, SparseCholesky

N = 40
START = tensor(1.0, 0.3, 0.5, 0.1).log()


def covariance(x, theta):
    kernel = Matern32(2, theta[0].exp(), theta[1:3].exp())
    return kernel(x, x) + theta[3].exp() * torch.eye(len(x)).to(x)


def nothing(x):
    """A mean function without coefficients."""
    return 0 * x[:, 0]


def build(method, x, y, k=N - 1, dtype=torch.float64, **settings):
    kernel = Matern32(2, 1.0, START[1:3].exp().to(dtype))
    return method(x.to(dtype), y.to(dtype), kernel, Gaussian(0.1), num_neighbors=k, jitter=1e-12, **settings)


def fisher(x, theta=START, columns=None):
    """Of the exact process: tr(C^-1 dC C^-1 dC) / 2, of data less an estimated mean with P in place of C^-1."""
    changes = torch.autograd.functional.jacobian(lambda theta: covariance(x, theta), theta).permute(2, 0, 1)
    inverse = torch.linalg.inv(covariance(x, theta)).detach()
    if columns is not None:
        gain = inverse @ columns
        inverse = inverse - gain @ torch.linalg.solve(columns.mT @ gain, gain.mT)
    parts = [inverse @ change for change in changes]
    return torch.stack([torch.stack([(a * b.mT).sum() / 2 for b in parts]) for a in parts])


@pytest.mark.parametrize(
    ("method", "find"),
    [
        (nngp.Vecchia, of_conditionals),
        (nngp.VNNGP, of_conditionals),
        pytest.param(nngp.MLLk, of_blocks, marks=pytest.mark.slow),
    ],
)
def test_all_neighbors_give_the_information_of_the_exact_process(method, find):
    x = uniform(N, seed=1)
    found = find(build(method, x, normal(N), mean=nothing))
    torch.testing.assert_close(torch.linalg.inv(found.cov), fisher(x), rtol=1e-4, atol=1e-4)
    assert found.shift is None


@pytest.mark.parametrize(("method", "find"), [(nngp.Vecchia, of_conditionals), (nngp.MLLk, of_blocks)])
def test_an_estimated_mean_gives_the_restricted_likelihood(method, find):
    """Centers are one step of Newton's method from the estimates, with the information there."""
    x = uniform(N, seed=1)
    columns = torch.ones(N, 1).double()

    def log_error(theta):
        gram = columns.mT @ torch.cholesky_solve(columns, torch.linalg.cholesky(covariance(x, theta)))
        return -torch.logdet(gram) / 2

    found = find(build(method, x, normal(N)))
    slopes = torch.autograd.functional.jacobian(log_error, START)
    want = torch.linalg.solve(fisher(x, START, columns), slopes)
    assert want.abs().max() < 1.5  # beyond, steps end
    torch.testing.assert_close(found.shift, want, rtol=2e-3, atol=1e-4)
    there = fisher(x, START + found.shift, columns)
    torch.testing.assert_close(torch.linalg.inv(found.cov), there, rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore:.*outputs have spreads")
@pytest.mark.parametrize("own", [True, False])
def test_coefficients_of_outputs_take_their_information_together(own):
    """Two outputs with the same noise count twice; if they share coefficients these are known twice as well."""
    x, y = uniform(N, seed=1), normal(N, 2)
    mean = None if own else ConstantMean(0.0)
    one = of_conditionals(build(nngp.Vecchia, x, y[:, 0], 9))
    two = of_conditionals(build(nngp.Vecchia, x, y, 9, mean=mean))
    assert (two.errors.shape == (2, 1)) == own
    if own:
        torch.testing.assert_close(two.shift, one.shift, rtol=1e-6, atol=1e-8)
    else:
        assert (two.shift.abs() < one.shift.abs()).all()


def test_what_data_do_not_tell_stays_where_it_is():
    x, y = uniform(N, seed=1), normal(N)
    gp = build(nngp.Vecchia, x, y)
    gp.kernel.lengthscale = tensor(0.5, 1e6)
    found = of_conditionals(gp)
    assert found.shift[2] == 0
    assert found.cov[2, 2].sqrt() > 2.5
    assert found.shift[0] > 0


def test_outputs_add_their_information_and_those_with_weights_have_more():
    x, both = uniform(N, seed=1), normal(N, 2)
    one, two = (torch.linalg.inv(of_conditionals(build(nngp.Vecchia, x, y, 9)).cov) for y in (both[:, 0], both))
    torch.testing.assert_close(two, 2 * one, rtol=1e-6, atol=1e-6)
    exact = build(nngp.Vecchia, x, both[:, 0], 9, weights=torch.full((N,), 9.0).double())
    assert of_conditionals(exact).cov[1, 1] < of_conditionals(build(nngp.Vecchia, x, both[:, 0], 9)).cov[1, 1]


@pytest.mark.filterwarnings("ignore:.*outputs have spreads")
@pytest.mark.parametrize(("method", "find"), [(nngp.LOO, of_leave_one_out), (nngp.MLLk, of_blocks)])
@pytest.mark.slow
def test_sandwiches_are_those_of_simulated_scores(method, find):
    """Scores and sensitivity of the objective itself, by differences, over draws of the data as outputs."""
    x, count, step = uniform(N, seed=1), 1200, 1e-3
    tril = torch.linalg.cholesky(covariance(x, START)).detach()
    gp = build(method, x, (tril @ normal(N, count)).detach(), 5, mean=nothing)

    @torch.no_grad()
    def objective(theta):
        gp.kernel.variance, gp.kernel.lengthscale = theta[0].exp(), theta[1:3].exp()
        gp.likelihood.variance = theta[3].exp()
        site = poutine.trace(gp.model).get_trace().nodes["y"]
        return site["fn"].log_prob(site["value"]).sum(-1)  # of each draw

    def scores(theta):
        return (
            torch.stack([objective(theta + e) - objective(theta - e) for e in step * torch.eye(4).double()], -1)
            / step
            / 2
        )

    bread = (
        -torch.stack([(scores(START + e) - scores(START - e)).mean(0) for e in step * torch.eye(4).double()]) / step / 2
    )
    meat = torch.cov(scores(START).T)
    slices = torch.linalg.inv(bread)
    objective(START)
    found = find(gp).cov * count  # of one draw
    assert ((found / (slices @ meat @ slices)).diagonal().log().abs() < 6 * (2 / count) ** 0.5).all()


@pytest.mark.parametrize(("method", "find"), [(nngp.LOO, of_leave_one_out), (nngp.MLLk, of_blocks)])
def test_sandwiches_are_those_of_dense_quadratic_forms(method, find):
    """The objective is c - y' Q y / 2 with c and Q by plain algebra; derivatives in hyperparameters by differences."""
    x, step = uniform(15, seed=1), 1e-3
    gp = build(method, x, normal(15), 4, mean=nothing)
    steps = step * torch.eye(4).double()

    @torch.no_grad()
    def objective(theta):
        cov, constant, form = covariance(x, theta), 0.0, torch.zeros(15, 15).double()
        for i, near in enumerate(gp.graph.others(4).long()):
            block = torch.cat([near, torch.tensor([i])])
            if method is nngp.MLLk:
                inverse, share = torch.linalg.inv(cov[block][:, block]), 1 / 5
                constant = constant - share * torch.logdet(2 * torch.pi * cov[block][:, block]) / 2
            else:
                root = torch.cat([-torch.linalg.solve(cov[near][:, near], cov[near, i]), torch.ones(1).double()])
                var, share = root @ cov[block][:, block] @ root, 1.0
                inverse, constant = torch.outer(root, root) / var, constant - (2 * torch.pi * var).log() / 2
            form[block[:, None], block] += share * inverse
        return constant, form

    def expected(theta):
        constant, form = objective(theta)
        return constant - (form * covariance(x, START).detach()).sum() / 2

    forms = [(objective(START + e)[1] - objective(START - e)[1]) @ covariance(x, START) / step / -4 for e in steps]
    meat = torch.stack([torch.stack([2 * (a * b.mT).sum() for b in forms]) for a in forms]).detach()
    bread = torch.zeros(4, 4).double()
    for i, a in enumerate(steps):
        for j, b in enumerate(steps):
            ends = expected(START + a + b) - expected(START + a - b) - expected(START - a + b) + expected(START - a - b)
            bread[i, j] = -ends / (4 * step**2)
    slices = torch.linalg.inv(bread)
    torch.testing.assert_close(find(gp).cov, slices @ meat @ slices, rtol=1e-3, atol=1e-5)


def test_a_sample_of_the_rows_stands_for_all(monkeypatch):
    x = uniform(400, seed=1)
    for method, find, name in (
        (nngp.Vecchia, of_conditionals, "information.SOME_ROWS"),
        (nngp.LOO, of_leave_one_out, "densities.SOME_TOGETHER"),
    ):
        gp = build(method, x, normal(400), 8, mean=nothing)
        whole = find(gp).cov.diagonal().sqrt()
        monkeypatch.setattr(f"pyro_nngp.models.base.{name}", 200)
        assert ((find(gp).cov.diagonal().sqrt() / whole).log().abs() < 0.35).all()


def test_single_precision_finds_the_same():
    x, y = uniform(N, seed=1), normal(N)
    one, other = (
        of_conditionals(build(nngp.Vecchia, x, y, 9, dtype=kind)).cov for kind in (torch.float64, torch.float32)
    )
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_counts_have_the_curvature_of_their_evidence():
    """Against second differences of the largest bound."""
    x = uniform(60, seed=1)
    y = torch.poisson((torch.sin(5 * x[:, 0]) + 1).exp())
    kernel = Matern32(2, 1.0, torch.tensor([0.4, 0.5])).double()
    gp = nngp.VNNGP(x, y, kernel, Poisson(), num_neighbors=8, mean=nothing)
    gp.solve()
    found, tensors = of_evidence(gp), list(gp.kernel.parameters())

    def evidence(shift):
        with torch.no_grad():
            before = parameters_to_vector(tensors)
            vector_to_parameters(before + shift, tensors)
            with gp.profile.optimum(1e-7):
                value = float(gp.profile.bound())
            vector_to_parameters(before, tensors)
        return value

    step, hessian = 0.05, torch.zeros(3, 3).double()
    for i, a in enumerate(torch.eye(3).double() * step):
        for j, b in enumerate(torch.eye(3).double() * step):
            hessian[i, j] = (evidence(a + b) - evidence(a - b) - evidence(b - a) + evidence(-a - b)) / (4 * step**2)
    torch.testing.assert_close(torch.linalg.inv(found.cov), -hessian, rtol=0.05, atol=0.02)
    assert gp.kernel.variance.item() == pytest.approx(1.0)  # as before


def test_errors_of_coefficients_of_counts_are_averaged_over_solutions():
    """Against dense generalized least squares under pseudo-observations solved for at points of a cubature rule."""
    x = uniform(N, seed=1)
    y = torch.poisson((torch.sin(5 * x[:, 0]) + 1).exp(), generator=torch.Generator().manual_seed(3))
    kernel = Matern32(2, 1.0, 0.4).double()
    gp = nngp.VNNGP(x, y, kernel, Poisson(), num_neighbors=N - 1, mean=LinearMean(2))
    gp.solve()
    found, start = of_evidence(gp), torch.cat([free.value.flatten() for free in of_evidence(gp).free])
    strengths, axes = torch.linalg.eigh(found.cov)
    points = axes * (len(start) * strengths.clamp(0, 1.5**2)).sqrt()
    squares, basis = [], gp.mean.basis(x)
    for point in torch.cat([points.mT, -points.mT]):
        moved, theta = copy.deepcopy(gp), (start + found.shift + point).exp()
        with torch.no_grad():
            moved.kernel.variance, moved.kernel.lengthscale = theta[0], theta[1]
            moved.solve(tolerance=1e-6)
            cov = moved.kernel(x, x) + torch.diag(1 / moved.q.precision)
            squares.append(torch.linalg.inv(basis.mT @ torch.linalg.solve(cov, basis)).diagonal())
    torch.testing.assert_close(found.errors, torch.stack(squares).mean(0).sqrt(), rtol=0.02, atol=0)


@pytest.mark.parametrize("guide", [MeanField(), SparseCholesky(3)])
def test_without_pseudo_observations_there_is_none(guide):
    gp = build(nngp.VNNGP, uniform(N, seed=1), normal(N), 5, guide=guide)
    assert information_of(gp) == "no interval: VNNGP has none for this likelihood and guide"
