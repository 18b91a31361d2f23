import pyro.distributions as dist
import pytest
import torch

from pyro_nngp.distributions.mixture import Mixture
from pyro_nngp.likelihoods import Bernoulli, Poisson

F64 = torch.float64


def normals(shape=(3, 5)):
    return torch.randn(shape, dtype=F64), torch.rand(shape, dtype=F64) + 0.1


def test_it_is_the_same_family_mixture_of_normals():
    loc, scale = normals((4, 3, 5))
    ours = Mixture([dist.Normal(*pair) for pair in zip(loc, scale, strict=True)])
    uniform = dist.Categorical(logits=torch.zeros(3, 5, 4, dtype=F64))
    theirs = dist.MixtureSameFamily(uniform, dist.Normal(loc.movedim(0, -1), scale.movedim(0, -1)))
    y = torch.randn(3, 5, dtype=F64)
    for got, want in (
        (ours.log_prob(y), theirs.log_prob(y)),
        (ours.mean, theirs.mean),
        (ours.variance, theirs.variance),
        (ours.expand((2, 3, 5)).log_prob(y), theirs.log_prob(y).expand(2, 3, 5)),
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("likelihood", [Poisson(), Bernoulli("probit")])
def test_draws_have_its_moments(likelihood):
    loc, scale = normals()
    mixture = Mixture([likelihood.marginal(m, s.square()) for m, s in zip(loc, scale, strict=True)])
    draws = mixture.sample((20_000,))
    assert draws.shape == (20_000, 5)
    assert bool(mixture.support.check(draws).all())
    se = (mixture.variance / len(draws)).sqrt()
    assert bool(((draws.mean(0) - mixture.mean).abs() < 6 * se).all())
    fourth = (draws - draws.mean(0)).square().var(0).sqrt() / len(draws) ** 0.5
    assert bool(((draws.var(0) - mixture.variance).abs() < 6 * fourth + 1e-3).all())


def test_draws_of_vectors_come_from_one_component():
    near, far = (dist.Normal(torch.full((2, 3), c), 0.01).to_event(1) for c in (0.0, 9.0))
    draws = Mixture([near, far]).sample((400,))
    assert draws.shape == (400, 2, 3)
    chosen = draws > 4.5
    assert bool((chosen.all(-1) | ~chosen.any(-1)).all())
    assert 0.35 < float(chosen.double().mean()) < 0.65
    assert bool((chosen[:, 0, 0] != chosen[:, 1, 0]).any())  # one choice per index of the batch


def test_components_must_agree():
    with pytest.raises(ValueError, match=r"Mixture: expected components of one shape"):
        Mixture([])
    with pytest.raises(ValueError, match=r"expected components of one shape"):
        Mixture([dist.Normal(torch.zeros(2), 1.0), dist.Normal(torch.zeros(3), 1.0)])
