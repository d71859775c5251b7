# SPDX-License-Identifier: Apache-2.0
"""The host side of the CUDA ops where the CUDA runtime or the driver refuses: one sentence each.

It needs CUDA's headers alone: cuda_host.cpp is compiled against a CUDA runtime that it fakes.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch

from support.commands import run

TESTS = Path(__file__).parent

SENTENCES = """\
old driver | op: the NVIDIA driver supports CUDA 12.4, this library needs {cuda}: update the driver
no driver | op: there is no NVIDIA driver
no device | op: the CUDA runtime sees no device
no attribute | op: cannot query a CUDA device: the runtime's words
after a failure | ok
device 69 | ok
device 70 | op: no CUDA device 70, the CUDA runtime sees 70
device -1 | op: no CUDA device -1, the CUDA runtime sees 70
attributes of device 69 | 69
error cleared | 1
no function | op: the NVIDIA driver has no cuTensorMapEncodeTiled: update the driver
no lookup | op: cannot look up a function of the driver: the runtime's words
no context | ok
no map | op: no tensor map for these sizes and strides, driver error 1
"""


def cuda_include() -> Path:
    compiler = shutil.which("nvcc")
    if compiler is not None:
        for root in (Path(compiler).resolve().parents[1], Path("/usr/local/cuda")):
            if (root / "include" / "cuda_runtime_api.h").exists():
                return root / "include"
    pytest.skip("needs the headers of CUDA 13's toolkit")


def test_every_refusal_is_one_sentence(tmp_path: Path) -> None:
    include = cuda_include()
    headers = Path(torch.__file__).parent / "include"
    program = tmp_path / "cuda_host"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", str(TESTS / "cuda_host.cpp")]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{TESTS.parent / 'csrc'}"]
    command += [
        f"-isystem{path}" for path in (include, headers, headers / "torch/csrc/api/include")
    ]
    run([*command, "-o", str(program)], check=True)
    said = run([program], check=True).stdout
    header = (include / "cuda_runtime_api.h").read_text()
    version = int(header.split("#define CUDART_VERSION")[1].split()[0])
    assert said == SENTENCES.format(cuda=f"{version // 1000}.{version % 1000 // 10}")
