"""Checkpoints: one file, replaced atomically, holding tensors and plain containers only.

Files are read with ``torch.load(weights_only=True)``, which unpickles no code, so a file from an untrusted source can
fail to load but cannot run anything.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import torch


class CheckpointError(RuntimeError):
    """A checkpoint could not be read, or belongs to another run."""


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state` to `path` so that a crash at any moment leaves either the old file or the new one.

    Args:
        path: the file; its folder must exist.
        state: tensors, numbers, strings, and dicts, lists and tuples of them.
    """
    path = Path(path)
    scratch = path.with_name(path.name + ".part")
    with open(scratch, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, on the CPU.

    Raises:
        CheckpointError: if the file holds anything but tensors and plain containers, or is damaged.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"load_checkpoint: expected {os.fspath(path)} to hold tensors and plain containers only, got a file "
            "that torch.load(weights_only=True) refuses. Delete it, or name another path."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"load_checkpoint: expected {os.fspath(path)} to hold a dict, got {type(state).__name__}."
        )
    return state
