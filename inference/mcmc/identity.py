"""Identity of a sampling run: digests of all that decides its draws, beside what its checkpoint holds.

Data are every tensor and array that can be reached from the model and from the arguments of the run: through
attributes, containers, closures, defaults and the globals that a function names. Parameters are left out, since they
move. Code is not compared.

Cost: O(size of the data), once per run with a checkpoint.
"""

import hashlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyro_nngp.inference.mcmc.potential import Minibatch


def digest(*parts: Any) -> str:
    """SHA-256 of the tensors, arrays, numbers, strings and minibatch sizes in some objects and what they refer to."""
    total = hashlib.sha256()
    for piece in _pieces(parts, {}):
        total.update(len(piece).to_bytes(8, "little") + piece)
    return total.hexdigest()


def _pieces(value: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    if isinstance(value, (type(None), bool, int, float, complex, str, bytes, torch.dtype)):
        yield repr(value).encode()
        return
    if id(value) in seen or isinstance(value, (nn.Parameter, types.ModuleType, type)):
        return
    seen[id(value)] = value  # a reference, so that no other object gets its id
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.device.type != "meta":
            yield f"{value.dtype}{tuple(value.shape)}".encode()
            yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Minibatch):
        yield f"Minibatch({value.size}, {value.batch_size})".encode()
    else:
        for name, part in _parts(value):
            yield name.encode()
            yield from _pieces(part, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, in an order that does not change between processes."""
    if isinstance(value, dict):
        yield from sorted(((str(key), part) for key, part in value.items()), key=lambda item: item[0])
    elif isinstance(value, (list, tuple)):
        yield from ((str(i), part) for i, part in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _reached(value)
    elif hasattr(value, "__dict__"):
        yield type(value).__qualname__, None
        yield from _parts({k: v for k, v in vars(value).items() if not k.startswith("_pyro_")})


def _reached(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Tensors, arrays, modules and functions in the closure, the defaults and the globals of a user's function."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    found |= {name: function.__globals__[name] for name in names}
    found |= {f"default {i}": part for i, part in enumerate(function.__defaults__ or ())}
    own = function.__module__.partition(".")[0]
    for name, part in sorted(found.items()):
        foreign = isinstance(part, types.FunctionType) and part.__module__.partition(".")[0] != own
        if _holds_data(part) and not foreign:
            yield name, part


def _holds_data(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(map(_holds_data, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (Tensor, np.ndarray, nn.Module, types.FunctionType, types.MethodType))
