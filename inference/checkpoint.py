"""Checkpoints: one file, replaced atomically, holding tensors and plain containers only, with a digest of its content.

Files are read with ``torch.load(weights_only=True)``, which unpickles no code, so a file from an untrusted source can
fail to load but cannot run anything. The digest detects damage, such as a flipped bit or a missing end, before anything
is loaded.

A file is one line that names the format, one line with the BLAKE2b digest of the rest, and the rest by ``torch.save``.
"""

import contextlib
import glob
import hashlib
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import torch
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._files import atomic_file

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_FORMAT = b"pyro_nngp checkpoint 2\n"  # 1 names the parameters of q(u) "local.*"
DIGEST_SIZE = 32
_HEADER = len(_FORMAT) + 2 * DIGEST_SIZE + 1
_CHUNK = 2**20


class CheckpointError(RuntimeError):
    """A checkpoint could not be read, belongs to another run, or is being written by another process."""


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state` to `path` so that a crash at any moment leaves either the old file or the new one.

    Args:
        path: the file; its folder must exist.
        state: tensors, numbers, strings, and dicts, lists and tuples of them.
    """
    with atomic_file(path) as file:
        file.write(bytes(_HEADER))
        digesting = _DigestingFile(file)
        try:
            torch.save(state, cast(BinaryIO, digesting))  # torch.save only writes and flushes
        except RuntimeError:
            if digesting.error is not None:  # which torch hides behind another error
                raise digesting.error from None
            raise
        file.seek(0)
        file.write(_FORMAT + digesting.digest.hexdigest().encode() + b"\n")


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that :func:`save_checkpoint` wrote, on the CPU.

    Raises:
        CheckpointError: if the file is damaged, is not a checkpoint, or holds anything but tensors and plain
        containers.
        FileNotFoundError: if there is no such file.
    """
    name = os.fspath(path)
    if not stat.S_ISREG(os.stat(path).st_mode):
        _refuse(name, "to be a file", "something else")
    with open(path, "rb") as file:
        header = file.read(_HEADER)
        if not header.startswith(_FORMAT):
            _refuse(name, "to be a checkpoint of this version of the package", f"a file that begins {header[:24]!r}")
        if header[len(_FORMAT) :] != digest_of_rest(file).hex().encode() + b"\n":
            _refuse(name, "to have the digest that it was written with", "another one: the file is damaged")
        file.seek(_HEADER)
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a crafted file can raise errors of many kinds
            what = f"what torch.load(weights_only=True) refuses ({type(error).__name__})"
            _refuse(name, "to hold tensors and plain containers only", what, error)
    if not isinstance(state, dict):
        _refuse(name, "to hold a dict", type(state).__name__)
    return state


@contextmanager
def exclusive_checkpoint(where: str, path: str | os.PathLike[str] | None, arg: str = "checkpoint") -> Iterator[None]:
    """Lock ``<path>.lock``, so that only this run writes the file; the lock ends with the process.

    Unfinished files of killed writers are removed. Does nothing if `path` is None.

    Raises:
        CheckpointError: if another run holds the lock; the error names its process.
        ValueError: if the folder does not exist.
    """
    if path is None or fcntl is None:
        yield
        return
    path = Path(path)
    if not path.parent.is_dir():
        fail(where, arg, "in a folder that exists", str(path), "Make the folder first.")
    lock = path.with_name(path.name + ".lock")
    descriptor = _lock(where, arg, path, lock)
    try:
        for part in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 16}.part"):
            part.unlink(missing_ok=True)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def check_schema(where: str, state: Any, like: Any, at: str = "checkpoint") -> None:
    """Raise ``CheckpointError`` unless `state` has the keys, types, dtypes and shapes of `like`.

    An empty dict or list in `like` may have any content, None may be anything, and numbers are all of one type.
    """
    if like is None:
        return
    if isinstance(like, Tensor):
        same = isinstance(state, Tensor) and state.dtype == like.dtype and state.shape == like.shape
    elif isinstance(like, dict):
        same = isinstance(state, dict) and (not like or state.keys() == like.keys())
    elif isinstance(like, list | tuple):
        same = isinstance(state, list | tuple) and (not like or len(state) == len(like))
    elif isinstance(like, int | float) and not isinstance(like, bool):
        same = isinstance(state, int | float) and not isinstance(state, bool)
    else:
        same = type(state) is type(like)
    if not same:
        refuse_state(where, at, f"to be {_form(like)}", _form(state))
    if isinstance(like, dict):
        for key, value in like.items():
            check_schema(where, state[key], value, f"{at}[{key!r}]")
    elif isinstance(like, list | tuple):
        for i, value in enumerate(like):
            check_schema(where, state[i], value, f"{at}[{i}]")


def refuse_state(where: str, at: str, expectation: str, actual: Any) -> NoReturn:
    """Raise ``CheckpointError`` for content that the run cannot resume from."""
    fail(where, at, expectation, actual, "Delete the file, or name another one.", CheckpointError)


def digest_of_rest(file: BinaryIO) -> bytes:
    """BLAKE2b digest of a file from its present position."""
    digest = _new_digest()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.digest()


class _DigestingFile:
    """A file for ``torch.save`` that also digests everything written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, _new_digest()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _new_digest() -> Any:
    return hashlib.blake2b(digest_size=DIGEST_SIZE)


def _refuse(name: str, expectation: str, actual: str, cause: Exception | None = None) -> NoReturn:
    fail("load_checkpoint", name, expectation, actual, "Delete it, or name another path.", CheckpointError, cause)


def _form(value: Any) -> str:
    """Type of a value, in words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, dict):
        return f"a dict with keys {sorted(map(str, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"of type {type(value).__name__}"


def _lock(where: str, arg: str, path: Path, lock: Path) -> int:
    """An open descriptor of the lock file; the lock is held until it is closed."""
    while True:
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            fail(where, arg, f"to have a lock {lock} that can be written", error, "Remove it.", CheckpointError)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 300).decode(errors="replace") or "another process"
            os.close(descriptor)
            cure = "Wait for it to end, or name another file."
            fail(where, arg, f"{path} to be written by this run alone", owner, cure, CheckpointError)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):  # unless its owner has just removed it
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
        os.close(descriptor)
