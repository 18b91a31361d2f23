import pyro.distributions as dist
import pytest
import torch

from pyro_nngp.distributions import Mixture
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


class Counted(dist.Normal):
    """A normal that counts its draws."""

    drawn = 0

    def sample(self, sample_shape=()):
        values = super().sample(sample_shape)
        Counted.drawn += values.numel()
        return values


def test_no_more_is_drawn_than_is_kept(monkeypatch):
    monkeypatch.setattr(Counted, "drawn", 0)
    mixture = Mixture([Counted(torch.full((4,), 10.0 * s, dtype=F64), 0.1) for s in range(50)])
    draws = mixture.sample((3000,))
    assert Counted.drawn < 2 * draws.numel()  # 50 times as many if each component is drawn from for each
    assert len(draws.unique()) == draws.numel()  # none is used twice
    chosen = (draws / 10).round()
    counts = torch.stack([(chosen == s).sum(0) for s in range(50)])
    assert float(((counts - 60) ** 2 / 60).sum(0).max()) < 49 + 6 * 98**0.5  # uniform over components
    centered = (chosen - chosen.mean(0)) / chosen.std(0)
    for a, b in ((centered[:-1], centered[1:]), (centered[:1500], centered[1500:]), (centered[:, :2], centered[:, 2:])):
        assert float((a * b).mean(0).abs().max()) < 6 / 1500**0.5  # no order among draws, none among places
    torch.manual_seed(7)
    first = mixture.sample((2, 3))
    torch.manual_seed(7)
    assert torch.equal(mixture.sample((2, 3)), first)
    assert first.shape == (2, 3, 4)
    assert mixture.sample().shape == (4,)
    assert mixture.sample((0,)).shape == (0, 4)


def test_cumulative_function_is_the_mean_of_those_of_the_components():
    loc, scale = normals((4, 3, 5))
    mixture = Mixture([dist.Normal(*pair) for pair in zip(loc, scale, strict=True)])
    y = torch.randn(3, 5, dtype=F64)
    torch.testing.assert_close(mixture.cdf(y), dist.Normal(loc, scale).cdf(y).mean(0), rtol=1e-12, atol=0)
    with pytest.raises(NotImplementedError):
        Mixture([dist.Normal(loc[0], 1.0), dist.StudentT(3.0, loc[0], 1.0)]).cdf(y)


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
