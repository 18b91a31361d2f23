r"""An ELBO that integrates coefficients of the mean function exactly, without random draws.

With Gaussian noise the log density of the data is quadratic in coefficients that enter the mean linearly, and so is
that of their normal prior and posterior. Averages over p + 1 nodes with the mean and the covariance of the posterior, a
simplex, are then expectations: the loss has no noise, and suits L-BFGS. At the posterior for the present
hyperparameters it is the negative log evidence, and so is its gradient. The evidence of pseudo-observations
(:class:`~pyro_nngp.models.VNNGP`) is quadratic, too; expectations of other likelihoods are not, and the average is
their second-order approximation.

Cost: the covariances of one evaluation, and O(p B K) for B rows.

Reference: Stroud (1957), "Remarks on the disposition of points in numerical integration formulas".
"""

from typing import Any

from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_nngp.hyperparameters.priors import site_name
from pyro_nngp.inference.elbo import IntegratedELBO
from pyro_nngp.inference.protocols import Trainable
from pyro_nngp.means import LinearMean

_PLATES = 2  # of a method: the data, and latent functions


def coefficient_nodes(method: Trainable) -> dict[str, Tensor]:
    """Values of the sites of a method's mean, (n, *event), that average to expectations under their joint posterior.

    Empty where the method does not solve for one.
    """
    if isinstance(method, nn.Module):
        mean = dict(method.named_children()).get("mean")
        if isinstance(mean, LinearMean) and mean.has_posterior:
            return {site_name(method, mean, name): values for name, values in mean.nodes().items()}
    return {}


class CubatureELBO(IntegratedELBO):
    """:class:`~pyro_nngp.inference.IntegratedELBO` with the coefficients of the mean of a method at their nodes.

    Args:
        method: the method; its nodes are read at every evaluation, since they follow its solutions.
    """

    def __init__(self, method: Trainable) -> None:
        count = len(next(iter(coefficient_nodes(method).values())))
        super().__init__(num_particles=count, vectorize_particles=True, max_plate_nesting=_PLATES)
        self._method = method

    def _get_trace(self, model, guide, args, kwargs):
        with _AtNodes(coefficient_nodes(self._method)):
            return super()._get_trace(model, guide, args, kwargs)


class _AtNodes(Messenger):
    """Sites of a program at given values, one for each particle.

    Args:
        values: for each site, (particles, *event).
    """

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self._values = values

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is None and msg["name"] in self._values:
            msg["value"] = self._values[msg["name"]].reshape(msg["fn"].shape())
