"""PEFT: adapters beside and on experts that are kept in FP8."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grouped_linear import GroupedTensor
from support.compare import assert_same_bits, bits

peft = pytest.importorskip("peft")

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
    losses = fit(model)
    assert losses[-1] < losses[0]
    frozen = [p for p in model.parameters() if isinstance(p, GroupedTensor)]
    assert len(frozen) == 4
    model.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    base = model.unload()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, expected)


@pytest.mark.parametrize("safe_merge", [False, True])
def test_merge(safe_merge: bool, quantized_mixtral: Any) -> None:
    """An adapter on experts in FP8 goes into them, whole, and comes out again."""
    config = peft.LoraConfig(r=4, init_lora_weights=False, **TARGETS["experts"])
    model = peft.get_peft_model(quantized_mixtral, config)
    weights = {n: p for n, p in model.named_parameters() if isinstance(p, GroupedTensor)}
    before = {name: p.detach().dequantize() for name, p in weights.items()}
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    model.merge_adapter(safe_merge=safe_merge)
    merged = {name: p.detach().dequantize() for name, p in weights.items()}
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    # e4m3 rounds by up to 2**-3 of a number at random: 0.04 of it in the mean of squares
    assert (logits - expected).norm() < 0.1 * expected.norm()
    moved = {name for name, w in before.items() if not torch.equal(merged[name], w)}
    assert moved == {name for name in weights if "down_proj" in name}
    model.unmerge_adapter()
    for name, p in weights.items():
        assert isinstance(p, GroupedTensor)
        back = p.detach().dequantize()
        change = (merged[name] - before[name]).norm()
        error = (back - before[name]).norm()
        assert error < 0.1 * before[name].norm()
        assert error <= 0.5 * change


def test_prepared_for_kbit_training(quantized_mixtral: Any) -> None:
    """Experts in FP8 that were converted in bf16 compute in float32 then, with the same bytes."""
    model = quantized_mixtral.bfloat16()
    before = {n: p for n, p in model.named_parameters() if isinstance(p, GroupedTensor)}
    parts = {n: (p.q.clone(), p.scale.clone()) for n, p in before.items()}
    model = peft.prepare_model_for_kbit_training(model)
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32
        assert not p.requires_grad
        assert isinstance(p, GroupedTensor) == (name in parts)
        if name in parts:
            for part, expected in zip((p.q, p.scale), parts[name], strict=True):
                assert_same_bits(bits(part), bits(expected))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, **TARGETS["attention"]))
    losses = fit(model)
    assert losses[-1] < losses[0]
