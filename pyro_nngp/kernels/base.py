"""Base classes of kernels, modules with hyperparameters, and sums and products of them.

Cost: the sum over the parts. Symbols: n, m points of the two blocks, D input columns.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn, cast

import torch
from jaxtyping import Float
from pyro.nn import pyro_method
from torch import Tensor, nn
from torch.func import functional_call

from pyro_nngp._checks import check_int, check_same_kind, check_tensor, fail
from pyro_nngp._kinds import check_flags
from pyro_nngp.hyperparameters import GPModule, Hyperparameter, between, bound_copy, positive
from pyro_nngp.hyperparameters.batches import batch_shape_of, is_computed, placed
from pyro_nngp.kernels.combination import added, multiplied
from pyro_nngp.kernels.covariance import Covariance, covariance_of, joint_batch_shape
from pyro_nngp.kernels.radial import broadcast_numbers


class Kernel(GPModule):
    """Base class; a subclass defines ``forward(x, z)``, or :meth:`bind` where it can do better.

    ``forward`` maps x (..., n, D) and z (..., m, D) to a covariance block (..., n, m) and reads hyperparameters as
    attributes, such as those that :meth:`declare` makes. Variances are then blocks of one point, and a batch of
    hyperparameters is evaluated one set after the other. A subclass that defines ``bind`` decorates it with
    :func:`pyro.nn.pyro_method`, reads hyperparameters by :meth:`read`, whose batch dimensions lead
    dimensions of the inputs, and returns a :class:`Covariance`.

    Args:
        input_dim: number D of input columns that the kernel acts on.
        active_dims: indices of these columns; by default the input has exactly D columns.

    Raises:
        ValueError: if ``input_dim`` < 1, or ``active_dims`` is of another length, negative or repeated.
        TypeError: for keywords that the constructor does not have.
    """

    moves_inputs: bool = False
    """Whether lengthscales of the parts refer to other coordinates than the input columns."""

    def __new__(cls, *args: Any, **settings: Any) -> "Kernel":
        if not settings:  # copies, of which there are many
            return super().__new__(cls)
        known = inspect.signature(cls.__init__).parameters
        wrong = settings.keys() - known
        if wrong and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            names = ", ".join(name for name, p in known.items() if name != "self" and p.kind is not p.VAR_POSITIONAL)
            cure = "GPyTorch's outputscale and scikit-learn's length_scale are variance and lengthscale here."
            fail(cls.__name__, "keywords", f"among {names}", ", ".join(sorted(wrong)), cure, TypeError)
        return super().__new__(cls)

    def __init__(self, input_dim: int, active_dims: Sequence[int] | None = None) -> None:
        super().__init__()
        name = type(self).__name__
        check_int(name, "input_dim", input_dim, 1, "Pass the number of input columns.")
        if active_dims is not None:
            if not isinstance(active_dims, Sequence) or isinstance(active_dims, str | bytes):
                fail(name, "active_dims", "to be a list of ints", f"{active_dims!r:.40}", "List columns.", TypeError)
            for d in active_dims:
                check_int(name, "active_dims", d, cure="List column numbers.")
            if len(active_dims) != input_dim:
                fail(name, "active_dims", f"of length input_dim = {input_dim}", len(active_dims), "Make them agree.")
            if min(active_dims) < 0 or len(set(active_dims)) < input_dim:
                fail(name, "active_dims", "to be distinct and >= 0", list(active_dims), "List each column once.")
        self.input_dim = input_dim
        self.active_dims = None if active_dims is None else list(active_dims)
        self._sizes: dict[str, int] = {}

    @pyro_method
    def bind(self) -> Covariance:
        """Read the hyperparameters once, firing their Pyro statements, and return the plain covariance function.

        Raises:
            NotImplementedError: if the subclass defines neither ``forward`` nor ``bind``.
        """
        if type(self).forward is Kernel.forward:
            cure = "Write forward(self, x, z): (..., n, D), (..., m, D) -> (..., n, m)."
            fail(type(self).__name__, "the kernel", "to define forward or bind", "neither", cure, NotImplementedError)
        bound = bound_copy(self)
        values = bound.read_all()
        batch = self.batch_shape_of(values)
        if not batch:
            return replace(covariance_of(bound.forward), batch_shape=batch)
        covs = [covariance_of(one.forward) for one in self._each_set(bound, values, batch)]
        return Covariance(
            lambda x, z: torch.stack([cov(x, z) for cov in covs]).unflatten(0, batch),
            lambda x: torch.stack([cov.diag(x) for cov in covs]).unflatten(0, batch),
            batch_shape=batch,
        )

    def _each_set(self, bound: "Kernel", values: dict[str, Tensor], batch: torch.Size) -> Iterator["Kernel"]:
        """Copies of a bound kernel with one set of its hyperparameters each."""
        own = {arg: value.shape[-1:] if self._sizes[arg] > 1 else () for arg, value in values.items()}
        flat = {arg: value.expand(*batch, *own[arg]).reshape(-1, *own[arg]) for arg, value in values.items()}
        for i in range(batch.numel()):
            one = copy.copy(bound)
            one.__dict__.update({arg: value[i] for arg, value in flat.items()})
            yield one

    def forward(
        self, x: Float[Tensor, "... n D"], z: Float[Tensor, "... m D"] | None = None, diag: bool = False
    ) -> Float[Tensor, "..."]:
        """Covariances (*S, ..., n, m) of rows of x with rows of z (default x), S the batch of hyperparameters.

        With ``diag=True`` the variances (*S, ..., n) at x, without z.
        """
        check_flags(type(self).__name__, diag=diag)
        if diag and z is not None:
            cure = "Pass kernel(x, diag=True) for the variances at x."
            fail(type(self).__name__, "z", "to be None with diag=True", "points", cure)
        for arg, points in (("x", x), ("z", x if z is None else z)):
            check_tensor(type(self).__name__, arg, points)
            if not points.is_floating_point():
                cure = "Call .float() or .double() on it."
                fail(type(self).__name__, arg, "in floating point", points.dtype, cure, TypeError)
        check_same_kind(type(self).__name__, x=x, z=x if z is None else z)
        cov = self.bind()
        return cov.diag(x) if diag else cov(x, x if z is None else z)

    def extra_repr(self) -> str:
        """Input columns, then hyperparameters."""
        columns = f"{self.input_dim}" if self.active_dims is None else f"active_dims={self.active_dims}"
        return ", ".join(part for part in (columns, super().extra_repr()) if part)

    def __add__(self, other: "Kernel") -> "Sum":
        return Sum(self, other)

    def __mul__(self, other: "Kernel") -> "Product":
        return Product(self, other)

    def declare(
        self, arg: str, value: Hyperparameter | None, size: int = 1, unset: tuple[float, float, float] | None = None
    ) -> None:
        """Register ``arg`` as a positive hyperparameter, a scalar or of shape (size,).

        None starts at 1, or is (low, high, start) of `unset` if that is given.
        """
        self._sizes[arg] = size
        if isinstance(value, Tensor) and not is_computed(value) and value.shape not in ((), (1,), (size,)):
            self._fail_shape(arg, value)
        name = type(self).__name__
        if value is None and unset is not None:
            setattr(self, arg, between(name, arg, None, *unset))
        else:
            setattr(self, arg, positive(name, arg, value))

    def read(self, arg: str) -> Float[Tensor, "..."]:
        """Value of the hyperparameter ``arg``; fires its Pyro statement.

        Returns:
            A number (), or columns (size,); with batch dimensions (*S,) for a declared size of 1, else (*S, size) or
            (*S, 1).

        Raises:
            ValueError: for another shape.
        """
        value, size = getattr(self, arg), self._sizes[arg]
        batch = batch_shape_of(self, arg, value, size)
        own, batch = value.shape[len(batch) :], placed(batch)
        if own not in ((), (1,), (size,)):
            self._fail_shape(arg, value)
        if own == (size,) and size > 1:
            return value.reshape(*batch, size)
        return value.reshape(*batch, 1) if batch and size > 1 else value.reshape(batch)

    def read_all(self) -> dict[str, Float[Tensor, "..."]]:
        """The values of all declared hyperparameters by name, as :meth:`read` returns them."""
        return {arg: self.read(arg) for arg in self._sizes}

    def batch_shape_of(self, values: Mapping[str, Tensor]) -> torch.Size:
        """Joint batch shape of hyperparameters that :meth:`read` has read.

        Raises:
            ValueError: if a value of D numbers may be a vector or, beside the others, a batch of D.
        """
        shapes = [value.shape if self._sizes[arg] == 1 else value.shape[:-1] for arg, value in values.items()]
        batch = torch.broadcast_shapes(*shapes)
        for arg in values if batch else ():
            size, value = self._sizes[arg], self.__dict__.get(arg)
            if isinstance(value, Tensor) and value.shape == (size,) == batch[-1:] and size > 1:
                cure = "Write value[..., None].expand(*value.shape, D) for a batch, value[None] for one vector."
                expectation = f"to be a vector of {size} columns or a batch of {size} numbers"
                fail(type(self).__name__, arg, expectation, "what may be either", cure)
        return batch

    def _fail_shape(self, arg: str, value: Tensor) -> NoReturn:
        size = self._sizes[arg]
        expectation = "to be a scalar" if size == 1 else f"to be a scalar or of shape ({size},)"
        cure = "Batch dimensions lead, in values of sites, a PyroParam or a PyroSample."
        fail(type(self).__name__, arg, expectation, f"shape {tuple(value.shape)}", cure)

    def check_columns(self, x: Tensor) -> None:
        """Raise ``ValueError`` unless x (..., n, D) has the columns that the kernel acts on."""
        name = type(self).__name__
        if x.dim() < 2:
            fail(name, "inputs", "of shape (..., n, D)", tuple(x.shape), "Use x[:, None] for one input dimension.")
        if self.active_dims is None and x.shape[-1] != self.input_dim:
            cure = "Set input_dim to the number of columns, or choose columns with active_dims."
            fail(name, "inputs", f"with input_dim = {self.input_dim} columns", tuple(x.shape), cure)
        if self.active_dims is not None and x.shape[-1] <= max(self.active_dims):
            fail(name, "inputs", f"with columns {self.active_dims}", tuple(x.shape), "Correct active_dims.")

    def _columns(self, x: Tensor) -> Tensor:
        """The columns of x that the kernel acts on."""
        self.check_columns(x)
        return x if self.active_dims is None else torch.stack([x[..., d] for d in self.active_dims], -1)

    def _variances(self, x: Tensor, variance: Tensor) -> Tensor:
        """One variance, or a batch (*S,) of them, at all rows of x: (*S, ..., n)."""
        shape = self._columns(x).shape[:-1]
        return broadcast_numbers(variance.to(x), len(shape)).expand(*variance.shape, *shape)

    def _column_pair(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """The active columns of both inputs: one object if the inputs are one object."""
        columns = self._columns(x)
        return columns, columns if z is x else self._columns(z)


class Wrapper(Kernel):
    """Base class of kernels that transform another kernel, the attribute `kern`.

    Args:
        kern: the inner kernel.
        input_dim: as for :class:`Kernel`.
        active_dims: as for :class:`Kernel`.
    """

    def __init__(self, kern: Kernel, input_dim: int, active_dims: Sequence[int] | None) -> None:
        super().__init__(input_dim, active_dims)
        self.kern = kern

    def inner_inputs(self, x: Float[Tensor, "... n D"]) -> Float[Tensor, "... n F"]:
        """The inputs of the inner kernel."""
        return x


def in_dtype(function: Callable, dtype: torch.dtype) -> Callable:
    """A function of inputs; a module has its weights in a dtype, but of kernels, which follow their inputs anyway."""
    parts = function.named_modules() if isinstance(function, nn.Module) else ()
    weights = {
        name: value
        for prefix, part in parts
        if not isinstance(part, Kernel)
        for name, value in chain(part.named_parameters(prefix, False), part.named_buffers(prefix, False))
        if value.is_floating_point()
    }
    if all(value.dtype == dtype for value in weights.values()):
        return function
    copies = {name: value.to(dtype) for name, value in weights.items()}
    return lambda *inputs: functional_call(cast(nn.Module, function), copies, inputs)


class _Pair(Kernel):
    """Two kernels on the same inputs."""

    def __init__(self, kern0: Kernel, kern1: Kernel) -> None:
        super().__init__(*_joint_dims(type(self).__name__, kern0, kern1))
        self.kern0 = kern0
        self.kern1 = kern1


class Sum(_Pair):
    """k0(x, z) + k1(x, z), also written ``kern0 + kern1``.

    Args:
        kern0: the kernel k0.
        kern1: the kernel k1.

    Raises:
        TypeError: if one of them is not a :class:`Kernel`.
        ValueError: if they expect different numbers of input columns.
    """

    @pyro_method
    def bind(self) -> Covariance:
        cov0, cov1 = self.kern0.bind(), self.kern1.bind()
        batch = joint_batch_shape(cov0, cov1)
        radial = added(cov0.radial, cov1.radial)
        return Covariance(lambda x, z: cov0(x, z) + cov1(x, z), lambda x: cov0.diag(x) + cov1.diag(x), radial, batch)


class Product(_Pair):
    """k0(x, z) k1(x, z), also written ``kern0 * kern1``; arguments and errors as for :class:`Sum`."""

    @pyro_method
    def bind(self) -> Covariance:
        cov0, cov1 = self.kern0.bind(), self.kern1.bind()
        batch = joint_batch_shape(cov0, cov1)
        radial = multiplied(cov0.radial, cov1.radial)
        return Covariance(lambda x, z: cov0(x, z) * cov1(x, z), lambda x: cov0.diag(x) * cov1.diag(x), radial, batch)


def check_kernel(where: str, arg: str, kernel: Kernel) -> None:
    """Raise ``TypeError`` unless ``kernel`` is a :class:`Kernel`."""
    if not isinstance(kernel, Kernel):
        cure = "Combine kernels with kernels; write Constant(input_dim, variance) for a number."
        fail(where, arg, "to be a Kernel", type(kernel).__name__, cure, TypeError)


def _joint_dims(where: str, kern0: Kernel, kern1: Kernel) -> tuple[int, list[int] | None]:
    """``input_dim`` and ``active_dims`` of a combination: the union of the columns that the parts act on."""
    check_kernel(where, "kern0", kern0)
    check_kernel(where, "kern1", kern1)
    listed = [d for kern in (kern0, kern1) for d in kern.active_dims or []]
    whole = [kern.input_dim for kern in (kern0, kern1) if kern.active_dims is None]
    if not whole:
        columns = sorted(set(listed))
        return len(columns), columns
    if min(whole) != max(whole) or max(listed, default=0) >= whole[0]:
        actual = f"kern0 on {kern0.active_dims or kern0.input_dim} and kern1 on {kern1.active_dims or kern1.input_dim}"
        fail(where, "kern0 and kern1", "to fit the same inputs", actual, "Set active_dims on the parts.")
    return whole[0], None
