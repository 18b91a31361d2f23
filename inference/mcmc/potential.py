r"""The potential energy of any Pyro model, minibatches included, on one flat vector of unconstrained values.

.. math:: \tilde U(\psi) = -\log \tilde p(T(\psi), y) - \log |\det \partial T / \partial \psi|

T moves each site from unconstrained space to its support (:func:`torch.distributions.biject_to`, as Pyro's HMC does)
and :math:`\log \tilde p` is the log density of one run of the model, with the scales N/B of its plates. Pyro's
``initialize_model`` does not support subsampled plates; this one runs the model each time, on a new minibatch. Priors
of nearest-neighbor processes are minibatches of conditionals (:mod:`pyro_nngp.inference.mcmc.process_rows`).

On several processes each has the potential of its local rows; values and gradients are summed. The processes draw
the same noise, from the random state of the first one, and each the minibatches of its rows.

Cost: one run of the model and its backward pass. Nothing here is O(N), but a plate with ``subsample_size`` draws its
minibatch by a permutation of all N rows; :class:`Minibatch` draws an index in O(B).

Symbols: position (C, d) holds C chains of d unconstrained values, or (d,) one chain.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyro
import torch
from jaxtyping import Bool, Float
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import biject_to

from pyro_nngp._checks import check_same_kind, fail
from pyro_nngp._random import seeded
from pyro_nngp.distributed import World
from pyro_nngp.inference._traces import check_supports, latent_sites
from pyro_nngp.inference.mcmc.adaptation import State
from pyro_nngp.inference.mcmc.minibatch import Minibatch, minibatches_of
from pyro_nngp.inference.mcmc.process_rows import ProcessRows, at_batch, batch_sizes, process_of, whole_processes
from pyro_nngp.inference.protocols import Checked, owner_of, shard_of


def check_sizes(where: str, model: Callable, batches: list[Minibatch]) -> None:
    """Raise unless minibatches for the model of a method have its number of rows."""
    method = owner_of(model)
    if not isinstance(method, Checked):
        return
    for batch in batches:
        if batch.size != method.num_data:
            cure = f"Pass Minibatch(gp.num_data, {min(batch.batch_size, method.num_data)}); rows without a y are none."
            fail(where, "Minibatch.size", f"to be {method.num_data}, the rows of the method", batch.size, cure)


_MOST_CHECKS = 200  # most minibatches whose data are checked at the start
_TRIES = 100  # of a start


class ModelPotential:
    """The potential of a model and its gradient.

    Args:
        where: name of the caller, for messages.
        model: a Pyro model with continuous latent sites of fixed names and shapes, none inside a subsampled plate.
        args, kwargs: the model's arguments; those that are :class:`Minibatch` become an index at every evaluation.
        init_strategy: strategy that draws starting values, one of ``pyro.infer.autoguide.initialization``.
        vectorize: evaluate several chains by one :func:`torch.func.vmap` rather than one after the other.

    Attributes:
        shapes: unconstrained shape of each latent site.
        transforms: for each site, the map from its support to unconstrained space, as Pyro's MCMC kernels keep it.
        device: device of the sites.
        params: unconstrained leaf of each ``pyro.param`` the model reads.
        processes: names of the latent sites of nearest-neighbor processes.

    Raises:
        ValueError: if observed data are off the support of their distribution (all are checked once, or 200 evenly
            spaced minibatches of them); if a minibatch is of another number of rows than a method has; if a latent site
            is discrete or inside a subsampled plate; if there is none; or if dtypes differ.
    """

    def __init__(
        self, where: str, model: Callable, args: tuple, kwargs: dict, init_strategy: Callable, vectorize: bool = True
    ) -> None:
        self._where, self._model, self._args, self._kwargs = where, model, args, kwargs
        self._init_strategy, self._vectorize = init_strategy, vectorize
        self._minibatches = minibatches_of(args, kwargs)
        self._of_priors: dict[str, Minibatch] = {}  # by site of a process over all points
        self._starts: dict[str, Tensor] = {}  # of processes that the model has on a batch, at all points
        self._world, self._share = _join(where, model)
        if self._world is None:
            check_sizes(where, model, self._minibatches)
        trace = self._fresh_trace()
        check_supports(where, trace)
        self._of_priors = self._batches_of_priors(trace)
        if self._world is not None:
            _check_shared(where, trace)
        latent = latent_sites(trace)
        if not latent:
            fail(where, "model", "with a latent site", "none", "Observe fewer sites, or use SVI for parameters.")
        for batches in self._all_rows():
            check_supports(where, self._run(InitMessenger(self._start_site)(self._model), batches))
        self.transforms = {name: biject_to(site["fn"].support).inv for name, site in latent.items()}
        values = {name: t(self._starts.get(name, latent[name]["value"])) for name, t in self.transforms.items()}
        check_same_kind(where, **values)
        self.shapes = {name: value.shape for name, value in values.items()}
        self.device = next(iter(values.values())).device
        self.processes = [name for name, site in latent.items() if process_of(site["fn"]) is not None]
        self.params = {name: _leaf(site["value"]) for name, site in trace.nodes.items() if site["type"] == "param"}

    def pack(self, values: dict[str, Tensor]) -> Float[Tensor, "*C d"]:
        """Pack unconstrained values, {site: (*C, ...)}, into one vector per chain.

        Raises:
            ValueError: if sites or shapes are not the model's.
        """
        if values.keys() != self.shapes.keys():
            fail(self._where, "values", f"at the sites {sorted(self.shapes)}", sorted(values), "Give each site one.")
        flat = []
        for name, shape in self.shapes.items():
            batch = values[name].shape[: values[name].dim() - len(shape)]
            if values[name].shape != batch + shape:
                actual = tuple(values[name].shape)
                fail(self._where, name, f"of unconstrained shape {tuple(shape)}", actual, "Transform it first.")
            flat.append(values[name].reshape(*batch, -1))
        return torch.cat(flat, -1)

    def unpack(self, position: Float[Tensor, "*C d"]) -> dict[str, Tensor]:
        """Split a vector into the unconstrained values of the sites, {site: (*C, ...)}."""
        parts = position.split([shape.numel() for shape in self.shapes.values()], -1)
        batch = position.shape[:-1]
        return {name: z.reshape(batch + s) for (name, s), z in zip(self.shapes.items(), parts, strict=True)}

    def sites_of(self, coordinates: Bool[Tensor, " d"]) -> list[str]:
        """Names of the sites that have a marked coordinate."""
        return [name for name, marked in self.unpack(coordinates.double()).items() if marked.any()]

    def initial(self) -> Float[Tensor, " d"]:
        """Draw a position with a finite potential and gradient by the initial strategy.

        Raises:
            ValueError: if there is none in 100 draws.
        """
        for _ in range(_TRIES):
            trace = self._fresh_trace()
            starts = {name: self._starts.get(name, trace.nodes[name]["value"]).detach() for name in self.transforms}
            position = self.pack({name: t(starts[name]) for name, t in self.transforms.items()})
            potential, gradient, _ = self.gradient(position)
            if potential.isfinite() and gradient.isfinite().all():
                return position
        actual = f"none; in the last, {self.not_finite(position)}"
        cure = "Check the model there, or start elsewhere."
        fail(self._where, "init_strategy", f"to find a finite potential in {_TRIES} draws", actual, cure)

    def state(self, position: Float[Tensor, "*C d"]) -> State:
        """Entries of the first state of a chain that the potential needs; none for plain gradients."""
        return {}

    def at_update(self, state: State, update: int, end: int) -> State:
        """Prepare for update number `update`, of which burn-in has `end`; returns the state."""
        return state

    def gradient(
        self, position: Float[Tensor, "*C d"], params: tuple[Tensor, ...] = ()
    ) -> tuple[Float[Tensor, "*C"], Float[Tensor, "*C d"], list[Tensor | None]]:
        """Evaluate on a new minibatch, one per chain.

        Returns:
            The potential and its gradient by position, chain by chain; the gradient of the chains' mean by `params`.
        """
        position = position.detach().requires_grad_()
        potential = self._evaluate(position)
        share = 1 / max(potential.numel(), 1)
        gradient, *by_params = torch.autograd.grad(potential.sum(), [position, *params], allow_unused=bool(params))
        scaled = [None if g is None else g * share for g in by_params]
        potential, gradient, *rest = self._summed([potential.detach(), gradient, *(g for g in scaled if g is not None)])
        return potential, gradient, [None if g is None else rest.pop(0) for g in scaled]

    def response(
        self, position: Float[Tensor, "*C d"], displacement: Float[Tensor, "*C d"]
    ) -> tuple[Float[Tensor, "*C d"], Float[Tensor, "*C d"]]:
        """Gradient on a new minibatch, and its change over a displacement on the same one; NaN where the model fails.

        The second run repeats torch's random draws of the first; models that draw from other generators get two
        minibatches.
        """
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            here = self.gradient(position)[1]
        try:
            there = self.gradient(position + displacement)[1]
        except torch.linalg.LinAlgError:
            there = torch.full_like(position, torch.nan)
        return here, there - here

    def energy(self, position: Float[Tensor, "*C d"]) -> Float[Tensor, "*C"]:
        """Evaluate only the potential, on a new minibatch."""
        with torch.no_grad():
            return self._summed([self._evaluate(position)])[0]

    def _summed(self, parts: list[Tensor]) -> list[Tensor]:
        """Sums over the processes, in one reduction."""
        if self._world is None:
            return parts
        total = self._world.sum(torch.cat([part.reshape(-1) for part in parts]))
        sums = total.split([part.numel() for part in parts])
        return [each.view_as(part) for each, part in zip(sums, parts, strict=True)]

    def param_values(self) -> dict[str, Tensor]:
        """Values of the model's parameters as a run of the model sees them."""
        trace = self._fresh_trace()
        return {name: trace.nodes[name]["value"].detach().clone() for name in self.params}

    def not_finite(self, position: Float[Tensor, " d"]) -> str:
        """Names of the sites with a log density that is not finite at a position, on a new minibatch, as text."""
        trace = self._condition(position, self._draw_batches())
        trace.compute_log_prob()
        bad = {n: float(s["log_prob_sum"]) for n, s in trace.nodes.items() if s["type"] == "sample"}
        bad = {name: value for name, value in bad.items() if value - value != 0}
        return ", ".join(f"site {name!r} has log density {value}" for name, value in bad.items()) or "no single site"

    def _fresh_trace(self) -> poutine.Trace:
        """Run the model at the initial strategy's values, on a new minibatch."""
        return self._run(InitMessenger(self._start_site)(self._model), self._draw_batches())

    def _start_site(self, site: dict[str, Any]) -> Tensor:
        _check_site(self._where, site)
        process = process_of(site["fn"])
        if process is None or process.is_whole:
            return self._start(site)
        start = self._start({**site, "fn": at_batch(site["fn"])})
        self._starts[site["name"]] = start
        return start.index_select(-1, process.batch.rows)

    def _start(self, site: dict[str, Any]) -> Tensor:
        """The initial strategy's value of a site."""
        value, shape = self._init_strategy(site), site["fn"].shape()
        if not isinstance(value, Tensor) or value.shape != shape:
            actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            cure = "Pass one of pyro.infer.autoguide.initialization."
            expectation = f"to return a tensor of shape {tuple(shape)} for site {site['name']!r}"
            fail(self._where, "init_strategy", expectation, actual, cure, TypeError)
        return value

    def _evaluate(
        self, position: Float[Tensor, "*C d"], batches: tuple[Tensor, ...] | None = None
    ) -> Float[Tensor, "*C"]:
        """On given minibatches, the same for all chains, or on new ones."""
        if position.dim() == 1:
            return self._potential(position, *(self._draw_batches() if batches is None else batches))
        draws = [self._draw_batches() if batches is None else batches for _ in position] if self._every_batch else []
        chains = [torch.stack(batches) for batches in zip(*draws, strict=True)]
        if not self._vectorize:
            return torch.stack([self._potential(*each) for each in zip(position, *chains, strict=True)])
        try:
            with _ModuleParameters():
                return torch.func.vmap(self._potential, randomness="different")(position, *chains)
        except torch.linalg.LinAlgError:  # a numerical failure, not a missing vmap rule
            raise
        except RuntimeError as error:
            hint = "the model failed under torch.func.vmap over chains; if it runs on one chain, pass vectorize=False."
            raise RuntimeError(f"{self._where}: {hint}") from error

    def _potential(self, position: Tensor, *batches: Tensor) -> Tensor:
        trace = self._condition(position, batches)
        return -trace.log_prob_sum() + self._share * self._log_jacobian(position, trace)

    def _log_jacobian(self, position: Tensor, trace: poutine.Trace) -> Tensor:
        """Sum of log |det| of the maps to unconstrained space: minus the log determinant of T."""
        z = self.unpack(position)
        moved = {name: t for name, t in self.transforms.items() if name not in self._starts}
        return sum(t.log_abs_det_jacobian(trace.nodes[n]["value"], z[n]).sum() for n, t in moved.items())

    def _condition(self, position: Tensor, batches: tuple[Tensor, ...]) -> poutine.Trace:
        values = {name: self.transforms[name].inv(z) for name, z in self.unpack(position).items()}
        of_batch = {name: values.pop(name) for name in self._starts}
        return self._run(poutine.condition(self._model, values), batches, of_batch)

    def _run(
        self, model: Callable, batches: tuple[Tensor, ...], of_batch: Mapping[str, Tensor] | None = None
    ) -> poutine.Trace:
        """Trace of a model on minibatches; `of_batch` has all values of processes that it has on a batch."""
        index = {id(minibatch): idx for minibatch, idx in zip(self._every_batch, batches, strict=True)}
        args = [index.get(id(a), a) for a in self._args]
        kwargs = {name: index.get(id(a), a) for name, a in self._kwargs.items()}
        rows = {name: index[id(minibatch)] for name, minibatch in self._of_priors.items()}
        return poutine.trace(ProcessRows(of_batch or {}, rows)(model)).get_trace(*args, **kwargs)

    @property
    def _every_batch(self) -> list[Minibatch]:
        """The minibatches of the arguments, and of priors beside them."""
        return list(dict.fromkeys([*self._minibatches, *self._of_priors.values()]))

    def _batches_of_priors(self, trace: poutine.Trace) -> dict[str, Minibatch]:
        """The minibatch of each process over all points: the data's if it has as many rows, or a separate one."""
        sizes = [*batch_sizes(trace), *(batch.batch_size for batch in self._minibatches)]
        if not sizes or self._world is not None:
            return {}
        batches = {}
        for name, process in whole_processes(trace).items():
            count = process.graph.num_points
            same = [batch for batch in self._minibatches if batch.size == count]
            own = Minibatch(count, min(max(sizes), count), process.graph.x.device)
            batches[name] = same[0] if same else own
        return {name: batch for name, batch in batches.items() if batch.batch_size < batch.size}

    def _all_rows(self) -> Iterator[tuple[Tensor, ...]]:
        """Minibatches that cover the rows in order, at most :data:`_MOST_CHECKS` of them, evenly spaced."""
        rounds = max((-(-m.size // m.batch_size) for m in self._minibatches), default=0)
        for k in range(0, rounds, max(-(-rounds // _MOST_CHECKS), 1)):
            yield tuple(m.in_order(k) for m in self._every_batch)

    def _draw_batches(self) -> tuple[Tensor, ...]:
        if self._world is None:
            return tuple(minibatch.draw() for minibatch in self._every_batch)
        with seeded(int(torch.randint(2**62, ())) + self._world.rank, torch.empty(0)):
            return tuple(minibatch.draw() for minibatch in self._every_batch)


class _ModuleParameters(Messenger):
    """Keep parameters of torch modules out of Pyro's store, which cannot take new ones under vmap."""

    def _pyro_param(self, msg: Any) -> None:
        name, *init = msg["args"]
        if init and isinstance(init[0], nn.Parameter) and name not in pyro.get_param_store():
            msg["value"] = init[0]


def _join(where: str, model: Any) -> tuple[World | None, float]:
    """The processes that hold the rows of a model's method, and the fraction of rows on this one.

    The processes are None where this one has all rows. Otherwise all continue with the random state of the first.
    """
    shard = shard_of(owner_of(model))
    if shard is None or shard.world.size == 1:
        if shard is None and World().size > 1:
            cure = "Build the method on ShardedData and pass its model, or run on one process without a process group."
            fail(where, "model", f"to be that of a method with rows on {World().size} processes", "another", cure)
        return None, 1.0
    state = torch.get_rng_state()
    torch.set_rng_state(shard.world.sum(state if shard.world.rank == 0 else torch.zeros_like(state)))
    return shard.world, shard.num_own / shard.num_rows


def _check_shared(where: str, trace: poutine.Trace) -> None:
    """Raise if latent sites belong to single rows, which only one of several processes has."""
    for name, site in latent_sites(trace).items():
        if any(frame.vectorized for frame in site["cond_indep_stack"]):
            cure = "Take a method whose latent values are integrated out, such as Vecchia."
            fail(where, f"latent site {name!r}", "without values of single rows on several processes", "some", cure)


def _check_site(where: str, site: dict[str, Any]) -> None:
    name = site["name"]
    if getattr(site["fn"].support, "is_discrete", False):
        cure = "Sum it out of the model (a mixture distribution, for example) or observe it."
        fail(where, f"site {name!r}", "to be continuous", f"the discrete {type(site['fn']).__name__}", cure)
    for frame in site["cond_indep_stack"]:
        if frame.full_size is not None and frame.size < frame.full_size:
            actual = f"a site of {frame.size} of the {frame.full_size} rows of plate {frame.name!r}"
            cure = "Its entries would mean other rows at each update: sample all rows outside the plate and index them."
            fail(where, f"latent site {name!r}", "outside subsampled plates", actual, cure)


def _leaf(value: Any) -> Tensor:
    """The unconstrained tensor behind a value of ``pyro.param``; a subsampled plate passes it on under another name."""
    return value.unconstrained() if hasattr(value, "unconstrained") else value._pyro_unconstrained_param
