"""Checkpoints of several processes, in a folder by ``torch.distributed.checkpoint``.

Each write is a numbered subfolder, complete once it has the file with the digests of all others; the last complete one
counts, and older ones are removed after it. A process that dies at any moment leaves the last complete one. All
processes must see the folder. Digests are compared before anything is read, each file by one process.

All content is tensors: the state that all processes share and the state of each process as bytes of ``torch.save``,
read with ``weights_only``; and parameters with a row per datum as sharded tensors in the order of the data, which any
number of processes can read. The index of ``torch.distributed.checkpoint`` is a pickle: read only folders that you
wrote.
"""

import io
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pyro_nngp._checks import fail
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.world import Route
from pyro_nngp.inference.checkpoint import (
    DIGEST_SIZE,
    CheckpointError,
    digest_of_rest,
    load_checkpoint,
    save_checkpoint,
)

_INDEX, _DIGESTS = ".metadata", "digests.pt"
_NAME_SIZE = 64  # bytes of the name of a file
_FOLDER, _FILE = re.compile(r"\d{6,}"), re.compile(r"__\d+_\d+\.distcp|\.metadata.*|digests\.pt.*")


class ShardedCheckpoint:
    """A folder of checkpoints; all processes must call each method at the same time.

    Args:
        path: the folder.
        data: the rows of the processes.
    """

    def __init__(self, path: Any, data: ShardedData) -> None:
        self._path, self._data, self._world = Path(path), data, data.world
        if self._path.exists() and (not self._path.is_dir() or set(self._path.iterdir()) - set(self._folders())):
            cure = "Name a folder of its own, which is made if it does not exist."
            fail("fit", "checkpoint", "to be a folder of checkpoints alone", str(path), cure, CheckpointError)
        self._alone = self._world.size == 1

    def exists(self) -> bool:
        """Whether there is a complete checkpoint."""
        return self._last() is not None

    def save(self, shared: dict[str, Any], local: dict[str, Any], rows: dict[str, Tensor]) -> None:
        """Write a checkpoint, and remove older ones.

        Args:
            shared: state that is the same on all processes: tensors and plain containers.
            local: state of this process.
            rows: tensors of the local rows, (n, ...).
        """
        last = self._last()
        folder = self._path / f"{0 if last is None else int(last.name) + 1:06d}"
        if self._world.rank == 0 and folder.exists():  # of a process that died while it wrote
            shutil.rmtree(folder)
        self._world.barrier()
        state = {"shared": _bytes(shared), self._local_key: _bytes(local)}
        state |= {f"rows.{name}": self._sharded(self._to_blocks(values)) for name, values in rows.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dcp.save(state, checkpoint_id=folder, no_dist=self._alone)
            except CheckpointException as error:
                self._fail_to_write("; ".join(str(cause) for cause, _ in error.failures.values()), error)
        files = sorted(folder.glob(f"__{self._world.rank}_*"))
        digests = self._world.gather(_digest_rows([*files, *([folder / _INDEX] if self._world.rank == 0 else [])]))
        if self._world.rank == 0:
            try:
                save_checkpoint(folder / _DIGESTS, _by_name(digests))
            except OSError as error:
                self._fail_to_write(str(error), error)
        self._world.barrier()
        if self._world.rank == 0:
            for older in self._folders():
                if older != folder:
                    shutil.rmtree(older)

    def load(self, like: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
        """The last complete checkpoint: shared state, local state, and tensors of the local rows.

        Args:
            like: local state to use for a checkpoint of another number of processes.

        Raises:
            CheckpointError: if a file is damaged, on all processes.
        """
        folder = cast(Path, self._last())
        self._check(folder)
        index = dcp.FileSystemReader(folder).read_metadata()
        sizes = cast(dict[str, TensorStorageMetadata], index.state_dict_metadata)
        state: dict[str, Any] = {}
        for name, entry in sizes.items():
            if name in ("shared", self._local_key):
                state[name] = torch.empty(entry.size, dtype=torch.uint8)
            elif name.startswith("rows."):
                shape = (self._num_block, *entry.size[1:])
                state[name] = self._sharded(torch.empty(shape, dtype=entry.properties.dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=folder, no_dist=self._alone)
        shared = _content(state.pop("shared"))
        local = _content(state.pop(self._local_key)) if self._local_key in state else like
        return shared, local, {name.removeprefix("rows."): self._from_blocks(values) for name, values in state.items()}

    @property
    def _local_key(self) -> str:
        return f"process {self._world.rank} of {self._world.size}"

    def _folders(self) -> list[Path]:
        folders = [each for each in self._path.glob("*") if _FOLDER.fullmatch(each.name) and each.is_dir()]
        return sorted(each for each in folders if all(_FILE.fullmatch(file.name) for file in each.iterdir()))

    def _fail_to_write(self, causes: str, error: BaseException) -> NoReturn:
        cure = f"Make {self._path} a folder that can be written, with space left."
        fail("fit", "a checkpoint", "to be written by all processes", causes, cure, CheckpointError, error)

    def _check(self, folder: Path) -> None:
        """Raise ``CheckpointError`` on all processes unless all files have the digests that they were written with."""
        saved = load_checkpoint(folder / _DIGESTS)
        names = sorted(saved)[self._world.rank :: self._world.size]
        bad = [name for name in names if not (folder / name).is_file() or _digest(folder / name).hex() != saved[name]]
        number = self._world.max(1 + sorted(saved).index(bad[0]) if bad else 0)
        if number:
            name, cure = str(folder / sorted(saved)[number - 1]), "Delete the folder, or name another one."
            actual = "another one: the file is damaged"
            fail("load_checkpoint", name, "to have the digest that it was written with", actual, cure, CheckpointError)

    def _last(self) -> Path | None:
        """The last complete checkpoint, as the first process sees it."""
        numbers = [int(each.name) + 1 for each in self._folders() if (each / _DIGESTS).exists()]
        count = self._world.max(max(numbers, default=0) if self._world.rank == 0 else 0)
        return self._path / f"{count - 1:06d}" if count else None

    def _sharded(self, block: Tensor) -> Tensor:
        """The part of a sharded tensor in the order of the data that a block of rows is."""
        if self._alone:
            return block
        mesh = init_device_mesh("cpu", (self._world.size,))
        shape = torch.Size((self._data.num_rows, *block.shape[1:]))
        like = torch.empty(shape, device="meta")
        return DTensor.from_local(block, mesh, [Shard(0)], shape=shape, stride=like.stride(), run_check=False)

    def _to_blocks(self, values: Tensor) -> Tensor:
        """Values at the rows of this process's block, from the local rows of all processes."""
        route, places = self._route()
        block = values.new_empty((self._num_block, *values.shape[1:]), device="cpu")
        block[places] = route.forward(values.detach().cpu())
        return block

    def _from_blocks(self, block: Tensor) -> Tensor:
        """The inverse of :meth:`_to_blocks`."""
        block = block.to_local() if isinstance(block, DTensor) else block
        route, places = self._route()
        return route.back(block[places])

    @property
    def _num_block(self) -> int:
        start, stop = self._data.block
        return stop - start

    def _route(self) -> tuple[Route, Tensor]:
        """The route of local rows to the blocks, and the positions in this process's block of the rows that arrive."""
        route = Route(self._world, self._data.rows // self._data.block_size)
        return route, route.forward(self._data.rows) - self._data.block[0]


def _digest(file: Path) -> bytes:
    with file.open("rb") as content:
        return digest_of_rest(content)


def _digest_rows(files: list[Path]) -> Tensor:
    """Names and digests of files as a row of bytes each."""
    rows = [list(file.name.encode().ljust(_NAME_SIZE, b"\0") + _digest(file)) for file in files]
    return torch.tensor(rows, dtype=torch.uint8).view(-1, _NAME_SIZE + DIGEST_SIZE)


def _by_name(rows: Tensor) -> dict[str, str]:
    """The digests of files by name, from their rows."""
    texts = [bytes(row.tolist()) for row in rows]
    return {text[:_NAME_SIZE].rstrip(b"\0").decode(): text[_NAME_SIZE:].hex() for text in texts}


def _bytes(state: dict[str, Any]) -> Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _content(values: Tensor) -> dict[str, Any]:
    return torch.load(io.BytesIO(values.numpy().tobytes()), map_location="cpu", weights_only=True)
