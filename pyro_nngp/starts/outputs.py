"""Starts of several outputs that are sums of shared latent functions: loadings, kernels, likelihoods and levels.

1. Each output alone, in its units and under its likelihood: level, noise, and the variance of f
   (:mod:`pyro_nngp.starts.from_data`), with a Matern-5/2 kernel.
2. Its latent function at all sites, also those where it is missing, given its observations at the 16 nearest.
3. The principal axes of these functions, each divided by its spread, are the loadings, scaled such that each output has
   the variance of step 1; each component starts one kernel.

Like the starts of one output, they are equivariant to the units of x and y.

Cost: one start per output and kernel, and of a search, for at most 16,384 rows. Symbols: N data, D inputs, T
outputs, L latent functions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._random import shuffled
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.hyperparameters import freeze, unset_hyperparameters
from pyro_nngp.kernels import Kernel, Matern52
from pyro_nngp.kernels.metric import column_scale
from pyro_nngp.likelihoods import Gaussian, PerOutput
from pyro_nngp.likelihoods.pseudo_observations import pseudo_observations
from pyro_nngp.neighbors import nearest
from pyro_nngp.starts.from_data import Start, noise_variance, start_from_data

_ROWS, _NEAR = 2**14, 16


class OutputStart(NamedTuple):
    """Start of several outputs.

    Attributes:
        start: level and spread of each output, (T,).
        loading: (T, L).
    """

    start: Start
    loading: Tensor


@torch.no_grad()
def start_outputs(
    kernels: Sequence[Any],
    num_latents: int,
    likelihood: PerOutput,
    x: Float[Tensor, "N D"],
    y: Float[Tensor, "N T"],
    trend: Callable[[Tensor], Tensor] | None,
    jitter: float,
    offset: Float[Tensor, "N *T"] | None = None,
    trials: Float[Tensor, "N *T"] | None = None,
    needs_loading: bool = True,
    at: Any = None,
) -> OutputStart:
    """Set the unset hyperparameters of kernels and likelihoods, in place.

    Args:
        kernels: one for each latent function, or one for all of them.
        num_latents: L.
        likelihood: likelihoods of the outputs.
        x: inputs.
        y: targets, NaN where they are missing.
        trend: a mean function of rows of x that is already set, (P,) -> (T, P) or (P,); None if it is to be started.
        jitter: relative nugget.
        offset: known part of f at each row.
        trials: numbers of trials of each row.
        needs_loading: whether loadings are wanted; if not, and no kernel is to be started either, they are zero, and
            only levels, spreads and likelihoods are computed.
        at: values of hyperparameters with priors, by module and attribute; None draws them.
    """
    pool = shuffled(len(x), 0, x.device)[:_ROWS]
    x, count = x[pool], y.shape[1]
    needs_latent = needs_loading or any(unset_hyperparameters(kernel) for kernel in kernels)
    columns = sorted({d for kernel in kernels for d in _columns(kernel, x.shape[1])})

    def of_output(values: Tensor | None, number: int, rows: Tensor) -> Tensor | None:
        if values is None:
            return None
        return (values[rows, number] if values.dim() == 2 else values[rows]).to(x)

    filled, smooth, levels, spreads, variances = [], [], [], [], []
    for number, part in enumerate(likelihood.outputs):
        rows = pool[~y[pool, number].isnan()]
        inputs, targets = x[~y[pool, number].isnan()], y[rows, number]
        is_known = not needs_latent and not unset_hyperparameters(part)
        fixed = 1.0 if is_known else None
        probe = Matern52(len(columns), variance=fixed, lengthscale=fixed, active_dims=columns).to(x)
        others = of_output(offset, number, rows), of_output(trials, number, rows) if part.takes_trials else None
        there = None if trend is None else (lambda some, number=number, rows=rows: _row(trend(rows[some]), number))
        start = start_from_data(probe, part, inputs, targets, there, jitter, *others, at=at)
        levels.append(start.level.reshape(()))
        spreads.append(start.spread.reshape(()))
        if not needs_latent:
            continue
        bound = freeze(part, at)
        seen = pseudo_observations(bound if others[1] is None else bound.for_rows(trials=others[1].double()), targets)
        seen = seen if others[0] is None else seen.without(others[0].double())
        level = start.level.double().reshape(()) if trend is None else _row(trend(rows), number).double()
        obs = (seen.obs - level).to(x)
        constant = float(noise_variance(bound) or 0.0)
        noise = torch.full_like(obs, constant) if seen.noise is None else seen.noise.to(x)
        scale = column_scale(inputs).to(x)
        near = nearest(x / scale, inputs / scale, min(_NEAR, len(inputs)), progress=False)
        w, _ = graph_conditional(freeze(probe), x, inputs, near, noise, jitter)
        smooth.append((w * obs[near]).sum(-1).double())
        filled.append(smooth[-1].clone())
        filled[-1][~y[pool, number].isnan()] = obs.double()
        variances.append(probe.variance.detach().double().reshape(()))
    start = Start(torch.stack(levels), torch.stack(spreads))
    if not needs_latent:
        return OutputStart(start, x.new_zeros(count, num_latents))
    values, outputs, size = torch.stack(smooth, -1), torch.stack(filled, -1), torch.stack(variances)
    unit = values.square().mean(0).sqrt().clamp(min=torch.finfo(x.dtype).tiny)
    strengths, axes = principal_axes(values / unit)
    strengths = strengths.clamp(min=1e-3)
    loadings = []
    for number in range(num_latents):
        which, again = number % count, number // count
        loadings.append(axes[:, which] * strengths[which].sqrt() / (1 + again))
        if number >= len(kernels):
            continue
        component = (outputs / unit).clamp(-8, 8) @ axes[:, which] / strengths[which].sqrt()
        start_from_component(kernels[number], x, component.to(x), jitter, again, at)
    loading = torch.stack(loadings, -1)
    loading = loading * (size / loading.square().sum(-1).clamp(min=1e-12)).sqrt()[:, None]
    return OutputStart(start, loading.to(x))


def principal_axes(values: Float[Tensor, "N T"]) -> tuple[Float[Tensor, " T"], Float[Tensor, "T T"]]:
    """Mean squares along the principal axes, largest first, and the axes as columns, whose signs are unique."""
    strengths, axes = torch.linalg.eigh(values.mT @ values / len(values))
    axes = axes.flip(-1)
    return strengths.flip(0), axes * axes.sum(0).sign().where(axes.sum(0) != 0, 1.0)


def start_from_component(
    kernel: Any, x: Float[Tensor, "N D"], component: Tensor, jitter: float, again: int, at: Any = None
) -> Gaussian:
    """Set the unset hyperparameters of a kernel from values of its latent function; returns their noise.

    Args:
        kernel: kernel to set, in place.
        x: inputs.
        component: values of the latent function.
        jitter: relative nugget.
        again: number of kernels that have started from this component before; each lengthscale is a quarter of the
            one before.
        at: values of hyperparameters with priors, by module and attribute; None draws them.
    """
    noise, is_open = Gaussian().to(x), unset_hyperparameters(kernel)
    start_from_data(kernel, noise, x, component, None, jitter, at=at)
    for part, name in is_open if again else ():
        if name == "lengthscale":
            setattr(part, name, getattr(part, name).detach() / 4.0**again)
    return noise


def _columns(kernel: Any, input_dim: int) -> Sequence[int]:
    """The columns of x that a kernel depends on."""
    columns: set[int] = set()
    for part in kernel.modules() if isinstance(kernel, Kernel) else ():
        if isinstance(part, Kernel) and part.active_dims is not None:
            columns.update(part.active_dims)
    return sorted(columns) if columns else range(input_dim)


def _row(mean: Tensor, number: int) -> Tensor:
    return mean[number] if mean.dim() == 2 else mean
