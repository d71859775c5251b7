"""Builds the C++ parts with CMake; everything else about the package is in pyproject.toml."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
LIBRARY = "grouped_linear._C"  # loaded by torch, not by Python: no Python ABI in its name
HOST = "grouped_linear._host"


def torch_path() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("grouped_linear: install torch first, then pip install --no-build-isolation")
    return str(Path(spec.origin).parent)


def environment() -> dict[str, str]:
    """The environment of this process with the packages' cmake and ninja first on its PATH.

    A Python that runs by its path, as in .venv/bin/python -m pip, has not put them there.
    """
    import cmake
    import ninja

    path = os.pathsep.join([cmake.CMAKE_BIN_DIR, ninja.BIN_DIR, os.environ["PATH"]])
    return {**os.environ, "PATH": path}


class CMakeBuild(build_ext):
    """Runs csrc/CMakeLists.txt once and copies what it made to where setuptools expects it."""

    def get_ext_filename(self, fullname: str) -> str:
        if LIBRARY.endswith(fullname):  # setuptools asks with and without the package's name
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def run(self) -> None:
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = ["cmake", "-G", "Ninja", "-S", str(ROOT / "csrc"), "-B", str(build)]
        configure += [f"-DTORCH_PATH={torch_path()}", f"-DPython_EXECUTABLE={sys.executable}"]
        subprocess.check_call(configure, env=environment())
        subprocess.check_call(["cmake", "--build", str(build)], env=environment())
        self.built = build
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        made = self.built / target.name
        if made.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(made), str(target))


setup(
    ext_modules=[
        Extension(LIBRARY, sources=[]),
        Extension(HOST, sources=[], optional=True),
    ],
    cmdclass={"build_ext": CMakeBuild},
)
