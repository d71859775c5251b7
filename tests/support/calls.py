# SPDX-License-Identifier: Apache-2.0
"""A mode that counts the calls of the ops."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Options that decide what an op computes, named beside it.
DECIDE = ("rowwise", "columnwise", "columnwise_x", "columnwise_w", "bias_grad")
# Operands without which block_scaled_linear_grad computes less.
OPERANDS = ("x_t", "w_t")


class Calls(TorchDispatchMode):
    """Counts the library's ops, with the options that decide their work."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "grouped_linear":
            named = {a.name: a.default_value for a in func._schema.arguments}
            named |= dict(zip(named, args, strict=False)) | (kwargs or {})
            name = func._schema.name.removeprefix("grouped_linear::")
            flags = [f for f in DECIDE if named.get(f)]
            if name == "block_scaled_linear_grad":
                flags = [f for f in OPERANDS if named[f] is not None] + flags
            self.counts[" ".join([name, *flags])] += 1
        return func(*args, **(kwargs or {}))
