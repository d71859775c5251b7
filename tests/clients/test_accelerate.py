# SPDX-License-Identifier: Apache-2.0
"""accelerate: states that are saved, weights that are offloaded or dispatched."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from grouped_linear import Float8BlockScaling, GroupedLinear, GroupedMLP, convert
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from support.compare import assert_same_bits, bits

accelerate = pytest.importorskip("accelerate")


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
        convert(model, weights="fp8")
    assert model(torch.arange(12)[None]).logits.isfinite().all()


def test_offloaded_after(quantized_mixtral: Any) -> None:
    """By hooks of the experts or of a block around them, which copy the state dict's tensors."""
    ids = torch.arange(12)[None]
    expected = quantized_mixtral(ids).logits
    for blocks in (None, ["MixtralDecoderLayer"], ["MixtralSparseMoeBlock"]):
        model = copy.deepcopy(quantized_mixtral)
        accelerate.cpu_offload(model, execution_device="cpu", preload_module_classes=blocks)
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
@pytest.mark.parametrize("empty", [False, True], ids=["drawn", "empty"])
def test_saved_and_dispatched(weights: Any, empty: bool, tmp_path: Path) -> None:
    def layer() -> GroupedMLP:
        return GroupedMLP(4, 64, 96, recipe=Float8BlockScaling(), weights=weights)

    x, (scores, experts) = torch.randn(10, 64), torch.rand(10, 4).topk(2)
    saved = layer()
    accelerate.Accelerator(cpu=True).save_model(saved, str(tmp_path))
    with accelerate.init_empty_weights() if empty else nullcontext():
        loaded = layer()
    loaded = accelerate.load_checkpoint_and_dispatch(loaded, str(tmp_path), device_map={"": "cpu"})
    assert_same_bits(loaded(x, scores, experts), saved(x, scores, experts))


@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
def test_a_file_of_numbers_is_no_file_of_bytes(weights: Any, tmp_path: Path) -> None:
    """accelerate casts to the parameter's dtype, and asks for its shape."""
    layer = GroupedLinear(4, 64, 96, recipe=Float8BlockScaling(), weights=weights)
    weight: Any = layer.frozen_weight("weight")
    numbers = {"weight": weight.values.detach(), "weight_scale_inv": weight.scale.detach()}
    save_file(numbers, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"in \"weight_scale_inv\" .*this looks incorrect"):
        accelerate.load_checkpoint_in_model(layer, str(tmp_path), device_map={"": "cpu"})


def test_dispatched(plain_mixtral: Any) -> None:
    """Before or after its experts are in FP8."""
    ids = torch.arange(12)[None]
    expected = plain_mixtral(ids).logits
    model = accelerate.dispatch_model(plain_mixtral, {"": "cpu"}, force_hooks=True)
    convert(model, weights="fp8")
    assert torch.equal(model(ids).logits, expected)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert torch.equal(model(ids).logits, expected)
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.uint8


def test_mapped_to_devices(quantized_mixtral: Any) -> None:
    """As ``device_map="auto"`` does, which asks for each parameter's size and dtype."""
    memory = {"cpu": "1GB"}
    device_map = accelerate.infer_auto_device_map(quantized_mixtral, memory, dtype=torch.bfloat16)
    assert set(device_map.values()) == {"cpu"}
    experts = quantized_mixtral.model.layers[0].mlp.experts
    before = bits(experts.down_proj).clone()
    accelerate.utils.set_module_tensor_to_device(experts, "down_proj", "cpu")
    assert_same_bits(bits(experts.down_proj), before)


def test_both_precisions_made_empty_and_set() -> None:
    """By the class of a parameter, which is given numbers alone."""
    recipe = Float8BlockScaling()

    def layer() -> GroupedMLP:
        return GroupedMLP(4, 32, 64, recipe=recipe, dtype=torch.bfloat16, weights="both")

    x, (scores, experts) = torch.randn(10, 32, dtype=torch.bfloat16), torch.rand(10, 4).topk(2)
    drawn = layer()
    y = drawn(x, scores, experts)
    with accelerate.init_empty_weights():
        empty = layer()
    for name, p in drawn.named_parameters():
        assert empty.get_parameter(name).is_meta
        value = p.detach().clone().dequantize()
        accelerate.utils.set_module_tensor_to_device(empty, name, "cpu", value=value)
        assert isinstance(empty.get_parameter(name), GroupedTensorWithMaster)
    assert_same_bits(empty(x, scores, experts), y)
    accelerate.cpu_offload(empty, execution_device="cpu")
    assert_same_bits(empty(x, scores, experts), y)
