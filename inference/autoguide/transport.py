r"""Transport of a program by a guide: its latent values as functions of nearly independent standard normal ones.

Hamiltonian Monte Carlo takes few steps where the posterior is close to a standard normal distribution. The guide
:class:`~pyro_nngp.inference.autoguide.auto_nngp.AutoNNGP` knows how it differs from one, and the map follows from it.
Hyperparameters u, in unconstrained space, and the few coefficients c come first:

.. math:: u = m + L \epsilon, \qquad c = \bar c(\epsilon) + C(\epsilon) z_c,

with the moments of c under the guide at u = m, and their change along each :math:`\epsilon`. Given both, each value of
a process is drawn after its neighbors, from its prior conditional times what the data add to it:

.. math:: f_j = s_j \Big( \frac{w_j^\top f_{n(j)}}{v_j} + a_j^\top f_{n(j)} + b_j + t_j^\top c \Big) + s_j^{1/2} z_j,
   \qquad s_j^{-1} = v_j^{-1} + \tau_j .

The prior's :math:`w_j, v_j` follow from the hyperparameters; :math:`\tau_j, a_j, b_j, t_j` are such that at u = m this
is the guide's distribution of :math:`f_j` given its neighbors and c. What the data determine stays where it is when
hyperparameters change, and what they do not determine scales with the prior: a partially non-centered
parameterization, for each value as much as is right for it. Group effects have no neighbors. With :math:`\tau = a = b =
t = 0` it is whitening, which is as ill-conditioned as the data are informative. All determinants are known, so the
posterior of the program is kept exactly, however good the guide is.

Reference: Hoffman et al. (2019), "NeuTra-lizing bad geometry in Hamiltonian Monte Carlo using neural transport";
Papaspiliopoulos, Roberts, Sköld (2003), "Non-centered parameterisations for hierarchical models and data
augmentation"; the factor of the posterior is from Vecchia (1988).

Cost: a solution with the guide's precision for each value, and 2 h + 1 factorizations, once; O(N K) per run on top of
the prior. Symbols: h hyperparameters, p coefficients.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro.distributions import Normal
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from pyro_nngp._checks import fail
from pyro_nngp.conditionals.general_kernel import solve
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference._traces import latent_sites
from pyro_nngp.inference.autoguide.auto_nngp import AutoNNGP
from pyro_nngp.inference.autoguide.conditional import ConditionalPosterior
from pyro_nngp.inference.autoguide.linear_predictor import gaussian_base, value_at
from pyro_nngp.inference.autoguide.program_checks import check_outside_plates
from pyro_nngp.linalg import cholesky, solve_triangular

SITE = "_white"


class Transported:
    """A program with one latent site of standard normal values, of which all original latent sites are functions.

    The values of these are in the traces of the program, and in what ``Predictive(program, draws)`` returns. Sites
    that the guide does not have, such as data that are left out or at new places, are drawn by the program.

    Args:
        where: name of the caller, for messages.
        model: a Pyro program.
        guide: a guide for it, trained or not.

    Raises:
        TypeError: if `guide` is not an AutoNNGP.
        ValueError: if it is run within vectorized plates, or prepared with other latent sites than the guide has.

    Attributes:
        original: the program.
    """

    _of_process: "type[Effects] | None" = None

    def __init__(self, where: str, model: Callable, guide: AutoNNGP) -> None:
        if not isinstance(guide, AutoNNGP):
            fail(where, "guide", "to be an AutoNNGP", type(guide).__name__, "Pass AutoNNGP(model).", TypeError)
        self._where, self.original, self._guide = where, model, guide
        self._map: Map | None = None

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compute the map from the present guide, with the arguments of its first call."""
        self._make_map(*args, **kwargs)
        with pyro.poutine.block(), torch.no_grad():
            trace = pyro.poutine.trace(self).get_trace(*args, **kwargs)
        known = {SITE, *self._guide.hyperparameters, *self._guide.gaussian}
        more = [n for n, site in latent_sites(trace).items() if n not in known and not site["fn"].has_enumerate_support]
        if more:
            cure = "Run the program as at the guide's first call."
            fail(self._where, "latent sites", f"to be {sorted(known - {SITE})}", f"{more} too", cure)

    def _make_map(self, *args: Any, **kwargs: Any) -> "Map":
        with pyro.poutine.block(), torch.no_grad():
            self._guide.median(*args, **kwargs)
            self._map = Map(self._guide, self._of_process)
        return self._map

    @torch.no_grad()
    def original_values(self, values: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Values of the latent sites of the original program at one draw, {site: value}."""
        with pyro.poutine.block():
            trace = pyro.poutine.trace(pyro.poutine.condition(self, values)).get_trace(*args, **kwargs)
        names = (*self._guide.hyperparameters, *self._guide.gaussian)
        return {name: trace.nodes[name]["value"] for name in names}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program at the map of the white site."""
        check_outside_plates(self._where, "a program with a guide")
        current = self._make_map(*args, **kwargs) if self._map is None else self._map
        normal = dist.Normal(current.zero, torch.ones_like(current.zero)).to_event(1).mask(False)
        white = pyro.sample(SITE, normal, infer={"is_auxiliary": True})
        return self._run(current(white), args, kwargs)

    def _run(self, places: "dict[str, Place]", args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the program with its latent sites at their places."""
        with At(places):
            return self.original(*args, **kwargs)


Place = Callable[[Any], tuple[Tensor, Tensor]]  # from the distribution of a site to its value and log density


class Map:
    """Map from standard normal values to a value of each site.

    Args:
        guide: the guide.
        of_process: what makes the effects of a process; None as of other sites.

    Attributes:
        zero: the values at the center of the guide.
    """

    def __init__(self, guide: AutoNNGP, of_process: "type[Effects] | None" = None) -> None:
        self._guide, self._h = guide, 0
        if guide.hyperparameters:
            self._loc, self._h = guide.loc.detach().clone(), guide.loc.numel()
            self._tril = (guide.scale[:, None] * guide.scale_tril).detach()
        q = self._posterior(torch.zeros(self._h))
        like = next(iter(guide.prototype_trace.nodes[name]["value"] for name in guide.gaussian)).detach()
        self.zero = torch.zeros(self._h + len(q)).to(like)
        kinds = dict.fromkeys(q.processes, of_process or Effects)
        self._effects = {name: kinds.get(name, Effects)(q, name, like) for name in q.sparse_names}
        self._sizes = [self._h, *(len(effects) for effects in self._effects.values())]
        self._sizes.append(len(self.zero) - sum(self._sizes))
        self._dense = dict(zip(q.dense_names, q.dense_shapes, strict=True))
        self._moments, self._changes = [part.to(like) for part in _moments(q)], list[list[Tensor]]()
        for row in torch.eye(self._h):
            ahead, behind = self._posterior(row), self._posterior(-row)
            pairs = zip(_moments(ahead), _moments(behind), strict=True)
            self._changes.append([((a - b) / 2).to(like) for a, b in pairs])
            for effects in self._effects.values():
                effects.follow(ahead, behind)

    def _posterior(self, epsilon: Float[Tensor, " h"]) -> ConditionalPosterior:
        return self._guide.conditional_at(self._loc + self._tril @ epsilon.to(self._loc) if self._h else epsilon)

    def __call__(self, white: Float[Tensor, " d"]) -> dict[str, Place]:
        epsilon, *blocks, last = white.split(self._sizes)
        places: dict[str, Place] = {}
        if self._h:
            latent = self._loc + self._tril @ epsilon.to(self._loc)
            for name, part, value in self._guide.space.unpack(latent):
                places[name] = _Hyperparameter(part, value)
        mean, log_scale, unit = self._moments
        for step, (mean_change, scale_change, _) in zip(epsilon, self._changes, strict=True):
            mean, log_scale = mean + step * mean_change, log_scale + step * scale_change
        coefficients = mean + unit @ (log_scale.exp() * last)
        lengths = [shape.numel() for shape in self._dense.values()]
        parts = zip(self._dense.items(), coefficients.split(lengths), log_scale.split(lengths), strict=True)
        for (name, shape), part, scale in parts:
            places[name] = _Coefficient(part.reshape(shape), scale.reshape(shape))
        for (name, effects), z in zip(self._effects.items(), blocks, strict=True):
            places[name] = effects.at(z, coefficients, epsilon)
        return places


def _moments(q: ConditionalPosterior) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, log scales and unit triangle of the dense leaves."""
    tril = cholesky(torch.from_numpy(q.precision.dense_covariance()), 0.0)
    scale = tril.diagonal()
    return q.mean[len(q) - len(scale) :], scale.log(), tril / scale


@dataclass(frozen=True)
class _Hyperparameter:
    unconstrained: Tensor
    value: Tensor

    def __call__(self, fn: Any) -> tuple[Tensor, Tensor]:
        volume = biject_to(fn.support).log_abs_det_jacobian(self.unconstrained, self.value)
        return self.value, fn.log_prob(self.value) + _sum_events(volume, volume.dim() - len(fn.batch_shape))


@dataclass(frozen=True)
class _Coefficient:
    white: Tensor
    log_scale: Tensor

    def __call__(self, fn: Any) -> tuple[Tensor, Tensor]:
        density = self.log_scale - (self.white.square() + math.log(2 * math.pi)) / 2
        return value_at(fn, self.white), _sum_events(density, fn.event_dim)


class Effects:
    """Contribution of the data to the prior conditionals of a site with many Gaussian values, (n,), K neighbors.

    The values are values of a process, deviations from the mean of a normal site, or white values of a multivariate
    normal site; several processes at one site follow each other.
    """

    def __init__(self, q: ConditionalPosterior, name: str, like: Tensor) -> None:
        place, base = q.sparse_place(name), q.prior(name)
        n = place.stop - place.start
        w, var, self.neighbors = prior_of(base, n)
        scale = var.sqrt() if isinstance(base, Normal) else torch.ones(n)
        scale = scale.double().cpu()
        w, var, near = w.double().cpu(), var.double().cpu(), self.neighbors.cpu()
        columns = near.clamp(min=0)
        every = torch.cat([torch.arange(n)[:, None], columns], -1)
        cov = q.prior_covariance(name) * scale[every][:, :, None] * scale[every][:, None, :]
        weights, rest, *_ = solve(cov[:, 1:, 1:].clone(), cov[:, 0, 1:], cov[:, 0, 0], None, near >= 0, 0.0)

        def natural(values: Tensor) -> Tensor:
            values = scale * values
            return (values - (weights * values[..., columns]).sum(-1)) / rest

        slopes = q.precision.slope()
        coefficients = q.mean[len(q) - slopes.shape[1] :]
        slope = torch.from_numpy(slopes[place])
        self.information = (1 / rest - 1 / var).clamp(min=0).to(like)
        self.pull = (weights / rest[:, None] - w / var[:, None]).to(like)
        self._push = natural(q.mean[place] - slope @ coefficients).to(like)
        self._slope = natural(slope.mT).to(like)

    def __len__(self) -> int:
        return len(self._push)

    def follow(self, ahead: ConditionalPosterior, behind: ConditionalPosterior) -> None:
        """Note what changes along the next hyperparameter, given the posteriors a step ahead and behind: nothing."""

    def at(self, z: Float[Tensor, " n"], coefficients: Float[Tensor, " p"], epsilon: Float[Tensor, " h"]) -> Place:
        """The place of the values: a function of their prior."""

        def place(fn: Any) -> tuple[Tensor, Tensor]:
            base = gaussian_base(fn)
            w, var, neighbors = prior_of(base, len(self))
            s = 1 / (1 / var + self.information)
            weights = s[:, None] * (w / var[:, None] + self.pull)
            centered = s * (self._push + coefficients @ self._slope) + s.sqrt() * z
            if weights.shape[1]:
                centered = solve_triangular(weights, neighbors, centered, levels_of(base))
            centered, volume = (part.reshape(base.batch_shape + base.event_shape) for part in (centered, s.log() / 2))
            if isinstance(base, NNGP | Normal):
                value = centered if isinstance(base, NNGP) else base.loc + centered
                return value, fn.log_prob(value) + _sum_events(volume, fn.event_dim)
            density = volume - (centered.square() + math.log(2 * math.pi)) / 2
            return value_at(fn, centered), _sum_events(density, fn.event_dim)

        return place


def prior_of(base: Any, n: int) -> tuple[Float[Tensor, "n K"], Float[Tensor, " n"], Int[Tensor, "n K"]]:
    """Prior conditionals of the values of a site: weights, variances and neighbors."""
    if not isinstance(base, NNGP):
        var = base.scale.square() if isinstance(base, Normal) else base.loc.new_ones(())
        shape = base.batch_shape + base.event_shape
        return var.new_zeros(n, 0), var.expand(shape).reshape(n), torch.zeros(n, 0, dtype=torch.long)
    w, var = base.conditionals
    near, shape = base.graph.neighbors, base.batch_shape
    first = len(near) * torch.arange(shape.numel(), device=near.device)[:, None, None]
    neighbors = torch.where(near < 0, -1, near + first).reshape(n, -1)
    return w.expand(*shape, *w.shape[-2:]).reshape(n, -1), var.expand(*shape, var.shape[-1]).reshape(n), neighbors


def levels_of(base: NNGP) -> list[Tensor]:
    """Dependency levels of the values of all processes of a site."""
    count, n = base.batch_shape.numel(), len(base.graph.neighbors)
    if count == 1:
        return base.graph.levels()
    return [torch.cat([rows + i * n for i in range(count)]) for rows in base.graph.levels()]


def _sum_events(value: Tensor, number: int) -> Tensor:
    return value.sum(tuple(range(-number, 0))) if number > 0 else value


class At(Messenger):
    """Set latent sites to given values, with the log density of the program plus the log volume of the map."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        super().__init__()
        self._places = places

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if msg["is_observed"] or name not in self._places:
            return
        value, density = self._places[name](fn)
        msg["fn"] = dist.Delta(value, density, event_dim=fn.event_dim)
        msg["value"], msg["is_observed"] = value, True
