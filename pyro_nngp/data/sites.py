"""One table for outputs that were measured at different sites.

Cost: O(N log N).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_inputs, check_same_kind, check_tensor, fail


def union_of_sites(*outputs: tuple[Tensor, Tensor]) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N T"]]:
    """The union of the sites of T outputs, and their values there, NaN where an output was not measured.

    Sites with equal coordinates become one row. An output that was measured several times at a site has one row for
    each time.

    Args:
        outputs: for each output its sites (n, D) and values (n,), all of one dtype.

    Returns:
        Sites (N, D), and values (N, T): the x and y of :class:`~pyro_nngp.models.LMC` and
        :class:`~pyro_nngp.models.CoregionalizedLOO`.

    Raises:
        ValueError, TypeError: if there is no output, or shapes, dtypes or devices disagree.
    """
    where, places, times = "union_of_sites", [], []
    if not outputs or any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in outputs):
        fail(where, "outputs", "to be pairs of sites and values", f"{len(outputs)} others", "Pass (x, y), (x2, y2).")
    for number, (x, y) in enumerate(outputs):
        check_inputs(where, f"sites of output {number}", x)
        check_tensor(where, f"values of output {number}", y)
        if y.shape != (len(x),) or x.shape[1:] != outputs[0][0].shape[1:]:
            actual = tuple(x.shape), tuple(y.shape)
            fail(where, f"output {number}", "of shapes (n, D) and (n,), D of all", actual, "One value per site.")
        check_same_kind(where, x=outputs[0][0], **{f"output {number}": x, f"values of output {number}": y})
        places.append(x)
        times.append(_time(x))
    keys = torch.cat([torch.cat(places), torch.cat(times)[:, None].to(places[0])], -1)
    rows, where_to = keys.unique(dim=0, return_inverse=True)
    values = rows.new_full((len(rows), len(outputs)), torch.nan)
    for number, places_of in enumerate(where_to.split([len(x) for x in places])):
        values[places_of, number] = outputs[number][1]
    return rows[:, :-1].contiguous(), values


def _time(x: Tensor) -> Tensor:
    """Number of earlier rows with the same coordinates, for each row."""
    _, site = x.unique(dim=0, return_inverse=True)
    order = site.argsort(stable=True)
    first = torch.searchsorted(site[order], site[order])
    counts = torch.empty_like(order)
    counts[order] = torch.arange(len(x), device=x.device) - first
    return counts
