"""Runs of a model at given values of its latent sites, and what their traces hold: data, densities, named dimensions.

Cost: one run of the model each.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Delta, MaskedDistribution, Unit
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import Independent

from pyro_nngp._checks import fail
from pyro_nngp.distributions import NNGP


class AtValues(Messenger):
    """Run a model at values of its latent sites; observed data are kept, or drawn anew.

    Args:
        where: name of the caller, for messages.
        values: one for each latent site; more are ignored.
        resample: draw the observed data from the model.
        rows: the rows that the model runs on, where `values` are of all rows.
    """

    def __init__(self, where: str, values: Mapping[str, Tensor], resample: bool = False, rows: Tensor | None = None) -> None:
        super().__init__()
        self.where, self.values, self.resample, self.rows = where, values, resample, rows

    def _pyro_sample(self, msg: Any) -> None:
        if is_data(msg):
            if self.resample:
                msg["is_observed"], msg["value"] = False, None
        elif isinstance(msg["fn"], _Subsample):
            if self.rows is None:
                msg["value"] = self.values.get(msg["name"], msg["value"])
        elif not msg["is_observed"]:
            if msg["name"] not in self.values:
                cure = "Draw every latent site; discrete ones that were summed out have no draws."
                fail(self.where, f"latent site {msg['name']!r}", f"among {sorted(self.values)}", "no value of it", cure)
            value = self.values[msg["name"]]
            msg["value"] = value if self.rows is None else self._at_rows(msg, value, self.rows)

    def _at_rows(self, msg: Any, value: Tensor, rows: Tensor) -> Tensor:
        prior = _base(msg["fn"])
        if isinstance(prior, NNGP):
            value = value[..., prior.batch.rows]
        for frame in msg["cond_indep_stack"]:
            if frame.vectorized and frame.size < frame.full_size:
                value = value.index_select(frame.dim - msg["fn"].event_dim, rows)
        if value.shape != msg["fn"].shape():
            actual = f"{tuple(value.shape)} where the model wants {tuple(msg['fn'].shape())}"
            cure = "Its shape changes with the batch outside any plate: leave batch_size out."
            fail(self.where, f"the value of {msg['name']!r}", "to follow the rows of a batch", actual, cure)
        return value


def run_at(where: str, model: Callable, args: tuple, kwargs: Mapping[str, Any], values: Mapping[str, Tensor], **options):
    """Trace of a model at values of its latent sites; options are those of :class:`AtValues`."""
    return poutine.trace(AtValues(where, values, **options)(model)).get_trace(*args, **kwargs)


def is_data(site: Any) -> bool:
    """Whether a site holds data: observed, and neither a deterministic function of others nor a factor."""
    return site["is_observed"] and not isinstance(_base(site["fn"]), (Delta, Unit))


def is_deterministic(site: Any) -> bool:
    """Whether a site is a deterministic function of others, by ``pyro.deterministic`` or a reparametrization."""
    return site["is_observed"] and isinstance(_base(site["fn"]), Delta)


def sample_sites(trace: poutine.Trace) -> dict[str, Any]:
    """The sample statements of a trace, without those that plates make."""
    return {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not isinstance(site["fn"], _Subsample)
    }


def latent_values(trace: poutine.Trace) -> dict[str, Tensor]:
    """What a guide drew, the rows that its plates took included, so that a model runs on the same."""
    return {name: s["value"] for name, s in trace.nodes.items() if s["type"] == "sample" and not s["is_observed"]}


def plate_rows(trace: poutine.Trace) -> dict[str, tuple[Tensor, int]]:
    """For each plate, the rows that it took and how many there are."""
    plates = {name: site for name, site in trace.nodes.items() if isinstance(site.get("fn"), _Subsample)}
    return {name: (torch.as_tensor(site["value"]), int(site["fn"].size)) for name, site in plates.items()}


def log_prob(site: Any, outside: float) -> Tensor:
    """Log densities of a site entry by entry, without any scale; `outside` where they are masked."""
    value = site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
    own = site["fn"]._mask if isinstance(site["fn"], MaskedDistribution) else None
    for mask in (own, site["mask"]):
        if mask is not None:
            value = torch.where(torch.as_tensor(mask, device=value.device), value, outside)
    return value


def log_density(trace: poutine.Trace) -> Tensor:
    """Log density of a trace, without any scale."""
    return torch.stack([log_prob(site, 0.0).sum() for site in sample_sites(trace).values()]).sum()


def plate_dims(site: Any, value: Tensor) -> list[str | None]:
    """For each dimension of a site's value, the name of the plate it belongs to; None for the others."""
    event_dim = site["fn"].event_dim
    if is_deterministic(site) and len(site["fn"].shape()) != value.dim():
        event_dim = 0  # pyro.deterministic takes all of a value for its event unless it is told, plates or not
    names: list[str | None] = [None] * value.dim()
    for frame in site["cond_indep_stack"]:
        axis = frame.dim - event_dim if frame.vectorized else 0
        if -value.dim() <= axis < 0 and value.shape[axis] in (frame.size, frame.full_size):
            names[axis] = frame.name
    return names


def _base(fn: Any) -> Any:
    while isinstance(fn, (Independent, MaskedDistribution)):
        fn = fn.base_dist
    return fn
