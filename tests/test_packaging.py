"""Files that the build installs."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[1]


def packaged_folders() -> set[Path]:
    """The folders of the packages that pyproject.toml lists."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = set()
    for name in settings["packages"]:
        moved = [parent for parent in settings["package-dir"] if f"{name}.".startswith(f"{parent}.")]
        path = name.replace(moved[0], settings["package-dir"][moved[0]], 1) if moved else name
        folders.add(ROOT / path.replace(".", "/"))
    return folders


def test_every_folder_with_modules_is_packaged():
    found = {path.parent for top in ("pyro_nngp", "models", "inference") for path in (ROOT / top).rglob("*.py")}
    assert packaged_folders() == found


def test_every_packaged_folder_is_a_documented_package():
    for folder in packaged_folders():
        assert (folder / "__init__.py").read_text().lstrip("r").startswith('"""'), folder


@pytest.mark.parametrize("built", [True, False])
def test_a_wheel_without_compiled_code_is_for_every_platform(built, monkeypatch, tmp_path):
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    commands = runpy.run_path(str(ROOT / "setup.py"))
    extension = setuptools.Extension("pyro_nngp.native.libnative", ["a.cpp"])
    distribution = setuptools.Distribution({"name": "p", "version": "1", "ext_modules": [extension]})
    distribution.cmdclass = {"build_ext": commands["BuildLibrary"], "bdist_wheel": commands["BuildWheel"]}
    build = distribution.get_command_obj("build_ext")
    build.build_lib = str(tmp_path)
    build.ensure_finalized()
    wheel = distribution.get_command_obj("bdist_wheel")
    wheel.py_limited_api = "cp311"
    wheel.ensure_finalized()
    if built:
        library = Path(build.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True)
        library.touch()
    assert (wheel.get_tag() == ("py3", "none", "any")) is not built


def test_the_tests_that_the_page_on_reliability_names_exist():
    text = (ROOT / "docs" / "reliability.md").read_text()
    file = None
    named = set()
    for line in text.splitlines():
        default = re.search(r"all in `(tests/[\w/]+\.py)`", line)
        file = default[1] if default else file
        for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::)?(test_\w+)?`", line):
            file = path or file
            if path or name:
                named.add((file, name))
    assert len(named) > 20
    for path, name in sorted(named):
        source = (ROOT / path).read_text()
        assert not name or f"def {name}(" in source, f"{path}::{name}"
