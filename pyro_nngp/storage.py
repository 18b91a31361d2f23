"""Trained models in one file, for another process, machine or device: ``gp.save(path)`` and ``pyro_nngp.load(path)``.

The file is in the safetensors format. Tensors are stored unchanged; the objects around them are JSON in its metadata,
each by the name of its class and its attributes, as pickle sees them. No code in the file is run: names are looked up
among the classes of this package, of torch and of Pyro, and among those that the caller passes. A digest of all content
is checked before anything is built.

Cost: O(size of the model), its data and neighbors included.
"""

import copyreg
import functools
import hashlib
import importlib
import json
import math
import os
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from pyro_nngp._checks import check_device, check_path, fail
from pyro_nngp._files import atomic_file
from pyro_nngp._kinds import check_kind

_FORMAT = "pyro_nngp model 3"
_BEFORE = "pyro_nngp model 2"  # f of a negative binomial was the logit: files without one are read
_EARLIER = "pyro_nngp model 1"  # q(u) was the part "local", and its classes had other names
_PACKAGES = ("pyro_nngp.", "pyro.distributions.", "pyro.nn.", "torch.distributions.", "torch.nn.")
_WITHOUT = tuple(f"pyro_nngp.{room}." for room in ("adapters", "data", "inference", "native"))  # act on files, memory
_CALLED = (OrderedDict, functools.partial, getattr, set, frozenset, slice, range, complex, torch.Size)
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class ModelFileError(RuntimeError):
    """A model file is damaged, not a model file, of another version, or names unknown classes."""


def save(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a model, or any of its parts such as a kernel, to a file that :func:`load` reads.

    The file is replaced atomically: a crash at any moment leaves either the old file or the new one.

    Args:
        model: a method of ``pyro_nngp.models``, a kernel, a likelihood, a mean function or a graph.
        path: the file; its folder must exist.

    Raises:
        ModelFileError: if the model holds an object without a name in a module, such as a lambda.
        FileNotFoundError: if the folder does not exist.
        TypeError: if `path` is not a path.
    """
    from safetensors.torch import save as to_bytes  # needed for saving only

    where = f"{type(model).__name__}.save"
    check_path(where, "path", path)
    if not Path(path).parent.is_dir():
        fail(where, "path", "in a folder that exists", str(path), "Make the folder first.", FileNotFoundError)
    writer = _Writer(where)
    structure = {"root": writer.value(model, type(model).__name__), "objects": writer.nodes}
    text = json.dumps(structure, separators=(",", ":"))
    metadata = {"format": _FORMAT, "version": version("pyro-nngp"), "structure": text}
    metadata["digest"] = digest(metadata, writer.tensors)
    with atomic_file(path) as file:
        file.write(to_bytes(writer.tensors, metadata))


def load(
    path: str | os.PathLike[str],
    *,
    custom: Iterable[type | Callable] = (),
    device: torch.device | str = "cpu",
) -> Any:
    """Read a model that :func:`save` wrote.

    Args:
        path: the file.
        custom: the caller's classes and functions that the model was built with, such as a kernel or a mean function.
        device: where its tensors go.

    Returns:
        The model, with data, neighbors and all parameters; its predictions are the same bit for bit.

    Raises:
        ModelFileError: if the file is damaged or not a model file, is of another version of this package, or names
            classes or functions that are not in `custom`.
        FileNotFoundError: if there is no file of that name.
        ValueError: if torch cannot use `device`.
        TypeError: if `path` is not a path.
    """
    from safetensors import SafetensorError, safe_open

    check_path("load", "path", path)
    check_device("load", device)
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise FileNotFoundError(f"load: expected a file, got {name!r}, which does not exist or is none.")
    try:
        with safe_open(name, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        _refuse("load", name, "to be a safetensors file", f"one that is damaged or something else ({error})", error)
    if metadata.get("format") == _EARLIER:
        cure = (
            "Load it with the code that wrote it, store gp.state_dict() by torch.save, and give that to "
            "load_state_dict(..., strict=False) of a method built anew, with 'q.' for 'local.' in its names."
        )
        written = f"{_EARLIER!r}, of pyro_nngp {metadata.get('version')} before its methods were put together anew"
        fail("load", name, f"to be a file of the format {_FORMAT!r}", written, cure, ModelFileError)
    if metadata.get("format") == _BEFORE and "NegativeBinomial" in metadata.get("structure", ""):
        cure = "Fit it again, or load it with the code that wrote it, and predict there."
        written = f"{_BEFORE!r}, with a NegativeBinomial of mean total_count * exp(f), which is exp(f) now"
        fail("load", name, f"to be a file of the format {_FORMAT!r}", written, cure, ModelFileError)
    if metadata.get("format") not in (_FORMAT, _BEFORE):
        _refuse("load", name, f"to be a file of the format {_FORMAT!r}", repr(metadata.get("format")))
    if metadata.pop("digest", None) != digest(metadata, tensors):
        _refuse("load", name, "to have the digest that it was written with", "another one: the file is damaged")
    if _series(metadata["version"]) != _series(version("pyro-nngp")):
        cure = "Install that version, or fit the model anew."
        fail("load", name, f"of version {version('pyro-nngp')}", metadata["version"], cure, ModelFileError)
    structure = json.loads(metadata["structure"])
    reader = _Reader(structure["objects"], {key: value.to(device) for key, value in tensors.items()}, custom, device)
    return reader.value(structure["root"])


class _Writer:
    """Turns objects into JSON, each one once, and collects their tensors."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.nodes: list[Any] = []
        self.tensors: dict[str, Tensor] = {}
        self._seen: dict[int, tuple[int, Any]] = {}

    def value(self, value: Any, path: str) -> Any:
        """JSON of a value, which may be a reference to one of the objects."""
        if isinstance(value, np.generic):  # of settings that were computed with NumPy
            value = value.item()
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return {"name": self._name(value, path)}
        if id(value) not in self._seen:
            number = len(self.nodes)
            self._seen[id(value)] = number, value  # a reference, so that no later object gets its id
            self.nodes.append(None)
            self.nodes[number] = self._node(value, path)
        return {"object": self._seen[id(value)][0]}

    def _node(self, value: Any, path: str) -> Any:
        if isinstance(value, bytes):
            self._refuse(path, "bytes")
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if type(value) is dict:
            return {"dict": self._pairs(value.items(), path)}
        if type(value).__name__ in _SEQUENCES and type(value) in _SEQUENCES.values():
            return {type(value).__name__: [self.value(entry, f"{path}[{i}]") for i, entry in enumerate(value)]}
        try:
            reduced = value.__reduce_ex__(2)
        except TypeError as error:
            self._refuse(path, type(value).__name__, error)
        if not isinstance(reduced, tuple):
            self._refuse(path, type(value).__name__)
        make, args, state, entries, pairs = (*reduced, *[None] * (5 - len(reduced)))[:5]
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            make = None
        elif make not in _CALLED and not isinstance(make, type):
            self._refuse(path, f"{type(value).__name__}, which is made by the function {make.__qualname__}")
        node = {"make": make and self._name(make, path), "args": [self.value(arg, f"{path}.args") for arg in args]}
        if isinstance(state, dict):
            node["state"] = [[key, self.value(part, f"{path}.{key}")] for key, part in state.items()]
        elif state is not None:
            node["setstate"] = self.value(state, path)
        if pairs is not None:
            node["pairs"] = self._pairs(pairs, path)
        if entries is not None and (entries := list(entries)):
            node["entries"] = [self.value(entry, path) for entry in entries]
        return node

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], path: str) -> list[Any]:
        return [[self.value(key, path), self.value(part, f"{path}[{key!r:.40}]")] for key, part in pairs]

    def _tensor(self, value: Tensor, path: str) -> Any:
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            self._refuse(path, f"a {value.layout} tensor of type {type(value).__name__}")
        if value.is_meta:
            fail(
                self.where,
                path,
                "to have values",
                "a meta tensor",
                "Move it with .to_empty() and fill it.",
                ModelFileError,
            )
        key = str(len(self.tensors))
        self.tensors[key] = value.detach().cpu().contiguous().clone()
        return {"tensor": key, "parameter": isinstance(value, nn.Parameter), "grad": value.requires_grad}

    def _name(self, value: Any, path: str) -> list[str]:
        module, name = str(getattr(value, "__module__", "")), getattr(value, "__qualname__", "")
        ours = f"{module}.".startswith(_PACKAGES)
        if not name or "<lambda>" in name or (ours and _lookup(module, name) is not value):
            self._refuse(path, name or repr(value))
        return [module, name]

    def _refuse(self, path: str, actual: str, cause: Exception | None = None) -> NoReturn:
        cure = "Give it a name by class or def, and pass it to load(path, custom=[...])."
        expectation = "to be a tensor, a number, or of a class with a name"
        fail(self.where, path, expectation, actual, cure, ModelFileError, cause)


class _Reader:
    """Builds the objects of a file."""

    def __init__(
        self,
        nodes: list[Any],
        tensors: dict[str, Tensor],
        custom: Iterable[type | Callable],
        device: torch.device | str,
    ) -> None:
        self._nodes, self._tensors, self._device = nodes, tensors, device
        check_kind("load", "custom", custom, (list, tuple, set, frozenset), "a list", "Write custom=[MyKernel].")
        for each in custom:
            if not hasattr(each, "__qualname__"):
                cure = "Write custom=[MyKernel]."
                fail("load", "custom", "to hold classes and functions", type(each).__name__, cure, TypeError)
        self._custom = {(each.__module__, each.__qualname__): each for each in custom}
        self._built: dict[int, Any] = {}

    def value(self, value: Any) -> Any:
        """The value that its JSON describes."""
        if not isinstance(value, dict):
            return value
        (kind, content), *_ = value.items()
        if kind == "object":
            return self._built[content] if content in self._built else self._construct(content)
        if kind == "name":
            return self._named(content)
        if kind == "dtype":
            return getattr(torch, content)
        return torch.device(self._device) if kind == "device" else float(content)

    def _construct(self, number: int) -> Any:
        node = self._nodes[number]
        if "tensor" in node:
            built: Any = self._tensors[node["tensor"]]
            built = nn.Parameter(built, node["grad"]) if node["parameter"] else built.requires_grad_(node["grad"])
            self._built[number] = built
            return built
        if "dict" in node:
            built = self._built[number] = {}
            built.update((self.value(key), self.value(part)) for key, part in node["dict"])
            return built
        for kind, make in _SEQUENCES.items():
            if kind == "list" and kind in node:  # may hold itself
                built = self._built[number] = []
                built.extend(map(self.value, node[kind]))
                return built
            if kind in node:
                self._built[number] = make(map(self.value, node[kind]))
                return self._built[number]
        return self._object(number, node)

    def _object(self, number: int, node: dict[str, Any]) -> Any:
        args = [self.value(arg) for arg in node["args"]]
        if node["make"] is None:
            built = args[0].__new__(*args)
        else:
            make = self._named(node["make"])
            hidden = make is getattr and str(args[1]).startswith("__")
            if hidden or (make not in _CALLED and not isinstance(make, type)):
                self._refuse(node["make"])
            built = make(*args)
        self._built[number] = built
        if "state" in node:
            state = {key: self.value(part) for key, part in node["state"]}
            if hasattr(type(built), "__setstate__"):
                built.__setstate__(state)
            else:
                built.__dict__.update(state)
        if "setstate" in node:
            built.__setstate__(self.value(node["setstate"]))
        for key, part in node.get("pairs", ()):
            built[self.value(key)] = self.value(part)
        for entry in node.get("entries", ()):
            built.append(self.value(entry))
        return built

    def _named(self, name: list[str]) -> Any:
        module, qualname = name
        if (module, qualname) in self._custom:
            return self._custom[module, qualname]
        for each in _CALLED:
            if (each.__module__, each.__qualname__) == (module, qualname):
                return each
        within = f"{module}."
        if not within.startswith(_PACKAGES) or within.startswith(_WITHOUT):
            self._refuse(name)
        value = _lookup(module, qualname)
        if value is None:
            self._refuse(name)
        return value

    def _refuse(self, name: list[str]) -> NoReturn:
        actual, cure = ".".join(name), f"Import it and pass load(path, custom=[{name[1]}])."
        fail(
            "load", "the model", "of classes of pyro_nngp, torch and Pyro, or custom ones", actual, cure, ModelFileError
        )


def _lookup(module: str, qualname: str) -> Any:
    """The class or function of that name that is defined in that module; None if there is none."""
    try:
        value: Any = importlib.import_module(module)
        for part in qualname.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError):
        return None
    home = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return value if home == (module, qualname) else None


def digest(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """BLAKE2b digest of metadata and tensors."""
    hasher = hashlib.blake2b(digest_size=32)
    for key in sorted(metadata):
        hasher.update(f"{key}\n{metadata[key]}\n".encode())
    for key in sorted(tensors):
        value = tensors[key]
        hasher.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _series(of: str) -> list[str]:
    """Major and minor version: a file is valid for one such series."""
    return of.split(".")[:2]


def _refuse(where: str, name: str, expectation: str, actual: str, cause: Exception | None = None) -> NoReturn:
    fail(where, name, expectation, actual, "Save the model again, or name another file.", ModelFileError, cause)


__all__ = ["ModelFileError", "load", "save"]
