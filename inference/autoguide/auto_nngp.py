r"""A guide for any Pyro program with nearest-neighbor Gaussian processes.

Latent sites are of two kinds: the Gaussian ones z, which are processes, coefficients and group effects that the data
depend on linearly; and all others, hyperparameters :math:`\theta`. The guide is

.. math:: q(\theta, z) = N(u(\theta) \mid m, L L^\top) \; q(z \mid \theta),

with the hyperparameters u in unconstrained space, and q(z | theta) the posterior under a likelihood that has been
replaced by its best quadratic function (:mod:`pyro_nngp.inference.autoguide.conditional`): exact for Gaussian data, for
others the closest Gaussian. As in integrated nested Laplace approximations (Rue, Martino and Chopin 2009), each value
of the hyperparameters has its own posterior of z, in which coefficients, groups and processes are jointly Gaussian.
A near collinearity of a coefficient and a process is part of the program's precision matrix, and need not be learned.

Let z be a function of standard normal w and theta. Where q(z | theta) is optimal, the gradient of the ELBO with respect
to theta is :math:`E_q\, \partial_\theta \log p(y \mid z(w, \theta), \theta)` with w held fixed, so that draws of w
carry no gradients.

Cost of a call: two runs of the program, and a sparse Cholesky factorization of the precision
(:mod:`pyro_nngp.linalg.factored_precision`). All data take part. The first call finds the mode of the hyperparameters:
some dozens of factorizations. Symbols: h hyperparameters in unconstrained space, d Gaussian values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import TorchDistribution, constraints
from pyro.infer.autoguide import AutoGuide, init_to_median
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroParam
from pyro.poutine.runtime import get_plates
from torch import Tensor, nn
from torch.distributions import biject_to, register_kl

from pyro_nngp._checks import check_callable, check_number, fail
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference._traces import check_program
from pyro_nngp.inference.autoguide import laplace
from pyro_nngp.inference.autoguide.conditional import ConditionalPosterior
from pyro_nngp.inference.autoguide.linear_predictor import (
    Blocks,
    Jacobian,
    colored,
    gaussian_base,
    leaf_shape,
    linear_sites,
    log_det_root,
    run_at_leaves,
    value_at,
)
from pyro_nngp.inference.autoguide.observations import check_density, observed_sites
from pyro_nngp.linalg import NotPositiveDefiniteError

_PARTICLES = 16  # pairs of draws of phi at which gradients and curvatures are averaged
_DAMPING = 0.2  # of the mean of phi from step to step
_NEWTON_STEPS, _HALVINGS, _SETTLED = 50, 12, 1e-3
_FIXED_POINT_STEPS = 5
_MOST, _ROUNDS, _NEAR = 8, 4, 0.05  # hyperparameters whose mode is found by differences; alternations with z
_IMPOSSIBLE = -1e10
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
    other ways are linearized at its mean. All other latent sites are hyperparameters: jointly normal in unconstrained
    space.

    The first call, which needs the data, starts the guide at the mode of up to 8 hyperparameters and the curvature
    there; SVI moves it on to the maximum of the ELBO, in 50 - 100 steps. Later calls ignore their arguments, as those
    of other automatic guides do.

    Args:
        model: the program.
        init_loc_fn: initial values of the hyperparameters, from :mod:`pyro.infer.autoguide.initialization`.
        init_scale: initial standard deviation of the hyperparameters in unconstrained space, if there are more than 8.

    Attributes:
        gaussian, hyperparameters: names of the two kinds of sites, after the first call.
        loc, scale, scale_tril: m, and L as standard deviations times a unit triangle.

    Raises:
        TypeError: if `model` is not a program, or `init_loc_fn` no function.
        ValueError: if the program has no nearest-neighbor process over all points, discrete latent sites or subsampled
            plates; if its data do not depend on a process, or one observation depends on several points of it; if the
            distribution of data that depend on a process is not determined by its parameters, or a factor or another
            prior depends on one; if the guide is trained on other data than those of the first call, or called within
            vectorized plates.

    Reference: Rue, Martino, Chopin (2009), "Approximate Bayesian inference for latent Gaussian models by using
    integrated nested Laplace approximations", JRSS B.
    """

    loc: Tensor
    scale: Tensor
    scale_tril: Tensor
    prototype_trace: Any

    def __init__(self, model: Callable, *, init_loc_fn: Callable = init_to_median, init_scale: float = 0.1) -> None:
        check_program("AutoNNGP", model)
        check_callable("AutoNNGP", "init_loc_fn", init_loc_fn, "Pass one of pyro.infer.autoguide.initialization.")
        check_number("AutoNNGP", "init_scale", init_scale, cure="It is a standard deviation.")
        super().__init__(InitMessenger(init_loc_fn)(model))
        self._program, self._init_scale = (model,), init_scale  # in a tuple: not a part of the guide
        self.gaussian: list[str] = []
        self.hyperparameters: list[str] = []

    # The program: its sites, and the first values of all parameters.

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        try:
            self._setup(args, kwargs)
        except Exception:
            self.prototype_trace = None
            raise

    def _setup(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        sites = dict(self.prototype_trace.iter_stochastic_nodes())
        _check_sites(sites)
        self._arguments = args, kwargs
        self.gaussian = linear_sites(sites, self._phi_at)
        self.hyperparameters = [name for name in sites if name not in self.gaussian]
        self._supports = [sites[name]["fn"].support for name in self.hyperparameters]
        with torch.no_grad():
            values = {name: sites[name]["value"].detach() for name in self.hyperparameters}
            starts = [biject_to(s).inv(v) for s, v in zip(self._supports, values.values(), strict=True)]
        self._hyper_shapes = [start.shape for start in starts]
        if starts:
            loc = torch.cat([start.flatten() for start in starts])
            self.loc = nn.Parameter(loc)
            self.scale = PyroParam(torch.full_like(loc, self._init_scale), constraints.softplus_positive)
            self.scale_tril = PyroParam(torch.eye(len(loc)).to(loc), constraints.unit_lower_cholesky)
        leaves = {n: torch.zeros(leaf_shape(sites[n]["fn"])).to(sites[n]["value"]) for n in self.gaussian}
        self._center = leaves
        trace, observed, jacobian = self._linearize(values, leaves)
        for name in self.hyperparameters:
            check_density("AutoNNGP", trace.nodes[name], list(jacobian.leaves.values()))
        processes = {n: sites[n]["fn"].event_shape[-1] for n in leaves if isinstance(_base(sites[n]), NNGP)}
        self._blocks = Blocks("AutoNNGP", jacobian, processes)
        for i, each in enumerate(observed):
            self.register_buffer(f"phi_{i}", each.phi.detach().double().cpu())
            self.register_buffer(f"spread_{i}", torch.zeros(0, *each.phi.shape, dtype=torch.float64))
        self._newton(values)
        self._fixed_point(values)
        if starts and len(loc) <= _MOST:
            self._start_hyperparameters()

    def _phi_at(self, values: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> Tensor:
        """Parameters phi of the data at values and leaves, in one vector."""
        _, observed, _ = self._linearize(values, leaves)
        return torch.cat([each.phi.detach().flatten() for each in observed])

    def _linearize(self, values: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> tuple[Any, list, Jacobian]:
        """Trace, observed sites and J at hyperparameters and leaves."""
        with torch.enable_grad():
            leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in center.items()}
            values = {name: value.detach() for name, value in values.items()}
            trace = run_at_leaves(self._program[0], *self._arguments, values, leaves)
            observed = observed_sites("AutoNNGP", trace, list(leaves.values()))
            return trace, observed, Jacobian(torch.cat([each.phi.flatten() for each in observed]), leaves)

    def _moments(self) -> list[tuple[Tensor, Tensor]]:
        """Mean and particles of phi for each observed site."""
        count = sum(name.startswith("phi_") for name, _ in self.named_buffers(recurse=False))
        return [(getattr(self, f"phi_{i}"), getattr(self, f"spread_{i}")) for i in range(count)]

    def conditional_at(self, latent: Float[Tensor, " h"]) -> ConditionalPosterior:
        """The posterior q(z | theta) at hyperparameters in unconstrained space."""
        return self._conditional({name: value for name, _, value in self.unpack(latent)})

    def _conditional(self, values: Mapping[str, Tensor]) -> ConditionalPosterior:
        """The posterior q(z | theta) at values of the hyperparameters."""
        return ConditionalPosterior(*self._linearize(values, self._center), self._blocks, self._moments())

    @torch.no_grad()
    def _newton(self, values: Mapping[str, Tensor]) -> None:
        """Move the moments of phi to the mode of z given the first hyperparameters."""
        leaves = None
        for _ in range(_NEWTON_STEPS):
            q, now, length = self._conditional(values), [phi.clone() for phi, _ in self._moments()], 1.0
            leaves = torch.zeros_like(q.mean) if leaves is None else leaves
            goal, before = q.phi(q.mean), q.log_joint(leaves, now)
            for _ in range(_HALVINGS):
                phi = [torch.lerp(a, b, length) for a, b in zip(now, goal, strict=True)]
                trial = torch.lerp(leaves, q.mean, length)
                if q.log_joint(trial, phi) >= before - 1e-6 * abs(before):
                    break
                length /= 2
            leaves = trial
            self._move(phi, 1.0)
            if max(float((a - b).abs().max()) for a, b in zip(now, phi, strict=True)) < _SETTLED:
                break

    @torch.no_grad()
    def _fixed_point(self, values: Mapping[str, Tensor]) -> None:
        """Draw new particles, and iterate to the mean of phi that agrees with them."""
        q = self._conditional(values)
        for i, (mean, draws) in enumerate(zip(q.phi(q.mean), q.phi(q.draw(_PARTICLES)), strict=True)):
            setattr(self, f"spread_{i}", draws - mean)
        for _ in range(_FIXED_POINT_STEPS):
            q = self._conditional(values)
            self._move(q.phi(q.mean), 0.5)

    def _move(self, phi: list[Tensor], part: float) -> None:
        for (mean, _), new in zip(self._moments(), phi, strict=True):
            mean.lerp_(new, part)

    def _start_hyperparameters(self) -> None:
        """Start q(theta) at the mode of the hyperparameters, with the curvature there."""
        for _ in range(_ROUNDS):
            before = self.loc.detach().double().cpu().numpy().copy()
            mode, cov = laplace.mode(self._log_evidence, before)
            with torch.no_grad():
                self.loc.copy_(torch.from_numpy(mode))
            self._fixed_point({name: value.detach() for name, _, value in self.unpack(self.loc.detach())})
            if np.abs(mode - before).max() < _NEAR:
                break
        tril = torch.from_numpy(np.linalg.cholesky(cov)).to(self.loc)
        self.scale, self.scale_tril = tril.diagonal(), tril / tril.diagonal()[:, None]

    @torch.no_grad()
    def _log_evidence(self, u: Float[np.ndarray, " h"]) -> float:
        """Log density of data and unconstrained hyperparameters, z integrated out."""
        parts = list(self.unpack(torch.from_numpy(u).to(self.loc)))
        volume = sum(
            float(biject_to(support).log_abs_det_jacobian(part, value).sum())
            for support, (_, part, value) in zip(self._supports, parts, strict=True)
        )
        try:
            density = self._conditional({name: value for name, _, value in parts}).log_evidence() + volume
        except (NotPositiveDefiniteError, ValueError):  # far from the data
            return _IMPOSSIBLE
        return density if np.isfinite(density) else _IMPOSSIBLE

    def unpack(self, latent: Float[Tensor, " h"]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Names, unconstrained values and values of the hyperparameters."""
        if not self.hyperparameters:
            return
        parts = latent.split([shape.numel() for shape in self._hyper_shapes])
        for name, shape, support, part in zip(
            self.hyperparameters, self._hyper_shapes, self._supports, parts, strict=True
        ):
            yield name, part.reshape(shape), biject_to(support)(part.reshape(shape))

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
        elif learning and not _same((args, kwargs), self._arguments):
            cure = "It needs all data at each step. Build a new guide for other data; take VNNGP for minibatches."
            fail("AutoNNGP", "arguments while training", "as at the first call", "others", cure)
        plates = self._create_plates(*args, **kwargs)
        values, densities = self._draw_hyperparameters()
        q = self._conditional({name: values[name] for name in self.hyperparameters})
        leaves = pyro.sample(f"_{self._pyro_name}_gaussian", _White(q), infer={"is_auxiliary": True})
        if learning:
            self._follow(q, leaves)
        place = colored if torch.is_grad_enabled() else value_at
        own = {name: values[name] for name in self.hyperparameters}
        trace = run_at_leaves(self._program[0], *self._arguments, own, q.by_name(leaves), place)
        for name in self.gaussian:
            values[name], densities[name] = trace.nodes[name]["value"], -log_det_root(trace.nodes[name]["fn"])
        result = {}
        for name, site in self.prototype_trace.iter_stochastic_nodes():
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                event_dim = site["fn"].event_dim
                result[name] = pyro.sample(name, _Value(values[name], densities[name], event_dim))
        return result

    def _draw_hyperparameters(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draw the hyperparameters; returns values, and log densities of the maps to them."""
        values: dict[str, Tensor] = {}
        densities: dict[str, Tensor] = {}
        if not self.hyperparameters:
            return values, densities
        q = dist.MultivariateNormal(self.loc, scale_tril=self.scale[:, None] * self.scale_tril)
        latent = pyro.sample(f"_{self._pyro_name}_hyperparameters", q, infer={"is_auxiliary": True})
        for (name, part, value), support in zip(self.unpack(latent), self._supports, strict=True):
            density = biject_to(support).inv.log_abs_det_jacobian(value, part)
            own = value.dim() - self.prototype_trace.nodes[name]["fn"].event_dim
            values[name], densities[name] = value, density.flatten(own).sum(-1) if density.dim() > own else density
        return values, densities

    @torch.no_grad()
    def _follow(self, q: ConditionalPosterior, leaves: Float[Tensor, " d"]) -> None:
        """Move the mean of phi towards that of q, and replace the oldest particle."""
        means = q.phi(q.mean)
        for i, (mean, draw) in enumerate(zip(means, q.phi(leaves), strict=True)):
            spread = getattr(self, f"spread_{i}")
            setattr(self, f"spread_{i}", torch.cat([spread[1:], (draw - mean)[None]]))
        self._move(means, _DAMPING)

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Medians of the hyperparameters, and those of the Gaussian sites given them, by name."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        values = {name: value for name, _, value in self.unpack(self.loc.detach())} if self.hyperparameters else {}
        q = self._conditional(values)
        return values | self._values(q, values, q.by_name(q.mean))

    def _values(
        self, q: ConditionalPosterior, values: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Values of the Gaussian sites at leaves."""
        nodes = q.trace.nodes
        if not q.is_flat:
            nodes = run_at_leaves(self._program[0], *self._arguments, values, leaves).nodes
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
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        result: dict[str, Tensor] = {}
        draws: dict[str, list[Tensor]] = {name: [] for name in self.gaussian}
        levels = torch.tensor(quantiles, dtype=torch.float64)
        count = _HYPER_DRAWS if self.hyperparameters else 1
        latent = None
        if self.hyperparameters:
            tril = self.scale[:, None] * self.scale_tril
            ends = dist.Normal(self.loc, tril.norm(dim=-1)).icdf(levels.to(self.loc)[:, None])
            rows = [{name: value for name, _, value in self.unpack(end)} for end in ends]
            result = {name: torch.stack([row[name] for row in rows]) for name in self.hyperparameters}
            latent = dist.MultivariateNormal(self.loc, scale_tril=tril).sample((count,))
        for i in range(count):
            values = {} if latent is None else {name: value for name, _, value in self.unpack(latent[i])}
            q = self._conditional(values)
            every = q.draw(_DRAWS_EACH * _HYPER_DRAWS // count)
            for leaves in [q.by_name(every)] if q.is_flat else map(q.by_name, every):
                for name, value in self._values(q, values, leaves).items():
                    draws[name].append(value if q.is_flat else value[None])
        for name, each in draws.items():
            table = torch.cat(each)
            result[name] = table.quantile(levels.to(table), dim=0)
        return result


class _White(TorchDistribution):
    """The independent standard normal values behind the Gaussian sites, in coordinates of the leaves."""

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.real_vector
    has_rsample = True  # gradients do not go through the draw, see the module

    def __init__(self, q: ConditionalPosterior) -> None:
        self._q = q
        super().__init__((), (len(q),), validate_args=False)

    def rsample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "*S d"]:
        """Draws, without gradients."""
        shape = torch.Size(sample_shape)
        return self._q.draw(shape.numel()).reshape(*shape, len(self._q))

    def log_prob(self, value: Float[Tensor, "*S d"]) -> Float[Tensor, "*S"]:
        """Log density of the white values."""
        return self._q.log_white_prob(value)


class _Value(dist.Delta):
    """A Delta whose divergence includes its log density, which Pyro's divergence of a Delta leaves out."""


@register_kl(_Value, dist.Distribution)
def _kl_value(q: _Value, p: Any) -> Tensor:
    return q.log_density - p.log_prob(q.v)


def _base(site: Any) -> Any:
    return gaussian_base(site["fn"])


def _check_sites(sites: Mapping[str, Any]) -> None:
    """Raise unless a program has a process and no discrete latent sites."""
    if not any(isinstance(_base(site), NNGP) for site in sites.values()):
        cure = 'Write pyro.sample("f", NNGP(kernel, graph)), without a batch.'
        fail("AutoNNGP", "the program", "to have an NNGP site over all points", sorted(sites), cure)
    discrete = [name for name, site in sites.items() if site["fn"].support.is_discrete]
    if discrete:
        cure = "Write data summed over them, such as ZeroInflatedPoisson, or draw with QuickNUTS(model), which sums."
        fail("AutoNNGP", "latent sites", "continuous", discrete, cure)


def _same(a: Any, b: Any) -> bool:
    """Whether arguments are equal, tensors by value."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and not isinstance(a, Tensor) and bool(np.all(a == b))
