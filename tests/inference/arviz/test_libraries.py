"""ArviZ and xarray are optional."""

import importlib
import importlib.metadata
import subprocess
import sys

import pytest
import torch
import xarray as xr

from pyro_nngp.inference import elpd, sbc_to_arviz
from pyro_nngp.inference.arviz.libraries import library


@pytest.fixture
def without(monkeypatch):
    """Hide packages, as if they were not installed."""

    def hide(*packages):
        def missing(name, *args, **kwargs):
            if name.partition(".")[0] in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return found(name, *args, **kwargs)

        def no_version(name):
            if name in packages:
                raise importlib.metadata.PackageNotFoundError(name)
            return version(name)

        found, version = importlib.import_module, importlib.metadata.version
        monkeypatch.setattr("pyro_nngp._checks.import_module", missing)
        monkeypatch.setattr("pyro_nngp.inference.arviz.libraries.version", no_version)

    return hide


def test_without_arviz_exports_are_trees_of_xarray(without):
    without("arviz")
    made = sbc_to_arviz({"a": torch.rand(3)})
    assert isinstance(made, xr.DataTree)
    assert made["prior_sbc"]["a"].shape == (1, 3)


def test_what_is_missing_is_named_with_the_command_that_installs_it(without):
    without("arviz", "arviz_stats", "xarray")
    with pytest.raises(
        ImportError, match=r"sbc_to_arviz: expected xarray to be installed, got no such package\. Run pip"
    ):
        sbc_to_arviz({"a": torch.rand(3)})
    with pytest.raises(ImportError, match=r"elpd: expected xarray .*pip install 'pyro-nngp\[arviz\]'"):
        elpd(torch.rand(3))
    without("arviz", "arviz_stats")
    with pytest.raises(ImportError, match=r"elpd: expected arviz_stats to be installed"):
        elpd(torch.rand(3))


def test_other_missing_modules_are_not_taken_for_arviz(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'numba'", name="numba")

    monkeypatch.setattr("pyro_nngp._checks.import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="numba"):
        library("to_arviz", "arviz")


@pytest.mark.slow
def test_the_package_imports_neither(tmp_path):
    code = "import sys, pyro_nngp.inference, pyro_nngp.models; print({'arviz', 'xarray', 'h5py'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
