# SPDX-License-Identifier: Apache-2.0
"""trl's SFTTrainer and GRPOTrainer: adapters on experts, and weights and routing handed over."""

import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor
from transformers.integrations import finegrained_fp8

from grouped_linear import Float8BlockScaling, convert

pytest.importorskip("trl")
import datasets
import peft
import trl

from grouped_linear.integrations.checkpoints.quantizer import GroupedLinearConfig
from grouped_linear.integrations.peft import for_packed_experts, use_grouped_adapters
from support.adapters import (
    NewWeights,
    config_of,
    fp8_linear,
    from_fp8_checkpoint,
    make_fp8_checkpoint,
    model_of,
    weights_of,
)
from support.commands import run
from support.documents import ROOT
from support.trainer import losses

TRAINED: dict[str, Any] = {
    "max_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
}


def tokenizer() -> Any:
    """Of the words w0 to w63."""
    words = {f"w{i}": i for i in range(64)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="w1", eos_token="w2"
    )


def words_of(row: Any) -> str:
    return " ".join(f"w{i}" for i in row["input_ids"].tolist())


def adapters_of(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".lora_" in n}


def train_adapters(trainer: Any) -> dict[str, Tensor]:
    """Train; the weights stay as they are, and none of their shape is made.

    Returns the adapters of before.
    """
    use_grouped_adapters(trainer.model)
    before, adapters = weights_of(trainer.model), adapters_of(trainer.model)
    with NewWeights(before) as made:
        trainer.train()
    assert made.count == 0
    torch.testing.assert_close(weights_of(trainer.model), before, rtol=0, atol=0)
    return adapters


@pytest.mark.parametrize(
    ("made_by", "weights"),
    [
        *product(("trl", "PEFT"), (None, "fp8")),
        *product(("trl, of files",), ("fp8", "mxfp4")),
    ],
)
def test_sft(made_by: str, weights: Any, dataset: Any, tmp_path: Path) -> None:
    """Adapters that trl makes, or gets, learn; no tensor of a weight's shape is made.

    trl loads a model of files itself, by a configuration among its arguments.
    """
    options: dict[str, Any] = {"output_dir": str(tmp_path / "run"), **TRAINED}
    model, config = model_of(), config_of()
    if made_by == "trl, of files":
        model.save_pretrained(tmp_path)
        model, config = str(tmp_path), for_packed_experts(config)
        options["model_init_kwargs"] = {"quantization_config": GroupedLinearConfig(weights)}
    else:
        convert(model, Float8BlockScaling() if weights else None, weights=weights)
        if made_by == "PEFT":
            model, config = peft.get_peft_model(model, config), None
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(per_device_train_batch_size=2, **options),
        train_dataset=datasets.Dataset.from_list([{"text": words_of(row)} for row in dataset]),
        processing_class=tokenizer(),
        peft_config=config,
    )
    adapters = train_adapters(trainer)
    assert len(losses(trainer)) == 2
    assert all(map(math.isfinite, losses(trainer)))
    after = adapters_of(trainer.model)
    assert not any(torch.equal(after[n], t) for n, t in adapters.items() if "lora_B" in n)
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("made_by", ["trl", "PEFT"])
@pytest.mark.parametrize("weights", [None, "fp8", "checkpoint"])
def test_grpo(
    weights: Any, made_by: str, dataset: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It generates while it trains; the model it must stay near is the one without adapters.

    trl makes that by a second adapter of a PEFT model, and by disable_adapter of another.
    """
    if weights == "checkpoint":
        monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_linear)
        model, config = from_fp8_checkpoint(make_fp8_checkpoint(tmp_path / "base")), config_of()
        convert(model, Float8BlockScaling())
    else:
        model, config = model_of(), config_of()
        convert(model, Float8BlockScaling() if weights else None, weights=weights)
    if made_by == "PEFT":
        model, config = peft.get_peft_model(model, config), None
        use_grouped_adapters(model)
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=6,
        beta=0.1,
        **TRAINED,
    )
    rows = [{"prompt": words_of(row)} for row in dataset]

    def alternating(completions: list[str], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    trainer = trl.GRPOTrainer(
        model,
        alternating,
        arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=config,
    )
    adapters = train_adapters(trainer)
    divergences = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert divergences[0] == 0
    assert divergences[1] > 0
    for name, t in adapters_of(trainer.model).items():
        assert torch.equal(t, adapters[name]) == (".default." not in name), name


@pytest.mark.parametrize("recipe", ["fp8", "mxfp4", "bf16"])
def test_grpo_with_replayed_routing(recipe: str, tmp_path: Path) -> None:
    """The example learns, and shows what replay is for.

    The example asserts that sampler and trainer agree to the bit where their kernels do.
    """
    example = ROOT / "examples" / "grpo_moe.py"
    done = run([sys.executable, example, "--recipe", recipe, "--steps", "12"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = [list(map(float, row.split())) for row in done.stdout.splitlines()[-12:]]
    _, reward, own, replayed, same_kernels = torch.tensor(table).unbind(1)
    assert reward[-3:].mean() > reward[:3].mean() + 0.15  # seen: 0.79 after 0.51
    assert replayed.mean() < 0.7 * own.mean()  # 0.024 after 0.051
    assert replayed.min() > 0  # of kernels that are not the same
    assert not same_kernels.any()
