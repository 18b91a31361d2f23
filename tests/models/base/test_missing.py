"""Missing targets: rows left out with a note, and several outputs with any pattern against the dense joint process."""

import numpy as np
import pandas as pd
import pytest
import torch
from builders import data

import pyro_nngp as nngp
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Binomial, Gaussian
from pyro_nngp.models import CoregionalizedLOO, Vecchia

F64 = torch.float64
X, Y = data()
GONE = torch.arange(60) % 4 == 1
HOLES = Y.masked_fill(GONE, torch.nan)
LEFT_OUT = "y is missing in 15 of 60 rows, which are left out"


def kernel():
    return Matern52(2, variance=1.0, lengthscale=0.5)


@pytest.mark.parametrize("method", [nngp.Vecchia, nngp.LOO, nngp.VNNGP, nngp.SVGP, nngp.BSGP])
def test_rows_without_targets_are_left_out_with_a_note(method):
    settings = {"inducing": 9} if method in (nngp.SVGP, nngp.BSGP) else {"num_neighbors": 8}
    if method is nngp.BSGP:
        settings["inducing_prior"] = None
    with pytest.warns(UserWarning, match=LEFT_OUT):
        gp = method(X, HOLES, kernel(), Gaussian(0.05), offset=Y, weights=1 + Y.square(), **settings)
    assert torch.equal(gp.x, X[~GONE])
    assert torch.equal(gp.y, Y[~GONE])
    assert torch.equal(gp.offset, Y[~GONE])
    assert torch.equal(gp.weights, 1 + Y[~GONE].square())


def test_tables_and_trials_and_new_rows_follow():
    frame = pd.DataFrame(X.numpy(), columns=["a", "b"])
    with pytest.warns(UserWarning, match=LEFT_OUT):
        gp = Vecchia(frame, pd.Series(HOLES.numpy()), kernel(), Gaussian(0.05), num_neighbors=8)
    mean, _ = gp(frame[GONE.numpy()])
    assert np.isfinite(mean).all()
    with pytest.warns(UserWarning, match="Vecchia.extend: y is missing in 15 of 60 rows"):
        gp.extend(frame, HOLES.numpy())
    assert gp.num_data == 90
    counts = torch.ones(60, dtype=F64).masked_fill(GONE, torch.nan)
    with pytest.warns(UserWarning, match=LEFT_OUT):
        binomial = nngp.VNNGP(X, counts, kernel(), Binomial(), trials=torch.arange(1, 61), num_neighbors=8)
    assert torch.equal(binomial.trials, torch.arange(1.0, 61.0, dtype=F64)[~GONE])


def test_only_targets_may_be_missing_and_not_all_of_them():
    with pytest.raises(ValueError, match="expected y with values, got NaN in all rows"):
        Vecchia(X, torch.full_like(Y, torch.nan), kernel())
    with pytest.raises(ValueError, match="x"):
        Vecchia(X.masked_fill(GONE[:, None], torch.nan), Y, kernel())
    both = torch.stack([HOLES, Y], -1)
    with pytest.raises(ValueError, match="all outputs of a row or none, got 15 rows with some missing"):
        Vecchia(X, both, kernel())
    with pytest.raises(ValueError, match=r"expected y\[:, 1\] with values, got NaN in all rows"):
        CoregionalizedLOO(X, torch.stack([Y, torch.full_like(Y, torch.nan)], -1), 1)


def heterotopic():
    """Two outputs, of which each site has one, except a few with both or none."""
    both = torch.stack([Y, 2 - Y + 0.1 * X[:, 1]], -1)
    row = torch.arange(60)
    both[row % 3 == 0, 0] = torch.nan
    both[row % 3 == 1, 1] = torch.nan
    both[:2] = torch.nan
    return both


def model(y, num_neighbors, **settings):
    mixing = torch.tensor([[1.0, 0.0], [-0.8, 0.3]], dtype=F64)
    kernels = [kernel(), Matern52(2, variance=1.0, lengthscale=0.2)]
    noise = Gaussian(torch.tensor([[0.05], [0.02]], dtype=F64))
    gp = CoregionalizedLOO(X, y, kernels, noise, num_neighbors=num_neighbors, mixing=mixing, **settings)
    gp.mean.value = torch.tensor([0.3, 1.0], dtype=F64)
    gp.mean.requires_grad_(False)  # predictions take it as it is
    return gp


def dense(gp, x_new):
    """Mean (P, T) and covariances (P, T, T) of f by the exact joint process of what was observed."""
    with torch.no_grad():
        mean, noise = gp.mean.value, gp.likelihood.variance[:, 0]
        points = torch.cat([gp.x, x_new])
        cov = sum(
            torch.kron(k(points), column[:, None] * column)
            for k, column in zip(gp.kernel, gp.mixing.unbind(-1), strict=True)
        )
        cov = cov + gp.jitter * torch.diag(cov.diagonal())
        seen = (~gp.y.isnan()).flatten().nonzero()[:, 0]
        new = torch.arange(2 * len(gp.x), len(cov))
        system = cov[seen][:, seen] + torch.diag(noise.repeat(len(gp.x))[seen])
        weights = torch.linalg.solve(system, cov[seen][:, new]).mT
        residual = (gp.y - mean).flatten()[seen]
        rest = cov[new][:, new] - weights @ cov[seen][:, new]
        blocks = rest.reshape(len(x_new), 2, len(x_new), 2)
        return mean + (weights @ residual).reshape(-1, 2), torch.stack([b[:, i] for i, b in enumerate(blocks)])


def test_any_pattern_of_outputs_gives_the_exact_posterior():
    with pytest.warns(UserWarning, match="y is missing in 2 of 60 rows"):
        gp = model(heterotopic(), 57)
    x_new = X[:7] + 0.02
    mean, cov = dense(gp, x_new)
    found = gp(x_new, num_neighbors=58)
    torch.testing.assert_close(found[0].detach(), mean.mT, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(found[1].detach(), cov.diagonal(dim1=-2, dim2=-1).mT, rtol=1e-6, atol=1e-8)
    predictive = gp.predict(x_new, num_neighbors=58)
    noise = torch.diag_embed(gp.likelihood.variance[:, 0])
    torch.testing.assert_close(predictive.covariance_matrix.detach(), (cov + noise).detach(), rtol=1e-6, atol=1e-8)
    draws = gp.sample(x_new, 4000, num_neighbors=58, seed=0)
    z = (draws.mean(0) - mean.mT) / (draws.var(0) / 4000).sqrt()
    assert z.abs().max() < 6


@pytest.mark.slow
def test_densities_are_of_what_was_observed():
    with pytest.warns(UserWarning, match="y is missing in 2 of 60 rows"):
        gp = model(heterotopic(), 57)
    loo = gp.loo()
    for row in (0, 1, 3, 6):
        others = torch.arange(58) != row
        masked = gp.y.clone()
        masked[row] = torch.nan
        gone = model_of(gp, gp.x[others], masked[others])
        mean, cov = dense(gone, gp.x[row : row + 1])
        seen = ~gp.y[row].isnan()
        total = cov[0] + torch.diag(gp.likelihood.variance[:, 0])
        want = torch.distributions.MultivariateNormal(mean[0, seen], total[seen][:, seen]).log_prob(gp.y[row, seen])
        torch.testing.assert_close(loo[row], want.detach(), rtol=1e-6, atol=1e-7)


def model_of(gp, x, y):
    new = CoregionalizedLOO(x, y, list(gp.kernel), gp.likelihood, num_neighbors=8, mixing=gp.mixing.detach())
    new.mean.value = gp.mean.value.detach()
    return new


def test_heterotopic_outputs_are_learned_from_raw_data():
    with pytest.warns(UserWarning, match="y is missing in 2 of 60 rows"):
        gp = CoregionalizedLOO(X, heterotopic(), 1, num_neighbors=10)
    assert gp.mixing.isfinite().all()
    assert len(fit(gp, 20, progress=False).losses) == 20
    mean, _ = gp(X)
    assert (mean[0] - Y).abs().mean() < 0.2  # two thirds of them unseen or seen through the other output
    assert gp.model().shape == (58, 2)
    gp.extend(X[:2] + 0.001, torch.tensor([[0.3, torch.nan], [torch.nan, 1.0]], dtype=F64))
    assert gp.num_data == 60
