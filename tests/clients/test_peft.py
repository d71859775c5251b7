"""PEFT: adapters beside and on experts that are kept in FP8."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grouped_linear import GroupedTensor

peft = pytest.importorskip("peft")

TARGETS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
}


@pytest.mark.parametrize("target", TARGETS)
def test_adapters(target: str, quantized_mixtral: Any, tmp_path: Path) -> None:
    model = peft.get_peft_model(quantized_mixtral, peft.LoraConfig(r=4, **TARGETS[target]))
    learning = [p for p in model.parameters() if p.requires_grad]
    assert learning
    optimizer, ids = torch.optim.AdamW(learning, lr=1e-2), torch.arange(24).reshape(2, 12)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    frozen = [p for p in model.parameters() if isinstance(p, GroupedTensor)]
    assert len(frozen) == 4
    model.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    base = model.unload()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, expected)
