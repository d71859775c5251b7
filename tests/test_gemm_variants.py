# SPDX-License-Identifier: Apache-2.0
"""The sm_90 GEMM with other stages and tile widths: right results, or the sentence of an assert."""

import shutil
from pathlib import Path

import pytest
import torch

from support.commands import run

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "tests" / "gemm_variants"

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def said_to_refused(folder: Path, *options: str) -> str:
    """What nvcc says to refused.cu."""
    compiled = run(
        ["nvcc", "-ptx", "-arch=sm_90a", "-std=c++20", f"-I{ROOT / 'csrc'}", *options,
         "-o", folder / "refused.ptx", SOURCES / "refused.cu"]
    )  # fmt: skip
    assert compiled.returncode != 0
    return " ".join((compiled.stdout + compiled.stderr).split())


@pytest.fixture(scope="module")
def refusal(tmp_path_factory: pytest.TempPathFactory) -> str:
    return said_to_refused(tmp_path_factory.mktemp("refused"))


@needs_nvcc
@pytest.mark.parametrize(
    "sentence",
    [
        "stages and epilogue buffers must fit into 227 KiB: take fewer stages or a narrower tile",
        "a pipeline has 2 to kMaxStages stages",
        "an FP8 pipeline has at most kMaxFp8Stages stages",
        "an FP8 tile has at most 192 columns",
        "a tile has 64, 128, 192 or 256 columns",
        "half a tile must be a multiple of that",
        "block scales of b are 1 x 128 in a K-grouped GEMM and 128 x 128 in an M-grouped one",
    ],
)
def test_a_configuration_that_cannot_run_is_refused(refusal: str, sentence: str) -> None:
    assert sentence in refusal


@needs_nvcc
def test_a_forgotten_trait_is_refused(tmp_path: Path) -> None:
    assert "no instance of constructor" in said_to_refused(tmp_path, "-DWITHOUT_STAGES")


@needs_nvcc
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.skipif(not has_hopper(), reason="needs a Hopper GPU (cuda)")
@pytest.mark.parametrize(
    ("fp8", "stages", "tile_n"),
    [
        (True, 3, 192),
        (True, 3, 128),
        (True, 4, 192),  # the library's own
        (False, 2, 256),
        (False, 4, 128),
        (False, 3, 256),  # the library's own
    ],
    ids=lambda value: str(value),
)
def test_another_configuration_computes_the_same(
    tmp_path: Path, fp8: bool, stages: int, tile_n: int
) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [
        "cmake", "-S", SOURCES, "-B", tmp_path, f"-DSTAGES={stages}", f"-DTILE_N={tile_n}",
        f"-DFP8={'ON' if fp8 else 'OFF'}", *generator,
    ]  # fmt: skip
    for command in configure, ["cmake", "--build", tmp_path]:
        made = run(command)
        assert made.returncode == 0, made.stdout + made.stderr
    program = tmp_path / "variant"
    ran = run([program])
    assert ran.returncode == 0, ran.stdout + ran.stderr
