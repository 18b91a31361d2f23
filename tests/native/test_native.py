"""Loading the compiled library: what fits, what does not, and what is said then."""

import ctypes

import pytest
from oracles.compiled import needs_library

from pyro_nngp import native
from pyro_nngp.native.structures import Arguments, Queries, Triangle


def test_no_library_or_one_for_another_system_counts_as_none_and_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    with pytest.warns(UserWarning, match=r"no compiled code \(.* does not exist\).*install one, then run `pip install"):
        assert native.library.__wrapped__() is None
    (tmp_path / native.FILE).write_bytes(b"not a library")
    with pytest.warns(UserWarning, match=r"no compiled code \("):
        assert native.library.__wrapped__() is None


def test_a_missing_library_is_reported_once(monkeypatch, tmp_path, recwarn):
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    native.library.cache_clear()
    try:
        assert not native.enabled()
        assert not native.enabled()
        monkeypatch.setenv("PYRO_NNGP_NATIVE", "0")
        assert not native.enabled()
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
    assert len([w for w in recwarn if "no compiled code" in str(w.message)]) == 1


@needs_library
def test_a_library_that_lacks_a_function_counts_as_none(monkeypatch):
    monkeypatch.setitem(native.FUNCTIONS, "nn_of_tomorrow", ())
    with pytest.warns(UserWarning, match=r"no compiled code \(.*nn_of_tomorrow"):
        assert native.library.__wrapped__() is None


@needs_library
@pytest.mark.parametrize("structure", [Arguments, Queries, Triangle])
def test_a_library_with_a_structure_of_another_size_counts_as_none(monkeypatch, structure):
    class Longer(ctypes.Structure):
        _fields_ = [*structure._fields_, ("more", ctypes.c_double)]

    sizes = {name: Longer if kind is structure else kind for name, kind in native.SIZES.items()}
    monkeypatch.setattr(native, "SIZES", sizes)
    size = ctypes.sizeof(structure)
    with pytest.warns(UserWarning, match=rf"expected Longer of {size + 8} bytes, got {size}\. Build the package again"):
        assert native.library.__wrapped__() is None
