# SPDX-License-Identifier: Apache-2.0
"""What the clients' tests share. They are skipped where a client is not installed: make clients.

They run where no GPU is used, also on a machine that has one.
"""

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from grouped_linear import Float8BlockScaling, GroupedMLP, convert

VOCABULARY = 64


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class TinyModel(nn.Module):
    """A model of no library, whose experts are frozen in FP8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = GroupedMLP(4, 32, 64, recipe=Float8BlockScaling(), weights="both")
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        x = self.embedding(input_ids)
        x = x + self.experts(x, *self.router(x).softmax(dim=-1).topk(2))
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.mT, input_ids), "logits": logits}


@pytest.fixture
def tiny() -> type[TinyModel]:
    return TinyModel


def mixtral() -> Any:
    hugging_face = importlib.import_module("support.hugging_face")
    integration = importlib.import_module("grouped_linear.integrations.transformers")
    integration.register("grouped_linear_fp8", Float8BlockScaling())
    torch.manual_seed(0)
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    model = hugging_face.tiny("mixtral", **sizes, num_local_experts=4)
    model.set_experts_implementation("grouped_linear_fp8")
    return model


@pytest.fixture
def plain_mixtral() -> Any:
    return mixtral()


@pytest.fixture
def quantized_mixtral() -> Any:
    model = mixtral()
    convert(model, weights="fp8")
    return model


@pytest.fixture
def dataset() -> list[dict[str, Any]]:
    ids = torch.randint(VOCABULARY, (8, 12))
    return [{"input_ids": row, "labels": row} for row in ids]
