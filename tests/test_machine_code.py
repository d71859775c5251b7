"""What ptxas made of the GEMM kernels: csrc/cuda/gemm/sm90/codegen.cuh.

ptxas reports neither of the two. Any change of a kernel may change both, far from where it was
made.
"""

import re
import shutil
import subprocess

import pytest

from grouped_linear.loading import library

# FFMA destination, partial accumulator, scale, accumulator. A bank is a register number's parity.
FFMA = re.compile(r"\bFFMA R\d+, R(\d+)(?:\.reuse)?, R(\d+)(?:\.reuse)?, R(\d+)(?:\.reuse)? ;")


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[str]]:
    """Name -> instructions of each sm_90 GEMM kernel."""
    if shutil.which("cuobjdump") is None:
        pytest.skip("needs cuobjdump, of CUDA's toolkit")
    command = ["cuobjdump", "-sass", str(library())]
    listing = subprocess.run(command, capture_output=True, text=True).stdout
    _, *functions = re.split(r"\n\s*Function : ", listing)
    listed = {name: code for name, *code in map(str.splitlines, functions)}
    if not listed:
        pytest.skip("needs a library that was built with CUDA")
    return {name: code for name, code in listed.items() if "grouped_gemm_kernel" in name}


def test_no_promotion_waits_for_a_register_bank(kernels: dict[str, list[str]]) -> None:
    block_scaled = 0
    for name, code in kernels.items():
        sources = [
            [int(number) % 2 for number in found.groups()]
            for found in map(FFMA.search, code)
            if found
        ]
        waiting = sum(len(set(banks)) == 1 for banks in sources)
        assert waiting == 0, f"{name}: {waiting} of {len(sources)} FFMA; see accumulator_of"
        block_scaled += len(sources) > 0
    assert block_scaled == 2  # M-grouped and K-grouped: only block scales are promoted with FFMA


def test_tma_finds_its_operands_in_uniform_registers(kernels: dict[str, list[str]]) -> None:
    """9 to 17 are moved there a k-block, 25 and more where ptxas takes the loop for divergent."""
    for name, code in kernels.items():
        first = last = 0
        for at, line in enumerate(code):
            if "UTMALDG" not in line:
                continue
            if at - last > 150:  # loads of another k-block
                first = at
            last = at
            moves = sum("R2UR" in line for line in code[first:last])
            assert moves <= 20, f"{name}: {moves} R2UR"
