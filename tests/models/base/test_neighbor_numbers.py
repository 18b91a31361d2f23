"""How many neighbors are enough: in training where K was not given, and in predictions."""

import copy
import itertools

import pytest
import torch
from oracles.dense import dense_covariance

import pyro_nngp as nngp
from pyro_nngp.data import nll
from pyro_nngp.distributions import SparseCholeskyNormal
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern12, Matern52, bind
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import LOO, NPVI, VNNGP, Vecchia
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.neighbors.choice_of_k import NeighborTrial
from pyro_nngp.variational import MeanField, PseudoObservations, SparseCholesky
from pyro_nngp.variational.site_neighbors import prediction_range, variance_neighbors

methods = pytest.mark.parametrize("method", [Vecchia, LOO])
choosing = pytest.mark.parametrize("method", [Vecchia, LOO, VNNGP])


def smooth(n, dim, noise=0.01):
    """A smooth function of all inputs, as of a robot arm."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    slopes = torch.randn(20, dim, generator=generator, dtype=torch.float64) / dim**0.5
    y = (x @ slopes.T + 6 * torch.rand(20, generator=generator, dtype=torch.float64)).cos().sum(-1) / 3
    return x, y + noise * torch.randn(n, generator=generator, dtype=torch.float64)


def dense_gains(gp, sizes):
    """Falls of the mean log variance of y at 64 rows from each number of neighbors to the next."""
    rows = torch.linspace(0, len(gp.x) - 1, 64).long()
    noise = gp.likelihood.variance.detach().double()
    cov = dense_covariance(gp.kernel, gp.x).detach() + noise * torch.eye(len(gp.x), dtype=torch.float64)
    places = gp.x / gp.kernel.lengthscale.detach()
    nearest = torch.cdist(places[rows], places).argsort(-1)[:, 1:]
    means = []
    for k in sizes:
        near = nearest[:, :k]
        half = torch.linalg.solve_triangular(
            torch.linalg.cholesky(cov[near[:, :, None], near[:, None, :]]),
            cov[near, rows[:, None]][..., None],
            upper=False,
        )
        means.append((cov[rows, rows] - half.square().sum((-1, -2))).log().mean())
    return [float(a - b) for a, b in itertools.pairwise(means)]


@choosing
def test_many_smooth_inputs_take_more_neighbors(method):
    x, y = smooth(700, 8)
    kernel = Matern52(8, variance=torch.tensor(3.0), lengthscale=torch.full((8,), 4.0))
    gp = method(x, y, kernel, Gaussian(0.001))
    gains = dense_gains(gp, (32, 64, 128))
    assert min(gains) > 0.15
    assert gp.graph.num_neighbors == 128
    assert gp.graph.neighbors.shape == (700, 128)


@choosing
def test_two_inputs_and_labels_keep_32_and_few_rows_take_all_others(method):
    x, y = smooth(700, 2)
    rough = Matern12(2, variance=1.0, lengthscale=0.3)
    assert method(x, y, rough, Gaussian(0.01)).graph.num_neighbors == 32
    assert method(x, y, num_neighbors=7).graph.num_neighbors == 7
    assert method(x[:11], y[:11]).graph.num_neighbors == 10
    x, y = smooth(300, 8)
    if method is not Vecchia:
        assert method(x, (y > 0).double(), likelihood=Bernoulli()).graph.num_neighbors == 32


def noisy_and_smooth(n):
    """A smooth function of two inputs under noise that hides it from single values; and its kernel."""
    x, y = smooth(n, 2)
    return x, y + torch.randn(n, generator=torch.Generator().manual_seed(2), dtype=x.dtype)


@methods
@pytest.mark.slow
def test_noise_takes_more_neighbors_where_they_are_noisy_and_cheap(method):
    x, y = noisy_and_smooth(600)
    gp = method(x, y)
    assert gp.graph.num_neighbors > 32
    assert gp.prediction_neighbors() >= 128
    assert VNNGP(x, y).graph.num_neighbors == 32  # conditions on f
    assert method(x, y, num_neighbors=32).graph.num_neighbors == 32
    x, y = noisy_and_smooth(3000)
    gp = method(x, y)
    assert gp.graph.num_neighbors == 32  # 9 million entries of neighbor covariances are enough for y
    assert gp.prediction_neighbors() == 256


@pytest.mark.slow
def test_families_other_than_sites_keep_their_number():
    x, y = smooth(700, 8)
    assert VNNGP(x, y).graph.num_neighbors == 128
    assert VNNGP(x, y, guide=MeanField()).graph.num_neighbors == 32
    assert VNNGP(x, y, guide=SparseCholesky(5)).graph.num_neighbors == 32
    assert NPVI(x, y).graph.num_neighbors == 20


@methods
@pytest.mark.parametrize(("lengthscale", "falls"), [(1.0, False), (10.0, True)])
def test_predictions_take_no_more_neighbors_where_densities_fall(method, lengthscale, falls):
    """Clusters of five points with a level each: a kernel that ties them lowers variances, and is wrong."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.arange(80.0)[:, None] + 0.1 * torch.rand(80, 5, generator=generator)).double().reshape(-1, 1)
    y = torch.randn(80, 1, generator=generator) + 0.01 * torch.randn(80, 5, generator=generator)
    gp = method(x, y.double().flatten(), Matern52(1, 1.0, lengthscale), Gaussian(0.01), num_neighbors=4)
    few, more = (float(gp.loo(num_neighbors=k).mean()) for k in (4, 8))
    assert (few - more > 1.0) == falls
    assert dense_gains(gp, (4, 8))[0] > 0.01
    assert (gp.prediction_neighbors() == 4) == falls


@pytest.mark.slow
@pytest.mark.parametrize(("lengthscale", "want"), [(0.3, 8), (3.0, None)])
def test_predictions_double_the_neighbors_for_as_long_as_it_pays(lengthscale, want):
    x, y = smooth(600, 4)
    gp = Vecchia(x, y, Matern52(4, variance=1.0, lengthscale=lengthscale), Gaussian(0.01), num_neighbors=8)
    sizes = [8, 16, 32, 64, 128, 256, 512]
    gains = dense_gains(gp, sizes)
    least = [0.01] * 5 + [0.03]
    assert min(abs(gain - bar) for gain, bar in zip(gains, least, strict=True)) > 1e-4  # not decided by rounding
    enough = next((k for k, gain, bar in zip(sizes, gains, least, strict=False) if gain < bar), 512)
    assert gp.prediction_neighbors() == enough
    assert enough == want if want else enough > 8


@pytest.mark.slow
@pytest.mark.parametrize("method", [Vecchia, nngp.VNNGP])
def test_a_number_that_was_chosen_is_kept_until_it_may_be_another(method, monkeypatch):
    x, y = smooth(600, 4)
    tried = []
    old = NeighborTrial.choose_k

    def counted(trial, scores, *rest):
        return old(trial, lambda near: tried.append(near.shape[1]) or scores(near), *rest)

    def number(gp):
        tried.clear()
        return gp.posterior(gp.bound()).neighbors(x[:2], None).shape[1]

    monkeypatch.setattr(NeighborTrial, "choose_k", counted)
    gp = method(x, y, Matern52(4, variance=1.0, lengthscale=3.0), Gaussian(1e-4), num_neighbors=8)
    gp.solve()
    first = number(gp)
    assert len(tried) > 1
    assert (number(gp), len(tried)) == (first, 0)  # kept while nothing changes
    gp.kernel.lengthscale = 0.3
    gp.solve()
    fewer = number(gp)
    assert len(tried) > 1 or method is nngp.VNNGP
    assert fewer < first
    gp.kernel.lengthscale = 3.0
    gp.solve()
    assert number(gp) == first
    gp.refresh_neighbors()
    assert number(gp) == number(copy.deepcopy(gp))
    fit(gp, 3, progress=False)
    known = number(gp)
    gp.graph.refresh()  # forgets
    assert number(gp) == known


def test_a_last_doubling_that_does_not_fit_is_no_reason_for_fewer():
    x, y = smooth(13, 2)
    gp = Vecchia(x, y, Matern52(2, variance=1.0, lengthscale=0.01), Gaussian(0.1), num_neighbors=8)
    assert gp.prediction_neighbors() == 8  # 12 others bring nothing


def test_few_rows_have_the_exact_process_and_the_result_names_the_number_of_neighbors():
    x, y = smooth(60, 2)
    gp = Vecchia(x, y)
    result = fit(gp, progress=False)
    assert result.num_neighbors == 59
    assert ", K = 59" in repr(result)
    rough = Matern52(2, variance=1.0, lengthscale=1e-3)
    assert Vecchia(x, y, rough, Gaussian(0.1)).prediction_neighbors() == 32  # no neighbor helps
    assert Vecchia(x, y, rough, Gaussian(0.1), num_neighbors=40).prediction_neighbors() == 40
    assert Vecchia(*smooth(301, 2), Matern52(2)).graph.num_neighbors < 300


def test_a_graph_is_resized_in_place():
    x, y = smooth(50, 2)
    gp = Vecchia(x, y, num_neighbors=5)
    levels = gp.graph.levels()
    gp.graph.resize(9)
    assert torch.equal(gp.graph.neighbors, Vecchia(x, y, num_neighbors=9).graph.neighbors)
    assert len(gp.graph.levels()) > len(levels)
    with pytest.raises(ValueError, match=r"NeighborGraph.resize: expected num_neighbors in 1..49, got 50"):
        gp.graph.resize(50)


@pytest.mark.slow
@choosing
def test_more_neighbors_in_training_predict_better(method):
    x, y = smooth(1300, 8)
    scores = []
    for k in (32, None):
        gp = method(x[:800], y[:800], num_neighbors=k)
        fit(gp, progress=False)
        scores.append(nll(y[800:], gp.predict(x[800:])).item())
    assert scores[1] < scores[0] - 0.05


@pytest.mark.parametrize("rows", [2, 11, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["Vecchia", "LOO", "MLLk", "VNNGP", "NPVI", "SWSGP"])
def test_few_rows_train_and_predict_with_defaults(method, rows):
    x = torch.linspace(0, 1, rows).double()[:, None]
    y = torch.sin(3 * x[:, 0])
    gp = getattr(nngp, method)(x, y, **({"inducing": rows} if method == "SWSGP" else {}))
    nngp.fit(gp, 2, progress=False)
    mean, variance = gp(x + 0.01)
    assert mean.isfinite().all()
    assert (variance > 0).all()


@pytest.mark.parametrize("method", [PseudoObservations(), MeanField(), "NPVI"])
def test_predictions_of_a_smooth_function_of_many_inputs_take_more_neighbors(method):
    """Where much of the prior's variance is left given K neighbors, more neighbors help."""
    torch.manual_seed(0)
    for inputs, more in ((1, False), (6, True)):
        x = torch.rand(700, inputs).double()
        y, likelihood = torch.sin(3 * x).sum(-1), Gaussian(1e-3)
        if method == "NPVI":
            gp = nngp.NPVI(x, y, Matern52(inputs, 1.0, 1.0), likelihood, num_neighbors=16)
        else:
            gp = nngp.VNNGP(x, y, Matern52(inputs, 1.0, 1.0), likelihood, num_neighbors=16, guide=method)
        gp.solve()
        few = 64 if isinstance(method, PseudoObservations) else 16
        assert (gp.prediction_neighbors() > few) is more
        assert gp.posterior(gp.bound()).neighbors(x[:3], None).shape == (3, gp.prediction_neighbors())


def test_what_q_predicts_of_itself_decides_without_sites():
    """Against dense predictions of its means at the points that are tried, with the noise of the data."""
    x, y = smooth(200, 3)
    settings = {"num_neighbors": 4, "guide": MeanField()}
    gp = nngp.VNNGP(x, y, Matern52(3, variance=1.0, lengthscale=1.0), Gaussian(0.01), **settings)
    gp.solve()
    rows, sizes, found = gp.graph.trial(199).rows, [4, 8, 16, 32, 64, 128, 199], []
    q = gp.q.distribution()
    loc, scale = q.loc.detach(), q.scale.detach()
    for k in sizes:
        near = gp.graph.others(k, rows)
        cov = gp.kernel(x[near], x[near]).detach() + gp.jitter * torch.eye(k, dtype=x.dtype)
        cross = gp.kernel(x[near], x[rows, None]).detach()
        w = torch.linalg.solve(cov, cross)[..., 0]
        var = 1.01 + gp.jitter - (w * cross[..., 0]).sum(-1) + (w * scale[near]).square().sum(-1)
        found.append(float((var.log() + (loc[rows] - (w * loc[near]).sum(-1)).square() / var).mean()))
    enough = next(k for k, a, b in zip(sizes, found, [*found[1:], found[-1]], strict=True) if a - b < 0.01)
    assert gp.prediction_neighbors() == enough
    assert 4 < enough < 199


def test_means_that_more_neighbors_do_not_understand_keep_k():
    """Rough means under a kernel that is all but a plane: variances fall with more neighbors, and errors grow."""
    x, _ = smooth(200, 2)
    kernel = Matern52(2, variance=1e6, lengthscale=100.0)
    settings = {"num_neighbors": 4, "guide": MeanField(), "jitter": 1e-12}
    gp = nngp.VNNGP(x, x[:, 0], kernel, Gaussian(1e-4), **settings)
    loc = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    gp.q.assign(SparseCholeskyNormal(loc, torch.full_like(loc, 1e-3), None, None))
    middle = torch.full((1, 2), 0.5, dtype=x.dtype)
    assert gp(middle, num_neighbors=16)[1] < gp(middle, num_neighbors=4)[1]
    assert gp.prediction_neighbors() == 4


def test_the_number_is_found_again_where_q_has_changed_beyond_the_first_neighbors():
    x, y = smooth(300, 4)
    kernel = Matern52(4, variance=1.0, lengthscale=2.0).requires_grad_(False)
    gp = nngp.VNNGP(x, y, kernel, Gaussian(0.01), guide=MeanField(loc=y), num_neighbors=8)
    before, trial = gp.prediction_neighbors(), gp.graph.trial(299)
    beyond = torch.ones(300, dtype=torch.bool)
    beyond[torch.cat([trial.rows, trial.near[:, :8].flatten()])] = False
    with torch.no_grad():
        gp.q.loc[beyond] += 30
    assert gp.prediction_neighbors() == 8 < before


def test_draws_of_u_are_predicted_from_the_neighbors_of_their_prior():
    x, y = smooth(200, 3)
    gp = NPVI(x, y, Matern52(3, variance=1.0, lengthscale=1.0), num_neighbors=4)
    draws = {"u": torch.stack([y, -y])}
    assert gp.prediction_neighbors() > 4
    new = x[:5] + 0.1
    for predict in (gp, lambda x, **settings: gp.sample(x, 2, seed=0, **settings)):
        want = predict(new, samples=draws, num_neighbors=4)
        torch.testing.assert_close(predict(new, samples=draws), want, rtol=0, atol=0)


def test_predictions_look_for_more_neighbors_only_after_a_solution_for_sites():
    graph = NeighborGraph(smooth(200, 2)[0], 5)
    assert prediction_range(graph, is_solved=True) == (64, 199)
    assert prediction_range(graph, is_solved=False) == (64, 64)
    assert prediction_range(NeighborGraph(smooth(30, 2)[0], 5), is_solved=True) == (30, 30)


def test_variances_take_64_neighbors_where_k_of_them_leave_a_tenth_more():
    x, noise = smooth(100, 2)[0], torch.ones(100, dtype=torch.float64)
    smoother, rougher = (bind(Matern52(2, 1.0, scale).double()) for scale in (2.0, 0.01))
    assert variance_neighbors(smoother, NeighborGraph(x, 5), noise, 1e-6).shape == (100, 64)
    assert variance_neighbors(rougher, NeighborGraph(x, 5), noise, 1e-6).shape == (100, 5)
