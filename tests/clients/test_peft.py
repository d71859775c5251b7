# SPDX-License-Identifier: Apache-2.0
"""PEFT: adapters beside and on experts that are kept in FP8."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import assert_same_bits

peft = pytest.importorskip("peft")
from grouped_linear.integrations.peft import use_grouped_adapters  # noqa: E402

TARGETS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
}
IDS = torch.arange(24).reshape(2, 12)


def fit(model: Any) -> list[float]:
    """The losses of some steps of whatever learns."""
    learning = [p for p in model.parameters() if p.requires_grad]
    assert learning
    optimizer, losses = torch.optim.AdamW(learning, lr=1e-2), []
    for _ in range(5):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("target", TARGETS)
def test_adapters(target: str, quantized_mixtral: Any, tmp_path: Path) -> None:
    model = peft.get_peft_model(quantized_mixtral, peft.LoraConfig(r=4, **TARGETS[target]))
    if target == "experts":
        use_grouped_adapters(model)
    losses = fit(model)
    assert losses[-1] < losses[0]
    assert [p.dtype for p in model.parameters()].count(torch.uint8) == 8
    model.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    base = model.unload()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    if target == "experts":
        use_grouped_adapters(loaded)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, expected)


def test_prepared_for_kbit_training(quantized_mixtral: Any) -> None:
    """Experts in FP8 that were converted in bf16 compute in float32 then, with the same bytes."""
    model = quantized_mixtral.bfloat16()
    before = {n: p.clone() for n, p in model.named_parameters() if not p.is_floating_point()}
    model = peft.prepare_model_for_kbit_training(model)
    for name, p in model.named_parameters():
        assert not p.requires_grad
        if name in before:
            assert_same_bits(p, before[name])
        else:
            assert p.dtype == torch.float32
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, **TARGETS["attention"]))
    losses = fit(model)
    assert losses[-1] < losses[0]
