# SPDX-License-Identifier: Apache-2.0
"""PEFT's merges ask first: weights in few bits stay as they are.

With ``safe_merge=True`` PEFT casts a sum to the weight's dtype, so it would add to bytes in
silence. :func:`grouped_linear.integrations.wrappers.have_peft_ask` imports this where PEFT is used,
of any version, and changes nothing else of PEFT.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraModel
from peft.tuners.lora import layer as lora
from peft.tuners.mixed import MixedModel

from grouped_linear.quantized.frozen import frozen_of
from grouped_linear.quantized.weight import is_dtensor


def check_merge(where: str, layer: Any) -> None:
    """Raise ValueError for a layer whose weight an adapter cannot be added to."""
    base = layer.get_base_layer()
    if isinstance(layer, lora.ParamWrapper):
        w = layer.get_param()
    elif type(base).__name__ == "FP8Linear":
        w = base.weight
    else:
        return
    if is_dtensor(w):
        raise ValueError(
            f"{where} is sharded: save the adapter, and merge it in a model that is not"
        )
    if w.element_size() == 1:
        kept_as = "mxfp4" if w.dtype == torch.int8 else "fp8"  # as transformers loads them
        if frozen_of(base):
            kept_as = frozen_of(base)[layer.parameter_name].weights
        raise ValueError(
            f"{where} is in {kept_as.upper()} and stays as it is: keep the adapter beside it, or "
            "merge it in the model in 16 bits (a checkpoint: dequantize=True in its quantization "
            "config)"
        )


def _after_check(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of PEFT's that merges or unmerges, after a check of the frozen weights below it."""

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        op = "unmerge" if method.__name__ == "unmerge" else "merge"
        for name, layer in self.named_modules():
            if not isinstance(layer, lora.ParamWrapper) or (op == "unmerge" and not layer.merged):
                continue
            base, is_grouped = layer.get_base_layer(), type(layer) is not lora.ParamWrapper
            in_file = type(base).__name__ == "FP8Experts"
            if is_grouped or in_file or layer.parameter_name in frozen_of(base):
                check_merge(f"{op}: {name or layer.parameter_name}", layer)
        return method(self, *args, **kwargs)

    return checked


if hasattr(lora, "ParamWrapper"):  # PEFT older than 0.17 adapts no parameters
    for _class, _names in {
        LoraModel: ("_check_merge_allowed",),
        MixedModel: ("_check_merge_allowed", "merge_and_unload"),  # the latter asks nothing
        lora.ParamWrapper: ("merge", "unmerge"),
    }.items():
        for _name in _names:
            setattr(_class, _name, _after_check(getattr(_class, _name)))
