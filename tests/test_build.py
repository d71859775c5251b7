# SPDX-License-Identifier: Apache-2.0
"""What builds say of the compilers that they find: pip shows errors, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.commands import run

SYSTEM = "/usr/bin:/bin"  # without nvcc, if it has none
CSRC = Path(__file__).parents[1] / "csrc"
OR_OFF = "or newer, or set GROUPED_LINEAR_CUDA_ARCHS=OFF to build for the CPU alone"


def configure(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """CMake of this project, without a compiler for CUDA on its path unless one is named."""
    pytest.importorskip("cmake", reason="needs the package cmake")
    if shutil.which("make", path=SYSTEM) is None:
        pytest.skip("needs make")
    kept = {name: os.environ[name] for name in ("HOME", "CXX") if name in os.environ}
    command = [sys.executable, "-m", "cmake", "-G", "Unix Makefiles"]
    command += ["-S", str(CSRC), "-B", str(folder / "build")]
    command += [f"-DTORCH_PATH={Path(torch.__file__).parent}"]
    return run(command, env={**kept, "PATH": SYSTEM, **environment})


def words(text: str) -> str:
    """The text without CMake's line breaks."""
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("variable", "says", "sentence"),
    [
        ("PATH", "release 12.9, V12.9.86", "is of CUDA 12.9"),
        ("CUDACXX", "release 12.9, V12.9.86", "is of CUDA 12.9"),
        ("CUDA_PATH", "broken", "does not say which CUDA it is of"),
    ],
)
def test_a_compiler_that_is_no_use_ends_the_build(
    tmp_path: Path, variable: str, says: str, sentence: str
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, {says}'\n")
    nvcc.chmod(0o755)
    named = {"PATH": f"{nvcc.parent}:{SYSTEM}", "CUDACXX": str(nvcc)}
    made = configure(tmp_path, **{variable: named.get(variable, str(tmp_path))})
    assert made.returncode != 0
    assert f"grouped_linear: {nvcc} {sentence}: install CUDA 13.0 {OR_OFF}" in words(made.stderr)
    if variable == "PATH":
        off = configure(tmp_path, PATH=named["PATH"], GROUPED_LINEAR_CUDA_ARCHS="OFF")
        assert off.returncode == 0, off.stderr
        assert "CPU only: GROUPED_LINEAR_CUDA_ARCHS is OFF" in off.stdout


@pytest.mark.skipif(shutil.which("nvcc", path=SYSTEM) is not None, reason="has nvcc")
def test_no_compiler_makes_a_build_for_the_cpu(tmp_path: Path) -> None:
    made = configure(tmp_path)
    assert made.returncode == 0, made.stderr
    assert "grouped_linear: CPU only: no CUDA compiler found" in made.stdout


def test_sanitizers_run_tests_that_are_there() -> None:
    script = Path(__file__).parents[1] / ".ci" / "sanitize"
    lists = re.findall(r"tests/test_\{(\S+)\}\.py", script.read_text())
    names = ",".join(lists).split(",")
    assert len(names) > 10
    assert [n for n in names if not (Path(__file__).parent / f"test_{n}.py").exists()] == []


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_a_sanitizer_that_is_missing_is_named(sanitizer: str) -> None:
    """And nothing is skipped."""
    script = Path(__file__).parents[1] / ".ci" / "sanitize"
    environment = {"PATH": SYSTEM, "CXX": "no-compiler"}
    made = run([script, sanitizer], env=environment)
    assert made.returncode == 1
    says = rf"sanitize: {sanitizer} needs no-compiler with \S+\.so: apt install .*g\S+.*\n"
    assert re.fullmatch(says, made.stderr)
