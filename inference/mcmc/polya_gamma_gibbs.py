r"""Exact Gibbs sampling of nearest-neighbor Gaussian processes with logistic likelihoods, as a Pyro MCMC kernel.

With Pólya-Gamma variables :math:`\omega` (Polson, Scott and Windle 2013) one sweep draws

1. :math:`\omega_i \mid f, \theta \sim PG(b_i, \psi_i)`, exactly, for the logits :math:`\psi_i = f_{r(i)} + o_i`;
2. :math:`f \mid \omega, \theta`, exactly and jointly: a Gaussian whose precision is the sparse one of the prior plus
   a diagonal (:mod:`pyro_nngp.linalg.gaussian_sampling`);
3. each coordinate of the other sites :math:`\theta`, by slice sampling (Neal 2003) with :math:`\omega` integrated out,
   three times over: at fixed f; where the prior of f depends on it, at fixed whitened f; where the offsets depend on
   it, at fixed logits. The conditionals at fixed f alone mix slowly (interweaving, Yu and Meng 2011).

Nothing is approximated and nothing needs tuning: the widths of the slices, which change the cost but not the
distribution, adapt during burn-in.

Cost: for step 2 O(N^3) up to 1,000 points and O(N K) per step of conjugate gradients beyond; for step 3 about six runs
of the model per coordinate of :math:`\theta` and way of holding f, O(N K^3) each where the prior has to be computed.

Symbols: f latent values, theta all other sites, z a coordinate of theta in unconstrained space.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import init_to_uniform
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.poutine import Trace
from torch import Tensor

from pyro_nngp._checks import check_callable, fail
from pyro_nngp.distributions import NNGP, NNGPReparam
from pyro_nngp.inference._traces import base_distribution, check_all_rows, run_at, sample_sites
from pyro_nngp.inference.mcmc.logistic import LogisticData
from pyro_nngp.inference.mcmc.potential import ModelPotential
from pyro_nngp.linalg import NotPositiveDefiniteError, draw_posterior

_WHERE = "PolyaGammaGibbs"
_STEPS_OUT = 16  # at most so many widths make up a slice

Params = dict[str, Tensor]  # unconstrained values of the latent sites
Move = tuple[Callable[[Params], float], Callable[[Params], Params]]  # log density of z, and f for the z taken


class PolyaGammaGibbs(MCMCKernel):
    """Kernel for ``pyro.infer.MCMC``: f, and everything else in the model given f.

    The model has one latent :class:`~pyro_nngp.distributions.NNGP` site over all points of its graph; observed
    ``Bernoulli``, ``Binomial`` or ``NegativeBinomial`` sites whose logits are entries of it plus whatever does not
    depend on it (an intercept, covariates, effects of groups); and other continuous sites as it likes, such as
    hyperparameters of the kernel or the dispersion. Logits may repeat entries of f, or leave some out; masks and
    ``poutine.scale`` count.

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
        check_callable(_WHERE, "init_strategy", init_strategy, "Pass one of pyro.infer.autoguide.initialization.")
        self.model, self.latent, self._init_strategy = model, latent, init_strategy
        self.transforms: dict[str, Any] | None = None
        self._initial_params: Params | None = None

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Check the model, find out what depends on what, and choose where to start."""
        self._args, self._kwargs = args, kwargs
        self._potential = ModelPotential(_WHERE, self.model, args, kwargs, self._init_strategy)
        self.transforms = self._potential.transforms
        if self._initial_params is None:
            self._initial_params = self._potential.unpack(self._potential.initial())
        params = self._initial_params
        trace = self._trace(params)
        self._site = _find_latent(trace, self.latent)
        check_all_rows(_WHERE, trace)
        self._white_site = f"{self._site}_white"
        white = poutine.reparam(self.model, {self._site: NNGPReparam()})
        self._white_potential = ModelPotential(_WHERE, white, args, kwargs, self._init_strategy)

        def run(f: Tensor) -> Trace:
            return self._trace({**params, self._site: f})

        self._data = LogisticData(_WHERE, run, self._site, params[self._site])
        self._moves = {name: self._find_moves(params, name) for name in params if name != self._site}
        self._widths: dict[tuple[str, int, str], float] = {}
        self._sweeps, self._warmup_steps, self._evaluations = 0, warmup_steps, 0

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
            params = {**params, self._site: self._draw_latent(params)}
            for name, moves in self._moves.items():
                for i in range(params[name].numel()):
                    for move in moves:
                        params = self._slice(params, name, i, move)
        self._sweeps += 1
        return params

    def logging(self) -> OrderedDict[str, str]:
        """Runs of the model per sweep: the text beside Pyro's progress bar."""
        return OrderedDict((name, f"{value:.0f}") for name, value in self.diagnostics().items())

    def diagnostics(self) -> dict[str, Any]:
        """Return the runs of the model per sweep that slices took, burn-in included."""
        return {"model runs": self._evaluations / max(self._sweeps, 1)}

    def cleanup(self) -> None:
        """Forget the starting values."""
        self._initial_params = None

    def _trace(self, params: Params) -> Trace:
        values = {name: self._potential.transforms[name].inv(z) for name, z in params.items()}
        return run_at(_WHERE, self.model, self._args, self._kwargs, values)

    def _prior(self, params: Params) -> NNGP:
        return base_distribution(self._trace(params).nodes[self._site]["fn"])

    def _draw_latent(self, params: Params) -> Tensor:
        trace = self._trace(params)
        prior = base_distribution(trace.nodes[self._site]["fn"])
        linear, precision = self._data.draw_terms(trace)
        return draw_posterior(prior.factor, linear, precision)

    # What is held fixed while a coordinate moves.

    def _find_moves(self, params: Params, name: str) -> list[str]:
        """What f has to follow: found by changing the site."""
        here, there = self._trace(params), self._trace({**params, name: params[name] + 0.5})
        moves = ["values"]
        before, after = (base_distribution(trace.nodes[self._site]["fn"]).conditionals for trace in (here, there))
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            moves.append("white")
        if not torch.equal(self._data.mean_offset(here), self._data.mean_offset(there)):
            moves.append("logits")
        return moves

    def _hold_values(self, params: Params) -> Move:
        return lambda moved: self._log_density(self._potential, moved), lambda moved: moved

    def _hold_white(self, params: Params) -> Move:
        white = self._prior(params).whiten(params[self._site])

        def log_density(moved: Params) -> float:
            rest = {name: z for name, z in moved.items() if name != self._site}
            return self._log_density(self._white_potential, {**rest, self._white_site: white})

        return log_density, lambda moved: {**moved, self._site: self._prior(moved).color(white)}

    def _hold_logits(self, params: Params) -> Move:
        logits = params[self._site] + self._data.mean_offset(self._trace(params))

        def follow(moved: Params) -> Params:
            return {**moved, self._site: logits - self._data.mean_offset(self._trace(moved))}

        return lambda moved: self._log_density(self._potential, follow(moved)), follow

    def _log_density(self, potential: ModelPotential, params: Params) -> float:
        self._evaluations += 1
        try:
            return -float(potential.energy(potential.pack(params)))
        except NotPositiveDefiniteError:
            return -math.inf

    def _slice(self, params: Params, name: str, i: int, move: str) -> Params:
        """Draw a coordinate given all others: stepping out and shrinking, Neal (2003), figures 3 and 5."""
        holds = {"values": self._hold_values, "white": self._hold_white, "logits": self._hold_logits}
        log_density, follow = holds[move](params)

        def moved(z: float) -> Params:
            flat = params[name].flatten().clone()
            flat[i] = z
            return {**params, name: flat.reshape(params[name].shape)}

        start = float(params[name].flatten()[i])
        width = self._widths.get((name, i, move), 1.0)
        place, share, drop = torch.rand(3, dtype=torch.float64).tolist()
        level = log_density(params) + math.log1p(-drop)
        low, high = start - place * width, start + (1 - place) * width
        steps_down = int(share * _STEPS_OUT)
        steps_up = _STEPS_OUT - 1 - steps_down
        while steps_down > 0 and log_density(moved(low)) > level:
            low, steps_down = low - width, steps_down - 1
        while steps_up > 0 and log_density(moved(high)) > level:
            high, steps_up = high + width, steps_up - 1
        z = low + (high - low) * float(torch.rand((), dtype=torch.float64))
        while not log_density(moved(z)) > level and low < high:
            low, high = (z, high) if z < start else (low, z)
            z = low + (high - low) * float(torch.rand((), dtype=torch.float64))
        if self._sweeps < self._warmup_steps:
            self._widths[name, i, move] = max(0.9 * width + 0.3 * abs(z - start), 1e-6)
        return follow(moved(z))


def _find_latent(trace: Trace, wanted: str | None) -> str:
    """The name of the NNGP site."""
    latent = {name: site for name, site in sample_sites(trace).items() if not site["is_observed"]}
    sites = {name: site for name, site in latent.items() if isinstance(base_distribution(site["fn"]), NNGP)}
    if wanted is not None and wanted not in sites:
        fail(_WHERE, "latent", f"among the latent NNGP sites {sorted(sites)}", repr(wanted), "Name one of them.")
    if wanted is None and len(sites) != 1:
        expectation, cure = "with one latent NNGP site", "Sample one from NNGP(kernel, graph), or name it as latent=."
        fail(_WHERE, "model", expectation, sorted(sites) or "none", cure)
    name = wanted or next(iter(sites))
    prior, site = base_distribution(sites[name]["fn"]), sites[name]
    rows = torch.arange(prior.graph.num_points, device=prior.batch.rows.device)
    if (
        site["fn"] is not prior
        or prior.batch_shape
        or not all(map(rows.equal, (prior.batch.rows, prior.batch.targets)))
    ):
        actual = f"{type(site['fn']).__name__} of shape {tuple(site['fn'].shape())}"
        fail(_WHERE, f"site {name!r}", "to be one NNGP over all points", actual, "Leave batch, expand and mask out.")
    if site["mask"] is not None or torch.as_tensor(site["scale"]).ne(1).any():
        fail(_WHERE, f"site {name!r}", "without mask and scale", "one with them", "Mask or scale the data instead.")
    return name
