# SPDX-License-Identifier: Apache-2.0
"""The benchmarks and the example of fine-tuning with PEFT: rows and losses, at tiny sizes."""

import importlib.util
import re
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

pytest.importorskip("peft")

from benchmarks import bench_lora, finetune_peers, lora_losses
from support.documents import ROOT


@pytest.fixture
def fp8_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' grouped product in FP8, which is for GPUs, in BF16."""
    from transformers.integrations import finegrained_fp8, moe

    def matmul_grouped(
        x: Tensor, w: Tensor, scale: Tensor, *, offsets: Tensor, block_size: Any, **_: Any
    ) -> Tensor:
        w = finegrained_fp8._dequantize_fp8_weight(w, scale, block_size, x.dtype)
        return moe._grouped_mm(x, w.mT, offs=offsets)

    kernels: Any = ModuleType("finegrained_fp8")
    kernels.matmul_2d = kernels.matmul_batched = None
    kernels.matmul_grouped = matmul_grouped
    monkeypatch.setitem(sys.modules, "finegrained_fp8", kernels)


@pytest.mark.usefixtures("fp8_kernels")
@pytest.mark.parametrize("model", ["qwen3_tiny", "gpt_oss_tiny"])
def test_rows_of_a_step(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_lora, "VOCABULARY", 64)
    sizes = ["--layers", "1", "--batch", "1", "--context", "8", "--rounds", "1"]
    options = bench_lora.parser().parse_args(["--device", "cpu", "--model", model, *sizes])
    of_model = bench_lora.MODELS[model]
    every = of_model.weights + of_model.others
    rows = {}
    for weights in every:
        name = f"{bench_lora.EXPERTS}: {weights}"
        (rows[weights],) = bench_lora.measure(options, name, nullcontext())
    for weights, row in rows.items():
        assert row.step > 0, row
        assert row.first_loss == pytest.approx(rows[bench_lora.PEFT].first_loss, rel=3e-3)
        assert row.last_loss < row.first_loss
        # transformers' FP8 experts give their weights no gradient, and PEFT's factors lie in these.
        no_gradient = "4 of 12 factors get no gradient" if weights == bench_lora.PEFT_FP8 else ""
        assert row.note == no_gradient
    page = bench_lora.page([*rows.values()], options)
    assert all(f"| {weights} " in page for weights in every)
    if bench_lora.PEFT_FP8 in every:
        assert "- PEFT, FP8: 4 of 12 factors get no gradient." in page
    bench_lora.plot([rows[w] for w in of_model.weights], str(tmp_path / "rows.png"))


@pytest.mark.usefixtures("fp8_kernels")
def test_an_adapters_effect_over_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT adds B A to e4m3 numbers, which their scales then make small: docs/fine_tuning.md."""
    monkeypatch.setattr(bench_lora, "VOCABULARY", 64)
    sizes = ["--layers", "1", "--batch", "1", "--context", "8"]
    options = bench_lora.parser().parse_args(["--device=cpu", "--model=qwen3_tiny", *sizes])

    def effect(weights: str) -> Tensor:
        step = bench_lora.Step(options, bench_lora.EXPERTS, weights)
        of_experts = [
            p for name, p in step.forward.named_parameters() if re.search(r"experts.*lora_", name)
        ]
        logits = [step.forward(input_ids=step.tokens).logits]
        generator = torch.Generator().manual_seed(0)
        for p in of_experts:
            p.data.copy_(0.05 * torch.randn(p.shape, generator=generator))
        logits.append(step.forward(input_ids=step.tokens).logits)
        return (logits[1] - logits[0]).detach().float()

    expected = effect(bench_lora.PEFT)
    assert (effect(bench_lora.FP8) - expected).norm() < 0.1 * expected.norm()
    assert effect(bench_lora.PEFT_FP8).norm() < 0.01 * expected.norm()


def test_a_row_that_fails_says_why() -> None:
    options = bench_lora.parser().parse_args(["--device", "cpu", "--model", "qwen3_tiny"])
    options.rank = 0
    (row,) = bench_lora.measure(options, "attention: ours, BF16", nullcontext())
    assert row.note.startswith("ValueError: `r` should be a positive integer")
    assert "- ours, BF16: ValueError: `r` should be" in bench_lora.page([row], options)


@pytest.mark.parametrize("model", lora_losses.MODELS)
def test_losses_of_the_same_numbers(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed and one stream of tokens: weights in few bits begin where PEFT does."""
    sizes, weights = lora_losses.MODELS[model]
    tiny = {**sizes, "hidden_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    monkeypatch.setitem(lora_losses.MODELS, model, (tiny, weights))
    options = Namespace(model=model, device="cpu", steps=2)
    curves = [lora_losses.losses_of(one, options) for one in weights]
    for curve in curves:
        assert curve == pytest.approx(curves[0], rel=3e-3)


@pytest.mark.parametrize("model", finetune_peers.ROWS)
def test_rows_of_whole_models(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows begin with the same numbers and adapters, so they have the same losses."""
    for package in ("matplotlib", "tqdm"):
        pytest.importorskip(package)
    example = importlib.import_module("finetune_experts")
    small = example.GPT_OSS_SMALL if model == "gpt_oss_20b" else example.QWEN3_SMALL
    monkeypatch.setitem(example.MODELS, model, (small, 0, 0))
    sizes = ["--layers", "1", "--tokens", "16", "--steps", "3", "--device", "cpu"]
    options = finetune_peers.parser().parse_args(sizes)
    every = finetune_peers.ROWS[model]
    rows, first = [], None
    for weights in every:
        training = finetune_peers.Training(options, model, weights)
        adapters = [p.detach().clone() for p in training.adapters]
        first = first or adapters
        assert all(map(torch.equal, adapters, first))
        rows += finetune_peers.measure(options, f"{model}: {weights}", nullcontext())
    for row in rows:
        assert (row["layers"], row["note"]) == ("1", "")
        assert float(row["first loss"]) == pytest.approx(float(rows[0]["first loss"]), rel=1e-3)
        assert float(row["last loss"]) == pytest.approx(float(rows[0]["last loss"]), rel=1e-2)
    page = finetune_peers.page(rows, options)
    assert all(f"| {weights} " in page for weights in every)


@pytest.mark.parametrize("part", [1, 7, 64, 100])
def test_the_loss_of_parts_of_the_examples_vocabulary(part: int) -> None:
    """Loss and gradient are those of all logits, whatever parts the head comes in."""
    for package in ("matplotlib", "tqdm"):
        pytest.importorskip(package)
    path = ROOT / "examples" / "finetune_experts.py"
    spec: Any = importlib.util.spec_from_file_location("finetune_experts", path)
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.PART = part
    hidden, head = torch.randn(37, 32), torch.randn(64, 32)
    targets = torch.randint(64, (37,))
    results = []
    for dtype in (torch.float32, torch.float64):
        x = hidden.to(dtype).requires_grad_()
        if dtype == torch.float32:
            loss = example.CrossEntropy.apply(x, head, targets)
        else:
            loss = cross_entropy(x @ head.to(dtype).mT, targets, reduction="sum")
        results.append([loss, *torch.autograd.grad(loss / 3, x)])
    torch.testing.assert_close(*results, check_dtype=False, rtol=1e-5, atol=1e-5)
