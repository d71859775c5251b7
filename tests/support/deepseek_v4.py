# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek-V4 checkpoint as it is published: experts in E2M1, two a byte, and E8M0."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from grouped_linear.meta_kernels.rules import BLOCK, ceil_div

IDS = torch.arange(24).reshape(2, 12)
# Of deepseek-ai/DeepSeek-V4-Flash's config.json.
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
# Its linear layers are in FP8, which a kernel of the package kernels multiplies.
LINEAR = ["model.layers.*.self_attn", "model.layers.*.mlp.shared_experts"]
LINEAR_IN_FILE = re.compile(r"\.(attn\.w\w+|ffn\.shared_experts\.w\d)\.weight$")


def write_checkpoint(folder: Path, linear_in_fp8: bool = False) -> Path:
    """Random codes and scales, K = 64 and 96."""
    config = DeepseekV4Config(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_hash_layers=1,
        num_attention_heads=2,
        head_dim=32,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=128 if linear_in_fp8 else 32,  # a block of scales each
        index_n_heads=2,
        index_head_dim=32,
        partial_rotary_factor=0.5,
        hc_mult=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=1.0,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        expert_dtype="fp4",
    )
    torch.manual_seed(0)
    DeepseekV4ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    # Some parameters are in float32 in a model that was loaded, and in the published files.
    DeepseekV4ForCausalLM.from_pretrained(folder).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name in [n for n in state if ".ffn.experts." in n]:
        N, K = state[name].shape
        state[name] = torch.empty(N, K // 2).random_(256).to(torch.uint8).view(torch.int8)
        scales = torch.empty(N, K // 32).random_(119, 124).to(torch.uint8)
        state[name.replace(".weight", ".scale")] = scales.view(torch.float8_e8m0fnu)
    for name in [n for n in state if linear_in_fp8 and LINEAR_IN_FILE.search(n)]:
        blocks = [ceil_div(size, BLOCK) for size in state[name].shape]
        state[name] = state[name].mul(32).to(torch.float8_e4m3fn)
        scales = torch.empty(blocks).random_(120, 124).to(torch.uint8)
        state[name.replace(".weight", ".scale")] = scales.view(torch.float8_e8m0fnu)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    kept = ["lm_head"] if linear_in_fp8 else [*LINEAR, "lm_head"]
    described["quantization_config"] = {**QUANTIZATION, "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(described))
    return folder
