"""Mean functions."""

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn


class ConstantMean(PyroModule):
    """A learnable constant mean function, ``(B, D) -> (B,)``, or ``(B, L)`` with a constant for each of L functions.

    Args:
        value: its initial value, in the units of the latent function.
        num_latents: L; None is one function.
    """

    def __init__(self, value: float = 0.0, num_latents: int | None = None) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full(() if num_latents is None else (num_latents,), float(value)))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(*x.shape[:-1], *self.value.shape)
