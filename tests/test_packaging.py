"""What the build installs."""

import tomllib
from pathlib import Path

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
