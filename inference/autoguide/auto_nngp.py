r"""A guide for any Pyro program with nearest-neighbor Gaussian processes.

Latent sites are of two kinds: the Gaussian ones z, which are processes, coefficients and group effects that the data
depend on linearly; and all others, hyperparameters :math:`\theta`. The guide is

.. math:: q(\theta, z) = N(u(\theta) \mid m, L L^\top) \; q(z \mid \theta),

with the hyperparameters u in unconstrained space, and q(z | theta) the posterior under a likelihood that has been
replaced by its best quadratic function (:mod:`pyro_nngp.inference.autoguide.conditional`): exact for Gaussian data, for
others the closest Gaussian. As in integrated nested Laplace approximations (Rue, Martino and Chopin 2009), each value
of the hyperparameters has another posterior of z, in which coefficients, groups and processes are jointly Gaussian.
A near collinearity of a coefficient and a process is part of the program's precision matrix, and need not be learned.

Let z be a function of standard normal w and theta. Where q(z | theta) is optimal, the gradient of the ELBO with respect
to theta is :math:`E_q\, \partial_\theta \log p(y \mid z(w, \theta), \theta)` with w held fixed, so that draws of w
carry no gradients.

Cost of a call: two runs of the program, and a sparse Cholesky factorization of the precision
(:mod:`pyro_nngp.linalg.factored_precision`). All data take part. The first call finds the mode of the hyperparameters
in some ten steps of 2 h to h^2 / 2 factorizations. Symbols: h hyperparameters in unconstrained space, d Gaussian
values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoGuide, init_to_median
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroParam
from pyro.poutine.runtime import get_plates
from torch import Tensor
from tqdm.auto import tqdm

from pyro_nngp._checks import check_int, check_number, fail, warn
from pyro_nngp._kinds import check_callable
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference._traces import check_program
from pyro_nngp.inference.autoguide import laplace
from pyro_nngp.inference.autoguide.conditional import ConditionalPosterior, covariance_tril, prior_variances
from pyro_nngp.inference.autoguide.drawn_sites import Value
from pyro_nngp.inference.autoguide.fit_check import ENOUGH, Weighted, joined, warn_of_poor_fit
from pyro_nngp.inference.autoguide.fixed_point import averaged_mode, between, fixed_point
from pyro_nngp.inference.autoguide.in_units import InUnits
from pyro_nngp.inference.autoguide.linear_predictor import (
    Blocks,
    colored,
    gaussian_base,
    irregular,
    leaf_shape,
    linear_sites,
    log_det_root,
    value_at,
)
from pyro_nngp.inference.autoguide.linearized_program import LinearizedProgram
from pyro_nngp.inference.autoguide.observations import check_density
from pyro_nngp.inference.autoguide.program_checks import check_repeatable, check_sites, near, same
from pyro_nngp.inference.autoguide.quadratics import Marginals, Observations
from pyro_nngp.inference.autoguide.unconstrained import Unconstrained
from pyro_nngp.inference.diagnostics.calibration import pareto_shape
from pyro_nngp.linalg import NotPositiveDefiniteError

_DAMPING = 0.1  # of the marginals of phi from step to step
_RECENTERINGS, _STILL = 10, 0.05  # of data that are not linear in z; change of phi that ends them
_MOST = 200  # most hyperparameters whose mode is sought by differences
_IMPOSSIBLE, _FAR_FROM_DATA = -1e10, (NotPositiveDefiniteError, torch.linalg.LinAlgError, ValueError)
_HYPER_DRAWS, _DRAWS_EACH = 64, 16  # of quantiles


class AutoNNGP(AutoGuide):
    r"""Guide with the coefficients, group effects and nearest-neighbor processes of a program jointly Gaussian.

    ::

        guide = AutoNNGP(model)
        svi = SVI(model, guide, ClippedAdam({"lr": 0.02}), Trace_ELBO())
        for _ in range(100):
            svi.step(x, y)
        draws = Predictive(model, guide=guide, num_samples=500)(x, y)

    Sites ``pyro.sample(name, NNGP(...))`` over all points of their graph, and normal and multivariate normal sites on
    which the parameters of the data depend linearly, are Gaussian given the other sites. Linear means: the log of a
    rate, the logit of a probability, the mean of a normal distribution. Each observation may read any number of
    processes, each at one point, and one effect of each large set of group effects. Data that depend on a process in
    other ways are linearized at its posterior mean. A factor with a log density for each row, or their sum, is an
    observation, as are data of any distribution. Discrete latent sites are summed out, row by row of their plates, and
    have no site in the guide: train with ``TraceEnum_ELBO``. All other latent sites are hyperparameters: jointly normal
    in unconstrained space, more than 20 of them independently.

    The first call, which needs the data, starts the guide at the mode of up to 200 hyperparameters and the curvature
    there. SVI moves it on to the maximum of the ELBO, in 50 - 100 steps, whose learning rate is in units of standard
    deviations. Later calls ignore their arguments, as those of other automatic guides do.

    Args:
        model: the program.
        init_loc_fn: initial values of the hyperparameters, from :mod:`pyro.infer.autoguide.initialization`.
        init_scale: initial standard deviation of the hyperparameters in unconstrained space, of more than 200.

    Attributes:
        gaussian, hyperparameters: names of the two kinds of sites, after the first call.
        space: the map between values of the hyperparameters and vectors in unconstrained space.
        loc, scale, scale_tril: m, and L as standard deviations times a unit triangle.

    Raises:
        TypeError: if `model` is not a program, or `init_loc_fn` no function.
        ValueError: if the program has no nearest-neighbor process over all points, discrete latent sites without
            finitely many values or not by rows, or subsampled plates; if its data do not depend on a process, or one
            observation depends on several of its points; if the prior of another site depends on a process; if the
            guide is trained on other data than at the first call, or called within vectorized plates, or as a part of
            an AutoGuideList; if two runs of the program at the same latent values differ, or Pyro's param store holds
            hyperparameters of another program.

    Warns:
        UserWarning: if importance weights at the first call, of the first 100 draws after training or in ``quantiles``
            show that the guide is far from the posterior; if no mode of the hyperparameters is found; if they start at
            values in Pyro's param store.

    Reference: Rue, Martino, Chopin (2009), "Approximate Bayesian inference for latent Gaussian models by using
    integrated nested Laplace approximations", JRSS B.
    """

    loc: Tensor
    unit: Tensor
    scale: Tensor
    scale_tril: Tensor
    prototype_trace: Any

    def __init__(self, model: Callable, *, init_loc_fn: Callable = init_to_median, init_scale: float = 0.1) -> None:
        check_program("AutoNNGP", model)
        check_callable("AutoNNGP", "init_loc_fn", init_loc_fn, "Pass one of pyro.infer.autoguide.initialization.")
        check_number("AutoNNGP", "init_scale", init_scale, cure="It is a standard deviation.")
        super().__init__(model)
        self._model, self._init_scale = (model, init_loc_fn), init_scale  # not a part of the guide, nor of its files
        self._program: Any = None  # after the first call
        self.space = Unconstrained([], [], [], [])
        self._draws: list[Weighted] = []  # after training
        self.gaussian: list[str] = []
        self.hyperparameters: list[str] = []

    # The program: its sites, and the first values of all parameters.

    @property
    def model(self) -> Callable:
        """The program with its first values, a run of which is the prototype."""
        program, init_loc_fn = self._model
        return InitMessenger(init_loc_fn)(program)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        try:
            self._setup(args, kwargs)
        except Exception:
            self.prototype_trace = None
            raise

    def _setup(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if self.master is not None:
            cure = "Pass it the whole program: sites that are not Gaussian are its hyperparameters."
            fail("AutoNNGP", "the guide", "of a whole program", "a part of an AutoGuideList", cure)
        sites = dict(self.prototype_trace.iter_stochastic_nodes())
        discrete = [name for name, site in sites.items() if site["fn"].has_enumerate_support]
        for name in discrete:  # summed out, and none of the guide's
            self.prototype_trace.remove_node(name)
            del sites[name]
        self._program = LinearizedProgram(self._model[0], args, kwargs, bool(discrete))
        check_sites(sites)
        self.gaussian = linear_sites(sites, self._program.phi)
        self.hyperparameters = [name for name in sites if name not in self.gaussian]
        with torch.no_grad():
            values = {name: sites[name]["value"].detach() for name in self.hyperparameters}
            self.space, loc = Unconstrained.of(sites, self.hyperparameters)
        stored = False
        if self.hyperparameters:
            known = self._stored(loc)
            stored, unit = known is not None, torch.ones_like(loc)
            if known is not None:
                loc, unit = known
            self._set_loc(loc, unit)
            self.scale = PyroParam(torch.full_like(loc, self._init_scale), constraints.softplus_positive)
            self.scale_tril = PyroParam(torch.eye(len(loc)).to(loc), constraints.unit_lower_cholesky)
            if len(loc) > laplace.PAIRED:  # noise of as many gradients would outweigh what correlations gain
                self.scale_tril_unconstrained.requires_grad_(False)
            values = self.space.values(self.loc.detach())
        leaves = {n: torch.zeros(leaf_shape(sites[n]["fn"])).to(sites[n]["value"]) for n in self.gaussian}
        self._center = leaves
        trace, observed, jacobian = self._program.linearize(values, leaves)
        check_repeatable(observed, self._program.linearize(values, leaves)[1])
        for name in self.hyperparameters:
            check_density("AutoNNGP", trace.nodes[name], list(jacobian.leaves.values()))
        processes = {
            n: sites[n]["fn"].event_shape[-1] for n in leaves if isinstance(gaussian_base(sites[n]["fn"]), NNGP)
        }
        anywhere = {n: irregular(i, v.shape).to(v) for i, (n, v) in enumerate(leaves.items())}
        self._blocks = Blocks("AutoNNGP", self._program.linearize(values, anywhere)[2], processes)
        variances = prior_variances(trace, jacobian, self._blocks).split([each.phi.numel() for each in observed])
        for i, (each, variance) in enumerate(zip(observed, variances, strict=True)):
            mean, tril = each.start(variance.reshape(each.phi.shape))
            self.register_buffer(f"phi_{i}", mean)
            self.register_buffer(f"tril_{i}", tril)
        with torch.no_grad():
            q = self._conditional(values)
            elsewhere = torch.sin(torch.arange(1.0, 1.0 + len(q), dtype=torch.float64))
            there = [each.phi.detach() for each in self._observed_at(q, elsewhere)]
            self._is_linear = all(map(near, there, q.phi(elsewhere)))
            self._set_marginals(averaged_mode(lambda at: self._conditional(values, at), self._marginals()))
            q = self._to_fixed_point(values)
            if self.hyperparameters and len(loc) <= _MOST and not stored:
                q = self._start_hyperparameters()
            warn_of_poor_fit(self._weighted(q, q.draw(ENOUGH)), 0, "the Gaussian given the hyperparameters")

    def _set_loc(self, loc: Float[Tensor, " h"], unit: Float[Tensor, " h"]) -> None:
        """Set m, of which optimizers take steps in units."""
        self.register_buffer("unit", unit)
        self.loc = PyroParam(loc, InUnits(unit))

    def _stored(self, loc: Float[Tensor, " h"]) -> tuple[Tensor, Tensor] | None:
        """Take m from Pyro's param store, with the standard deviations there as units; None if it has none."""
        if not self._pyro_context.active:  # of median(), which does not read it
            return None
        name, store = self._pyro_get_fullname("loc"), pyro.get_param_store()
        if name not in store:
            return None
        cure = "Call pyro.clear_param_store() before the first call of a new guide."
        if store[name].shape != loc.shape:
            shapes = f"{tuple(store[name].shape)}, of another program"
            fail("AutoNNGP", f"{name!r} in Pyro's param store", f"of shape {tuple(loc.shape)}", shapes, cure)
        warn(f"AutoNNGP: the hyperparameters start at {name!r} in Pyro's param store. {cure}")
        scale = self._pyro_get_fullname("scale")
        unit = store[scale].detach() if scale in store else torch.ones_like(loc)
        value = store[name].detach()
        del store[name]
        return value, unit

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state, which has values that the first call makes."""
        if self.prototype_trace is None and any(name.startswith(prefix) for name in state_dict):
            cure = "Call the guide with the data: its first call reads the program."
            fail("AutoNNGP.load_state_dict", "the guide", "after its first call", "a new one", cure)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _marginals(self) -> list[Marginals]:
        """Distributions of phi at which log likelihoods are replaced, for each observed site."""
        count = sum(name.startswith("phi_") for name, _ in self.named_buffers(recurse=False))
        return [Marginals(getattr(self, f"phi_{i}"), getattr(self, f"tril_{i}")) for i in range(count)]

    def _set_marginals(self, at: Sequence[Marginals]) -> None:
        for i, part in enumerate(at):
            setattr(self, f"phi_{i}", part.mean)
            setattr(self, f"tril_{i}", part.tril)

    def conditional_at(self, latent: Float[Tensor, " h"]) -> ConditionalPosterior:
        """The posterior q(z | theta) at hyperparameters in unconstrained space."""
        return self._conditional(self.space.values(latent))

    def _conditional(self, values: Mapping[str, Tensor], at: Sequence[Marginals] | None = None) -> ConditionalPosterior:
        """The posterior q(z | theta) at values of the hyperparameters."""
        at = self._marginals() if at is None else at
        trace, observed, jacobian = self._program.linearize(values, self._center)
        return ConditionalPosterior(trace, observed, jacobian, self._blocks, at)

    def _to_fixed_point(self, values: Mapping[str, Tensor]) -> ConditionalPosterior:
        """Move the marginals of phi, and the center of programs that are not linear, to their best values."""
        for i in range(_RECENTERINGS):
            q, at = fixed_point(lambda at: self._conditional(values, at), self._marginals())
            self._set_marginals(at)
            if self._is_linear or self._has_settled(q):
                break
            self._recenter(q, 1.0 if i < _RECENTERINGS / 2 else 0.5)
        return q

    def _has_settled(self, q: ConditionalPosterior) -> bool:
        """Whether phi at the mean of q is nearly its linear approximation."""
        means = zip(q.phi(q.mean), self._observed_at(q, q.mean), strict=True)
        return all(float((mean - each.phi.detach().double().cpu()).abs().max()) < _STILL for mean, each in means)

    def _recenter(self, q: ConditionalPosterior, part: float) -> None:
        """Move the leaves at which the program is linearized towards the mean of q."""
        goal = q.by_name(q.mean)
        self._center = {name: torch.lerp(leaf, goal[name].to(leaf), part) for name, leaf in self._center.items()}

    def _observed_at(self, q: ConditionalPosterior, leaves: Float[Tensor, " d"]) -> list[Observations]:
        """The observed sites at the hyperparameters of q and leaves."""
        values = {name: q.trace.nodes[name]["value"] for name in self.hyperparameters}
        center = {name: leaf.to(self._center[name]) for name, leaf in q.by_name(leaves).items()}
        return self._program.linearize(values, center)[1]

    @torch.no_grad()
    def _start_hyperparameters(self) -> ConditionalPosterior:
        """Start q(theta) at the largest bound, with the curvature there.

        The evidence with the factors of the best marginals has its gradient, but only near the hyperparameters of these
        marginals: further away the factors belong to other data, and the evidence may grow without limit.
        """

        def move(u: Float[np.ndarray, " h"], least: float) -> float:
            latent, before = torch.from_numpy(u).to(self.loc), (self._marginals(), self._center)
            try:
                bound = self._bound(latent, self._to_fixed_point(self.space.values(latent)))
            except _FAR_FROM_DATA:
                bound = -math.inf
            if not bound > least:
                self._set_marginals(before[0])
                self._center = before[1]
            return bound

        start = self.loc.double().cpu().numpy()
        mode, cov = laplace.mode(self._log_evidence, start, move, self.hyperparameters)
        tril = torch.from_numpy(np.linalg.cholesky(cov)).to(self.loc)
        self._set_loc(torch.from_numpy(mode).to(self.loc), tril.norm(dim=1))
        self.scale, self.scale_tril = tril.diagonal(), tril / tril.diagonal()[:, None]
        return self._to_fixed_point(self.space.values(self.loc))

    def _bound(self, latent: Float[Tensor, " h"], q: ConditionalPosterior) -> float:
        """Evidence lower bound of q(z | theta), and the log density of theta in unconstrained space."""
        return q.elbo(q.marginals()) + q.log_hyperprior() + self.space.volume(latent)

    def _weighted(self, q: ConditionalPosterior, draws: Float[Tensor, "S d"]) -> Weighted:
        """Draws of q, weighted by the log likelihood over the factors in its place."""
        if self._is_linear:
            return q.log_weights(draws)
        return joined([q.log_weights(each[None], self._observed_at(q, each)) for each in draws])

    def _weighted_jointly(
        self, latent: Float[Tensor, " h"], q: ConditionalPosterior, draws: Float[Tensor, "S d"]
    ) -> Weighted:
        """Draws of q at hyperparameters, weighted by the joint density over the guide's."""
        weights, determined = self._weighted(q, draws)
        density = q.log_evidence()
        if self.hyperparameters:
            density += self.space.volume(latent) - float(self._hyperparameter_distribution().log_prob(latent))
        return Weighted(weights + density, determined)

    @torch.no_grad()
    def khat(self, num_samples: int = 300, progress: bool = True) -> float:
        r"""Pareto shape :math:`\hat k` of the importance weights of the guide's draws, with the data of the first call.

        Below 0.5 the guide is close to the posterior, above 0.7 it is not, in the joint distribution of all latent
        values. With thousands of them it is above 0.7 however good their marginals are. It equals
        :func:`~pyro_nngp.inference.psis_khat` with the model, without running it for each draw.

        Args:
            num_samples: draws, S, at least 25.
            progress: show a progress bar if it takes more than a second.

        Raises:
            ValueError: before the first call of the guide, or for fewer draws.

        Cost: a factorization for each draw, or a single one without hyperparameters.
        """
        check_int("AutoNNGP.khat", "num_samples", num_samples, 25)
        if self.prototype_trace is None:
            cure = "Call the guide with the data, or train it."
            fail("AutoNNGP.khat", "the guide", "after its first call", "a new one", cure)
        if not self.hyperparameters:
            q = self._conditional({})
            return pareto_shape(self._weighted_jointly(torch.zeros(0), q, q.draw(num_samples)).log_weights)
        weights = []
        for _ in tqdm(range(num_samples), disable=not progress, delay=1, desc="khat", unit="draw"):
            latent = self._hyperparameter_distribution().sample()
            q = self.conditional_at(latent)
            weights.append(self._weighted_jointly(latent, q, q.draw(1)).log_weights)
        return pareto_shape(torch.cat(weights))

    @torch.no_grad()
    def _log_evidence(self, u: Float[np.ndarray, " h"]) -> float:
        """Log density of data and unconstrained hyperparameters, z integrated out."""
        latent = torch.from_numpy(u).to(self.loc)
        try:
            density = self.conditional_at(latent).log_evidence() + self.space.volume(latent)
        except _FAR_FROM_DATA:
            return _IMPOSSIBLE
        return density if np.isfinite(density) else _IMPOSSIBLE

    # The guide.

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latent sites; returns their values by name."""
        outside = [frame.name for frame in get_plates() if frame.vectorized]
        if outside:
            cure = "Take parallel=False and vectorize_particles=False."
            fail("AutoNNGP", "the guide", "outside vectorized plates", outside, cure)
        learning = torch.is_grad_enabled() and self.training
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        elif learning and not same((args, kwargs), self._program.arguments):
            cure = "It needs all data at each step. Build a new guide for other data; take VNNGP for minibatches."
            fail("AutoNNGP", "arguments while training", "as at the first call", "others", cure)
        plates = self._create_plates(*args, **kwargs)
        latent = self._draw_hyperparameters()
        values, densities = self.space.values(latent), self.space.densities(latent)
        q = self._conditional({name: values[name] for name in self.hyperparameters})
        leaves = q.draw(1)[0]
        white = Value(leaves, q.log_white_prob(leaves), event_dim=1)  # not q itself: traces live on, and q is large
        pyro.sample(f"_{self._pyro_name}_gaussian", white, infer={"is_auxiliary": True})
        if learning:
            self._follow(q)
        else:
            self._check(latent, q, leaves)
        place = colored if torch.is_grad_enabled() else value_at
        own = {name: values[name] for name in self.hyperparameters}
        trace = self._program.trace(own, q.by_name(leaves), place)
        for name in self.gaussian:
            values[name], densities[name] = trace.nodes[name]["value"], -log_det_root(trace.nodes[name]["fn"])
        result = {}
        for name, site in self.prototype_trace.iter_stochastic_nodes():
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                event_dim = site["fn"].event_dim
                result[name] = pyro.sample(name, Value(values[name], densities[name], event_dim))
        return result

    def _hyperparameter_distribution(self) -> dist.MultivariateNormal:
        return dist.MultivariateNormal(self.loc, scale_tril=self.scale[:, None] * self.scale_tril)

    def _draw_hyperparameters(self) -> Float[Tensor, " h"]:
        """Draw the hyperparameters in unconstrained space."""
        if not self.hyperparameters:
            return torch.zeros(0)
        name = f"_{self._pyro_name}_hyperparameters"
        return pyro.sample(name, self._hyperparameter_distribution(), infer={"is_auxiliary": True})

    @torch.no_grad()
    def _check(self, latent: Float[Tensor, " h"], q: ConditionalPosterior, leaves: Float[Tensor, " d"]) -> None:
        """Weigh a draw after training; the first 100 warn if the guide is far from the posterior."""
        if len(self._draws) < ENOUGH:
            self._draws.append(self._weighted_jointly(latent, q, leaves[None]))
            if len(self._draws) == ENOUGH:
                warn_of_poor_fit(joined(self._draws), latent.numel(), "the guide")

    @torch.no_grad()
    def _follow(self, q: ConditionalPosterior) -> None:
        """Move the marginals of phi towards the marginals under q."""
        self._draws.clear()
        moved = []
        for old, new in zip(self._marginals(), q.marginals(), strict=True):
            step = (new.mean - old.mean)[..., None]
            around = Marginals(new.mean, covariance_tril(new.tril @ new.tril.mT + (1 - _DAMPING) * step @ step.mT))
            moved.append(between(old, around, _DAMPING))
        self._set_marginals(moved)
        if not self._is_linear:
            self._recenter(q, _DAMPING)

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Medians of the hyperparameters, and of the Gaussian sites given them, by name."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        values = self.space.values(self.loc.detach()) if self.hyperparameters else {}
        q = self._conditional(values)
        return values | self._values(q, values, q.by_name(q.mean))

    def _values(
        self, q: ConditionalPosterior, values: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Values of the Gaussian sites at leaves."""
        nodes = q.trace.nodes
        if not q.is_flat:
            nodes = self._program.trace(values, leaves).nodes
        return {name: value_at(nodes[name]["fn"], leaves[name]).detach() for name in self.gaussian}

    @torch.no_grad()
    def quantiles(self, quantiles: Sequence[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Quantiles of each latent site, by name.

        Args:
            quantiles: numbers between 0 and 1.
            *args: arguments of the model, for a first call.
            **kwargs: keyword arguments.

        Returns:
            For each site (Q, ...): exact for numbers among the hyperparameters, from 1,024 draws for Gaussian sites.

        Warns:
            UserWarning: if the guide is far from the posterior.
        """
        try:
            levels = torch.as_tensor(quantiles, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            levels = torch.empty(0)
        if levels.dim() != 1 or not levels.numel() or not ((levels >= 0) & (levels <= 1)).all():
            cure = "List probabilities, such as [0.05, 0.95]."
            fail("AutoNNGP.quantiles", "quantiles", "to be probabilities", f"{quantiles!r:.40}", cure)
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        result: dict[str, Tensor] = {}
        draws: dict[str, list[Tensor]] = {name: [] for name in self.gaussian}
        weighted = []
        count = _HYPER_DRAWS if self.hyperparameters else 1
        latent = torch.zeros(count, 0)
        if self.hyperparameters:
            q_theta = self._hyperparameter_distribution()
            ends = dist.Normal(self.loc, q_theta.stddev).icdf(levels.to(self.loc)[:, None])
            rows = [self.space.values(end) for end in ends]
            result = {name: torch.stack([row[name] for row in rows]) for name in self.hyperparameters}
            latent = q_theta.sample((count,))
        for row in latent:
            values = self.space.values(row)
            q = self._conditional(values)
            every = q.draw(_DRAWS_EACH * _HYPER_DRAWS // count)
            weighed = every if self._is_linear else every[: _HYPER_DRAWS // count]  # one more run for each of others
            weighted.append(self._weighted_jointly(row, q, weighed))
            for leaves in [q.by_name(every)] if q.is_flat else map(q.by_name, every):
                for name, value in self._values(q, values, leaves).items():
                    draws[name].append(value if q.is_flat else value[None])
        warn_of_poor_fit(joined(weighted), latent.shape[-1], "the guide")
        for name, each in draws.items():
            table = torch.cat(each)
            result[name] = table.quantile(levels.to(table), dim=0)
        return result
