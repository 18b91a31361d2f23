"""Checks of a program for AutoNNGP: its latent sites, plates around it, and that other runs have the same data."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pyro.poutine.runtime import get_plates
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference.autoguide.linear_predictor import gaussian_base
from pyro_nngp.inference.autoguide.quadratics import Observations


def check_sites(sites: Mapping[str, Any]) -> None:
    """Raise unless a program has a process and no discrete latent sites."""
    if not any(isinstance(gaussian_base(site["fn"]), NNGP) for site in sites.values()):
        cure = 'Write pyro.sample("f", NNGP(kernel, graph)), without a batch; of a FullScaleNNGP see FullScaleReparam.'
        fail("AutoNNGP", "the program", "to have an NNGP site over all points", sorted(sites), cure)
    discrete = [name for name, site in sites.items() if site["fn"].support.is_discrete]
    if discrete:
        cure = "Give them finitely many values, as Bernoulli and Categorical do, which are summed out."
        fail("AutoNNGP", "latent sites", "continuous, or discrete with finitely many values", discrete, cure)


def check_repeatable(once: list[Observations], again: list[Observations]) -> None:
    """Raise unless two runs at the same latent values have the same distributions of data."""
    for a, b in zip(once, again, strict=True):
        phi = a.phi.detach()
        if not (near(phi, b.phi.detach()) and near(a.log_prob(phi), b.log_prob(phi))):
            cure = "Do not hide its latent sites by poutine.block, nor draw numbers other than by pyro.sample."
            site, actual = f"observed site {a.name!r}", "another distribution in a second run at the same values"
            fail("AutoNNGP", site, "determined by the latent sites of the program", actual, cure)


def check_outside_plates(where: str, what: str) -> None:
    """Raise within vectorized plates, where each site would have several values."""
    plates = [frame.name for frame in get_plates() if frame.vectorized]
    if plates:
        cure = "Take parallel=False and vectorize_particles=False."
        fail(where, what, "outside vectorized plates", plates, cure)


def near(a: Tensor, b: Tensor) -> bool:
    """Whether tensors are equal within 1e-4, relative to the largest number of the first."""
    a, b = (each.detach().double().cpu() for each in (a, b))
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(a.abs().max()))


def same(a: Any, b: Any) -> bool:
    """Whether arguments are equal, tensors by value."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and not isinstance(a, Tensor) and bool(np.all(a == b))
