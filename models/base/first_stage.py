"""The first stage of training: a quarter of the rows, whose hyperparameters and coefficients the method takes over.

Where each step solves for latent values at all rows, steps on fewer rows get near the optimum in a fraction of the
time. Stages of stages have 2,000 rows at least: fewer labels are too weak, and lead astray.

Cost: a copy of the rows, and a search for neighbors among them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ROWS, _SHARE = 2000, 4


@contextmanager
def first_stage(self: Any) -> Iterator[Any]:
    """A context for ``fit``: a copy to train first on the first rows of the ordering, or None.

    None if there are few rows, if steps do not solve for q(u), or if q(u) has been solved for. At its end the method
    has all of the copy that does not belong to rows: hyperparameters, loadings and coefficients.
    """
    if self.num_data < 2 * _ROWS or not self._has_stages or bool(self.q.solved):
        yield None
        return
    part = self.subset(self.graph.order[: max(_ROWS, self.num_data // _SHARE)])
    yield part
    with torch.no_grad():
        for name, trained in part.named_parameters(recurse=False):
            self.get_parameter(name).copy_(trained)
    for name, trained in part.named_children():
        if name not in ("graph", *self._own_state):
            self.get_submodule(name).load_state_dict(trained.state_dict())


__all__ = ["first_stage"]
