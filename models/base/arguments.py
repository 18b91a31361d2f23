"""Checks of a method's data, and copies of the parts of another method."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from pyro.nn import PyroModule
from torch import Tensor
from torch.distributions import constraints

from pyro_nngp._checks import check_finite, check_inputs, check_memory, check_same_kind, check_tensor, fail
from pyro_nngp.data.tables import BY_ROW
from pyro_nngp.kernels import Kernel, Matern, Matern52
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.likelihoods.base import check_likelihood
from pyro_nngp.means import BasisMean
from pyro_nngp.models.base.targets import Targets

_FEW_ROWS = 100  # fewer do not tell the smoothness


def check_data(
    where: str, x: Any, y: Any, likelihood: Likelihood | None, targets: Targets | None = None
) -> tuple[int, ...]:
    """Check x and y against each other and the likelihood; return the shape of the latent functions, () or (L,).

    Targets with numbers of trials or limits are checked by :func:`check_by_row`.
    """
    targets = Targets() if targets is None else targets
    check_inputs(where, "x", x)
    if len(x) < 2:
        fail(where, "x", "with at least 2 rows", len(x), "Methods condition each point on others.")
    if y is not None:
        check_tensor(where, "y", y)
        if y.dim() not in (1, 2) or len(y) != len(x):
            fail(where, "y", f"of shape ({len(x)},) or ({len(x)}, T)", tuple(y.shape), "One row of y per row of x.")
        if y.is_floating_point():
            targets.check(where, y)
        check_same_kind(where, x=x, y=y)
    if likelihood is None:
        return ()
    targets.check_likelihood(where, likelihood)
    check_likelihood(where, likelihood)
    if y is None:
        fail(where, "y", "with a likelihood", None, "Give targets, or leave the likelihood out.")
    if not likelihood.differs_by_row:
        targets.check_support(likelihood, y)
    check_memory(where, "latent functions", len(x) * (likelihood.num_latents or 1), x.dtype)
    outputs = tuple(y.shape[1:])
    if likelihood.num_latents is None:
        return outputs
    if outputs:
        fail(where, "y", f"of shape (N,) for {type(likelihood).__name__}", tuple(y.shape), "Fit one model per output.")
    return (likelihood.num_latents,)


def default_kernel(x: Tensor, *likelihoods: Likelihood | None) -> Kernel:
    """The kernel where none is given, with one lengthscale per column.

    Its smoothness is learned where data tell it: not from labels, which have finitely many values, few rows, or none.
    """
    finite = type(constraints.boolean), constraints.integer_interval
    told = all(each is not None and not isinstance(each.support, finite) for each in likelihoods)
    return Matern(x.shape[1]) if told and len(x) >= _FEW_ROWS else Matern52(x.shape[1])


def smooth_kernel(x: Tensor, likelihood: Likelihood | None) -> Kernel:
    """The kernel of methods whose kernel is :class:`~pyro_nngp.kernels.Matern52` where none is given."""
    return Matern52(x.shape[1])


def check_family(where: str, guide: Any, *kinds: type) -> None:
    """Raise ``TypeError`` unless `guide` is one of some families of q (:mod:`pyro_nngp.variational.families`)."""
    if not isinstance(guide, kinds):
        *names, last = (f"{kind.__name__}()" for kind in kinds)
        cure = "They are in pyro_nngp.variational."
        fail(where, "guide", f"to be {', '.join(names)} or {last}", f"{guide!r:.60}", cure, TypeError)


def check_kernel_place(where: str, kernel: Any) -> None:
    """Raise ``TypeError`` if a likelihood or a mean function is in the place of the kernel."""
    name = type(kernel).__name__
    for kind, arg, words in ((Likelihood, "likelihood", "a likelihood"), (BasisMean, "mean", "a mean function")):
        if isinstance(kernel, kind):
            cure = f"Write {arg}={name}(...)."
            fail(where, "kernel", "to be a covariance function", f"{name}, {words}", cure, TypeError)


def check_unshared(where: str, arg: str, part: Any, x: Tensor) -> None:
    """Raise if a part of another method is of another dtype or device than x: casting it would change that method."""
    if not isinstance(part, PyroModule) or not part._pyro_name:
        return
    for value in (*part.parameters(), *part.buffers()):
        if value.is_floating_point() and (value.dtype, value.device) != (x.dtype, x.device):
            expectation = f"in {x.dtype} on {x.device} as x, since it is part of another method"
            fail(where, arg, expectation, f"{value.dtype} on {value.device}", f"Pass copy.deepcopy({arg}).to(x).")


def as_stored(y: Tensor | None, likelihood: Likelihood | None, x: Tensor) -> Tensor | None:
    """A copy of the targets: like x, but integers and booleans stay that where the likelihood is of discrete data.

    Later rows take the dtype of the first ones, so that integers must not stand for real data.
    """
    if y is None:
        return None
    keeps = y.is_floating_point() or (likelihood is not None and likelihood.support.is_discrete)
    return y.detach().to(y.dtype if keeps else x.dtype, copy=True)


def check_by_row(
    where: str, x: Tensor, y: Any, likelihood: Likelihood | None, latent_shape: tuple[int, ...], values: dict[str, Any]
) -> dict[str, Tensor | None]:
    """Offset, weights, trials and limits of the rows of x as tensors like x, None where there are none."""
    checked: dict[str, Tensor | None] = {}
    for name in BY_ROW:
        value = values.pop(name, None)
        each = name == "offset" or (likelihood is not None and likelihood.takes_missing)  # one value for each output
        checked[name] = None if value is None else _of_rows(where, name, value, x, latent_shape if each else ())
    if values:
        raise TypeError(f"{where} got an unexpected keyword argument {next(iter(values))!r}")
    weights, trials, limits = checked["weights"], checked["trials"], checked["limits"]
    if likelihood is None and any(value is not None for value in (weights, trials, limits)):
        fail(where, "weights, trials and limits", "None without a likelihood", "others", "Give y and a likelihood.")
    if weights is not None and not bool((weights > 0).all()):
        fail(where, "weights", "> 0", float(weights.min()), "Leave rows of weight 0 out.")
    if likelihood is not None and likelihood.takes_trials != (trials is not None):
        expectation = f"of each row for {type(likelihood).__name__}()" if trials is None else "None for this likelihood"
        counts = getattr(likelihood, "counts", likelihood)
        cure = f"Pass trials=n, or {type(counts).__name__}(n) for one number of all rows."
        cure = cure if trials is None else "Leave them out, or take Binomial()."
        fail(where, "trials", expectation, "None" if trials is None else type(likelihood).__name__, cure)
    if trials is not None and not bool(((trials >= 1) & (trials == trials.round())).all()):
        fail(where, "trials", "to be whole numbers >= 1", float(trials.min()), "Leave rows without trials out.")
    if likelihood is not None and likelihood.takes_limits != (limits is not None):
        name = type(likelihood).__name__
        expectation = f"of each row for {name}()" if limits is None else "None for this likelihood"
        cure = 'Pass limits=, one number per row, with Censored(lower="limits") or upper="limits".'
        fail(where, "limits", expectation, "None" if limits is None else name, cure)
    by_row = {"trials": trials, "limits": limits}
    of_rows = {key: value.movedim(0, -1) for key, value in by_row.items() if value is not None}
    if likelihood is not None and of_rows:
        likelihood.bind().for_rows(**of_rows).check(y.movedim(0, -1))
    return checked


def _of_rows(where: str, name: str, value: Any, x: Tensor, latent_shape: tuple[int, ...]) -> Tensor:
    check_tensor(where, name, value)
    shapes = [(len(x),), (len(x), *latent_shape)]
    if tuple(value.shape) not in shapes:
        fail(where, name, f"of shape {shapes[-1]}", tuple(value.shape), "Give one value per row of x.")
    if name == "limits" and value.isnan().any():
        fail(where, name, "to be numbers", "NaN", "Give infinity where there is no limit.")
    if name != "limits":
        check_finite(where, name, value.to(x))
    return value.detach().to(x)


def copied_parts(
    where: str, start: Any, kernel: Any, likelihood: Likelihood | None, mean: Callable | None, observed: bool
) -> tuple[Any, Likelihood | None, Callable | None]:
    """Kernel, likelihood and mean as given, or copies from another method."""
    if not hasattr(start, "hyper_guide") or start.kernel is None:
        cure = "Pass a method with one kernel, such as a Vecchia that has been fitted."
        fail(where, "start", "to be a trained method", type(start).__name__, cure, TypeError)
    copies = copy.deepcopy((start.kernel, start.likelihood, start.mean))
    kernel = copies[0] if kernel is None else kernel
    likelihood = copies[1] if likelihood is None and observed else likelihood
    return kernel, likelihood, copies[2] if mean is None else mean


def new_offset(where: str, method: Any, x_new: Tensor, offset: Tensor | None) -> Tensor:
    """The offset at new points, (P,) or (L, P); 0 without one."""
    if offset is None:
        return method.x.new_zeros(())
    shapes = [(len(x_new),), (len(x_new), *method.latent_shape)]
    check_tensor(where, "offset", offset)
    if tuple(offset.shape) not in shapes:
        fail(where, "offset", f"of shape {shapes[-1]}", tuple(offset.shape), "Give one value per row of x_new.")
    check_finite(where, "offset", offset)
    return offset.to(method.x).movedim(0, -1)


def new_by_row(
    where: str, method: Any, x_new: Tensor, trials: Tensor | None, limits: Tensor | None
) -> dict[str, Tensor]:
    """Numbers of trials and limits at new points, for likelihoods that have them."""
    likelihood: Likelihood | None = method.likelihood
    takes = likelihood is not None and likelihood.takes_trials, likelihood is not None and likelihood.takes_limits
    values, each = {}, likelihood is not None and likelihood.takes_missing
    cures = "They are for Binomial().", 'They are for Censored(lower="limits").'
    for name, value, is_taken, cure in zip(("trials", "limits"), (trials, limits), takes, cures, strict=True):
        if value is None:
            continue
        if not is_taken:
            fail(where, name, "None for this likelihood", "numbers", cure)
        check_tensor(where, name, value)
        bad = value.isnan() if name == "limits" else value < 1
        shapes = [(len(x_new),), (len(x_new), *method.latent_shape)][: 1 + each]
        if value.shape not in shapes or bool(bad.any()):
            expectation = f"to be numbers{'' if name == 'limits' else ' >= 1'}, ({len(x_new)},)"
            actual = f"others of shape {tuple(value.shape)}"
            fail(where, name, expectation, actual, "Give one per row of x_new.")
        values[name] = value.to(method.x).movedim(0, -1)
    if takes[0] and trials is None:
        values["trials"] = torch.ones_like(x_new[:, 0])
    return values
