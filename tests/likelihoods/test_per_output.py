import pytest
import torch
from builders import scalar, tensor

from pyro_nngp.likelihoods import Binomial, Categorical, Gaussian, HeteroskedasticGaussian, PerOutput, Poisson

F64 = torch.float64
F = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
Y = torch.tensor([[0.0, 3.0, torch.nan, 1.0], [0.5, torch.nan, -1.0, 2.0]], dtype=F64)


def test_integrals_are_those_of_each_output():
    parts = Poisson(), Gaussian(scalar(0.3))
    both, var = PerOutput(*parts), 0.1 + F.square()
    expected, marginal = both.expected_log_prob(Y, F, var), both.marginal(F, var)
    for number, part in enumerate(parts):
        seen = ~Y[number].isnan()
        own = F[number, seen], var[number, seen]
        torch.testing.assert_close(expected[number, seen], part.expected_log_prob(Y[number, seen], *own))
        torch.testing.assert_close(marginal.log_prob(Y)[number, seen], part.marginal(*own).log_prob(Y[number, seen]))
        assert (expected[number, ~seen] == 0).all()
    assert both(F).batch_shape == (2, 4)
    assert not both.is_gaussian
    assert PerOutput(Gaussian(), Gaussian()).is_gaussian


def test_trials_and_weights_reach_the_outputs():
    both, trials = PerOutput(Binomial(), Gaussian()), tensor(5.0, 6.0, 7.0, 8.0)
    assert both.takes_trials
    for given in (trials, torch.stack([trials, torch.ones(4)])):
        bound = both.bind().for_rows(None, given)
        torch.testing.assert_close(bound(F).mean[0], trials * F[0].sigmoid())
        assert bound.weights is None
    weights = torch.ones(2, 4, dtype=F64)
    assert both.bind().for_rows(weights, trials).weights is weights


def test_wrong_outputs_are_refused():
    with pytest.raises(ValueError, match=r"PerOutput: expected outputs to be one likelihood per output, got none"):
        PerOutput()
    with pytest.raises(TypeError, match=r"PerOutput: expected likelihood to be a Likelihood, got the class Poisson"):
        PerOutput(Gaussian(), Poisson)
    for part in (Categorical(3), HeteroskedasticGaussian(), PerOutput(Gaussian())):
        with pytest.raises(
            TypeError, match=r"PerOutput: expected outputs to be likelihoods of one latent function each"
        ):
            PerOutput(Gaussian(), part)
    with pytest.raises(ValueError, match=r"PerOutput: expected y with 2 outputs, got 3"):
        PerOutput(Gaussian(), Gaussian()).check(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"Poisson: expected y"):
        PerOutput(Gaussian(), Poisson()).check(Y)
    with pytest.raises(ValueError, match=r"Binomial: expected y to be counts in 0\.\."):
        PerOutput(Binomial(), Gaussian()).bind().for_rows(None, torch.ones(4, dtype=F64)).check(Y)
