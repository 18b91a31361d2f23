r"""Multinomial counts as a sequence of binomial counts, by stick breaking.

Counts :math:`y_1..y_C` of a total n, with shares :math:`\pi_c`, are multinomial if and only if the first count is
binomial of n, the second binomial of the remainder, and so on:

.. math:: p(y \mid n, \pi) = \prod_{c < C} \mathrm{Binomial}\big(y_c \mid n - \textstyle\sum_{j < c} y_j,\;
   \sigma(f_c)\big), \qquad \pi_c = \sigma(f_c) \prod_{j < c} \sigma(-f_j)

(Linderman, Johnson and Adams 2015). So a model of each split, by any method that takes
:class:`~pyro_nngp.likelihoods.Binomial`, Polya-Gamma augmentation included, is a model of the counts: with f of the
splits independent, densities multiply, and so do predicted shares. The prior of shares depends on the order of the
kinds; put those that are of most interest, or most frequent, first.

Cost: O(N C). Symbols: C kinds, N rows.

Reference: Linderman, Johnson, Adams (2015), "Dependent multinomial models made easy: stick breaking with the
Polya-Gamma augmentation", NeurIPS.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_nngp._checks import check_tensor, fail


class BinomialSplit(NamedTuple):
    """One of the splits of multinomial counts: the data of a binomial model."""

    rows: Int[Tensor, " n"]
    """Rows of the counts with a remainder to split."""
    successes: Float[Tensor, " n"] | Int[Tensor, " n"]
    """Counts of this kind there."""
    trials: Float[Tensor, " n"] | Int[Tensor, " n"]
    """Counts of this kind and of all later ones."""


def binomial_splits(counts: Float[Tensor, "N C"] | Int[Tensor, "N C"]) -> list[BinomialSplit]:
    """The C - 1 binomial data sets that multinomial counts consist of.

    ::

        splits = binomial_splits(counts)
        gps = [VNNGP(x[s.rows], s.successes, likelihood=Binomial(), trials=s.trials) for s in splits]
        logits = [Bernoulli().marginal(*gp(x_new)).logits for gp in gps]  # of the expected probabilities of the splits
        shares = log_shares(torch.stack(logits)).exp()  # (C, P)

    Args:
        counts: of each kind, C >= 2 columns. Rows without any count carry nothing and are in no split.

    Raises:
        ValueError: if they are not whole numbers >= 0 in at least two columns, or a kind has no row with anything left.
        TypeError: if they are no tensor.
    """
    where = "binomial_splits"
    check_tensor(where, "counts", counts)
    if counts.dim() != 2 or counts.shape[1] < 2:
        fail(where, "counts", "of shape (N, C) with C >= 2", tuple(counts.shape), "One column for each kind.")
    bad = counts[~((counts >= 0) & (counts == counts.round()) & counts.isfinite())]
    if len(bad):
        cure = "Pass numbers of cases, not shares."
        fail(where, "counts", "to be 0, 1, 2, ..", f"{len(bad)} others such as {bad[0].item():g}", cure)
    left = counts.flip(1).cumsum(1).flip(1)
    splits = []
    for c in range(counts.shape[1] - 1):
        rows = (left[:, c] > 0).nonzero()[:, 0]
        if not len(rows):
            cure = "Drop the last kinds, which have no counts."
            fail(where, "counts", f"in column {c} or later ones", "zeros only", cure)
        splits.append(BinomialSplit(rows, counts[rows, c], left[rows, c]))
    return splits


def log_shares(logits: Float[Tensor, "C1 *B"]) -> Float[Tensor, "C *B"]:
    r"""Logarithms of the shares of C kinds from the logits of the C - 1 splits, the dimension of kinds first.

    Draws of f give draws of :math:`\log \pi`. Logits of expected probabilities, as above, give the logarithms of the
    expected shares, exactly if the splits have independent posteriors, as separate models do.

    Finite for all finite logits, also in float32.
    """
    taken, left = logsigmoid(logits), logsigmoid(-logits).cumsum(0)
    nothing = torch.zeros_like(logits[:1])
    return torch.cat([taken, nothing]) + torch.cat([nothing, left])
