r"""Neighbor search by correlation: feature spaces for candidates, and the distance that ranks them.

A sum of products of stationary kernels is expanded, and each product gives one set of features: inputs over
lengthscales for most kernels, and :math:`(\sin, \cos)(2 \pi x / p) / \ell` for periodic ones. Searches in these feature
spaces give candidates, which are ranked by

.. math:: d(x, z) = 1 - |k(x, z)| / \sqrt{k(x, x)\, k(z, z)}

(Kang and Katzfuss 2023). Kernels that map their inputs are evaluated on mapped inputs. Where one lengthscale per column
determines the correlation, :func:`neighbor_lengthscale` suffices, and no ranking is needed.

Cost: O(n D) for features, one covariance per pair. Symbols: F features.

Reference: Kang, Katzfuss (2023), "Correlation-based sparse inverse Cholesky factorization for fast Gaussian-process
inference", Statistics and Computing.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyro_nngp._checks import warn
from pyro_nngp.hyperparameters import freeze, unset_hyperparameters
from pyro_nngp.kernels.base import Kernel, Product, Sum, Wrapper
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.kernels.radial import on_circles
from pyro_nngp.kernels.space_time import Gneiting
from pyro_nngp.kernels.stationary import Periodic, Stationary, neighbor_lengthscale

MOST_STRESSED = 6  # columns that are stressed one by one
_MOST = 4  # feature spaces of single products
_SEEN: "weakref.WeakSet[Kernel]" = weakref.WeakSet()  # kernels that have been checked


class KernelMetric(nn.Module):
    """The metric of a kernel at its present hyperparameters, for :class:`~pyro_nngp.neighbors.NeighborTable`.

    Args:
        kernel: a kernel or any covariance function. Hyperparameters are read once, as by ``bind``.
        x: inputs of the data, whose spread sets the scale of columns without a lengthscale.

    Attributes:
        values: the hyperparameters, as a buffer: a loaded state searches as the saved one did.
    """

    trained_buffers = frozenset({"values"})  # not part of the identity of a run

    values: Tensor
    spread: Tensor

    def __init__(self, kernel: Any, x: Float[Tensor, "N D"]) -> None:
        super().__init__()
        self._held = [freeze(kernel)]  # in a list, so that its parameters are not registered
        self._dtype = x.dtype
        self.register_buffer("spread", column_scale(x))
        self.register_buffer(
            "values", torch.cat([value.flatten().double() for *_, value in self._entries()] or [x[0, :0]])
        )

    @torch.no_grad()
    def features(self, x: Float[Tensor, "n D"]) -> list[Float[Tensor, "n F"]]:
        """Feature spaces to search for candidates; the first combines all parts of the kernel."""
        x = x.double()
        spaces = [list({id(part): (part, at) for part, at in parts}.values()) for parts in _products(self._kernel(), x)]
        parts = list({id(part): (part, at) for space in spaces for part, at in space}.values())
        if not parts:
            return [x / self.spread.double()]
        chosen = [parts, *(space for space in spaces[:_MOST] if space and len(spaces) > 1)]
        return [torch.cat([_features(part, at) for part, at in space], -1) for space in chosen]

    @torch.no_grad()
    def distance(self, x: Float[Tensor, "B D"], z: Float[Tensor, "B m D"]) -> Float[Tensor, "B m"]:
        """One minus the absolute correlation of each x with m points z of its row."""
        cov = bind_double(self._kernel(), self._dtype)
        x, z = x.double(), z.double()
        scale = (cov.diag(x)[:, None] * cov.diag(z)).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
        return 1 - cov(x[:, None], z)[:, 0].abs() / scale

    def _kernel(self) -> Any:
        """The held kernel, with the values of the buffer."""
        kernel, start = self._held[0], 0
        for part, name, value in self._entries():
            new = self.values[start : start + value.numel()].view(value.shape).to(value.dtype)
            start += value.numel()
            if name in part.__dict__:
                part.__dict__[name] = new
            else:
                value.data = new
        return kernel

    def _entries(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Tensors that determine the held kernel: module, name, value."""
        kernel = self._held[0]
        for part in kernel.modules() if isinstance(kernel, nn.Module) else ():
            own = [*getattr(part, "_pyro_params", ()), *getattr(part, "_pyro_samples", ())]
            yield from ((part, name, part.__dict__[name]) for name in own)
            for name, value in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                if name.removesuffix("_unconstrained") not in own:
                    yield part, name, value


def neighbor_metric(kernel: Any, x: Float[Tensor, "N D"]) -> Tensor | KernelMetric:
    """The metric of neighbors for a kernel: lengthscales where they determine the correlation, else a `KernelMetric`.

    For several kernels these are lengthscales from the mean of 1 / l^2; where one of them has none, the metric of the
    first.

    Args:
        kernel: a kernel or any covariance function, or a module list of kernels. Reading it has Pyro effects, as in
            ``bind``.
        x: inputs of the data.
    """
    kernels = list(kernel) if isinstance(kernel, nn.ModuleList) else [kernel]
    lengthscales = [neighbor_lengthscale(each, x.shape[1]) for each in kernels]
    known = [lengthscale for lengthscale in lengthscales if lengthscale is not None]
    if len(known) < len(lengthscales):
        return KernelMetric(kernels[0], x) if lengthscales[0] is None else lengthscales[0]
    return known[0] if len(known) == 1 else torch.stack(known).pow(-2).mean(0).rsqrt()


def column_scale(x: Float[Tensor, "N D"]) -> Float[Tensor, " D"]:
    """Robust standard deviations of the columns in float64: from quartiles, or plain ones where most values coincide.

    A constant column has the scale 1. At most 4,096 evenly spaced rows are used.
    """
    x = x.detach().double()[:: max(1, len(x) // 4096)]
    x = x - x[:1]
    low, high = torch.quantile(x, x.new_tensor([0.25, 0.75]), 0)
    scale, plain = (high - low) / 1.349, x.std(0, correction=0)
    scale = torch.where(scale > plain / 10, scale, plain)
    return torch.where(scale > 0, scale, 1.0)


def stressed(places: Float[Tensor, "N D"], factor: float) -> list[Float[Tensor, "N D"]]:
    """Places in which one of two to six columns counts `factor` times, for each; none for other numbers of columns."""
    columns = places.shape[1]
    if not 1 < columns <= MOST_STRESSED:
        return []
    return [places * scale for scale in 1 + (factor - 1) * torch.eye(columns).to(places)]


def warn_of_unset_lengthscale(where: str, kernel: Any, x: Float[Tensor, "N D"]) -> None:
    """Warn, once for each kernel, of lengthscales that were left unset and are far from the units of their columns.

    Methods start such lengthscales from the data; in a Pyro program they keep the placeholder 1.
    """
    if not isinstance(kernel, Kernel) or kernel in _SEEN:
        return
    _SEEN.add(kernel)
    unset = [part for part, name in unset_hyperparameters(kernel) if name == "lengthscale"]
    if not unset or any(part.moves_inputs for part in kernel.modules() if isinstance(part, Kernel)):
        return
    spread = column_scale(x)
    columns = [d for part in unset if isinstance(part, Stationary) for d in part.active_dims or range(part.input_dim)]
    far = [d for d in columns if not 0.05 < spread[d] < 20]
    if far:
        shown = ", ".join(f"{float(spread[d]):.3g}" for d in far)
        warn(
            f"{where}: a lengthscale of the kernel was left out and is 1, while columns of x have spreads of {shown}. "
            "Give the kernel a start, lengthscale=..., or a prior, in the units of x."
        )


def _products(kernel: Any, x: Tensor) -> list[list[tuple[Stationary | Gneiting, Tensor]]]:
    """Expand a kernel into a sum of products of stationary kernels, each with its inputs; omit other factors."""
    if isinstance(kernel, Stationary):
        return [[(kernel, x)]]
    if isinstance(kernel, Gneiting):
        return [[(kernel.kern, x), (kernel, x)]]
    if isinstance(kernel, Wrapper):
        return _products(kernel.kern, kernel.inner_inputs(x))
    if isinstance(kernel, Sum):
        return _products(kernel.kern0, x) + _products(kernel.kern1, x)
    if isinstance(kernel, Product):
        return [one + two for one in _products(kernel.kern0, x) for two in _products(kernel.kern1, x)]
    return [[]]


def _features(part: Stationary | Gneiting, x: Tensor) -> Tensor:
    if isinstance(part, Gneiting):
        return x[:, part.time_dim, None] / part.read("timescale").double()
    x, scale = part._columns(x), part.read("lengthscale").double()
    if not isinstance(part, Periodic):
        return x / scale
    return on_circles(x, part.read("period").double(), scale)
