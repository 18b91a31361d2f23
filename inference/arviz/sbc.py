"""Ranks of simulation-based calibration in the form that ``az.plot_ecdf_pit`` takes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_tensor, fail
from pyro_nngp.inference.arviz.arrays import check_mappings, creation_attrs
from pyro_nngp.inference.arviz.libraries import container, library

_WHERE = "sbc_to_arviz"


def sbc_to_arviz(
    ranks: Mapping[str, Float[Tensor, "R ..."]],
    *,
    dims: Mapping[str, Sequence[str]] | None = None,
    coords: Mapping[str, Sequence] | None = None,
) -> Any:
    """A ``prior_sbc`` group of ranks in (0, 1), one draw for each simulation.

    Args:
        ranks: ranks of each site, such as :func:`sbc_ranks` returns.
        dims: names of the dimensions of a site after the first.
        coords: labels of dimensions.

    Returns:
        ``arviz.InferenceData`` with ArviZ 0.x, ``xarray.DataTree`` with 1.x.

    Raises:
        ValueError, TypeError: if `ranks` are not tensors with one number of simulations, or `dims` do not fit.
    """
    check_mappings(_WHERE, dims=dims, coords=coords)
    if not isinstance(ranks, Mapping) or not ranks:
        fail(_WHERE, "ranks", "to be a dict of ranks", f"{ranks!r:.40}", "Pass what sbc_ranks returns.", TypeError)
    variables, sizes = {}, set()
    for name, value in ranks.items():
        check_tensor(_WHERE, f"ranks[{name!r}]", value)
        sizes.add(len(value) if value.dim() else 0)
        named = (dims or {}).get(name, [f"{name}_dim_{k}" for k in range(value.dim() - 1)])
        if len(named) != value.dim() - 1:
            expectation = f"to name the {value.dim() - 1} dimensions of {name!r} after the first"
            fail(_WHERE, "dims", expectation, list(named), f"Its shape is {tuple(value.shape)}.")
        variables[name] = (("chain", "draw", *named), value.detach().cpu().numpy()[None])
    if len(sizes) > 1 or 0 in sizes:
        fail(_WHERE, "ranks", "to be of one number of simulations", sorted(sizes), "Pass what sbc_ranks returns.")
    xr = library(_WHERE, "xarray")
    made = xr.Dataset(variables, attrs=creation_attrs() | {"sample_dims": ["chain", "draw"]})
    labels = {dim: np.asarray((coords or {}).get(dim, np.arange(size))) for dim, size in made.sizes.items()}
    for dim, given in (coords or {}).items():
        if dim not in labels:
            fail(_WHERE, "coords", f"among {sorted(map(str, labels))}", dim, "Check the spelling.")
        if labels[dim].shape != (made.sizes[dim],):
            fail(_WHERE, f"coords[{dim!r}]", f"to have {made.sizes[dim]} labels", f"{given!r:.40}", "Give each one.")
    return container(_WHERE, {"prior_sbc": made.assign_coords(labels)})
