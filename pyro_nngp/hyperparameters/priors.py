"""Hyperparameters with priors: their mean-field guide, and substitution of posterior draws."""

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

from pyro_nngp._checks import fail
from pyro_nngp._random import seeded
from pyro_nngp.hyperparameters.batches import batch_shape_of, declared_batch_shape
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

    def forward(self) -> dict[str, Tensor]:
        """Sample every site; modules that read the attribute in the same Pyro context get the sampled value."""
        return self._place(lambda name, q, _: pyro.sample(name, q))

    def median(self) -> dict[str, Tensor]:
        """Give every attribute the median of its guide instead of a draw."""
        return self._place(lambda _, q, loc: _median(q) if loc is None else q.transforms[0](loc))

    @torch.no_grad()
    def quantiles(self, probability: float) -> dict[tuple[PyroModule, str], Tensor]:
        """Quantiles of each entry by module and attribute; exact where the support constrains each entry alone."""
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

    def _place(self, choose: Callable) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        drawn: dict[PyroModule, dict[str, Tensor]] = {}
        for i, (module, attribute) in enumerate(self._sites):
            if _has_own_guide(module):
                before, name = drawn.setdefault(module, {}), site_name(self, module, attribute)
                q = module.own_guide(attribute, before)
                values[name] = before[attribute] = choose(name, q, None)
                module._pyro_context.set(name, values[name])
                continue
            loc = getattr(self, f"loc_{i}")
            q = _guide_of(module, attribute, loc, getattr(self, f"log_scale_{i}"))
            name = site_name(self, module, attribute)
            values[name] = choose(name, q, loc)
            module._pyro_context.set(name, values[name])
        return values


def read_hyperparameters(owner: nn.Module) -> None:
    """Read every :class:`~pyro.nn.PyroSample` attribute once, so that its sites come first and in one order."""
    for module, attribute in sampled_attributes(owner):
        site_name(owner, module, attribute)
        getattr(module, attribute)


def place_hyperparameters(where: str, owner: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give every :class:`~pyro.nn.PyroSample` attribute its value among `values` within the present Pyro context.

    Batch dimensions of one, which ``Predictive`` puts in front of sites outside of plates, are left out.

    Raises:
        ValueError: if an attribute has no value there.
    """
    for module, attribute in sampled_attributes(owner):
        name = site_name(owner, module, attribute)
        if name not in values:
            fail(where, "samples", f"to hold the site {name!r}", sorted(values), "Pass all sites of one posterior.")
        value = values[name]
        batch = declared_batch_shape(module, attribute, value)
        module._pyro_context.set(name, value.reshape(value.shape[len(batch) :]) if batch.numel() == 1 else value)


def place_draws(
    where: str, owner: nn.Module, samples: Mapping[str, Tensor], total: int | None = None
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Set the hyperparameters to each posterior draw in turn; yield the values of all its sites, and a count.

    Args:
        where: name of the caller, for messages.
        owner: the module with these attributes.
        samples: what ``MCMC.get_samples`` returns.
        total: sum of the counts: evenly spaced draws, some repeated if there are fewer. None takes each draw once.

    Raises:
        ValueError, TypeError: if a site is missing, sites have different numbers of draws, or `samples` is not a
        dictionary.
    """
    num_draws = count_draws_of(where, owner, samples)
    rows = torch.linspace(0, num_draws - 1, num_draws if total is None else total).round().long()

    def each() -> Iterator[tuple[dict[str, Tensor], int]]:
        for row, count in zip(*map(Tensor.tolist, rows.unique_consecutive(return_counts=True)), strict=True):
            values = {name: value[row] for name, value in samples.items()}
            place_hyperparameters(where, owner, values)
            yield values, count

    return each()


class Draws(dict[str, Tensor]):
    """Values of all sites in several posterior draws, draws first."""

    @property
    def count(self) -> int:
        """How many draws there are."""
        return len(next(iter(self.values())))


def modules_with_priors(owner: nn.Module) -> list[PyroModule]:
    """The parts of a module that have :class:`~pyro.nn.PyroSample` attributes."""
    return [module for module, _ in sampled_attributes(owner)]


def place_together(
    where: str, owner: nn.Module, samples: Mapping[str, Tensor], most: int, plates: int
) -> Iterator[Draws]:
    """Place the hyperparameters of several posterior draws at once, as batch dimensions; give the values of all sites.

    Args:
        where: name of the caller, for messages.
        owner: the module whose attributes they are.
        samples: what ``MCMC.get_samples`` returns, of two draws at least.
        most: about so many draws at a time, at least two.
        plates: dimensions of one behind that of the draws, in which values at the points will have others.

    Raises:
        ValueError, TypeError: as in :func:`place_draws`.
    """
    num_draws = count_draws_of(where, owner, samples)
    for rows in torch.arange(num_draws).tensor_split(max(1, min(-(-num_draws // most), num_draws // 2))):
        values = Draws({name: value[rows.to(value.device)] for name, value in samples.items()})
        placed = {}
        for module, attribute in sampled_attributes(owner):
            name = site_name(owner, module, attribute)
            if name in values:
                value = values[name]
                own = value.shape[1 + len(batch_shape_of(module, attribute, value[0])) :]
                placed[name] = value.reshape((len(value), *[1] * plates, *own))
        place_hyperparameters(where, owner, values | placed)
        yield values


def map_draws(
    where: str,
    owner: nn.Module,
    samples: Mapping[str, Tensor],
    most: int,
    compute: Callable[[dict[str, Tensor]], Any],
) -> Iterator[Any]:
    """Results of a function at several posterior draws at once, by ``torch.vmap``, draws first.

    Args:
        where: name of the caller, for messages.
        owner: the module whose hyperparameters are placed before each call.
        samples: what ``MCMC.get_samples`` returns.
        most: largest number of draws at a time.
        compute: maps the values of all sites in one draw to a tensor, or a tuple of tensors. Random numbers that it
            draws differ between posterior draws.

    Raises:
        ValueError, TypeError: as in :func:`place_draws`.
    """

    def at(values: dict[str, Tensor]) -> Any:
        place_hyperparameters(where, owner, values)
        return compute(values)

    for module in owner.modules():  # Pyro cannot register a parameter within vmap
        if isinstance(module, PyroModule):
            for name in (*module._pyro_params, *module._parameters, *module._modules):
                getattr(module, name)
    for rows in torch.arange(count_draws_of(where, owner, samples)).split(most):
        values = {name: value[rows.to(value.device)] for name, value in samples.items()}
        yield torch.vmap(at, randomness="different")(values)
        place_hyperparameters(where, owner, {name: value[-1] for name, value in values.items()})


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
    """Raise if attributes became random after the guide was built, or are those of another method by now."""
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


def values_now(owner: Any, like: Tensor) -> list[Tensor]:
    """Copies of the parameters, buffers and sampled attributes of a module and its parts in the present Pyro context.

    Args:
        owner: the module; any other callable has none.
        like: tensor whose dtype and device the copies get.
    """
    if not isinstance(owner, nn.Module):
        return []
    modules = (module for module in owner.modules() if isinstance(module, PyroModule))
    sampled = (getattr(module, attribute) for module in modules for attribute in module._pyro_samples)
    return [value.detach().to(like, copy=True) for value in chain(owner.parameters(), owner.buffers(), sampled)]


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
    """Mean of a normal distribution, reshaped or not."""
    return q.transforms[0](q.base_dist.loc) if hasattr(q, "transforms") else q.loc


def _prior(module: PyroModule, attribute: str) -> Any:
    prior = module._pyro_samples[attribute]
    return prior if hasattr(prior, "sample") else prior(module)
