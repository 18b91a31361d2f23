"""The BoTorch model with all neighbors against BoTorch's own exact Gaussian process at the same hyperparameters."""

import pytest
import torch
from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.generation import MaxPosteriorSampling
from botorch.models import SingleTaskGP
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.means import ConstantMean

import pyro_nngp as nngp
from pyro_nngp.adapters.botorch import DrawnPosterior, NearestNeighborModel
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import LOO, SVGP, VNNGP, Vecchia
from pyro_nngp.variational import MeanField

F64 = torch.float64
N, D = 40, 3
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(N, D, generator=GENERATOR, dtype=F64)
Y = torch.sin(6 * X[:, 0]) + X[:, 1] ** 2 + 0.1 * torch.randn(N, generator=GENERATOR, dtype=F64)
SETS = torch.rand(5, 4, D, generator=GENERATOR, dtype=F64)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # GPyTorch has other nuggets


def method(kind=Vecchia, x=X, y=Y, **settings):
    kernel = Matern52(D, variance=1.3, lengthscale=torch.tensor([0.4, 0.5, 0.9]))
    gp = kind(x, y, kernel, Gaussian(0.01), num_neighbors=N - 1, jitter=1e-12, **settings)
    gp.mean.value = 0.2
    gp.mean.requires_grad_(False)  # GPyTorch takes it as it is
    return gp


def pair():
    cov = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=D))
    exact = SingleTaskGP(X, Y[:, None], covar_module=cov, mean_module=ConstantMean(), outcome_transform=None)
    cov.base_kernel.lengthscale, cov.outputscale = torch.tensor([0.4, 0.5, 0.9], dtype=F64), 1.3
    exact.mean_module.constant, exact.likelihood.noise = 0.2, 0.01
    return NearestNeighborModel(method(), num_neighbors=N), exact.eval()


def sampler(count=8):
    return SobolQMCNormalSampler(torch.Size([count]), seed=1)


@pytest.mark.parametrize("noise", [False, True, torch.tensor([0.3], dtype=F64)])
def test_the_posterior_is_that_of_the_exact_process(noise):
    mine, exact = (model.posterior(SETS, observation_noise=noise is not False) for model in pair())
    if noise is not False and noise is not True:
        mine = pair()[0].posterior(SETS, observation_noise=noise)
        exact.distribution = pair()[1].posterior(SETS).distribution.add_jitter(0.3)
    assert mine.mean.shape == (5, 4, 1)
    torch.testing.assert_close(mine.mean, exact.mean, **CLOSE)
    covariances = [each.distribution.covariance_matrix for each in (mine, exact)]
    torch.testing.assert_close(*covariances, **CLOSE)


def test_transforms_apply_to_the_posterior():
    transform = ScalarizedPosteriorTransform(torch.tensor([-2.0], dtype=F64))
    found = pair()[0].posterior(SETS, posterior_transform=transform)
    torch.testing.assert_close(found.mean, -2 * pair()[0].posterior(SETS).mean)


def acquisitions(model):
    yield qLogExpectedImprovement(model, best_f=1.0, sampler=sampler()), SETS
    yield LogExpectedImprovement(model, best_f=1.0), SETS[:, :1]
    baseline = qLogNoisyExpectedImprovement(
        model, X_baseline=X[:6], sampler=sampler(), cache_root=False, prune_baseline=False
    )
    yield baseline, SETS[:, :2]


def test_acquisition_functions_and_their_gradients_agree():
    for (mine, at), (exact, _) in zip(*map(acquisitions, pair()), strict=True):
        x, same = at.clone().requires_grad_(), at.clone().requires_grad_()
        values = mine(x), exact(same)
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)
        gradients = [torch.autograd.grad(v.sum(), z)[0] for v, z in zip(values, (x, same), strict=True)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("at", [SETS[0], SETS])
def test_fantasies_agree_whatever_their_batches(at):
    mine, exact = (model.fantasize(at, sampler(3)) for model in pair())
    assert mine.batch_shape == exact.batch_shape == (3, *at.shape[:-2])
    for new in (SETS[:1, :2].expand(3, *[1] * (at.dim() - 2), 2, D), SETS[1]):
        one, other = mine.posterior(new), exact.posterior(new)
        torch.testing.assert_close(one.mean, other.mean, **CLOSE)
        torch.testing.assert_close(one.variance, other.variance, **CLOSE)


def test_fantasies_of_fantasies_are_all_used():
    model = pair()[0]
    first, second = SETS[0], SETS[1]
    y = torch.ones(2, 4, 1, dtype=F64)
    twice = model.condition_on_observations(first, y).condition_on_observations(second, 2 * y)
    both = model.condition_on_observations(torch.cat([first, second]), torch.cat([y, 2 * y], 1))
    for mine, other in zip(*(each.posterior(SETS[2]).mean for each in (twice, both)), strict=True):
        torch.testing.assert_close(mine, other)


def test_observations_are_appended_to_a_copy_or_differentiated():
    model, exact = pair()
    y = torch.linspace(-1, 1, 4, dtype=F64)[:, None]
    grown = model.condition_on_observations(SETS[0], y)
    assert (grown.gp.num_data, model.gp.num_data, grown.num_neighbors) == (N + 4, N, N + 4)
    exact.posterior(SETS)
    want = exact.condition_on_observations(SETS[0], y).posterior(SETS[1])
    torch.testing.assert_close(grown.posterior(SETS[1]).mean, want.mean, **CLOSE)
    at = SETS[0].clone().requires_grad_()
    found = model.condition_on_observations(at, y).posterior(SETS[1])
    torch.testing.assert_close(found.mean, want.mean, **CLOSE)
    assert torch.autograd.gradcheck(
        lambda z: model.condition_on_observations(z, y).posterior(SETS[1]).mean.sum(), (at,), fast_mode=True
    )


def test_thompson_sampling_draws_many_candidates_jointly():
    model = NearestNeighborModel(method(), num_neighbors=20)
    candidates = torch.rand(3000, D, generator=torch.Generator().manual_seed(1), dtype=F64)
    posterior = model.posterior(candidates, observation_noise=True)
    assert isinstance(posterior, DrawnPosterior)
    assert (posterior.device.type, posterior.dtype) == ("cpu", F64)
    mean, variance = model.gp(candidates, num_neighbors=20)
    torch.testing.assert_close(posterior.mean[:, 0], mean)
    torch.testing.assert_close(posterior.variance[:, 0], variance + 0.01)
    torch.manual_seed(0)
    draws = posterior.rsample(torch.Size([40]))
    assert draws.shape == (40, 3000, 1)
    z = (draws.mean(0) - posterior.mean) / (posterior.variance / 40).sqrt()
    assert z.abs().max() < 6
    assert model.posterior(candidates).rsample().shape == (1, 3000, 1)
    best = MaxPosteriorSampling(model, replacement=False)(candidates, num_samples=2)
    assert model.posterior(best).mean.min() > mean.mean()


@pytest.mark.parametrize("noise", [0.3, torch.tensor(0.3), torch.linspace(0, 100, 70, dtype=F64)[:, None]])
def test_many_points_may_have_noise_of_their_own(noise):
    model, at = NearestNeighborModel(method(), num_neighbors=5), SETS.flatten(0, 1).repeat(4, 1)[:70]
    posterior = model.posterior(at, observation_noise=noise)
    added = torch.as_tensor(noise, dtype=F64).expand(70, 1)
    few = model.posterior(at[:, None], observation_noise=added[:, None])
    torch.testing.assert_close(posterior.variance, few.variance[:, 0])
    torch.manual_seed(0)
    spread = posterior.rsample(torch.Size([500])).var(0)
    torch.testing.assert_close(spread, posterior.variance, rtol=6 * (2 / 500) ** 0.5, atol=0)


def test_local_neighbors_predict_well():
    near, exact = NearestNeighborModel(method(LOO), num_neighbors=15), pair()[1]
    gap = near.posterior(SETS).mean - exact.posterior(SETS).mean
    assert gap.abs().max() < 0.1
    assert NearestNeighborModel(method()).num_neighbors == method().prediction_neighbors()


def test_labels_have_posteriors_of_f():
    gp = VNNGP(X, (Y > 0.5).double(), Matern52(D, lengthscale=0.5), Bernoulli(), num_neighbors=20)
    gp.solve()
    model = NearestNeighborModel(gp, num_neighbors=N)
    mean, variance = gp(SETS[:, 0], num_neighbors=N)
    found = model.posterior(SETS[:, :1])
    torch.testing.assert_close(found.mean[:, 0, 0], mean, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found.variance[:, 0, 0], variance, rtol=0.05, atol=0.01)
    assert model.condition_on_observations(SETS[0], torch.ones(4, 1, dtype=F64)).gp.num_data == N + 4
    with pytest.raises(TypeError, match="posterior: expected likelihood to be Gaussian for noisy values"):
        model.posterior(SETS, observation_noise=True)
    with pytest.raises(TypeError, match="condition_on_observations: expected likelihood to be Gaussian"):
        model.condition_on_observations(SETS[0], torch.ones(2, 4, 1, dtype=F64))


def test_other_methods_and_malformed_calls_are_refused():
    with pytest.raises(TypeError, match="expected gp to be a method, got Matern52"):
        NearestNeighborModel(Matern52(2))
    with pytest.raises(ValueError, match=r"joint: expected method with one output, got \(2,\)"):
        NearestNeighborModel(Vecchia(X, torch.stack([Y, Y], -1), Matern52(D)))
    with pytest.raises(TypeError, match="expected method with Gaussian observations of f at the data"):
        NearestNeighborModel(VNNGP(X, Y, guide=MeanField(), num_neighbors=5))
    with pytest.raises(TypeError, match="SVGP: expected method with Gaussian observations of f at the data"):
        NearestNeighborModel(SVGP(X, Y, inducing=5))
    model = pair()[0]
    with pytest.raises(ValueError, match="expected num_neighbors"):
        NearestNeighborModel(model.gp, num_neighbors=0)
    with pytest.raises(ValueError, match=r"Y of shape \(..., 4, 1\), got \(4,\)"):
        model.condition_on_observations(SETS[0], torch.ones(4, dtype=F64))
    with pytest.raises(ValueError, match="noise to be that of the likelihood"):
        model.condition_on_observations(SETS[0], torch.ones(4, 1, dtype=F64), noise=torch.ones(4, 1))
    with pytest.raises(ValueError, match=r"posterior: expected output_indices to be None or \[0\], got \[7\]"):
        model.posterior(SETS, output_indices=[7])
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        model.posterior(SETS, banana=3)
    with pytest.raises(ValueError, match="of at most 64 points per set"):
        model.posterior(torch.rand(2, 65, D, dtype=F64))
    assert (model.num_outputs, model.likelihood) == (1, model.gp.likelihood)


def test_fantasies_of_a_method_need_gaussian_noise():
    gp = VNNGP(X, (Y > 0.5).double(), Matern52(D, lengthscale=0.5), Bernoulli(), num_neighbors=20)
    with pytest.raises(TypeError, match="joint: expected fantasies of a Gaussian likelihood, got Bernoulli"):
        gp.joint(SETS, num_neighbors=5, fantasies=nngp.models.base.Fantasies(SETS, torch.ones(5, 4, dtype=F64)))


def test_the_extra_is_missed_by_name(monkeypatch):
    from pyro_nngp import _checks

    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(_checks, "import_module", missing)
    with pytest.raises(ImportError, match=r"Run pip install 'pyro-nngp\[botorch\]'"):
        _checks.import_extra("pyro_nngp.adapters.botorch", "botorch", "botorch")
