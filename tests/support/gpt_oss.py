# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT-OSS checkpoint as it is published: experts in blocks and scales of MXFP4."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Mxfp4Config

from grouped_linear.integrations.checkpoints.quantizer import GroupedLinearConfig
from support.hugging_face import tiny

IDS = torch.arange(24).reshape(2, 12)
# Of openai/gpt-oss-20b's config.json.
QUANTIZATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def write_checkpoint(folder: Path, intermediate_size: int = 96) -> Path:
    """Random blocks and scales, K = 64 and 96."""
    torch.manual_seed(0)
    model = tiny(
        "gpt_oss",
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        head_dim=32,
        num_local_experts=4,
        layer_types=None,
    ).to(torch.bfloat16)
    state = model.state_dict()
    for name in list(state):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            E, K, N = state.pop(name).shape
            blocks, scales = torch.empty(E, N, K // 32, 16), torch.empty(E, N, K // 32)
            state[f"{name}_blocks"] = blocks.random_(256).to(torch.uint8)
            state[f"{name}_scales"] = scales.random_(119, 124).to(torch.uint8)
        elif name.endswith("proj_bias"):
            nn.init.normal_(state[name])
    described = {**model.config.to_dict(), "quantization_config": QUANTIZATION, "dtype": "bfloat16"}
    described["architectures"] = ["GptOssForCausalLM"]
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def packed(folder: Path, **options: Any) -> Any:
    """The model as this package loads it."""
    asked = {
        name: options.pop(name) for name in ("weights", "recipe", "recipes") if name in options
    }
    config = GroupedLinearConfig(**asked)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


def dequantized(folder: Path, **options: Any) -> Any:
    """The model as transformers loads it."""
    config = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)
