"""How far plain `fit(Vecchia(x, y))` ends below exact maximum likelihood, where signals are weak.

Draws of a Matern-3/2 process of variance 1 at 250 points in the unit cube of 1, 2 or 5 dimensions, with noise of
standard deviation .1, .3, 1 or 3 and lengthscale .1, .3, 1 or 2. Exact maximum likelihood ascends the log likelihood of
the dense model, its constant profiled out, by L-BFGS from three starts: where `fit` ended, the values of the draw, and
these with a tenth of the lengthscale; the best of them counts. The table has the shares of draws whose exact log
likelihood, at the hyperparameters of `fit`, is lower by more than .5 and by more than 2 nats in all. The cause is
either the approximation, where the evidence of K neighbors is lower at the exact optimum than where `fit` ended, or
training, where it is higher. The table also has the errors of f at 500 new points, by the dense model at both sets of
hyperparameters: whether a higher likelihood predicts better.

Usage: python benchmarks/accuracy/weak_signals.py [--draws 192] [--out benchmarks/results/weak_signals.md]
"""

import argparse
import contextlib
import itertools
import math
import time
import warnings
from pathlib import Path

import pyro
import torch
from rows import append, commit, read  # beside this file

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.linalg import NotPositiveDefiniteError, cholesky, half_solve
from pyro_nngp.models import Vecchia

POINTS, NEW, ITERATIONS = 250, 500, 60
GRID = list(itertools.product((1, 2, 5), (0.1, 0.3, 1.0, 3.0), (0.1, 0.3, 1.0, 2.0)))
FIELDS = ("draw", "dim", "noise", "lengthscale", "below", "fitted", "found", "shortest")
FIELDS += ("rmse", "rmse_found", "nll", "nll_found", "warnings", "seconds", "commit")


def drawn(draw):
    """Inputs, targets, new inputs and f there, and the values of a draw."""
    dim, noise, lengthscale = GRID[draw % len(GRID)]
    generator = torch.Generator().manual_seed(draw)
    x = torch.rand(POINTS, dim, generator=generator, dtype=torch.float64)
    cov = Matern32(dim, 1.0, lengthscale)(x, x).detach()
    white = torch.randn(2, POINTS, generator=generator, dtype=torch.float64)
    tril = cholesky(cov, 1e-8)
    generator = torch.Generator().manual_seed(10**6 + draw)
    x_new = torch.rand(NEW, dim, generator=generator, dtype=torch.float64)
    white_new = torch.randn(NEW, generator=generator, dtype=torch.float64)
    kernel = Matern32(dim, 1.0, lengthscale)
    weights = half_solve(tril, kernel(x, x_new).detach())
    rest = cholesky(kernel(x_new, x_new).detach() - weights.mT @ weights, 1e-6)
    f_new = weights.mT @ white[0] + rest @ white_new
    return x, tril @ white[0] + noise * white[1], x_new, f_new, (dim, noise, lengthscale)


def log_likelihood(gp):
    """Of the dense model, with the constant that maximizes it."""
    bound = gp.bound()
    cov = bound.covariance(gp.x, gp.x) + bound.likelihood.variance * torch.eye(len(gp.x), dtype=gp.x.dtype)
    tril = cholesky(cov, bound.jitter)
    white = half_solve(tril, torch.stack([gp.y, torch.ones_like(gp.y)], 1))
    square = white[:, 0].square().sum() - (white[:, 0] @ white[:, 1]).square() / white[:, 1].square().sum()
    return -0.5 * square - tril.diagonal().log().sum() - 0.5 * len(gp.x) * math.log(2 * math.pi)


@torch.no_grad()
def errors(gp, x_new, f_new):
    """RMSE and mean negative log density of f at new points under the dense model, its constant estimated."""
    bound = gp.bound()
    cov = bound.covariance(gp.x, gp.x) + bound.likelihood.variance * torch.eye(len(gp.x), dtype=gp.x.dtype)
    tril, ones = cholesky(cov, bound.jitter), torch.ones_like(gp.y)
    white = half_solve(tril, torch.cat([gp.y[:, None], ones[:, None], bound.covariance(gp.x, x_new)], 1))
    y, one, cross = white[:, 0], white[:, 1], white[:, 2:]
    level, rest = (one @ y) / (one @ one), 1 - one @ cross
    error = f_new - level - cross.mT @ (y - level * one)
    variance = bound.covariance.diag(x_new) - cross.square().sum(0) + rest.square() / (one @ one)
    density = torch.distributions.Normal(0.0, variance.sqrt()).log_prob(error)
    return float(error.square().mean().sqrt()), -float(density.mean())


def ascended(gp, state):
    """The largest log likelihood that L-BFGS reaches from some values of the parameters, and its parameters."""
    gp.load_state_dict(state)
    parameters = [p for name, p in gp.named_parameters() if not name.startswith("mean")]
    optimizer = torch.optim.LBFGS(parameters, max_iter=ITERATIONS, line_search_fn="strong_wolfe")
    best, at = -math.inf, state

    def closure():
        nonlocal best, at
        optimizer.zero_grad()
        loss = -log_likelihood(gp)
        loss.backward()
        if -loss.item() > best:
            best, at = -loss.item(), copied(gp)
        return loss

    with contextlib.suppress(NotPositiveDefiniteError):  # what was reached before counts
        optimizer.step(closure)
    return best, at


def copied(gp):
    return {name: value.clone() for name, value in gp.state_dict().items()}


def states(gp, noise, lengthscale):
    """Parameters where `fit` ended, at the values of the draw, and with a tenth of the lengthscale."""
    yield copied(gp)
    for factor in (1.0, 0.1):
        gp.kernel.lengthscale = torch.full_like(gp.kernel.lengthscale.detach(), factor * lengthscale)
        gp.kernel.variance = torch.ones_like(gp.kernel.variance.detach())
        gp.kernel.smoothness = torch.full_like(gp.kernel.smoothness.detach(), 1.5)
        gp.likelihood.variance = torch.full_like(gp.likelihood.variance.detach(), noise**2)
        yield copied(gp)


def run(draw):
    x, y, x_new, f_new, (dim, noise, lengthscale) = drawn(draw)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gp = Vecchia(x, y)
        fit(gp, progress=False)
    seconds = time.process_time() - start
    fitted, (rmse, nll) = float(log_likelihood(gp).detach()), errors(gp, x_new, f_new)
    ends = [ascended(gp, state) for state in list(states(gp, noise, lengthscale))]
    found, state = max(ends, key=lambda end: end[0])
    gp.load_state_dict(state)
    rmse_found, nll_found = errors(gp, x_new, f_new)
    shortest = float(gp.kernel.lengthscale.detach().min().nan_to_num(0.0)) * POINTS ** (1 / dim)
    texts = " | ".join(str(one.message)[:80] for one in caught)
    row = {"draw": draw, "dim": dim, "noise": noise, "lengthscale": lengthscale, "below": found - fitted}
    row |= {"fitted": fitted, "found": found, "shortest": shortest}
    row |= {"rmse": rmse, "rmse_found": rmse_found, "nll": nll, "nll_found": nll_found}
    return row | {"warnings": texts, "seconds": seconds, "commit": commit()}


def late(rows):
    """Number of draws that no choice was made by."""
    return sum(int(row["draw"]) > 143 for row in rows)


def mean_of(rows, name):
    """Mean of a column."""
    return sum(float(row[name]) for row in rows) / len(rows)


def table(rows):
    """Shares of draws that end below exact maximum likelihood, by noise."""
    missed = [row for row in rows if float(row["below"]) > 0.5]
    spikes = sum(float(row["shortest"]) < 0.1 for row in missed)
    lines = [
        "Where signals are weak, plain `Vecchia`, which up to 300 rows is the exact process, ends over half a nat "
        f"below exact maximum likelihood in {len(missed)} of {len(rows)} draws. In {spikes} of these the likelihood is "
        "largest at a spike, a lengthscale of almost nothing. "
        f"{sum(row['dim'] == '5' for row in missed)} of them are in five dimensions, with eight hyperparameters.",
        "",
        f"`python benchmarks/accuracy/weak_signals.py`, commits {', '.join(sorted({row['commit'] for row in rows}))}, "
        f"one thread. {POINTS} points; nats of the log likelihood of all of them. With K = 32 - 64 neighbors and steps "
        "that ended earlier (commit 69cfd5c), 20 of the first 96 draws (21 %) were more than .5 nats below, the mean "
        "was .402, and the median of seconds .60. The tolerance of few rows was chosen with draws up to 143 in view; "
        f"{late(missed)} of the other {late(rows)} are below.",
        "",
        f"A higher likelihood does not predict better there: of the draws below, f at {NEW} new points has a mean RMSE "
        f"of {mean_of(missed, 'rmse'):.3f} where `fit` ended and of {mean_of(missed, 'rmse_found'):.3f} at the largest "
        f"likelihood, and is no worse in {sum(float(row['rmse']) <= float(row['rmse_found']) for row in missed)} of "
        f"{len(missed)}; a mean negative log density of {mean_of(missed, 'nll'):.3f} and "
        f"{mean_of(missed, 'nll_found'):.3f}.",
        "",
        "| noise sd | draws | > .5 nats below | of these spikes | with a warning | > 2 nats | mean | RMSE of f | at "
        "the largest likelihood | seconds |",
        "|---" * 10 + "|",
    ]
    for noise in (*sorted({row["noise"] for row in rows}, key=float), "all"):
        some = [row for row in rows if noise in (row["noise"], "all")]
        below = [float(row["below"]) for row in some]
        missed = [row for row in some if float(row["below"]) > 0.5]
        seconds = sorted(float(row["seconds"]) for row in some)[len(some) // 2]
        cells = [noise, len(some), f"{len(missed) / len(some):.1%}"]
        cells += [sum(float(row["shortest"]) < 0.1 for row in missed), sum(bool(row["warnings"]) for row in missed)]
        cells += [f"{sum(b > 2 for b in below) / len(some):.1%}", f"{sum(below) / len(some):.3f}"]
        cells += [f"{mean_of(some, 'rmse'):.3f}", f"{mean_of(some, 'rmse_found'):.3f}", f"{seconds:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=4 * len(GRID))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/weak_signals.md"))
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/weak_signals.csv"))
    args = parser.parse_args()
    done = {int(row["draw"]) for row in read(args.csv)}
    for draw in range(args.draws):
        if draw not in done:
            row = run(draw)
            append(args.csv, FIELDS, row)
            print(*(row[name] for name in FIELDS[:8]), flush=True)
    args.out.write_text(table(read(args.csv)), encoding="utf-8")


if __name__ == "__main__":
    main()
