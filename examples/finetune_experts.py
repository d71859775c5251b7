# SPDX-License-Identifier: Apache-2.0
"""Fine-tune with LoRA on attention and all experts, which are frozen in FP8 or MXFP4.

    pip install transformers peft torchao tqdm matplotlib
    python examples/finetune_experts.py                     # a small Qwen3-MoE
    python examples/finetune_experts.py --model gpt_oss_small
    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    python examples/finetune_experts.py --model gpt_oss_20b --batch 1 --lean
    python examples/finetune_experts.py --model gpt_oss_120b --compile
    python examples/finetune_experts.py --model gpt_oss_120b --compile --host
    python examples/finetune_experts.py --model qwen3_30b --weights mxfp4 --memory 24

Experts are most of a mixture-of-experts model. `convert(..., weights="fp8")` keeps
those of Qwen3 in FP8 alone, a byte an element; "mxfp4" takes 4.25 bits. Those of
GPT-OSS stay in MXFP4, as they are published. PEFT's adapters learn beside them: with
`use_grouped_adapters` each row goes through the small factors of its own expert, and no
weight of W + B A is ever made. The adapter is saved as PEFT saves it.

The embedding and the head are frozen, too, and used once a step: they stay in the
host's memory. Layers are checkpointed. `--lean` keeps checkpoints on the host, and
takes each adapter's step of 8-bit AdamW as soon as its gradient is there, which leaves
no gradients to accumulate or to clip.

Weights are random here, made layer by layer in the bytes that they have in the end.
Those of a checkpoint come from `from_pretrained(name,
quantization_config=GroupedLinearConfig("mxfp4"))`, in 16 bits or as published.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig
from transformers.quantizers import AutoHfQuantizer

from grouped_linear import Float8BlockScaling, convert
from grouped_linear.integrations.checkpoints.quantizer import GroupedLinearConfig
from grouped_linear.integrations.peft import for_packed_experts, use_grouped_adapters
from host_memory import keep_on_host, to_host

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
PART = 8192  # numbers of the vocabulary whose logits exist at a time


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


def make_model(config: Any, weights: str, device: str, host: bool) -> Any:
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
    for table in (model.model.embed_tokens, model.lm_head):  # on the host
        draw(table, device)
        table.cpu()
        if device == "cuda":
            table.weight.data = table.weight.data.pin_memory()
    model.model.embed_tokens.register_forward_hook(lambda *call: call[-1].to(device))
    recipe = Float8BlockScaling() if weights == "fp8" else None
    for layer in tqdm(model.model.layers, desc="layers"):
        draw(layer, device)
        if not is_gpt_oss:
            convert(layer, recipe, weights=weights)
        if host:
            to_host(layer)
    draw(model.model.norm, device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


class CrossEntropy(torch.autograd.Function):
    """The tokens' summed loss, of hidden [T, H] and a frozen head [V, H] on the host.

    The gradient of hidden is softmax(hidden @ head.T) @ head - head[targets]. The first
    part is an attention of tokens to the vocabulary, so it is computed as attention is:
    one pass over parts of the head, and no part's logits are kept.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        of_targets = head[targets].to(hidden.device)
        top = hidden.new_full((len(hidden), 1), -torch.inf, dtype=torch.float32)
        total, grad = torch.zeros_like(top), torch.zeros_like(hidden, dtype=top.dtype)
        for part in head.split(PART):
            part = part.to(hidden.device, non_blocking=True)
            p = (hidden @ part.mT).float()
            new_top = torch.maximum(top, p.amax(1, keepdim=True))
            p.sub_(new_top).exp_()
            shrink = (top - new_top).exp()
            total = total * shrink + p.sum(1, keepdim=True)
            grad.mul_(shrink).add_(p.to(hidden.dtype) @ part)
            top = new_top
        ctx.save_for_backward(grad.div_(total).sub_(of_targets).to(hidden.dtype))
        return (top + total.log()).sum() - (hidden * of_targets).sum(dtype=top.dtype)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * d_loss, None, None


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """The next tokens' loss, of tokens on the host."""
    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    return CrossEntropy.apply(hidden, model.lm_head.weight, targets) / len(targets)


def step_in_backward(adapters: list[nn.Parameter]) -> None:
    """Have each adapter take its step when its gradient is there, and free that."""
    from torchao.optim import AdamW8bit

    def step(p: Tensor) -> None:
        optimizers[p].step()
        p.grad = None

    options = {"lr": 1e-3, "bf16_stochastic_round": True}
    optimizers = {p: AdamW8bit([p], **options) for p in adapters}
    for p in adapters:
        p.register_post_accumulate_grad_hook(step)


def with_adapters(model: Any, lora: LoraConfig, device: str, checkpoint: bool) -> Any:
    """A PEFT model. Adapters, gradients and AdamW's moments are in BF16, as it is."""
    with torch.device(device):
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def compile_layers(model: Any) -> None:
    """Compile inside of what is checkpointed: see docs/fine_tuning.md."""
    for layer in model.model.layers:
        layer.self_attn.compile()
        layer.mlp.forward = torch.compile(layer.mlp.forward)


def train(
    forward: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None, steps: int
) -> tuple[list[float], list[float]]:
    """Losses and seconds of steps, which a backward takes without an optimizer."""
    losses, times = [], []
    for _ in tqdm(range(steps), desc="steps"):
        begin = time.perf_counter()
        loss = forward()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
    return losses, times


def saved_adapter_computes_the_same(model: Any, tokens: Tensor) -> bool:
    """Save the adapter, load it under another name, and compare losses."""
    base = model.get_base_model()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.eval().save_pretrained(folder)
        before = loss_of(base, tokens)
        model.load_adapter(folder, "saved", autocast_adapter_dtype=False)
        model.set_adapter("saved")
        return torch.equal(loss_of(base, tokens), before)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3_small")
    parser.add_argument(
        "--weights", choices=("fp8", "mxfp4"), default="fp8", help="of Qwen3"
    )
    parser.add_argument("--batch", type=int, help="sequences in a step")
    parser.add_argument("--tokens", type=int, help="of a sequence")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lean", action="store_true", help="least memory: see above")
    parser.add_argument("--compile", action="store_true", help="attention and experts")
    parser.add_argument("--memory", type=float, help="GiB that the GPU is to have")
    parser.add_argument("--host", action="store_true", help="experts in its memory")
    options = parser.parse_args()
    config, batch, length = MODELS[options.model]
    batch, length = options.batch or batch, options.tokens or length
    is_small = options.model.endswith("small")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.memory is not None:
        of_gpu = torch.cuda.get_device_properties(0).total_memory
        share = options.memory * 2**30 / of_gpu
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
    model = make_model(config, options.weights, device, options.host)
    experts = sum(
        p.nbytes for name, p in model.named_parameters() if ".experts." in name
    )
    weights = sum(p.nbytes for p in model.parameters() if p.device.type == device)
    model = with_adapters(model, for_packed_experts(LORA), device, not is_small)
    use_grouped_adapters(model)
    base = model.get_base_model()
    if options.compile:
        compile_layers(base)
    adapters = [p for p in model.parameters() if p.requires_grad]
    if options.host:
        keep_on_host([layer.mlp for layer in base.model.layers], torch.device(device))
        for p in adapters:  # PEFT made them where the bytes are
            p.data = p.data.to(device)
    optimizer, checkpoints = None, contextlib.nullcontext()
    if options.lean:
        step_in_backward(adapters)
        checkpoints = save_on_cpu(pin_memory=device == "cuda")
    else:
        optimizer = torch.optim.AdamW(adapters, lr=1e-3, fused=True)
    tokens = torch.randint(config.vocab_size, (batch, length))

    def forward() -> Tensor:
        with checkpoints:
            return loss_of(base, tokens)

    losses, times = train(forward, optimizer, options.steps)

    step = sorted(times)[len(times) // 2]
    unit, size = ("MiB", 2**20) if is_small else ("GiB", 2**30)
    memory = {
        "experts": experts,
        "frozen weights": weights,
        "adapters": sum(p.nbytes for p in adapters),
    }
    if device == "cuda":
        memory["peak"] = torch.cuda.max_memory_allocated()
        memory["peak, reserved"] = torch.cuda.max_memory_reserved()
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
        print(f"\nthe saved adapter computes the same loss: {same}")
    for name, value in rows.items():
        print(f"{name:24}{value:14,.3f}")


if __name__ == "__main__":
    main()
