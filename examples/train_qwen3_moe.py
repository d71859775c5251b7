# SPDX-License-Identifier: Apache-2.0
"""Train a small Qwen3-MoE with transformers' Trainer, experts in BF16 and in FP8.

    pip install transformers accelerate matplotlib
    python examples/train_qwen3_moe.py

The second model differs in one line, `convert`. Parameters, checkpoints and Trainer
stay as they are. Both learn Python's source byte by byte; the table at the end has
their losses, qwen3_moe_losses.png the curves.

On a GPU the Trainer moves the model there and the same kernels run in FP8 on its tensor
cores. At this size FP8 gains no time; it does from some 500 tokens an expert on. There,
add `weights="both"` to `convert`: weights are then quantized once a step.
"""

import argparse
import inspect
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from matplotlib import pyplot as plt
from transformers import (
    AutoModelForCausalLM,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

from grouped_linear import Float8BlockScaling, convert

CONTEXT = 64
CONFIG = Qwen3MoeConfig(
    vocab_size=256,  # bytes
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
)


def train(in_fp8: bool, steps: int) -> tuple[dict[int, float], float]:
    """Losses by step, and the seconds of one step."""
    set_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    if in_fp8:
        print(convert(model, Float8BlockScaling()))
    text = torch.frombuffer(
        bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8
    )
    rows = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT).long()
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            logging_steps=max(1, steps // 20),
            save_strategy="no",
            report_to=[],
        )
        dataset = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model, arguments, train_dataset=dataset)
        seconds = trainer.train().metrics["train_runtime"]
    return {
        e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e
    }, seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plot", type=Path, default=Path("qwen3_moe_losses.png"))
    options = parser.parse_args()
    runs = {name: train(name == "FP8", options.steps) for name in ("BF16", "FP8")}
    print(f"\n{'experts':8}{'first loss':>12}{'last loss':>12}{'ms a step':>12}")
    for name, (losses, seconds) in runs.items():
        first, *_, last = losses.values()
        print(f"{name:8}{first:12.3f}{last:12.3f}{1e3 * seconds:12.0f}")
        plt.plot(losses.keys(), losses.values(), label=name)
    plt.xlabel("step")
    plt.ylabel("loss")
    plt.legend()
    plt.savefig(options.plot)
    print(f"loss curves: {options.plot}")


if __name__ == "__main__":
    main()
