"""Checkpoints of several processes, in a folder by ``torch.distributed.checkpoint``.

Each write is a numbered subfolder, complete once it has its ``.metadata``; the last complete one counts, and older ones
are removed after it. A process that dies at any moment leaves the last complete one. All processes must see the folder.

All content is tensors: the state that all processes share and the state of each process as bytes of ``torch.save``,
read with ``weights_only``; and parameters with a row per datum as sharded tensors in the order of the data, which any
number of processes can read. The index of ``torch.distributed.checkpoint`` is a pickle: read folders of your own only.
"""

import io
import shutil
import warnings
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.world import Route

_COMPLETE = ".metadata"


class ShardedCheckpoint:
    """A folder of checkpoints; all processes must call each method at the same time.

    Args:
        path: the folder.
        data: the rows of the processes.
    """

    def __init__(self, path: Any, data: ShardedData) -> None:
        self._path, self._data, self._world = Path(path), data, data.world
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
            dcp.save(state, checkpoint_id=folder, no_dist=self._alone)
        self._world.barrier()
        if self._world.rank == 0:
            for older in self._folders():
                if older != folder:
                    shutil.rmtree(older)

    def load(self, like: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
        """The last complete checkpoint: shared state, local state, and tensors of the local rows.

        Args:
            like: local state to use for a checkpoint of another number of processes.
        """
        folder = self._last()
        index = dcp.FileSystemReader(cast(Path, folder)).read_metadata()
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
        return sorted(each for each in self._path.glob("[0-9]*") if each.is_dir())

    def _last(self) -> Path | None:
        """The last complete checkpoint, as the first process sees it."""
        numbers = [int(each.name) + 1 for each in self._folders() if (each / _COMPLETE).exists()]
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


def _bytes(state: dict[str, Any]) -> Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _content(values: Tensor) -> dict[str, Any]:
    return torch.load(io.BytesIO(values.numpy().tobytes()), map_location="cpu", weights_only=True)
