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
def first_stage(method: Any) -> Iterator[Any]:
    """A context whose value is a copy on the first rows of the ordering; None if there are few, or q(u) is solved for.

    At its end the method has all of the copy that does not belong to rows.
    """
    if bool(method.q.solved) or method.num_data < 2 * _ROWS:
        yield None
        return
    part = method.subset(method.graph.order[: max(_ROWS, method.num_data // _SHARE)])
    yield part
    with torch.no_grad():
        for name, trained in part.named_parameters(recurse=False):
            method.get_parameter(name).copy_(trained)
    for name, trained in part.named_children():
        if name not in ("graph", *method._own_state):
            method.get_submodule(name).load_state_dict(trained.state_dict())


__all__ = ["first_stage"]
