import os

import pytest
import torch
from builders import matern, waves
from oracles.dense import dense_cholesky, dense_covariance, dense_precision, gaussian_kl
from oracles.waves import N, loss
from pyro.infer import SVI
from pyro.optim import Adam
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_nngp.data.datasets import uci
from pyro_nngp.data.metrics import nll, rmse
from pyro_nngp.data.preprocessing import Standardizer, random_split
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import IntegratedELBO, fit, to_arviz
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.linalg import DEFAULT_JITTER
from pyro_nngp.models import VNNGP
from pyro_nngp.variational import (
    LocalGaussian,
    MeanField,
    ObservedGaussian,
    PseudoObservations,
    SparseCholesky,
)

F64 = torch.float64


def trained(x, y, likelihood=None, steps=8, **settings):
    """A model some steps on its way, so that nothing is zero or one by accident; mean-field unless settings differ."""
    settings = {"guide": MeanField()} | settings
    gp = VNNGP(x, y, matern(), Gaussian(0.1) if likelihood is None else likelihood, **settings)
    if isinstance(settings["guide"], PseudoObservations):
        gp.solve()
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.05}), IntegratedELBO())
    for _ in range(steps):
        svi.step()
    return gp


def bound(gp, mean, cov, precision):
    """The ELBO of a Gaussian q(u) for a Gaussian likelihood, term by term."""
    noise, residual = gp.likelihood.variance.detach(), gp.y - mean - gp.mean.value.detach()
    expected = -0.5 * ((2 * torch.pi * noise).log() + (residual.square() + cov.diagonal()) / noise)
    return expected.sum() - gaussian_kl(mean, cov, precision)


@pytest.mark.parametrize("guide", [MeanField(), SparseCholesky(5), SparseCholesky()])
def test_full_neighbors_give_the_dense_elbo_and_predictions(guide):
    x, y = waves()
    gp = trained(x, y, num_neighbors=N - 1, guide=guide)
    gp.mean.requires_grad_(False)  # predictions take it as it is
    q = gp.q.distribution()
    root = dense_cholesky(q).detach()
    mean, cov, prior = q.loc.detach(), root @ root.mT, dense_covariance(gp.kernel, x).detach()
    precision = torch.cholesky_inverse(torch.linalg.cholesky(prior))
    assert loss(gp) == pytest.approx(-float(bound(gp, mean, cov, precision)), rel=1e-9)

    new, _ = waves(7)
    weights = precision @ gp.kernel(x, new).detach()
    own = gp.kernel(new, diag=True).detach() * (1 + DEFAULT_JITTER)
    want_var = own - (weights * gp.kernel(x, new).detach()).sum(0) + (weights.mT @ cov @ weights).diagonal()
    loc, var = gp(new, num_neighbors=N)
    torch.testing.assert_close(loc.detach(), mean @ weights + gp.mean.value.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(var.detach(), want_var, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        gp.predict(new, num_neighbors=N).variance.detach(),
        want_var + gp.likelihood.variance.detach(),
        rtol=1e-8,
        atol=0,
    )


def test_elbo_agrees_with_the_dense_one_at_few_neighbors():
    x, y = waves()
    gp = trained(x, y, num_neighbors=6, guide=SparseCholesky(4))
    q = gp.q.distribution()
    root = dense_cholesky(q).detach()
    want = -bound(gp, q.loc.detach(), root @ root.mT, dense_precision(gp.kernel, gp.graph).detach())
    assert loss(gp) == pytest.approx(float(want), rel=1e-9)


@pytest.mark.parametrize("settings", [{}, {"inducing": 24, "learn_inducing": True, "guide": SparseCholesky(3)}])
def test_batches_of_data_and_inducing_points_apart(settings):
    x, y = waves()
    gp = trained(x, y, num_neighbors=5, **settings)
    pairs = [(i, j) for i in torch.randperm(N).split(24) for j in torch.randperm(gp.num_inducing).split(12)]
    assert sum(loss(gp, i, j) for i, j in pairs) / len(pairs) == pytest.approx(loss(gp), rel=1e-10)


def test_figure_3_of_the_paper_divergence_against_neighbors():
    """KL of a fixed q(u) from the prior, against K: it reaches the dense value, sooner for a short lengthscale."""
    x = torch.linspace(0, 50, 60, dtype=F64)[:, None]
    for lengthscale, enough in ((1.0, 8), (5.0, 24)):
        k = RBF(1, variance=1.0, lengthscale=torch.tensor(lengthscale)).double()
        values = []
        for num_neighbors in (1, 2, 4, enough, 59):
            settings = {"num_neighbors": num_neighbors, "ordering": "given", "jitter": 1e-6, "guide": MeanField()}
            gp = VNNGP(x, torch.sin(x[:, 0]), k, Gaussian(1.0), **settings)
            prior = NNGP(k, gp.graph, jitter=1e-6)
            gp.q.loc.data[:, 0] = torch.sin(x[:, 0] / 5)
            values.append(float(kl_divergence(gp.q.distribution(), prior).detach()))
        assert values[-2] == pytest.approx(values[-1], rel=0.02)
        assert abs(values[0] - values[-1]) > 0.05 * values[-1]


def test_closed_form_optimum_is_where_the_gradient_vanishes():
    x, y = waves()
    gp = VNNGP(x, y, matern(), Gaussian(0.05), num_neighbors=8, guide=MeanField())
    gp.solve()
    IntegratedELBO().differentiable_loss(gp.model, gp.guide).backward()
    assert gp.q.loc.grad.abs().max() < 1e-2
    assert gp.q.log_scale.grad.abs().max() < 1e-8
    precision = dense_precision(gp.kernel, gp.graph).detach() + torch.eye(N, dtype=F64) / 0.05
    want = torch.cholesky_solve(((y - gp.mean.value.detach())[:, None] / 0.05), torch.linalg.cholesky(precision))[:, 0]
    torch.testing.assert_close(gp.q.distribution().loc.detach(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("guide", "most"), [(MeanField(), 10), (PseudoObservations(), 20)])
def test_labels_under_a_stiff_prior_are_solved_in_few_steps(monkeypatch, guide, most):
    """The mean-field variances are tiny here, and must not replace the curvature of the likelihood."""
    x, y = waves(400)
    labels, k, calls = (y > 0).double(), RBF(2, variance=1.0, lengthscale=0.5), []
    expected = Bernoulli.expected_log_prob
    gp = VNNGP(x, labels, k, Bernoulli(), num_neighbors=15, guide=guide)
    monkeypatch.setattr(Bernoulli, "expected_log_prob", lambda self, *args: calls.append(1) or expected(self, *args))
    gp.solve(max_steps=40)
    assert 1 < len(calls) < most


@pytest.mark.parametrize("settings", [{"likelihood": None, "y": None}, {"inducing": 9}])
def test_solving_needs_inducing_points_at_the_data(settings):
    x, y = waves()
    settings = {"likelihood": Gaussian(), "y": y} | settings
    with pytest.raises(ValueError, match=r"expected model with a likelihood, inducing points at the data"):
        VNNGP(x=x, kernel=matern(), num_neighbors=5, **settings).solve()


def test_inducing_points_at_the_data_by_hand_are_nearly_those_at_the_data():
    """With z = x the conditional f | u is a point mass, up to the nugget."""
    x, y = waves()
    settings = {"num_neighbors": 6, "jitter": 1e-10, "guide": MeanField()}
    at_data, by_hand = (VNNGP(x, y, matern(), Gaussian(0.1), inducing=z, **settings) for z in (None, x.clone()))
    assert loss(by_hand) == pytest.approx(loss(at_data), rel=1e-5)


@pytest.mark.slow
def test_learned_inducing_points_move_and_neighbors_follow():
    x, y = waves(200)
    gp = trained(x, y, steps=0, num_neighbors=6, inducing=20, learn_inducing=True)
    before = gp.z.detach().clone()
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.05}), IntegratedELBO())
    for step in range(60):
        svi.step(torch.randperm(200)[:40])
        if step % 20 == 19:
            gp.refresh_neighbors()
    assert (gp.z - before).abs().max() > 0.05
    torch.testing.assert_close(gp.graph.x, gp.z.detach())
    distance = (torch.cdist(x / gp.graph.lengthscale, gp.z.detach() / gp.graph.lengthscale)).argsort(-1)[:, :6]
    assert torch.equal(distance.sort().values, gp.data_neighbors.sort().values)


def test_refresh_uses_the_learned_lengthscales():
    x, y = waves()
    gp = trained(x, y, num_neighbors=5, guide=SparseCholesky(5))
    weights = gp.q.distribution().weights.detach().clone()
    old = gp.graph.neighbors.clone()
    gp.refresh_neighbors()
    torch.testing.assert_close(gp.graph.lengthscale, gp.kernel.lengthscale.detach())
    assert not torch.equal(old, gp.graph.neighbors)
    assert torch.equal(gp.q.pattern, gp.graph.neighbors)
    new = gp.q.distribution().weights.detach()
    for i in range(N):
        entries = {int(c): float(v) for c, v in zip(old[i], weights[i], strict=True) if c >= 0}
        for c, v in zip(gp.graph.neighbors[i], new[i], strict=True):
            assert float(v) == (entries.get(int(c), 0.0) if c >= 0 else 0.0)


def test_mean_functions():
    x, _ = waves()
    linear = torch.nn.Linear(2, 1).double()
    gp = VNNGP(x, 3 * x[:, 0] + 2, matern(), Gaussian(0.01), num_neighbors=5, mean=linear)
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.05}), IntegratedELBO())
    before = linear.weight.detach().clone()
    for _ in range(5):
        svi.step()
    assert (linear.weight - before).abs().max() > 0.01
    torch.testing.assert_close(gp(x[:3] + 100)[0], linear(x[:3] + 100)[:, 0])  # far away, the mean alone is left


def test_row_order_does_not_matter():
    x, y = waves()
    shuffle, order = torch.randperm(N), torch.randperm(N)
    one = VNNGP(x, y, matern(), Gaussian(0.1), num_neighbors=6, ordering=order, guide=MeanField(loc=y))
    two = VNNGP(
        x[shuffle],
        y[shuffle],
        matern(),
        Gaussian(0.1),
        num_neighbors=6,
        ordering=torch.argsort(shuffle)[order],
        guide=MeanField(loc=y[shuffle]),
    )
    assert loss(one) == pytest.approx(loss(two), rel=1e-12)
    torch.testing.assert_close(one(x[:5] + 0.01), two(x[:5] + 0.01))


@pytest.mark.filterwarnings("ignore:.* of the rows are exact copies of others:UserWarning")
def test_duplicate_rows_without_noise_are_no_trouble():
    x, y = waves(20, torch.float32)
    x, y = torch.cat([x, x]), torch.cat([y, y])
    gp = VNNGP(x, y, matern(), Gaussian(1e-4), num_neighbors=6)
    gp.solve()
    torch.testing.assert_close(gp(x)[0].detach(), y, rtol=0, atol=0.05)


def test_without_a_likelihood_there_is_nothing_to_predict():
    x, _ = waves()
    with pytest.raises(ValueError, match=r"expected a likelihood in the model"):
        VNNGP(x, None, matern(), num_neighbors=6).predict(x[:3])


@pytest.mark.slow
@pytest.mark.skipif(
    "PYRO_NNGP_DATA" not in os.environ, reason="elevators can't be downloaded; name a folder that has it"
)
def test_elevators_in_a_hundred_epochs():
    """The budget and the mark of the maintained implementation: test NLL 0.48 and RMSE 0.40, here over two splits."""
    found = []
    for seed in (1, 2):
        data = uci("elevators")
        train, _, test = random_split(len(data.x), (0.64, 0.16, 0.2), seed)
        to_x, to_y = Standardizer(data.x[train]), Standardizer(data.y[train])
        start = torch.full((18,), 0.6931)
        k = Matern52(18, variance=start[0], lengthscale=start)
        gp = VNNGP(to_x.transform(data.x[train]), to_y.transform(data.y[train]), k, Gaussian(0.6931), num_neighbors=32)
        fit(gp, 1000, batch_size=1024, lr=0.03, solve_every=25, refresh_every=100, progress=False)
        with torch.no_grad():
            predictive, y = gp.predict(to_x.transform(data.x[test])), to_y.transform(data.y[test])
        found.append((float(nll(y, predictive)), float(rmse(y, predictive.mean))))
    mean_nll, mean_rmse = torch.tensor(found).mean(0).tolist()
    assert mean_nll <= 0.48
    assert mean_rmse <= 0.40


def test_targets_without_a_likelihood_are_gaussian():
    x, y = waves()
    assert isinstance(VNNGP(x, y, matern(), num_neighbors=5).likelihood, Gaussian)


@pytest.mark.parametrize(
    ("settings", "family"),
    [({}, ObservedGaussian), ({"inducing": 9}, LocalGaussian), ({"y": None, "likelihood": None}, LocalGaussian)],
)
def test_pseudo_observations_are_the_family_where_they_apply(settings, family):
    x, y = waves()
    settings = {"y": y, "likelihood": Gaussian(0.1)} | settings
    assert isinstance(VNNGP(x=x, kernel=matern(), num_neighbors=5, **settings).q, family)
    if family is LocalGaussian:
        with pytest.raises(
            ValueError, match=r"guide=PseudoObservations\(...\) with a likelihood and inducing points at"
        ):
            VNNGP(x=x, kernel=matern(), num_neighbors=5, guide=PseudoObservations(), **settings)


def test_batches_of_inducing_points_leave_none_out():
    """Each of M points is in a batch equally often, whatever its row."""
    x, y = waves()
    gp, num_batches = VNNGP(x, y, matern(), Gaussian(), num_neighbors=4, inducing=x[:40]), 400
    generator, idx, count, drawn = torch.Generator().manual_seed(0), torch.arange(10), torch.zeros(40), []
    for _ in range(num_batches):
        _, batch = gp.batch_args(idx, generator)
        rows = batch.rows[batch.targets]
        assert len(rows.unique()) == len(rows) <= 10
        count[rows] += 1
        drawn.append(len(rows))
    share = sum(drawn) / num_batches / 40
    assert share > 0.2
    assert ((count / num_batches - share).abs() < 6 * (share * (1 - share) / num_batches) ** 0.5).all()


@pytest.mark.slow
def test_batches_of_inducing_points_estimate_the_loss_without_bias():
    x, y = waves(24)
    gp = trained(x, y, num_neighbors=4, inducing=x[:16], steps=20)
    gp.q.log_scale.data += 3 * torch.arange(16)[:, None] / 16  # the first rows and the last ones count differently
    generator, idx, whole = torch.Generator().manual_seed(0), torch.arange(24)[:4], []
    full = loss(gp, idx, torch.arange(16))
    for _ in range(100):
        whole.append(loss(gp, *gp.batch_args(idx, generator)))
    values = torch.tensor(whole, dtype=F64)
    assert abs(values.mean() - full) < 6 * values.std() / 10
    assert values.std() / 10 < 0.1 * abs(full)


@pytest.mark.parametrize("settings", [{"guide": MeanField()}, {"inducing": 10}])
def test_mean_field_intervals_without_a_log_evidence_come_with_a_warning(settings):
    x = torch.rand(30, 2)
    gp = VNNGP(x, (x[:, 0] > 0.5).float(), None, Bernoulli(), num_neighbors=5, **settings)
    message = r"VNNGP: intervals of f from Bernoulli data by a mean-field q\(u\) are not reliable: .* Leave guide=MeanF"
    for call in (lambda: gp(x), lambda: gp.predict(x), lambda: gp.sample(x, 2), lambda: to_arviz(gp, num_samples=2)):
        with pytest.warns(UserWarning, match=message):
            call()
    gp(x, samples={"u": torch.randn(2, gp.num_inducing)})  # not from the guide; warnings are errors
    for other in ({"guide": SparseCholesky()}, {}):
        gp = VNNGP(x, (x[:, 0] > 0.5).float(), None, Bernoulli(), num_neighbors=5, **other)
        if not other:
            gp.solve()
        gp(x)
    VNNGP(x, x[:, 0], num_neighbors=5, **settings)(x)


def test_with_all_predecessors_the_log_evidence_is_exact():
    x, y = waves(20)
    cov = dense_covariance(matern(), x).detach() + 0.1 * torch.eye(20, dtype=F64)
    gp = VNNGP(x, y, matern(), Gaussian(0.1), num_neighbors=19, guide=MeanField())
    want = MultivariateNormal(gp.mean(x).detach(), cov).log_prob(y)
    parts = [gp.log_evidence(rows) * len(rows) for rows in torch.arange(20).split(6)]
    assert float(sum(parts)) == pytest.approx(float(want), rel=1e-6)
    for settings in ({}, {"guide": MeanField(), "inducing": 9}):
        assert VNNGP(x, y, matern(), Gaussian(0.1), num_neighbors=4, **settings).log_evidence(torch.arange(3)) is None
