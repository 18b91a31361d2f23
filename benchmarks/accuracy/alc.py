r"""Local approximate GPs (Gramacy and Apley 2015; the R package laGP): a small process for each point of prediction.

Nothing is trained. The design of a new point begins with its few nearest rows and grows, one by one, by the row among
its nearest candidates that lowers the variance of f there most ("active learning Cohn"): with kernel k given the
design, by :math:`k(x_j, x_*)^2 / (k(x_j, x_j) + \eta)`. Lengthscales, one for each column, and the nugget
:math:`\eta` then maximize the likelihood of the design, with the variance integrated out, and the prediction is a
Student-t distribution with as many degrees of freedom as the design has rows.

As in the package: an RBF kernel, mean zero, designs at start values of the hyperparameters, whose priors keep
lengthscales near those of a typical design. In place of its search there is Adam, for many new points at once.

Cost per new point: O(J n^2 + I n^3). Symbols: J candidates, n rows of a design, D columns, I iterations.
"""

import math
import time

import torch
from torch.distributions import StudentT

from pyro_nngp.neighbors import NearestOthers

ROWS, FIRST, CANDIDATES = 64, 6, 400  # of a design, as the LOO-k paper has it; its nearest ones; J
AT_ONCE, ITERATIONS, RATE = 250, 60, 0.1
NUGGET, SPREAD = 0.1, 1.0  # start of the nugget; standard deviation of the logarithms around their starts
JITTER = 1e-6


def rbf(a, b, lengthscale):
    """Correlations (B, m, n) of rows (B, m, D) and (B, n, D) at lengthscales (B, 1, D)."""
    distance = torch.cdist(a / lengthscale, b / lengthscale, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.exp(-distance.square() / 2)


def designs(near, x_new, lengthscale, nugget):
    """Places among the candidates of each new point that lower its variance most, one after the other.

    Args:
        near: candidates (B, J, D), the nearest first.
        x_new: new points (B, D).
        lengthscale: (1, 1, D).
        nugget: noise variance in units of the variance of f.
    """
    count, total, _ = near.shape
    row = torch.arange(count)
    with_new, variance = rbf(near, x_new[:, None], lengthscale)[..., 0], torch.ones(count, total, dtype=near.dtype)
    half = near.new_zeros(count, ROWS, total)  # rows of the factor of the design, at all candidates
    chosen = torch.empty(count, ROWS, dtype=torch.long)
    for i in range(ROWS):
        gain = with_new.square() / (variance + nugget)
        best = torch.full((count,), i) if i < FIRST else gain.scatter(1, chosen[:, :i], -1.0).argmax(1)
        chosen[:, i], pivot = best, (variance[row, best] + nugget).sqrt()
        column = rbf(near, near[row, best][:, None], lengthscale)[..., 0]
        column = column - torch.einsum("bij,bi->bj", half[:, :i], half[row, :i, best])
        half[:, i] = column / pivot[:, None]
        with_new = with_new - half[:, i] * (with_new[row, best] / pivot)[:, None]
        variance = (variance - half[:, i].square()).clamp(min=0)
    return chosen


def fitted(x, y, start):
    """Logarithms of lengthscales and nugget (B, D + 1) that maximize the penalized likelihood of each design."""
    value = start.expand(len(x), -1).clone().requires_grad_()
    optim = torch.optim.Adam([value], lr=RATE)
    for _ in range(ITERATIONS):
        _, log_det, sum_of_squares, _ = solved(x, y, value)
        penalty = ((value - start) / SPREAD).square().sum(-1) / 2
        loss = (log_det + ROWS / 2 * sum_of_squares.log() + penalty).sum()
        optim.zero_grad()
        loss.backward()
        optim.step()
    return value.detach()


def solved(x, y, value):
    """Factor of each design, the logarithm of its determinant, y' K^-1 y and K^-1 y."""
    nugget = value[:, -1:].exp() + JITTER
    cov = rbf(x, x, value[:, None, :-1].exp()) + torch.diag_embed(nugget.expand(-1, ROWS))
    tril = torch.linalg.cholesky(cov)
    weights = torch.cholesky_solve(y[..., None], tril)[..., 0]
    return tril, tril.diagonal(dim1=-2, dim2=-1).log().sum(-1), (y * weights).sum(-1), weights


class LocalDesigns:
    """The recipe: predictions of real targets that are centered."""

    kinds = ("real",)

    def __call__(self, x, y, kind, seed, seconds):
        begin = time.process_time()
        x, y = x.double(), y.double()
        table = NearestOthers(x, 1, progress=False)
        sample = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:200]]
        nearby = x[table.query(sample, ROWS)]
        spread = (nearby - sample[:, None]).abs().mean((0, 1)).clamp(min=1e-3)  # of a typical design
        start = torch.cat([(2 * math.sqrt(x.shape[1]) * spread).log(), torch.tensor([math.log(NUGGET)])])
        facts = {"seconds": time.process_time() - begin, "steps": 0, "converged": "", "noise": float("nan")}
        lengthscale = start[:-1].exp()[None, None]

        def predict(x_new):
            x_new, parts = x_new.double(), []
            for new in x_new.split(AT_ONCE):
                rows = table.query(new, min(CANDIDATES, len(x)))
                chosen = rows.gather(1, designs(x[rows], new, lengthscale, NUGGET))
                with torch.enable_grad():
                    value = fitted(x[chosen], y[chosen], start)
                tril, _, sum_of_squares, weights = solved(x[chosen], y[chosen], value)
                cross = rbf(x[chosen], new[:, None], value[:, None, :-1].exp())
                half = torch.linalg.solve_triangular(tril, cross, upper=False)[..., 0]
                left = (1 + value[:, -1].exp() - half.square().sum(-1)).clamp(min=JITTER)
                parts.append(((cross[..., 0] * weights).sum(-1), (sum_of_squares / ROWS * left).sqrt()))
            loc, scale = (torch.cat(each) for each in zip(*parts, strict=True))
            return StudentT(float(ROWS), loc.float(), scale.float())

        return predict, facts
