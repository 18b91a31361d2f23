r"""The guide q(z | theta) of the Gaussian sites of a program, at any values of its hyperparameters.

It is the exact posterior of an expansion of the program: log likelihoods are replaced by quadratic functions at the
marginals of the data's parameters phi (:mod:`pyro_nngp.inference.autoguide.quadratics`), and a program whose data are
not linear in z is linearized at a center. The best expansion is a fixed point: its marginals are those of q
(:mod:`pyro_nngp.inference.autoguide.fixed_point`), and its center is the mean of q.

Cost: a run of the program and a factorization for each q, some dozens of them for a fixed point. Symbols: d Gaussian
values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.distributions import NNGP
from pyro_nngp.inference.autoguide.conditional import ConditionalPosterior, covariance_tril, prior_variances
from pyro_nngp.inference.autoguide.fit_check import Weighted, joined
from pyro_nngp.inference.autoguide.fixed_point import averaged_mode, between, fixed_point
from pyro_nngp.inference.autoguide.linear_predictor import Blocks, gaussian_base, irregular, leaf_shape, value_at
from pyro_nngp.inference.autoguide.linearized_program import LinearizedProgram
from pyro_nngp.inference.autoguide.observations import check_density
from pyro_nngp.inference.autoguide.program_checks import check_repeatable, near
from pyro_nngp.inference.autoguide.quadratics import Marginals, Observations

_DAMPING = 0.1  # of the expansion from step to step of training
_RECENTERINGS, _STILL = 10, 0.05  # of data that are not linear in z; change of phi that ends them

Leaves = Mapping[str, Tensor]


class Expansion(NamedTuple):
    """The point about which a program is expanded.

    Attributes:
        center: leaves at which it is linearized, by name.
        marginals: distributions of phi at which log likelihoods are replaced, for each observed site.
    """

    center: Leaves
    marginals: Sequence[Marginals]


@dataclass(frozen=True)
class ConditionalGuide:
    """The guide q(z | theta) of a program.

    Attributes:
        program: the program on its data.
        zeros: zeros in the shapes of the leaves of its Gaussian sites, by name.
        blocks: the structure of its Jacobian.
        is_linear: whether its data are linear in the leaves.
    """

    program: LinearizedProgram
    zeros: Leaves
    blocks: Blocks
    is_linear: bool

    @classmethod
    def of(
        cls, program: LinearizedProgram, sites: Mapping[str, Any], gaussian: Sequence[str], values: Mapping[str, Tensor]
    ) -> tuple["ConditionalGuide", Expansion]:
        """The guide of some sites of a program, and an expansion at the mode of its averaged density.

        Args:
            program: the program.
            sites: its latent sites.
            gaussian: names of the Gaussian ones.
            values: values of the others.

        Raises:
            ValueError: if two runs of the program differ, a density of other sites depends on the leaves, or an
                observation on several values of a process.
        """
        zeros = {n: torch.zeros(leaf_shape(sites[n]["fn"])).to(sites[n]["value"]) for n in gaussian}
        trace, observed, jacobian = program.linearize(values, zeros)
        check_repeatable(observed, program.observed(values, zeros))
        for name in values:
            check_density(trace.nodes[name], list(jacobian.leaves.values()))
        bases = {name: gaussian_base(sites[name]["fn"]) for name in gaussian}
        processes = {name: base.event_shape[-1] for name, base in bases.items() if isinstance(base, NNGP)}
        anywhere = {n: irregular(i, v.shape).to(v) for i, (n, v) in enumerate(zeros.items())}
        blocks = Blocks(program.linearize(values, anywhere)[2], processes)
        variances = prior_variances(trace, jacobian, blocks).split([each.phi.numel() for each in observed])
        pairs = zip(observed, variances, strict=True)
        marginals = [each.start(variance.reshape(each.phi.shape)) for each, variance in pairs]
        with torch.no_grad():
            q = ConditionalPosterior(trace, observed, jacobian, blocks, marginals)
            elsewhere = torch.sin(torch.arange(1.0, 1.0 + len(q), dtype=torch.float64))
            there = [each.phi for each in program.observed(values, _like(zeros, q.by_name(elsewhere)))]
            guide = cls(program, zeros, blocks, all(map(near, there, q.phi(elsewhere))))
            return guide, Expansion(zeros, averaged_mode(partial(guide.posterior, values, zeros), marginals))

    def posterior(
        self, values: Mapping[str, Tensor], center: Leaves, marginals: Sequence[Marginals]
    ) -> ConditionalPosterior:
        """q(z | theta) at values of the hyperparameters, for an expansion."""
        return ConditionalPosterior(*self.program.linearize(values, center), self.blocks, marginals)

    def best(self, values: Mapping[str, Tensor], start: Expansion) -> tuple[ConditionalPosterior, Expansion]:
        """The best q(z | theta) at values of the hyperparameters, and its expansion."""
        center, marginals = start
        for i in range(_RECENTERINGS):
            q, marginals = fixed_point(partial(self.posterior, values, center), marginals)
            if self.is_linear or self._has_settled(q, values):
                break
            center = _moved(center, q, 1.0 if i < _RECENTERINGS / 2 else 0.5)
        return q, Expansion(center, marginals)

    def followed(self, start: Expansion, q: ConditionalPosterior) -> Expansion:
        """An expansion a tenth of the way to the marginals and the mean of q."""
        marginals = []
        for old, new in zip(start.marginals, q.marginals(), strict=True):
            step = (new.mean - old.mean)[..., None]
            around = Marginals(new.mean, covariance_tril(new.tril @ new.tril.mT + (1 - _DAMPING) * step @ step.mT))
            marginals.append(between(old, around, _DAMPING))
        return Expansion(start.center if self.is_linear else _moved(start.center, q, _DAMPING), marginals)

    def weighted(self, q: ConditionalPosterior, values: Mapping[str, Tensor], draws: Float[Tensor, "S d"]) -> Weighted:
        """Draws of q at values of the hyperparameters, weighted by the log likelihood over the factors in its place."""
        if self.is_linear:
            return q.log_weights(draws)
        return joined([q.log_weights(each[None], self._observed(q, values, each)) for each in draws])

    def site_values(self, q: ConditionalPosterior, values: Mapping[str, Tensor], leaves: Leaves) -> dict[str, Tensor]:
        """Values of the Gaussian sites at leaves, and at values of the hyperparameters of q."""
        nodes = (q.trace if q.is_flat else self.program.trace(values, leaves)).nodes
        return {name: value_at(nodes[name]["fn"], leaves[name]).detach() for name in self.zeros}

    def _observed(
        self, q: ConditionalPosterior, values: Mapping[str, Tensor], leaves: Float[Tensor, " d"]
    ) -> list[Observations]:
        """The observed sites at values of the hyperparameters and leaves."""
        return self.program.observed(values, _like(self.zeros, q.by_name(leaves)))

    def _has_settled(self, q: ConditionalPosterior, values: Mapping[str, Tensor]) -> bool:
        """Whether phi at the mean of q is nearly its linear approximation."""
        means = zip(q.phi(q.mean), self._observed(q, values, q.mean), strict=True)
        return all(float((mean - each.phi.detach().double().cpu()).abs().max()) < _STILL for mean, each in means)


def _like(zeros: Leaves, leaves: Leaves) -> dict[str, Tensor]:
    """Leaves on the device and of the dtype of the program."""
    return {name: leaf.to(zeros[name]) for name, leaf in leaves.items()}


def _moved(center: Leaves, q: ConditionalPosterior, part: float) -> dict[str, Tensor]:
    """A center moved towards the mean of q."""
    goal = q.by_name(q.mean)
    return {name: torch.lerp(leaf, goal[name].to(leaf), part) for name, leaf in center.items()}
