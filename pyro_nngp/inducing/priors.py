r"""Priors over inducing inputs, as distributions over the whole set z (M, D).

A density is a base measure times an interaction, :math:`p(z) \propto p_0(z)\, h(z)` (Rossi et al. 2021, section 3.1):

* normal: :math:`p_0` standard normal, the best choice in the paper for standardized inputs;
* uniform: :math:`p_0 = 1` everywhere; on a box, Pyro's ``Uniform(low, high).expand([M, D]).to_event(2)``;
* :class:`Determinantal`: h(z) is the determinant of the correlation matrix of z under the kernel;
* :class:`Strauss`: :math:`h(z) = \gamma^{s(z)}` with s(z) the number of pairs closer than r.

Without a proper base, as in the paper, the last three are improper, and so is the posterior: a point far from all data
costs nothing. In six dimensions, half of 100 points left the data within 3,000 updates and kept moving away. No two
of them were close any more, so that the uniform and Strauss priors agreed (`benchmarks/results/bsgp.md`). A box
or a normal base makes both proper: ``inducing_prior=lambda kernel, z: Strauss(Normal(zeros_like(z),
1.0).to_event(2))``.

Differs from the paper: the number of close pairs is smooth, since an indicator has no gradient and a gradient-based
sampler would not see it. The determinant is taken of correlations, since covariances would move the prior of
the kernel's variance. The factor :math:`\lambda^M` of the Strauss process is left out: it is constant, as M is fixed.
Any base can be combined with an interaction.

Cost: O(M^3) for the determinantal prior, O(M^2 D) for Strauss.
"""

import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_nngp._checks import check_number, check_positive, fail, undefined
from pyro_nngp._kinds import check_callable, check_kind, validation
from pyro_nngp.kernels import bind
from pyro_nngp.linalg import DEFAULT_JITTER, cholesky, factor_log_det

InducingPrior: TypeAlias = str | Distribution | Callable[[Any, Tensor], Distribution]
"""A name, a distribution over (M, D), or a function of the kernel and of any set of that shape, dtype and device."""


class Flat(TorchDistribution):
    """The improper uniform distribution over (M, D): density 1 everywhere, and no draws.

    Args:
        num_points: M.
        num_inputs: D.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.independent(constraints.real, 2)

    def __init__(self, num_points: int, num_inputs: int, validate_args: bool | None = None) -> None:
        super().__init__(torch.Size(), torch.Size((num_points, num_inputs)), validate_args=validate_args)

    def log_prob(self, value: Float[Tensor, "... M D"]) -> Float[Tensor, "..."]:
        if self._validate_args:
            self._validate_sample(value)
        return value.new_zeros(value.shape[:-2])

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        _no_draws("Flat", "to be proper")


class Interacting(TorchDistribution):
    """A base distribution over (M, D) times an interaction between its points."""

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, base: Distribution, validate_args: bool | None = None) -> None:
        self.base = _checked(type(self).__name__, "base", base, "a distribution over (M, D)")
        super().__init__(torch.Size(), base.event_shape, validate_args=validation(type(self).__name__, validate_args))

    @constraints.dependent_property
    def support(self) -> constraints.Constraint | None:
        return self.base.support

    def log_prob(self, value: Float[Tensor, "... M D"]) -> Float[Tensor, "..."]:
        """Log density up to the constant that normalizes it."""
        if self._validate_args:
            self._validate_sample(value)
        return self.base.log_prob(value) + self.interaction(value)

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        _no_draws(type(self).__name__, "with a known normalizing constant")

    def interaction(self, value: Tensor) -> Tensor:
        """Logarithm of the interaction h(z)."""
        undefined(self, "interaction", "subclass", "Return one logarithm per set of points.")


class Determinantal(Interacting):
    r"""Determinantal point process, :math:`p(z) \propto p_0(z) \det R_{zz}`, which keeps points apart.

    R holds the correlations of the kernel, :math:`K_{zz} = \sigma^2 R_{zz}`. The density is not normalized: its
    integral over z falls with the lengthscales, and multiplies their prior where they are sampled as well, which favors
    short ones. A kernel that stands still has no such effect::

        still = RBF(D, lengthscale=torch.full((D,), D**0.5)).to(x).requires_grad_(False)
        base = Normal(torch.zeros(M, D).to(x), 1.0).to_event(2)
        gp = BSGP(x, y, kernel, inducing=M, inducing_prior=Determinantal(still, base))

    On two folds of boston (M = 100, D = 13, normal base) it has the NLL of the normal prior within .01; the model's
    correlations cost .05 and .37, its covariances .18 and .84 (`benchmarks/results/bsgp.md`).

    Args:
        kernel: a kernel or any covariance function, such as the kernel of the model.
        base: :math:`p_0`, a distribution over (M, D).
        correlation: False takes the determinant of the covariance matrix, as in the paper, :math:`\sigma^{2M}` times
            the other: a prior of the kernel's variance gets M more powers.
        jitter: relative nugget; None takes 1e-6. It keeps the density positive where points coincide.

    Raises:
        NotPositiveDefiniteError: if the covariance cannot be factorized.
    """

    def __init__(
        self,
        kernel: Any,
        base: Distribution,
        correlation: bool = True,
        jitter: float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel, self.correlation = bind(kernel), correlation
        self.jitter = DEFAULT_JITTER if jitter is None else jitter
        super().__init__(base, validate_args)

    def interaction(self, value: Tensor) -> Tensor:
        cov = self._covariance(value)
        log_det = factor_log_det(cholesky(cov, self.jitter))
        return log_det - cov.diagonal(dim1=-2, dim2=-1).log().sum(-1) if self.correlation else log_det

    def _covariance(self, value: Float[Tensor, "... M D"]) -> Float[Tensor, "... M M"]:
        """Covariances of sets of points; S sets of hyperparameters belong to one set of points each.

        The kernel is then evaluated at each set of points with all hyperparameters, S^2 blocks.
        """
        if not self.kernel.batch_shape:
            return self.kernel(value, value)
        shape = torch.broadcast_shapes(self.kernel.batch_shape, value.shape[:-2])
        points = value.expand(*shape, *value.shape[-2:]).flatten(0, -3)
        blocks = (self.kernel(one, one) for one in points)
        each = [block.expand(*shape, *block.shape[-2:]).flatten(0, -3)[i] for i, block in enumerate(blocks)]
        return torch.stack(each).unflatten(0, shape)


class Strauss(Interacting):
    r"""Strauss process, :math:`p(z) \propto p_0(z) \gamma^{s(z)}`, s the number of pairs closer than r.

    A pair at distance d counts :math:`1 / (1 + \exp((d^2 - r^2) / (2 r \tau)))`, which is smooth in z, also at d = 0.

    Args:
        base: :math:`p_0`, a distribution over (M, D).
        radius: r > 0.
        repulsion: gamma in (0, 1], the factor that each close pair costs.
        softness: tau >= 0, a distance, the width of the step around r. 0 is the indicator of the paper, for evaluation:
            its gradient is 0.

    Raises:
        ValueError: if a parameter is out of range.
    """

    def __init__(
        self,
        base: Distribution,
        radius: float = 0.5,
        repulsion: float = 0.5,
        softness: float = 0.05,
        validate_args: bool | None = None,
    ) -> None:
        check_positive("Strauss", "radius", radius, "It is the distance within which points repel each other.")
        check_positive("Strauss", "repulsion", repulsion, "It is the factor that a close pair costs.", 1.0)
        check_number("Strauss", "softness", softness, cure="It is the width of the step; 0 is a hard one.")
        self.radius, self.repulsion, self.softness = radius, repulsion, softness
        super().__init__(base, validate_args)

    def num_close_pairs(self, value: Float[Tensor, "... M D"]) -> Float[Tensor, "..."]:
        """s(z): pairs closer than the radius, each counted by the smooth step."""
        i, j = torch.triu_indices(value.shape[-2], value.shape[-2], 1, device=value.device)
        inside = self.radius**2 - (value[..., i, :] - value[..., j, :]).square().sum(-1)
        if self.softness == 0:
            return (inside > 0).sum(-1).to(value.dtype)
        return torch.sigmoid(inside / (2 * self.radius * self.softness)).sum(-1)

    def interaction(self, value: Tensor) -> Tensor:
        return math.log(self.repulsion) * self.num_close_pairs(value)


def inducing_prior(
    where: str, prior: InducingPrior, shape: tuple[int, ...]
) -> Distribution | Callable[[Any, Tensor], Distribution]:
    """Prior over inducing inputs from the user's argument: a distribution, or a function of kernel and z.

    Args:
        where: name of the caller, for the error message.
        prior: "normal", "uniform", "determinantal" or "strauss" (the last three with a flat base), a distribution over
            (M, D), or a function that makes one.
        shape: (M, D).

    Raises:
        ValueError: for an unknown name, or a distribution of another shape.
    """
    if isinstance(prior, str):
        if prior not in _NAMED:
            names, cure = ", ".join(map(repr, _NAMED)), "Or give a distribution over (M, D)."
            fail(where, "inducing_prior", f"to be one of {names}", repr(prior), cure)
        return _NAMED[prior]
    if isinstance(prior, Distribution):
        return _checked(where, "inducing_prior", prior, f"a distribution over {shape}", shape)
    check_callable(where, "inducing_prior", prior, "Give a name, a distribution or a function (kernel, z).")
    return prior


def _normal(kernel: Any, z: Tensor) -> Distribution:
    return dist.Normal(torch.zeros_like(z), 1.0).to_event(2)


def _uniform(kernel: Any, z: Tensor) -> Distribution:
    return Flat(*z.shape)


def _determinantal(kernel: Any, z: Tensor) -> Distribution:
    return Determinantal(kernel, Flat(*z.shape))


def _strauss(kernel: Any, z: Tensor) -> Distribution:
    return Strauss(Flat(*z.shape))


_NAMED = {"normal": _normal, "uniform": _uniform, "determinantal": _determinantal, "strauss": _strauss}


def _checked(
    where: str, arg: str, prior: Distribution, expectation: str, shape: tuple[int, ...] | None = None
) -> Distribution:
    """Return the distribution after checking that it is over sets (M, D), and of this shape if one is given."""
    check_kind(where, arg, prior, Distribution, expectation, "Pass dist.Normal(0, 1).expand([M, D]).to_event(2).")
    event = tuple(prior.event_shape)
    if prior.batch_shape or len(event) != 2 or event != (event if shape is None else shape):
        actual = f"batch shape {tuple(prior.batch_shape)}, event shape {event}"
        fail(where, arg, f"to be {expectation}", actual, "Use .expand([M, D]).to_event(2).")
    return prior


def _no_draws(where: str, expectation: str) -> NoReturn:
    cure = "Start chains at given values, for example by the init_strategy of the model."
    fail(where, "a prior that is sampled from", expectation, "an unnormalized density", cure, NotImplementedError)
