# SPDX-License-Identifier: Apache-2.0
"""The benchmark of compiled and eager steps runs: every kind of case, every way to fail."""

import math
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import (
    alternatives,
    bench_decode,
    bench_host,
    bench_low_rank,
    bench_mxfp4,
    bench_portable,
    bench_swiglu_gemm,
    front_page,
    parallel_model,
    plots,
    timing,
)
from benchmarks import compiled_vs_eager as bench
from benchmarks import step_cases as cases
from benchmarks.alternatives import TorchGroupedLinear
from benchmarks.moe_model import ModelSize
from benchmarks.shapes import Shape
from grouped_linear import GroupedMLP, ops

SIZE = ModelSize(layers=1, width=32, heads=2, context=8, experts=4, chosen=2, expert_width=16)
LAYER = cases.LayerCase(Shape("tiny", E=3, m=8, N=48, K=32))
BLOCK = cases.BlockCase("cpu_block", 24, SIZE)
MODEL = cases.ModelCase("cpu_transformer", 2, SIZE)
CPU = torch.device("cpu")


@pytest.mark.parametrize("case", [LAYER, MODEL], ids=lambda case: case.kind)
def test_every_implementation_agrees(case: cases.Case) -> None:
    """A candidate whose result is not the others' has a failure for a row."""
    candidates = cases.candidates_for(cases.IMPLEMENTATIONS, cases.RECIPES, ["eager"])
    rows = bench.measure(case, candidates, CPU, rounds=2, deadline=math.inf)
    assert [row.candidate for row in rows] == candidates
    for row in rows:
        assert row.failure is None, row
        assert row.microseconds is not None
        assert row.recompiles is row.compile_seconds is row.share is None  # nothing is compiled


@pytest.mark.parametrize("work", ["step", "token"])
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
    first = bench.main([*options, "--modes", "compiled", "one graph", "--cases", "tiny"])
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
    both = bench.main([*options, "--modes", "eager", "--cases", "cpu_block", "--merge"])
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
    pytest.importorskip("transformers", minversion="5.23")
    options = ["--device", "cpu", "--rounds", "2", "--no-write", "--hugging-face"]
    monkeypatch.setattr("sys.argv", ["bench_host", *options])
    monkeypatch.setattr(bench_host, "STEPS", 2)
    multithreaded = torch.autograd.is_multithreading_enabled()
    bench_host.main()
    assert torch.autograd.is_multithreading_enabled() == multithreaded
    printed = capsys.readouterr().out
    assert "command: python -m benchmarks.bench_host --device cpu --rounds 2" in printed
    experts = "Hugging Face experts, frozen, weights fp8"
    recipes = (f"recipe {name}" for name in cases.RECIPES)
    for layer in ("nn.Linear", "torch grouped_mm", *recipes, experts):
        assert layer in printed


def test_pictures_name_every_case() -> None:
    recorded = (cases.GPU_CASES, cases.CPU_CASES, cases.HUGGING_FACE_CASES)
    names = {case.name for group in recorded for case in group}
    for name in (*names, *front_page.MODELS, *parallel_model.SHAPES):
        assert "_" not in plots.label(name), name
    assert plots.label("hf_qwen3_30b_step") == plots.label("qwen3_30b_like") == "Qwen3-30B-A3B"
    assert plots.label("dsv3_ep32_down") == "DeepSeek-V3, 8 of 256 experts, down"


def test_pictures_are_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is recorded is drawn without measuring it, a picture for each device."""
    recorded = sorted(
        timing.RESULTS.glob("compiled_vs_eager_*.json"), key=lambda p: p.stat().st_size
    )
    for path in recorded[:2]:  # a picture takes seconds
        (tmp_path / path.name).write_bytes(path.read_bytes())
    bench.main(["--plot", f"--output-dir={tmp_path}"])
    printed = capsys.readouterr().out
    for path in tmp_path.glob("*.json"):
        assert path.with_suffix(".png").stat().st_size > 10_000
        assert str(path.with_suffix(".png")) in printed


def test_front_page_draws_what_is_recorded(tmp_path: Path) -> None:
    rows = front_page.steps("nvidia_h200")
    assert {layer for _, layer in rows} >= set(front_page.LAYERS)
    front_page.plot(rows, "a title", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


MMA_LIMIT = """\
bf16, register only, 8 warps of 64 x 64              best  652.1  last  640.0 TFLOP/s  no error
bf16, ldmatrix                                       best  639.0  last  630.2 TFLOP/s  no error
bf16, ldmatrix and copies                            best  532.0  last  519.0 TFLOP/s  no error
bf16, ldmatrix, copies and barriers                  best  519.0  last  508.0 TFLOP/s  no error
fp8, register only, 8 warps of 32 x 64               best  546.0  last  546.0 TFLOP/s  no error
fp8, ldmatrix and copies                             best  486.0  last  479.0 TFLOP/s  no error
"""


def test_portable_gemms_beside_limits() -> None:
    limits = bench_portable.limits_of(MMA_LIMIT)
    alone, fed = "mma alone", "mma fed by ldmatrix and cp.async"
    assert limits == {"bf16": {alone: 652.1, fed: 532.0}, "fp8": {alone: 546.0, fed: 486.0}}
    with pytest.raises(RuntimeError, match="no kernel image"):
        bench_portable.limits_of(MMA_LIMIT.replace("no error", "no kernel image", 1))

    def hopper(case: object) -> timing.Spread:
        return timing.Spread(4.0, 2.0, 8.0)

    tiny = Shape("tiny", E=3, m=8, N=64, K=64)
    for dtype in bench_portable.DTYPES:
        report = timing.Report("bench_portable", "?", "TFLOP/s", CPU, rounds=2)
        bench_portable.measure(tiny, "even", "fprop", dtype, report, {}, hopper)
        copy, ours, *_, hoppers = report.rows
        assert copy.candidate == "copy of the weights' bytes"
        assert ours.candidate == bench_portable.OURS
        assert hoppers.candidate == bench_portable.HOPPERS
        us = copy.timing.microseconds.median
        share = hoppers.timing.share
        assert [share.median, share.low, share.high] == [us / 4, us / 8, us / 2]
    large = tiny._replace(m=64)
    report = timing.Report("bench_portable", "?", "TFLOP/s", CPU, rounds=2)
    bench_portable.measure(large, "even", "wgrad", "bf16", report, limits, None)
    roof, second, ours, *_ = report.rows
    assert [roof.candidate, second.candidate, ours.candidate] == [alone, fed, bench_portable.OURS]
    assert roof.timing.microseconds.median == pytest.approx(1e-6 * roof.work / 652.1)
    assert second.timing.share.median == pytest.approx(532.0 / 652.1)


def test_one_kernel_beside_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = bench_swiglu_gemm.Layer(T=10, H=32, F=64, E=3, C=2)
    report, of_copies = bench_swiglu_gemm.reports(CPU, rounds=2)
    bench_swiglu_gemm.measure("tiny", layer, CPU, report, of_copies)
    cases = {(row.case["gemm"], row.case["form"]) for row in report.rows}
    assert cases == {(g, f) for g in ("gate_up", "down_dgrad") for f in ("plain", "gpt_oss")}
    first = [row.candidate for row in report.rows[:6]]
    roofs = [bench_swiglu_gemm.DENSE, bench_swiglu_gemm.COPY]
    assert first == [
        *roofs,
        *bench_swiglu_gemm.gate_up(bench_swiglu_gemm.Operands(layer, "plain", CPU)),
    ]
    # 20 rows: x, 3 weights, gate, up and h; FLOPs of 128 sums of 32 products
    assert bench_swiglu_gemm.bytes_moved("gate_up", layer) == 2 * (640 + 3 * 128 * 32 + 20 * 192)
    assert report.rows[0].work == 2 * 20 * 128 * 32
    assert [row.candidate for row in of_copies.rows] == [roofs[1], "index", "scatter_rows"]
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["bench_swiglu_gemm"])
    for written in (report, of_copies):
        written.finish(write=True)
    assert capsys.readouterr().out.count("command: python -m benchmarks.bench_swiglu_gemm\n") == 2
    stems = {"bench_swiglu_gemm_cpu", "bench_swiglu_gemm_copies_cpu"}
    assert {path.stem for path in tmp_path.iterdir()} == stems
    with pytest.raises(SystemExit, match="gate_up: one kernel and two give different results"):
        bench_swiglu_gemm.check("gate_up", [torch.ones(2)], [torch.zeros(2)])


@pytest.mark.parametrize("operands", bench_low_rank.OPERANDS)
@pytest.mark.parametrize("gemm", bench_low_rank.GEMMS)
def test_a_second_product_beside_one_of_its_own(gemm: str, operands: str) -> None:
    report = timing.Report("bench_low_rank", "?", "TFLOP/s", CPU, rounds=2)
    bench_low_rank.measure(Shape("tiny", E=3, m=8, N=48, K=32), gemm, operands, 16, CPU, report)
    names = [bench_low_rank.ALONE, bench_low_rank.ONE, bench_low_rank.THREE]
    assert [row.candidate for row in report.rows] == names
    assert report.rows[0].work == 2 * 24 * 48 * 32
    with pytest.raises(SystemExit, match="one kernel and three give different results"):
        bench_low_rank.check(gemm, torch.ones(2), torch.zeros(2))


def test_mxfp4_beside_its_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_mxfp4.SIZES, "20b_gate_up", bench_mxfp4.Size(E=4, N=64, K=96))
    report, of_quantize = bench_mxfp4.reports(CPU, rounds=2)
    for operands in ("bf16", "fp8"):
        for gemm in ("fprop", "dgrad"):
            bench_mxfp4.measure("20b_gate_up", operands, gemm, CPU, report)
    for gemm in ("fprop", "dgrad"):
        bench_mxfp4.measure_few("20b_gate_up", gemm, 1, CPU, report)
    assert [row.candidate for row in report.rows[-3:]] == ["packed bytes", "bf16", "mxfp4"]
    bench_mxfp4.measure_quantize("20b_gate_up", CPU, of_quantize)
    names = ["copy", "quantize_mxfp4", "dequantize_mxfp4"]
    assert [row.candidate for row in of_quantize.rows] == names
    assert of_quantize.rows[0].work == 4 * 64 * 96 * (2 + 17 / 32)


def test_mxfp4_beside_unsloth(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in of its interface: blocks of 32 numbers, and rows of each expert."""

    def multiplied(x: Tensor, blocks: Tensor, scale: Tensor, counts: Tensor, t: bool) -> Tensor:
        w_ENK = ops.dequantize_mxfp4(blocks.flatten(-2), scale)
        return ops.grouped_mm(x, w_ENK.mT if t else w_ENK, counts.cumsum(0).int())

    monkeypatch.setitem(bench_mxfp4.SIZES, "20b_gate_up", bench_mxfp4.Size(E=4, N=64, K=96))
    report, _ = bench_mxfp4.reports(CPU, rounds=2)
    monkeypatch.setattr(alternatives, "unsloth_mxfp4", lambda device: multiplied)
    for gemm in ("fprop", "dgrad"):
        bench_mxfp4.measure("20b_gate_up", "bf16", gemm, CPU, report)
    assert [row.candidate for row in report.rows] == 2 * ["bf16", "mxfp4", "unsloth mxfp4"]


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_decode_beside_triton(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in of its interface: the layer's weights, their scales, rows by int32 experts."""

    def experts(x: Tensor, w1: Tensor, w2: Tensor, p: Tensor, ids: Tensor, **given: Any) -> Tensor:
        assert ids.dtype == torch.int32
        scales = [given.get(name, torch.ones(4, 2, 1)) for name in ("w1_scale", "w2_scale")]
        layer = GroupedMLP(4, 128, 128, dtype=torch.bfloat16, recipe=options.get("recipe"))
        for w, own, scale in zip((w1, w2), layer.parameters(), scales, strict=True):
            wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            own.data.copy_(w.float() * wide[:, : w.size(1)])
        y: Tensor = layer(x, p, ids)
        return y

    monkeypatch.setattr(alternatives, "sglang_experts", lambda: experts)
    options = bench_decode.FORMS[form][0]
    layer = GroupedMLP(4, 128, 128, dtype=torch.bfloat16, **options)
    x = torch.randn(8, 128, dtype=torch.bfloat16)
    given = (x, *torch.rand(8, 4).softmax(dim=-1).topk(2))
    y, triton = bench_decode.call_of(layer, given)(), bench_decode.triton_of(layer, given)()
    bench_decode.check(form, triton, y)
    with pytest.raises(ValueError, match="from ours"):
        bench_decode.check(form, triton * 1.2, y)


def test_sglang_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in: its experts read a server's settings and a group, so both are there first."""
    names = ("runtime_context", "layers.moe.moe_runner.triton_utils.fused_moe")
    context, experts = (types.ModuleType(f"sglang.srt.{name}") for name in names)
    done: list[Any] = []
    settings = types.SimpleNamespace(install=lambda: done.append("settings"))
    server = types.SimpleNamespace(override_server_args=lambda: settings)
    group = types.SimpleNamespace(override_permanently=lambda **given: done.append(given))
    context.__dict__.update(get_context=lambda: server, get_parallel=lambda: group)
    experts.__dict__.update(outplace_fused_experts="experts")
    for module in (context, experts):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert alternatives.sglang_experts.__wrapped__() == "experts"
    assert done == ["settings", {"tp_group": None}]


def test_decode_when_triton_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One token's call fails and another's is wrong: a line says so, and all our rows are there."""

    def experts(x: Tensor, *given: Any, **options: Any) -> Tensor:
        if len(x) == 1:
            raise ValueError("\nconfig namespace 'exec' not published\n")
        return x

    monkeypatch.setattr(alternatives, "sglang_experts", lambda: experts)
    monkeypatch.setattr(bench_decode, "find_spec", lambda package: True)
    monkeypatch.setattr(bench_decode, "DEVICE", CPU)
    monkeypatch.setattr(bench_decode, "COPIED", (1 << 20,))
    monkeypatch.setattr(bench_decode, "SIZES", {"tiny": bench_decode.Size(4, 128, 128, 2, {})})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(sys, "argv", ["bench_decode", "--forms", "bf16", "--tokens", "1", "2"])
    bench_decode.main()
    notes, rows = [], []
    for line in capsys.readouterr().out.splitlines():
        (rows if line.startswith("| tiny") else notes).append(line)
    assert [row.split(" | ")[1:3] for row in rows] == [["bf16", "1"], ["bf16", "2"]]
    failed = [note for note in notes if note.startswith("Triton left out of tiny, bf16, ")]
    assert len(failed) == 2
    assert failed[0].endswith("1 tokens: ValueError: config namespace 'exec' not published")
    assert failed[1].endswith("from ours")


def test_record_keeps_other_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows replace those whose first cells, as many as name a case, are the same."""
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    monkeypatch.setattr(timing, "slug", lambda device: "gpu")
    monkeypatch.setattr(timing, "machine", lambda device: [])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    for rows in (["abc", "abd", "bbe"], ["abf"]):
        timing.replace_rows("bench", ("layer", "form", "us"), [list(row) for row in rows], "", 2)
    kept = (tmp_path / "bench_gpu.csv").read_text().splitlines()
    assert kept == ["layer,form,us", "b,b,e", "a,b,f"]
    timing.replace_rows("bench", ("layer", "form", "us"), [list("acg")], "")
    assert (tmp_path / "bench_gpu.csv").read_text().splitlines()[1:] == ["b,b,e", "a,c,g"]


@pytest.mark.parametrize("package", ["sonicmoe", "sonic_moe"])
def test_packages_of_sonic_moe(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in of the interface that both have."""
    made, enums = types.ModuleType(package), types.ModuleType(f"{package}.enums")
    monkeypatch.setattr(made, "MoE", lambda *sizes, **given: (sizes, given), raising=False)
    activations = types.SimpleNamespace(SWIGLU="swiglu")
    monkeypatch.setattr(enums, "ActivationType", activations, raising=False)
    for module in (made, enums):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    layer: Any = alternatives.sonic_moe(package, 128, 8, 2048, 768)
    assert layer == ((128, 8, 2048, 768, "swiglu"), {"add_bias": False, "std": 0.02})


def test_one_kernel_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_swiglu_gemm", "--device", "cpu"])
    with pytest.raises(SystemExit, match="needs a GPU"):
        bench_swiglu_gemm.main()
    bench_swiglu_gemm.probe(CPU)
