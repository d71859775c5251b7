# SPDX-License-Identifier: Apache-2.0
"""PEFT's merge of adapters into experts' weights, and its refusal where these are in FP8."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from grouped_linear import Float8BlockScaling, GroupedMLP, convert
from support.commands import run
from support.compare import assert_same_bits, bits
from support.documents import ROOT

pytest.importorskip("peft")
import peft

from grouped_linear.integrations.peft import ParamWrapper
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


def test_frozen_weights_stay_under_peft_alone() -> None:
    """Without use_grouped_adapters, where its safe merge would add to bytes."""
    model = model_of()
    convert(model, weights="fp8")
    model = of_peft(model)
    assert_stays(model, IN_FP8)


def test_mixed_models_stay() -> None:
    """Of linear layers as well, which PEFT merges first."""
    model = model_of()
    convert(model, weights="fp8")
    model = peft.get_peft_model(model, config_of(), mixed=True)
    randomize(model)
    before = {name: bits(t).clone() for name, t in model.state_dict().items()}
    for merge in (model.base_model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=IN_FP8):
            merge()
    for name, t in model.state_dict().items():
        assert_same_bits(bits(t), before[name])


def test_frozen_layers_stay_under_peft() -> None:
    """Adapters that stand before the weights are frozen, and a layer of this package."""
    layer = GroupedMLP(2, 32, 32, recipe=Float8BlockScaling(), weights="fp8")
    model = torch.nn.ModuleDict({"experts": layer})
    config = config_of(["experts.down_proj"], target_modules=[])
    model = peft.get_peft_model(model, config)
    before = layer.down_proj.clone()
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=IN_FP8):
            merge(safe_merge=True)
    assert torch.equal(layer.down_proj, before)


def test_a_module_that_names_something_else_frozen_is_merged() -> None:
    """What is no module of this package is not asked by the name of an attribute."""
    layer = torch.nn.Linear(32, 32)
    layer._frozen = True
    config = config_of(["layer.weight"], target_modules=[])
    model = peft.get_peft_model(torch.nn.ModuleDict({"layer": layer}), config)
    randomize(model)
    before = layer.weight.clone()
    assert not torch.equal(model.merge_and_unload()["layer"].weight, before)


ALONE = """
import peft
from torch.nn.init import normal_

from grouped_linear import convert
from support.hugging_face import tiny

peft.__version__ = "0.20.0"  # use_grouped_adapters takes newer ones
model = tiny("mixtral")
parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
adapted = peft.get_peft_model(model, peft.LoraConfig(target_parameters=parameters))
for name, p in adapted.named_parameters():
    if ".lora_" in name:
        normal_(p)
convert(model.model.layers[0].mlp.experts.get_base_layer(), weights="fp8")
try:
    adapted.merge_adapter(safe_merge=True)
except ValueError as error:
    print(error)
"""


LATER = """
import sys

import torch
from grouped_linear import GroupedMLP

model = torch.nn.ModuleDict({"experts": GroupedMLP(2, 32, 32, weights="mxfp4")})
assert "peft" not in sys.modules
import peft

config = peft.LoraConfig(target_modules=[], target_parameters=["experts.down_proj"])
adapted = peft.get_peft_model(model, config)
try:
    adapted.merge_and_unload(safe_merge=True)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("script", [ALONE, LATER], ids=["converted alone", "PEFT imported later"])
def test_weights_that_peft_did_not_see_get_frozen_stay(script: str) -> None:
    """convert does not see a wrapper around the module that it gets; of an older PEFT, too."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    said = run([sys.executable, "-c", script], check=True, env=env).stdout
    assert re.search(IN_FP8.replace("FP8", "(FP8|MXFP4)"), said)


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
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        experts = model.base_model.model.model.layers[0].mlp.experts
        for merge in (model.merge_adapter, experts.merge):
            with pytest.raises(ValueError, match=r"^merge: \S+ is sharded: save the adapter"):
                merge()
    finally:
        dist.destroy_process_group()
