"""PEFT's merge of adapters into experts' weights, plain, in FP8 and in both."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from grouped_linear import Float8BlockScaling, GroupedTensor, convert
from support.compare import assert_same_bits, bits

pytest.importorskip("peft")
import peft

from grouped_linear.integrations.peft import ParamWrapper
from support.adapters import (
    assert_close,
    config_of,
    fp8_checkpoints_on_cpu,
    grouped,
    logits,
    model_of,
    of_a_layer,
    randomize,
    results,
    weights_of,
)


@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS"])
@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("weights", [None, "fp8", "both"])
def test_merge(weights: Any, safe_merge: bool, name: str) -> None:
    """Both weights of all layers have all adapters' sum, rounded once, and have it no more."""
    tolerance = 0.1 if weights == "fp8" else 1e-5
    model = grouped(model_of(name), config_of(target_modules=[]), Float8BlockScaling(), weights)
    model.add_adapter("other", config_of(r=3, target_modules=[]))
    randomize(model)
    model.base_model.set_adapter(["default", "other"])
    before, adapted = weights_of(model), of_a_layer(model)
    wrappers = {n: m for n, m in model.named_modules() if isinstance(m, ParamWrapper)}
    sums = [
        before[key] + sum(wrapper.get_delta_weight(adapter) for adapter in ("default", "other"))
        for wrapper in wrappers.values()
        for key, p in model.named_parameters()
        if p is wrapper.get_param()
    ]
    results(model)  # a graph that has been through the weights does not hold them

    for _ in range(2):
        model.merge_adapter(safe_merge=safe_merge)
        for wrapper, expected in zip(wrappers.values(), sums, strict=True):
            w = wrapper.get_param().detach()
            w = w.dequantize() if isinstance(w, GroupedTensor) else w
            assert_close({"": w}, {"": expected}, tolerance)
        assert_close({"": of_a_layer(model)}, {"": adapted}, 0.15)
        with pytest.warns(UserWarning, match="already merged"):
            model.merge_adapter(safe_merge=safe_merge)
        model.unmerge_adapter()
        for key, w in weights_of(model).items():
            if weights == "fp8":
                assert_same_bits(w, before[key])
            else:
                torch.testing.assert_close(w, before[key])
    model.merge_adapter(["default"])
    model.merge_adapter(["other"])
    with model.disable_adapter():  # takes them out
        logits(model)
    torch.testing.assert_close(weights_of(model), before)
    merged = model.merge_and_unload()
    assert not any(isinstance(module, ParamWrapper) for module in merged.modules())
    for w, expected in zip(weights_of(merged).values(), before.values(), strict=True):
        assert not torch.equal(w, expected)


@pytest.mark.parametrize("weights", [None, "fp8", "both"])
def test_a_merge_that_is_refused_writes_nothing(weights: Any) -> None:
    model = grouped(model_of(), config_of(), Float8BlockScaling(), weights)
    model.add_adapter("broken", config_of())
    randomize(model)
    model.base_model.set_adapter(["default", "broken"])
    layer = model.base_model.model.model.layers[1]
    before = {name: bits(t).clone() for name, t in model.state_dict().items()}
    merges = model.merge_adapter, model.merge_and_unload, layer.mlp.experts.merge
    for broken, found in ((layer.self_attn.q_proj, merges[:2]), (layer.mlp.experts, merges)):
        number = broken.lora_B["broken"].weight.data[0]
        kept = number.clone()
        for merge in found:
            number[0] = torch.inf
            with pytest.raises(ValueError, match=r"^merge: (\S+q_proj .* NaNs|.* not be finite$)"):
                merge(safe_merge=True)
            number.copy_(kept)
            for name, t in model.state_dict().items():
                assert_same_bits(bits(t), before[name])
            assert not any(getattr(module, "merged", False) for module in model.modules())


def test_what_cannot_be_merged_is_seen_before() -> None:
    """PEFT finds in the last layer that there is no bias to add one to."""
    model = grouped(model_of(), config_of())
    last = f"layers.{len(model.base_model.model.model.layers) - 1}.self_attn.v_proj"
    model.add_adapter("biased", peft.LoraConfig(target_modules=[last], lora_bias=True))
    randomize(model)
    model.base_model.set_adapter(["default", "biased"])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=rf"^merge: \S+{last} cannot be merged: .* no bias"):
            merge()
        for name, t in model.state_dict().items():
            assert_same_bits(t, before[name])


@pytest.mark.parametrize("order", ["convert first", "convert last"])
def test_merged_and_saved(order: str, tmp_path: Path) -> None:
    """In FP8 as transformers writes it, or in the weights' dtype."""
    model = grouped(model_of(), config_of(modules_to_save=["lm_head"]), weights="fp8", order=order)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "fp8")
    saved = load_file(tmp_path / "fp8" / "model.safetensors")
    assert sum(t.dtype == torch.float8_e4m3fn for t in saved.values()) == 2 * 4 * 3
    with fp8_checkpoints_on_cpu():
        loaded = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "fp8", device_map="cpu")
    convert(loaded, Float8BlockScaling())
    assert torch.equal(logits(loaded), logits(merged))


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_a_checkpoint_in_fp8(weights: Any, tmp_path: Path) -> None:
    """Its experts are transformers' own class; merged, they are rounded once and save as before."""
    source = model_of()
    convert(source, weights="fp8")
    source.save_pretrained(tmp_path / "base")
    ours = grouped(source, config_of(), Float8BlockScaling())
    expected = results(ours)
    with fp8_checkpoints_on_cpu():
        loaded = transformers.MixtralForCausalLM.from_pretrained(
            tmp_path / "base", device_map="cpu"
        )
    experts = loaded.model.layers[0].mlp.experts
    assert type(experts).__name__ == "FP8Experts"
    loaded = grouped(loaded, config_of(), Float8BlockScaling(), weights)
    assert_close(results(loaded), expected, 1e-6)

    before = {name: t.clone() for name, t in experts.state_dict().items()}
    assert len(before) == 4
    adapted = of_a_layer(loaded)
    loaded.merge_adapter()
    assert_close({"": of_a_layer(loaded)}, {"": adapted}, 0.1)
    loaded.unmerge_adapter()
    for name, t in experts.state_dict().items():
        assert_same_bits(bits(t), bits(before[name]))
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    with fp8_checkpoints_on_cpu():
        again = transformers.MixtralForCausalLM.from_pretrained(
            tmp_path / "merged", device_map="cpu"
        )
    convert(again, Float8BlockScaling())
    assert torch.equal(logits(again), logits(merged))
