"""Import every module of the installed package and fit a small model; run from outside the checkout."""

import importlib
import importlib.resources
import importlib.util
import pkgutil
import sysconfig
from pathlib import Path

import torch

import pyro_nngp
from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import VNNGP

site = Path(sysconfig.get_path("purelib"))
modules = [module.name for module in pkgutil.walk_packages(pyro_nngp.__path__, "pyro_nngp.")]
# extras that are not installed on a machine without a GPU
NEEDS = {"pyro_nngp.gpu.factorization": "triton", "pyro_nngp.gpu.kernels": "triton"}
for name in modules:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        continue
    path = Path(str(importlib.import_module(name).__file__))
    assert site in path.parents, f"{name} comes from {path}, not from {site}"
assert {"pyro_nngp.models.vnngp", "pyro_nngp.inference.svi.loop"} <= set(modules), modules
assert importlib.resources.files(pyro_nngp).joinpath("py.typed").is_file(), "py.typed is not installed"
for generic in ("models", "inference", "tests"):
    assert importlib.util.find_spec(generic) is None, f"the wheel installs a top-level package {generic}"

x = torch.linspace(0, 1, 200)[:, None]
y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(200, generator=torch.Generator().manual_seed(0))
gp = VNNGP(x, y, kernel=Matern52(input_dim=1), likelihood=Gaussian(0.1), num_neighbors=8)
fit(gp, num_steps=300, batch_size=100, lr=0.05, seed=0)
loc, _ = gp(x)
error = (loc - torch.sin(6 * x[:, 0])).square().mean().sqrt().item()
assert error < 0.1, f"the fitted model is off by {error:.3f}"
print(f"wheel: {len(modules)} modules imported from {site}, fitted model within {error:.3f} of the truth")
