# SPDX-License-Identifier: Apache-2.0
"""What a conversion needs beside the model: the layer that replaces one, and one expert.

A layer of DeepSeek-V3 has 256 experts of 3 x 7168 x 2048 parameters, 22.5 GB in bf16. Here are
fewer of them and smaller ones; the counts are exact, so they say what happens at any size.

E experts, H features of a token, F features of an expert.
"""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from grouped_linear import Float8BlockScaling, GroupedMLP, convert
from grouped_linear.integrations.checkpoints.quantizer import GroupedLinearConfig
from support.experts import Expert, GroupedExperts
from support.hugging_face import tiny
from support.tensors import BF16

E, H, F = 16, 256, 128
ONE_EXPERT = 3 * H * F * 2  # bytes


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that a call holds at a time, of those that it allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    assert profiled.profiler is not None
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_peak_bytes_sees_what_is_held() -> None:
    def double() -> None:
        a = torch.ones(1 << 20, dtype=torch.uint8)
        b = a + 1
        del a
        b + 1

    assert 2 << 20 <= peak_bytes(double) < 2.1 * (1 << 20)


@pytest.mark.parametrize(("weights", "nbytes"), [(None, 2), ("fp8", 4)])
def test_lists(weights: Any, nbytes: int) -> None:
    """A copy of the parameters is made, of which FP8 weights are then quantized."""
    experts = nn.ModuleList(Expert(H, F, dtype=BF16) for _ in range(E))
    recipe = Float8BlockScaling()
    peak = peak_bytes(lambda: GroupedMLP.from_experts(experts, recipe=recipe, weights=weights))
    size = nbytes * sum(p.numel() for p in experts.parameters())
    assert peak < size + 2 * ONE_EXPERT


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.filterwarnings("ignore:convert. 2 parameters were replaced")  # held on purpose
def test_experts_of_hugging_face(transposed: bool) -> None:
    """A weight that is stored transposed is copied, one at a time."""
    config = {"intermediate_size": F, "num_local_experts": E, "num_hidden_layers": 1}
    model = tiny("gpt_oss" if transposed else "mixtral", hidden_size=H, **config).to(BF16)
    parameters = list(model.parameters())
    peak = peak_bytes(lambda: convert(model, weights="mxfp4"))
    kept, copied = E * ONE_EXPERT * 17 // 64, E * 2 * H * F * 2 if transposed else 0
    assert peak < kept + max(copied, 2 * 2 * H * F * 4) + ONE_EXPERT  # its error takes two copies
    del parameters


@pytest.mark.filterwarnings("ignore:convert. 3 parameters were replaced")  # held on purpose
@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
def test_experts_in_one_module(weights: Any) -> None:
    """Frozen weights are quantized, and their error is taken of one expert after the other."""
    experts = GroupedExperts(E, H, F).to(BF16)
    parameters = list(experts.parameters())
    peak = peak_bytes(lambda: convert(experts, Float8BlockScaling(), weights=weights))
    size = E * ONE_EXPERT
    kept = {"fp8": size // 2, "mxfp4": size * 17 // 64}[weights]
    assert peak < kept + 4 * H * F * 4  # the error of one matrix, in float32
    del parameters


@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
@pytest.mark.parametrize("form", ["mixtral", "fused", "gpt_oss"])
def test_from_pretrained(form: str, weights: Any, tmp_path: Path) -> None:
    """Beside the result one expert is in memory in 16 bits, or a weight that a file has as one."""
    if (form, weights) == ("gpt_oss", "fp8"):
        pytest.skip("FP8 has no experts of GPT-OSS")
    config = {"intermediate_size": F, "num_local_experts": E, "num_hidden_layers": 2}
    family = "gpt_oss" if form == "gpt_oss" else "mixtral"
    config |= {"layer_types": None} if form == "gpt_oss" else {}
    tiny(family, hidden_size=H, **config).to(BF16).save_pretrained(
        tmp_path, save_original_format=form != "fused", max_shard_size="1MB"
    )
    options = {"quantization_config": GroupedLinearConfig(weights), "dtype": torch.float16}
    options["disable_mmap"] = True  # or the files, which are mapped, count
    load = partial(AutoModelForCausalLM.from_pretrained, tmp_path, **options)
    kept = sum(t.nbytes for t in load().state_dict().values())  # a first call imports, too
    gc.collect()  # what is freed later would count
    weight = E * 2 * H * F * 2  # gate_up_proj in 16 bits
    assert (
        kept < peak_bytes(load) < kept + (weight // 4 if form == "mixtral" else weight + ONE_EXPERT)
    )
