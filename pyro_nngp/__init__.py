"""Scalable Gaussian processes with nearest-neighbor structure, as Pyro models, guides and distributions.

``import pyro_nngp as nngp`` gives the methods (``nngp.VNNGP``, ``nngp.LOO``, ``nngp.Vecchia``, ...), the prior for
your own programs (``nngp.NNGP``, ``nngp.NNGPReparam``, ``nngp.NeighborGraph``), ``nngp.fit`` and ``nngp.to_arviz``,
and the packages ``nngp.kernels``, ``nngp.likelihoods`` and all others. Each is imported at its first use.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyro_nngp import (
        data,
        distributed,
        distributions,
        inference,
        kernels,
        likelihoods,
        maps,
        models,
        neighbors,
        plots,
        variational,
    )
    from pyro_nngp.distributions import NNGP, NNGPReparam
    from pyro_nngp.inference import AutoNNGP, fit, to_arviz
    from pyro_nngp.maps import predict_grid
    from pyro_nngp.models import BSGP, LMC, LOO, NPVI, SVGP, SWSGP, VNNGP, CoregionalizedLOO, MLLk, Vecchia
    from pyro_nngp.neighbors import NeighborGraph
    from pyro_nngp.storage import load

__version__ = version("pyro-nngp")

_PACKAGES = (
    "data",
    "distributed",
    "distributions",
    "inference",
    "kernels",
    "likelihoods",
    "maps",
    "models",
    "neighbors",
    "plots",
    "variational",
)
_HOME = {
    "pyro_nngp.distributions": ("NNGP", "NNGPReparam"),
    "pyro_nngp.inference": ("AutoNNGP", "fit", "to_arviz"),
    "pyro_nngp.maps": ("predict_grid",),
    "pyro_nngp.models": (
        "BSGP",
        "LMC",
        "LOO",
        "NPVI",
        "SVGP",
        "SWSGP",
        "VNNGP",
        "CoregionalizedLOO",
        "MLLk",
        "Vecchia",
    ),
    "pyro_nngp.neighbors": ("NeighborGraph",),
    "pyro_nngp.storage": ("load",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BSGP",
    "LMC",
    "LOO",
    "NNGP",
    "NPVI",
    "SVGP",
    "SWSGP",
    "VNNGP",
    "AutoNNGP",
    "CoregionalizedLOO",
    "MLLk",
    "NNGPReparam",
    "NeighborGraph",
    "Vecchia",
    "__version__",
    "data",
    "distributed",
    "distributions",
    "fit",
    "inference",
    "kernels",
    "likelihoods",
    "load",
    "maps",
    "models",
    "neighbors",
    "plots",
    "predict_grid",
    "to_arviz",
    "variational",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"pyro_nngp.{name}")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'pyro_nngp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
