# SPDX-License-Identifier: Apache-2.0
"""Fine-tune with LoRA on attention and all experts, which are frozen in FP8 or MXFP4.

    pip install transformers peft tqdm matplotlib
    python examples/finetune_experts.py                           # a small Qwen3-MoE
    python examples/finetune_experts.py --model gpt_oss_small
    python examples/finetune_experts.py --model gpt_oss_20b       # an H100 or H200
    python examples/finetune_experts.py --model gpt_oss_120b --compile
    python examples/finetune_experts.py --model qwen3_30b         # a GPU of 80 GB

Experts are most of a mixture-of-experts model. `convert(..., weights="fp8")` keeps
those of Qwen3 in FP8 alone, a byte an element. Those of GPT-OSS stay in MXFP4, 4.25
bits an element, as they are published. PEFT's adapters learn beside them: with
`use_grouped_adapters` each row goes through the small factors of its own expert, and no
weight of W + B A is ever made. The adapter is saved as PEFT saves it.

Weights are random here, made layer by layer in the bytes that they have in the end.
Those of a checkpoint come from `from_pretrained(name,
quantization_config=GroupedLinearConfig("mxfp4"))`, in 16 bits or as published.
"""

import argparse
import tempfile
import time
from typing import Any

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig
from transformers.quantizers import AutoHfQuantizer

from grouped_linear import Float8BlockScaling, convert
from grouped_linear.integrations.checkpoints.quantizer import GroupedLinearConfig
from grouped_linear.integrations.peft import for_packed_experts, use_grouped_adapters

SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
}
QWEN3_SMALL = Qwen3MoeConfig(**SMALL, moe_intermediate_size=64, num_experts=8)
QWEN3_30B = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=2048,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
)
GPT_OSS_SMALL = GptOssConfig(
    **SMALL, intermediate_size=64, num_local_experts=8, sliding_window=16
)
GPT_OSS_20B = GptOssConfig(num_hidden_layers=24, num_local_experts=32)
GPT_OSS_120B = GptOssConfig()  # 36 layers, 128 experts
# The model, sequences in a step, tokens of a sequence.
MODELS = {
    "qwen3_small": (QWEN3_SMALL, 8, 32),
    "qwen3_30b": (QWEN3_30B, 4, 2048),
    "gpt_oss_small": (GPT_OSS_SMALL, 8, 32),
    "gpt_oss_20b": (GPT_OSS_20B, 4, 2048),
    "gpt_oss_120b": (GPT_OSS_120B, 4, 2048),
}
LORA = LoraConfig(
    r=16,
    lora_alpha=32,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
LOGITS = 512  # tokens whose logits exist at a time


def pack_experts(model: Any) -> None:
    """Make the experts' parameters bytes without memory, as from_pretrained does."""
    config = GroupedLinearConfig("mxfp4")
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model)


def draw(module: nn.Module, device: str) -> None:
    """Random weights for a module that has none yet."""
    module.to_empty(device=device)
    for name, p in module.named_parameters():
        if p.dtype != torch.uint8:
            is_norm = p.dim() == 1 and name.endswith("weight")
            nn.init.ones_(p) if is_norm else nn.init.normal_(p, std=0.02)
        elif name.endswith("_scale_inv"):
            p.random_(119, 122)  # E8M0: 2^-8 to 2^-6
        else:
            p.random_()  # two codes of E2M1


def make_model(config: Any, device: str) -> Any:
    """The model with frozen experts, one layer after the other."""
    is_gpt_oss = isinstance(config, GptOssConfig)
    config.use_cache = False
    if is_gpt_oss and device == "cuda":  # "eager" would make scores of all pairs
        config._attn_implementation = "flex_attention"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if is_gpt_oss:
        pack_experts(model)
    model.requires_grad_(False)
    for layer in tqdm(model.model.layers, desc="layers"):
        draw(layer, device)
        if not is_gpt_oss:
            convert(layer, Float8BlockScaling(), weights="fp8")
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        draw(module, device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """The next tokens' loss, some tokens at a time: all logits take 5 GB and more."""

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = model.lm_head(hidden).float()
        return cross_entropy(logits, targets, reduction="sum")

    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    parts = zip(hidden.split(LOGITS), targets.split(LOGITS), strict=True)
    losses = [checkpoint(part, *both, use_reentrant=False) for both in parts]
    return torch.stack(losses).sum() / targets.numel()


def saved_adapter_computes_the_same(model: Any, tokens: Tensor) -> bool:
    """Save the adapter, load it under another name, and compare logits."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        before = model.eval()(input_ids=tokens[:1]).logits
        model.load_adapter(folder, "saved", autocast_adapter_dtype=False)
        model.set_adapter("saved")
        return torch.equal(model(input_ids=tokens[:1]).logits, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3_small")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="attention and experts")
    options = parser.parse_args()
    config, batch, length = MODELS[options.model]
    is_small = options.model.endswith("small")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    peak = torch.cuda.max_memory_allocated if device == "cuda" else lambda: 0
    model = make_model(config, device)
    experts = sum(
        p.nbytes for name, p in model.named_parameters() if ".experts." in name
    )
    weights = sum(p.nbytes for p in model.parameters())
    peak_of_making = peak()
    # Adapters, their gradients and AdamW's moments in BF16, as the model is.
    with torch.device(device):
        model = get_peft_model(
            model, for_packed_experts(LORA), autocast_adapter_dtype=False
        )
    use_grouped_adapters(model)
    base = model.get_base_model()
    if not is_small:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if options.compile:  # inside of what is checkpointed: see docs/fine_tuning.md
        for layer in base.model.layers:
            layer.self_attn.compile()
            layer.mlp.compile()

    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3, fused=True)
    tokens = torch.randint(config.vocab_size, (batch, length), device=device)
    losses, times = [], []
    model.train()
    for _ in tqdm(range(options.steps), desc="steps"):
        begin = time.perf_counter()
        loss = loss_of(base, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)

    step = sorted(times)[len(times) // 2]
    unit, size = ("MiB", 2**20) if is_small else ("GiB", 2**30)
    peaks = (
        {"peak of making": peak_of_making, "peak": peak()} if device == "cuda" else {}
    )
    memory = {
        "experts": experts,
        "all frozen weights": weights,
        "adapters": sum(p.nbytes for p in adapters),
    } | peaks
    rows = {f"{name}, {unit}": number / size for name, number in memory.items()} | {
        "a step, ms": 1e3 * step,
        "tokens a second": tokens.numel() / step,
        "first loss": losses[0],
        "last loss": losses[-1],
    }
    plt.plot(losses)
    plt.xlabel("step")
    plt.ylabel("loss")
    plt.savefig("finetune_losses.png")
    if is_small:
        same = saved_adapter_computes_the_same(model, tokens)
        print(f"\nthe saved adapter gives the same logits: {same}")
    for name, value in rows.items():
        print(f"{name:24}{value:14,.3f}")


if __name__ == "__main__":
    main()
