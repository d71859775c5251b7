# SPDX-License-Identifier: Apache-2.0
"""What is in the packages, and that every place names the same supported versions.

``make check-wheel`` builds and installs them.
"""

import importlib.util
import re
import shutil
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from support.commands import run

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def test_sdist_has_every_source(tmp_path: Path) -> None:
    """Whatever git tracks of the package, C++ included: it builds without the repository."""
    pytest.importorskip("scikit_build_core", reason="the extra 'build' is not installed")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)
    (sdist,) = tmp_path.glob("grouped_linear-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    folders = ["csrc", "custom_ops", "meta_kernels", "python"]
    command = ["git", "ls-files", "-z", *folders, "LICENSE", "pyproject.toml"]
    answer = run(command, cwd=ROOT)
    if answer.returncode != 0:
        pytest.skip("this folder is no git repository")
    for name in filter(None, answer.stdout.split("\0")):
        assert (unpacked / name).is_symlink() == (ROOT / name).is_symlink(), name
        if not (ROOT / name).is_symlink():
            assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes(), name
    assert not list(unpacked.rglob("*.so"))
    # The links give both folders the names that they are imported by.
    assert (unpacked / "python/grouped_linear/__init__.py").exists()
    assert (unpacked / "python/grouped_linear/meta_kernels/__init__.py").exists()


def program(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("repository", [None, "https://example.org/grouped_linear"])
def test_readme_of_a_package_needs_no_file_beside_it(repository: str | None) -> None:
    """Every link and picture of a package index's page is absolute, or there is none."""
    page = program("wheels").for_an_index(text_of("README.md"), repository)
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert bool(targets) == (repository is not None)
    assert all(target.startswith(f"{repository}/") for target in targets)
    examples = re.compile("```python.*?```", re.DOTALL)
    assert examples.findall(page) == examples.findall(text_of("README.md"))


def test_supported_pythons() -> None:
    oldest, past_newest = re.findall(r"3\.(\d+)", PROJECT["project"]["requires-python"])
    newest = int(past_newest) - 1
    assert f"(3, {oldest}) <= sys.version_info[:2] <= (3, {newest})" in text_of("bootstrap.sh")
    assert f"Python 3.{oldest} to 3.{newest}" in text_of("README.md")
    named = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert [int(minor) for minor in named] == list(range(int(oldest), newest + 1))


def test_supported_torch() -> None:
    (requirement,) = PROJECT["project"]["dependencies"]
    oldest, past_newest = re.findall(r"2\.(\d+)", requirement)
    newest = int(past_newest) - 1
    assert requirement in PROJECT["build-system"]["requires"]
    assert f"(2, {oldest}) <= tuple(" in text_of("bootstrap.sh")
    assert f"<= (2, {newest}):" in text_of("bootstrap.sh")
    assert f"MINIMUM_TORCH = (2, {oldest})" in text_of("custom_ops/loading.py")
    assert f"torch 2.{oldest} to 2.{newest}" in text_of("README.md")
    # The stable ABI that _C.so is compiled for, as 0xMMmmpp...
    assert f"TORCH_TARGET_VERSION=0x02{int(oldest):02x}" in text_of("csrc/CMakeLists.txt")


def test_supported_transformers() -> None:
    """The oldest that is supported, and the newest that was tried, which the README's table has."""
    extras = PROJECT["project"]["optional-dependencies"]
    (requirement,) = extras["transformers"]
    assert requirement in extras["test"]
    oldest = requirement.removeprefix("transformers>=")
    tried = re.search(
        rf"\| transformers \| {oldest} and newer \| (5\.\d+) \|", text_of("README.md")
    )
    assert tried is not None
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "custom_ops").rglob("*.py")]
    for page in pages:
        if "notes" not in page.parts:  # which say what they were measured with
            for version in re.findall(r"transformers (5\.\d+)\b(?! or newer)", page.read_text()):
                assert version == tried[1], page


def test_extra_build_is_what_a_build_requires() -> None:
    required = set(PROJECT["build-system"]["requires"])
    extra = PROJECT["project"]["optional-dependencies"]["build"]
    # Without isolation scikit-build-core adds nothing.
    own = {wanted for wanted in extra if not wanted.startswith(("cmake", "ninja"))}
    assert required == own | set(PROJECT["project"]["dependencies"])


def test_changelog_has_the_version() -> None:
    newest = re.search(r"^## \[(.*?)\]", text_of("CHANGELOG.md"), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == PROJECT["project"]["version"]


@pytest.mark.parametrize(
    ("asked", "gpus", "built"),
    [
        ("", "9.0\n9.0", "native"),
        ("", "12.0\n8.6", "native"),
        ("", "9.0\n7.5", "OFF"),  # kernels are for 8.0 and up
        ("", "", "OFF"),
        ("", None, "OFF"),
        ("90a-real", None, "90a-real"),
        ("OFF", "9.0", "OFF"),
    ],
)
def test_set_up_builds_for_the_machine_at_hand(
    asked: str, gpus: str | None, built: str, tmp_path: Path
) -> None:
    """A laptop with nvcc and no GPU does not compile kernels for ten minutes."""
    if gpus is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{gpus}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    for program in ("awk", "sort", "head", "sh"):
        found = shutil.which(program)
        assert found is not None
        (tmp_path / program).symlink_to(found)
    script = text_of("bootstrap.sh")
    function = script[script.index("choose_architectures() {") :].split("\n}\n")[0] + "\n}"
    lines = f"set -euo pipefail\n{function}\nchoose_architectures\necho $GROUPED_LINEAR_CUDA_ARCHS"
    environment = {"PATH": str(tmp_path), "GROUPED_LINEAR_CUDA_ARCHS": asked}
    bash = shutil.which("bash")
    assert bash is not None
    done = run([bash, "-c", lines], env=environment, check=True)
    assert done.stdout.strip() == built
