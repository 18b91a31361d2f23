r"""An ELBO that integrates the likelihood in closed form over the guide's marginal of the latent function.

A model marks its observed site, ``pyro.sample("y", likelihood(f), obs=y, infer={"integrate": ("f", likelihood)})``, and
a guide attaches the marginal it knows to its site, ``infer={"marginal": Normal(loc, scale)}``. The Monte-Carlo term
:math:`\log p(y \mid f)` at one draw of f is then replaced by :math:`E_{N(f \mid loc, scale^2)} \log p(y \mid f)`. Sites
without the mark, or whose latent site has no marginal, are unchanged.

With Pyro's validation off, as in :func:`~pyro_nngp.inference.fit` after its first step, log densities are computed only
when they are read: not for latent sites whose divergence has a closed form, nor for integrated sites. Model and guide
of one method share what both need, and sites that the guide draws as the model does, ``infer={"as_model": True}``, have
no divergence: where everything else is integrated, too, random draws do not enter the loss.
"""

from contextlib import nullcontext
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer import TraceMeanField_ELBO
from pyro.infer.util import is_validation_enabled
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_nngp._checks import fail
from pyro_nngp._shared import shared_results
from pyro_nngp.inference.protocols import owner_of


class IntegratedELBO(TraceMeanField_ELBO):
    """:class:`~pyro.infer.TraceMeanField_ELBO` with marked observed sites integrated over the guide's marginal.

    With Gaussian guides of nearest-neighbor priors (closed-form divergence) and a likelihood with a closed-form
    expectation, the value has no Monte-Carlo noise. Arguments are the same as in ``TraceMeanField_ELBO``.
    """

    def _get_trace(self, model, guide, args, kwargs):
        if is_validation_enabled() or isinstance(poutine.unwrap(guide), Messenger):
            model_trace, guide_trace = super()._get_trace(model, guide, args, kwargs)
        else:
            with shared_results() if _of_one_method(model, guide) else nullcontext():
                guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
                model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
            model_trace, guide_trace = _lazy(model_trace), _lazy(guide_trace)
        for site in model_trace.nodes.values():
            if site["type"] != "sample" or "integrate" not in site["infer"]:
                continue
            latent, likelihood = site["infer"]["integrate"]
            marginal = guide_trace.nodes.get(latent, {}).get("infer", {}).get("marginal")
            if marginal is None or not site["is_observed"]:
                continue
            term = self._data_term(likelihood, site["value"], marginal.mean, marginal.variance)
            site["log_prob_sum"] = torch.as_tensor(scale_and_mask(term, site["scale"], site["mask"])).sum()
        return model_trace, guide_trace

    def _data_term(self, likelihood: Any, y: Tensor, loc: Tensor, var: Tensor) -> Tensor:
        return likelihood.expected_log_prob(y, loc, var)

    def differentiable_loss(self, model, guide, *args, **kwargs):
        """The loss with its gradient, as of Pyro, which reads the value several times and waits for a GPU each time.

        With validation off the value is not read, and the caller has to look for NaN.
        """
        if is_validation_enabled():
            return super().differentiable_loss(model, guide, *args, **kwargs)
        traces, one_method = self._get_traces(model, guide, args, kwargs), _of_one_method(model, guide)
        return sum(_loss(*pair, one_method) / self.num_particles for pair in traces)


def _of_one_method(model: Any, guide: Any) -> bool:
    """Whether model and guide are methods of one object, without handlers that may change their parameters."""
    owner = owner_of(model)
    return owner is not None and owner is owner_of(guide)


def _loss(model_trace: poutine.Trace, guide_trace: poutine.Trace, one_method: bool) -> Tensor:
    """The loss of ``TraceMeanField_ELBO`` at one draw, as a tensor."""
    loss: Any = 0
    for name, site in model_trace.nodes.items():
        if site["type"] != "sample":
            continue
        if site["is_observed"]:
            loss = loss - site["log_prob_sum"]
            continue
        drawn = guide_trace.nodes[name]
        if one_method and drawn["infer"].get("as_model"):
            continue
        try:
            divergence = torch.as_tensor(kl_divergence(drawn["fn"], site["fn"])).expand(drawn["fn"].batch_shape)
            loss = loss + torch.as_tensor(scale_and_mask(divergence, drawn["scale"], drawn["mask"])).sum()
        except NotImplementedError:
            loss = loss - site["log_prob_sum"] + drawn["score_parts"].entropy_term.sum()
    for name, drawn in guide_trace.nodes.items():
        if drawn["type"] == "sample" and name not in model_trace.nodes:  # auxiliary
            loss = loss + drawn["score_parts"].entropy_term.sum()
    return loss


class _LazySite(dict):
    """A site of a trace whose log densities are computed when they are first read."""

    def __missing__(self, key: str) -> Any:
        fn, arguments = self["fn"], (self["value"], *self["args"])
        if key == "log_prob_sum":
            value = fn.log_prob(*arguments, **self["kwargs"])
            self[key] = torch.as_tensor(scale_and_mask(value, self["scale"], self["mask"])).sum()
        elif key == "score_parts":
            self[key] = fn.score_parts(*arguments, **self["kwargs"]).scale_and_mask(self["scale"], self["mask"])
        else:
            raise KeyError(key)
        return self[key]


def _lazy(trace: poutine.Trace) -> poutine.Trace:
    trace = prune_subsample_sites(trace)
    for name, site in trace.nodes.items():
        if site["type"] == "sample":
            trace.nodes[name] = _LazySite(site)
    return trace


class PredictiveLogLikelihood(IntegratedELBO):
    r"""The objective of parametric predictive GP regression (PPGPR).

    .. math:: \sum_i \log \int p(y_i \mid f_i)\, q(f_i)\, df_i - \beta\, KL

    It scores the predictive distribution of each datum, as test scores do, and is not a bound of the evidence: the
    variance of q(f) counts as predictive variance, not as misfit, so that noise is not overestimated. It applies to any
    method here whose guide gives the marginal of f (PPGPR is SVGP under this objective). A model without such a site is
    trained as by :class:`IntegratedELBO`.

    Args:
        kl_scale: :math:`\beta`, the regularization; the paper takes 0.01 to 1.
        kwargs: arguments of ``TraceMeanField_ELBO``.

    Raises:
        ValueError: if `kl_scale` is negative.

    Reference: Jankowiak, Pleiss, Gardner (2020), "Parametric Gaussian process regressors", ICML, eq. 17.
    """

    def __init__(self, kl_scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if kl_scale < 0:
            fail("PredictiveLogLikelihood", "kl_scale", ">= 0", kl_scale, "The evidence bound has weight 1.")
        self.kl_scale = kl_scale

    def _get_trace(self, model, guide, args, kwargs):
        scaled = _LatentScale(self.kl_scale)
        return super()._get_trace(scaled(model), scaled(guide), args, kwargs)

    def _data_term(self, likelihood: Any, y: Tensor, loc: Tensor, var: Tensor) -> Tensor:
        return likelihood.marginal(loc, var).log_prob(y)


class _LatentScale(Messenger):
    """Multiply the scale of every site that is not observed."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        if not msg["is_observed"]:
            msg["scale"] = msg["scale"] * self.scale
