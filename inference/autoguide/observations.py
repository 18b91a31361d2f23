r"""Observed sites of a Pyro program as functions of their distributions' parameters, in unconstrained space.

Let :math:`\phi_i` hold the parameters of the distribution of observation i that depend on the latent values, mapped to
unconstrained space: the log of a Poisson rate, the logit of a probability, the mean of a normal distribution. In a
generalized linear mixed model they are the linear predictor.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from pyro.poutine import Trace
from torch import Tensor
from torch.distributions import biject_to

from pyro_nngp._checks import fail
from pyro_nngp._wrappers import base_distribution
from pyro_nngp.inference._traces import is_data, log_prob, sample_sites, taken_apart
from pyro_nngp.inference.autoguide.quadratics import Observations, OpaqueSiteError
from pyro_nngp.inference.autoguide.recorded_sites import recorded_sites

_TWINS = {"probs": "logits", "gate": "gate_logits", "covariance_matrix": "scale_tril", "precision_matrix": "scale_tril"}


class ObservedSite(Observations):
    """An observed site whose distribution depends on some latent values.

    Args:
        site: the site of a trace.
        leaves: the latent values, which require gradients.

    Attributes:
        is_free: whether any parameter depends on the leaves.
        phi: the parameters that depend on the leaves, in unconstrained space, (n, k); with gradients.

    Raises:
        OpaqueSiteError: if the distribution cannot be rebuilt from its parameters.
    """

    def __init__(self, site: Any, leaves: list[Tensor]) -> None:
        self.name = site["name"]
        fn, self._weight = taken_apart(site)
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
        if parts:
            self._check(fn)

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

    def _check(self, fn: Any) -> None:
        """Raise unless the rebuilt distribution has the densities of the original one."""
        phi = self.phi.detach()
        try:
            again = self.log_prob(phi)
        except (TypeError, ValueError, NotImplementedError, RuntimeError, AttributeError) as cause:
            raise OpaqueSiteError from cause
        with torch.no_grad():
            want = torch.where(self._weight > 0, fn.log_prob(self._value), 0.0) * self._weight
        if not torch.allclose(again.double(), want.double().flatten(), rtol=1e-4, atol=1e-4):
            raise OpaqueSiteError


def observed_sites(trace: Trace, leaves: list[Tensor], rerun: Callable[..., Trace]) -> list[Observations]:
    """The observations of a trace that depend on the leaves.

    Args:
        trace: a run of the program at leaves.
        leaves: the leaves, which require gradients.
        rerun: runs the program at leaves.

    Raises:
        ValueError: if there are none, or a plate is subsampled.
        OpaqueSiteError: if a density is no function of parameters by rows.
    """
    observed: list[Observations] = []
    opaque, data = [], []
    for name, site in sample_sites(trace).items():
        _check_plates(site)
        if not site["is_observed"]:
            continue
        data += [name] if is_data(site) else []
        candidate = _of_parameters(site, leaves) if is_data(site) else None
        if candidate is not None:
            observed.append(candidate)
        elif _density_depends(site, leaves):
            opaque.append(name)
    if opaque:

        def densities(*at: Tensor) -> tuple[Tensor, ...]:
            nodes = rerun(*at).nodes
            return tuple(_density(nodes[name]) for name in opaque)

        observed += recorded_sites(densities, leaves, opaque)
    if not observed:
        actual = f"only {data}, which do not" if data else "none"
        cure = "Call the guide with the data, as SVI does, before Predictive."
        cure = "Let their parameters depend on one, not by way of another latent site." if data else cure
        fail("AutoNNGP", "the program", "to have an observed site that depends on its NNGP sites", actual, cure)
    return observed


def check_density(site: Any, leaves: list[Tensor]) -> None:
    """Raise ``OpaqueSiteError`` if the log density of a latent site depends on the leaves."""
    if _density_depends(site, leaves):
        kind = type(base_distribution(site["fn"])).__name__
        cure = "Let parameters of data depend on them, or draw with QuickNUTS(model)."
        expectation = "not to depend on processes, or on coefficients of the data"
        fail("AutoNNGP", f"the density of site {site['name']!r}", expectation, kind, cure, OpaqueSiteError)


def _of_parameters(site: Any, leaves: list[Tensor]) -> ObservedSite | None:
    """A site as a function of its parameters; None if they do not determine it, or do not depend on the leaves."""
    try:
        candidate = ObservedSite(site, leaves)
    except OpaqueSiteError:
        return None
    return candidate if candidate.is_free else None


def _check_plates(site: Any) -> None:
    """Raise if a site is in a subsampled plate."""
    part = [frame.name for frame in site["cond_indep_stack"] if frame.size < (frame.full_size or frame.size)]
    if part:
        cure = "It needs all data at each step. Take VNNGP for minibatches."
        fail("AutoNNGP", "plates", "with all their rows", f"subsampled {part}", cure)


def _density(site: Any) -> Tensor:
    """Log densities of the observations of a site, with scales and masks."""
    fn, weight = taken_apart(site)
    value = fn.log_prob(site["value"])
    return value if weight.dim() == 0 and weight == 1 else torch.where(weight > 0, value, 0.0) * weight.to(value)


def _density_depends(site: Any, leaves: list[Tensor]) -> bool:
    return site["mask"] is not False and _depends(log_prob(site, 0.0), leaves)


def _depends(value: Tensor, leaves: list[Tensor]) -> bool:
    if not value.requires_grad:
        return False
    grads = torch.autograd.grad(value.sum(), leaves, retain_graph=True, allow_unused=True)
    return any(grad is not None for grad in grads)
