"""The benchmark of compiled and eager steps runs: every kind of case, every way to fail."""

import math
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import bench_host, front_page
from benchmarks import compiled_vs_eager as bench
from benchmarks import step_cases as cases
from benchmarks.alternatives import TorchGroupedLinear
from benchmarks.moe_model import ModelSize
from benchmarks.shapes import Shape

SIZE = ModelSize(layers=1, width=32, heads=2, context=8, experts=4, chosen=2, expert_width=16)
LAYER = cases.LayerCase(Shape("layer", E=3, m=8, N=48, K=32))
BLOCK = cases.BlockCase("block", 24, SIZE)
MODEL = cases.ModelCase("model", 2, SIZE)
CPU = torch.device("cpu")


@pytest.mark.parametrize("case", [LAYER, BLOCK, MODEL], ids=lambda case: case.kind)
def test_every_implementation_agrees(case: cases.Case) -> None:
    """A candidate whose result is not the others' has a failure for a row."""
    candidates = cases.candidates_for(cases.IMPLEMENTATIONS, cases.RECIPES, ["eager"])
    rows = bench.measure(case, candidates, CPU, rounds=2, deadline=math.inf)
    assert [row.candidate for row in rows] == candidates
    for row in rows:
        assert row.failure is None, row
        assert row.microseconds is not None
        assert row.recompiles is row.compile_seconds is row.share is None  # nothing is compiled


@pytest.mark.parametrize("work", ["training", "token"])
def test_models_of_hugging_face(work: str) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    (case,) = cases.chosen_cases([f"hf_tiny_{work}"], CPU, quick=False)
    candidates = cases.candidates_for(cases.IMPLEMENTATIONS, ["block", "own"], ["eager"], True)
    for row in bench.measure(case, candidates, CPU, rounds=2, deadline=math.inf):
        assert row.failure is None, row


class Tripled(TorchGroupedLinear):
    def forward(self, x_TK: Tensor, m_splits_E: Tensor) -> Tensor:
        return 3 * super().forward(x_TK, m_splits_E)


def test_failures_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: cases.LayerCase, candidate: cases.Candidate) -> torch.nn.Module:
        if candidate.implementation == "loop":
            raise ValueError("a reason\nand more")
        if candidate.precision == "block":
            return Tripled(self.shape.E, self.shape.K, self.shape.N)
        return make(self, candidate)

    make = cases.LayerCase.module
    monkeypatch.setattr(cases.LayerCase, "module", broken)
    candidates = cases.candidates_for(["ours", "loop"], ["block"], ["eager"])
    good, tripled, broke = bench.measure(LAYER, candidates, CPU, rounds=2, deadline=math.inf)
    assert good.failure is None
    assert tripled.failure == "its result is 2 away from the first candidate's"
    assert broke.failure == "ValueError: a reason"
    late = bench.measure(LAYER, candidates, CPU, rounds=2, deadline=time.monotonic())
    assert {row.failure for row in late} == {"no time was left to prepare it"}


def test_writes_table_numbers_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "CPU_CASES", (LAYER, BLOCK))
    options = [
        "--device=cpu",
        "--rounds=2",
        "--recipes",
        "block",
        "--cached",
        f"--output-dir={tmp_path}",
    ]
    first = bench.main([*options, "--modes", "compiled", "one graph", "--cases", "layer"])
    assert first[0].candidate == cases.BASELINE
    for row in first:
        if row.candidate.mode == "compiled":
            assert row.failure is None, row
            assert row.share is not None
            assert row.compile_seconds is not None
            looped = row.candidate.implementation == "loop"
            assert row.graph_breaks is not None
            assert bool(row.graph_breaks) == looped
            assert row.recompiles == 0 or looped
        else:
            assert row.failure == "a CUDA graph holds no step of a CPU"
            assert row.microseconds is None

    capsys.readouterr()
    both = bench.main([*options, "--modes", "eager", "--cases", "block", "--merge"])
    assert both[: len(first)] == first  # through JSON and back
    assert len(both) == len(first) + 5
    stem = "compiled_vs_eager_cpu"
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {f"{stem}.json", f"{stem}.md", f"{stem}.png"}
    assert bench.table(both) in (tmp_path / f"{stem}.md").read_text()
    assert bench.table(both) in capsys.readouterr().out
    for row in both:
        assert f"| {row.candidate} " in bench.table(both)
        assert (row.failure or "") in bench.table(both)


def test_host_time_of_every_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--rounds", "2", "--no-write"]
    monkeypatch.setattr("sys.argv", ["bench_host", *options])
    multithreaded = torch.autograd.is_multithreading_enabled()
    bench_host.main()
    assert torch.autograd.is_multithreading_enabled() == multithreaded
    printed = capsys.readouterr().out
    assert "command: python -m benchmarks.bench_host --device cpu --rounds 2" in printed
    for layer in ("nn.Linear", "torch grouped_mm", *(f"recipe {name}" for name in cases.RECIPES)):
        assert layer in printed


def test_front_page_draws_what_is_recorded(tmp_path: Path) -> None:
    names, rows = front_page.layers("nvidia_h100_80gb_hbm3")
    assert {layer for _, layer in rows} >= set(front_page.LAYERS)
    front_page.plot(names, rows, "a title", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
