r"""Check of residuals: no correlation between rows that are next to each other.

What f leaves to the noise is independent. Residuals :math:`r_i = y_i - E f(x_i)` that are alike at neighboring rows are
structure which training took for noise: f changes faster than M inducing points or the lengthscales allow. The
correlation is taken with the nearest row, in the spread of the columns and, of two to six columns, also in each column
alone, since a season that all places share is alike at the same time.

Of 29 data sets with ``Vecchia`` and ``LOO`` the largest correlation is .36, but .54 on keggdirected, whose copies have
one value. Monthly temperatures whose season is taken for noise have .86 to .96, .67 once it is found, 250 cycles in
``SVGP`` with 200 inducing points .79.

Cost: predictions of 256 rows and of one to seven neighbors of each, some .01 s.
"""

from typing import Any

import torch

from pyro_nngp.inference.protocols import single_output
from pyro_nngp.inference.svi.neighbor_check import moments_at, some_rows
from pyro_nngp.inference.svi.result import FitResult, warn_of
from pyro_nngp.kernels.metric import column_scale, stressed
from pyro_nngp.starts.search import nearest_rows

_ROWS, _POOL, _LEAST = 256, 2**16, 100
_STRESS = 4096.0  # of one of few columns
_LIMIT, _CLIP = 0.75, 3.0  # correlation, and robust standard deviations of a residual


@torch.no_grad()
def correlations_of_residuals(method: Any) -> list[float]:
    """Correlations of residuals with those of the nearest row; of two to six columns then in each column alone.

    Returns:
        The correlations; none for several outputs, weights, offsets, other noise than Gaussian, and below 100 rows.
    """
    y = single_output(method, _LEAST)
    if y is None or not method.likelihood.is_gaussian or method.weights is not None or method.offset is not None:
        return []
    pool = some_rows(method.x, _POOL)
    x, y = method.x[pool].double(), y[pool].double()
    places, rows = x / column_scale(x), torch.arange(min(_ROWS, len(pool)), device=x.device)
    near = [nearest_rows(at, rows, 1)[:, 0] for at in (places, *stressed(places, _STRESS))]
    needed, at = torch.unique(torch.cat([rows, *near]), return_inverse=True)
    residual = y[needed] - moments_at(method, method.x[pool[needed]])[0].double()
    residual = residual - residual.median()
    most = _CLIP * 1.4826 * residual.abs().median()
    own, *others = residual.clamp(-most, most)[at].split(len(rows))
    moments = [(own * other).mean() / (own.square().mean() * other.square().mean()).sqrt() for other in others]
    return [float(moment) for moment in moments]


def check_correlation(method: Any, result: FitResult) -> None:
    """Warn if residuals of a trained method are alike at neighboring rows."""
    found = correlations_of_residuals(method) if result.converged else []
    if not found or not max(found) > _LIMIT:
        return
    which = found.index(max(found))
    alike = "the nearest row" if which == 0 else f"the nearest row in column {which - 1} of x"
    warn_of(
        f"residuals that are independent of each other, got a correlation of {max(found):.2g} with those "
        f"of {alike}: f changes faster than the model can follow, and what it misses is in the noise. Take VNNGP or "
        "Vecchia in place of inducing points, or more of these; start the lengthscale of that column at the range over "
        "which y is alike; or add a kernel to the kernel, of a shorter lengthscale."
    )
