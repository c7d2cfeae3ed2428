"""Builds the C++ kernels ahead of time where torch is importable; elsewhere they are compiled on first use.

The metadata is in pyproject.toml. ``pip install --no-build-isolation -e .`` lets the build see the installed torch. The
sources travel inside the package (``embcache/_csrc``), so an installed copy can compile them too.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension

ROOT = Path(__file__).resolve().parent


def load_build():
    """``embcache/kernels/build.py`` on its own: importing the package would need torch."""
    spec = importlib.util.spec_from_file_location("embcache_build", ROOT / "embcache" / "kernels" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


class BuildKernels(build_ext):
    """One plain shared library, named by the hash of its sources, beside ``embcache/kernels/native.py``."""

    def run(self):
        for old in (ROOT / "embcache" / "kernels").glob(f"{build.LIBRARY_STEM}-*.so"):
            if self.inplace or self.editable_mode:
                old.unlink()
        super().run()

    def get_ext_filename(self, fullname):
        name = build.library_name(build.source_hash(build.source_folder()))
        return str(Path(*fullname.split(".")[:-1], name))

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build.compile_library(target)

    def get_export_symbols(self, ext):
        return []


class AnyPythonWheel(bdist_wheel):
    """The library knows nothing of Python's ABI: one wheel for every Python 3 on a platform."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if self.distribution.has_ext_modules() else (python, abi, platform)


def extensions():
    if importlib.util.find_spec("torch") is None:
        sys.stderr.write("embcache: torch is not importable here, the C++ kernels are compiled on first use\n")
        return []
    if build.find_compiler() is None:
        sys.stderr.write("embcache: no C++ compiler, the C++ kernels are compiled on first use where there is one\n")
        return []
    return [Extension("embcache.kernels._embcache_native", sources=[])]


setup(
    packages=[*find_packages(include=["embcache*", "dlrm*", "seqmodels*"]), "embcache._csrc"],
    package_dir={"embcache._csrc": "csrc"},
    package_data={"embcache._csrc": ["*.cpp", "*.h"]},
    distclass=Distribution,
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
    zip_safe=False,
)
