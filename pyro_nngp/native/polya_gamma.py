"""Compiled exact draws of Polya-Gamma variables, for CPUs: `polya_gamma.cpp`.

Cost: 0.1 to 1 microsecond per draw, whatever the parameters.
"""

import ctypes

import torch
from torch import Tensor

from pyro_nngp.native import enabled, loaded
from pyro_nngp.native.boundary import address, contiguous
from pyro_nngp.native.structures import PolyaGammaDraws

LEAST_CONCENTRATION = 0.25
"""Below it the compiled code gives NaN."""

_PER_THREAD = 2**10  # draws that are worth starting a thread for


def supported(tilt: Tensor) -> bool:
    """Whether compiled code is available, switched on, and covers this device."""
    return tilt.device.type == "cpu" and enabled()


def draw(concentration: Tensor, tilt: Tensor, num_draws: int, seed: int) -> Tensor:
    """Independent draws of PG(b, c), (S, B), a function of `seed` and of the place of each entry.

    Args:
        concentration: b, (B,), float64; below 1/4 the draws are NaN.
        tilt: c, (B,), float64.
        num_draws: S.
        seed: an integer below 2^63.

    Raises:
        ValueError, TypeError: for other shapes, dtypes or devices.
    """
    where, shape = "polya_gamma", (tilt.numel(),)
    b, c = contiguous(where, "concentration", concentration), contiguous(where, "tilt", tilt)
    draws = torch.empty(num_draws, *shape, dtype=torch.float64, device="cpu")
    call = PolyaGammaDraws(
        num_entries=shape[0],
        num_draws=num_draws,
        seed=seed,
        num_threads=max(1, min(torch.get_num_threads(), draws.numel() // _PER_THREAD)),
        concentration=address(where, "concentration", b, shape, torch.float64),
        tilt=address(where, "tilt", c, shape, torch.float64),
        draws=address(where, "draws", draws, tuple(draws.shape), torch.float64),
    )
    if draws.numel():
        loaded().nn_polya_gamma_draw(ctypes.byref(call))
    return draws
