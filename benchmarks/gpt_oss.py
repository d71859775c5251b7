# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS with random weights, loaded as a checkpoint is: in MXFP4, or dequantized to BF16.

It needs transformers, and on a GPU accelerate.

E experts, K in_features, N out_features.
"""

from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]


def random_state(config: Any, device: torch.device) -> State:
    """Tensors by the names of GPT-OSS's files: experts in blocks and scales of MXFP4."""
    from transformers import GptOssForCausalLM

    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    state: State = {}

    def bytes_of(low: int, high: int, *shape: int) -> Tensor:
        t = torch.empty(shape, dtype=torch.uint8, device=device)
        return t.random_(low, high, generator=generator)

    for name, p in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            E, K, N = p.shape
            state[f"{name}_blocks"] = bytes_of(0, 256, E, N, K // 32, 16)
            state[f"{name}_scales"] = bytes_of(119, 122, E, N, K // 32)  # 2^-8 to 2^-6
        elif "norm" in name:
            state[name] = torch.ones(p.shape, dtype=torch.bfloat16, device=device)
        else:
            w = torch.empty(p.shape, dtype=torch.bfloat16, device=device)
            state[name] = w.normal_(std=0.02, generator=generator)
    return state


def load(config: Any, device: torch.device, *, packed: bool) -> Any:
    """The model, with experts in the bytes of MXFP4 or as transformers dequantizes these.

    On a GPU attention is flex_attention: GPT-OSS's has sinks, for which transformers has no other
    implementation without the package ``kernels`` that does not keep the scores of all pairs.
    """
    from transformers import GptOssForCausalLM, Mxfp4Config

    from grouped_linear.integrations.checkpoints.quantizer import GroupedLinearConfig

    state = random_state(config, device)
    config.quantization_config = {"quant_method": "mxfp4"}
    on_gpu = device.type == "cuda"
    return GptOssForCausalLM.from_pretrained(
        None,
        state_dict=state,
        config=config,
        quantization_config=GroupedLinearConfig() if packed else Mxfp4Config(dequantize=True),
        dtype=torch.bfloat16,
        attn_implementation="flex_attention" if on_gpu else "eager",
        experts_implementation="grouped_mm",
        **({"device_map": device} if on_gpu else {}),
    )
