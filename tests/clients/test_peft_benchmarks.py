"""The benchmarks of fine-tuning with PEFT: their rows and losses, at tiny sizes."""

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("peft")

from benchmarks import bench_lora, lora_losses


@pytest.mark.parametrize("model", ["qwen3_tiny", "gpt_oss_tiny"])
def test_rows_of_a_step(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_lora, "VOCABULARY", 64)
    sizes = ["--layers", "1", "--batch", "1", "--context", "8", "--rounds", "1"]
    options = bench_lora.parser().parse_args(["--device", "cpu", "--model", model, *sizes])
    of_model = bench_lora.MODELS[model]
    rows = []
    for weights in of_model.weights:
        rows += bench_lora.measure(options, f"{bench_lora.EXPERTS}: {weights}", nullcontext())
    assert [row.weights for row in rows] == [*of_model.weights]
    assert all(row.step > 0 for row in rows)
    assert f"| {rows[-1].weights} " in bench_lora.page(rows, options)
    bench_lora.plot(rows, str(tmp_path / "rows.png"))


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
