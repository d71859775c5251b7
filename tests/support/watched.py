# SPDX-License-Identifier: Apache-2.0
"""Converted models that tools look at: torchtitan's experts and a small Mixtral."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grouped_linear import Float8BlockScaling, Recipe, convert

COUNTS = (16, 0, 140, 2)  # rows of each of four experts


class Layers(nn.Module):
    """Two layers of experts [4, ...] of 128 features, 144 inside."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(experts(4, 128, 144) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, torch.tensor(COUNTS))
        return x


def layers(experts: Any, recipe: Recipe | None) -> Any:
    """Converted experts of torchtitan, and their rows."""
    torch.manual_seed(0)
    model = Layers(experts)
    convert(model, recipe)
    return model, torch.randn(sum(COUNTS), 128, requires_grad=True)


def mixtral(recipes: Any = None, **sizes: Any) -> Any:
    """A small Mixtral in FP8; ``recipes`` by patterns."""
    pytest.importorskip("transformers", reason="needs transformers")
    from support.hugging_face import tiny

    torch.manual_seed(0)
    model = tiny("mixtral", **{"num_hidden_layers": 2} | sizes)
    convert(model, Float8BlockScaling(), recipes=recipes)
    return model


def loss_of(model: Any) -> Tensor:
    """Of 40 tokens."""
    tokens = torch.arange(40).view(2, 20)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss
