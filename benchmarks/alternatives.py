# SPDX-License-Identifier: Apache-2.0
"""What a grouped linear layer, or an expert layer, can be built from without this library.

T rows, E groups, K in_features, N out_features.
"""

import functools
import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _drawn(*shape: int) -> nn.Parameter:
    """A weight drawn as nn.Linear draws its weight, one expert at a time as in GroupedLinear."""
    weight, bound = torch.empty(*shape), 1 / math.sqrt(shape[-1])
    for weight_NK in weight.view(-1, *shape[-2:]):
        weight_NK.uniform_(-bound, bound)
    return nn.Parameter(weight)


class TorchGroupedLinear(nn.Module):
    """torch.nn.functional.grouped_mm, one launch for all groups."""

    def __init__(self, E: int, K: int, N: int) -> None:
        super().__init__()
        self.weight = _drawn(E, N, K)

    def forward(self, x_TK: Tensor, m_splits_E: Tensor) -> Tensor:
        offs_E = m_splits_E.cumsum(0, dtype=torch.int32)
        weight_ENK = self.weight
        if torch.is_autocast_enabled(x_TK.device.type):  # which leaves grouped_mm alone
            dtype = torch.get_autocast_dtype(x_TK.device.type)
            x_TK, weight_ENK = x_TK.to(dtype), weight_ENK.to(dtype)
        return F.grouped_mm(x_TK, weight_ENK.transpose(1, 2), offs=offs_E)


class LoopedLinear(nn.Module):
    """A loop of torch.nn.functional.linear over E weights. The host reads the group sizes.

    The sizes must sum to the rows there are. torch.compile breaks its graph at the sizes; told to
    keep them in the graph (capture_scalar_outputs), Inductor of torch 2.13 compiles one layer, in
    6 s for 32 weights and 38 s for 128, and fails on an expert layer's backward.
    """

    def __init__(self, E: int, K: int, N: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(_drawn(N, K) for _ in range(E))

    def forward(self, x_TK: Tensor, m_splits_E: Tensor) -> Tensor:
        rows = x_TK.split(m_splits_E.tolist())
        parts = [F.linear(x_mK, w_NK) for x_mK, w_NK in zip(rows, self.weights, strict=True)]
        return torch.cat(parts)


# SonicMoE's packages that are here, by the names of rows: pip install sonic-moe, which runs with a
# newer torch than it asks for, and what transformers 5.24 loads, torch-ext/sonic_moe of
# github.com/huggingface/kernels-community with the _ops.py of its build (add_op_namespace_prefix).
SONIC_MOE = {
    name: package
    for name, package in {"SonicMoE": "sonicmoe", "SonicMoE (hub)": "sonic_moe"}.items()
    if importlib.util.find_spec(package) is not None
}


def sonic_moe(package: str, experts: int, chosen: int, width: int, expert_width: int) -> nn.Module:
    """SonicMoE's expert layer, with its router. It is not compiled, and tunes itself at first."""
    sonicmoe: Any = importlib.import_module(package)
    swiglu = importlib.import_module(f"{package}.enums").ActivationType.SWIGLU
    with torch.device("cuda"):  # a CPU takes seconds to draw the weights
        layer: nn.Module = sonicmoe.MoE(
            experts, chosen, width, expert_width, swiglu, add_bias=False, std=0.02
        )
    return layer


def unsloth_mxfp4(device: torch.device) -> Any:
    """Unsloth's grouped GEMM of MXFP4 on a GPU, or None where unsloth_zoo is not installed.

    Its file alone: the package asks for libraries and versions that the file does not need.
    """
    found = importlib.util.find_spec("unsloth_zoo") if device.type == "cuda" else None
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).with_name("mxfp4_gemm.py")
    spec = importlib.util.spec_from_file_location("unsloth_mxfp4_gemm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.mxfp4_grouped_mm


@functools.cache
def sglang_experts() -> Any:
    """SGLang's fused experts in Triton, as vLLM's: pip install sglang.

    They read a server's settings and its group of processes: here its defaults, and no group.
    """
    context: Any = importlib.import_module("sglang.srt.runtime_context")
    context.get_context().override_server_args().install()
    context.get_parallel().override_permanently(tp_group=None)
    name = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
    return importlib.import_module(name).outplace_fused_experts
