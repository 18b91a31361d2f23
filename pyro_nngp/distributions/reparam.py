"""Sites of processes as functions of others: white values, and the parts of a full-scale prior."""

from typing import Any

import pyro
import pyro.distributions as dist
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.infer.reparam.reparam import Reparam

from pyro_nngp._checks import fail
from pyro_nngp._wrappers import base_distribution
from pyro_nngp.distributions.full_scale import FullScaleNNGP
from pyro_nngp.distributions.nngp import NNGP
from pyro_nngp.hyperparameters.batches import placed


class NNGPReparam(Reparam):
    r"""Replace a site ``u ~ NNGP`` by ``u_white ~ Normal(0, 1)`` and ``u = (I - A)^{-1} V^{1/2} u_white``.

    Use it as ``pyro.poutine.reparam(model, config={"f": NNGPReparam()})`` around a model that is run by NUTS or by an
    AutoGuide. The values at the original site are then a deterministic function of the white ones and of the kernel's
    hyperparameters, which removes the strong prior correlation between them.

    Initial values, as by ``init_to_value``, refer to the site itself (``u``); the white values follow
    from them. Values for ``u_white`` alone are overridden by the initial strategy's proposal for ``u``.

    Raises:
        TypeError: if the site is not an NNGP over all points of its graph (possibly expanded, possibly ``.to_event``).
    """

    def apply(self, msg):
        name, value, event_dim = msg["name"], msg["value"], msg["fn"].event_dim
        base = base_distribution(msg["fn"], unmask=False)
        if not isinstance(base, NNGP) or base.event_shape[0] != base.graph.num_points:
            actual, cure = msg["fn"], "Leave idx at None."
            fail("NNGPReparam", f"site {name!r}", "to be an NNGP over all points", actual, cure, TypeError)
        _check_latent("NNGPReparam", msg)
        white_fn = _standard_normal(base, base.event_shape[0], event_dim)
        start = None if value is None else base.whiten(value)  # where an inference algorithm proposes an initial value
        white = pyro.sample(f"{name}_white", white_fn, obs=start, infer={"is_observed": False})
        if value is None:
            value = base.color(white.reshape(*placed(white.shape[:-1]), white.shape[-1]))
        return _determined(value, event_dim)


class FullScaleReparam(Reparam):
    r"""Replace a site ``f ~ FullScaleNNGP`` by ``f_low ~ Normal(0, 1)``, ``f_residual ~ NNGP`` and their sum.

    In :math:`f = \Phi \nu + r` the first are the M values :math:`\nu` of the low-rank part, the second the residual r
    at all points. ``pyro.poutine.reparam(model, config={"f": FullScaleReparam()})`` is the same program with a
    nearest-neighbor process and coefficients in place of the full-scale prior, which
    :class:`~pyro_nngp.inference.AutoNNGP` and, with it, ``QuickNUTS`` take.

    Initial values refer to the site itself (``f``), as with :class:`NNGPReparam`, which ``f_residual`` can have, too.

    Raises:
        TypeError: if the site is not a FullScaleNNGP.
        ValueError: if it is observed or has noise.

    Cost: O(N M) in addition to the residual's, and O(N M^2) at an initial value.
    """

    def apply(self, msg):
        name, value, event_dim, where = msg["name"], msg["value"], msg["fn"].event_dim, "FullScaleReparam"
        base = base_distribution(msg["fn"], unmask=False)
        if not isinstance(base, FullScaleNNGP):
            fail(where, f"site {name!r}", "to be a FullScaleNNGP", msg["fn"], "Drop it from the config.", TypeError)
        _check_latent(where, msg)
        if bool((base.noise > 0).any()):
            fail(where, f"site {name!r}", "of f itself", "a noise above 0", "Observe f with noise at another site.")
        low_fn = _standard_normal(base, len(base.inducing), event_dim)
        residual_fn = base.residual_prior.expand(base.batch_shape).to_event(event_dim - 1)
        starts = (None, None) if value is None else base.split(value)
        low = pyro.sample(f"{name}_low", low_fn, obs=starts[0], infer={"is_observed": False})
        residual = pyro.sample(f"{name}_residual", residual_fn, obs=starts[1], infer={"is_observed": False})
        return _determined(low @ base.features.mT + residual if value is None else value, event_dim)


def _check_latent(where: str, msg: Any) -> None:
    if msg["is_observed"]:
        fail(where, f"site {msg['name']!r}", "to be latent", "an observed site", "Drop it from the config.")


def _standard_normal(base: Any, size: int, event_dim: int) -> TorchDistributionMixin:
    """Standard normal values in the batch shape of a prior."""
    zero = base.graph.x.new_zeros(())
    return dist.Normal(zero, zero + 1).expand((*base.batch_shape, size)).to_event(event_dim)


def _determined(value: Any, event_dim: int) -> dict[str, Any]:
    """A site whose value others determine."""
    return {"fn": dist.Delta(value, event_dim=event_dim).mask(False), "value": value, "is_observed": True}
