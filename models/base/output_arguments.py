"""Arguments of methods of several outputs: kernels, likelihoods and loadings as they are given, checked."""

import copy
from collections.abc import Sequence
from typing import Any

from pyro.nn import PyroParam, PyroSample
from torch import Tensor, nn

from pyro_nngp._checks import check_int, check_same_kind, check_tensor, fail
from pyro_nngp._kinds import check_callable
from pyro_nngp.hyperparameters import release
from pyro_nngp.kernels import Kernel, Matern52
from pyro_nngp.kernels.binding import check_kernels
from pyro_nngp.likelihoods import Gaussian, Likelihood, PerOutput
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.models.base.arguments import default_kernel


def output_kernels(
    x: Any,
    likelihoods: Sequence[Likelihood],
    kernels: Any,
    num_latents: int | None,
    mixing: "Mixing",
) -> tuple[list[nn.Module], int]:
    """Kernels, one for each latent function or one for all, and the number of functions.

    Args:
        x: inputs (N, D).
        likelihoods: T, one for each output.
        kernels: as :class:`~pyro_nngp.models.LMC` takes them.
        num_latents: L where all share one kernel.
        mixing: loadings. If they vary, None is a kernel for each latent function, rather than one for all.
    """
    num_outputs = len(likelihoods)

    def usual() -> Kernel:
        return Matern52(x.shape[1]) if mixing.factors is not None else default_kernel(x, *likelihoods)

    if num_latents is not None:
        _check_count("num_latents", num_latents, len(x) * num_outputs)
    if kernels is None and not mixing.varies:
        kernels = usual()
    if isinstance(kernels, nn.Module) and not isinstance(kernels, nn.ModuleList):
        release(kernels)
        return [kernels], num_outputs if num_latents is None else num_latents
    if kernels is None or isinstance(kernels, int):
        count = (num_outputs if num_latents is None else num_latents) if kernels is None else kernels
        _check_count("kernels", count, len(x) * num_outputs)
        kernels = [usual() for _ in range(count)]
    kernels = check_kernels("LMC", list(kernels) if isinstance(kernels, nn.ModuleList) else kernels)
    if num_latents not in (None, len(kernels)):
        cure = "It is for one kernel that all latent functions share."
        fail("LMC", "num_latents", f"{len(kernels)}, the number of kernels", num_latents, cure)
    for each in kernels:
        release(each)
    return kernels, len(kernels)


def _check_count(name: str, count: Any, most: int) -> None:
    """Raise unless there are as many latent functions as that: at least one, and no more than values of the data."""
    cure = "It is the number of latent functions."
    check_int("LMC", name, count, 1, cure)
    if count > most:
        fail("LMC", name, f"<= {most}, the number of values in y", count, cure)


def output_likelihoods(likelihood: Any, num_outputs: int) -> list[Likelihood]:
    """One likelihood per output."""
    if isinstance(likelihood, PerOutput):
        likelihood = list(likelihood.outputs)
    if likelihood is None or isinstance(likelihood, Likelihood):
        return [Gaussian() if likelihood is None else copy.deepcopy(likelihood) for _ in range(num_outputs)]
    parts = list(likelihood) if isinstance(likelihood, Sequence) else []
    if len(parts) != num_outputs:
        cure = "Give one per output, or one for all."
        fail("LMC", "likelihood", f"to be {num_outputs} likelihoods", f"{likelihood!r:.60}", cure)
    return parts


class Mixing:
    """The argument `mixing` of :class:`~pyro_nngp.models.LMC`: loadings A, checked.

    Args:
        value: a tensor (T, L), a parameter or prior of one, a function of inputs, factor loadings, or None.
        num_outputs: T.
    """

    def __init__(self, value: Any, num_outputs: int) -> None:
        if not (value is None or isinstance(value, Tensor | PyroParam | PyroSample) or callable(value)):
            expectation, cure = "to be a tensor (T, L) or a function of x", "Convert an array with torch.as_tensor."
            fail("LMC", "mixing", expectation, type(value).__name__, cure, TypeError)
        self.value, self.num_outputs = value, num_outputs
        self.factors = value if isinstance(value, FactorLoadings) else None
        if self.factors is not None and len(self.factors.mode) != num_outputs:
            expectation = f"with {num_outputs} outputs, the columns of y"
            fail("LMC", "mixing", expectation, len(self.factors.mode), "Give it that number.")
        if self.varies:
            check_callable("LMC", "mixing", value, "Pass a function (n, D) -> (n, T, L), or a tensor (T, L).", 1)

    @property
    def varies(self) -> bool:
        """Whether loadings are a function of the inputs."""
        return callable(self.value) and not isinstance(self.value, PyroParam | PyroSample | FactorLoadings)

    @property
    def first(self) -> Tensor | None:
        """Initial values."""
        return self.value if isinstance(self.value, Tensor) else None

    @property
    def is_parameter(self) -> bool:
        """Whether loadings are a parameter that starts at :attr:`first`, or from the data."""
        return self.value is None or isinstance(self.value, Tensor)

    def num_latents(self, kernels: Any) -> int | None:
        """The number of latent functions, where factor loadings tell it and kernels do not."""
        return None if self.factors is None or isinstance(kernels, int | Sequence) else self.factors.mode.shape[1]

    def check(self, x: Tensor, count: int) -> None:
        """Raise unless the loadings are of as many latent functions."""
        shape = self.num_outputs, count
        if self.factors is not None and count != self.factors.mode.shape[1]:
            expectation, cure = f"with {count} factors, one per latent function", "Give one kernel, or one per factor."
            fail("LMC", "mixing", expectation, self.factors.mode.shape[1], cure)
        if self.varies:
            check_loading("LMC", self.value(x[:2]), (min(2, len(x)), *shape))
        elif isinstance(self.value, Tensor):
            check_tensor("LMC", "mixing", self.value)
            check_same_kind("LMC", x=x, mixing=self.value)
            check_loading("LMC", self.value, shape)


def check_loading(where: str, loading: Any, shape: tuple[int, ...]) -> None:
    """Raise unless loadings are finite numbers of this shape."""
    if not isinstance(loading, Tensor) or tuple(loading.shape) != shape or not bool(loading.detach().isfinite().all()):
        actual = tuple(loading.shape) if isinstance(loading, Tensor) else type(loading).__name__
        fail(where, "mixing", f"to be finite, of shape {shape}", actual, "Outputs by latent functions.")
