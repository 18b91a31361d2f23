"""Hyperparameters of a program as one vector in unconstrained space, and back.

Symbols: h hyperparameters in unconstrained space.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import biject_to


@dataclass(frozen=True)
class Unconstrained:
    """A map between values of sites by name and one vector (h,).

    Attributes:
        names: the sites.
        supports: their supports.
        shapes: their shapes in unconstrained space.
        event_dims: numbers of dimensions of their events.
    """

    names: Sequence[str]
    supports: Sequence[Any]
    shapes: Sequence[torch.Size]
    event_dims: Sequence[int]

    @classmethod
    def of(cls, sites: Mapping[str, Any], names: Sequence[str]) -> tuple["Unconstrained", Tensor]:
        """The map of some sites of a trace, and the vector of their values there."""
        parts = [biject_to(sites[name]["fn"].support).inv(sites[name]["value"].detach()) for name in names]
        fns = [sites[name]["fn"] for name in names]
        space = cls(names, [fn.support for fn in fns], [part.shape for part in parts], [fn.event_dim for fn in fns])
        return space, torch.cat([part.flatten() for part in parts]) if parts else torch.zeros(0)

    def unpack(self, latent: Float[Tensor, " h"]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Names, unconstrained values and values of the sites."""
        if not self.names:
            return
        parts = latent.split([shape.numel() for shape in self.shapes])
        for name, shape, support, part in zip(self.names, self.shapes, self.supports, parts, strict=True):
            yield name, part.reshape(shape), biject_to(support)(part.reshape(shape))

    def values(self, latent: Float[Tensor, " h"]) -> dict[str, Tensor]:
        """Values by name."""
        return {name: value for name, _, value in self.unpack(latent)}

    def volume(self, latent: Float[Tensor, " h"]) -> float:
        """Log determinant of the map to the values."""
        return sum(
            float(biject_to(support).log_abs_det_jacobian(part, value).sum())
            for support, (_, part, value) in zip(self.supports, self.unpack(latent), strict=True)
        )

    def densities(self, latent: Float[Tensor, " h"]) -> dict[str, Tensor]:
        """Log determinants of the maps from values, by name, in the batch shape of each site."""
        densities: dict[str, Tensor] = {}
        for (name, part, value), support, dim in zip(self.unpack(latent), self.supports, self.event_dims, strict=True):
            density, own = biject_to(support).inv.log_abs_det_jacobian(value, part), value.dim() - dim
            densities[name] = density.flatten(own).sum(-1) if density.dim() > own else density
        return densities
