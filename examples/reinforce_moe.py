# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of a small Qwen3-MoE: sampler, trainer and routing replay.

    pip install transformers
    python examples/reinforce_moe.py

The sampler has its experts in FP8 alone and everything else in bfloat16; the trainer
learns in float32, with its experts in both precisions. After each step the sampler
loads the trainer's FP8 numbers, so both multiply the same experts. Their routers still
disagree now and then, as bfloat16 rounds what reaches them. The trainer replays the
experts that the sampler chose.

The task is to write even tokens. On a GPU the same script runs there.
"""

import argparse

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grouped_linear import Float8BlockScaling, convert
from grouped_linear.contrib import record_routing, replay_routing
from grouped_linear.integrations.checkpoints.fp8 import fp8_tensors

CONFIG = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    eos_token_id=None,
)
SAMPLES, PROMPT, LENGTH = 32, 4, 8


def load_weights(sampler: Qwen3MoeForCausalLM, weights: object) -> None:
    """Copy pairs of name and tensor, as a sampler in another program would."""
    parts = sampler.state_dict()  # of the memory that it computes with
    for name, tensor in weights:
        layer, _, expert = name.partition(".experts.")
        if not expert:
            parts[name].copy_(tensor)
            continue
        number, projection, kind = expert.split(".")  # 3.up_proj.weight_scale_inv
        is_down = projection == "down_proj"
        weight = f"{layer}.experts.{'down_proj' if is_down else 'gate_up_proj'}"
        to = parts[weight + kind.removeprefix("weight")][int(number)]
        (to if is_down else to.chunk(2)[projection == "up_proj"]).copy_(tensor)


def log_probabilities(model: Qwen3MoeForCausalLM, ids: Tensor) -> Tensor:
    """Of each sampled token, given those before it."""
    logits = model(ids[:, :-1]).logits.float()[:, PROMPT - 1 :]
    return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    trainer = Qwen3MoeForCausalLM(CONFIG).to(device)
    for p in trainer.parameters():
        if p.dim() > 1:  # routers that are as sure as those of a trained model
            torch.nn.init.normal_(p, std=p.size(-1) ** -0.5)
    sampler = Qwen3MoeForCausalLM(CONFIG).to(device, torch.bfloat16).eval()
    convert(trainer, Float8BlockScaling(), weights="both")
    convert(sampler, Float8BlockScaling(), weights="fp8")
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=4e-3, fused=True)

    print("      even   other experts   |log p(trainer) - log p(sampler)|")
    print("step  tokens  in some layer  own choices  replayed")
    for step in range(steps):
        load_weights(sampler, fp8_tensors(trainer))
        prompts = torch.randint(64, (SAMPLES, PROMPT), device=device)
        with record_routing(sampler, SAMPLES, PROMPT + LENGTH) as recording:
            sampled = sampler.generate(
                prompts,
                max_new_tokens=LENGTH,
                do_sample=True,
                top_k=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        ids, routing = sampled.sequences, recording.take()
        chosen = torch.stack(sampled.logits, dim=1).float().log_softmax(-1)
        of_sampler = chosen.gather(-1, ids[:, PROMPT:, None])[..., 0]

        tokens = ids.size(1) - 1  # the last one is sampled and never computed
        with torch.no_grad(), record_routing(trainer, SAMPLES, tokens) as recording:
            own = log_probabilities(trainer, ids)
        others = recording.take().sort().values != routing.sort().values

        reward = (ids[:, PROMPT:] % 2 == 0).float()
        advantage = reward.mean(1) - reward.mean()
        with replay_routing(trainer, routing):
            replayed = log_probabilities(trainer, ids)
            loss = -(advantage[:, None] * replayed).mean()
            loss.backward()  # inside: activation checkpointing would route again
        optimizer.step()
        optimizer.zero_grad()
        off = [(one - of_sampler).abs().mean().item() for one in (own, replayed)]
        share = others.any(-1).any(-1).float().mean().item()
        print(f"{step:4}{reward.mean():8.2f}{share:15.1%}{off[0]:13.4f}{off[1]:10.4f}")
    print(f"\nbytes of routing for a token: {routing[0, 0].nbytes}")


if __name__ == "__main__":
    main()
