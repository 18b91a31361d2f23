r"""Log densities by rows as functions of linear predictors, read from the operations of a program.

A factor, a sum over discrete sites, or a distribution that its parameters do not determine, such as a mixture, has no
parameters phi to read off. But its log density is the result of tensor operations on the leaves
(:mod:`pyro_nngp._tape`). Some intermediate results are affine in the leaves, with a value for each row or one for all:
the last of these before the log density are phi, and the operations after them are the log density as a function of
phi. A log density that is a number is a sum over rows if its last operation is a sum.

Cost: a run of the program to record, four runs of the operations that depend on the leaves to find phi and to check
it, and one for each node of quadrature.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._tape import Step, aten, recorded
from pyro_nngp.inference.autoguide.quadratics import Observations, OpaqueSiteError

_LINE = -50.0, -3.0, 0.0, 3.0, 50.0  # places at which results that are affine in the leaves lie on a line
_READS = {aten._local_scalar_dense.default, aten.equal.default}
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_UNARY = {aten.neg.default, aten.expand.default, aten.alias.default, aten.clone.default, aten._to_copy.default}
_UNARY |= {getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")}  # of one tensor that varies


class RecordedSite(Observations):
    """The density of a site as a function of linear predictors, see the module.

    Args:
        name: name of the site.
        steps: the operations of a run.
        density: their result, a value for each row or a sum over rows.
        inputs: the leaves of the run, which the operations begin with.
        leaves: equal leaves, with gradients.

    Raises:
        OpaqueSiteError: if the density is no function of linear predictors by rows.
    """

    widest = 0.5

    def __init__(
        self,
        name: str,
        steps: list[Step],
        density: Tensor,
        inputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
    ) -> None:
        self.name = name
        self._producer = {id(tensor): step for step in steps for tensor in step.outputs()}
        if any(step.written() for step in steps):
            self._refuse("operations that change tensors in place")
        if any(step.function in _READS and not self._is_validation(step) for step in steps):
            self._refuse("a branch on values")
        self._inputs, self._factor, self._offset = {id(tensor) for tensor in inputs}, 1.0, 0.0
        self._rows = self._summands(density)
        steps = _between(steps, self._inputs, [self._rows])
        runs = [_run(steps, inputs, [_irregular(i, leaf, at) for i, leaf in enumerate(inputs)]) for at in _LINE]
        self._affine = {key for key in runs[0] if _is_affine([run[key] for run in runs])}
        self._cut = self._predictors(steps, inputs)
        self._steps = _between(steps, {id(tensor) for tensor in self._cut}, [self._rows])
        with torch.enable_grad():
            before = _between(steps, self._inputs, self._cut)
            self.phi = self._stacked(_run(before, inputs, leaves))
        self._check(*runs[1:3])

    def log_prob(self, phi: Float[Tensor, "*S n k"]) -> Float[Tensor, "*S n"]:
        """Log densities of the rows."""
        flat = phi.reshape(-1, *phi.shape[-2:])
        return torch.func.vmap(self._density)(flat).reshape(phi.shape[:-1])

    def _density(self, phi: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        values = {}
        for tensor, column in zip(self._cut, phi.T, strict=True):
            values[id(tensor)] = column.reshape(tensor.shape if tensor.numel() == len(column) else self._rows.shape)
        for step in self._steps:
            step.run(values)
        return self._density_of(values)

    def _density_of(self, values: Mapping[int, Tensor]) -> Float[Tensor, " n"]:
        return self._factor * values[id(self._rows)].reshape(-1) + self._offset / self._rows.numel()

    def _summands(self, density: Tensor) -> Tensor:
        """What a number is the sum of, up to a factor and an offset."""
        step = self._producer.get(id(density))
        while density.numel() == 1 and step is not None:
            varying = self._varying(step)
            if step.function in _SUMS and varying[0].numel() > 1:
                return varying[0]
            if step.function not in _UNARY | {aten.view.default, aten.sum.dim_IntList} or len(varying) != 1:
                break
            ends = [{id(varying[0]): torch.full_like(varying[0], at)} for at in (0.0, 1.0)]
            for values in ends:
                step.run(values)
            zero, one = (float(values[id(density)]) for values in ends)
            self._offset += self._factor * zero
            self._factor *= one - zero
            density, step = varying[0], self._producer.get(id(varying[0]))
        return density

    def _is_validation(self, read: Step) -> bool:
        """Whether what is read is whether all values are in a support."""
        step = self._producer.get(id(read.args[0]))
        return step is not None and step.function in (aten.all.default, aten._is_all_true.default)

    def _varying(self, step: Step) -> list[Tensor]:
        """Inputs of an operation that depend on the leaves."""
        return [each for each in step.inputs() if id(each) in self._producer or id(each) in self._inputs]

    def _is_predictor(self, tensor: Tensor) -> bool:
        """Whether a result is affine in the leaves and has a value for each row, or one for all."""
        own, shape = tensor.shape, self._rows.shape
        if [size for size in own if size > 1] == [size for size in shape if size > 1]:
            own = shape
        while len(own) > len(shape) and own[0] == 1:
            own = own[1:]
        pairs = zip(own[::-1], shape[::-1], strict=False)
        return id(tensor) in self._affine and len(own) <= len(shape) and all(a in (1, b) for a, b in pairs)

    def _predictors(self, steps: list[Step], inputs: Sequence[Tensor]) -> list[Tensor]:
        """A predictor that determines the density, or the last ones before it, each as early as it is of one tensor."""
        for tensor in [*(each for step in reversed(steps) for each in step.outputs()), *inputs]:
            if self._is_predictor(tensor) and not self._reads_inputs(_between(steps, {id(tensor)}, [self._rows])):
                return [self._origin(tensor)]
        found, seen, waiting = dict[int, Tensor](), set[int](), [self._rows]
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if self._is_predictor(tensor):
                origin = self._origin(tensor)
                found[id(origin)] = origin
            elif id(tensor) in self._inputs:
                self._refuse("rows that depend on several values of a site, other than linearly")
            else:
                waiting += self._varying(self._producer[id(tensor)])
        return list(found.values())

    def _reads_inputs(self, steps: list[Step]) -> bool:
        return any(id(each) in self._inputs for step in steps for each in step.inputs())

    def _origin(self, tensor: Tensor) -> Tensor:
        while id(tensor) in self._producer:
            step = self._producer[id(tensor)]
            varying = self._varying(step)
            if step.function not in _UNARY or len(varying) != 1 or not self._is_predictor(varying[0]):
                break
            tensor = varying[0]
        return tensor

    def _stacked(self, values: Mapping[int, Tensor]) -> Float[Tensor, "n k"]:
        """Values of the predictors for each row."""
        size = self._rows.numel()
        columns = []
        for tensor in self._cut:
            value = values[id(tensor)]
            value = value if value.numel() == size else value.expand(self._rows.shape)
            columns.append(value.reshape(size))
        return torch.stack(columns, -1)

    def _check(self, here: Mapping[int, Tensor], there: Mapping[int, Tensor]) -> None:
        """Raise unless each row depends on its own predictors, as in another run, with gradients."""
        size = self._rows.numel()
        other = torch.arange(size, device=self._rows.device) % 2 == 0
        phi = torch.where(other[:, None], self._stacked(there), self._stacked(here)).detach()
        want = torch.where(other, self._density_of(there), self._density_of(here))
        with torch.enable_grad():
            try:
                found, own = self.log_prob(phi).detach(), self.phi.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(self.log_prob(own).sum(), own)
            except (RuntimeError, ValueError) as cause:
                self._refuse("operations that cannot be repeated at other values", cause)
        if not torch.allclose(found, want, rtol=1e-4, atol=1e-4, equal_nan=True):
            self._refuse("rows that depend on other rows")
        if not gradient.isfinite().all():
            self._refuse("a gradient that is not finite, as of a rate of 0, to which a small number should be added")

    def _refuse(self, actual: str, cause: Exception | None = None) -> NoReturn:
        expectation = "to be a function of linear predictors, row by row, with gradients"
        cure = "Give pyro.factor a value for each row, or draw from the posterior with QuickNUTS(model)."
        fail("AutoNNGP", f"the log density of {self.name!r}", expectation, actual, cure, OpaqueSiteError, cause)


def recorded_sites(
    densities: Callable[..., tuple[Tensor, ...]], leaves: Sequence[Tensor], names: Sequence[str]
) -> list[RecordedSite]:
    """Sites whose densities are read from the operations of a run.

    Args:
        densities: maps leaves to the log density of each site.
        leaves: leaves to run at, with gradients.
        names: names of the sites.

    Raises:
        OpaqueSiteError: if a run does not determine the operations, or for a density that is no function of linear
            predictors by rows.
    """
    inputs = tuple(leaf.detach().clone() for leaf in leaves)
    with torch.no_grad():
        try:
            steps, results = recorded("AutoNNGP", densities, inputs)
        except ValueError as cause:
            raise OpaqueSiteError(*cause.args) from cause
        pairs = zip(names, results, strict=True)
        return [RecordedSite(name, steps, density, inputs, leaves) for name, density in pairs]


def _irregular(number: int, leaf: Tensor, at: float) -> Tensor:
    """Values of a leaf on a line; nothing vanishes by chance at 0, and each value has both signs at other places."""
    count = torch.arange(leaf.numel(), dtype=leaf.dtype, device=leaf.device)
    return (torch.sin(2.0 + number + 3 * count) + at * (1.5 + torch.sin(1.0 + number + count))).reshape(leaf.shape)


def _is_affine(values: Sequence[Tensor]) -> bool:
    """Whether values at the points of a line lie on one."""
    far, near, middle, *others = values
    if not (middle.is_floating_point() and middle.numel()):
        return False
    size = torch.finfo(middle.dtype).eps ** 0.5
    pairs = zip((near, far), others, strict=True)
    return all(bool((a - 2 * middle + b).abs().max() <= size * (a - b).abs().max()) for a, b in pairs)


def _between(steps: Sequence[Step], known: set[int], wanted: Sequence[Tensor]) -> list[Step]:
    """The operations that lead from known to wanted tensors."""
    needed, kept = {id(tensor) for tensor in wanted} - known, []
    for step in reversed(steps):
        if any(id(tensor) in needed for tensor in step.outputs()):
            needed |= {id(tensor) for tensor in step.inputs()} - known
            kept.append(step)
    return kept[::-1]


def _run(steps: Sequence[Step], inputs: Sequence[Tensor], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """All results at other values of the inputs, by the ids of the results of the recording."""
    found = dict(zip(map(id, inputs), values, strict=True))
    for step in steps:
        step.run(found)
    return found
