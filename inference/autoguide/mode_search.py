r"""Mode of the hyperparameters of a program: the start of the guide's distribution of them.

The density is the largest bound over all q(z | theta) with the prior, in unconstrained space. The evidence with the
factors of the best q has its gradient, but only near the hyperparameters of this q: further away the factors belong to
other data, and the evidence may grow without limit. So differences are those of the evidence, and steps are judged by
the bound (:mod:`pyro_nngp.inference.autoguide.laplace`).

Cost: some ten steps of 2 h to h^2 / 2 factorizations, and a fixed point each. Symbols: h hyperparameters in
unconstrained space.
"""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.inference.autoguide import laplace
from pyro_nngp.inference.autoguide.conditional_guide import ConditionalGuide, Expansion
from pyro_nngp.inference.autoguide.unconstrained import Unconstrained
from pyro_nngp.linalg import NotPositiveDefiniteError

MOST = 200
"""Most hyperparameters whose mode is sought by differences."""

_IMPOSSIBLE, _FAR_FROM_DATA = -1e10, (NotPositiveDefiniteError, torch.linalg.LinAlgError, ValueError)


@torch.no_grad()
def hyperparameter_mode(
    guide: ConditionalGuide, space: Unconstrained, start: Float[Tensor, " h"], expansion: Expansion
) -> tuple[Float[Tensor, " h"], Float[Tensor, "h h"], Expansion]:
    """The mode of the hyperparameters, a root of their covariance by the curvature there, and the expansion there.

    Args:
        guide: the guide of the Gaussian sites given the hyperparameters.
        space: the map to unconstrained space.
        start: where the search begins.
        expansion: the expansion there.
    """

    def log_evidence(u: Float[np.ndarray, " h"]) -> float:
        latent = torch.from_numpy(u).to(start)
        try:
            density = guide.posterior(space.values(latent), *expansion).log_evidence() + space.volume(latent)
        except _FAR_FROM_DATA:
            return _IMPOSSIBLE
        return density if math.isfinite(density) else _IMPOSSIBLE

    def move(u: Float[np.ndarray, " h"], least: float) -> float:
        nonlocal expansion
        latent = torch.from_numpy(u).to(start)
        try:
            q, found = guide.best(space.values(latent), expansion)
            bound = q.elbo(q.marginals()) + q.log_hyperprior() + space.volume(latent)
        except _FAR_FROM_DATA:
            return -math.inf
        if bound > least:
            expansion = found
        return bound

    mode, cov = laplace.mode(log_evidence, start.double().cpu().numpy(), move, space.names)
    tril = torch.from_numpy(np.linalg.cholesky(cov))
    return torch.from_numpy(mode).to(start), tril.to(start), expansion
