r"""An ELBO that integrates the likelihood in closed form over the guide's marginal of the latent function.

A model marks its observed site, ``pyro.sample("y", likelihood(f), obs=y, infer={"integrate": ("f", likelihood)})``, and
a guide attaches the marginal it knows to its own site, ``infer={"marginal": Normal(loc, scale)}``. The Monte-Carlo term
:math:`\log p(y \mid f)` at one draw of f is then replaced by :math:`E_{N(f \mid loc, scale^2)} \log p(y \mid f)`. Sites
without the mark, or whose latent has no marginal, are left as they are.
"""

import torch
from pyro.distributions.util import scale_and_mask
from pyro.infer import TraceMeanField_ELBO


class IntegratedELBO(TraceMeanField_ELBO):
    """:class:`~pyro.infer.TraceMeanField_ELBO` with marked observed sites integrated over the guide's marginal.

    With Gaussian guides of nearest-neighbor priors (closed-form divergence) and a likelihood with a closed-form
    expectation, the value has no Monte-Carlo noise at all. Arguments are those of ``TraceMeanField_ELBO``.
    """

    def _get_trace(self, model, guide, args, kwargs):
        model_trace, guide_trace = super()._get_trace(model, guide, args, kwargs)
        for site in model_trace.nodes.values():
            if site["type"] != "sample" or "integrate" not in site["infer"]:
                continue
            latent, likelihood = site["infer"]["integrate"]
            marginal = guide_trace.nodes.get(latent, {}).get("infer", {}).get("marginal")
            if marginal is None or not site["is_observed"]:
                continue
            expected = likelihood.expected_log_prob(site["value"], marginal.mean, marginal.variance)
            site["log_prob_sum"] = torch.as_tensor(scale_and_mask(expected, site["scale"], site["mask"])).sum()
        return model_trace, guide_trace
