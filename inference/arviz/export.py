r"""Export of Pyro posteriors to ArviZ: MCMC runs, guides, and methods that have a model and a guide.

At each draw the model runs once conditioned on the data, and once with new data. Arrays are allocated once and filled
draw by draw, in main memory wherever the model runs.

``az.loo`` and ``az.compare`` treat the log likelihood as :math:`\log p(y_i \mid y_{-i}, \theta)`: importance weights
are its inverse. For a method of :mod:`pyro_nngp.models` it is that density, with the latent values integrated out. For
any other program it is the density of each observation given all latent sites, which is the same if observations are
independent given these.

Cost: two runs of the model and one of the guide per draw; memory for the draws that are kept.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from pyro_nngp._checks import check_int, check_memory, fail
from pyro_nngp._kinds import check_flags
from pyro_nngp.inference._interrupt import deferred_interrupt
from pyro_nngp.inference._traces import check_all_rows, log_prob_parts, run_at, total_log_prob
from pyro_nngp.inference.arviz.arrays import Arrays, check_mappings
from pyro_nngp.inference.arviz.draws import MCMCDraws, draws_of, method_of
from pyro_nngp.inference.arviz.libraries import container, library

_WHERE = "to_arviz"
_GIVEN_LATENTS = "given all latent sites"


def to_arviz(
    source: Any,
    *args: Any,
    model_kwargs: Mapping[str, Any] | None = None,
    num_samples: int | None = None,
    var_names: Collection[str] | None = None,
    posterior_predictive: bool = True,
    log_likelihood: bool | None = None,
    log_likelihood_conditional: bool = False,
    log_prior: bool = False,
    unconstrained: bool = False,
    log_density: bool = False,
    num_prior_samples: int = 0,
    predictions: Float[Tensor, "P D"] | None = None,
    batch_size: int | None = None,
    num_data: int | None = None,
    losses: Any = None,
    constant_data: Mapping[str, Any] | None = None,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    progress: bool = True,
) -> Any:
    """Export a posterior to ArviZ.

    Groups of the result:

    - ``posterior``: latent and deterministic sites; of a method that has none (``Vecchia``, ``MLLk``, ``LOO`` with
      Gaussian noise and no priors) joint draws of ``f`` at the data, given the observations;
    - ``posterior_predictive``: new draws of observed sites; given the data of the neighbors if the model conditions on
      them (``LOO``, ``Vecchia``);
    - ``log_likelihood``: for a method, the log density of each observation given all others and the hyperparameters
      of the draw, latent values integrated out (``gp.loo``), if hyperparameters have priors; for any other program,
      its log density given all latent sites, without the scales of plates and ``poutine.scale``, and NaN where it is
      masked. The attribute ``kind`` names which of the two;
    - ``log_likelihood_conditional``: for a method, the log density given all latent sites, on request or if the method
      has no ``loo``. ``az.loo`` cannot use it if there are as many latent values as observations;
    - ``unconstrained_posterior``: latent sites with a constrained support, in unconstrained space, on request;
    - ``log_prior``: log density of each latent site in the posterior group, without scales, on request;
    - ``prior``, ``prior_predictive``: draws from the model, on request;
    - ``predictions``: joint draws of ``f`` and ``y`` at new points, on request; their ``x`` is in
      ``predictions_constant_data``;
    - ``sample_stats``: for MCMC, ``diverging`` and the kernel's diagnostics of each chain (step size, ...), or of each
      draw, with a :class:`~pyro_nngp.inference.Recorder`; with `log_density`, ``log_p`` and, for guides, ``log_q``;
    - ``warmup_posterior``, ``warmup_sample_stats``: from a ``Recorder(warmup=True)``;
    - ``observed_data``; ``constant_data``, which holds the inputs ``x`` of a method; ``params``, the parameters of the
      model, which are point estimates; ``svi``, the trace of the loss.

    A plate is a dimension of its name whose coordinates are the rows it used. Other dimensions are named by `dims`, by
    ``infer={"event_dims": [...]}`` of the site, or ``<site>_dim_<k>``.

    Args:
        source: an ``MCMC`` object after its run; an object with ``model`` and ``guide``; or a pair (model, guide).
        *args: arguments of model and guide. Without any, an MCMC run uses the arguments it was run with, with all rows
            instead of a :class:`~pyro_nngp.inference.mcmc.minibatch.Minibatch`.
        model_kwargs: keyword arguments of model and guide.
        num_samples: draws per chain. None is all draws of an MCMC run (fewer are evenly spaced), 500 of a guide.
        var_names: sites to keep in the posterior; with "~" in front, sites to leave out, such as "~u".
        posterior_predictive: draw new data.
        log_likelihood: keep the log likelihood for ``az.loo``. None leaves it out for a method whose hyperparameters
            have no priors: all draws have the same densities, to which no importance weights can be fitted. Take
            :func:`~pyro_nngp.inference.elpd`, ``elpd(gp.loo())``.
        log_likelihood_conditional: keep the log densities of the data given all latent sites.
        log_prior: keep the log densities of the latent sites, for power-scaling sensitivity.
        unconstrained: keep latent sites in unconstrained space too, for moment matching.
        log_density: keep the log joint density ``log_p`` of latent sites and data, and the guide's, ``log_q``, both
            without scales.
        num_prior_samples: draws from the prior. Models that condition on the data of the neighbors have no prior
            predictive draws.
        predictions: new inputs of a method; or a mapping of ``x_new``, ``offset``, ``trials`` and ``limits`` to theirs.
        batch_size: run the model on this number of rows at a time, as ``model(idx)``, at values drawn for all rows.
        num_data: number of rows, for `batch_size` with a `source` that has no ``num_data``.
        losses: the loss at each step, such as ``fit(...).losses``.
        constant_data: further arrays to keep, {name: array}.
        coords: labels, {dimension: labels}; for a plate one for each of its rows, used or not.
        dims: names, {site or constant: names of its dimensions that are not plates}.
        progress: show a progress bar if the export takes more than a second.

    Returns:
        ``arviz.InferenceData`` with ArviZ 0.x, ``xarray.DataTree`` with 1.x. Ctrl-C ends the export with the draws
        so far.

    Raises:
        TypeError: for any other source.
        ImportError: if neither ArviZ nor xarray is installed.
        ValueError: for a run without draws, latent sites without draws, rows that change from draw to draw, names that
            do not fit, arguments out of range.

    Cost: two runs of the model per draw (one without `posterior_predictive`) and the guide's; `log_likelihood` adds
    the density of ``gp.loo`` per draw of the hyperparameters. `log_density` and `log_prior` add the densities of the
    latent sites: O(N K^3) for a nearest-neighbor prior.
    """
    counts = {"num_samples": (num_samples, 1), "batch_size": (batch_size, 1), "num_data": (num_data, 1)}
    for arg, (number, least) in counts.items():
        if number is not None:
            check_int(_WHERE, arg, number, least, "Leave it out for the default.")
    check_int(_WHERE, "num_prior_samples", num_prior_samples, 0, "It counts draws from the prior.")
    flags = {"posterior_predictive": posterior_predictive, "log_prior": log_prior, "unconstrained": unconstrained}
    flags |= {"log_density": log_density, "log_likelihood_conditional": log_likelihood_conditional}
    flags |= {} if log_likelihood is None else {"log_likelihood": log_likelihood}
    check_flags(_WHERE, progress=progress, **flags)
    rows = num_data or getattr(source, "num_data", 1)
    most = max(num_samples or 1, num_prior_samples)
    check_memory(_WHERE, "draws", most * (rows if isinstance(rows, int) else 1), torch.get_default_dtype())
    library(_WHERE, "xarray")
    check_mappings(_WHERE, model_kwargs=model_kwargs, constant_data=constant_data, coords=coords, dims=dims)
    listed = isinstance(var_names, Collection) and not isinstance(var_names, str | bytes | Tensor)
    if var_names is not None and not (listed and all(isinstance(name, str) for name in var_names)):
        fail(_WHERE, "var_names", "to be a list of names", f"{var_names!r:.40}", "List them.", TypeError)
    if log_prior and batch_size is not None:
        fail(_WHERE, "log_prior", "to be False with batch_size", True, "Run the model on all rows for it.")
    if losses is not None:
        try:
            losses = torch.as_tensor(losses, dtype=torch.float64).detach().cpu().numpy()
        except (RuntimeError, TypeError, ValueError):
            losses = np.empty(())
        if losses.ndim != 1:
            fail(_WHERE, "losses", "to be a vector of numbers", "others", "Pass fit(...).losses.", TypeError)
    draws, kwargs = draws_of(_WHERE, source, num_samples), dict(model_kwargs or {})
    if isinstance(draws, MCMCDraws) and not args and not kwargs and batch_size is None:
        args, kwargs = draws.arguments()
    num_data = getattr(source, "num_data", None) if num_data is None else num_data
    blocks = [None] if batch_size is None else _blocks(batch_size, num_data, args, kwargs)
    method = method_of(draws.model)
    from_guide = draws.are_of(method)
    if method is not None:
        cure = "Take elpd(data.in_order(gp.loo())), and draws of gp.sample."
        method.check_export("to_arviz", cure, from_guide)
    densities = predict = None
    if log_likelihood is None:  # without priors leave-one-out densities are the same at all draws of the guide
        log_likelihood = not (from_guide and method.loo_kind and not method.hyper_guide.has_sites)
    if method is not None and method.loo_kind and log_likelihood:
        idx = args[0] if args else kwargs.get("idx")
        densities = method.loo_by_draw(idx, from_guide=from_guide)
    if predictions is not None:
        if method is None:
            cure = "Pass a method, or its MCMC run; draw the predictions of your own program by Predictive."
            fail(_WHERE, "source", "to be a method, with predictions", type(source).__name__, cure, TypeError)
        given = predictions if isinstance(predictions, Mapping) else {"x_new": predictions}
        predict, predictions = method.predictions_by_draw(**given, from_guide=from_guide), given["x_new"]
    given_latents = None
    if log_likelihood_conditional or (log_likelihood and densities is None):
        given_latents = "log_likelihood" if method is None else "log_likelihood_conditional"
    shape = draws.num_chains, draws.num_samples
    arrays = Arrays(_WHERE, shape, num_prior_samples, () if var_names is None else var_names, dims or {}, coords or {})
    with torch.no_grad(), deferred_interrupt() as pressed:
        for s in tqdm(range(draws.num_samples), disable=not progress, delay=1, desc=_WHERE, unit="draw"):
            for place in ((c, s) for c in range(draws.num_chains)):
                values, guide_trace = draws.at(*place, args, kwargs)
                log_p = 0.0
                for rows in blocks:
                    run = partial(run_at, _WHERE, draws.model, args, kwargs, values, rows)
                    trace = run()
                    arrays.add(place, trace, values, rows, given_latents, log_prior, unconstrained)
                    if posterior_predictive:
                        arrays.add_replicates(place, trace, run(resample=True), rows)
                    if log_density:
                        if rows is None:
                            check_all_rows(_WHERE, trace)
                        of_rows, of_all = log_prob_parts(trace)
                        log_p = log_p + of_rows
                if densities is not None:
                    arrays.add_leave_one_out(place, trace, method.site("y"), densities(values))
                if predict is not None:
                    arrays.add_predictions(place, *predict(values))
                if log_density:
                    log_q = {} if guide_trace is None else {"log_q": total_log_prob(guide_trace)}
                    arrays.add_densities(place, log_p=log_p + of_all, **log_q)
            if s == 0:
                if from_guide and not arrays.has_latents:
                    arrays.add_fields(*_fields(method, args[0] if args else kwargs.get("idx"), draws.num_samples))
                by_row = {name: getattr(source, name, None) for name in ("x", "offset", "weights", "trials", "limits")}
                arrays.add_constants(trace, by_row, predictions, constant_data or {})
                arrays.check_names()
                arrays.add_warmup(trace, *draws.warmup())
            if pressed:
                break
        for draw in range(0 if pressed else num_prior_samples):
            trace = run_at(_WHERE, draws.model, args, kwargs, None, resample=True)
            arrays.add_prior(draw, trace)
    arrays.attrs["log_likelihood"]["kind"] = _GIVEN_LATENTS if densities is None else method.loo_kind
    arrays.attrs["log_likelihood_conditional"]["kind"] = _GIVEN_LATENTS
    arrays.groups["sample_stats"].update(draws.statistics())
    if losses is not None:
        arrays.groups["svi"]["loss"] = (("step",), losses)
    return container(_WHERE, arrays.datasets(num_draws=s + 1))


def _fields(method: Any, idx: Tensor | None, num_samples: int) -> tuple[str, Tensor, tuple[str, ...]]:
    """Name, joint draws and dimensions of f at the data, for a method without latent sites."""
    x = method.x if idx is None else method.x[idx]
    offset = method.offset if method.offset is None or idx is None else method.offset[idx]
    f, name = method.sample(x, num_samples, offset=offset), method.site("f")
    outer = method.site("latents") if method.num_plates > 1 else f"{name}_dim_0"
    return name, f, (outer, method.site("data"))[3 - f.dim() :]


def _blocks(batch_size: int, num_data: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
    if not isinstance(num_data, int):
        fail(_WHERE, "num_data", "to be the number of rows, with batch_size", num_data, "Pass num_data=.")
    if args or kwargs:
        cure = "With batch_size the model is called as model(idx)."
        fail(_WHERE, "model arguments", "to be none with batch_size", f"{len(args) + len(kwargs)}", cure)
    return list(torch.arange(num_data).split(batch_size))
