r"""Factor loadings of a method, which are solved for together with q(u), and correlations of its outputs.

Rounds put loadings, coefficients of the mean and q(u) at their joint optimum
(:mod:`pyro_nngp.variational.factor_solution`). Training alternates with them: the loss is then a smooth function of the
hyperparameters alone.

Symbols: T outputs, L factors.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pyro_nngp.bound import versions_of
from pyro_nngp.hyperparameters.priors import sampled_attributes
from pyro_nngp.loadings import Correlations, FactorLoadings
from pyro_nngp.means import BasisMean
from pyro_nngp.variational.factor_solution import find_intervals, solve_factors
from pyro_nngp.variational.loadings_draws import MOST_VALUES, draw_loadings

_NATS = 0.01  # gain of a round per loading below which they are solved for: moves of .05 standard errors


@dataclass(frozen=True)
class Factors:
    """The factors of a method with :class:`~pyro_nngp.loadings.FactorLoadings`.

    Attributes:
        method: the method.
        loadings: its loadings.
    """

    method: Any
    loadings: FactorLoadings

    @property
    def has_smooth_loss(self) -> bool:
        """Whether no hyperparameters but the loadings, whose guide is a point, have priors."""
        return all(module is self.loadings for module, _ in sampled_attributes(self.method))

    def solve(self, max_rounds: int) -> None:
        """Put loadings, coefficients of the mean and q(u) at their joint optimum."""
        gp = self.method
        solve_factors(gp.q, lambda: gp.posterior(gp.bound()), self.loadings, max_rounds, _NATS)

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets: all coefficients of a mean that is linear in them."""
        mean = self.method._modules.get("mean")
        is_linear = isinstance(mean, BasisMean) and mean.is_learned
        return mean.solved_parameters() if is_linear else self.method.q.solved_parameters(mean)

    def correlations(self, probability: float, progress: bool) -> Correlations:
        """Correlations of the outputs, see :meth:`~pyro_nngp.models.LMC.correlations`."""
        gp = self.method
        if not bool(gp.q.solved):
            gp.solve()
        if not bool(self.loadings.has_intervals):
            find_intervals(gp.q, gp.posterior(gp.bound()), self.loadings)
        if gp.q.loc.numel() > MOST_VALUES:
            return self.loadings.correlations(probability)

        def draw() -> Tensor:
            medians = gp.hyper_guide.medians()
            return draw_loadings(gp.q, gp.posterior(gp.bound()), self.loadings, gp.kernel, medians, progress)

        return Correlations.of_loadings(gp._kept("loadings").get(versions_of(gp), draw), probability)


__all__ = ["Factors"]
