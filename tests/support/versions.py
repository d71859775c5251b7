# SPDX-License-Identifier: Apache-2.0
"""What only some versions of torch and transformers can do."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.torch_version import TorchVersion

# FSDP2 with a mesh for each parameter: torchtitan 0.3.0 spreads experts with it.
FSDP_HAS_MESHES = TorchVersion(torch.__version__) >= (2, 12)
# fully_shard keeps requires_grad of each parameter from the start. Torch 2.12 was not tried.
FSDP_TAKES_BYTES = TorchVersion(torch.__version__) >= (2, 13)
# Dynamo reads of a frozen dataclass what is read there; before, all of its fields. 2.12: not tried.
READS_FIELDS_ALONE = TorchVersion(torch.__version__) >= (2, 13)
# Inductor of torch 2.11 fails on a watched expert layer for a GPU ("PassManager::run failed").
INDUCTOR_COMPILES_WATCHED = TorchVersion(torch.__version__) >= (2, 12)
AOTI_READS_DTYPES = TorchVersion(torch.__version__) >= (2, 12)
aoti_reads_dtypes = pytest.mark.skipif(
    not AOTI_READS_DTYPES,
    reason="AOTInductor of torch 2.11 takes the dtype that an op is given for another one",
)


@contextmanager
def skipping_for_old_transformers() -> Iterator[None]:
    """Around what imports the integration: skips where the installed library is too old for it."""
    try:
        yield
    except ImportError as error:
        if "transformers must be" not in str(error):
            raise
        pytest.skip(str(error), allow_module_level=True)
