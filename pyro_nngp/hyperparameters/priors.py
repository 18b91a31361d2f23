"""Hyperparameters with priors: their mean-field guide, and their posterior draws."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from pyro.nn.module import _make_name
from torch import Tensor, nn
from torch.distributions import biject_to

from pyro_nngp._checks import check_fraction, check_positive, fail
from pyro_nngp._kinds import check_kind
from pyro_nngp._random import seeded
from pyro_nngp.hyperparameters.module import GPModule
from pyro_nngp.hyperparameters.reading import parameter, parameter_site


class HyperparameterGuide(GPModule):
    r"""Mean-field guide for the :class:`~pyro.nn.PyroSample` attributes of some modules.

    Each site gets a normal distribution in unconstrained space, mapped by a bijection to the support of the prior.

    Args:
        owner: the module whose sub-modules hold the priors. Assign priors before the model is built.
        init_scale: initial standard deviation in unconstrained space.
        latents: names of attributes that are latent variables of the owner and get no distribution here.
    """

    def __init__(self, owner: nn.Module, init_scale: float = 0.1, latents: Collection[str] = ()) -> None:
        super().__init__()
        where = "HyperparameterGuide"
        check_kind(where, "owner", owner, nn.Module, "a module", "Pass a method or a kernel.")
        check_positive(where, "init_scale", init_scale)
        check_kind(where, "latents", latents, (tuple, list, set, frozenset), "names", 'Write ("u",).')
        self._latents = frozenset(latents)
        self._sites = [site for site in sampled_attributes(owner) if site[1] not in latents]
        like = next(chain(owner.parameters(), owner.buffers()), torch.empty(0))
        for i, (module, attribute) in enumerate(self._sites):
            if _has_own_guide(module):
                continue
            with seeded(0, like):
                prior = _prior(module, attribute)
                draws = biject_to(prior.support).inv(prior.sample((99,)).contiguous())  # median() of a view is wrong
            loc = draws.median(0).values
            setattr(self, f"loc_{i}", nn.Parameter(loc))
            setattr(self, f"log_scale_{i}", nn.Parameter(torch.full_like(loc, init_scale).log()))

    @property
    def has_sites(self) -> bool:
        """Whether any attribute has a prior."""
        return bool(self._sites)

    @torch.no_grad()
    def quantiles(self, probability: float) -> dict[tuple[PyroModule, str], Tensor]:
        """Quantiles of each entry by module and attribute; exact where the support constrains each entry alone."""
        check_fraction("HyperparameterGuide.quantiles", "probability", probability, "0.5 is the median.")
        shift, at_probability = math.sqrt(2) * torch.erfinv(torch.tensor(2 * probability - 1.0).double()), {}
        for i, (module, attribute) in enumerate(self._sites):
            if _has_own_guide(module):
                at_probability[module, attribute] = module.own_quantiles(attribute, shift)
                continue
            loc, log_scale = getattr(self, f"loc_{i}"), getattr(self, f"log_scale_{i}")
            transform = biject_to(_prior(module, attribute).support)
            at_probability[module, attribute] = transform(loc + shift.to(loc) * log_scale.exp())
        return at_probability

    def sample(self) -> dict[tuple[PyroModule, str], Tensor]:
        """A draw of every attribute as a site of the present program."""
        return self._values(parameter_site, lambda name, q, _: pyro.sample(name, q))

    def medians(self) -> dict[tuple[PyroModule, str], Tensor]:
        """Medians of every attribute, without Pyro effects."""
        return self._values(parameter, lambda _, q, loc: _median(q) if loc is None else q.transforms[0](loc))

    def draw(self) -> dict[tuple[PyroModule, str], Tensor]:
        """A draw of every attribute, without Pyro effects."""
        return self._values(parameter, lambda _, q, __: q())

    def _values(self, read: Callable[..., Any], choose: Callable) -> dict[tuple[PyroModule, str], Tensor]:
        values: dict[tuple[PyroModule, str], Tensor] = {}
        drawn: dict[PyroModule, dict[str, Tensor]] = {}
        for i, (module, attribute) in enumerate(self._sites):
            own, loc = drawn.setdefault(module, {}), None
            if _has_own_guide(module):
                q = module.own_guide(attribute, own)
            else:
                loc = read(self, f"loc_{i}")
                q = _guide_of(module, attribute, loc, read(self, f"log_scale_{i}"))
            own[attribute] = values[module, attribute] = choose(_make_name(module._pyro_name, attribute), q, loc)
        return values

    def extra_repr(self) -> str:
        """The attributes that have a distribution here."""
        return ", ".join(f"{type(module).__name__}.{attribute}" for module, attribute in self._sites) or "no priors"

    @torch.no_grad()
    def take(self, other: "HyperparameterGuide") -> None:
        """Take over the parameters of another guide whose sites are of the same kind."""
        theirs = other.state_dict()
        own = self.state_dict()
        if [name for _, name in self._sites] == [name for _, name in other._sites] and all(
            own[name].shape == value.shape for name, value in theirs.items()
        ):
            self.load_state_dict(theirs)


def modules_with_priors(owner: nn.Module) -> list[PyroModule]:
    """The parts of a module that have :class:`~pyro.nn.PyroSample` attributes."""
    return [module for module, _ in sampled_attributes(owner)]


def count_draws(where: str, samples: Mapping[str, Tensor]) -> int:
    """Number of draws in what ``MCMC.get_samples`` returns.

    Raises:
        ValueError: if sites have different numbers of draws, or none.
        TypeError: if it is not a dictionary.
    """
    if not isinstance(samples, Mapping):
        cure = "Pass mcmc.get_samples()."
        fail(where, "samples", "to be a dictionary of draws by site", type(samples).__name__, cure, TypeError)
    cure = "Pass mcmc.get_samples(), draws first."
    for name, value in samples.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            fail(where, f"samples[{name!r}]", "to be a tensor of draws", f"{value!r:.40}", cure, TypeError)
    sizes = {len(value) for value in samples.values()}
    if len(sizes) != 1 or sizes == {0}:
        cure = "Pass the dictionary of one run, draws first."
        fail(where, "samples", "to hold the same number >= 1 of draws of each site", sorted(sizes), cure)
    return sizes.pop()


def count_draws_of(where: str, owner: nn.Module, samples: Mapping[str, Tensor]) -> int:
    """:func:`count_draws`; raises ``ValueError`` for draws by chain, which are (chains, draws, ...) at all sites."""
    count = count_draws(where, samples)
    second = {value.shape[1] if value.dim() > 1 else 1 for value in samples.values()}
    if len(second) > 1 or second == {1}:
        return count
    for module, attribute in sampled_attributes(owner):
        prior, name = module._pyro_samples[attribute], site_name(owner, module, attribute)
        if name not in samples or not hasattr(prior, "event_shape"):
            continue
        own, shape = prior.batch_shape + prior.event_shape, samples[name].shape
        if len(shape) == len(own) + 2 and shape[2:] == own:
            expectation = f"with one dimension of draws, before {tuple(own)}"
            cure = "Call mcmc.get_samples() without group_by_chain."
            fail(where, f"samples[{name!r}]", expectation, f"shape {tuple(shape)}", cure)
    return count


def check_same_sites(where: str, owner: nn.Module, guide: HyperparameterGuide) -> None:
    """Raise if attributes became random after the guide was built, or belong to another method by now."""
    missing = {site for site in sampled_attributes(owner) if site[1] not in guide._latents} - set(guide._sites)
    if missing:
        names = sorted(attribute for _, attribute in missing)
        fail(where, "hyperparameter priors", "to be assigned before the model is built", names, "Assign, then build.")
    for module, attribute in guide._sites:
        site_name(owner, module, attribute)


def sampled_attributes(owner: nn.Module) -> Iterator[tuple[PyroModule, str]]:
    """The :class:`~pyro.nn.PyroSample` attributes of a module and its parts."""
    for module in owner.modules():
        if isinstance(module, PyroModule):
            for attribute in module._pyro_samples:
                if attribute not in module.__dict__:  # a value that was assigned takes the place of the prior
                    yield module, attribute


def has_unsolved_priors(owner: nn.Module) -> bool:
    """Whether there are priors other than those of coefficients whose posterior a method solves for."""
    return not all(map(_has_own_guide, modules_with_priors(owner)))


def site_name(owner: nn.Module, module: PyroModule, attribute: str) -> str:
    """Name of the site of an attribute.

    Raises:
        ValueError: if the module has since become part of another method, in whose context it now reads its priors.
    """
    if module._pyro_context is not owner._pyro_context:
        where, cure = type(module).__name__, "Give each method a copy, copy.deepcopy(kernel), or build it anew."
        fail(where, f"the prior of {attribute!r}", "in one method alone", "a method built on it later", cure)
    return _make_name(module._pyro_name, attribute)


def _has_own_guide(module: Any) -> bool:
    """Whether a module has the guide of its sites itself, as coefficients with a joint posterior."""
    return getattr(module, "has_posterior", False)


def _guide_of(module: PyroModule, attribute: str, loc: Tensor, log_scale: Tensor) -> Any:
    """A normal distribution in unconstrained space, mapped to the support of the prior."""
    prior = _prior(module, attribute)
    transform = biject_to(prior.support)
    event_dim = prior.event_dim + transform.domain.event_dim - transform.codomain.event_dim
    return dist.TransformedDistribution(dist.Normal(loc, log_scale.exp()).to_event(event_dim), [transform])


def _median(q: Any) -> Tensor:
    """Mean of a distribution that is symmetric or nearly so, reshaped or not."""
    return q.transforms[0](q.base_dist.loc) if hasattr(q, "transforms") else q.mean


def _prior(module: PyroModule, attribute: str) -> Any:
    prior = module._pyro_samples[attribute]
    return prior if hasattr(prior, "sample") else prior(module)
