# SPDX-License-Identifier: Apache-2.0
"""GroupedLinear by its options, the plain one or that of grouped_linear.te, and its copies."""

import inspect
import io
import pickle
from typing import Any

import torch
from torch import nn

from grouped_linear import GroupedLinear, te

PLAIN = frozenset(inspect.signature(GroupedLinear).parameters)


def linear_of(
    num_experts: int, in_features: int, out_features: int, bias: bool = True, **options: Any
) -> GroupedLinear:
    """The plain layer if it has all options, else te's, with one weight and bias unless said."""
    sizes = num_experts, in_features, out_features
    if options.keys() <= PLAIN:
        return GroupedLinear(*sizes, bias, **options)
    if "dtype" in options:
        options["params_dtype"] = options.pop("dtype")
    single = {"single_grouped_weight": True, "single_grouped_bias": True}
    return te.GroupedLinear(*sizes, bias=bias, **(single | options))


def call_of(layer: Any, compiled: bool) -> Any:
    """The layer itself, or compiled in one graph."""
    return torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer


def with_numbers_in_adapters(layer: Any, std: float = 1.0) -> Any:
    """The layer, whose adapters add something: B is zero at first."""
    for name, p in layer.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(p, std=std)
    return layer


def through_pickle(layer: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(layer))


def through_torch_save(layer: nn.Module, zipped: bool = True) -> nn.Module:
    """A file of torch, or one in its older format, which reads numbers after all else."""
    file = io.BytesIO()
    torch.save(layer, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    return torch.load(file, weights_only=False)
