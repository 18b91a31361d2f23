"""New data: rows appended to a method in place, and light copies that are conditioned on further rows.

Hyperparameters stay as they are. What a method keeps per datum follows: neighbors of the new rows (old sets stay where
there is an ordering), q of the new rows, from the old q of all others as the start, and the posterior of coefficients
of the mean that the method solves for.

Cost: that of the search for the neighbors, and of ``solve`` where the method has latent values. Symbols: N data, P new
rows, T outputs.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._checks import check_finite, check_new_inputs, check_same_kind, check_tensor, fail, warn
from pyro_nngp.data.tables import BY_ROW, Table, read_rows, without_missing
from pyro_nngp.models.base.arguments import as_checked, check_by_row
from pyro_nngp.models.tower.sharded import ShardedRows

Method = TypeVar("Method", bound="GrowingData")


class GrowingData(ShardedRows):
    """A method whose data can grow; a subclass extends :meth:`append_rows` by what it keeps per datum."""

    columns: tuple[str, ...] | None
    outputs: tuple[str, ...] | None
    own_state: tuple[str, ...] = ("local", "q")  # parts with q, which copies do not share
    data_state = frozenset({"x", "y", *BY_ROW, "data_neighbors", "graph.x", "graph.order", "graph.neighbors"})

    def extend(
        self,
        x: Float[Tensor, "P D"] | Table,
        y: Float[Tensor, "P *T"] | Int[Tensor, "P *T"] | Table | None = None,
        **by_row: Float[Tensor, "P ..."] | Int[Tensor, " P"] | Table | None,
    ) -> None:
        """Append rows to the data, in place, at the present hyperparameters.

        New rows come last in the ordering, with exact neighbors among all rows before them. Predictions use them at
        once; q of latent values is solved for, starting from the old one, where the method has ``solve``. Train
        further with ``fit``, which starts new optimizers; it refuses a change of the data while it runs.

        Args:
            x: new inputs, a tensor or any table that the method takes as data.
            y: their targets, as in the constructor; None where the method has none.
            by_row: ``offset``, ``weights``, ``trials`` and ``limits`` of the rows, if the method has them.

        Raises:
            ValueError, TypeError: for malformed rows, or targets outside the support of the likelihood.
            RuntimeError: under ``torch.inference_mode()``.

        Whatever it raises, the method stays as it was.

        Cost: as in the module's docstring.
        """
        where = f"{type(self).__name__}.extend"
        self.check_whole("extend")
        if torch.is_inference_mode_enabled():
            cure = "Its tensors could not be trained: extend outside, and predict inside."
            fail(where, "gradients", "to be possible", "torch.inference_mode()", cure, RuntimeError)
        inputs, targets, others = read_rows(where, self, x, y, by_row)
        inputs, targets, values = without_missing(where, inputs, targets, others, self.takes_missing)
        with self._restored_on_failure():
            self._append(where, inputs, targets, others | values)

    def condition_on(
        self: Method,
        x: Float[Tensor, "P D"] | Table,
        y: Float[Tensor, "P *T"] | Float[Tensor, "S P"] | Int[Tensor, "P *T"] | Table,
        **by_row: Float[Tensor, "P ..."] | Int[Tensor, " P"] | Table | None,
    ) -> Method:
        """A copy with more data, which shares all hyperparameters and the old data with this method.

        It is for fantasies: what would be predicted if y were observed at x. Training the copy would move the
        hyperparameters of both; to keep new data, use :meth:`extend`. With S fantasies the posterior of coefficients of
        the mean stays that of this method, since the fantasies have it in common.

        Args:
            x: further inputs.
            y: their targets; or (S, P) for S fantasies at the same inputs, of one output with Gaussian noise.
            by_row: as in :meth:`extend`.

        Returns:
            A method of the same class; for S fantasies with S outputs.

        Raises:
            ValueError, TypeError: as in :meth:`extend`.

        Cost: as in :meth:`extend`.
        """
        where = f"{type(self).__name__}.condition_on"
        self.check_whole("condition_on")
        inputs, targets, others = read_rows(where, self, x, y, by_row)
        new = self._sharing_copy()
        if isinstance(targets, Tensor) and targets.dim() == 2 and self.y is not None and self.y.dim() == 1:
            targets = new.repeat_targets(where, targets)
        new._append(where, inputs, targets, others)
        return new

    def append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        """Append checked rows to the data and to everything that is kept per datum; :meth:`extend` calls it.

        Args:
            x: new inputs.
            y: their targets, if the method has any.
            by_row: those of ``offset``, ``weights``, ``trials`` and ``limits`` that the method has.
        """
        self.x = torch.cat([self.x, x])
        if y is not None and self.y is not None:
            self.y = torch.cat([self.y, y])
        for name, value in by_row.items():
            setattr(self, name, torch.cat([getattr(self, name), value]))

    def repeat_targets(self, where: str, y: Float[Tensor, "S P"]) -> Float[Tensor, "P S"]:
        """Repeat the targets for each of S fantasies, where they are independent outputs; returns the new ones."""
        cure = "Condition on one fantasy at a time."
        fail(where, "y", "of shape (P,) for this method and likelihood", tuple(y.shape), cure)

    def check_names_by_row(self, where: str, by_row: dict[str, Any]) -> None:
        """Raise unless offset, weights, trials and limits are given for new rows where the method has them."""
        for name in BY_ROW:
            if (getattr(self, name) is None) != (by_row.get(name) is None):
                expectation = "of the new rows" if by_row.get(name) is None else "None, as the method has none"
                cure = "Give what the constructor got."
                fail(where, name, expectation, "None" if by_row.get(name) is None else "values", cure)

    @torch.no_grad()
    def _append(self, where: str, x: Any, y: Any, by_row: dict[str, Any]) -> None:
        check_new_inputs(where, x, self.x)
        if (y is None) != (self.y is None):
            expectation = "to be None, as the method has no targets" if self.y is None else "of shape (P, ...)"
            fail(where, "y", expectation, getattr(y, "shape", None), "Give what the constructor got.")
        if y is not None and self.y is not None:
            check_tensor(where, "y", y)
            check_same_kind(where, x=self.x, y=y)
            y = self.coded(y)
            if y.shape != (len(x), *self.y.shape[1:]):
                expectation = f"of shape {(len(x), *self.y.shape[1:])}"
                fail(where, "y", expectation, tuple(y.shape), "One row of y per row of x.")
            if y.is_floating_point():
                check_finite(where, "y", y.nan_to_num() if self.takes_missing else y)
            if self.likelihood is not None and not self.likelihood.differs_by_row:
                self.likelihood.check(as_checked(self.likelihood, y, self.takes_missing))
        self.check_names_by_row(where, by_row)
        found = check_by_row(where, x, y, self.likelihood, self.latent_shape, by_row)
        values = {name: value for name, value in found.items() if value is not None}
        for name, value in values.items():
            shape = (len(x), *getattr(self, name).shape[1:])
            if value.shape != shape:
                fail(where, name, f"of shape {shape}", tuple(value.shape), "Give what the constructor got.")
        self.append_rows(x.detach(), None if y is None else y.detach().to(self.y), values)

    @contextmanager
    def _restored_on_failure(self) -> Iterator[None]:
        """Put all parts of the method and their values back if the block raises."""
        parts = [(part, {key: _own_dict(value) for key, value in vars(part).items()}) for part in self.modules()]
        state = {name: value.clone() for name, value in self.state_dict().items()}
        try:
            yield
        except BaseException:
            for part, attributes in parts:
                vars(part).clear()
                vars(part).update(attributes)
            self.load_state_dict(state)
            raise

    def _sharing_copy(self: Method) -> Method:
        """A copy that has hyperparameters and data in common with this method, but not q."""
        parts = [self._modules.get(name) for name in self.own_state]
        own = {id(value) for part in parts if part is not None for value in (*part.parameters(), *part.buffers())}
        tables = [value for name, value in self.named_buffers() if name in self.data_state]
        shared = [value for value in (*self.parameters(), *tables) if id(value) not in own]
        return copy.deepcopy(self, {id(value): value for value in shared})


def _own_dict(value: Any) -> Any:
    """A copy of a dictionary, such as that of the buffers of a module; anything else itself."""
    return value.copy() if isinstance(value, dict) else value


def warn_untrained(where: str) -> None:
    """Warn that q(u) does not know the new rows."""
    warn(f"{where}: q(u) at the inducing points has not seen the new rows, which only training can change: call fit.")
