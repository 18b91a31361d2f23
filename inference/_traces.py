"""Traces: runs of a model at given values of its latent sites, and their data, densities, plates and rows.

Cost: one run of the model each.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.distributions import Delta, MaskedDistribution, Unit
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import Independent

from pyro_nngp._checks import fail
from pyro_nngp._kinds import check_callable
from pyro_nngp._wrappers import base_distribution
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference.protocols import has_program


def check_program(where: str, model: Any) -> None:
    """Raise ``TypeError`` unless `model` is a Pyro program; the program of a method is its ``model``."""
    if has_program(model):
        actual, cure = f"a method, {type(model).__name__}", "Pass its program, gp.model."
        fail(where, "model", "to be a Pyro program", actual, cure, TypeError)
    check_callable(where, "model", model, "Pass a Pyro program, such as gp.model.")


def run_at(
    where: str,
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    values: Mapping[str, Tensor] | None,
    rows: Int[Tensor, " B"] | None = None,
    resample: bool = False,
) -> Trace:
    """Trace of a model at values of its latent sites.

    Args:
        where: name of the caller, for messages.
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        values: a value for each latent site; others are ignored. None draws them from the model.
        rows: run ``model(rows)`` instead; `values` cover all rows.
        resample: draw the observed data from the model instead of keeping them.

    Raises:
        ValueError: if a latent site has no value, or one that does not follow the rows.
    """
    if rows is not None and values is not None:
        args = (rows.to(next(iter(values.values())).device),)
    return poutine.trace(_AtValues(where, values, rows, resample)(model)).get_trace(*args, **kwargs)


def sample_sites(trace: Trace) -> dict[str, Any]:
    """Sample sites of a trace, without the subsamples of plates."""
    nodes = trace.nodes.items()
    return {n: site for n, site in nodes if site["type"] == "sample" and not isinstance(site["fn"], _Subsample)}


def latent_sites(trace: Trace) -> dict[str, Any]:
    """Sample sites of a trace that are not observed, without the subsamples of plates."""
    return {name: site for name, site in sample_sites(trace).items() if not site["is_observed"]}


def latent_values(trace: Trace) -> dict[str, Tensor]:
    """Values of latent sites that a guide drew, with the rows of its plates, for a model to use the same rows."""
    return {name: site["value"] for name, site in trace.iter_stochastic_nodes()}


def is_data(site: Any) -> bool:
    """Whether a site holds data: observed, and neither a factor nor a deterministic function of others."""
    return site["is_observed"] and not isinstance(base_distribution(site["fn"]), (Delta, Unit))


def is_delta(site: Any) -> bool:
    """Whether the distribution of a site is a point, as of a deterministic function of others."""
    return isinstance(base_distribution(site["fn"]), Delta)


def is_variable(site: Any) -> bool:
    """Whether a site is latent, or a deterministic function of others."""
    return not site["is_observed"] or is_delta(site)


def taken_apart(site: Any) -> tuple[Any, Tensor]:
    """The distribution of a site without masks and independent dimensions, and the weights of its densities.

    Weights are the scale of the site, and 0 where it is masked; a single number, or of the batch shape.
    """
    fn, weight = site["fn"], torch.as_tensor(site["scale"], dtype=torch.float64)
    weight = weight if site["mask"] is None else weight * site["mask"]
    while isinstance(fn, Independent | MaskedDistribution):
        if isinstance(fn, MaskedDistribution):
            weight = weight * fn._mask
        elif weight.dim():
            weight = weight[(..., *[None] * fn.reinterpreted_batch_ndims)]
        fn = fn.base_dist
    return fn, weight


def log_prob(site: Any, outside: float) -> Float[Tensor, "..."]:
    """Log densities of a site, entry by entry and without scales; `outside` where they are masked."""
    value = site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
    for mask in _masks(site, value.device):
        value = torch.where(mask, value, outside)
    return value


def total_log_prob(trace: Trace) -> Float[Tensor, ""]:
    """Log density of all sites of a trace, without any scale, summed in double precision."""
    return log_prob_parts(trace).sum()


def log_prob_parts(trace: Trace) -> Float[Tensor, " 2"]:
    """Log density of all sites of a trace, without any scale, summed in double precision, in two parts.

    Returns:
        The part of sites that depend on the rows of a batch, to be summed over batches, and the part of other sites. If
        the model used all rows, the first is 0.
    """
    parts = torch.zeros(2, dtype=torch.float64)
    for site in sample_sites(trace).values():
        frames, prior = site["cond_indep_stack"], base_distribution(site["fn"])
        part = any(frame.vectorized and frame.size < frame.full_size for frame in frames)
        part = part or (isinstance(prior, NNGP) and len(prior.batch.targets) < prior.graph.num_points)
        parts[0 if part else 1] += log_prob(site, 0.0).double().sum().cpu()
    return parts


def plate_rows(trace: Trace) -> dict[str, tuple[Int[Tensor, " B"], int]]:
    """Rows that each plate used, and its size."""
    plates = {name: site for name, site in trace.nodes.items() if isinstance(site.get("fn"), _Subsample)}
    return {name: (torch.as_tensor(site["value"]), int(site["fn"].size)) for name, site in plates.items()}


def check_all_rows(where: str, trace: Trace) -> None:
    """Raise ``ValueError`` if a plate used only some of its rows."""
    part = [name for name, (taken, size) in plate_rows(trace).items() if len(taken) < size]
    if part:
        cure = "A log joint density needs all data: do not subsample."
        fail(where, "the model", "to take all rows of its plates", f"some of {part}", cure)


def check_supports(where: str, trace: Trace) -> None:
    """Raise ``ValueError`` if unmasked observed data are off the support of their distribution."""
    for name, site in sample_sites(trace).items():
        if not is_data(site) or not isinstance(site["value"], Tensor):
            continue
        try:
            on = site["fn"].support.check(site["value"])
        except NotImplementedError:  # a distribution without a support
            continue
        for mask in _masks(site, on.device):
            on = on | ~mask
        if not on.all():
            kind = type(base_distribution(site["fn"])).__name__
            event = on.reshape(on.shape + (1,) * (site["value"].dim() - on.dim()))
            off = site["value"][~event.expand(site["value"].shape)].unique()[:3].tolist()
            actual = f"{int((~on).sum())} entries off it, such as {off}"
            cure = "Correct the data, choose another likelihood, or mask the entries."
            fail(where, f"data of site {name!r}", f"on the support of {kind}", actual, cure)


def plate_dims(site: Any, value: Tensor) -> list[str | None]:
    """Plate of each dimension of a value of a site; None for dimensions without one."""
    event_dim = site["fn"].event_dim
    if is_delta(site) and len(site["fn"].shape()) != value.dim():
        event_dim = 0  # by default, pyro.deterministic treats a whole value as one event, even in plates
    names: list[str | None] = [None] * value.dim()
    for frame in site["cond_indep_stack"]:
        axis = frame.dim - event_dim if frame.vectorized else 0
        if -value.dim() <= axis < 0 and value.shape[axis] in (frame.size, frame.full_size):
            names[axis] = frame.name
    return names


def _masks(site: Any, device: torch.device) -> list[Tensor]:
    """The masks of a site and of its distribution."""
    own = site["fn"]._mask if isinstance(site["fn"], MaskedDistribution) else None
    return [torch.as_tensor(mask, device=device) for mask in (own, site["mask"]) if mask is not None]


class _AtValues(Messenger):
    """Set latent sites to given values, and optionally sample observed sites anew."""

    def __init__(self, where: str, values: Mapping[str, Tensor] | None, rows: Tensor | None, resample: bool) -> None:
        super().__init__()
        self._where, self._values, self._rows, self._resample = where, values, rows, resample

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if is_data(msg):
            if self._resample:
                msg["is_observed"], msg["value"] = False, None
        elif self._values is None:
            return
        elif isinstance(msg["fn"], _Subsample):
            if self._rows is None:
                msg["value"] = self._values.get(name, msg["value"])
        elif not msg["is_observed"]:
            if name not in self._values:
                cure = "Draw every latent site; discrete ones that were summed out have no draws."
                fail(self._where, f"latent site {name!r}", f"among {sorted(self._values)}", "no value of it", cure)
            msg["value"] = self._values[name] if self._rows is None else self._at_rows(msg, self._rows)

    def _at_rows(self, msg: Any, rows: Tensor) -> Tensor:
        value, prior = cast(Mapping, self._values)[msg["name"]], base_distribution(msg["fn"])
        if isinstance(prior, NNGP):
            value = value[..., prior.batch.rows]
        for frame in msg["cond_indep_stack"]:
            if frame.vectorized and frame.size < frame.full_size:
                value = value.index_select(frame.dim - msg["fn"].event_dim, rows.to(value.device))
        if value.shape != msg["fn"].shape():
            actual = f"{tuple(value.shape)} where the model wants {tuple(msg['fn'].shape())}"
            cure = "Its shape changes with the rows, but it is in no plate: leave batch_size out."
            fail(self._where, f"the value of {msg['name']!r}", "to follow the rows of a batch", actual, cure)
        return value
