"""Whitening of NNGP sites: Hamiltonian Monte Carlo samples values that are standard normal under the prior."""

import pyro
import pyro.distributions as dist
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.infer.reparam.reparam import Reparam
from torch.distributions.independent import Independent

from pyro_nngp._checks import fail
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
        name, fn, value, is_observed = msg["name"], msg["fn"], msg["value"], msg["is_observed"]
        base, event_dim = fn, 1
        while isinstance(base, Independent):
            event_dim += base.reinterpreted_batch_ndims
            base = base.base_dist
        if not isinstance(base, NNGP) or base.event_shape[0] != base.graph.num_points:
            fail("NNGPReparam", f"site {name!r}", "to be an NNGP over all points", fn, "Leave idx at None.", TypeError)
        if is_observed:
            fail("NNGPReparam", f"site {name!r}", "to be latent", "an observed site", "Drop it from the config.")
        white_shape = base.batch_shape + base.event_shape
        zero = base.graph.x.new_zeros(())
        white_fn: TorchDistributionMixin = dist.Normal(zero, zero + 1).expand(white_shape).to_event(event_dim)
        start = None if value is None else base.whiten(value)  # where an inference algorithm proposes an initial value
        white = pyro.sample(f"{name}_white", white_fn, obs=start, infer={"is_observed": False})
        if value is None:
            value = base.color(white.reshape(*placed(white.shape[:-1]), white.shape[-1]))
        return {"fn": dist.Delta(value, event_dim=event_dim).mask(False), "value": value, "is_observed": True}
