"""The names that ``import pyro_nngp`` gives, the cost of the import, and the direction of imports."""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pyro_nngp

ROOT = Path(__file__).parents[1]

# From the bottom up; a package imports only what stands before it.
LAYERS = (
    "pyro_nngp._checks",
    "pyro_nngp._kinds",
    "pyro_nngp._files",
    "pyro_nngp._matplotlib",
    "pyro_nngp._keywords",
    "pyro_nngp._locks",
    "pyro_nngp._masks",
    "pyro_nngp._memory",
    "pyro_nngp._indexing",
    "pyro_nngp._shared",
    "pyro_nngp._versions",
    "pyro_nngp._wrappers",
    "pyro_nngp._tape",
    "pyro_nngp._autograd",
    "pyro_nngp._random",
    "pyro_nngp.native",
    "pyro_nngp.linalg",
    "pyro_nngp.hyperparameters",
    "pyro_nngp.means",
    "pyro_nngp.loadings",
    "pyro_nngp.coefficients",
    "pyro_nngp.kernels",
    "pyro_nngp.native.conditional",
    "pyro_nngp.gpu",
    "pyro_nngp.neighbors",
    "pyro_nngp.distributed",
    "pyro_nngp.conditionals",
    "pyro_nngp.distributions",
    "pyro_nngp.likelihoods",
    "pyro_nngp.bound",
    "pyro_nngp.rows",
    "pyro_nngp.distributed.rows",
    "pyro_nngp.inducing",
    "pyro_nngp.variational",
    "pyro_nngp.starts",
    "pyro_nngp.plausibility",
    "pyro_nngp.data",
    "pyro_nngp.storage",
)

ON_TOP = ("pyro_nngp.__main__", "pyro_nngp.adapters")  # of models and inference


def sources():
    """(dotted name, path) of every module of the package."""
    for top in ("pyro_nngp", "models", "inference"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if top == "pyro_nngp" else ("pyro_nngp", *parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(sources())


@functools.cache
def nodes(path):
    """All nodes of the syntax tree of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imported(path):
    """Dotted names of the modules of the package that a file imports, wherever in it."""
    return list(imports(nodes(path)))


def imports(tree):
    """The names in the syntax tree of one file."""
    for node in tree:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("pyro_nngp"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyro_nngp"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def layer(module):
    """The number of the innermost entry of LAYERS that holds a module."""
    found = [number for number, name in enumerate(LAYERS) if f"{module}.".startswith(f"{name}.")]
    return max(found, key=lambda number: len(LAYERS[number]), default=None)


INSIDE = [(name, path) for name, path in MODULES.items() if name != "pyro_nngp"]


def is_below(name, other):
    """Whether the layers allow one module to import another."""
    if name.startswith(ON_TOP):
        return True
    if other.startswith(ON_TOP):
        return False
    if layer(name) is not None:
        return layer(other) in range(layer(name) + 1)
    # models and inference import components, and never each other
    return layer(other) is not None or other.startswith(".".join(name.split(".")[:2]))


def test_imports_run_downwards():
    pairs = [(name, other) for name, path in INSIDE for other in imported(path)]
    assert ("pyro_nngp.models.vnngp", "pyro_nngp.neighbors") in pairs
    assert [f"{name} imports {other}" for name, other in pairs if not is_below(name, other)] == []


def test_no_module_imports_itself_in_a_circle():
    graph = {name: {m for m in imported(path) if m != name} for name, path in INSIDE}
    for name, path in INSIDE:  # a package's front runs after its modules
        if path.name == "__init__.py":
            graph[name] = {m for m in graph[name] if m.startswith(name)}
    assert list(TopologicalSorter(graph).static_order())


def test_every_package_is_in_the_layers():
    packages = {name for name in MODULES if name.count(".") == 1} - {"pyro_nngp.models", "pyro_nngp.inference", *ON_TOP}
    assert packages == {".".join(name.split(".")[:2]) for name in LAYERS}
    rooms = {path.parent for path in (ROOT / "pyro_nngp").glob("*/__init__.py")}
    assert len(rooms) <= 16


def test_dense_factors_are_computed_and_used_in_linalg_alone():
    raw = {"cholesky", "cholesky_ex", "cholesky_solve", "cholesky_inverse", "solve_triangular", "triangular_solve"}
    names = {f"torch.{inner}{name}" for name in raw for inner in ("", "linalg.")}
    outside = [(name, path) for name, path in INSIDE if not name.startswith("pyro_nngp.linalg")]
    calls = [(name, node) for name, path in outside for node in nodes(path) if isinstance(node, ast.Attribute)]
    assert [f"{name}:{node.lineno}" for name, node in calls if ast.unparse(node) in names] == []


def test_names_at_the_front_door():
    assert set(pyro_nngp.__all__) <= set(dir(pyro_nngp))
    packages = {name: value for name in pyro_nngp.__all__ if inspect.ismodule(value := getattr(pyro_nngp, name))}
    assert all(package is importlib.import_module(f"pyro_nngp.{name}") for name, package in packages.items())
    for name in set(pyro_nngp.__all__) - set(packages) - {"__version__", "load", "predict_grid"}:
        homes = [package for package in packages.values() if name in package.__all__]
        assert len(homes) == 1, name
        assert getattr(pyro_nngp, name) is getattr(homes[0], name)
    assert pyro_nngp.load is importlib.import_module("pyro_nngp.storage").load
    assert pyro_nngp.predict_grid is importlib.import_module("pyro_nngp.adapters.maps").predict_grid
    assert set(importlib.import_module("pyro_nngp.models").__all__) <= set(pyro_nngp.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'VNGP'"):
        getattr(pyro_nngp, "VNGP")  # noqa: B009


def test_the_front_door_imports_nothing_before_it_is_asked_and_changes_nothing_of_pyro():
    script = """
import sys, pyro_nngp as n
n.__version__
assert not {"torch", "pyro", "arviz"} & set(sys.modules)
import pyro.poutine.runtime as runtime, pyro.nn.module as module, pyro
objects = {name: [vars(m)[name] for m in (runtime, module, pyro) if name in vars(m)] for name in
           (*vars(runtime), *vars(module), *vars(pyro)) if not name.startswith("__")}
n.VNNGP, n.NNGP, n.fit, n.to_arviz
assert "arviz" not in sys.modules
import pyro_nngp.models, pyro_nngp.inference
for name, values in objects.items():
    now = [vars(m)[name] for m in (runtime, module, pyro) if name in vars(m)]
    assert all(a is b for a, b in zip(values, now, strict=True)), name
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# Names of Pyro, ctypes and named tuples, which the package sets or overrides.
FOREIGN = {"_param_to_name", "_diagnostics", "_replace", "_fields_"}


def private_names(tree):
    """Names with an underscore that a module of the package defines, from the nodes of its syntax tree."""
    for node in tree:
        name = None
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        if name and name.startswith("_") and not name.startswith(("__", "_pyro_")) and name not in FOREIGN | {"_"}:
            yield name


def private_uses(tree, private):
    """(line, name) of each private name of the package that a test imports, reads, sets or patches."""
    for node in tree:
        names = []
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyro_nngp"):
            names = [alias.name for alias in node.names if f"{node.module}.{alias.name}" not in MODULES]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in MODULES:
            names = [node.value.rpartition(".")[2]]  # of monkeypatch.setattr
        yield from ((node.lineno, name) for name in names if name in private)


TESTS = sorted(Path(__file__).parent.rglob("*.py"))


def test_tests_use_no_private_names():
    private = {name for path in MODULES.values() for name in private_names(nodes(path))}
    named = [path for path in TESTS if private & set(re.findall(r"\w+", path.read_text(encoding="utf-8")))]
    assert [(path.name, *use) for path in named for use in private_uses(nodes(path), private)] == []


@pytest.mark.parametrize(
    "use",
    [
        "from pyro_nngp.models.svgp import _WAY",
        "svgp._WAY",
        "gp._finish()",
        "patch('pyro_nngp.models.svgp._WAY', 3)",
        "patch(svgp, '_WAY', 3)",
    ],
)
def test_each_way_to_use_a_private_name_is_found(use):
    private = set(private_names(ast.walk(ast.parse("_WAY = 1\nclass A:\n    def _finish(self): ..."))))
    assert private == {"_WAY", "_finish"}
    assert len(list(private_uses(ast.walk(ast.parse(use)), private))) == 1
