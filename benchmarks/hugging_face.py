# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face's as cases of benchmarks.compiled_vs_eager.

A few layers of a published model with random weights: a step of training with AdamW, a prompt, or
one token of each of many sequences. They need transformers, so they run where they are named::

    python -m benchmarks.compiled_vs_eager --cases hf_qwen3_30b_step hf_gpt_oss_20b_token

B sequences of T tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from benchmarks.step_cases import Candidate

VOCABULARY = 1024  # small: a whole model spends on 24 to 61 layers what a few would spend on words
# What differs from the family's defaults, which are sizes of one of its models.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_30b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "head_dim": 128,
        "num_attention_heads": 32,
    },
    "mixtral": {"model_type": "mixtral", "num_hidden_layers": 2},
    # As many experts as one of 8 devices has.
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "first_k_dense_replace": 0,
        "n_routed_experts": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "tiny": {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
}


class LossOrLogits(nn.Module):
    """What a language model is trained on, or what its next tokens are chosen by."""

    def __init__(self, model: nn.Module, learns: bool) -> None:
        super().__init__()
        self.model = model
        self.learns = learns

    def forward(self, ids_BT: Tensor) -> Any:
        if self.learns:
            return self.model(ids_BT, labels=ids_BT, use_cache=False).loss
        return self.model(ids_BT, use_cache=False).logits


@dataclass(frozen=True)
class HuggingFaceCase:
    """A step of a model: learning from B sequences of T tokens, or reading them.

    "torch" is transformers' own grouped_mm there, "loop" its eager experts. A cached weight is kept
    in FP8 alone for inference, and in training beside its numbers, by the optimizer.
    """

    model: str
    work: str
    batch: int
    context: int
    kind = "hugging face"

    @property
    def name(self) -> str:
        return f"hf_{self.model}_{self.work}"

    @property
    def learns(self) -> bool:
        return self.work == "step"

    @property
    def roots(self) -> int:
        return int(self.learns)

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    def module(self, candidate: "Candidate") -> nn.Module:
        import transformers

        from grouped_linear import convert
        from grouped_linear.integrations.transformers import register

        name = {"torch": "grouped_mm", "loop": "eager"}.get(candidate.implementation)
        if name is None:
            name = "grouped_linear_" + candidate.precision.partition(",")[0]
            register(name, candidate.recipe)
        config = transformers.AutoConfig.for_model(
            **MODELS[self.model],
            vocab_size=VOCABULARY,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        make = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.bfloat16, experts_implementation=name)
        if candidate.weights is not None:
            in_fp8 = not self.learns and "gpt_oss" not in self.model  # whose experts have biases
            convert(model, candidate.recipe, weights="fp8" if in_fp8 else candidate.weights)
        return LossOrLogits(model, self.learns)

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.randint(VOCABULARY, (self.batch, self.context), device=device),)

    def vary(self, inputs: tuple[Tensor, ...], step: int) -> None:
        inputs[0].random_(VOCABULARY)


HUGGING_FACE_CASES = tuple(
    HuggingFaceCase(model, work, batch, context)
    for model, of_training in {
        "qwen3_30b": (4, 2048),
        "mixtral": (4, 2048),
        "deepseek_v3": (2, 2048),
        "gpt_oss_20b": (8, 1024),
        "tiny": (2, 32),
    }.items()
    for work, (batch, context) in {
        "step": of_training,
        "prompt": (1, of_training[1]),
        "token": (64, 1),
    }.items()
)
