r"""Exact Gibbs sampling of nearest-neighbor Gaussian processes with logistic likelihoods, as a Pyro MCMC kernel.

With Pólya-Gamma variables :math:`\omega` (Polson, Scott and Windle 2013) one sweep draws

1. :math:`\omega_i \mid f, \theta \sim PG(b_i, \psi_i)`, exactly, for the logits :math:`\psi_i = f_{r(i)} + o_i`;
2. :math:`f \mid \omega, \theta`, exactly and jointly: a Gaussian whose precision is the sparse precision of the prior
   plus a diagonal (:mod:`pyro_nngp.linalg.gaussian_sampling`);
3. each coordinate of the other sites :math:`\theta`, by slice sampling (Neal 2003) with :math:`\omega` integrated out,
   up to three times: at fixed f; if the prior of f depends on it, at fixed whitened f; if the offsets depend on it,
   at fixed logits. The conditionals at fixed f alone mix slowly (interweaving, Yu and Meng 2011).

Nothing is approximated and nothing needs tuning: the widths of the slices, which change the cost but not the
distribution, adapt during burn-in.

Cost: for step 2 O(N^3) up to 1,000 points and O(N K) per step of conjugate gradients beyond; for step 3 about six runs
of the model per coordinate of :math:`\theta` and way of holding f, O(N K^3) each if the prior has to be computed.

Symbols: f latent values, theta all other sites, z a coordinate of theta in unconstrained space.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.infer.autoguide.initialization import init_to_uniform
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._kinds import check_callable
from pyro_nngp.inference.mcmc.conditional_moves import ConditionalMoves, Params, slice_coordinate
from pyro_nngp.linalg.gaussian_sampling import draw_posterior

_WHERE = "PolyaGammaGibbs"


class PolyaGammaGibbs(MCMCKernel):
    """Kernel for ``pyro.infer.MCMC`` that draws f exactly, and all other sites by slice sampling.

    The model has one latent :class:`~pyro_nngp.distributions.NNGP` site over all points of its graph; observed
    ``Bernoulli``, ``Binomial`` or ``NegativeBinomial`` sites whose logits are its entries plus terms that do not
    depend on it (an intercept, covariates, group effects); and any other continuous sites, such as hyperparameters of
    the kernel or the dispersion. Logits may repeat entries of f, or leave some out; masks and ``poutine.scale`` are
    supported.

    Args:
        model: the Pyro model.
        latent: name of the NNGP site; None takes the only one.
        init_strategy: where chains start, one of ``pyro.infer.autoguide.initialization``.

    Raises:
        TypeError: if `model` is not callable.
        ValueError: at the start of a run, if the model is not of this kind.

    Reference: Polson, Scott, Windle (2013), "Bayesian inference for logistic models using Polya-Gamma latent
    variables".
    """

    def __init__(
        self, model: Callable, latent: str | None = None, *, init_strategy: Callable = init_to_uniform
    ) -> None:
        check_callable(_WHERE, "model", model, "Pass a Pyro model.")
        if latent is not None and not isinstance(latent, str):
            fail(_WHERE, "latent", "to be the name of a site", f"{latent!r:.40}", "None takes the only one.", TypeError)
        check_callable(_WHERE, "init_strategy", init_strategy, "Pass one of pyro.infer.autoguide.initialization.", 1)
        self.model, self.latent, self._init_strategy = model, latent, init_strategy
        self.transforms: dict[str, Any] | None = None
        self._initial_params: Params | None = None

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Check the model, find its dependencies, and choose the start."""
        self.moves = ConditionalMoves(
            _WHERE, self.model, args, kwargs, self._init_strategy, self.latent, self._initial_params
        )
        self.transforms, self._initial_params = self.moves.potential.transforms, self.moves.start
        params = self._initial_params
        self.kinds = {name: self.moves.kinds(params, name) for name in params if name != self.moves.site}
        self.widths: dict[tuple[str, int, str], float] = {}
        self._sweeps, self._warmup_steps = 0, warmup_steps

    @property
    def initial_params(self) -> Params | None:
        """Unconstrained values to start from."""
        return self._initial_params

    @initial_params.setter
    def initial_params(self, params: Params | None) -> None:
        self._initial_params = params

    def sample(self, params: Params) -> Params:
        """One sweep: f, then each coordinate of the other sites."""
        with torch.no_grad(), pyro.validation_enabled(False):
            params = {**params, self.moves.site: self._draw_latent(params)}
            for name, kinds in self.kinds.items():
                for i in range(params[name].numel()):
                    for kind in kinds:
                        width, move = self.widths.get((name, i, kind), 1.0), self.moves.hold(kind, params)
                        params, change = slice_coordinate(move, params, name, i, width)
                        if self._sweeps < self._warmup_steps:
                            self.widths[name, i, kind] = max(0.9 * width + 0.3 * change, 1e-6)
        self._sweeps += 1
        return params

    def logging(self) -> OrderedDict[str, str]:
        """Runs of the model per sweep: the text beside Pyro's progress bar."""
        return OrderedDict((name, f"{value:.0f}") for name, value in self.diagnostics().items())

    def diagnostics(self) -> dict[str, Any]:
        """Runs of the model per sweep of slice sampling, burn-in included."""
        return {"model runs": self.moves.evaluations / max(self._sweeps, 1)}

    def cleanup(self) -> None:
        """Drop the starting values."""
        self._initial_params = None

    def _draw_latent(self, params: Params) -> Tensor:
        trace = self.moves.trace(params)
        return draw_posterior(self.moves.prior_of(trace).factor, *self.moves.data.draw_terms(trace))
