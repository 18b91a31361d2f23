"""Files that are replaced atomically: a crash at any moment leaves either the old file or the new one."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pyro_nngp._checks import fail

_DISK = (errno.ENOSPC, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, getattr(errno, "EDQUOT", errno.ENOSPC))
_NEW = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file to write, which replaces `path` once it is on the disk, or is deleted if anything fails.

    Args:
        path: the file; its folder must exist.
    """
    path = Path(path)
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    with disk_errors("writing", path):
        descriptor = os.open(scratch, _NEW, 0o666)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


@contextmanager
def disk_errors(where: str, path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Give errors of a disk that is full or cannot be written a message that names the file and the cure."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK or path is None:
            raise
        expectation, cure = "to be on a disk that can be written, with space left", "Free space, or name another path."
        fail(where, os.fspath(path), expectation, os.strerror(error.errno or 0), cure, type(error), error)


def _sync_folder(folder: Path) -> None:
    """Make the renaming of a file survive a loss of power, where the system supports that."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
