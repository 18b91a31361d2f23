"""What every model here shares as a Pyro module: parameters of its own, and a guide for hyperparameters with priors."""

import functools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, pyro_method
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor, nn
from torch.distributions import biject_to

from pyro_nngp._checks import fail
from pyro_nngp.randomness import seeded


class ConstantMean(PyroModule):
    """A learnable constant mean function, ``(B, D) -> (B,)``, or ``(B, L)`` with a constant for each of L functions.

    Args:
        value: its initial value, in the units of the latent function.
        num_latents: L; None is one function.
    """

    def __init__(self, value: float = 0.0, num_latents: int | None = None) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full(() if num_latents is None else (num_latents,), float(value)))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(*x.shape[:-1], *self.value.shape)


class GPModule(PyroModule):
    """A PyroModule whose parameters live in a param store of its own.

    Pyro keeps parameters by name in one global store, where two models of one class would share theirs. Methods marked
    with :func:`pyro_entry` run inside a private store instead. The parameters are those of the module, so
    ``parameters()``, ``state_dict()``, ``SVI`` and ``torch.optim`` all see the same tensors. What a user's function
    makes by ``pyro.param`` is no part of the module, and only ``SVI`` sees it. Inside a larger PyroModule the parent's
    store and names apply.
    """

    def __init__(self) -> None:
        super().__init__()
        self._store: tuple[dict, dict, dict] = ({}, {}, {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._pyro_context.active:
            return super().__call__(*args, **kwargs)
        with own_param_store(self):
            return super().__call__(*args, **kwargs)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Take a module as a part, one that has run on its own before too."""
        if module is not None:
            release(module)
        super().add_module(name, module)

    def named(self, name: str) -> "GPModule":
        """Put `name` and a dot before the names of the sites and parameters; returns the module itself.

        Two kernels, or two methods, that stand alone in one Pyro program need names, or their sites collide, which is
        an error. Inside a model or a larger PyroModule the attribute's name serves.
        """
        release(self)  # no store but the module's own, emptied after each use, knows the old names
        self._pyro_set_supermodule(name, self._pyro_context)
        return self

    def __copy__(self) -> "GPModule":
        new = type(self).__new__(type(self))  # not by __getstate__: a program that runs still needs the references
        new.__dict__.update(self.__dict__)
        return new

    def __getstate__(self) -> dict[str, Any]:
        # Pyro hangs a weak reference on each parameter it has seen, and weak references can't be pickled.
        for param in self.parameters():
            param.__dict__.pop("unconstrained", None)
        return self.__dict__.copy()


def release(module: nn.Module) -> None:
    """Let a module that has run, and its parts, take other names, which Pyro refuses; not while it runs."""
    for part in module.modules():
        if isinstance(part, PyroModule):
            part._pyro_context.used = part._pyro_context.active > 0


def pyro_entry(method: Callable) -> Callable:
    """Mark a method of a :class:`GPModule` that touches parameters or sites: the way into the model from outside."""
    inside = pyro_method(method)

    @functools.wraps(method)
    def enter(self: GPModule, *args: Any, **kwargs: Any) -> Any:
        if self._pyro_context.active:
            return method(self, *args, **kwargs)
        with own_param_store(self):
            return inside(self, *args, **kwargs)

    return enter


@contextmanager
def own_param_store(module: GPModule) -> Iterator[None]:
    """Put a store of the module's own in place of Pyro's global one, in O(parameters).

    The parameters of modules are held by the modules and enter the store as they are read; between calls it keeps only
    what the user's own ``pyro.param`` statements made, in a mean function for instance. ``ParamStoreDict.scope`` is not
    used: it strips the marks by which ``SVI`` recognises a parameter, from the global ones too. Names stay known
    outside, for optimisers with settings per parameter.

    Raises:
        RuntimeError: if a program has recorded a site or a parameter of that name already, of another module.
    """
    store, recorded = pyro.get_param_store(), _recorded_parameters()
    outside = store._params, store._constraints, store._param_to_name
    store._params, store._constraints, store._param_to_name = params, bounds, names = module._store
    try:
        yield
        for before, after in zip(recorded, _recorded_parameters(), strict=True):
            changed = [name for name in params.keys() & before.keys() if after[name] is not before[name]]
            twice = [name for name in changed if before[name] in outside[2]]  # of a module that lives on
            if twice:
                _fail_twice(module, sorted(twice))
    except RuntimeError as error:
        repeated = re.match(r"Multiple sample sites named '(.*?)'", str(error))
        if repeated is None:
            raise
        _fail_twice(module, [repeated[1]], error)
    finally:
        store._params, store._constraints, store._param_to_name = outside
        new = {param: name for param, name in names.items() if store._param_to_name.get(param) != name}
        if new:  # known for as long as the module lives: a model may build kernels anew at every call
            store._param_to_name.update(new)
            weakref.finalize(module, _forget_names, list(new)).atexit = False
        for name in [name for name, param in params.items() if isinstance(param, nn.Parameter)]:
            del params[name], bounds[name]
        names.clear()
        names.update({param: name for name, param in params.items()})


def _recorded_parameters() -> list[dict[str, Tensor]]:
    """Unconstrained parameters by name, of each trace that is being recorded."""

    def leaf(value: Any) -> Tensor:
        return value.unconstrained() if hasattr(value, "unconstrained") else value

    traces = [handler.trace for handler in _PYRO_STACK if isinstance(handler, TraceMessenger)]
    return [{n: leaf(s["value"]) for n, s in t.nodes.items() if s["type"] == "param"} for t in traces]


def _fail_twice(module: GPModule, names: list[str], cause: Exception | None = None) -> NoReturn:
    """Two modules of one program have given the same names to what they own, or one has read its priors twice."""
    where, arg, expectation = type(module).__name__, "sites and parameters", "with names that the program has not used"
    cure = "Name one of the two: module.named('trend'). A kernel that serves twice is bound once: cov = kernel.bind()."
    try:
        fail(where, arg, expectation, f"{names} twice", cure, RuntimeError)
    except RuntimeError as error:
        raise error from cause


def _forget_names(params: list[Tensor]) -> None:
    names = pyro.get_param_store()._param_to_name
    for param in params:
        names.pop(param, None)


class HyperparameterGuide(PyroModule):
    r"""Mean-field guide for the :class:`~pyro.nn.PyroSample` attributes of some modules.

    Each site gets a normal distribution in unconstrained space, moved by the bijection to the prior's support.

    Args:
        owner: the module whose sub-modules hold the priors. Assign priors before the model is built.
        init_scale: initial standard deviation in unconstrained space.
    """

    def __init__(self, owner: nn.Module, init_scale: float = 0.1) -> None:
        super().__init__()
        self._sites = list(_sampled_attributes(owner))
        like = next(chain(owner.parameters(), owner.buffers()), torch.empty(0))
        for i, (module, attribute) in enumerate(self._sites):
            with seeded(0, like):
                prior = _prior(module, attribute)
                draws = biject_to(prior.support).inv(prior.sample((99,)))
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
        return self._place(lambda _, q, loc: q.transforms[0](loc))

    def _place(self, choose: Callable) -> dict[str, Tensor]:
        values = {}
        for i, (module, attribute) in enumerate(self._sites):
            prior = _prior(module, attribute)
            transform = biject_to(prior.support)
            loc, log_scale = getattr(self, f"loc_{i}"), getattr(self, f"log_scale_{i}")
            event_dim = prior.event_dim + transform.domain.event_dim - transform.codomain.event_dim
            q = dist.TransformedDistribution(dist.Normal(loc, log_scale.exp()).to_event(event_dim), [transform])
            name = _full_name(self, module, attribute)
            values[name] = choose(name, q, loc)
            module._pyro_context.set(name, values[name])
        return values


def read_hyperparameters(owner: nn.Module) -> None:
    """Read every :class:`~pyro.nn.PyroSample` attribute once, so that its sites come first and in one order."""
    for module, attribute in _sampled_attributes(owner):
        _full_name(owner, module, attribute)
        getattr(module, attribute)


def place_hyperparameters(where: str, owner: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give every :class:`~pyro.nn.PyroSample` attribute its value among `values` within the present Pyro context.

    Raises:
        ValueError: if an attribute has no value there.
    """
    for module, attribute in _sampled_attributes(owner):
        name = _full_name(owner, module, attribute)
        if name not in values:
            fail(where, "samples", f"to hold the site {name!r}", sorted(values), "Pass all sites of one posterior.")
        module._pyro_context.set(name, values[name])


def place_draws(
    where: str, owner: nn.Module, samples: Mapping[str, Tensor], total: int | None = None
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Place the hyperparameters of one posterior draw after the other; give the values of all its sites, and a count.

    Args:
        where: name of the caller, for messages.
        owner: the module whose attributes they are.
        samples: what ``MCMC.get_samples`` returns.
        total: what the counts add up to: evenly spaced draws, some several times if there are fewer. None is each once.

    Raises:
        ValueError, TypeError: if a site is missing, sites have different numbers of draws, or there is no dictionary.
    """
    num_draws = count_draws(where, samples)
    rows = torch.linspace(0, num_draws - 1, num_draws if total is None else total).round().long()

    def each() -> Iterator[tuple[dict[str, Tensor], int]]:
        for row, count in zip(*map(Tensor.tolist, rows.unique_consecutive(return_counts=True)), strict=True):
            values = {name: value[row] for name, value in samples.items()}
            place_hyperparameters(where, owner, values)
            yield values, count

    return each()


def count_draws(where: str, samples: Mapping[str, Tensor]) -> int:
    """Number of draws in what ``MCMC.get_samples`` returns.

    Raises:
        ValueError: if sites have different numbers of draws, or none.
        TypeError: for what is no dictionary.
    """
    if not isinstance(samples, Mapping):
        cure = "Pass mcmc.get_samples()."
        fail(where, "samples", "to be a dictionary of draws by site", type(samples).__name__, cure, TypeError)
    sizes = {len(value) for value in samples.values()}
    if len(sizes) != 1 or sizes == {0}:
        cure = "Pass the dictionary of one run, draws first."
        fail(where, "samples", "to hold the same number >= 1 of draws of each site", sorted(sizes), cure)
    return sizes.pop()


def check_same_sites(where: str, owner: nn.Module, guide: HyperparameterGuide) -> None:
    """Raise if attributes became random after the guide was built."""
    missing = set(_sampled_attributes(owner)) - set(guide._sites)
    if missing:
        names = sorted(attribute for _, attribute in missing)
        fail(where, "hyperparameter priors", "to be assigned before the model is built", names, "Assign, then build.")


def _sampled_attributes(owner: nn.Module) -> Iterator[tuple[PyroModule, str]]:
    for module in owner.modules():
        if isinstance(module, PyroModule):
            for attribute in module._pyro_samples:
                yield module, attribute


def _full_name(owner: nn.Module, module: PyroModule, attribute: str) -> str:
    """Name of the site of an attribute.

    Raises:
        ValueError: if the module has become part of another method since, in whose context it now reads its priors.
    """
    if module._pyro_context is not owner._pyro_context:
        where, cure = type(module).__name__, "Give each method a copy, copy.deepcopy(kernel), or build it anew."
        fail(where, f"the prior of {attribute!r}", "in one method alone", "a method built on it later", cure)
    return module._pyro_get_fullname(attribute)


def _prior(module: PyroModule, attribute: str) -> Any:
    prior = module._pyro_samples[attribute]
    return prior if hasattr(prior, "sample") else prior(module)
