r"""The distribution of the data's parameters at which the log likelihood is replaced by a quadratic function.

The best Gaussian q(z) given the hyperparameters is a fixed point: the quadratic functions are taken at its
marginals :math:`q(\phi_i)` (Opper and Archambeau 2009). From marginals :math:`(\bar\phi, S)` follows q, with the
marginals :math:`(\bar\phi', S')`; a step moves from one to the other as far as the evidence lower bound of the next q
rises. A step is a natural gradient step where it is short, and Newton's where it is whole.

The mode of z is a bad start: where a process is the log of a scale, the density is unbounded or nearly so, at data that
are fitted exactly. The start is the mode of the density that is averaged over a spread of phi, which has no such
places, by Newton's method.

Cost: a factorization for each step of Newton's method; a factorization and a selected inverse for each trial of a step
to the fixed point. Some dozens of each.

Reference: Opper, Archambeau (2009), "The variational Gaussian approximation revisited", Neural Computation 21; Khan,
Lin (2017), "Conjugate-computation variational inference", AISTATS.
"""

import math
from collections.abc import Callable, Sequence

import torch

from pyro_nngp.inference.autoguide.conditional import ConditionalPosterior, covariance_tril
from pyro_nngp.inference.autoguide.quadratics import Marginals
from pyro_nngp.linalg import NotPositiveDefiniteError

Conditional = Callable[[Sequence[Marginals]], ConditionalPosterior]

_NEWTON_STEPS, _HALVINGS, _SETTLED = 50, 12, 1e-2
_STEPS, _GAIN = 50, 1e-2  # most steps to the fixed point; nats below which it is reached


def between(a: Marginals, b: Marginals, part: float) -> Marginals:
    """Mean and covariance that lie on the way from a to b."""
    covariance = torch.lerp(a.tril @ a.tril.mT, b.tril @ b.tril.mT, part)
    return Marginals(torch.lerp(a.mean, b.mean, part), covariance_tril(covariance))


def averaged_mode(conditional: Conditional, start: Sequence[Marginals]) -> list[Marginals]:
    """The mode of z in the density averaged over the spread of phi, with this spread, by Newton's method."""
    at, leaves = list(start), None
    for _ in range(_NEWTON_STEPS):
        q, length = conditional(at), 1.0
        leaves = torch.zeros_like(q.mean) if leaves is None else leaves
        before = q.log_prior(leaves) + q.expected_log_likelihood(at)
        for _ in range(_HALVINGS):
            trial = torch.lerp(leaves, q.mean, length)
            means = zip(at, q.phi(q.mean), strict=True)
            new = [Marginals(torch.lerp(part.mean, goal, length), part.tril) for part, goal in means]
            rise = q.log_prior(trial) + q.expected_log_likelihood(new) - before
            if rise >= -1e-9 * abs(before):
                break
            length /= 2
        else:
            break
        leaves, at = trial, new
        if rise < _SETTLED:
            break
    return at


def fixed_point(conditional: Conditional, start: Sequence[Marginals]) -> tuple[ConditionalPosterior, list[Marginals]]:
    """The best Gaussian q(z), and the marginals at which it is built."""
    at = list(start)
    q = conditional(at)
    goal = q.marginals()
    bound = q.elbo(goal)
    for _ in range(_STEPS):
        length, rise = 1.0, -math.inf
        for _ in range(_HALVINGS):
            try:
                new = [between(a, b, length) for a, b in zip(at, goal, strict=True)]
                trial = conditional(new)
                ahead = trial.marginals()
                rise = trial.elbo(ahead) - bound
            except (NotPositiveDefiniteError, torch.linalg.LinAlgError):  # far from the data
                rise = -math.inf
            if rise > 0:
                break
            length /= 2
        else:
            break
        at, q, goal, bound = new, trial, ahead, bound + rise
        if rise < _GAIN:
            break
    return q, at
