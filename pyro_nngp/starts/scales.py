"""Step 2 of :mod:`pyro_nngp.starts.from_data`: hyperparameters from the spread of inputs and observations."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_nngp.hyperparameters import freeze
from pyro_nngp.kernels import (
    Gneiting,
    Kernel,
    Periodic,
    Product,
    Stationary,
    Sum,
    Wrapper,
    bind,
)
from pyro_nngp.kernels.metric import column_scale


class Slot(NamedTuple):
    """A hyperparameter of a frozen copy."""

    part: nn.Module
    name: str

    @property
    def constraint(self) -> Any:
        """The values that it may have."""
        return cast(PyroModule, self.part)._pyro_params[self.name][0]  # a copy, as the part is


def moved(module: Any, device: torch.device) -> Any:
    """A frozen module on another device."""
    for part in module.to(device).modules():
        part.__dict__.update({name: v.to(device) for name, v in part.__dict__.items() if isinstance(v, Tensor)})
    return module


def frozen_copy(
    kernel: Any, open_kernel: Sequence[tuple[nn.Module, str]], device: torch.device, at: Any = None
) -> tuple[Any, list[Slot]]:
    """A frozen copy in float64, and its hyperparameters to start; `at` are values of priors."""
    work = freeze(kernel, at)
    if not isinstance(work, nn.Module):
        return work, []
    places = {id(part): i for i, part in enumerate(kernel.modules())}
    parts = list(moved(work, device).double().modules())
    return work, [Slot(parts[places[id(part)]], name) for part, name in open_kernel]


def put_back(open_kernel: Sequence[tuple[nn.Module, str]], slots: Sequence[Slot], x: Tensor) -> None:
    """Copy the started values into the kernel."""
    for (part, name), slot in zip(open_kernel, slots, strict=True):
        setattr(part, name, slot.part.__dict__[slot.name].detach().to(x))


def place_scales(kernel: Any, slots: Sequence[Slot], x: Tensor, obs: Tensor | None, variance: float) -> None:
    """Step 2: lengthscales and periods from the columns, variances from the observations."""
    places, uses = dict(_inputs_of_parts(kernel, x)), defaultdict[tuple[int, int], int](int)
    inside = isinstance(kernel, Kernel)
    for part, name in slots:
        value, at = part.__dict__[name].double(), places.get(id(part), x)
        if name == "lengthscale" and isinstance(part, Stationary) and inside and not isinstance(part, Periodic):
            columns = list(part.active_dims or range(part.input_dim))
            value = column_scale(at)[columns] * len(columns) ** 0.5 / 4.0 ** max(uses[id(at), d] for d in columns)
            value = value.log().mean().exp() if part.isotropic else value
            for d in columns:
                uses[id(at), d] += 1
        elif name == "timescale" and isinstance(part, Gneiting):
            value = column_scale(at)[part.time_dim]
        elif name == "lengthscale" and isinstance(part, Stationary):
            value = value if part.isotropic else value.expand(part.input_dim)
        elif name == "period" and isinstance(part, Periodic) and inside:
            columns = list(part.active_dims or range(part.input_dim))
            value = torch.stack([_period(at[:, d], obs) for d in columns])
        part.__dict__[name] = value.clone()
    _place_variances(kernel, {(id(part), name) for part, name in slots}, variance, x[:512])


def inputs_of(kernel: Any, part: Any, x: Tensor) -> Tensor:
    """The inputs that a part of a kernel sees."""
    return dict(_inputs_of_parts(kernel, x)).get(id(part), x)


def _inputs_of_parts(kernel: Any, x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The inputs that each part of a kernel sees, by the identity of the part."""
    yield id(kernel), x
    if isinstance(kernel, Sum | Product):
        yield from _inputs_of_parts(kernel.kern0, x)
        yield from _inputs_of_parts(kernel.kern1, x)
    elif isinstance(kernel, Wrapper):
        yield from _inputs_of_parts(kernel.kern, kernel.inner_inputs(x))


def _place_variances(kernel: Any, free: set[tuple[int, str]], target: float, x: Tensor) -> None:
    """Set the free variances of a kernel, or of its parts, so that its average variance is the target."""
    if isinstance(kernel, Sum | Product):
        parts = [kernel.kern0, kernel.kern1]
        open_parts = [part for part in parts if any((id(sub), "variance") in free for sub in part.modules())]
        fixed = [_mean_variance(part, x) for part in parts if part not in open_parts]
        if isinstance(kernel, Sum):
            target = max(target - sum(fixed), target / 10) / max(1, len(open_parts))
        else:
            target = (target / math.prod(fixed)) ** (1 / max(1, len(open_parts)))
        for part in open_parts:
            _place_variances(part, free, target, x)
    elif isinstance(kernel, Wrapper):
        at = kernel.inner_inputs(x)
        gain = _mean_variance(kernel, x) / _mean_variance(kernel.kern, at)
        _place_variances(kernel.kern, free, target / gain, at)
    elif isinstance(kernel, Kernel):
        if (id(kernel), "variance") in free:
            kernel.__dict__["variance"] = x.new_ones(())
            kernel.__dict__["variance"] = x.new_tensor(target / _mean_variance(kernel, x))
    elif isinstance(kernel, nn.Module):
        inner = [part for part in kernel.modules() if (id(part), "variance") in free]
        for each in inner:
            each.__dict__["variance"] = x.new_ones(())
        variance = x.new_tensor(target / _mean_variance(kernel, x))
        for each in inner:
            each.__dict__["variance"] = variance


def _mean_variance(kernel: Any, x: Tensor) -> float:
    return max(float(bind(kernel).diag(x).mean()), torch.finfo(torch.float32).tiny)


def _period(column: Tensor, obs: Tensor | None) -> Tensor:
    """The period of the highest peak of a periodogram, between the spacing of four points and half of the range."""
    t = (column[:1024] - column.min()).cpu().numpy()
    span = float(t.max())
    if span == 0 or obs is None:
        return column.new_tensor(span / 4 or 1.0)
    values = obs[0, :1024].cpu().numpy()
    frequencies = np.linspace(2, max(3, len(np.unique(t)) // 4), 2048) / span
    from scipy.signal import lombscargle  # takes half a second to import, and few kernels have periods

    power = lombscargle(t, values - values.mean(), 2 * np.pi * frequencies)
    return column.new_tensor(1 / frequencies[power.argmax()])
