"""Small protocols for what inference asks of a method, in place of probes of its attributes.

:func:`~pyro_nngp.inference.fit` needs a :class:`Trainable`, which users write themselves; all other protocols are
optional. A method has a protocol if it has its members, whatever its class. The members that ``isinstance`` looks for
are methods, properties and plain attributes: from Python 3.12 on it does not see submodules, parameters and buffers of
a ``torch.nn.Module``, such as a guide that is a module, so that :class:`Trainable` is checked by :func:`has_program`.

Symbols: N data points, B rows of a batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pyro_nngp.bound import Bound
from pyro_nngp.distributed import ShardedData
from pyro_nngp.neighbors.table import NeighborTable


class Trainable(Protocol):
    """A model and a guide on rows of data, each called with a batch of row numbers, or without for all rows."""

    model: Callable[..., Any]
    guide: Callable[..., Any]

    @property
    def num_data(self) -> int:
        """N; on several processes the number of local rows."""


@dataclass(frozen=True, eq=False)
class Program:
    """A pair of functions as a :class:`Trainable`."""

    model: Callable[..., Any]
    guide: Callable[..., Any]
    num_data: int


@runtime_checkable
class Batched(Protocol):
    """A method whose model and guide take more than row numbers, such as a batch of the neighbor graph."""

    def batch_args(self, idx: Tensor | None, generator: torch.Generator) -> tuple[Any, ...]:
        """Arguments of model and guide for a batch; random choices come from the generator."""


@runtime_checkable
class Refreshable(Protocol):
    """A method whose neighbors follow the kernel."""

    def refresh_neighbors(self) -> None:
        """Find the neighbors in the metric of the present kernel."""


@runtime_checkable
class Solvable(Protocol):
    """A method that may have parameters whose optimum for given hyperparameters is known.

    Attributes:
        can_solve: whether it has them with its present likelihood.
    """

    can_solve: bool

    def solve(self) -> None:
        """Set these parameters to their optimum."""

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets."""


@runtime_checkable
class Alternating(Protocol):
    """A method that can be trained by quasi-Newton steps between solutions, with a score that tells when to stop.

    Attributes:
        can_alternate: whether nothing but the solved parameters is latent.
    """

    can_alternate: bool

    def score(self, rows: Tensor) -> float:
        """A score of the present state on some rows; smaller is better."""


@runtime_checkable
class HoldsOut(Protocol):
    """A method whose loss goes on falling while its predictions get worse: rows held out of training tell when."""

    def held_out_rows(self, seed: int) -> Tensor:
        """Rows to hold out; none where there are too few, or they cannot be."""

    def holding_out(self, rows: Tensor) -> AbstractContextManager[Callable[[], float]]:
        """A context in which these rows do not count; its value scores predictions of them, smaller is better."""


@runtime_checkable
class Smooth(Protocol):
    """A method that knows whether its loss is a smooth function of few hyperparameters, which suits L-BFGS."""

    has_smooth_loss: bool


class Profile(Protocol):
    """The largest bound over all q of a method, as a function of its hyperparameters.

    Attributes:
        method: the method.
        applies: whether it is known with the method's present data and parameters.
    """

    method: Trainable
    applies: bool

    def optimum(self, *, keep: bool) -> AbstractContextManager[None]:
        """A context with q at its optimum, where the loss on all rows and its gradient belong to the profile.

        Args:
            keep: whether to keep what shortens the next call, which then depends on this one.
        """

    def first_stage(self) -> AbstractContextManager[Any]:
        """A context whose value is a copy on some of the rows to train first, None where training starts with all.

        At its end the method has the hyperparameters of the copy, and all else of it that does not belong to rows.
        """


@runtime_checkable
class Profiled(Protocol):
    """A method that can be trained on the largest bound over all q, on all rows."""

    profile: Profile


@runtime_checkable
class Induced(Protocol):
    """A method with inducing points, its attribute ``z``, (M, D).

    Attributes:
        num_inducing: M.
    """

    num_inducing: int


@runtime_checkable
class Sharded(Protocol):
    """A method whose rows may be on several processes.

    Attributes:
        shard: the local rows; None where this process has all rows.
    """

    shard: ShardedData | None


@runtime_checkable
class Checked(Protocol):
    """A Gaussian-process method, whose data and hyperparameters the checks at the end of a run compare.

    It also has ``x``, ``y``, ``offset``, ``weights``, ``kernel``, ``likelihood`` and ``hyper_guide``.

    Attributes:
        num_data: N; on several processes the number of local rows.
        num_latents: number of latent functions; None is one.
        started_hyperparameters: names of hyperparameters that were left unset and started from the data, and whether
            they have changed since.
    """

    num_data: int
    num_latents: int | None
    started_hyperparameters: dict[str, bool]

    def loo_by_draw(self, idx: Tensor | None = None, *, from_guide: bool = False) -> Callable[[Any], Tensor]:
        """A function that maps a posterior draw to the leave-one-out log densities of the data at some rows."""


@runtime_checkable
class Bounded(Protocol):
    """A method whose hyperparameters can be read as a record of values."""

    def bound(self) -> Bound:
        """The present hyperparameters; those with priors at the median of their guide."""

    def posterior(self, bound: Bound) -> Any:
        """The posterior of f at some hyperparameters."""


@runtime_checkable
class ReportsEvidence(Protocol):
    """A method that knows the log evidence at its hyperparameters, of which its negative loss is a lower bound."""

    def log_evidence(self, rows: Tensor) -> Tensor | None:
        """Log evidence per data point of some rows; None where it is not known."""


@runtime_checkable
class ReportsDensity(Protocol):
    """A method that knows the log density of its data, which its negative loss may exceed, but should not."""

    def log_density(self, rows: Tensor) -> Tensor | None:
        """Log density per data point of some rows; None where it is not known."""


@runtime_checkable
class ReportsLeak(Protocol):
    """A method whose leave-one-out densities may depend on auxiliary variables that know the left-out label."""

    def leak(self, rows: Tensor) -> float:
        """Gain of the mean log density of some rows by these variables."""

    def score(self, rows: Tensor) -> float:
        """Minus the mean leave-one-out log density of some rows."""


@runtime_checkable
class LeavesOut(Protocol):
    """A posterior that predicts each of some rows from the others."""

    def duplicate_dependence(self, rows: Tensor) -> Any:
        """Densities of some rows with and without near copies of them; None where it is not defined."""

    def standardized_residuals(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Residuals of y over their standard deviations, and the parts of noise; None where noise is not Gaussian."""


def offers(method: Any, protocol: type) -> bool:
    """Whether a method has a protocol; to type checkers it may have other members as well."""
    return isinstance(method, protocol)


def has_program(value: Any) -> bool:
    """Whether a value has a model and a guide."""
    return hasattr(value, "model") and hasattr(value, "guide")


def owner_of(program: Any) -> Any:
    """The object whose method a program is; None for a function."""
    return getattr(program, "__self__", None)


def shard_of(method: Any) -> ShardedData | None:
    """The local rows of a method on several processes; None where it has all rows."""
    return method.shard if isinstance(method, Sharded) else None


def single_output(method: Any, least: int) -> Tensor | None:
    """Targets of a Gaussian-process method that has all rows, and one output; None of others, or below `least` rows."""
    is_whole = offers(method, Checked) and offers(method, Bounded) and shard_of(method) is None
    y = method.y if is_whole else None
    return y if isinstance(y, Tensor) and y.dim() == 1 and len(y) >= least else None


def total_rows(method: Trainable) -> int:
    """N, on all processes."""
    shard = shard_of(method)
    return method.num_data if shard is None else shard.num_rows


def graph_of(method: Any) -> NeighborTable | None:
    """The table of neighbors of a method; None without one."""
    graph = dict(method.named_children()).get("graph") if isinstance(method, nn.Module) else None
    return graph if isinstance(graph, NeighborTable) else None
