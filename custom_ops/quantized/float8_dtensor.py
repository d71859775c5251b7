# SPDX-License-Identifier: Apache-2.0
"""A DTensor of float8 that is sent as bytes.

Importing DTensor takes 0.5 s, so who needs it imports this.

State dicts have it, see :mod:`grouped_linear.quantized.state_dict`.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grouped_linear.quantized.weight import distributed_like


class Float8DTensor(DTensor):
    """Numbers that collectives send as bytes: on CPUs they know no float8, on GPUs no e8m0.

    Pickles are those of a plain DTensor.
    """

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """As of a DTensor."""
        sent = _viewed(self, torch.uint8).redistribute(device_mesh, placements, **options)
        return _viewed(sent, self.dtype)

    def full_tensor(self, **options: Any) -> Tensor:
        """As of a DTensor."""
        return _viewed(self, torch.uint8).full_tensor(**options).view(self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Float8DTensor":
        local = copy.deepcopy(self.to_local(), memo)
        twin = sent_as_bytes(distributed_like(self, local, self.shape))
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return distributed_like(self, self.to_local(), self.shape).__reduce_ex__(protocol)


def sent_as_bytes(t: DTensor) -> Float8DTensor:
    """A DTensor of float8 as one whose collectives send bytes; it has the same memory."""
    return Float8DTensor(t.to_local(), t._spec, requires_grad=False)


def _viewed(t: DTensor, dtype: torch.dtype) -> DTensor:
    """A DTensor of the same bytes."""
    return distributed_like(t, t.to_local().view(dtype), t.shape)
