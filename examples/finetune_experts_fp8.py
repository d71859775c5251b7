"""Fine-tune with LoRA on attention and on all experts, which lie frozen in FP8.

    pip install transformers peft tqdm matplotlib
    python examples/finetune_experts_fp8.py                    # a small model
    python examples/finetune_experts_fp8.py --model qwen3_30b  # an 80 GB GPU

Experts are most of a mixture-of-experts model. `convert(..., weights="fp8")` keeps them
in FP8 alone, a byte an element. PEFT's adapters learn beside them: with
`use_grouped_adapters` each row goes through the small factors of its own expert, and no
weight of W + B A is ever made. The adapter is saved as PEFT saves it.

Weights are random here, made layer by layer, so that the model never exists in BF16 as
a whole. Those of a checkpoint come from `from_pretrained`; convert them as below.
"""

import argparse
import tempfile
import time

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grouped_linear import Float8BlockScaling, convert
from grouped_linear.integrations.peft import use_grouped_adapters

SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
# The model, sequences in a step, tokens of a sequence.
MODELS = {"small": (SMALL, 8, 32), "qwen3_30b": (QWEN3_30B, 4, 2048)}
LORA = LoraConfig(
    r=16,
    lora_alpha=32,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
MIB = 2**20


def draw(module: nn.Module, device: str) -> None:
    """Random weights for a module that has none yet."""
    module.to_empty(device=device)
    for p in module.parameters():
        nn.init.ones_(p) if p.dim() == 1 else nn.init.normal_(p, std=0.02)


def make_model(config: Qwen3MoeConfig, device: str) -> nn.Module:
    """The model with experts in FP8, one layer after the other."""
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.requires_grad_(False)
    for layer in tqdm(model.model.layers, desc="layers"):
        draw(layer, device)
        convert(layer, Float8BlockScaling(), weights="fp8")
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        draw(module, device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The next tokens' loss, 1024 tokens at a time: all logits take 5 GB and more."""

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = model.lm_head(hidden).float()
        return cross_entropy(logits, targets, reduction="sum")

    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    parts = zip(hidden.split(1024), targets.split(1024), strict=True)
    losses = [checkpoint(part, *both, use_reentrant=False) for both in parts]
    return torch.stack(losses).sum() / targets.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    sizes, batch, length = MODELS[options.model]
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen3MoeConfig(**sizes, use_cache=False)
    model = make_model(config, device)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    # Adapters, their gradients and AdamW's moments in BF16, as the model is.
    model = get_peft_model(model, LORA, autocast_adapter_dtype=False)
    use_grouped_adapters(model)
    if options.model != "small":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()

    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3, fused=True)
    tokens = torch.randint(config.vocab_size, (batch, length), device=device)
    losses, times = [], []
    model.train()
    for _ in tqdm(range(options.steps), desc="steps"):
        begin = time.perf_counter()
        loss = loss_of(model.get_base_model(), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)

    plt.plot(losses)
    plt.xlabel("step")
    plt.ylabel("loss")
    plt.savefig("finetune_losses.png")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model.eval()
        with torch.no_grad():
            before = model(input_ids=tokens[:1]).logits
            model.load_adapter(folder, "saved", autocast_adapter_dtype=False)
            model.set_adapter("saved")
            same = torch.equal(model(input_ids=tokens[:1]).logits, before)

    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    rate = tokens.numel() / sorted(times)[len(times) // 2]
    rows = {
        "experts in FP8, MiB": sum(p.nbytes for p in experts) / MIB,
        "adapters, MiB": sum(p.nbytes for p in adapters) / MIB,
        "peak on the GPU, MiB": peak / MIB,
        "tokens a second": rate,
        "first loss": losses[0],
        "last loss": losses[-1],
    }
    print(f"\nthe saved adapter gives the same logits: {same}")
    for name, value in rows.items():
        print(f"{name:24}{value:14,.3f}")


if __name__ == "__main__":
    main()
