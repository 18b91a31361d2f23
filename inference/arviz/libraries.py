"""Optional libraries ArviZ and xarray: imported where they are needed, with an error that names their extra."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pyro_nngp._checks import import_extra


def library(where: str, name: str) -> Any:
    """A module of the extra ``arviz``, imported late: the import is slow, and ArviZ 0.x warns of 1.x.

    Raises:
        ImportError: if it is not installed.
    """
    return import_extra(where, name, "arviz")


def is_old() -> bool:
    """Whether ArviZ has version 0.x, whose container is InferenceData."""
    try:
        return version("arviz").startswith("0.")
    except PackageNotFoundError:
        return False


def container(where: str, groups: Mapping[str, Any]) -> Any:
    """The container of the installed ArviZ for {group: Dataset}; without ArviZ xarray's DataTree, as with 1.x."""
    if is_old():
        return library(where, "arviz").InferenceData(**groups)
    return library(where, "xarray").DataTree.from_dict(groups)
