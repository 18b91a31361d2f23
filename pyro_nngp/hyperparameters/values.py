"""Hyperparameters as values: plain copies of modules, and the values of attributes that have priors.

A *plain* copy of a module holds values in place of parameters and priors. Evaluating it has no Pyro effects, so that it
serves in any thread, under ``torch.vmap``, and outside of the program that read it.

Cost: O(hyperparameters); no tensor is copied.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from pyro.nn import PyroModule
from pyro.nn.module import _Context, _make_name
from pyro.params.param_store import param_with_module_name
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp.hyperparameters.batches import declared_batch_shape, placed, programs_are_vectorized
from pyro_nngp.hyperparameters.priors import sampled_attributes, site_name
from pyro_nngp.hyperparameters.reading import parameter, parameter_site

Values: TypeAlias = Mapping[tuple[PyroModule, str], Tensor]
"""Values of :class:`~pyro.nn.PyroSample` attributes by module and attribute."""

Get: TypeAlias = Callable[[nn.Module, str, str], Tensor]
"""Reads an attribute of a module; its full name is the third argument."""


def as_sites(values: Values) -> Get:
    """How programs read: values of priors, which are sites already, and parameters as param sites."""
    return lambda part, name, full: values[part, name] if (part, name) in values else parameter_site(part, name, full)


def as_values(values: Values) -> Get:
    """How everything else reads: values of priors, and parameters, without effects.

    Attributes with priors that have no value, latent variables outside of posterior draws, are None.
    """

    def get(part: Any, name: str, _: str) -> Any:
        if (part, name) in values:
            return values[part, name]
        return None if name in part.__dict__.get("_pyro_samples", ()) else parameter(part, name)

    return get


def plain(module: Any, name: str, get: Get) -> Any:
    """A copy of a tree of modules that holds what `get` reads in place of parameters and priors.

    Parameters of modules of plain torch are read as well, for their sites, but the modules are not copied.

    Args:
        module: the root; anything that is no module is returned as it is.
        name: its full name.
        get: reads the attributes.
    """
    if not isinstance(module, PyroModule):
        for inner, _ in module.named_parameters() if isinstance(module, nn.Module) else ():
            path, _, last = inner.rpartition(".")
            get(module.get_submodule(path), last, param_with_module_name(name, inner))
        return module
    name = module._pyro_name or name
    attributes = (attribute.removesuffix("_unconstrained") for attribute in module._parameters)
    values: dict[str, Any] = {
        attribute: get(module, attribute, _make_name(name, attribute))
        for attribute in (*attributes, *module._pyro_samples)
        if attribute not in module.__dict__
    }
    parts = {key: plain(part, _make_name(name, key), get) for key, part in module._modules.items()}
    new = module.__class__.__new__(module.__class__)
    new.__dict__.update(module.__dict__)
    new.__dict__.update(values | parts, _modules=parts, _pyro_context=_Context())
    return new


def program_values(owner: nn.Module) -> Values:
    """The values of all priors of a module as sites of the present program, in one order."""
    values = {}
    for module, attribute in sampled_attributes(owner):
        site_name(owner, module, attribute)
        values[module, attribute] = getattr(module, attribute)
    return values


def draw_values(where: str, owner: nn.Module, draw: Mapping[str, Tensor]) -> Values:
    """The values of all priors of a module in one posterior draw.

    Batch dimensions of one, which ``Predictive`` puts in front of sites outside of plates, are left out.

    Raises:
        ValueError: if a prior has no value there.
    """
    values = {}
    for module, attribute in sampled_attributes(owner):
        name = site_name(owner, module, attribute)
        if name not in draw:
            fail(where, "samples", f"to hold the site {name!r}", sorted(draw), "Pass all sites of one posterior.")
        value = draw[name]
        batch = declared_batch_shape(module, attribute, value)
        values[module, attribute] = value.reshape(value.shape[len(batch) :]) if batch.numel() == 1 else value
    return values


def split_sets(values: Values) -> tuple[list[Values], torch.Size]:
    """Values in a vectorized program, one set of hyperparameters after the other.

    Within vectorized plates, and where an upstream site is enumerated, hyperparameters have batch dimensions. Code
    whose cost per set is far above a step of a Python loop loses nothing by taking the sets in turn.

    Returns:
        The sets, and the batch shape that they have in row-major order; the values and () where there is one set.
    """
    shapes = {key: declared_batch_shape(*key, value) for key, value in values.items()}
    batch = torch.broadcast_shapes(*map(placed, shapes.values())) if programs_are_vectorized() else torch.Size()
    if not batch:
        return [values], batch
    flat = {}
    for key, value in values.items():
        event = value.shape[len(shapes[key]) :]
        flat[key] = value.reshape(*placed(shapes[key]), *event).expand(*batch, *event).reshape(-1, *event)
    return [{key: value[i] for key, value in flat.items()} for i in range(batch.numel())], batch


def stacked_sets(results: list[Tensor], batch: torch.Size) -> Tensor:
    """Results at each set of :func:`split_sets`, with the batch dimensions in front."""
    return torch.stack(results).unflatten(0, batch) if batch else results[0]


__all__ = ["Values", "as_sites", "as_values", "draw_values", "plain", "program_values", "split_sets", "stacked_sets"]
