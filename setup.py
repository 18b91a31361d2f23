"""The compiled part of the package, left out where it cannot be built; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LEFT_OUT = """
pyro_nngp: the compiled part could not be built and is left out:
    {error}
Results are the same, but nearest-neighbor conditionals take about twice as long and neighbor searches several times.
Install a C++17 compiler (GCC or Clang) and install the package again.
"""


NATIVE = ("conditional", "search", "ordering", "triangular", "blocks", "fronts", "rows", "polya_gamma")


class BuildLibrary(build_ext):
    """Builds a plain library, which ctypes loads: under a name that Python does not take for a module's."""

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split("."))) + ".so.14"  # FILE of pyro_nngp/native/__init__.py

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            print(LEFT_OUT.format(error=error), file=sys.stderr)
            raise  # an optional extension: setuptools goes on without it


class BuildWheel(bdist_wheel):
    """Tags the wheel for one platform if it holds the library, else for all."""

    def get_tag(self) -> tuple[str, str, str]:
        build = self.get_finalized_command("build_ext")
        built = any(Path(build.get_ext_fullpath(ext.name)).exists() for ext in build.extensions)
        if built:
            return super().get_tag()
        self.root_is_pure = True
        return "py3", "none", "any"


setup(
    ext_modules=[
        Extension(
            "pyro_nngp.native.libnative",
            sources=[f"pyro_nngp/native/{name}.cpp" for name in NATIVE],
            depends=["pyro_nngp/native/vectors.h"],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": BuildWheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # it is compiled, but not against one Python
)
