# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with PEFT's adapters on their experts; only tests of PEFT import this."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations import finegrained_fp8

from grouped_linear import Recipe, convert
from grouped_linear.integrations.peft import ParamWrapper, use_grouped_adapters
from support.hugging_face import tiny

IDS = torch.arange(24).reshape(2, 12)
GATE_UP, DOWN = EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {"intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("mixtral", {"num_local_experts": 4}),
    "Mixtral, one layer after the other": (
        "mixtral",
        {"num_local_experts": 4, "hidden_act": "quick_gelu"},
    ),
    "Qwen3-MoE": ("qwen3_moe", {}),
    # transposed weights, biases, interleaved gate and up
    "GPT-OSS": ("gpt_oss", {"num_local_experts": 4, "layer_types": None}),
}


def model_of(name: str = "Mixtral", **sizes: int) -> Any:
    """A model whose experts say more than transformers' initialization has them say."""
    torch.manual_seed(0)
    family, options = MODELS[name]
    model = tiny(family, **SIZES | options | sizes)
    for parameter_name, p in model.named_parameters():
        if ".experts." in parameter_name:
            nn.init.normal_(p, std=0.1)
    return model


def config_of(parameters: list[str] = EXPERTS, **options: Any) -> Any:
    options = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]} | options
    return peft.LoraConfig(target_parameters=parameters, **options)


def randomize(model: nn.Module) -> None:
    """Give adapters numbers: B is zero at first."""
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(p, std=0.3)


def of_peft(model: Any, config: Any = None) -> Any:
    """A model with PEFT's adapters, which say something."""
    model = peft.get_peft_model(model, config or config_of())
    randomize(model)
    return model


def grouped(
    model: Any, config: Any, recipe: Recipe | None = None, weights: Any = None, order: str = "last"
) -> Any:
    """A model with our experts, and adapters that say something."""
    if order == "convert first":
        convert(model, recipe, weights=weights)
        model = peft.get_peft_model(model, config)
        use_grouped_adapters(model)
    else:
        model = peft.get_peft_model(model, config)
        convert(model, recipe, weights=weights)
    assert any(type(module) is ParamWrapper for module in model.modules())
    randomize(model)
    return model


def results(model: Any, **options: Any) -> dict[str, Tensor]:
    """The logits, and all gradients of adapters; options are torch.compile's."""
    model.zero_grad()
    call = torch.compile(model, **options) if options else model
    output = call(input_ids=IDS, labels=IDS, use_cache=False)
    output.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads
    return {"logits": output.logits.detach(), **grads}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, t in expected.items():
        error = (actual[name] - t).norm() / t.norm()
        assert error < tolerance, (name, error)


def checkpointed_results(model: Any, reentrant: bool) -> dict[str, Tensor]:
    """Results in training with gradient checkpointing, which are those without it."""
    expected = results(model.train())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = results(model)
    assert_close(found, expected, 1e-6)
    return found


def of_a_layer(model: Any) -> Tensor:
    """What the first layer's experts compute: an error of theirs changes no later router's mind."""
    torch.manual_seed(2)
    layer = model.get_base_model().model.layers[0]
    x, scores = torch.randn(40, 32), torch.rand(40, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(40)])
    with torch.no_grad():
        y: Tensor = layer.mlp.experts(x, chosen, scores)
    return y


def weights_of(model: Any) -> dict[str, Tensor]:
    """The experts' weights of a model with adapters, in their numbers."""
    found = {}
    for name, p in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, _, own = name.rpartition(".")
            frozen = p.dtype == torch.uint8
            w = model.get_submodule(experts).dequantize(own) if frozen else p.detach()
            found[name] = w.clone()
    return found


class NewWeights(TorchDispatchMode):
    """Counts tensors as large as the experts' weights that operations make, in 16 bits or more."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.shapes = [sorted(w.shape) for w in weights.values()]  # transposed ones too
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        is_view = any(r.alias_info is not None for r in func._schema.returns)
        for t in [] if is_view else tree_leaves(out):
            is_wide = isinstance(t, Tensor) and t.element_size() > 1
            self.count += is_wide and sorted(t.shape) in self.shapes
        return out


@contextmanager
def fp8_checkpoints_on_cpu() -> Iterator[None]:
    """As on a GPU: transformers then keeps what it loads in FP8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        yield


def from_fp8_checkpoint(folder: Path, **options: Any) -> Any:
    """A model of :func:`make_fp8_checkpoint`'s, or of one that it was saved to."""
    with fp8_checkpoints_on_cpu():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, device_map="cpu", **options
        )


def deepseek() -> Any:
    """With a dense layer first, a shared expert, and features that are no multiples of 128."""
    return tiny(
        "deepseek_v3",
        **SIZES | {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3},
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_group=2,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )


def qwen3_of_blocks() -> Any:
    return tiny("qwen3_moe", **SIZES, hidden_size=128, head_dim=64, num_experts=4)


def make_fp8_checkpoint(folder: Path, model: Callable[[], Any] = qwen3_of_blocks) -> Path:
    """As DeepSeek's and Qwen's: all in FP8 but norms, router and ends, scales of any size."""
    torch.manual_seed(0)
    plain = model()
    plain.save_pretrained(folder)
    file, state, kept = folder / "model.safetensors", {}, ("embed_tokens", "lm_head", "mlp.gate.")
    for name, w in load_file(file).items():
        state[name] = w
        if w.dim() == 2 and not any(part in name for part in kept):
            state[name], scale = quantized_in_blocks(w)
            state[f"{name}_scale_inv"] = scale
    save_file(state, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = transformers.FineGrainedFP8Config().to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantized_in_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 numbers, and a float32 scale for each 128 x 128, the last ones smaller."""
    blocks = [row.split(128, dim=1) for row in w.split(128)]
    scale = torch.stack([torch.stack([b.abs().max() / 448 for b in row]) for row in blocks])
    of_each = scale.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    return (w / of_each[: w.size(0), : w.size(1)]).to(torch.float8_e4m3fn), scale


def fp8_linear(x: Tensor, w: Tensor, scale: Tensor, block_size: Any, *_: Any) -> Tensor:
    """A linear layer in FP8 without transformers' kernel for GPUs, which rounds x besides."""
    w = finegrained_fp8._dequantize_fp8_weight(w, scale, block_size, x.dtype)
    return nn.functional.linear(x, w)


def fp8_grouped_matmul(
    x: Tensor, w: Tensor, scale: Tensor, offsets: Tensor, _: Any, block_size: Any
) -> Tensor:
    """The same of each group's rows, which end at offsets."""
    operands = zip(x.tensor_split(offsets[:-1].tolist()), w, scale, strict=True)
    return torch.cat([fp8_linear(*of_group, block_size) for of_group in operands])
