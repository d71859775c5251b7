# SPDX-License-Identifier: Apache-2.0
"""PEFT's merge of adapters into experts' weights, and its refusal where these are in FP8."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from grouped_linear import Float8BlockScaling, GroupedMLP, convert
from support.compare import assert_same_bits, assert_same_tensors, bits
from support.processes import one_process

pytest.importorskip("peft")
import peft

from grouped_linear.integrations.peft import ParamWrapper, use_grouped_adapters
from support.adapters import (
    assert_close,
    config_of,
    from_fp8_checkpoint,
    grouped,
    logits,
    make_fp8_checkpoint,
    model_of,
    of_a_layer,
    of_peft,
    randomize,
    results,
    weights_of,
)


@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS"])
@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("weights", [None, "both"])
def test_merge(weights: Any, safe_merge: bool, name: str) -> None:
    """Both weights of all layers have all adapters' sum, and have it no more."""
    model = grouped(model_of(name), config_of(target_modules=[]), Float8BlockScaling(), weights)
    model.add_adapter("other", config_of(r=3, target_modules=[]))
    randomize(model)
    model.base_model.set_adapter(["default", "other"])
    before, adapted = weights_of(model), of_a_layer(model)
    wrappers = [m for m in model.modules() if isinstance(m, ParamWrapper)]
    sums = [
        before[key] + sum(wrapper.get_delta_weight(adapter) for adapter in ("default", "other"))
        for wrapper in wrappers
        for key, p in model.named_parameters()
        if p is wrapper.get_param()
    ]
    results(model)  # a graph that has been through the weights does not hold them

    model.merge_adapter(safe_merge=safe_merge)
    for wrapper, expected in zip(wrappers, sums, strict=True):
        assert_close({"": wrapper.get_param().detach()}, {"": expected}, 1e-5)
    assert_close({"": of_a_layer(model)}, {"": adapted}, 0.15)
    model.unmerge_adapter()
    torch.testing.assert_close(weights_of(model), before)
    model.merge_adapter(["default"])
    model.merge_adapter(["other"])
    with model.disable_adapter():  # takes them out
        logits(model)
    torch.testing.assert_close(weights_of(model), before)
    merged = model.merge_and_unload()
    assert not any(isinstance(module, ParamWrapper) for module in merged.modules())
    for w, expected in zip(weights_of(merged).values(), before.values(), strict=True):
        assert not torch.equal(w, expected)


def assert_stays(model: Any, sentence: str) -> None:
    """No way to merge writes anything, attention's weights in 16 bits among it."""
    before = {name: bits(t).clone() for name, t in model.state_dict().items()}
    experts = model.get_base_model().model.layers[0].mlp.experts
    for merge in (model.merge_adapter, model.merge_and_unload, experts.merge):
        for safe_merge in (False, True):
            with pytest.raises(ValueError, match=sentence):
                merge(safe_merge=safe_merge)
    for name, t in model.state_dict().items():
        assert_same_bits(bits(t), before[name])
    assert not any(getattr(module, "merged", False) for module in model.modules())


IN_FP8 = r"^merge: \S+ is in FP8 and stays as it is: keep the adapter beside it, or merge it in the"


def test_weights_in_fp8_stay() -> None:
    model = grouped(model_of(), config_of(), Float8BlockScaling(), "fp8")
    assert_stays(model, IN_FP8)
    later = grouped(model_of(), config_of(), Float8BlockScaling())
    later.merge_adapter()
    convert(later, Float8BlockScaling(), weights="fp8")  # with the adapters in them
    merged = logits(later)
    with pytest.raises(ValueError, match=r"^unmerge: \w+ is in FP8 and stays as it is"):
        later.base_model.model.model.layers[0].mlp.experts.unmerge()
    assert torch.equal(logits(later), merged)


def test_the_model_below_adapters_is_not_saved(tmp_path: Path) -> None:
    """Its files would have PEFT's names, which nothing loads."""
    model = grouped(model_of(), config_of(), None, "mxfp4", "last")
    with pytest.raises(ValueError, match="is of a model with adapters: merge or unload them"):
        model.get_base_model().save_pretrained(tmp_path / "below")
    assert not (tmp_path / "below").exists()
    model.save_pretrained(tmp_path / "adapters")
    state = model.get_base_model().state_dict()
    plain = {n.replace(".base_layer", ""): t for n, t in state.items() if ".lora_" not in n}
    model.get_base_model().save_pretrained(tmp_path / "given", state_dict=plain)
    model.unload().save_pretrained(tmp_path / "below")
    given, below = (load_file(tmp_path / f / "model.safetensors") for f in ("given", "below"))
    assert_same_tensors(given, below)


def test_mixed_models_stay() -> None:
    """Of linear layers as well, which PEFT merges first."""
    model = model_of()
    convert(model, weights="fp8")
    model = peft.get_peft_model(model, config_of(), mixed=True)
    use_grouped_adapters(model)
    randomize(model)
    before = {name: bits(t).clone() for name, t in model.state_dict().items()}
    for merge in (model.base_model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=IN_FP8):
            merge()
    for name, t in model.state_dict().items():
        assert_same_bits(bits(t), before[name])


@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
@pytest.mark.parametrize("mixed", [False, True])
def test_bytes_refuse_merges_of_peft_alone(weights: Any, safe_merge: bool, mixed: bool) -> None:
    """Its own wrapper, around a layer or converted experts that it does not know."""
    refused = r"result type \w+ can't be cast to the desired output type Byte|stay as they are"
    refused += "|The size of tensor"  # of adapters in 16 bits beside codes of 4
    layer: Any = GroupedMLP(2, 32, 32, weights=weights)
    model: Any = torch.nn.ModuleDict({"experts": layer})
    config = config_of(["experts.down_proj"], target_modules=[])
    model = peft.get_peft_model(model, config, mixed=mixed)
    randomize(model)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    for merge in (model.base_model.merge_adapter, model.merge_and_unload):
        with pytest.raises(RuntimeError, match=refused):
            merge(
                **(
                    {}
                    if mixed and merge == model.base_model.merge_adapter
                    else {"safe_merge": safe_merge}
                )
            )
    for name, p in layer.named_parameters():
        assert_same_bits(p, before[name])
    model = of_peft(model_of())
    experts = model.model.model.layers[0].mlp.experts
    convert(experts.get_base_layer(), weights=weights)  # which does not see PEFT's wrapper
    kept = experts.get_base_layer()
    before = {name: p.clone() for name, p in kept.named_parameters()}
    for merge in (model.merge_adapter, experts.merge, model.merge_and_unload):
        with pytest.raises(RuntimeError, match=refused):
            merge(safe_merge=safe_merge)
    for name, p in kept.named_parameters():
        assert_same_bits(p, before[name])


def test_a_module_that_names_something_else_frozen_is_merged() -> None:
    """What is no module of this package is not asked by the name of an attribute."""
    layer = torch.nn.Linear(32, 32)
    layer._frozen = True
    config = config_of(["layer.weight"], target_modules=[])
    model = peft.get_peft_model(torch.nn.ModuleDict({"layer": layer}), config)
    randomize(model)
    before = layer.weight.clone()
    assert not torch.equal(model.merge_and_unload()["layer"].weight, before)


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_a_checkpoint_in_fp8_stays(weights: Any, tmp_path: Path) -> None:
    """Linear layers too, to which PEFT would add without their scales."""
    model = from_fp8_checkpoint(make_fp8_checkpoint(tmp_path))
    model = grouped(model, config_of(), Float8BlockScaling(), weights, order="convert first")
    assert_stays(model, IN_FP8)
    model.add_adapter("linear", peft.LoraConfig(target_modules=["q_proj"]))
    model.set_adapter("linear")
    with pytest.raises(ValueError, match=r"^merge: \S+q_proj is in FP8"):
        model.merge_adapter()


def test_sharded_weights_stay() -> None:
    model = grouped(model_of(), config_of())
    with one_process():
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        experts = model.base_model.model.model.layers[0].mlp.experts
        for merge in (model.merge_adapter, experts.merge):
            with pytest.raises(ValueError, match=r"^merge: \S+ is sharded: save the adapter"):
                merge()
