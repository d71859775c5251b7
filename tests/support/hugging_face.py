# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of Hugging Face, one of each form that its experts interface knows."""

import re
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn

from support.tensors import FP32

VOCABULARY = 64
IDS = torch.arange(14).reshape(2, 7)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT_ATTENTION = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
ROUTED = {"n_routed_experts": 5, "n_group": 1, "topk_group": 1}
# Of model and config, and what the config has besides SIZES.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 5}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"num_experts": 5}),
    # Shared experts beside the routed ones.
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**ROUTED, **LATENT_ATTENTION, "first_k_dense_replace": 0, "n_shared_experts": 1},
    ),
    # Biases, transposed weights, gate and up interleaved, a gate of its own with clamps.
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_local_experts": 5, "layer_types": ["full_attention"]},
    ),
    # Transposed weights.
    "aria": ("AriaTextForCausalLM", "AriaTextConfig", {"moe_num_experts": 5}),
    # No gate; squared ReLU.
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {**ROUTED, "layers_block_type": ["attention", "moe"]},
    ),
    # A norm after each expert; experts of another width than the model.
    "muse_spark": (
        "MuseSparkTextModel",
        "MuseSparkTextConfig",
        {"num_local_experts": 5, "moe_hidden_size": 16, "layer_types": ["full_attention"]},
    ),
}


def tiny(family: str, **options: Any) -> Any:
    """A model as the library initializes it; options of its config replace those above."""
    model, config, own = FAMILIES[family]
    return getattr(transformers, model)(getattr(transformers, config)(**SIZES | own | options))


def model_of(family: str, device: str, dtype: torch.dtype = FP32) -> nn.Module:
    made = tiny(family)
    for parameter in made.parameters():  # the library's 0.02 leaves experts without influence
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return made.to(device, dtype)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of IDS."""
    return model(IDS).logits


def frozen_names(model: nn.Module) -> set[str]:
    """The names of weights in few bits, not those of their scales."""
    names = {n for n, p in model.named_parameters() if p.dtype == torch.uint8}
    return {n for n in names if not n.endswith("_scale_inv")}


def tokens(device: str, *shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, device=device)


class AnyConfig:
    """Small numbers for whatever an experts class asks of its model's configuration."""

    SIZES: ClassVar = [
        (r"latent", None),
        (r"tok|top_?k", 2),
        (r"expert", 5),
        (r"act", "silu"),
        (r"eps", 1e-6),
        (r"limit|alpha|softcap|multiplier|scal", 1.5),
        (r"intermediate|ffn", 64),
        (r"size|dim", 32),
    ]

    def __getattr__(self, name: str) -> Any:
        for pattern, value in self.SIZES:
            if re.search(pattern, name) and not name.startswith("_"):
                return value
        raise AttributeError(name)
