"""Scalable Gaussian processes with nearest-neighbor structure, as Pyro models, guides and distributions.

``import pyro_nngp as nngp`` gives the methods (``nngp.VNNGP``, ``nngp.LOO``, ``nngp.Vecchia``, ...), the prior for
your own programs (``nngp.NNGP``, ``nngp.NNGPReparam``, ``nngp.NeighborGraph``), ``nngp.fit`` and ``nngp.to_arviz``,
and packages such as ``nngp.kernels`` and ``nngp.likelihoods``. Each is imported at its first use.
"""

import typing as _typing
from importlib import import_module as _import_module
from importlib.metadata import version as _version

if _typing.TYPE_CHECKING:
    from pyro_nngp import (
        data,
        distributed,
        distributions,
        inference,
        kernels,
        likelihoods,
        models,
        neighbors,
        variational,
    )
    from pyro_nngp.adapters.maps import predict_grid
    from pyro_nngp.distributions import NNGP, FullScaleNNGP, FullScaleReparam, NNGPReparam
    from pyro_nngp.inference import AutoNNGP, cross_validate, fit, to_arviz
    from pyro_nngp.models import BSGP, LMC, LOO, NPVI, SVGP, SWSGP, VNNGP, CoregionalizedLOO, MLLk, Vecchia
    from pyro_nngp.neighbors import NeighborGraph
    from pyro_nngp.storage import load

__version__ = _version("pyro-nngp")

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
    "FullScaleNNGP",
    "FullScaleReparam",
    "MLLk",
    "NNGPReparam",
    "NeighborGraph",
    "Vecchia",
    "__version__",
    "cross_validate",
    "data",
    "distributed",
    "distributions",
    "fit",
    "inference",
    "kernels",
    "likelihoods",
    "load",
    "models",
    "neighbors",
    "predict_grid",
    "to_arviz",
    "variational",
]
_HOME = {
    "AutoNNGP": "inference",
    "FullScaleNNGP": "distributions",
    "FullScaleReparam": "distributions",
    "NNGP": "distributions",
    "NNGPReparam": "distributions",
    "NeighborGraph": "neighbors",
    "cross_validate": "inference",
    "fit": "inference",
    "load": "storage",
    "predict_grid": "adapters.maps",
    "to_arviz": "inference",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in __all__:
        raise AttributeError(f"module 'pyro_nngp' has no attribute {name!r}")
    if name[0].islower() and name not in _HOME:
        return _import_module(f"pyro_nngp.{name}")
    return getattr(_import_module(f"pyro_nngp.{_HOME.get(name, 'models')}"), name)


def __dir__() -> list[str]:
    return __all__
