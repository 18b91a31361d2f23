"""Checks of a method's data, and copies of the parts of another method."""

import copy
from collections.abc import Callable
from typing import Any

from pyro_nngp._checks import check_finite, check_inputs, check_memory, check_same_kind, check_tensor, fail
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.models.base.sites import DataSites


def check_data(where: str, x: Any, y: Any, likelihood: Likelihood | None) -> tuple[int, ...]:
    """Check x and y against each other and the likelihood; return the shape of the latent functions, () or (L,)."""
    check_inputs(where, "x", x)
    if y is not None:
        check_tensor(where, "y", y)
        if y.dim() not in (1, 2) or len(y) != len(x):
            fail(where, "y", f"of shape ({len(x)},) or ({len(x)}, T)", tuple(y.shape), "One row of y per row of x.")
        if y.is_floating_point():
            check_finite(where, "y", y)
        check_same_kind(where, x=x, y=y)
    if likelihood is None:
        return ()
    if not isinstance(likelihood, Likelihood):
        cure = "Pass an instance such as Gaussian(0.1), after the kernel."
        fail(where, "likelihood", "to be a Likelihood", f"{likelihood!r:.40}", cure, TypeError)
    if y is None:
        fail(where, "y", "with a likelihood", None, "Give targets, or leave the likelihood out.")
    likelihood.check(y)
    check_memory(where, "latent functions", len(x) * (likelihood.num_latents or 1), x.dtype)
    outputs = tuple(y.shape[1:])
    if likelihood.num_latents is None:
        return outputs
    if outputs:
        fail(where, "y", f"of shape (N,) for {type(likelihood).__name__}", tuple(y.shape), "Fit one model per output.")
    return (likelihood.num_latents,)


def copied_parts(
    where: str, start: Any, kernel: Any, likelihood: Likelihood | None, mean: Callable | None, observed: bool
) -> tuple[Any, Likelihood | None, Callable | None]:
    """Kernel, likelihood and mean as given, or copies of those of another method."""
    if not isinstance(start, DataSites) or start.kernel is None:
        cure = "Pass a method with one kernel, such as a Vecchia that has been fitted."
        fail(where, "start", "to be a trained method", type(start).__name__, cure, TypeError)
    copies = copy.deepcopy((start.kernel, start.likelihood, start.mean))
    kernel = copies[0] if kernel is None else kernel
    likelihood = copies[1] if likelihood is None and observed else likelihood
    return kernel, likelihood, copies[2] if mean is None else mean
