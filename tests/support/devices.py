# SPDX-License-Identifier: Apache-2.0
"""The ops, the devices that they run on, and what a test needs to run."""

from typing import Any

import pytest
import torch

from support.ops import PAGES

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
try:
    from grouped_linear._host import CUDA_VERSION  # None where no CUDA compiler was found
except ImportError:  # the module is optional
    CUDA_VERSION = torch.version.cuda
CUDA_OPS = {op for op, page in PAGES.items() if page.cuda and CUDA_VERSION is not None}
#: How many GPUs a test can have: of compute capability 8.0 or more, with kernels in this build.
GPUS = torch.cuda.device_count() if HAS_GPU and CUDA_OPS else 0
# conftest.py leaves out the cases that need more.
needs_gpu, needs_two_gpus, needs_four_gpus = (pytest.mark.gpus(count) for count in (1, 2, 4))


def devices(*ops: str) -> list[Any]:
    """The devices that all of these ops run on, for parametrize."""
    cpu, cuda = pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=needs_gpu)
    return [cpu, cuda] if CUDA_OPS.issuperset(ops) else [cpu]


#: A test of layers: for each device that all ops run on.
DEVICES = pytest.mark.parametrize("device", devices(*PAGES))
