r"""Logistic observations of a latent vector f: the entries of f in the logits, and their Gaussian form given omega.

.. math:: p(y \mid \psi)^s \propto e^{s \kappa \psi}\, E_{\omega \sim PG(s b, 0)}\, e^{-\omega \psi^2 / 2}, \qquad
   \kappa = y - b / 2, \quad \psi_i = f_{r(i)} + o_i,

with b = 1 (Bernoulli), n (binomial) or y + r (negative binomial) and the scale s of the observation (Polson, Scott and
Windle 2013, theorem 1). Given omega, f has the precision :math:`\sum_i \omega_i` and the linear term
:math:`\sum_i s \kappa_i - \omega_i o_i` at the rows r(i).

Cost: three runs of the model and two derivatives to find the rows; O(observations) per draw.
"""

from collections.abc import Callable

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.poutine import Trace
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._wrappers import base_distribution
from pyro_nngp.distributions import PolyaGamma
from pyro_nngp.inference._traces import log_prob, sample_sites, taken_apart
from pyro_nngp.likelihoods.polya_gamma import polya_gamma_terms

_LOGISTIC = (dist.Bernoulli, dist.Binomial, dist.NegativeBinomial)


class LogisticData:
    """The observed sites of a model whose logits are entries of one latent vector plus offsets.

    Args:
        where: name of the caller, for messages.
        run: maps values of the latent vector to a trace of the model at them, with all else fixed.
        latent: name of the latent site.
        start: values of the latent vector.

    Raises:
        ValueError: if a site depends on the latent vector in any other way, or none depends on it.
    """

    def __init__(self, where: str, run: Callable[[Tensor], Trace], latent: str, start: Float[Tensor, " N"]) -> None:
        self._where, self._latent = where, latent
        with torch.enable_grad():
            f = torch.randn_like(start).requires_grad_()
            here, there = run(f), run(f.detach() + 1 + torch.rand_like(start))
            self.rows: dict[str, Tensor] = {}
            for name, site in sample_sites(here).items():
                if name == latent:
                    continue
                if site["is_observed"] and isinstance(base_distribution(site["fn"]), _LOGISTIC):
                    rows = self._find_rows(here, there, name, f)
                    if rows is not None:
                        self.rows[name] = rows
                elif _pull(log_prob(site, 0.0).sum(), f, torch.ones(())) is not None:
                    expectation = "to be observed Bernoulli, Binomial or NegativeBinomial, or not to depend on it"
                    kind = "an observed" if site["is_observed"] else "a latent"
                    actual = f"{kind} {type(base_distribution(site['fn'])).__name__}"
                    fail(where, f"site {name!r} given {latent!r}", expectation, actual, "Use NUTS for such a model.")
        if not self.rows:
            actual = "no logistic one"
            fail(where, "observed sites", f"that depend on {latent!r}", actual, "Use it as logits of a likelihood.")

    def _find_rows(self, here: Trace, there: Trace, name: str, f: Tensor) -> Tensor | None:
        """The entry of f in each logit; None if no logit depends on f."""
        logits = base_distribution(here.nodes[name]["fn"]).logits
        back = torch.zeros_like(logits).requires_grad_()
        pulled = _pull(logits, f, back)
        if pulled is None:
            return None
        slope, place = (
            torch.autograd.grad(pulled, back, direction, retain_graph=True, allow_unused=True)[0]
            for direction in (torch.ones_like(f), torch.arange(len(f), dtype=f.dtype, device=f.device))
        )
        if slope is not None and bool(torch.isclose(slope, torch.ones_like(slope), atol=1e-3).all()):
            rows = place.round().long().clamp(0, len(f) - 1)
            before, after = (self._offsets(trace, name, rows) for trace in (here, there))
            if torch.allclose(before, after, rtol=1e-3, atol=1e-3):
                return rows
        expectation = f"to be entries of {self._latent!r} plus offsets"
        cure = "Scale the kernel rather than the values, use the logit link, or NUTS."
        fail(self._where, f"the logits of {name!r}", expectation, "another function", cure)

    def _offsets(self, trace: Trace, name: str, rows: Tensor) -> Tensor:
        return (base_distribution(trace.nodes[name]["fn"]).logits - trace.nodes[self._latent]["value"][rows]).detach()

    def draw_terms(self, trace: Trace) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Draw all omega given the logits; return the linear term and the precision of f given omega."""
        f = trace.nodes[self._latent]["value"]
        linear, precision = torch.zeros_like(f), torch.zeros_like(f)
        for name, rows in self.rows.items():
            site = trace.nodes[name]
            likelihood, weight = taken_apart(site)
            y, times = site["value"].to(f.dtype).expand(rows.shape), weight.to(likelihood.logits).expand(rows.shape)
            seen = times > 0
            parts = (*polya_gamma_terms(likelihood, y, f.dtype), times, rows, likelihood.logits)
            b, kappa, times, near, logits = (part.expand(rows.shape)[seen] for part in parts)
            omega = PolyaGamma(times * b, logits, validate_args=False).sample()
            linear.index_add_(0, near, times * kappa - omega * (logits - f[near]))
            precision.index_add_(0, near, omega)
        return linear, precision

    def mean_offset(self, trace: Trace) -> Float[Tensor, " N"]:
        """Mean offset of the logits of each row of f; for rows without a logit the mean of all offsets."""
        f = trace.nodes[self._latent]["value"]
        rows = torch.cat([rows.flatten() for rows in self.rows.values()])
        offsets = torch.cat([self._offsets(trace, name, rows).flatten() for name, rows in self.rows.items()])
        total = torch.zeros_like(f).index_add_(0, rows, offsets)
        count = torch.zeros_like(f).index_add_(0, rows, torch.ones_like(offsets))
        return torch.where(count > 0, total / count.clamp(min=1), offsets.mean())


def _pull(value: Tensor, f: Tensor, back: Tensor) -> Tensor | None:
    """Derivative of sum(back * value) by f; None if it is zero."""
    if not value.requires_grad:
        return None
    back = back.to(value)
    (pulled,) = torch.autograd.grad(value, f, back, create_graph=True, retain_graph=True, allow_unused=True)
    if pulled is None or (not back.requires_grad and not bool((pulled != 0).any())):
        return None
    return pulled
