"""``python -m grouped_linear --selftest``: it passes, and finds a fault in an op and names it."""

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_linear.selftest import calls, check, command, speed
from grouped_linear.selftest.calls import Call, Near
from support.devices import needs_gpu
from support.ops import OPS

Fault = Callable[[Any, int], None]  # of what an op returned, in its nth call


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(command, "report", lambda: "report")
    monkeypatch.setattr(command, "devices", lambda: [command.CPU])


@pytest.fixture(scope="module")
def every_call() -> list[Call]:
    torch.manual_seed(0)
    return calls.every_call()


def test_passes(every_call: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    called = {made.op for made in every_call}
    assert called <= set(OPS)
    assert command.main(every_call) == 0
    said = capsys.readouterr().out
    assert said.startswith("report\n")
    assert "nothing failed" in said
    assert "FAIL" not in said
    assert said.endswith(f"{command.ASK}\n")
    for name in (*called, "fprop", "dgrad", "wgrad"):
        assert f"\n  {name} " in said


def one_row_is_off(y: Tensor, n: int) -> None:
    y[1] *= 1.05


def the_tail_is_not_zero(y: Tensor, n: int) -> None:
    y[-1, 0] = 1e-6


def one_sign_is_off(quantized: tuple[Tensor, ...], n: int) -> None:
    quantized[0].view(torch.uint8).flatten()[:1] ^= 0x80


def the_second_call_differs(y: Tensor, n: int) -> None:
    y[0, 0] += n % 2 * y[0, 0].abs() * 2.0**-8


def nothing_is_written(y: Tensor, n: int) -> None:
    y.fill_(torch.nan)


def it_raises(y: Any, n: int) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")


@pytest.mark.parametrize(
    ("op", "fault", "sentence"),
    [
        ("grouped_mm", one_row_is_off, "numbers are too far from float64"),
        ("swiglu", the_tail_is_not_zero, "for 0, where 0 is allowed"),
        ("quantize_weight", one_sign_is_off, "1 of 248832 numbers are too far from float64"),
        ("group_quantize", one_sign_is_off, "1 of 65376 numbers are too far from float64"),
        ("grouped_scaled_mm", the_second_call_differs, "the same call in poisoned memory: 1 of"),
        ("grouped_mm_wgrad", nothing_is_written, "too far from float64: nan for"),
        ("gather_sum", it_raises, "CUDA error: an illegal memory access was encountered\n"),
    ],
)
def test_names_the_op_with_a_fault(
    op: str,
    fault: Fault,
    sentence: str,
    every_call: list[Call],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right, count = check.call, 0

    def call(name: str, arguments: dict[str, Any]) -> Any:
        nonlocal count
        returned = right(name, arguments)
        if name == op:
            fault(returned, count)
            count += 1
        return returned

    monkeypatch.setattr(check, "call", call)
    monkeypatch.setattr(command, "speeds_on", lambda device: [])
    assert command.main([made for made in every_call if made.op in (op, "gather_dot")]) == 1
    said = capsys.readouterr().out
    assert f"1 FAILED: {op} on cpu" in said
    assert sentence in said


def test_other_numbers_than_the_cpu_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is within its bound, as SwiGLU on a GPU whose reciprocals round in another way."""
    right = torch.ones(2, 3)

    def numbers_of(made: Call, device: torch.device, poison: bool = False) -> list[Near]:
        off = right.nextafter(torch.tensor(2.0)) if device.type == "meta" else right
        return [Near(off, right, torch.full((2, 3), 0.1))]

    monkeypatch.setattr(check, "numbers_of", numbers_of)
    verdict = check.Verdict("swiglu")
    made = Call("swiglu", {}, list)
    check.check(made, command.CPU, verdict)
    assert not verdict.failures
    check.check(made, torch.device("meta"), verdict)
    assert verdict.failures == ["result 0: unlike the CPU's: 6 of 6 numbers differ"]


def test_command_runs_the_selftest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["grouped_linear", "--selftest"])
    monkeypatch.setattr(command, "main", lambda: 1)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("grouped_linear", run_name="__main__")
    assert stopped.value.code == 1


@needs_gpu
def test_passes_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "devices", lambda: [torch.device("cuda")])
    assert command.main() == 0, capsys.readouterr().out
    assert "one CUDA graph, other group sizes: ok" in capsys.readouterr().out
