"""The compiled part of the package, left out where it cannot be built; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """Builds a plain library, which ctypes loads: under a name that Python does not take for a module's."""

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split("."))) + ".so.3"  # _FILE of pyro_nngp/native/__init__.py


setup(
    ext_modules=[
        Extension(
            "pyro_nngp.native.libnative",
            sources=["pyro_nngp/native/conditional.cpp", "pyro_nngp/native/search.cpp"],
            depends=["pyro_nngp/native/vectors.h"],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # it is compiled, but not against one Python
)
