# SPDX-License-Identifier: Apache-2.0
"""The machine code of the CUDA kernels: which GPUs it is for, and what ptxas made of the GEMMs.

ptxas reports neither of the two things of csrc/cuda/gemm/sm90/codegen.cuh. Any change of a kernel
may change both, far from where it was made.
"""

import itertools
import re
import shutil

import pytest

from grouped_linear.loading import library_path
from support.commands import run

# The compiler for which csrc/cuda/gemm/sm90/codegen.cuh was measured.
MEASURED_WITH = "13.0"
# FFMA destination, partial accumulator, scale, accumulator. A bank is a register number's parity.
FFMA = re.compile(r"\bFFMA R\d+, R(\d+)(?:\.reuse)?, R(\d+)(?:\.reuse)?, R(\d+)(?:\.reuse)? ;")


def listed(*options: str) -> str:
    """What cuobjdump says of the library."""
    if shutil.which("cuobjdump") is None:
        pytest.skip("needs cuobjdump, of CUDA's toolkit")
    command = ["cuobjdump", *options, str(library_path())]
    return run(command).stdout


def test_library_has_the_architectures_of_its_build() -> None:
    """The kernels of every GPU that csrc/CMakeLists.txt lists, and PTX where no -real is said."""
    host = pytest.importorskip(
        "grouped_linear._host", reason="the optional pybind11 module was not built"
    )
    names = host.CUDA_ARCHITECTURES.split()
    if not names or not all(re.fullmatch(r"\d+a?(-real)?", name) for name in names):
        pytest.skip(f"needs a library that was built for named architectures, not {names}")
    machine = set(re.findall(r"\.(sm_\d+a?)\.cubin", listed("--list-elf")))
    ptx = set(re.findall(r"\.(sm_\d+a?)\.ptx", listed("--list-ptx")))
    assert machine == {f"sm_{name.removesuffix('-real')}" for name in names}
    assert ptx == {f"sm_{name}" for name in names if not name.endswith("-real")}


def test_library_is_small() -> None:
    """Of all architectures, because machine code is compressed: docs/notes/size.md."""
    assert library_path().stat().st_size <= 12e6


def assert_or_say(right: bool, what: str) -> None:
    """Fail with the compiler that was measured. Another one's choices cost speed and no result."""
    host = pytest.importorskip("grouped_linear._host", reason="_host says which nvcc built it")
    if not right and not host.CUDA_VERSION.startswith(MEASURED_WITH):
        pytest.skip(f"measured with nvcc {MEASURED_WITH}, this is {host.CUDA_VERSION}: {what}")
    assert right, what


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[str]]:
    """Name -> instructions of each sm_90 GEMM kernel."""
    _, *functions = re.split(r"\n\s*Function : ", listed("-arch", "sm_90a", "-sass"))
    codes = {name: code for name, *code in map(str.splitlines, functions)}
    if not codes:
        pytest.skip("needs a library that was built with CUDA for sm_90a")
    return {name: code for name, code in codes.items() if "sm9019grouped_gemm_kernel" in name}


def test_no_promotion_waits_for_a_register_bank(kernels: dict[str, list[str]]) -> None:
    block_scaled = 0
    for name, code in kernels.items():
        if "fp8" not in name:
            continue
        sources = [
            [int(number) % 2 for number in found.groups()]
            for found in map(FFMA.search, code)
            if found
        ]
        waiting = sum(len(set(banks)) == 1 for banks in sources)
        what = f"{name}: {waiting} of {len(sources)} FFMA wait; see accumulator_of"
        assert_or_say(waiting == 0, what)
        block_scaled += len(sources) > 0
    # Only block scales are promoted with FFMA: M-grouped, with gathered rows, with a second product
    # or with neither, and K-grouped.
    assert block_scaled == 4


def test_wgmma_finds_its_operands_in_uniform_registers(kernels: dict[str, list[str]]) -> None:
    """In 16 bits. Where ptxas takes the main loop for divergent, 4 are moved there a wgmma."""
    for name, code in kernels.items():
        at = [] if "fp8" in name else [i for i, line in enumerate(code) if "HGMMA" in line]
        loops = (code[i:j] for i, j in itertools.pairwise(at) if j - i < 60)
        moves = sum("R2UR" in line for loop in loops for line in loop)
        assert_or_say(moves == 0, f"{name}: {moves} R2UR between wgmma")


def test_tma_finds_its_operands_in_uniform_registers(kernels: dict[str, list[str]]) -> None:
    """9 to 17 are moved there a k-block, 25 and more where ptxas takes the loop for divergent.

    The loads of a second product, which run once a tile, lie beside those of the main loop. FP8's
    narrow tiles with one have 57 since two words count tickets, in 0.99 of the time (H200,
    2026-11-28, 5 shapes of 10 to 20 us): any second store before the loop made ptxas move them.
    """
    for name, code in kernels.items():
        first = last = 0
        for at, line in enumerate(code):
            if "UTMALDG" not in line:
                continue
            if at - last > 150:  # loads of another k-block
                first = at
            last = at
            moves = sum("R2UR" in line for line in code[first:last])
            has_low_rank = "ELb0ELb1EEEEE" in name  # the last traits, narrow and low_rank
        assert_or_say(moves <= (57 if has_low_rank else 20), f"{name}: {moves} R2UR")
