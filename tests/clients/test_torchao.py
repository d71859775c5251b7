# SPDX-License-Identifier: Apache-2.0
"""torchao's optimizers, which write weights by copy_, and experts that it has quantized."""

from typing import Any

import pytest
import torch
from torch import nn

from grouped_linear import Float8BlockScaling, convert
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from support.errors import sentence
from support.hugging_face import tiny
from support.tensors import BF16

optim = pytest.importorskip("torchao.optim")


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"])
def test_small_steps(name: str) -> None:
    """Weights in both precisions go where plain ones go."""
    means = []
    for make in (torch.clone, GroupedTensorWithMaster.quantize):
        p = nn.Parameter(make(torch.ones(1, 128, 128)))
        optimizer = getattr(optim, name)([p], lr=1e-3, weight_decay=0.0)
        for _ in range(40):
            p.grad = torch.ones(p.shape)
            optimizer.step()
        means.append(p.detach().mean().item())
    plain, with_master = means
    assert with_master == plain < 0.97


@pytest.mark.parametrize("weights", [None, "both", "fp8", "mxfp4"])
def test_quantized_experts_are_refused(weights: Any) -> None:
    """Their dtype is that of high precision, and the model goes on as torchao made it."""
    quantization = pytest.importorskip("torchao.quantization")
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2}
    model = tiny("mixtral", **sizes).to(BF16).eval()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            w = getattr(experts, name)
            holder = nn.Linear(w.size(2), w.size(1), bias=False)
            holder.weight = nn.Parameter(w.detach().flatten(0, 1))
            quantization.quantize_(holder, quantization.Int8WeightOnlyConfig(version=2))
            setattr(experts, name, nn.Parameter(holder.weight.detach(), requires_grad=False))
    classes = [type(module) for module in model.modules()]
    before = {name: id(p) for name, p in model.named_parameters()}
    refused = sentence(lambda: convert(model, Float8BlockScaling(), weights=weights))
    assert refused.startswith("convert: model.layers.0.mlp.experts: gate_up_proj is a torchao.")
    assert refused.endswith(
        "whose numbers no kernel here reads: convert the model before its "
        "experts are quantized, and choose weights= for few bits"
    )
    assert [type(module) for module in model.modules()] == classes
    assert {name: id(p) for name, p in model.named_parameters()} == before
