"""A device that only pretends to be one, so that mixed devices are found on machines without an accelerator.

Tensors made or moved there compute on the CPU but report another device, and like CUDA tensors refuse to meet CPU
tensors in one operation. Its name is "meta", the one device type besides "cpu" that every build of torch knows.
"""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
_aten = torch.ops.aten
_CROSSING = {_aten._to_copy.default, _aten.copy_.default}  # may read one device and write another
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


class Elsewhere(torch.Tensor):
    """A tensor on the pretended device: `here` has its values on the CPU."""

    @staticmethod
    def __new__(cls, here):
        return torch.Tensor._make_wrapper_subclass(
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device=DEVICE
        )

    def __init__(self, here):
        self.here = here

    def __repr__(self):
        return f"Elsewhere({self.here!r})"

    def tolist(self):
        return self.here.tolist()

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new):  # by which Pyro sets parameters, to other shapes too
        torch.Tensor.data.__set__(self, new)
        self.here = new.here

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """Makes tensors from Python numbers, which torch does before it dispatches anything."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.new_tensor and isinstance(args[0], Elsewhere):
            return torch.tensor(args[1], **{"dtype": args[0].dtype} | kwargs).to(DEVICE)
        if func in (torch.tensor, torch.as_tensor) and _is_there(kwargs.get("device")):
            return func(*args, **kwargs | {"device": None}).to(DEVICE)
        return func(*args, **kwargs)


@contextmanager
def pretended_device():
    """Context in which `DEVICE` works."""
    with _Operations(), _Literals():
        yield


def _is_there(device):
    return device is not None and torch.device(device).type == DEVICE.type


def _map(function, value):
    """Apply a function to the tensors among the arguments or results of an operation; quicker than a pytree."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_map(function, part) for part in value)
    if type(value) is dict:
        return {name: _map(function, part) for name, part in value.items()}
    return value


def _run(func, args, kwargs):
    leaves = []
    values, keywords = _map(lambda v: leaves.append(v) or getattr(v, "here", v), (args, kwargs))
    there = any(isinstance(leaf, Elsewhere) for leaf in leaves)
    if func not in _CROSSING and there:
        _refuse_mixed(func, args, leaves)
    wanted = kwargs.get("device")
    if wanted is not None:
        there = _is_there(wanted)
        if there and kwargs.get("generator") is not None:
            raise RuntimeError(f"{func}: expected a generator of that device, got the CPU's")
        keywords |= {"device": torch.device("cpu")}
    result = func(*values, **keywords)
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], Elsewhere):
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)  # the new shape for the wrapper, too
    if func is _aten.copy_.default:
        return args[0]
    if not there:
        return result
    known = {id(leaf.here): leaf for leaf in leaves if isinstance(leaf, Elsewhere)}  # in-place results stay themselves

    def wrapped(value):
        return known.get(id(value), Elsewhere(value)) if isinstance(value, torch.Tensor) else value

    return _map(wrapped, result)


def _refuse_mixed(func, args, leaves):
    if func in _INDEXING and isinstance(args[0], Elsewhere):  # indices and values may come from the CPU, as on CUDA
        leaves = [args[0]]
    if any(not isinstance(leaf, Elsewhere) and leaf.dim() > 0 for leaf in leaves):
        devices = ", ".join("there" if isinstance(leaf, Elsewhere) else f"cpu {tuple(leaf.shape)}" for leaf in leaves)
        raise RuntimeError(f"{func}: expected all tensors on one device, got {devices}")
