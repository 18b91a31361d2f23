r"""Adam for tables of which a minibatch uses a few rows.

For rows with gradient g, t the number of steps (other rows do not change),

.. math:: m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad s \leftarrow \beta_2 s + (1 - \beta_2) g^2, \quad
   p \leftarrow p - \eta \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m}{\sqrt s + \epsilon}.

These are the formulas of :class:`torch.optim.SparseAdam`, but rows are gathered and written back, instead of
adding sparse tensors: 0.3 instead of 2.2 ms for 16,000 rows of one value, on one thread.

Cost: O(rows of the gradient) per step, whatever the size of the table.

Reference: Kingma, Ba (2015), "Adam: a method for stochastic optimization", ICLR.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_nngp._checks import fail


class RowAdam(torch.optim.Optimizer):
    """Adam that moves only the rows that have a gradient, each with its moments.

    Args:
        params: tables (M, L) whose gradients are sparse in the rows, as those of an embedding are.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the square root of the second moment.

    Raises:
        ValueError: at a step with a dense gradient.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move all rows that have a gradient; `closure`, if given, computes gradients and the loss that is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
                state["step"] += 1
                grad = coalesced(param.grad)
                rows, grad = grad.indices()[0], grad.values()
                first = state["exp_avg"].index_select(0, rows).lerp_(grad, 1 - beta1)
                second = state["exp_avg_sq"].index_select(0, rows).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                state["exp_avg"].index_copy_(0, rows, first)
                state["exp_avg_sq"].index_copy_(0, rows, second)
                rate = group["lr"] * (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
                moved = param.index_select(0, rows).addcdiv_(first, second.sqrt_().add_(eps), value=-rate)
                param.index_copy_(0, rows, moved)
        return loss


def coalesced(grad: Tensor) -> Tensor:
    """A gradient that is sparse in the rows, each row once; returned unchanged if its rows are ascending."""
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
