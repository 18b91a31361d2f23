import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import AUGMENTED, matern, waves
from oracles.dense import dense_covariance
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from pyro.nn import PyroModule, PyroSample
from scipy import integrate
from torch.distributions import kl_divergence

from pyro_nngp.conditionals.nearest_neighbor import graph_conditional
from pyro_nngp.distributions.polya_gamma import PolyaGamma
from pyro_nngp.inference import Schedule, fit
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, NegativeBinomial, StudentT
from pyro_nngp.likelihoods.augmentation import auxiliary_prior, gaussian_observations, predictive
from pyro_nngp.means import ConstantMean
from pyro_nngp.models import LOO
from pyro_nngp.variational import Conjugate, LogNormal

F64 = torch.float64


N = 40


augmented = pytest.mark.parametrize(("likelihood", "make"), AUGMENTED)


def loss(gp, *args):
    return TraceMeanField_ELBO().loss(gp.model, gp.guide, *args)


def dense_leave_one_out(cov, obs, noise):
    """Moments of f_n given all other observations (Rasmussen and Williams 2006, eq. 5.12)."""
    precision = torch.cholesky_inverse(torch.linalg.cholesky(cov + torch.diag(noise)))
    return obs - precision @ obs / precision.diagonal(), 1 / precision.diagonal() - noise


def dense_log_prob(likelihood, y, loc, var):
    """log of the integral of p(y | f) N(f | loc, var), on a fine grid."""
    t = torch.linspace(-14, 14, 8001, dtype=F64)[:, None]
    log_weight = -t.square() / 2 + math.log(float(t[1] - t[0])) - math.log(2 * math.pi) / 2
    return torch.logsumexp(likelihood(loc + var.sqrt() * t).log_prob(y) + log_weight, 0)


def test_full_neighbors_give_the_closed_form_of_leave_one_out():
    x, y = waves(N)
    gp = LOO(x, y, matern(), Gaussian(torch.tensor(0.1, dtype=F64)), num_neighbors=N - 1)
    gp.mean.value = torch.full_like(gp.mean.value, 0.7)
    loc, var = dense_leave_one_out(dense_covariance(gp.kernel, x).detach(), y - 0.7, torch.full_like(y, 0.1))
    want = torch.distributions.Normal(loc + 0.7, (var + 0.1).sqrt()).log_prob(y).sum()
    assert loss(gp) == pytest.approx(-float(want), rel=1e-9)


@augmented
def test_objective_at_fixed_omega_is_the_dense_one(likelihood, make):
    x, f = waves(N)
    y, bound = make(f), likelihood().double().bind()
    gp = LOO(x, y, matern(), likelihood(), num_neighbors=N - 1, divergence="prior")
    gp.mean.value = torch.full_like(gp.mean.value, 0.4)
    omega = auxiliary_prior(bound, y, F64).sample()
    obs, noise = gaussian_observations(bound, y, omega, F64)
    cov = dense_covariance(gp.kernel, x).detach()
    pairs = [dense_leave_one_out(cov, o - 0.4, d) for o, d in zip(obs.view(-1, N), noise.view(-1, N), strict=True)]
    loc, var = torch.stack([p[0] for p in pairs]) + 0.4, torch.stack([p[1] for p in pairs])
    if isinstance(bound, Categorical):
        off, on = (
            torch.stack([dense_log_prob(Bernoulli(), label, *m) for m in zip(loc, var, strict=True)])
            for label in torch.tensor([0.0, 1.0], dtype=F64)[:, None].expand(2, N)
        )
        want = (on - off).log_softmax(0).gather(0, y[None])[0]
    else:
        want = dense_log_prob(bound, y, loc[0], var[0])
    site = poutine.trace(poutine.condition(gp.model, {"omega": omega})).get_trace().nodes["y"]
    torch.testing.assert_close(site["fn"].log_prob(y).detach(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("divergence", ["posterior", "prior"])
def test_conjugate_objective_term_by_term(divergence):
    """The density at the mean of omega, minus one divergence per datum."""
    x, f = waves(N)
    settings = {"num_neighbors": N - 1, "guide": Conjugate(), "divergence": divergence}
    gp = LOO(x, (f > 0).to(F64), matern(), Bernoulli(), **settings)
    gp.q.log_square.data.uniform_(-1, 3)
    c = gp.q.log_square.data[:, 0].exp().sqrt()
    omega = (c / 2).tanh() / (2 * c)
    cost = (c / 2).cosh().log() - c / 4 * (c / 2).tanh()
    level = gp.mean.value.detach()
    loc, var = dense_leave_one_out(dense_covariance(gp.kernel, x).detach(), (gp.y - 0.5) / omega - level, 1 / omega)
    loc = loc + level
    want = dense_log_prob(Bernoulli(), gp.y, loc, var).sum() - cost.sum()
    if divergence == "posterior":
        t = torch.linspace(-14, 14, 8001, dtype=F64)[:, None]
        f, weight = loc + var.sqrt() * t, torch.softmax(-t.square() / 2, 0).log()
        want = torch.logsumexp(weight + (gp.y - 0.5) * f - omega * f.square() / 2 - math.log(2), 0).sum() - cost.sum()
    assert loss(gp) == pytest.approx(-float(want), rel=1e-8)


@pytest.mark.parametrize("prior", [PolyaGamma(1.0, 0.0), PolyaGamma(6.0, 0.0), dist.Gamma(2.0, 2.0)])
def test_divergence_of_a_log_normal_guide(prior):
    q = dist.LogNormal(torch.tensor(-0.7, dtype=F64), torch.tensor(0.6, dtype=F64))

    def integrand(t):
        omega = torch.tensor(math.exp(t), dtype=F64)
        return float(q.log_prob(omega).exp() * omega * (q.log_prob(omega) - prior.log_prob(omega)))

    want = integrate.quad(integrand, -6, 5, epsabs=1e-11)[0]
    assert float(kl_divergence(q, prior)) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(("likelihood", "make"), AUGMENTED[:-1])
def test_solving_ends_at_the_mean_field_posterior(likelihood, make):
    """With all neighbors, q(omega_n) is what E f_n^2 under the dense posterior given all omega asks for."""
    x, f = waves(N)
    gp = LOO(x, make(f), matern(), likelihood(), num_neighbors=N - 1, guide=Conjugate())
    gp.mean.value = torch.full_like(gp.mean.value, 0.4)
    gp.solve(num_sweeps=60, batch_size=24)
    gp.solve(num_sweeps=1, batch_size=1)
    bound = gp.likelihood.bind()
    omega = gp.q.distribution(bound, gp.y, torch.arange(N)).mean.detach()
    obs, noise = gaussian_observations(bound, gp.y, omega, F64)
    cov = dense_covariance(gp.kernel, x).detach()
    gain = torch.cholesky_solve(cov, torch.linalg.cholesky(cov + torch.diag(noise.detach()))).mT
    mean, var = 0.4 + gain @ (obs.detach() - 0.4), (cov - gain @ cov).diagonal()
    even = bound.total_count.detach().log() if isinstance(bound, NegativeBinomial) else 0.0
    if isinstance(bound, StudentT):
        want = ((gp.y - mean).square() + var) / bound.scale.detach().square()
    else:
        want = (mean - even).square() + var
    torch.testing.assert_close(gp.q.log_square.detach()[:, 0].exp(), want, rtol=1e-6, atol=0)
    matched = LOO(x, make(f), matern(), likelihood(), num_neighbors=N - 1)
    matched.q.put(bound, gp.y, want)
    q = matched.q.distribution(bound, gp.y, torch.arange(N))
    p = gp.q.distribution(bound, gp.y, torch.arange(N))
    torch.testing.assert_close((q.mean, q.variance), (p.mean, p.variance), rtol=1e-5, atol=0)


@pytest.mark.parametrize("divergence", ["posterior", "prior"])
@pytest.mark.slow
def test_solving_and_training_find_the_classes_of_clouds(divergence):
    """Labels of well separated clouds have a predictive probability near one."""
    y = torch.arange(120) % 3
    x = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]])[y] + 0.3 * torch.randn(120, 2)
    gp = LOO(x, y, Matern52(2), Categorical(3), num_neighbors=15, guide=Conjugate(), divergence=divergence)
    fit(gp, 30, batch_size=60, lr=0.2, progress=False)
    assert gp.predict(x).log_prob(y).mean() > -0.15


@pytest.mark.parametrize("guide", [LogNormal(), Conjugate()])
def test_gradients_reach_the_tables_of_several_classes(guide):
    x = torch.rand(30, 2)
    gp = LOO(x, torch.arange(30) % 3, Matern52(2), Categorical(3), num_neighbors=5, guide=guide)
    before = [table.detach().clone() for table in gp.q.parameters()]
    fit(gp, 2, solve_every=0, batch_size=None, progress=False)
    assert all((old != new).any() for old, new in zip(before, gp.q.parameters(), strict=True))


def test_solving_needs_auxiliary_variables_or_a_linear_mean():
    x, y = waves(N)
    gp = LOO(x, y, matern(), Gaussian(), num_neighbors=5, mean=torch.nn.Linear(2, 1).double())
    assert not gp.can_solve
    with pytest.raises(ValueError, match=r"with Gaussian noise and a ConstantMean or LinearMean .*, got Linear"):
        gp.solve()


@pytest.mark.parametrize("guide", [LogNormal(), Conjugate()])
def test_each_batch_trains_its_own_rows_and_their_neighbors_only(guide):
    x, f = waves(N)
    gp = LOO(x, f > 0, matern(), Bernoulli(), num_neighbors=4, guide=guide)
    gp.q.sparse_grad = True
    idx = torch.tensor([3, 17, 25])
    TraceMeanField_ELBO().differentiable_loss(gp.model, gp.guide, idx).backward()
    touched = torch.cat([idx, gp.graph.neighbors[idx].flatten()]).unique()
    for table in gp.q.parameters():
        grad = table.grad.coalesce()
        assert torch.equal(grad.indices()[0], touched)
        assert (grad.values() != 0).all()


def test_labels_in_every_coding_give_one_model():
    x, f = waves(N)
    codings = [(f > 0).to(F64), 2 * (f > 0).to(F64) - 1, f > 0, (f > 0).long()]
    losses = [loss(LOO(x, y, matern(), Bernoulli(), num_neighbors=5, guide=Conjugate())) for y in codings]
    assert losses == [losses[0]] * 4


def test_class_probabilities_are_one_against_all_ones_given_that_exactly_one_is_on():
    x, f = waves(N)
    labels, new = torch.bucketize(f, torch.tensor([-0.4, 0.4])), waves(5)[0]
    gp = LOO(x, labels, matern(), Categorical(3), num_neighbors=8)
    probs = gp.predict(new).probs.detach()
    torch.testing.assert_close(probs.sum(-1), torch.ones(5, dtype=F64), rtol=1e-12, atol=0)
    single = Bernoulli().marginal(*gp(new)).mean.mT.detach()
    alone = torch.stack([single[:, c] * (1 - single[:, torch.arange(3) != c]).prod(-1) for c in range(3)], -1)
    torch.testing.assert_close(probs, alone / alone.sum(-1, keepdim=True), rtol=1e-9, atol=0)
    papers = LOO(x, labels, matern(), Categorical(3), num_neighbors=8, coupling="probabilities")
    want = single / single.sum(-1, keepdim=True)
    torch.testing.assert_close(papers.predict(new).probs.detach(), want, rtol=1e-9, atol=0)
    assert loss(papers) != pytest.approx(loss(gp), rel=1e-3)


@pytest.mark.parametrize(("coupling", "doubt"), [("odds", 9 * math.exp(-8)), ("probabilities", 9 * math.exp(-4))])
def test_doubt_of_ten_confident_binary_classifiers(coupling, doubt):
    loc = torch.full((10, 1), -4.0, dtype=F64)
    loc[3] = 4.0
    probs = predictive(Categorical(10), loc, torch.full_like(loc, 1e-9), coupling).probs
    assert float(probs[0, 3]) == pytest.approx(1 / (1 + doubt), rel=1e-6)


def test_the_point_itself_is_left_out_among_exact_duplicates():
    x, y = waves(N // 4)
    x, y = x.repeat(4, 1), y.repeat(4) + 0.3 * torch.randn(N, dtype=F64)
    gp = LOO(x, y, matern(), Gaussian(0.1), num_neighbors=3)
    gp.model()
    assert not (gp.graph.neighbors == torch.arange(N)[:, None]).any()
    assert (x[gp.graph.neighbors] == x[:, None]).all()
    assert torch.isfinite(torch.tensor(loss(gp)))
    full = LOO(x, y, matern(), Gaussian(torch.tensor(0.1, dtype=F64)), num_neighbors=N - 1)
    level = full.mean.value.detach()
    loc, var = dense_leave_one_out(dense_covariance(full.kernel, x).detach(), y - level, torch.full_like(y, 0.1))
    want = torch.distributions.Normal(loc + level, (var + 0.1).sqrt()).log_prob(y).sum()
    assert loss(full) == pytest.approx(-float(want), rel=1e-9)


def test_refresh_uses_the_learned_lengthscales():
    x, y = waves(N)
    gp = LOO(x, y, matern(), num_neighbors=5)
    gp.model()
    before = gp.graph.neighbors.clone()
    gp.kernel.lengthscale = torch.tensor([0.1, 2.0])
    gp.refresh_neighbors()
    gp.model()
    torch.testing.assert_close(gp.graph.lengthscale, gp.kernel.lengthscale.detach())
    assert not torch.equal(before, gp.graph.neighbors)


@augmented
def test_predictions_agree_with_dense_conditionals(likelihood, make):
    x, f = waves(N)
    gp = LOO(x, make(f), matern(), likelihood(), num_neighbors=5)
    gp.mean.value = torch.full_like(gp.mean.value, 0.4)
    gp.mean.requires_grad_(False)  # predictions take it as it is
    rows = torch.arange(N)
    omega = gp.q.distribution(gp.likelihood.bind(), gp.y, rows).mean.detach()
    obs, noise = gaussian_observations(gp.likelihood.bind(), gp.y, omega, F64)
    new = waves(4)[0]
    cross, cov, own = (
        gp.kernel(x, new).detach(),
        dense_covariance(gp.kernel, x).detach(),
        dense_covariance(gp.kernel, new),
    )
    loc, var = gp(new, num_neighbors=N)
    for o, d, m, v in zip(obs.view(-1, N), noise.detach().view(-1, N), loc.view(-1, 4), var.view(-1, 4), strict=True):
        w = torch.cholesky_solve(cross, torch.linalg.cholesky(cov + torch.diag(d)))
        torch.testing.assert_close(m.detach(), 0.4 + (o - 0.4).detach() @ w, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(v.detach(), own.diagonal().detach() - (w * cross).sum(0), rtol=1e-8, atol=1e-9)


def test_joint_draws_have_the_dense_posterior_covariance():
    x, y = waves(20)
    gp = LOO(x, y, matern(), Gaussian(torch.tensor(0.1, dtype=F64)), num_neighbors=5)
    new = waves(6)[0]
    draws = gp.sample(new, 20_000, num_neighbors=25)
    cross = gp.kernel(x, new).detach()
    tril = torch.linalg.cholesky(dense_covariance(gp.kernel, x).detach() + 0.1 * torch.eye(20, dtype=F64))
    w = torch.cholesky_solve(cross, tril)
    want = dense_covariance(gp.kernel, new).detach() - w.mT @ cross
    error = (draws.mean(0) - y @ w) / (want.diagonal() / len(draws)).sqrt()
    assert error.abs().max() < 6
    spread = (want.diagonal()[:, None] * want.diagonal() + want.square()).sqrt() / len(draws) ** 0.5
    assert ((draws.mT.cov() - want).abs() / spread).max() < 6


@augmented
def test_joint_draws_have_the_marginals_of_forward(likelihood, make):
    x, f = waves(N)
    gp = LOO(x, make(f), matern(), likelihood(), num_neighbors=N - 1)
    new = waves(3)[0]
    draws = gp.sample(new, 5000, num_neighbors=N + 2)
    loc, var = (value.detach() for value in gp(new, num_neighbors=N))
    assert ((draws.mean(0) - loc) / (var / 5000).sqrt()).abs().max() < 6
    assert ((draws.var(0) / var - 1) / (2 / 5000) ** 0.5).abs().max() < 6


def test_mean_functions_per_class():
    x, f = waves(N)
    linear = torch.nn.Linear(2, 3).double()
    labels = torch.bucketize(f, torch.tensor([-0.4, 0.4]))
    gp = LOO(x, labels, matern(), Categorical(3), num_neighbors=5, mean=linear)
    torch.testing.assert_close(gp(x[:4] + 100)[0], linear(x[:4] + 100).mT)  # far away, the mean alone is left
    own = LOO(x, labels, matern(), Categorical(3), num_neighbors=5)
    fit(own, 5, batch_size=20, lr=0.1, progress=False)
    assert len(own.mean.value.unique()) == 3


def test_conditionals_that_differ_in_noise_alone_equal_separate_ones():
    x, _ = waves(N)
    near = torch.randint(N, (N, 4)).sort(-1).values
    noise = torch.rand(3, N, dtype=F64, requires_grad=True)
    k = matern().double()
    w, var = graph_conditional(k, x + 1, x, near, noise)
    (w.sin().sum() + var.log().sum()).backward()
    together = noise.grad.clone(), k.lengthscale_unconstrained.grad.clone()
    noise.grad = k.lengthscale_unconstrained.grad = None
    for i in range(3):
        wi, vi = graph_conditional(k, x + 1, x, near, noise[i])
        torch.testing.assert_close((w[i], var[i]), (wi, vi), rtol=1e-12, atol=1e-14)
        (wi.sin().sum() + vi.log().sum()).backward()
    torch.testing.assert_close(together, (noise.grad, k.lengthscale_unconstrained.grad), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_leave_one_out_scores_of_labels_use_variables_that_do_not_know_the_label():
    """Against dense conditionals, pair by pair; and nearer to scores after solving without the datum."""
    size = 14
    x, f = waves(size)
    labels = (f > 0).double()
    gp = LOO(x, labels, matern(), Bernoulli(), num_neighbors=size - 1, mean=ConstantMean(0.3))
    gp.mean.requires_grad_(False)  # predictions take it as it is
    gp.kernel.variance = torch.tensor(40.0)
    gp.solve(20)
    omega = gp.q.distribution(gp.likelihood, labels, torch.arange(size)).mean.detach()
    cov = dense_covariance(gp.kernel, x).detach()

    def given(n, others, omega):
        noisy = cov[others][:, others] + torch.diag(1 / omega)
        w = torch.linalg.solve(noisy, cov[others, n])
        return 0.3 + w @ ((labels[others] - 0.5) / omega - 0.3), cov[n, n] - w @ cov[others, n]

    want, plain, resolved = [], [], []
    for n in range(size):
        others = [m for m in range(size) if m != n]
        of_others = []
        for m in others:
            rest = [j for j in others if j != m]
            (loc, var), value = given(m, rest, omega[rest]), omega[m]
            for _ in range(100):
                precision = 1 / var + value
                c = (((loc / var + labels[m] - 0.5) / precision).square() + 1 / precision).sqrt()
                value = (c / 2).tanh() / (2 * c)
            of_others.append(value)
        moments = given(n, others, torch.stack(of_others)), given(n, others, omega[others])
        want.append(dense_log_prob(lambda f: dist.Bernoulli(logits=f), labels[n], *moments[0])[0])
        plain.append(dense_log_prob(lambda f: dist.Bernoulli(logits=f), labels[n], *moments[1])[0])
        without = LOO(x[others], labels[others], likelihood=Bernoulli(), start=gp, num_neighbors=size - 2)
        without.solve(20)
        resolved.append(without.predict(x[n : n + 1]).log_prob(labels[n : n + 1])[0].detach())
    want, plain, resolved = (torch.stack(found) for found in (want, plain, resolved))
    found = gp.loo()
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-5)
    assert gp.leak(torch.arange(size)) == pytest.approx(float(plain.mean() - want.mean()), rel=1e-3)
    assert plain.mean() > found.mean() > resolved.mean()
    for mean in (gp.leak, gp.score):  # of some rows: that of each
        assert mean(torch.arange(4)) == pytest.approx(sum(mean(torch.tensor([row])) for row in range(4)) / 4, rel=1e-4)
    assert LOO(x, labels, matern(), Bernoulli(), num_neighbors=5, divergence="posterior").leak(torch.arange(4)) == 0


@augmented
def test_training_improves_every_likelihood(likelihood, make):
    x, f = waves(N, dtype=torch.float32)
    far = Matern52(2, variance=torch.tensor(0.1), lengthscale=torch.tensor([5.0, 5.0]))
    gp = LOO(x, make(f), far, likelihood(), num_neighbors=6, mean=ConstantMean(0.0))
    gp.solve()
    before = gp.loo()
    fit(gp, 12, batch_size=20, lr=0.1, refresh_every=5, progress=False)
    assert gp.predict(x).log_prob(gp.y).shape == (N,)
    after = gp.loo()
    assert after.mean() > before.mean()
    assert gp.sample(x[:5], 3).shape == (3, *gp.latent_shape, 5)


@pytest.mark.slow
def test_heavy_tails_are_found_and_do_not_disturb():
    """Noise of two degrees of freedom: its shape is recovered, and f is found better than under Gaussian noise."""
    x = torch.rand(1000, 2)
    f = torch.sin(6 * x[:, 0]) * torch.cos(5 * x[:, 1])
    y = f + 0.1 * dist.StudentT(torch.tensor(2.0)).sample((1000,))
    error = {}
    for name, likelihood in (("gaussian", Gaussian(0.1)), ("student", StudentT(4.0, 0.1))):
        gp = LOO(
            x, y, Matern52(2, lengthscale=torch.tensor([0.5, 0.5])), likelihood, num_neighbors=32, guide=Conjugate()
        )
        fit(gp, 250, batch_size=128, lr=0.05, schedule=Schedule((0.5, 0.75), 0.3), progress=False)
        error[name] = float((gp(x)[0] - f).square().mean().sqrt().detach())
    assert 1.3 < float(likelihood.df.detach()) < 3
    assert 0.07 < float(likelihood.scale.detach()) < 0.13
    assert error["student"] < 0.85 * error["gaussian"]


@pytest.mark.slow
def test_figure_2_of_the_paper_noise_is_not_overestimated():
    """With the true kernel, LOO-k finds the true noise, an inducing-point bound takes what it misses for noise."""
    x, k, truth = torch.rand(300, 3, dtype=F64), RBF(3, lengthscale=torch.tensor(0.4)).double(), 0.01
    cov = dense_covariance(k, x).detach()
    y = torch.linalg.cholesky(cov + truth * torch.eye(300, dtype=F64)) @ torch.randn(300, dtype=F64)
    noises = torch.logspace(-3, 0, 25, dtype=F64)
    cross, inner = cov[:, :20], torch.linalg.cholesky(cov[:20, :20])
    half = torch.linalg.solve_triangular(inner, cross.mT, upper=False)
    objectives = {"loo": [], "bound": []}
    gp = LOO(x, y, k, Gaussian(), num_neighbors=32, mean=lambda x: torch.zeros_like(x[:, 0]))
    for noise in noises:
        gp.likelihood.variance = noise
        objectives["loo"].append(-loss(gp))
        low_rank = dist.LowRankMultivariateNormal(torch.zeros_like(y), half.mT, noise.expand(300))
        missed = (cov.diagonal() - half.square().sum(0)).sum()
        objectives["bound"].append(float(low_rank.log_prob(y) - missed / (2 * noise)))
    found = {name: float(noises[torch.tensor(values).argmax()]) for name, values in objectives.items()}
    assert truth / 1.8 < found["loo"] < truth * 1.8
    assert found["bound"] > 3 * truth


@pytest.mark.parametrize("likelihood", [Bernoulli(), StudentT(4.0, 0.3)])
def test_auxiliary_variables_fit_in_a_larger_module(likelihood):
    x, y = waves(N)
    larger = PyroModule()
    larger.gp = LOO(x, (y > y.mean()).double(), matern(), likelihood, num_neighbors=6)
    sites = pyro.poutine.trace(larger.gp.model).get_trace().nodes
    assert {"gp.omega", "gp.y", "gp.kernel.lengthscale"} <= sites.keys()


def test_priors_of_the_likelihood_do_not_make_the_start_random():
    x, y = waves(N)
    state, starts = torch.get_rng_state(), []
    for _ in range(2):
        likelihood = StudentT(PyroSample(dist.Gamma(torch.tensor(2.0, dtype=F64), 0.5)), 0.3)
        starts.append(LOO(x, y, matern(), likelihood, num_neighbors=6).state_dict())
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(3)
        state = torch.get_rng_state()
    for one, two in zip(*(start.values() for start in starts), strict=True):
        assert torch.equal(one, two)


def test_counts_far_above_their_r_start_near_the_data():
    x, f = waves(N, dtype=torch.float32)
    y = torch.poisson((6 + f).exp())
    gp = LOO(x, y, likelihood=NegativeBinomial(), num_neighbors=6)
    every = torch.arange(N)
    started = gp.score(every)
    gp.solve(20)
    assert started < gp.score(every) + 0.3  # from the prior: some nats more, after 20 sweeps, too
    with pytest.raises(ValueError, match=r"LOO.score: expected rows in 0..39, got 0..40"):
        gp.score(torch.arange(N + 1))
    assert gp.q.distribution(gp.likelihood.bind(), y, every).mean.max() < y.max() / 4


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [NegativeBinomial, Bernoulli])
def test_steps_and_solutions_take_turns_until_the_leave_one_out_score_stops_improving(likelihood):
    x, f = waves(N, dtype=torch.float32)
    y = torch.poisson((3 + f).exp()) if likelihood is NegativeBinomial else (f > 0).float()
    gp = LOO(x, y, likelihood=likelihood(), num_neighbors=6)
    before = gp.score(torch.arange(N))
    result = fit(gp, progress=False)
    assert (result.optimizer, result.converged) == ("lbfgs", True)
    assert result.solves > 2
    assert gp.score(torch.arange(N)) < before
