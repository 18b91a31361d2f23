"""Leave-one-out log densities at fixed hyperparameters, in the form that ``az.compare`` takes.

No importance sampling is needed: the estimate is the sum, with the standard error of a sum of N terms.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_finite, check_tensor, fail
from pyro_nngp.inference.arviz.libraries import is_old, library


def _form(value: Tensor) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}"


@torch.no_grad()
def elpd(log_densities: Float[Tensor, "*T N"]) -> Any:
    """ArviZ's ``ELPDData`` from leave-one-out log densities that do not depend on posterior draws.

    Where hyperparameters have posterior draws, ``az.loo(to_arviz(...))`` averages over them.

    Args:
        log_densities: log density of each datum, such as ``gp.loo()`` returns.

    Returns:
        ``ELPDData`` with pointwise values, for ``az.compare``. The effective number of parameters is NaN: there are no
        draws.

    Raises:
        ValueError, TypeError: unless they are finite densities of one draw.
        ImportError: if ArviZ is not installed.
    """
    check_tensor("elpd", "log_densities", log_densities)
    if log_densities.dim() not in (1, 2) or not log_densities.numel() or not log_densities.is_floating_point():
        cure = "With posterior draws use az.loo(to_arviz(...))."
        fail("elpd", "log_densities", "of shape (N,) or (T, N), in floating point", _form(log_densities), cure)
    check_finite("elpd", "log_densities", log_densities)
    values, xr = log_densities.cpu().numpy(), library("elpd", "xarray")
    dims = ("latents", "data")[2 - values.ndim :]
    pointwise = xr.DataArray(values, {dim: np.arange(n) for dim, n in zip(dims, values.shape, strict=True)}, dims)
    total, error = float(values.sum()), float((values.size * values.var()) ** 0.5)
    pareto_k, names = xr.zeros_like(pointwise), ("elpd", "p", "elpd_i")
    if is_old():
        names, pointwise = ("elpd_loo", "p_loo", "loo_i"), pointwise.rename("loo_i")
    fields: dict[str, Any] = {
        names[0]: total,
        "se": error,
        names[1]: np.nan,
        "n_samples": 1,
        "n_data_points": values.size,
    }
    fields |= {"warning": False, names[2]: pointwise, "pareto_k": pareto_k, "scale": "log", "good_k": 0.7}
    if is_old():
        return library("elpd", "arviz.stats.stats_utils").ELPDData(data=list(fields.values()), index=list(fields))
    utils = library("elpd", "arviz_stats.utils")
    if hasattr(utils, "ELPDDataLOO"):  # from 1.3 on
        return utils.ELPDDataLOO(**fields)
    return utils.ELPDData(kind="loo", **fields)
