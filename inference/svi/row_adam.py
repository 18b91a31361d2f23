r"""Adam for tables of parameters of which a minibatch uses a few rows.

For rows with gradient g, t the number of steps (other rows do not change),

.. math:: m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad s \leftarrow \beta_2 s + (1 - \beta_2) g^2, \quad
   p \leftarrow p - \eta \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m}{\sqrt s + \epsilon}.

These are the formulas of :class:`torch.optim.SparseAdam`, but rows are changed where they are, by compiled code, or
gathered and written back, instead of adding sparse tensors.

Cost: O(rows of the gradient) per step, whatever the size of the table.

Reference: Kingma, Ba (2015), "Adam: a method for stochastic optimization", ICLR.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._kinds import check_kind
from pyro_nngp.native import rows as compiled


class RowAdam(torch.optim.Optimizer):
    """Adam that moves only the rows that have a gradient, each with its moments.

    Args:
        params: tables (M, L) whose gradients are sparse in the rows, such as an embedding.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the square root of the second moment.

    Raises:
        ValueError: at a step with a dense gradient.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        if isinstance(params, Tensor) or not isinstance(params, Iterable):
            actual = type(params).__name__
            fail("RowAdam", "params", "to be an iterable of tables", actual, "Pass module.parameters().", TypeError)
        params = list(params)
        if not params:
            fail("RowAdam", "params", "to hold a table or more", "none", "Pass module.parameters().")
        for each in params:
            check_kind("RowAdam", "params", each, (Tensor, dict), "tables", "Pass module.parameters().")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move all rows that have a gradient; `closure`, if given, computes gradients and the loss that is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._move(group, [param for param in group["params"] if param.grad is not None])
        return loss

    def _move(self, group: dict[str, Any], tables: list[Tensor]) -> None:
        """Move some tables, in operations on all of them at a time."""
        if not tables:
            return
        (beta1, beta2), states = group["betas"], [self.state[param] for param in tables]
        for param, state in zip(tables, states, strict=True):
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
            state["step"] += 1
        sparse = [coalesced(cast(Tensor, param.grad)) for param in tables]
        rows, grads = [grad.indices()[0] for grad in sparse], [grad.values() for grad in sparse]
        rates = [group["lr"] * (1 - beta2 ** s["step"]) ** 0.5 / (1 - beta1 ** s["step"]) for s in states]
        wholes = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states], tables
        if all(map(compiled.adam_supported, tables)):
            for first, second, table, index, grad, rate in zip(*wholes, rows, grads, rates, strict=True):
                compiled.adam_step(table.detach(), first, second, index, grad, rate, (beta1, beta2), group["eps"])
            return

        def used(wholes: list[Tensor]) -> list[Tensor]:
            return [whole.index_select(0, index) for whole, index in zip(wholes, rows, strict=True)]

        first, second, moved = map(used, wholes)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        below = torch._foreach_sqrt(second)
        torch._foreach_add_(below, group["eps"])
        torch._foreach_addcdiv_(moved, first, below, scalars=[-rate for rate in rates])
        for whole, parts in zip(wholes, (first, second, moved), strict=True):
            for table, index, part in zip(whole, rows, parts, strict=True):
                table.index_copy_(0, index, part)


def coalesced(grad: Tensor) -> Tensor:
    """A gradient that is sparse in the rows, with each row once; unchanged if its rows are ascending."""
    if not grad.is_sparse:
        fail(
            "RowAdam.step",
            "gradients",
            "to be sparse in the rows",
            "a dense one",
            "Use torch.optim.Adam for such tables.",
        )
    if grad.is_coalesced():
        return grad
    indices = grad._indices()
    if (indices[0, 1:] <= indices[0, :-1]).any():
        return grad.coalesce()
    return torch.sparse_coo_tensor(indices, grad._values(), grad.shape, is_coalesced=True, check_invariants=False)
