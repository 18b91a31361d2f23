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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoGuide, init_to_median
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroParam
from torch import Tensor
from tqdm.auto import tqdm

from pyro_nngp._checks import check_int, check_number, fail
from pyro_nngp._kinds import check_callable
from pyro_nngp.inference._traces import check_program
from pyro_nngp.inference.autoguide.conditional import ConditionalPosterior
from pyro_nngp.inference.autoguide.conditional_guide import ConditionalGuide, Expansion, Leaves
from pyro_nngp.inference.autoguide.drawn_sites import Value, draw_sites
from pyro_nngp.inference.autoguide.fit_check import ENOUGH, Weighted, joined, warn_of_poor_fit
from pyro_nngp.inference.autoguide.in_units import InUnits, take_stored
from pyro_nngp.inference.autoguide.laplace import PAIRED
from pyro_nngp.inference.autoguide.linear_predictor import colored, linear_sites, log_det_root, value_at
from pyro_nngp.inference.autoguide.linearized_program import LinearizedProgram
from pyro_nngp.inference.autoguide.mode_search import MOST, hyperparameter_mode
from pyro_nngp.inference.autoguide.program_checks import check_outside_plates, check_sites, same
from pyro_nngp.inference.autoguide.quadratics import Marginals
from pyro_nngp.inference.autoguide.unconstrained import Unconstrained
from pyro_nngp.inference.diagnostics.calibration import pareto_shape

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
    _conditional: ConditionalGuide  # after the first call, with the center of its expansion
    _center: Leaves

    def __init__(self, model: Callable, *, init_loc_fn: Callable = init_to_median, init_scale: float = 0.1) -> None:
        check_program("AutoNNGP", model)
        check_callable("AutoNNGP", "init_loc_fn", init_loc_fn, "Pass one of pyro.infer.autoguide.initialization.")
        check_number("AutoNNGP", "init_scale", init_scale, cure="It is a standard deviation.")
        super().__init__(model)
        self._model, self._init_scale = (model, init_loc_fn), init_scale  # not a part of the guide, nor of its files
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
        program = LinearizedProgram(self._model[0], args, kwargs, bool(discrete))
        check_sites(sites)
        self.gaussian = linear_sites(sites, program.phi)
        self.hyperparameters = [name for name in sites if name not in self.gaussian]
        with torch.no_grad():
            self.space, start = Unconstrained.of(sites, self.hyperparameters)
        stored = None
        if self.hyperparameters and self._pyro_context.active:  # median() does not read the store
            stored = take_stored(start, *map(self._pyro_get_fullname, ("loc", "scale")))
        loc, unit = (start, torch.ones_like(start)) if stored is None else stored
        if self.hyperparameters:
            self._set_loc(loc, unit)
            self.scale = PyroParam(torch.full_like(loc, self._init_scale), constraints.softplus_positive)
            self.scale_tril = PyroParam(torch.eye(len(loc)).to(loc), constraints.unit_lower_cholesky)
            if len(loc) > PAIRED:  # noise of as many gradients would outweigh what correlations gain
                self.scale_tril_unconstrained.requires_grad_(False)
        values = self._medians()
        self._conditional, expansion = ConditionalGuide.of(program, sites, self.gaussian, values)
        with torch.no_grad():
            q, expansion = self._conditional.best(values, expansion)
            if 0 < len(loc) <= MOST and stored is None:
                mode, tril, expansion = hyperparameter_mode(self._conditional, self.space, self.loc, expansion)
                self._set_loc(mode, tril.norm(dim=1))
                self.scale, self.scale_tril = tril.diagonal(), tril / tril.diagonal()[:, None]
                values = self._medians()
                q, expansion = self._conditional.best(values, expansion)
            self._expand_at(expansion)
            draws = self._conditional.weighted(q, values, q.draw(ENOUGH))
            warn_of_poor_fit(draws, 0, "the Gaussian given the hyperparameters")

    def _set_loc(self, loc: Float[Tensor, " h"], unit: Float[Tensor, " h"]) -> None:
        """Set m, of which optimizers take steps in units."""
        self.register_buffer("unit", unit)
        self.loc = PyroParam(loc, InUnits(unit))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state, which has values that the first call makes."""
        if self.prototype_trace is None and any(name.startswith(prefix) for name in state_dict):
            cure = "Call the guide with the data: its first call reads the program."
            fail("AutoNNGP.load_state_dict", "the guide", "after its first call", "a new one", cure)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _expansion(self) -> Expansion:
        """The point about which the program is expanded."""
        count = sum(name.startswith("phi_") for name, _ in self.named_buffers(recurse=False))
        parts = [(getattr(self, f"phi_{i}"), getattr(self, f"tril_{i}")) for i in range(count)]
        return Expansion(self._center, [Marginals(*part) for part in parts])

    def _expand_at(self, expansion: Expansion) -> None:
        """Expand the program about another point."""
        self._center = expansion.center
        for i, part in enumerate(expansion.marginals):
            self.register_buffer(f"phi_{i}", part.mean)
            self.register_buffer(f"tril_{i}", part.tril)

    def _medians(self) -> dict[str, Tensor]:
        """Medians of the hyperparameters, by name."""
        return self.space.values(self.loc.detach()) if self.hyperparameters else {}

    def conditional_at(self, latent: Float[Tensor, " h"]) -> ConditionalPosterior:
        """The posterior q(z | theta) at hyperparameters in unconstrained space."""
        return self._conditional.posterior(self.space.values(latent), *self._expansion())

    def _weighted_jointly(
        self, latent: Float[Tensor, " h"], q: ConditionalPosterior, draws: Float[Tensor, "S d"]
    ) -> Weighted:
        """Draws of q at hyperparameters, weighted by the joint density over the guide's."""
        weights, determined = self._conditional.weighted(q, self.space.values(latent), draws)
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
        weights, count = [], num_samples if self.hyperparameters else 1
        for _ in tqdm(range(count), disable=not progress, delay=1, desc="khat", unit="draw"):
            latent = self._hyperparameter_distribution().sample() if self.hyperparameters else torch.zeros(0)
            q = self.conditional_at(latent)
            weights.append(self._weighted_jointly(latent, q, q.draw(num_samples // count)).log_weights)
        return pareto_shape(torch.cat(weights))

    # The guide.

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latent sites; returns their values by name."""
        check_outside_plates("AutoNNGP", "the guide")
        learning = torch.is_grad_enabled() and self.training
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        elif learning and not same((args, kwargs), self._conditional.program.arguments):
            cure = "It needs all data at each step. Build a new guide for other data; take VNNGP for minibatches."
            fail("AutoNNGP", "arguments while training", "as at the first call", "others", cure)
        plates = self._create_plates(*args, **kwargs)
        latent = self._draw_hyperparameters()
        given, densities = self.space.values(latent), self.space.densities(latent)
        q = self.conditional_at(latent)
        leaves = q.draw(1)[0]
        white = Value(leaves, q.log_white_prob(leaves), event_dim=1)  # not q itself: traces live on, and q is large
        pyro.sample(f"_{self._pyro_name}_gaussian", white, infer={"is_auxiliary": True})
        if learning:
            self._draws.clear()
            with torch.no_grad():
                self._expand_at(self._conditional.followed(self._expansion(), q))
        else:
            self._check(latent, q, leaves)
        place = colored if torch.is_grad_enabled() else value_at
        trace, values = self._conditional.program.trace(given, q.by_name(leaves), place), dict(given)
        for name in self.gaussian:
            values[name], densities[name] = trace.nodes[name]["value"], -log_det_root(trace.nodes[name]["fn"])
        return draw_sites(self.prototype_trace, plates, values, densities)

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
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Medians of the hyperparameters, and of the Gaussian sites given them, by name."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        values = self._medians()
        q = self._conditional.posterior(values, *self._expansion())
        return values | self._conditional.site_values(q, values, q.by_name(q.mean))

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
        levels = _levels(quantiles)
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
            values, q = self.space.values(row), self.conditional_at(row)
            every = q.draw(_DRAWS_EACH * _HYPER_DRAWS // count)
            fewer = _HYPER_DRAWS // count  # each a run of the program that is not linear
            weighed = every if self._conditional.is_linear else every[:fewer]
            weighted.append(self._weighted_jointly(row, q, weighed))
            for leaves in [q.by_name(every)] if q.is_flat else map(q.by_name, every):
                for name, value in self._conditional.site_values(q, values, leaves).items():
                    draws[name].append(value if q.is_flat else value[None])
        warn_of_poor_fit(joined(weighted), latent.shape[-1], "the guide")
        for name, each in draws.items():
            table = torch.cat(each)
            result[name] = table.quantile(levels.to(table), dim=0)
        return result


def _levels(quantiles: Any) -> Tensor:
    """Levels of quantiles as a vector."""
    try:
        levels = torch.as_tensor(quantiles, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        levels = torch.empty(0)
    if levels.dim() != 1 or not levels.numel() or not ((levels >= 0) & (levels <= 1)).all():
        cure = "List probabilities, such as [0.05, 0.95]."
        fail("AutoNNGP.quantiles", "quantiles", "to be probabilities", f"{quantiles!r:.40}", cure)
    return levels
