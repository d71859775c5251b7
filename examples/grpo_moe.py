# SPDX-License-Identifier: Apache-2.0
"""GRPO by TRL of a small Qwen3-MoE in few bits: bytes and routing are handed over.

    pip install transformers trl==1.16.0
    python examples/grpo_moe.py --recipe fp8

The sampler is a second model, as in another program. It gets the trainer's weights as
the bytes of a checkpoint before it writes, and returns what vLLM and SGLang return:
tokens, their log-probabilities, and the experts of each token. TRL calls it as its
``rollout_func``, which is experimental there. The loss replays the experts: TRL has no
hook for this, so the trainer overrides three methods. The reward is for even tokens.
On a GPU the same script runs there.

Printed are mean differences of the written tokens' log-probabilities:

- own choices: the trainer's, which routes anew, beside those that the sampler noted
- replayed: the same with the sampler's experts. What is left is rounding, because the
  sampler wrote one token at a time, from a cache, and the trainer reads all at once
- same kernels: both read all at once, with the sampler's experts. Bytes, routing and
  kernels are equal, so this is 0 to the bit, which is asserted
"""

import argparse
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from grouped_linear import Float8BlockScaling, convert
from grouped_linear.contrib import pad_routing, record_routing, replay_routing
from grouped_linear.integrations.checkpoints.tensors import CheckpointTensors

LENGTH, END = 12, 63
CONFIG = transformers.Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=64,
    moe_intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_experts=16,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    pad_token_id=0,
    eos_token_id=END,
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model(recipe: str, learns: bool) -> Any:
    model = transformers.Qwen3MoeForCausalLM(CONFIG)
    for p in model.parameters():
        if p.dim() > 1:  # routers that are as sure as those of a trained model
            nn.init.normal_(p, std=p.size(-1) ** -0.5)
    weights = None if recipe == "bf16" else "both" if learns else recipe
    options = {"qat": "mxfp4"} if learns and recipe == "mxfp4" else {}
    convert(model, Float8BlockScaling(**options) if weights else None, weights=weights)
    return model.to(DEVICE)


class Sampler:
    """Writes text. It has nothing of the trainer's but the bytes that it is sent."""

    def __init__(self, recipe: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.model = make_model(recipe, learns=False).eval()
        add_fused_lm_head(self.model)  # log-probabilities by TRL's kernel

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        parts = self.model.state_dict()  # of the memory that it computes with
        for name, t in tensors:
            layer, _, expert = name.partition(".experts.")
            if name in parts:
                parts[name].copy_(t)
                continue
            number, projection, kind = expert.split(".")  # 3.up_proj.weight_scale_inv
            whole = "down_proj" if projection == "down_proj" else "gate_up_proj"
            whole += "" if kind == "weight" else "_scale_inv"
            to = parts[f"{layer}.experts.{whole}"][int(number)]
            if projection != "down_proj":
                to = to.chunk(2)[projection == "up_proj"]
            to.copy_(t.contiguous().view(to.dtype).view_as(to))  # bytes, or as it is

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        self.load(CheckpointTensors(trainer.model))
        given = self.tokenizer(prompts, padding=True, return_tensors="pt").to(DEVICE)
        B, P = given.input_ids.shape
        options = {"max_new_tokens": LENGTH, "do_sample": True, "top_k": 0}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        recorded = record_routing(self.model, B, P + LENGTH)
        with recorded as recording, trainer.accelerator.autocast():
            written = self.model.generate(**given, **options)
        ids, routing = written.sequences, recording.take().cpu().numpy()
        scores = torch.stack(written.logits, dim=1).float().log_softmax(-1)
        scores = scores.gather(-1, ids[:, P:, None])[..., 0].tolist()
        rows, first = ids.tolist(), (P - given.attention_mask.sum(1)).tolist()
        end = [row.index(END, P) + 1 if END in row[P:] else len(row) for row in rows]
        return {
            "prompt_ids": [rows[b][first[b] : P] for b in range(B)],
            "completion_ids": [rows[b][P : end[b]] for b in range(B)],
            "logprobs": [scores[b][: end[b] - P] for b in range(B)],
            "routed_experts": [routing[b, first[b] : end[b] - 1] for b in range(B)],
        }


class ReplayingTrainer(GRPOTrainer):
    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        # TRL puts further fields of a rollout into its row, for functions of reward.
        routed = [row["routed_experts"] for row in inputs]
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        batch["routing"] = pad_routing(self.model, routed, mask)  # TRL shuffles, splits
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with ExitStack() as self.until_backward:  # activation checkpointing recomputes
            return super().training_step(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        own = self.scores(model, inputs)
        self.until_backward.enter_context(replay_routing(model, inputs["routing"]))
        self.report(inputs, own, self.scores(model, inputs))
        return super()._compute_loss(model, inputs)

    @torch.no_grad()
    def scores(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        both = [("prompt_" + s, "completion_" + s) for s in ("ids", "mask")]
        given = [torch.cat([inputs[name] for name in names], dim=1) for names in both]
        written = inputs["completion_mask"].bool()
        parts = self._get_per_token_logps_and_entropies(model, *given, written.size(1))
        return parts[0][written]

    def report(self, inputs: dict[str, Any], own: Tensor, replayed: Tensor) -> None:
        written, sampler = inputs["completion_mask"].bool(), self.rollout_func.model
        noted = inputs["sampling_per_token_logps"][written]
        with replay_routing(sampler, inputs["routing"]):
            same = self.scores(sampler, inputs)
        assert torch.equal(same, replayed)
        pairs = (own, noted), (replayed, noted), (replayed, same)
        off = "".join(f"{(a - b).abs().mean():14.4f}" for a, b in pairs)
        share = (inputs["completion_ids"][written] % 2 == 0).float().mean()
        print(f"{self.state.global_step:4}{share:8.2f}{off}", flush=True)


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:  # the reward
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", choices=["fp8", "mxfp4", "bf16"], default="fp8")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, "0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", eos_token=str(END), padding_side="left"
    )
    prompts = torch.randint(1, END, (64, 6)).tolist()
    prompts = [" ".join(map(str, ids[i % 5 :])) for i, ids in enumerate(prompts)]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=64,
        max_completion_length=LENGTH,
        max_steps=options.steps,
        learning_rate=4e-3,
        bf16=True,
        use_cpu=DEVICE == "cpu",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = ReplayingTrainer(
        make_model(options.recipe, learns=True),
        even,
        arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        rollout_func=Sampler(options.recipe, tokenizer),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    print("      even    |log p(trainer) - log p(sampler)|")
    print("step  tokens   own choices      replayed  same kernels")
    trainer.train()


if __name__ == "__main__":
    main()
