# SPDX-License-Identifier: Apache-2.0
"""Where tests run, and what they need to run."""

import pytest
import torch

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
try:
    from grouped_linear._host import CUDA_VERSION  # None where no CUDA compiler was found
except ImportError:  # the module is optional
    CUDA_VERSION = torch.version.cuda
#: How many GPUs a test can have: of compute capability 8.0 or more, with kernels in this build.
GPUS = torch.cuda.device_count() if HAS_GPU and CUDA_VERSION is not None else 0
HERE = ["cpu", "cuda"] if GPUS else ["cpu"]
# conftest.py leaves out the cases that need more.
needs_gpu, needs_two_gpus, needs_four_gpus = (pytest.mark.gpus(count) for count in (1, 2, 4))


@pytest.fixture(params=HERE, scope="module")
def device(request: pytest.FixtureRequest) -> str:
    """A test that has this argument runs on the CPU and, where there is one, on a GPU."""
    name: str = request.param
    return name
