"""The identity of a run: short descriptions by name. A run can continue another only if their descriptions agree.

It covers everything that a model, a guide, an ELBO or a sampler holds or refers to: classes, settings, data, priors,
functions with their code, closures and the globals they use. Values that training changes are covered by shape only:
parameters, and buffers that refreshing or solving replaces (named in a module's ``trained_buffers``). Large contents
are described by their BLAKE2b digest. Cost: one pass over the data.
"""

import dataclasses
import functools
import hashlib
import re
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform

from pyro_nngp._checks import fail
from pyro_nngp.distributed import ShardedData, World
from pyro_nngp.distributed.world import ProcessError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice, range)
_LIBRARIES = {"builtins", "functools", "jaxtyping", "math", "numpy", "pyro", "pyro_nngp", "scipy", "torch"}
_TRAINED = {"neighbors", "lengthscale", "pattern", "running_mean", "running_var", "num_batches_tracked"}
_OF_MODULES = {*vars(nn.Module()), "_pyro_context", "_pyro_name", "_store", "sparse_grad"}
_KEPT = {"_pyro_params", "_pyro_samples", "_metric"}  # private attributes of the package's modules that count
_ROWS = re.compile(r"\.(x|y|offset|weights|trials|limits|neighbors|data_neighbors)$|graph\.(context|rank)$")
_Q = re.compile(r"\bq\.\w+$")
_SHOWN = 4  # differences named in a message


def identity(**parts: Any) -> dict[str, str]:
    """Descriptions of all parts of a run by path, such as ``{"model.kernel": "...Matern52"}``."""
    leaves: dict[str, str] = {}
    seen: dict[int, tuple[str, Any]] = {}
    for name, part in parts.items():
        _describe(part, name, leaves, seen)
    return leaves


def described(descriptions: dict[str, str], shard: ShardedData) -> dict[str, str]:
    """The descriptions of a method on several processes, with a digest of all rows in place of the local ones."""
    shared = {
        name: text for name, text in descriptions.items() if not _ROWS.search(name) and not _of_rows_of_q(name, text)
    }
    return shared | {"data": f"{shard.digest():x}"}


def _of_rows_of_q(name: str, text: str) -> bool:
    """Whether a description is of a tensor of q(u), which has a row per datum."""
    return bool(_Q.search(name)) and text.lstrip("'").startswith("torch.")


def differences(one: dict[str, str], other: dict[str, str]) -> str:
    """Text with the names and descriptions that differ; empty if none do."""
    names = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    shown = [f"{name} = {one.get(name, 'nothing')} and not {other.get(name, 'nothing')}" for name in names[:_SHOWN]]
    rest = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join(shown + rest)


def check_same_run(where: str, world: World, descriptions: dict[str, str]) -> None:
    """Raise on all processes unless each has the same descriptions of a run.

    Args:
        where: name of the caller.
        world: the processes.
        descriptions: settings, and digests of starting values, by name.

    Raises:
        ProcessError: names what differs.
    """
    if world.size == 1:
        return
    codes = {name: code_of(f"{name} = {text}") for name, text in descriptions.items()}
    found, counts = world.gather(torch.tensor(list(codes.values()))).unique(return_counts=True)
    odd = set(found[counts != world.size].tolist())
    if not odd:
        return
    names = [f"{name} = {descriptions[name]:.80}" for name, code in codes.items() if code in odd]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    actual = f"on process {world.rank} and not on all, {shown or 'less than on others'}"
    cure = "Give all the same arguments, and seed what is drawn at random, such as the weights of a network."
    fail(where, "settings and starting values", "to be those of all processes", actual, cure, ProcessError)


def code_of(text: str) -> int:
    """A digest of a text in 63 bits."""
    return int(digest(text.encode())[:16], 16) >> 1


def _describe(value: Any, path: str, leaves: dict[str, str], seen: dict[int, tuple[str, Any]]) -> None:
    """Add the descriptions of a value and of everything it refers to."""
    if isinstance(value, _PLAIN):
        leaves[path] = repr(value)
        return
    if isinstance(value, types.MethodType):
        leaves[f"{path}()"] = value.__func__.__qualname__
        value = value.__self__
    if id(value) in seen:
        leaves[path] = f"the same as {seen[id(value)][0]}"
        return
    seen[id(value)] = path, value  # a reference, so that no later object gets its id
    if isinstance(value, Tensor):
        leaves[path] = _tensor(value)
        return
    if isinstance(value, np.ndarray):
        leaves[path] = f"{value.dtype} {value.shape} {digest(np.ascontiguousarray(value).tobytes())}"
        return
    for name, part in _parts(value, path, leaves).items():
        _describe(part, f"{path}.{name}", leaves, seen)


def _parts(value: Any, path: str, leaves: dict[str, str]) -> dict[str, Any]:
    """The parts of a value by name; adds the description of the value itself."""
    leaves[path] = _name(type(value))
    if isinstance(value, dict):
        return {str(key): part for key, part in value.items()}
    if isinstance(value, list | tuple):
        return {str(i): part for i, part in enumerate(value)}
    if isinstance(value, set | frozenset):
        return {str(i): part for i, part in enumerate(sorted(value, key=repr))}
    if isinstance(value, nn.Module):
        return _module(value)
    if isinstance(value, Distribution):
        names = [*value.arg_constraints, "base_dist", "reinterpreted_batch_ndims", "transforms", "total_count"]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, types.FunctionType):
        leaves[path] = f"{_name(value)} {'' if _of_library(value) else _code(value.__code__)}".strip()
        return _function(value)
    if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
        leaves[path] = _name(value)
        return {}
    return _plain(value, getattr(value, "__dict__", {}))


def _module(module: nn.Module) -> dict[str, Any]:
    attributes = {name: part for name, part in vars(module).items() if name not in _OF_MODULES}
    if type(module).__module__.startswith("pyro_nngp."):  # other private attributes hold what is computed on the way
        attributes = {name: part for name, part in attributes.items() if name in _KEPT or not name.startswith("_")}
    else:
        attributes = _plain(module, attributes)
    trained = _TRAINED | getattr(type(module), "trained_buffers", frozenset())
    buffers = {name: f"{_shape(b)}" if name in trained and b is not None else b for name, b in module._buffers.items()}
    return attributes | dict(module._parameters) | buffers | dict(module._modules)


def _plain(value: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes of an object: all for a user's class, public numbers, strings and settings for a library's class."""
    if not _of_library(type(value)):
        return attributes
    kept = (*_PLAIN, Tensor, Transform, list) if isinstance(value, Transform) else _PLAIN
    public = {name: part for name, part in attributes.items() if not name.startswith("_")}
    return {name: part for name, part in public.items() if isinstance(part, kept) or _is_setting(part)}


def _is_setting(value: Any) -> bool:
    return isinstance(value, types.FunctionType) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _function(function: types.FunctionType) -> dict[str, Any]:
    """Defaults, closure, and the globals used in the code of a user's function."""
    parts: dict[str, Any] = {"defaults": function.__defaults__, "kwdefaults": function.__kwdefaults__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        parts[name] = _contents(cell)
    if not _of_library(function):
        for name in sorted(_names(function.__code__) & function.__globals__.keys()):
            used = function.__globals__[name]
            ours = isinstance(used, types.FunctionType) and not _of_library(used)
            if ours or isinstance(used, (*_PLAIN, Tensor, np.ndarray, nn.Module, dict, list, tuple)):
                parts[name] = used
    return parts


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _names(code: types.CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _code(code: types.CodeType) -> str:
    consts = [_code(const) if isinstance(const, types.CodeType) else repr(const) for const in code.co_consts]
    return digest(repr((code.co_code, code.co_names, consts)).encode())


def _tensor(value: Tensor) -> str:
    """Shape and dtype of a trained value, the content of any other."""
    if value.requires_grad or value.layout != torch.strided or value.device.type == "meta":
        return f"{_shape(value)} {'trained' if value.requires_grad else value.layout}"
    content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{_shape(value)} {digest(content.data)}"


def _shape(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)}"


def digest(content: Any) -> str:
    """Digest of some bytes, 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _of_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] in _LIBRARIES
