"""One file per method: a Pyro model, and its guide where it has one."""

from pyro_nngp.models.bsgp import BSGP
from pyro_nngp.models.coregionalized import CoregionalizedLOO
from pyro_nngp.models.lmc import LMC
from pyro_nngp.models.loo import LOO
from pyro_nngp.models.mllk import MLLk
from pyro_nngp.models.npvi import NPVI
from pyro_nngp.models.svgp import SVGP
from pyro_nngp.models.swsgp import SWSGP
from pyro_nngp.models.vecchia import Vecchia
from pyro_nngp.models.vnngp import VNNGP

__all__ = ["BSGP", "LMC", "LOO", "NPVI", "SVGP", "SWSGP", "VNNGP", "CoregionalizedLOO", "MLLk", "Vecchia"]
