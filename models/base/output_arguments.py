"""Arguments of methods of several outputs: kernels, likelihoods and loadings as they are given, checked."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pyro_nngp._checks import check_int, fail
from pyro_nngp.hyperparameters import release
from pyro_nngp.kernels import Matern52
from pyro_nngp.kernels.binding import check_kernels
from pyro_nngp.likelihoods import Gaussian, Likelihood, PerOutput


def output_kernels(
    where: str, x: Any, num_outputs: int, kernels: Any, num_latents: int | None, by_function: bool
) -> tuple[list[nn.Module], int]:
    """Kernels, one for each latent function or one for all, and the number of functions.

    Args:
        where: name of the caller, for messages.
        x: inputs (N, D).
        num_outputs: T.
        kernels: as :class:`~pyro_nngp.models.LMC` takes them.
        num_latents: L where all share one kernel.
        by_function: whether None is a kernel for each latent function, rather than one for all.
    """
    if num_latents is not None:
        _check_count(where, "num_latents", num_latents, len(x) * num_outputs)
    if kernels is None and not by_function:
        kernels = Matern52(x.shape[1])
    if isinstance(kernels, nn.Module) and not isinstance(kernels, nn.ModuleList):
        release(kernels)
        return [kernels], num_outputs if num_latents is None else num_latents
    if kernels is None or isinstance(kernels, int):
        count = (num_outputs if num_latents is None else num_latents) if kernels is None else kernels
        _check_count(where, "kernels", count, len(x) * num_outputs)
        kernels = [Matern52(x.shape[1]) for _ in range(count)]
    kernels = check_kernels(where, list(kernels) if isinstance(kernels, nn.ModuleList) else kernels)
    if num_latents not in (None, len(kernels)):
        cure = "It is for one kernel that all latent functions share."
        fail(where, "num_latents", f"{len(kernels)}, the number of kernels", num_latents, cure)
    for each in kernels:
        release(each)
    return kernels, len(kernels)


def _check_count(where: str, name: str, count: Any, most: int) -> None:
    """Raise unless there are as many latent functions as that: at least one, and no more than values of the data."""
    cure = "It is the number of latent functions."
    check_int(where, name, count, 1, cure)
    if count > most:
        fail(where, name, f"<= {most}, the number of values in y", count, cure)


def output_likelihoods(where: str, likelihood: Any, num_outputs: int) -> list[Likelihood]:
    """One likelihood per output."""
    if isinstance(likelihood, PerOutput):
        likelihood = list(likelihood.outputs)
    if likelihood is None or isinstance(likelihood, Likelihood):
        return [Gaussian() if likelihood is None else copy.deepcopy(likelihood) for _ in range(num_outputs)]
    parts = list(likelihood) if isinstance(likelihood, Sequence) else []
    if len(parts) != num_outputs:
        cure = "Give one per output, or one for all."
        fail(where, "likelihood", f"to be {num_outputs} likelihoods", f"{likelihood!r:.60}", cure)
    return parts


def check_loading(where: str, loading: Any, shape: tuple[int, ...]) -> None:
    """Raise unless loadings are finite numbers of this shape."""
    if not isinstance(loading, Tensor) or tuple(loading.shape) != shape or not bool(loading.detach().isfinite().all()):
        actual = tuple(loading.shape) if isinstance(loading, Tensor) else type(loading).__name__
        fail(where, "mixing", f"to be finite, of shape {shape}", actual, "Outputs by latent functions.")
