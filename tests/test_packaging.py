"""What the build installs."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def packaged_folders() -> set[Path]:
    """The folders of the packages that pyproject.toml lists."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return {ROOT / settings["package-dir"].get(name, name.replace(".", "/")) for name in settings["packages"]}


def test_every_folder_with_modules_is_packaged():
    found = {path.parent for top in ("pyro_nngp", "models", "inference") for path in (ROOT / top).rglob("*.py")}
    assert packaged_folders() == found


def test_every_packaged_folder_is_a_documented_package():
    for folder in packaged_folders():
        assert (folder / "__init__.py").read_text().lstrip("r").startswith('"""'), folder
