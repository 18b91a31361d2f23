"""The hyperparameters of a method as values, read once and passed down.

A model or a guide reads them as sites of its Pyro program (:func:`read_program`); everything else takes them at given
values of the priors (:func:`read`). Whatever takes the record has no Pyro effects and may run in any thread.

Cost: O(hyperparameters). Symbols: B points, D columns, L latent functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from pyro.nn.module import _make_name
from torch import Tensor, nn

from pyro_nngp._autograd import is_transformed
from pyro_nngp._checks import fail
from pyro_nngp._versions import Attributes, Versions
from pyro_nngp.coefficients import Trend
from pyro_nngp.conditionals.low_rank import LowRank
from pyro_nngp.hyperparameters.priors import site_name
from pyro_nngp.hyperparameters.values import Get, Values, as_sites, as_values, plain
from pyro_nngp.kernels import Covariance, bind
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.means import ConstantMean, LinearMean

_PARTS = "likelihood", "kernel", "mean"
_PROBES = 8  # points whose covariances identify a function


@dataclass(frozen=True)
class Bound:
    """The values that a method's equations need of its hyperparameters.

    Attributes:
        kernel: plain copy of the kernel, or of a list of kernels; None for a method whose parts hold the kernels.
        covariances: the covariance function of each kernel, outside of the plates of data and latent functions. They
            are bound when the record is read: bound later, under ``no_grad``, they would have no gradients.
        likelihood: bound likelihood; None without one.
        mean_function: plain copy of the mean function.
        jitter: relative nugget.
        latent_shape: () or (L,).
        others: values of further hyperparameters of the method, and of its inducing points, by name.
        where: name of the method, for errors.
        trend: coefficients of the mean that predictions integrate over; None takes them as they are.
        low_rank: low-rank part of the process, beside which neighbors condition the residual; None has none.
        versions: of all that the method depends on when the record is read; None at a draw, and in a program.
    """

    kernel: Any
    covariances: tuple[Covariance, ...]
    likelihood: Any
    mean_function: Any
    jitter: float
    latent_shape: tuple[int, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)
    where: str = "mean"
    trend: Trend | None = None
    low_rank: LowRank | None = None
    versions: Versions | None = None

    @property
    def covariance(self) -> Covariance:
        """The covariance function of a method with one kernel."""
        (covariance,) = self.covariances
        return covariance

    @property
    def residual(self) -> Covariance:
        """The covariance function at :meth:`inputs` of what neighbors condition: all that is not of low rank."""
        return self.covariance if self.low_rank is None else self.low_rank.residual

    @property
    def at_data(self) -> Covariance:
        """:attr:`residual` within the plate of the data."""
        return self.residual.shifted(-1)

    def inputs(self, x: Float[Tensor, "... B D"]) -> Float[Tensor, "... B C"]:
        """Points as :attr:`residual` and the basis of :attr:`trend` take them."""
        return x if self.low_rank is None else self.low_rank.inputs(x)

    def mean(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "*L B"]:
        """Values of the mean function, latent functions first, plus the mean of the low-rank part given data.

        Raises:
            ValueError: unless the mean function returns one value per row.
        """
        mean = self._mean(x)
        return mean if self.low_rank is None else mean + self.low_rank.mean(x)

    def _mean(self, x: Tensor) -> Tensor:
        """Values of the mean function."""
        mean, count = self.mean_function, len(x)
        if isinstance(mean, ConstantMean | LinearMean) and mean._pyro_samples and not mean._pyro_params:
            values = mean.sets("value").to(x.dtype)[..., None]
            if isinstance(mean, LinearMean):
                slope = mean.sets("slope").to(x.dtype)
                values = values + (slope.mT if mean.own_shape else slope) @ mean.basis(x)[:, 1:].mT
            return values.expand(*values.shape[:-1], count)
        values = mean(x)
        shapes = (count,), (count, 1), (count, *self.latent_shape)
        if not isinstance(values, Tensor) or tuple(values.shape) not in shapes:
            actual = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            columns = f", or ({count}, {self.latent_shape[0]})" if self.latent_shape else ""
            cure = "One value per row of x, such as torch.nn.Linear(D, 1) gives."
            fail(self.where, "mean(x)", f"of shape ({count},) or ({count}, 1){columns}", actual, cure)
        if values.dim() == 1:
            return values
        return values.squeeze(-1) if values.shape[-1] == 1 else values.mT


def read_program(owner: Any, values: Values) -> Bound:
    """The hyperparameters of a method in the present program, where parameters are sites.

    Args:
        owner: the method.
        values: values of the priors, which are sites already.
    """
    for (module, attribute), value in values.items():  # for a mean function that is no module, and reads one
        module._pyro_context.set(site_name(owner, module, attribute), value)
    return _bound(owner, as_sites(values))


def read(owner: Any, values: Values, is_median: bool = False) -> Bound:
    """The hyperparameters of a method at given values of those that have priors, without Pyro effects.

    `is_median`: whether these are the medians of their guide, rather than a draw.
    """
    return _bound(owner, as_values(values), is_median)


def _bound(owner: Any, get: Get, is_median: bool = False) -> Bound:
    def part(name: str) -> Any:
        return plain(_part(owner, name), _make_name(owner._pyro_name, name), get)

    likelihood, kernel, mean = map(part, _PARTS)
    kernels = [] if kernel is None else list(kernel) if isinstance(kernel, nn.ModuleList) else [kernel]
    others = {}
    for name in (*owner._hyperparameters, *owner._points):
        if name in owner._buffers:
            others[name] = owner._buffers[name]
        elif name in owner._pyro_params or name in owner._pyro_samples or name in owner._parameters:
            others[name] = get(owner, name, _make_name(owner._pyro_name, name))
        else:
            others[name] = part(name)
    covariances = tuple(bind(each) for each in kernels)
    return Bound(
        kernel,
        covariances,
        likelihood.bind() if isinstance(likelihood, Likelihood) else None,
        mean,
        owner.jitter,
        owner.latent_shape,
        others,
        type(owner).__name__,
        versions=versions_of(owner) if is_median and not is_transformed() else None,
    )


def versions_of(owner: Any) -> Versions:
    """The state of a method; of a kernel that is a function, its covariances at some rows."""
    parts = [_part(owner, name) for name in (*_PARTS, *owner._hyperparameters, *owner._points)]
    kernels = list(parts[1]) if isinstance(parts[1], nn.ModuleList) else [parts[1]]
    functions = [bind(kernel) for kernel in kernels if kernel is not None and not isinstance(kernel, nn.Module)]
    some = owner.x[:_PROBES]
    modules = (module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    values = [cov(some, some).tolist() for cov in functions]
    return Versions.of(owner, owner.jitter, owner.latent_shape, Attributes(modules), values, *parts)


def _part(owner: Any, name: str) -> Any:
    """A part of a method; reading an attribute would fire statements."""
    return owner._modules.get(name, owner.__dict__.get(name))


__all__ = ["Bound", "read", "read_program", "versions_of"]
