r"""Mean functions: a constant, or a linear function of the inputs.

Both are linear in their coefficients, :math:`\mu(x) = b(x)^\top \beta`, so that methods for Gaussian data solve for
them by generalized least squares. Values are in the units of the latent function; gradient steps are in multiples of
`unit`, which a method sets to the spread of its data.

Cost: O(B D).
"""

from typing import Any

import torch
from jaxtyping import Float
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroSample
from torch import Tensor

from pyro_nngp._checks import fail, undefined
from pyro_nngp.hyperparameters import GPModule, assign, scaled


class BasisMean(GPModule):
    """Base of mean functions that are linear in their coefficients.

    A subclass has parameters that :meth:`assign` sets, and defines :meth:`basis`.

    Attributes:
        is_set: whether the level has been set, by the user or from data.
    """

    is_set: bool
    value: Any

    def __setattr__(self, name: str, value: Any) -> None:
        """As of every module; a tensor keeps the shape of the coefficients that it replaces.

        Raises:
            ValueError: for a tensor of another shape.
        """
        if isinstance(value, Tensor) and name in self.__dict__.get("_pyro_params", ()):
            shape = tuple(self._parameters[f"{name}_unconstrained"].shape)
            if tuple(value.shape) != shape:
                cure = "Give num_latents=L to the constructor for one function per output."
                fail(type(self).__name__, name, f"of shape {shape}", tuple(value.shape), cure)
        super().__setattr__(name, value)

    def basis(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B p"]:
        """Values of the p basis functions."""
        undefined(self, "basis", "mean function")

    def assign(self, coefficients: Float[Tensor, "p L"]) -> None:
        """Set the coefficients, one column per latent function."""
        undefined(self, "assign", "mean function")

    def start(self, level: Float[Tensor, " *L"], spread: Float[Tensor, " *L"], x: Float[Tensor, "N D"]) -> None:
        """Set the level, unless the user has, and the units of gradient steps."""
        undefined(self, "start", "mean function")

    @property
    def is_free(self) -> bool:
        """Whether all coefficients are parameters, without a prior."""
        return not self._pyro_samples

    @property
    def num_functions(self) -> int | None:
        """L; None is one function for all."""
        return len(self.value) if self.value.dim() else None

    def solved_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that :meth:`assign` sets."""
        return list(self.parameters(recurse=False))


class ConstantMean(BasisMean):
    """A learnable constant mean function, ``(B, D) -> (B,)``, or ``(B, L)`` with a constant for each of L functions.

    Args:
        value: initial value, in the units of the latent function; if None, the method starts it at a robust level of
            its data.
        num_latents: L; None is one function.
    """

    def __init__(self, value: float | None = None, num_latents: int | None = None) -> None:
        super().__init__()
        self.is_set = value is not None
        shape = () if num_latents is None else (num_latents,)
        self.value = scaled(torch.full(shape, 0.0 if value is None else float(value)), 1.0)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a number or tensor assigned to `value` is kept when a method starts from its data."""
        super().__setattr__(name, value)
        if name == "value" and isinstance(value, int | float | Tensor):
            self.is_set = True

    def forward(self, x: Tensor) -> Tensor:
        return self.value.to(x.dtype).expand(*x.shape[:-1], *self.value.shape)

    def basis(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B p"]:
        return torch.ones_like(x[:, :1])

    @torch.no_grad()
    def assign(self, coefficients: Float[Tensor, "p L"]) -> None:
        assign(self, "value", coefficients[0])

    @torch.no_grad()
    def start(self, level: Float[Tensor, " *L"], spread: Float[Tensor, " *L"], x: Float[Tensor, "N D"]) -> None:
        if "value" not in self._pyro_params:
            return
        level, unit = _fitted(level, spread, self.value.shape)
        self.is_set, self.value = True, scaled((self.value.detach() if self.is_set else level).to(x), unit)


class LinearMean(BasisMean):
    r"""A learnable linear mean function, :math:`\mu(x) = c + s^\top (x - \bar x)`.

    Args:
        input_dim: number D of input columns.
        num_latents: number L of functions, each with its coefficients; None is one.
        prior: distribution of a number, the prior of each coefficient in the units of the data; None makes them
            parameters. The sites are ``mean.value`` and ``mean.slope``.

    Attributes:
        value: c, the level at the center of the data, () or (L,).
        slope: s, (D,) or (D, L).
        center: :math:`\bar x`, which the method sets to the center of its data.

    Raises:
        TypeError: if `prior` is no distribution of a number.
    """

    center: Tensor

    def __init__(self, input_dim: int, num_latents: int | None = None, prior: Any = None) -> None:
        super().__init__()
        self.is_set, self._single, self._given_prior = False, num_latents is None, prior is not None
        shape = () if num_latents is None else (num_latents,)
        self.register_buffer("center", torch.zeros(input_dim))
        if prior is None:
            self.value = scaled(torch.zeros(shape), 1.0)
            self.slope = scaled(torch.zeros(input_dim, *shape), 1.0)
        else:
            if not isinstance(prior, TorchDistributionMixin) or tuple(prior.batch_shape + prior.event_shape):
                cure = "Pass one such as dist.Normal(0.0, 10.0)."
                fail("LinearMean", "prior", "to be a Pyro distribution of a number", f"{prior!r:.60}", cure, TypeError)
            self.value = PyroSample(prior.expand(shape).to_event(len(shape)))
            self.slope = PyroSample(prior.expand((input_dim, *shape)).to_event(1 + len(shape)))

    def forward(self, x: Tensor) -> Tensor:
        value, slope, x = self.value.to(x.dtype), self.slope.to(x.dtype), x - self.center.to(x)
        return value + ((x * slope).sum(-1) if self._single else x @ slope)

    def basis(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B p"]:
        return torch.cat([torch.ones_like(x[:, :1]), x - self.center.to(x)], -1)

    @torch.no_grad()
    def assign(self, coefficients: Float[Tensor, "p L"]) -> None:
        assign(self, "value", coefficients[0])
        assign(self, "slope", coefficients[1:])

    @torch.no_grad()
    def start(self, level: Float[Tensor, " *L"], spread: Float[Tensor, " *L"], x: Float[Tensor, "N D"]) -> None:
        if self._given_prior and not self.is_set:
            self.is_set, self.center = True, x[0] + (x - x[:1]).mean(0)
        if self.is_set or not self.is_free:
            return
        shape, width = self.value.shape, (x - x[:1]).double().std(0, correction=0)
        width = torch.where(width > 0, width, 1.0).reshape(-1, *[1] * len(shape))
        level, unit = _fitted(level, spread, shape)
        self.center = x[0] + (x - x[:1]).mean(0)
        self.is_set, self.value = True, scaled(level.to(x), unit)
        self.slope = scaled(torch.zeros(x.shape[1], *shape).to(x), unit / width)


def _fitted(level: Tensor, spread: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Levels and spreads for coefficients of a shape: averages where all latent functions share one."""
    if len(shape) < level.dim():
        return level.mean(), spread.square().mean().sqrt()
    return level.expand(shape), spread.expand(shape)


__all__ = ["BasisMean", "ConstantMean", "LinearMean"]
