"""What the compiler made of the products' kernels: DESIGN.md, "Banks" and "Instructions".

ptxas says nothing of either, and any change of a kernel may change both, far away from where it
was made.
"""

import re
import shutil
import subprocess

import pytest

from grouped_linear.loading import library

# FFMA sum, product, scale, sum: a register's bank is whether its number is odd.
FFMA = re.compile(r"\bFFMA R\d+, R(\d+)(?:\.reuse)?, R(\d+)(?:\.reuse)?, R(\d+)(?:\.reuse)? ;")


@pytest.fixture(scope="module")
def products() -> dict[str, list[str]]:
    """Name -> instructions of each kernel of the grouped products."""
    if shutil.which("cuobjdump") is None:
        pytest.skip("needs cuobjdump, of CUDA's toolkit")
    command = ["cuobjdump", "-sass", str(library())]
    listing = subprocess.run(command, capture_output=True, text=True).stdout
    _, *functions = re.split(r"\n\s*Function : ", listing)
    kernels = {name: code for name, *code in map(str.splitlines, functions)}
    if not kernels:
        pytest.skip("needs a library that was built with CUDA")
    return {name: code for name, code in kernels.items() if "grouped_gemm_kernel" in name}


def test_no_sum_waits_for_a_register_bank(products: dict[str, list[str]]) -> None:
    scaled = 0
    for name, code in products.items():
        sources = [
            [int(number) % 2 for number in found.groups()]
            for found in map(FFMA.search, code)
            if found
        ]
        waiting = sum(len(set(banks)) == 1 for banks in sources)
        assert waiting == 0, f"{name}: {waiting} of {len(sources)} FFMA; see GemmConfig::sum_of"
        scaled += len(sources) > 0
    assert scaled == 2  # by rows and by depth, the kernels whose steps are scaled by blocks


def test_copies_find_their_operands_in_uniform_registers(products: dict[str, list[str]]) -> None:
    """9 to 17 are moved there a step, 25 and more where ptxas believes that threads part."""
    for name, code in products.items():
        first = last = 0
        for at, line in enumerate(code):
            if "UTMALDG" not in line:
                continue
            if at - last > 150:  # copies of another step
                first = at
            last = at
            moves = sum("R2UR" in line for line in code[first:last])
            assert moves <= 20, f"{name}: {moves} R2UR"
