"""accelerate: states that are saved, weights that are offloaded or dispatched."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grouped_linear import GroupedTensor
from support.compare import assert_same_bits, bits

accelerate = pytest.importorskip("accelerate")
from grouped_linear.integrations.transformers import quantize_experts  # noqa: E402


def test_save_state(tiny: Any, tmp_path: Path) -> None:
    accelerator, batch = accelerate.Accelerator(cpu=True), torch.randint(64, (2, 12))
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step() -> None:
        accelerator.backward(model(batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()

    step()
    accelerator.save_state(str(tmp_path))
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    step()
    after = {name: t.clone() for name, t in model.state_dict().items()}
    assert any(not torch.equal(bits(t), bits(saved[name])) for name, t in after.items())
    accelerator.load_state(str(tmp_path))
    for name, t in model.state_dict().items():
        assert_same_bits(bits(t), bits(saved[name]))
    step()  # with the optimizer's state of then
    for name, t in model.state_dict().items():
        assert_same_bits(bits(t), bits(after[name]))


def test_offloaded_before(plain_mixtral: Any) -> None:
    model = accelerate.cpu_offload(plain_mixtral, execution_device="cpu")
    with pytest.raises(ValueError, match=r"gate_up_proj is offloaded by accelerate: load the mod"):
        quantize_experts(model)
    assert model(torch.arange(12)[None]).logits.isfinite().all()


def test_offloaded_after(quantized_mixtral: Any) -> None:
    with pytest.raises(ValueError, match="a quantized weight cannot be offloaded"):
        accelerate.cpu_offload(quantized_mixtral, execution_device="cpu")


def test_dispatched(plain_mixtral: Any) -> None:
    """Before or after its experts are quantized."""
    ids = torch.arange(12)[None]
    expected = plain_mixtral(ids).logits
    model = accelerate.dispatch_model(plain_mixtral, {"": "cpu"}, force_hooks=True)
    quantize_experts(model)
    assert torch.equal(model(ids).logits, expected)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert torch.equal(model(ids).logits, expected)
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, GroupedTensor)
