# SPDX-License-Identifier: Apache-2.0
"""The demo's training at a tiny size."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import demo
from benchmarks.moe_model import ModelSize
from grouped_linear import GroupedLinear
from support.programs import write_programs
from support.tensors import BF16, FP32

SIZE = ModelSize(layers=1, width=32, heads=2, context=16, experts=4, chosen=2, expert_width=48)
TINY = demo.Scale(SIZE, batch=4, steps=6, learning_rate=1e-2, text_bytes=1_000_000)


class Plain(GroupedLinear):
    """Neither a cache nor fused gradients."""

    def __init__(self, *args: Any, **options: Any) -> None:
        for name in ("cache_weights", "fuse_wgrad_accumulation"):
            assert options.pop(name, name == "cache_weights")
        super().__init__(*args, **options)

    def forward(self, x: Tensor, m_splits: Tensor, first: Any = None) -> Any:
        return super().forward(x, m_splits)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> demo.Text:
    return demo.Text(write_programs(tmp_path_factory.mktemp("text")), TINY.text_bytes)


@pytest.mark.parametrize("kind", [None, *(k for k in demo.RECIPES if k != demo.GATE_UP_IN_FP8)])
def test_micro_batches(
    kind: str | None, device: str, text: demo.Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses of one large batch, and bit for bit those without cache and main_grad."""
    # In BF16 without a recipe fused gradients alone are not rounded before they are added.
    dtype = BF16 if kind else FP32

    def losses(parts: int) -> list[float]:
        run = demo.Run(kind, dtype, "eager")
        demo.train(run, replace(TINY, micro_batches=parts), text, torch.device(device), seed=0)
        return run.losses

    whole, in_parts = losses(1), losses(2)
    assert whole[-1] < whole[0] - 0.05
    # Columns are quantized in other blocks, and experts are balanced in each part.
    assert in_parts == pytest.approx(whole, rel=1e-2)
    monkeypatch.setattr(demo, "GroupedLinear", Plain)
    assert losses(2) == in_parts


def test_other_backwards_learn_as_bf16_does(text: demo.Text) -> None:
    """wgrad in BF16, and gate_up saved in FP8: as near the losses without FP8 as FP8's wgrad is."""
    losses = {}
    for kind in (None, "block", "bf16_wgrad", demo.GATE_UP_IN_FP8):
        run = demo.Run(kind, BF16, "eager")
        demo.train(run, replace(TINY, steps=30), text, torch.device("cpu"), seed=0)
        losses[kind] = torch.tensor(run.losses)
    bf16 = losses.pop(None)
    assert bf16[-10:].mean() < bf16[0] - 1.5
    for of_recipe in losses.values():
        # Two seeds differ by 0.02 to 0.2.
        torch.testing.assert_close(of_recipe[-10:].mean(), bf16[-10:].mean(), rtol=0.0, atol=0.04)
