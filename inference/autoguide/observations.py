r"""Observed sites of a Pyro program as functions of their distributions' parameters, in unconstrained space.

Let :math:`\phi_i` hold the parameters of the distribution of observation i that depend on the latent values, mapped to
unconstrained space: the log of a Poisson rate, the logit of a probability, the mean of a normal distribution. In a
generalized linear mixed model they are the linear predictor.
"""

import math
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from pyro.distributions import MaskedDistribution, Unit
from pyro.poutine import Trace
from torch import Tensor
from torch.distributions import Independent, biject_to

from pyro_nngp._checks import fail
from pyro_nngp.inference._traces import base_distribution, is_data, log_prob, sample_sites
from pyro_nngp.inference.autoguide.quadratics import Observations, OpaqueSiteError

_TWINS = {"probs": "logits", "gate": "gate_logits", "covariance_matrix": "scale_tril", "precision_matrix": "scale_tril"}


class ObservedSite(Observations):
    """An observed site whose distribution depends on some latent values.

    Args:
        where: name of the caller, for messages.
        site: the site of a trace.
        leaves: the latent values, which require gradients.

    Attributes:
        is_free: whether any parameter depends on the leaves.
        phi: the parameters that depend on the leaves, in unconstrained space, (n, k); with gradients.

    Raises:
        OpaqueSiteError: if the distribution cannot be rebuilt from its parameters.
    """

    def __init__(self, where: str, site: Any, leaves: list[Tensor]) -> None:
        self._where, self.names, fn, mask = where, (site["name"],), site["fn"], site["mask"]
        while isinstance(fn, (Independent, MaskedDistribution)):
            if isinstance(fn, MaskedDistribution):
                mask = fn._mask if mask is None else mask & fn._mask
            elif isinstance(mask, Tensor):
                mask = mask[(..., *[None] * fn.reinterpreted_batch_ndims)]
            fn = fn.base_dist
        self._kind, self._shape, self._value = type(fn), torch.Size(fn.batch_shape), site["value"]
        names = [name for name in fn.arg_constraints if _TWINS.get(name) not in fn.arg_constraints]
        self._fixed = {name: getattr(fn, name) for name in names if hasattr(fn, name)}
        self._free, parts, widest = {}, [], []
        for name in names:
            value = self._fixed.get(name)
            if not (isinstance(value, Tensor) and _depends(value, leaves)):
                continue
            del self._fixed[name]
            constraint = fn.arg_constraints[name]
            value = value.expand(self._shape + value.shape[value.dim() - constraint.event_dim :])
            unconstrained = biject_to(constraint).inv(value)
            self._free[name] = constraint, unconstrained.shape[len(self._shape) :]
            parts.append(unconstrained.reshape(self._shape.numel(), -1))
            widest += parts[-1].shape[1] * [math.inf if torch.equal(unconstrained, value) else 0.5]
        self._fixed = {n: v.detach() if isinstance(v, Tensor) else v for n, v in self._fixed.items()}
        self.is_free, self.widest = bool(parts), torch.tensor(widest, dtype=torch.float64)
        self.phi = torch.cat(parts, -1) if parts else torch.empty(0)
        weight = torch.as_tensor(site["scale"], dtype=torch.float64)
        self._weight = weight if mask is None else weight * mask
        if parts:
            self._check(site, fn)

    def log_prob(self, phi: Float[Tensor, "*S n k"]) -> Float[Tensor, "*S n"]:
        """Log densities of the observations, with their scales and masks."""
        batch, start, values = phi.shape[:-2], 0, {}
        for name, (constraint, shape) in self._free.items():
            part = phi[..., start : start + shape.numel()]
            values[name] = biject_to(constraint)(part.reshape(*batch, *self._shape, *shape))
            start += shape.numel()
        log_probs = self._kind(**values, **self._fixed, validate_args=False).log_prob(self._value)
        log_probs = torch.where(self._weight > 0, log_probs, 0.0) * self._weight.to(log_probs)
        return log_probs.reshape(*batch, -1)

    def _check(self, site: Any, fn: Any) -> None:
        """Raise unless the rebuilt distribution has the densities of the original one."""
        phi = self.phi.detach()
        try:
            again = self.log_prob(phi)
        except (TypeError, ValueError, NotImplementedError, RuntimeError, AttributeError) as cause:
            _refuse(self._where, site, cause)
        with torch.no_grad():
            want = torch.where(self._weight > 0, fn.log_prob(self._value), 0.0) * self._weight
        if not torch.allclose(again.double(), want.double().flatten(), rtol=1e-4, atol=1e-4):
            _refuse(self._where, site)


def observed_sites(where: str, trace: Trace, leaves: list[Tensor]) -> list[ObservedSite]:
    """The observed sites of a trace that depend on the leaves.

    Raises:
        ValueError: if there are none, or a plate is subsampled.
        OpaqueSiteError: if a factor depends on the leaves, or data depend on them other than by their parameters.
    """
    observed, data = [], []
    for name, site in sample_sites(trace).items():
        _check_plates(where, site)
        if is_data(site):
            data.append(name)
            candidate = ObservedSite(where, site, leaves)
            if candidate.is_free:
                observed.append(candidate)
                continue
        if site["is_observed"]:
            check_density(where, site, leaves)
    if not observed:
        actual = f"only {data}, which do not" if data else "none"
        cure = "Call the guide with the data, as SVI does, before Predictive."
        cure = "Let their parameters depend on one, not by way of another latent site." if data else cure
        fail(where, "the program", "to have an observed site that depends on its NNGP sites", actual, cure)
    return observed


def check_density(where: str, site: Any, leaves: list[Tensor]) -> None:
    """Raise ``OpaqueSiteError`` if the log density of a site depends on the leaves."""
    if site["mask"] is not False and _depends(log_prob(site, 0.0), leaves):
        _refuse(where, site)


def _refuse(where: str, site: Any, cause: Exception | None = None) -> NoReturn:
    """Raise for a distribution that its parameters do not determine, or a density that may not depend on leaves."""
    name, kind = repr(site["name"]), type(base_distribution(site["fn"]))
    nuts = "or draw from the posterior with QuickNUTS(model)."
    arg, expectation = f"observed site {name}", "to have a distribution that is determined by its arg_constraints"
    cure = f"Use a distribution such as Normal, Poisson or Bernoulli, {nuts}"
    if not is_data(site):
        arg = f"factor {name}" if kind is Unit else f"the density of site {name}"
        expectation = "not to depend on processes, or on coefficients of the data"
        cure = f"Let them be in parameters of data, as of a distribution with this log density by rows, {nuts}"
    fail(where, arg, expectation, kind.__name__, cure, OpaqueSiteError, cause)


def _check_plates(where: str, site: Any) -> None:
    """Raise if a site is in a subsampled plate."""
    part = [frame.name for frame in site["cond_indep_stack"] if frame.size < (frame.full_size or frame.size)]
    if part:
        cure = "It needs all data at each step. Take VNNGP for minibatches."
        fail(where, "plates", "with all their rows", f"subsampled {part}", cure)


def _depends(value: Tensor, leaves: list[Tensor]) -> bool:
    if not value.requires_grad:
        return False
    grads = torch.autograd.grad(value.sum(), leaves, retain_graph=True, allow_unused=True)
    return any(grad is not None for grad in grads)
