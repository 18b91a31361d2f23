"""Pyro's tracking of which sites and parameters a value comes from, through functions with gradients of their own.

``pyro.infer.inspect`` and ``render_model`` wrap tensors to follow them through torch operations; an
``autograd.Function`` returns them unwrapped. Cost: O(arguments).
"""

from typing import Any

import torch
from pyro.ops.provenance import ProvenanceTensor, detach_provenance, get_provenance, track_provenance


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` whose results come from whatever its arguments come from."""
    if not any(isinstance(arg, ProvenanceTensor) for arg in args):
        return function.apply(*args)
    return track_provenance(function.apply(*detach_provenance(args)), get_provenance(args))
