"""Text descriptions of hyperparameters, as ``print(kernel)`` shows them.

Reading them has no Pyro effects, so that printing within a program is harmless. Cost: O(hyperparameters).
"""

from collections.abc import Collection, Iterator

from pyro.nn import PyroModule
from torch import Tensor
from torch.distributions import Distribution, transform_to

from pyro_nngp._wrappers import base_distribution

_SHOWN = 6  # entries of a vector; longer ones show their shape and range


def describe(module: PyroModule, unset: Collection[str] = ()) -> str:
    """Hyperparameters of a module without its submodules, such as ``lengthscale=[0.2, 0.4], variance~LogNormal``.

    Args:
        module: any Pyro module.
        unset: names whose values are placeholders.
    """
    values = [f"{name} unset" if name in unset else f"{name}={show(value)}" for name, value in parameters(module)]
    return ", ".join(values + [f"{name}~{prior_name(module, name)}" for name in module._pyro_samples])


def parameters(module: PyroModule) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the ``PyroParam`` attributes of a module, without its submodules."""
    for name, (constraint, _) in module._pyro_params.items():
        yield name, transform_to(constraint)(module._parameters[f"{name}_unconstrained"].detach())


def prior_name(module: PyroModule, name: str) -> str:
    """The class of the distribution of a ``PyroSample`` attribute."""
    prior = base_distribution(module._pyro_samples[name], unmask=False)
    return type(prior).__name__ if isinstance(prior, Distribution) else "a function of the module"


def show(value: Tensor) -> str:
    """Four digits of each entry, or shape and range of a tensor that is longer than a line."""
    if value.dim() == 0:
        return f"{value.item():.4g}"
    if value.dim() == 1 and len(value) <= _SHOWN:
        return f"[{', '.join(f'{entry:.4g}' for entry in value.tolist())}]"
    return f"{value.min().item():.4g}..{value.max().item():.4g} {tuple(value.shape)}"


def show_kind(x: Tensor) -> str:
    """Dtype and device, such as ``float32 on cpu``."""
    return f"{str(x.dtype).removeprefix('torch.')} on {x.device}"
