"""Rows that `fit` holds out of SWSGP, whose loss goes on falling while predictions get worse."""

import copy

import pytest
import torch
from builders import F64, surface
from oracles.pretended_device import DEVICE, pretended_device

from pyro_nngp.inference import Checkpoint, Validation, fit
from pyro_nngp.inference.protocols import HoldsOut
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import SWSGP, Vecchia

N, HELD = 320, 32


def sparse(turned=None):
    """A method with too many inducing points for noisy data; y of `turned` rows comes in the opposite order."""
    x, y, _ = surface(Gaussian, N)
    y = y + 0.3 * torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=F64)
    if turned is not None:
        y[turned] = y[turned].flip(0)
    return SWSGP(x, y, Matern52(2, 1.0, 0.4), Gaussian(0.1), inducing=80, num_neighbors=8)


@pytest.fixture(scope="module")
def trained():
    gp = sparse()
    return gp, fit(gp, progress=False)


def test_the_state_with_the_best_predictions_of_rows_held_out_is_kept(trained):
    gp, result = trained
    rows, scores = gp.held_out_rows(0), [score for _, score in result.scores]
    assert (result.held_out, len(rows), result.converged, gp.weights) == (HELD, HELD, True, None)
    assert scores.index(min(scores)) < len(scores) - 1
    assert "best of" in repr(result)
    with torch.no_grad():
        density = gp.predict(gp.x[rows]).log_prob(gp.y[rows]).mean()
    assert -float(density) == pytest.approx(min(scores), rel=1e-9)


def test_a_second_call_goes_on_and_is_no_worse(trained):
    gp, result = copy.deepcopy(trained)
    scores = [score for _, score in fit(gp, progress=False, max_seconds=60).scores]
    best = min(score for _, score in result.scores)
    assert scores[0] == pytest.approx(best, rel=1e-9)
    assert min(scores) <= best


def test_rows_held_out_do_not_count_in_training():
    losses, scores, rows = [], [], sparse().held_out_rows(0)
    for gp in (sparse(), sparse(rows)):
        with gp.holding_out(rows) as score:
            losses.append(fit(gp, 10, progress=False).losses)
            scores.append(score())
        assert gp.weights is None
    torch.testing.assert_close(*losses, rtol=1e-7, atol=1e-8)
    assert scores[0] != pytest.approx(scores[1], rel=1e-3)


def test_all_rows_count_where_steps_or_a_score_are_given_or_rows_are_few():
    assert isinstance(sparse(), HoldsOut)
    assert not isinstance(Vecchia(sparse().x, sparse().y), HoldsOut)
    assert not fit(sparse(), 3, progress=False).held_out
    assert not fit(sparse(), validation=Validation(lambda: 0.0, patience=1), progress=False).held_out
    with pytest.warns(UserWarning, match="the time limit"):
        assert not fit(sparse(), validation=False, max_seconds=0.1, progress=False).held_out
    x, y, _ = surface(Gaussian, 200)
    assert not len(SWSGP(x, y, Matern52(2), inducing=100).held_out_rows(0))
    assert not len(SWSGP(sparse().x, sparse().y, Matern52(2)).held_out_rows(0))  # the usual number of inducing points
    with pytest.raises(TypeError, match="fit: expected validation to be a Validation"):
        fit(sparse(), validation=True, progress=False)


def test_a_run_that_is_cut_resumes(tmp_path, trained):
    def run(seconds=None):
        gp = sparse()
        checkpoint = Checkpoint(tmp_path / "run", every=20)
        return gp, fit(gp, checkpoint=checkpoint, max_seconds=seconds, progress=False)

    with pytest.warns(UserWarning, match="the time limit"):
        run(0.3)
    resumed, result = run()
    whole, first = trained
    assert result.scores == first.scores
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_weights_of_labels_come_back():
    x, y, _ = surface(Gaussian, N)
    weights = torch.rand(N, dtype=F64) + 0.5
    gp = SWSGP(x, (y > 0).to(F64), Matern52(2), Bernoulli(), inducing=70, num_neighbors=10, weights=weights)
    with pytest.warns(UserWarning, match="the time limit"):
        assert fit(gp, progress=False, max_seconds=0.5).held_out == HELD
    assert torch.equal(gp.weights, weights)


def test_the_method_may_move_while_rows_are_held_out():
    x, y, _ = surface(Gaussian, N)
    gp = SWSGP(x, y, Matern52(2), inducing=70, num_neighbors=8, weights=torch.ones(N, dtype=F64))
    with pretended_device():
        with gp.holding_out(gp.held_out_rows(0)) as score:
            here = score()
            gp.to(DEVICE)
            assert score() == pytest.approx(here, rel=1e-9)
        assert gp.weights.device == DEVICE


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_many_inducing_points_that_are_learned_start_with_noise_unless_it_is_given(scale: float) -> None:
    x = torch.rand(400, 2)
    y = scale * x.sum(1)
    many, few = (SWSGP(x, y, Matern52(2), inducing=count) for count in (200, 60))
    assert many.likelihood.variance.item() == pytest.approx(0.2 * y.var().item(), rel=0.3)
    there = SWSGP(x, y, Matern52(2), inducing=x, learn_inducing=False)
    for other in (few, there):
        assert other.likelihood.variance < 0.01 * y.var()
    with pytest.warns(UserWarning, match="y is 0 in all rows"):
        assert SWSGP(x, torch.zeros(400), Matern52(2), inducing=200).likelihood.variance > 0
    given = SWSGP(x, y, Matern52(2), Gaussian(1e-4 * scale**2), inducing=200)
    assert given.likelihood.variance.item() == pytest.approx(1e-4 * scale**2)
