"""Random numbers that leave the global random state alone: streams, and numbers by row."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GENERATORS = threading.RLock()


class RandomStream:
    """A stream of random numbers: inside its ``with`` block, torch's global generators produce it.

    A process has one generator per device, so blocks of different threads run one at a time. Each stream produces
    the same numbers whatever the other streams do, and the global random state is restored.

    Args:
        seed: seed of the stream.
        devices: indices of the CUDA devices whose generators take part, in addition to the CPU's.
    """

    def __init__(self, seed: int, devices: list[int]) -> None:
        self._devices, self._seed = devices, seed
        self._here: list[Tensor] | None = None  # states of the stream, of the generators outside
        self._outside: list[list[Tensor]] = []

    def __enter__(self) -> None:
        _GENERATORS.acquire()
        self._outside.append(self._states())
        if self._here is None:
            self.restart()
        else:
            self._set(self._here)

    def __exit__(self, *exception: object) -> None:
        self._here = self._states()
        self._set(self._outside.pop())
        _GENERATORS.release()

    def restart(self) -> None:
        """Begin the stream again, inside the ``with`` block."""
        torch.default_generator.manual_seed(self._seed)  # torch.manual_seed would seed all other devices, too
        for device in self._devices:
            torch.cuda.default_generators[device].manual_seed(self._seed)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Restore the global random state for a while, inside the ``with`` block."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


@contextmanager
def seeded(seed: int | None, like: Tensor) -> Iterator[None]:
    """Draw random numbers from a seed and leave the global random state alone; None draws from the global state.

    Args:
        seed: seed of the CPU's generator and of the generator of the device of `like`.
        like: a tensor on the device of the draws.
    """
    if seed is None:
        yield
        return
    with RandomStream(seed, [like.device.index] if like.is_cuda else []):
        yield


def shuffled(count: int, seed: int, device: torch.device | str = "cpu") -> Int[Tensor, " count"]:
    """Numbers below `count`, in an order that depends on the seed and not on the device, nor on torch's default."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu").to(device)


_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def normal_by_row(rows: Int[Tensor, " n"], count: int, seed: int) -> Float[Tensor, "S n"]:
    """Independent standard normal numbers for rows, as a function of row number and seed alone.

    SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA) of a counter gives
    uniform numbers, and the inverse of the normal distribution function normal ones.

    Args:
        rows: row numbers.
        count: S, numbers for each row.
        seed: of the draws.
    """
    start = _mixed(torch.tensor([seed], device=rows.device) * _signed(_STEP))
    each = _mixed(start + torch.arange(1, count + 1, device=rows.device) * _signed(_STEP))
    bits = _mixed(each[:, None] + (rows + 1) * _signed(_STEP))
    return torch.special.ndtri((_shifted(bits, 11).double() + 0.5) * 2.0**-53)


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shift 64 bits to the right, with zeros from the left."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
